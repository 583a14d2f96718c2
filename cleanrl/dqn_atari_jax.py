"""DQN on Atari in JAX: how a teacher for QDagger is made when none is on the hub.

Mnih et al. (2015), Human-level control through deep reinforcement learning, with n-step returns as an option.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from cleanrl_utils.atari import AtariEnvs, Step
from cleanrl_utils.checks import check_args, check_memory, one_line_errors
from cleanrl_utils.convert import write_flax
from cleanrl_utils.device import available_jax_memory, check_jax_gradient, describe_jax, pick_jax_device
from cleanrl_utils.hub import check_upload_possible, upload_model
from cleanrl_utils.run import Run, parse_args

Params = dict[str, Any]
"""A Flax network's variables, {"params": {layer: {"kernel": …, "bias": …}}}"""


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    bf16: bool = True
    """if toggled, hidden layers compute in bfloat16 on a GPU or TPU; last layer and loss stay float32"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: str = "cleanRL"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """whether to write a video of one game at the end (see the `videos` folder)"""
    save_model: bool = False
    """whether to save the model into the `runs/{run_name}` folder"""
    upload_model: bool = False
    """whether to upload the saved model to the Hugging Face Hub"""
    hf_entity: str = ""
    """the user or organisation on the Hugging Face Hub; the token's owner when empty"""

    resume: str | None = None
    """the directory of a run to go on with, `runs/{run_name}`; its flags are taken over"""
    checkpoint_minutes: float = 10
    """minutes between checkpoints, which are also written after every phase and when stopped; 0 writes none at all"""
    max_minutes: float = 0
    """minutes after which the run stops as if told to, with exit code 0; 0 is no limit"""

    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or ALE/{Game}-v5"""
    repeat_action_probability: float | None = None
    """probability of a sticky action, per frame; by default what the id stands for: 0 for -v4, 0.25 for -v5"""
    total_timesteps: int = 10000000
    """environment steps (4 frames each) in all; when a resumed run is given more, epsilon falls over more of them"""
    learning_rate: float = 1e-4
    """the learning rate of Adam"""
    num_envs: int = 16
    """parallel games, with the same updates per step; fewer if other sizes are too small for 16 and it is not given"""
    buffer_size: int = 1000000
    """the replay's size in environment steps; 7.1 kB each"""
    gamma: float = 0.99
    """the discount factor"""
    n_step: int = 1
    """the number of rewards summed before bootstrapping"""
    tau: float = 1.0
    """the target network's update rate; 1 copies"""
    target_network_frequency: int = 1000
    """environment steps between updates of the target network"""
    batch_size: int = 32
    """transitions per update"""
    start_e: float = 1.0
    """epsilon at the start"""
    end_e: float = 0.01
    """epsilon in the end"""
    exploration_fraction: float = 0.10
    """the fraction of `total_timesteps` over which epsilon falls from `start_e` to `end_e`"""
    learning_starts: int = 80000
    """environment steps in the replay before the first update"""
    train_frequency: int = 4
    """environment steps per update"""
    eval_episodes: int = 10
    """whole games played at the end, at epsilon `end_e`"""


class QNetwork(nn.Module):
    """Q-network of Mnih et al. (2015). uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    num_actions: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.transpose(0, 2, 3, 1) / 255.0  # flax wants the channels last
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(channels, (size, size), stride, padding="VALID", dtype=self.dtype)(x))
        x = nn.relu(nn.Dense(512, dtype=self.dtype)(x.reshape(x.shape[0], -1)))
        # bfloat16, or the TF32 that a GPU makes of float32, would round away differences of actions.
        return nn.Dense(self.num_actions, dtype=jnp.float32, precision="highest")(x)


def first_params(network: nn.Module, key: jax.Array) -> Params:
    """A new network's variables, float32: kernels and biases uniform in ±1/√fan_in, as PyTorch's layers begin.

    (flax's biases begin as zeros.)
    """
    shapes = jax.eval_shape(network.init, key, np.zeros((1, 4, 84, 84), np.uint8))
    params = {}
    for layer, arrays in flatten_dict(shapes, is_leaf=lambda path, node: "kernel" in node).items():
        bound = math.prod(arrays["kernel"].shape[:-1]) ** -0.5
        for name, array in arrays.items():
            key, own_key = jax.random.split(key)
            params[(*layer, name)] = jax.random.uniform(own_key, array.shape, array.dtype, -bound, bound)
    return unflatten_dict(params)


def save_model(params: Params, path: Path) -> None:
    """Writes the variables as msgpack that ``flax.serialization.from_bytes`` reads."""
    write_flax(path, {key: np.asarray(value) for key, value in flatten_dict(params, sep="/").items()})


class Transitions(NamedTuple):
    """A ring of L environment steps of each of N environments, by slot: step t lies in slot t % L.

    Only the newest frame of an observation is stored; stacks of 4 are built when sampling.
    """

    frame: jax.Array
    """uint8 (L, N, 84, 84), the newest frame of what was observed"""
    action: jax.Array
    """uint8 (L, N), what was done then"""
    reward: jax.Array
    """float32 (L, N), what came of it, clipped to [−1, 1]"""
    terminated: jax.Array
    """bool (L, N), whether it cost a life or ended the game"""
    age: jax.Array
    """int32 (L, N), steps since the game's reset: where a stack of frames has to stop"""
    valid: jax.Array
    """bool (L, N), False for a game's final frame: its action was ignored and the next frame is of another game"""


class Batch(NamedTuple):
    """B transitions as the loss needs them."""

    observation: jax.Array
    """uint8 (B, 4, 84, 84)"""
    action: jax.Array
    """uint8 (B,)"""
    n_step_return: jax.Array
    """float32 (B,), Σ γᵏ r of the rewards before the bootstrap state"""
    bootstrap_observation: jax.Array
    """uint8 (B, 4, 84, 84)"""
    bootstrap_discount: jax.Array
    """float32 (B,), γᵐ, or 0 where the life or the game ended before"""


@functools.partial(jax.jit, donate_argnums=0)  # donated: written in place, not into a copy of gigabytes
def write_step(ring: Transitions, slot: int, step: Transitions) -> Transitions:
    """``ring`` with what is in ``slot`` replaced, of all environments; ``step`` has the shapes without L."""
    return jax.tree.map(lambda array, value: jax.lax.dynamic_update_index_in_dim(array, value, slot, 0), ring, step)


class Replay:
    """The last `buffer_size` environment steps: on the device, and what the host has to know of them."""

    BYTES_PER_STEP = 84 * 84 + 1 + 4 + 1 + 4 + 1

    def __init__(self, args: Args):
        self.length = args.buffer_size // args.num_envs
        self.steps_added = 0
        self.age = np.zeros(args.num_envs, np.int32)
        self.n_step = args.n_step
        shape = (self.length, args.num_envs)
        self.ring = Transitions(
            frame=jnp.zeros((*shape, 84, 84), jnp.uint8),
            action=jnp.zeros(shape, jnp.uint8),
            reward=jnp.zeros(shape, jnp.float32),
            terminated=jnp.zeros(shape, bool),
            age=jnp.zeros(shape, jnp.int32),
            valid=jnp.zeros(shape, bool),
        )

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step) -> None:
        """Appends a step of each environment: what was observed and done, and what came of it."""
        values = Transitions(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(step.reward, -1, 1).astype(np.float32),
            terminated=step.terminated,
            age=self.age,
            valid=~step.reset,
        )
        self.ring = write_step(self.ring, self.steps_added % self.length, values)
        self.age = np.where(step.reset, 0, self.age + 1).astype(np.int32)
        self.steps_added += 1

    def end_games(self) -> None:
        """Ends all games where they are, as truncated: what followed the last step was lost when the run stopped."""
        valid = self.ring.valid.at[(self.steps_added - 1) % self.length].set(False)
        self.ring = self.ring._replace(valid=valid)
        self.age = np.zeros_like(self.age)

    @property
    def window(self) -> tuple[int, int]:
        """The steps [low, high) that may be sampled: bootstrap state added, stack's oldest frame not overwritten."""
        low = 0 if self.steps_added <= self.length else self.steps_added - self.length + 3
        return low, max(low, self.steps_added - self.n_step)


def sample(ring: Transitions, key: jax.Array, low: int, high: int, args: Args) -> Batch:
    """A batch drawn uniformly, with replacement, from the valid transitions of steps [low, high) of all games."""
    length, num_envs = ring.valid.shape
    t_key, env_key = jax.random.split(key)
    # Final frames are no transitions and are drawn again: eight tries at once, for the shapes are fixed.
    t = jax.random.randint(t_key, (8, args.batch_size), low, high)
    env = jax.random.randint(env_key, (8, args.batch_size), 0, num_envs)
    first = ring.valid[t % length, env].argmax(axis=0)[None]
    t, env = jnp.take_along_axis(t, first, 0)[0], jnp.take_along_axis(env, first, 0)[0]
    return transitions(ring, t, env, args.n_step, args.gamma)


def transitions(ring: Transitions, t: jax.Array, env: jax.Array, n_step: int, gamma: float) -> Batch:
    """The transitions from step ``t``, integer (B,), of environment ``env``, integer (B,)."""
    length = ring.valid.shape[0]

    def stack(t: jax.Array) -> jax.Array:
        """The observations at step ``t``, uint8 (B, 4, 84, 84); zero where a frame is of before the game's reset."""
        ago = jnp.arange(3, -1, -1)
        in_game = ring.age[t % length, env][:, None] >= ago
        return ring.frame[(t[:, None] - ago) % length, env[:, None]] * in_game[:, :, None, None]

    # The n-step return ends with a life, without a bootstrap, and at a truncated game's final frame, with one.
    n_step_return, m, discount = jnp.zeros(t.shape), jnp.zeros_like(t), jnp.ones(t.shape)
    playing = jnp.ones(t.shape, bool)
    for k in range(n_step):
        slot = (t + k) % length
        playing = playing & ring.valid[slot, env]
        n_step_return = n_step_return + playing * gamma**k * ring.reward[slot, env]
        discount = discount * jnp.where(playing, gamma * ~ring.terminated[slot, env], 1.0)
        m = m + playing
        playing = playing & ~ring.terminated[slot, env]
    slot = t % length
    return Batch(stack(t), ring.action[slot, env], n_step_return, stack(t + m), discount)


class Losses(NamedTuple):
    """The loss, a scalar, and the Q-values it is made of."""

    loss: jax.Array
    q_values: jax.Array
    """float32 (B,), of the actions taken"""


def dqn_loss(params: Params, target_params: Params, batch: Batch, apply: Callable) -> tuple[jax.Array, Losses]:
    """Mean squared TD error (Mnih et al., 2015, eq. 2): mean (Q(s,a) − y)², y = Σ γᵏ r + γᵐ max Q'(s',·)."""
    bootstrap = apply(target_params, batch.bootstrap_observation).max(axis=1)
    td_target = jax.lax.stop_gradient(batch.n_step_return + batch.bootstrap_discount * bootstrap)
    q_values = apply(params, batch.observation)
    # A sum over what is equal, and not an index: the gradient of one is a scatter, which is slow on a GPU.
    q_of_action = jnp.sum(q_values, axis=1, where=jnp.arange(q_values.shape[1]) == batch.action[:, None])
    loss = jnp.mean((q_of_action - td_target) ** 2)
    return loss, Losses(loss, q_of_action)


class TrainState(NamedTuple):
    """All that learning changes."""

    params: Params
    target_params: Params
    optimizer_state: optax.OptState
    key: jax.Array


def update(
    state: TrainState,
    ring: Transitions,
    low: int,
    high: int,
    args: Args,
    apply: Callable,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Losses]:
    """A gradient step on transitions of steps [low, high)."""
    key, sample_key = jax.random.split(state.key)
    batch = sample(ring, sample_key, low, high, args)
    gradients, losses = jax.grad(dqn_loss, has_aux=True)(state.params, state.target_params, batch, apply)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer_state)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, state.target_params, optimizer_state, key), losses


@functools.partial(jax.jit, donate_argnums=0)
def update_target(state: TrainState, tau: float) -> TrainState:
    """Moves the target network to the online one by the fraction ``tau``."""
    return state._replace(target_params=optax.incremental_update(state.params, state.target_params, tau))


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From ``start`` straight to ``end`` over ``duration`` steps, then constant."""
    return start + (end - start) * min(step / duration, 1.0) if duration > 0 else end


def epsilon_greedy(q_values: jax.Array, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """The action of largest Q-value, or with probability ``epsilon`` any action; int64 (B,) from float (B, A)."""
    batch, num_actions = q_values.shape
    random = rng.integers(0, num_actions, batch)
    return np.where(rng.random(batch) < epsilon, random, np.asarray(q_values).argmax(axis=1))


def times_due(start: int, end: int, every: int) -> int:
    """How many multiples of ``every`` lie in (start, end]."""
    return end // every - start // every


def rehearse(args: Args, num_actions: int, dtype: jnp.dtype) -> None:
    """Compares a gradient with that of float32 on the CPU; raises UserError if a GPU computes another one."""
    key = jax.random.PRNGKey(args.seed)
    frames, one = jax.random.bits(key, (args.batch_size, 4, 84, 84), jnp.uint8), jnp.ones(args.batch_size)
    batch = Batch(frames, one.astype(jnp.uint8), one, frames, one)

    def gradient(network: nn.Module) -> Callable:
        return jax.grad(lambda *x: dqn_loss(*x, network.apply)[0])

    params = first_params(QNetwork(num_actions), key)
    fast, exact = gradient(QNetwork(num_actions, dtype)), gradient(QNetwork(num_actions))
    check_jax_gradient(fast, exact, params, params, batch)


def main(args: Args) -> None:
    # ==================== setup ====================
    check_args(args)
    check_upload_possible(args)
    dtype = pick_jax_device(args.bf16)
    check_memory(args, Replay.BYTES_PER_STEP, available_jax_memory())
    envs = AtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability)

    rehearse(args, envs.num_actions, dtype)

    run = Run(args)
    print(describe_jax(dtype, envs.num_threads), flush=True)
    writer = run.writer
    rng = np.random.default_rng(args.seed)
    q_network = QNetwork(envs.num_actions, dtype)
    optimizer = optax.adam(args.learning_rate)
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    params = first_params(q_network, init_key)
    state = TrainState(params, jax.tree.map(jnp.copy, params), optimizer.init(params), key)
    run.register(state=lambda: state, rng=rng)
    state = run.restored("state", state)
    learn = functools.partial(update, args=args, apply=q_network.apply, optimizer=optimizer)
    learn = jax.jit(learn, donate_argnames="state")
    apply = jax.jit(q_network.apply)

    def player(params: Params) -> Callable[[np.ndarray], np.ndarray]:
        """The network as evaluations want it: from and to NumPy arrays, of any batch size."""

        def q_values_of(observation: np.ndarray) -> np.ndarray:
            # Games end one by one: black observations behind them make it powers of two that `apply` is compiled for.
            batch = len(observation)
            padded = np.pad(observation, [(0, (1 << (batch - 1).bit_length()) - batch), (0, 0), (0, 0), (0, 0)])
            return np.asarray(apply(params, padded))[:batch]

        return q_values_of

    # ==================== training ====================
    if not run.over("training"):
        replay = Replay(args)
        run.register_replay("replay", replay)
        observation = run.reset(envs)
        recent_returns: list[int] = run.state.setdefault("recent_returns", [])
        exploration_steps = args.exploration_fraction * args.total_timesteps
        for global_step in run.steps("training", args.total_timesteps, by=args.num_envs):
            next_step = global_step + args.num_envs
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
            action = envs.send(epsilon_greedy(apply(state.params, observation), epsilon, rng))

            # Emulation overlaps learning; nothing from here to `recv` waits for a GPU.
            low, high = replay.window
            if global_step >= args.learning_starts and high > low:
                for _ in range(times_due(global_step, next_step, args.train_frequency)):
                    state, run.losses = learn(state, replay.ring, low, high)
                for _ in range(times_due(global_step, next_step, args.target_network_frequency)):
                    state = update_target(state, args.tau)
            result = envs.recv()
            replay.add(observation, action, result)
            observation = result.observation

            for score, length in result.games:
                recent_returns.append(score)
                del recent_returns[:-10]
                writer.add_scalar("charts/episodic_return", score, global_step)
                writer.add_scalar("charts/episodic_length", length, global_step)
                run.show_return(recent_returns)
            if times_due(global_step, next_step, 100):
                writer.add_scalar("charts/SPS", int(next_step / run.seconds), global_step)
                writer.add_scalar("charts/epsilon", epsilon, global_step)
                if run.losses:  # seldom: reading a loss waits for the device
                    run.check_learning()
                    writer.add_scalar("losses/td_loss", run.losses.loss.item(), global_step)
                    writer.add_scalar("losses/q_values", run.losses.q_values.mean().item(), global_step)
        del replay
        run.drop_replay()
        run.end_phase("training")
    envs.close()

    # ==================== save, evaluate, upload ====================
    model_path = run.dir / f"{args.exp_name}.cleanrl_model"
    if args.save_model:
        save_model(state.params, model_path)
        print(f"model saved to {model_path}")
    if not run.over("evaluation"):
        run.evaluate("eval", player(state.params), args.eval_episodes)
        for i, episodic_return in enumerate(run.results["eval"]):
            writer.add_scalar("eval/episodic_return", episodic_return, i)
        run.end_phase("evaluation")
    run.close(run.videos)
    if args.upload_model:
        upload_model(args, run.dir, model_path, run.results["eval"], run.videos)
    run.finish()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
