"""DQN on Atari in JAX: make a teacher for QDagger.

Mnih et al. (2015), Human-level control through deep reinforcement learning; n-step returns are optional.
"""

import importlib.util
import sys

if importlib.util.find_spec("flax") is None:
    sys.exit("error: flax is not installed here; `source .venv/bin/activate`, or `pip install -e '.[jax]'`")

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.serialization import to_bytes
from flax.traverse_util import flatten_dict, unflatten_dict

from cleanrl_utils.atari import AtariEnvs, Step, Stream
from cleanrl_utils.checkpoint import Checkpoint, parse_args
from cleanrl_utils.checks import check_args, check_finite, fitting_num_envs
from cleanrl_utils.device import set_up_jax
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import play_episodes
from cleanrl_utils.files import atomic_write
from cleanrl_utils.hub import upload_model
from cleanrl_utils.tracking import VIDEOS, ProgressBar, start_logging

Params = dict[str, Any]  # the variables of a flax network: {"params": {layer: {"kernel": …, "bias": …}}}

LOG_EVERY = 100  # environment steps
RECENT_EPISODES = 10  # training episodes whose mean return is shown


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    bf16: bool = True
    """if toggled, all layers but the last compute in bfloat16 on a GPU or TPU that supports it"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: str = "cleanRL"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """whether to film an episode after each evaluation (check out the `videos` folder)"""
    save_model: bool = True
    """whether to save the final model into `runs/{run_name}`; those of earlier evaluations are always saved"""
    upload_model: bool = False
    """whether to upload the saved model to the Hugging Face Hub"""
    hf_entity: str = ""
    """the user or organisation on the Hugging Face Hub; the owner of the token if empty"""
    resume: str | None = None
    """the directory `runs/{run_name}` of a run to resume with its flags"""
    checkpoint_minutes: float = 10
    """minutes between checkpoints, which are also saved before each evaluation and when stopped; 0 disables them"""

    # Environment
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or ALE/{Game}-v5"""
    repeat_action_probability: float | None = None
    """probability of a sticky action per frame; the default is the id's own: 0 for -v4, 0.25 for -v5"""
    num_envs: int = 16
    """parallel environments, halved while a buffer or the run is too small; updates per step do not depend on them"""

    # DQN
    total_timesteps: int = 10000000
    """environment steps (4 frames each)"""
    learning_rate: float = 1e-4
    """the learning rate of the optimizer"""
    buffer_size: int = 1000000
    """environment steps in the replay buffer, 7.1 kB each"""
    gamma: float = 0.99
    """the discount factor"""
    n_step: int = 1
    """the number of rewards summed before bootstrapping"""
    tau: float = 1.0
    """the target network update rate"""
    target_network_frequency: int = 1000
    """the environment steps between updates of the target network"""
    batch_size: int = 32
    """the batch size of a sample from the replay buffer"""
    start_e: float = 1.0
    """the starting epsilon for exploration"""
    end_e: float = 0.01
    """the ending epsilon for exploration, and the epsilon of evaluations"""
    exploration_fraction: float = 0.10
    """the fraction of `total_timesteps` over which epsilon is annealed"""
    learning_starts: int = 80000
    """environment steps before the first update"""
    train_frequency: int = 4
    """the environment steps per update"""
    eval_episodes: int = 10
    """episodes of each evaluation"""
    eval_frequency: int = 500000
    """environment steps between evaluations, which also save the model"""


@dataclass
class Progress:
    """The progress of a run, saved in each checkpoint."""

    step: int = 0  # environment steps
    update: int = 0
    recent_returns: list[float] = field(default_factory=list)  # returns of the last training episodes


class QNetwork(nn.Module):
    """The Q-network of Mnih et al. (2015): uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    num_actions: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.transpose(0, 2, 3, 1) / 255.0  # flax has the channels last
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(channels, (size, size), stride, padding="VALID", dtype=self.dtype)(x))
        x = nn.relu(nn.Dense(512, dtype=self.dtype)(x.reshape(x.shape[0], -1)))
        # bfloat16, and the TF32 of GPUs, would round away the differences between actions.
        return nn.Dense(self.num_actions, dtype=jnp.float32, precision="highest")(x)


def init_params(network: nn.Module, key: jax.Array) -> Params:
    """Initialise layers with a kernel as PyTorch does, uniformly in ±1/√fan_in, and others as flax does."""
    blank = np.zeros((1, 4, 84, 84), np.uint8)
    params = flatten_dict(jax.jit(network.init)(key, blank))
    for (*layer, name), array in params.items():
        kernel = params.get((*layer, "kernel"))
        if kernel is not None:
            key, own_key = jax.random.split(key)
            bound = np.prod(kernel.shape[:-1]) ** -0.5
            params[(*layer, name)] = jax.random.uniform(own_key, array.shape, array.dtype, -bound, bound)
    return unflatten_dict(params)


def save_model(params: Params, path: Path) -> None:
    """Save the variables as msgpack that ``flax.serialization.from_bytes`` reads."""
    with atomic_write(path) as file:
        file.write(to_bytes(params))


class Ring(NamedTuple):
    """The arrays of a replay buffer: L steps of N environments; step t is in slot t % L.

    :meth:`Replay.add` also uses it for a single step, without the axis L.
    """

    frame: jax.Array  # uint8 (L, N, 84, 84), the newest of each observation; stacks of 4 are built when sampling
    action: jax.Array  # uint8 (L, N)
    reward: jax.Array  # float32 (L, N), clipped to [−1, 1]
    terminated: jax.Array  # bool (L, N), a life was lost or the game ended
    age: jax.Array  # int32 (L, N), steps since the reset of the episode: a stack has no frames from before it
    valid: jax.Array  # bool (L, N), False where no transition starts: at the end of an episode, and of a stopped run


# Of an environment step: frame, action, reward, terminated, age, valid.
STEP_BYTES = 84 * 84 + 1 + 4 + 1 + 4 + 1


class Batch(NamedTuple):
    """B transitions."""

    observation: jax.Array  # uint8 (B, 4, 84, 84)
    action: jax.Array  # uint8 (B,)
    n_step_return: jax.Array  # float32 (B,), Σ γᵏ r of the rewards before the bootstrap observation
    bootstrap_observation: jax.Array  # uint8 (B, 4, 84, 84)
    bootstrap_discount: jax.Array  # float32 (B,), γᵐ after m rewards, or 0 after a termination


class Replay:
    """A replay buffer of the last ``size`` environment steps, on JAX's device."""

    def __init__(self, size: int, args: Args):
        self.length = size // args.num_envs
        self.n_step = args.n_step
        self.steps_added = 0  # of each environment
        self.age = np.zeros(args.num_envs, np.int32)  # steps since the reset, of the next step to be added
        shape = (self.length, args.num_envs)
        self.ring = Ring(
            frame=jnp.zeros((*shape, 84, 84), jnp.uint8),
            action=jnp.zeros(shape, jnp.uint8),
            reward=jnp.zeros(shape, jnp.float32),
            terminated=jnp.zeros(shape, bool),
            age=jnp.zeros(shape, jnp.int32),
            valid=jnp.zeros(shape, bool),
        )

    def add(self, observation: np.ndarray, action: np.ndarray, result: Step) -> None:
        """Add a step of each environment: the observation before it, the action and its result; arrays (N, …)."""
        step = Ring(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(result.reward, -1, 1).astype(np.float32),
            terminated=result.terminated,  # a truncated episode bootstraps from its last observation, in the next step
            age=self.age,
            valid=~result.reset,  # in the step after its end, an episode is reset and the action is ignored
        )
        self.ring = write_step(self.ring, self.steps_added % self.length, step)
        self.age = np.where(result.reset, 0, self.age + 1).astype(np.int32)
        self.steps_added += 1

    def truncate_episodes(self) -> None:
        """Truncate all episodes at the last step: a resumed run has new ones, as emulators can't be restored."""
        valid = self.ring.valid.at[(self.steps_added - 1) % self.length].set(False)
        self.ring = self.ring._replace(valid=valid)
        self.age = np.zeros_like(self.age)

    @property
    def window(self) -> tuple[int, int]:
        """The steps [low, high) that can be sampled: their stacks and bootstrap observations are in the buffer."""
        low = 0 if self.steps_added <= self.length else self.steps_added - self.length + 3  # 3 older frames of a stack
        return low, max(low, self.steps_added - self.n_step)


@functools.partial(jax.jit, donate_argnums=0)  # donated: written in place, not into a copy of gigabytes
def write_step(ring: Ring, slot: int, step: Ring) -> Ring:
    """Write a step of each environment, arrays (N, …), to a slot."""
    return jax.tree.map(lambda array, value: jax.lax.dynamic_update_index_in_dim(array, value, slot, 0), ring, step)


def sample(ring: Ring, low: int, high: int, batch_size: int, key: jax.Array, n_step: int, gamma: float) -> Batch:
    """Sample a batch uniformly, with replacement, from the valid transitions of steps [low, high)."""
    length, num_envs = ring.valid.shape
    # Rejection sampling with 8 candidates at once, since compiled code has fixed shapes.
    candidates = (8, batch_size)
    t_key, env_key = jax.random.split(key)
    t = jax.random.randint(t_key, candidates, low, high)
    env = jax.random.randint(env_key, candidates, 0, num_envs)
    first_valid = ring.valid[t % length, env].argmax(axis=0, keepdims=True)
    t = jnp.take_along_axis(t, first_valid, 0)[0]
    env = jnp.take_along_axis(env, first_valid, 0)[0]
    # If all 8 are final observations, as is next to impossible, take the step before the first of them.
    t = jnp.where(ring.valid[t % length, env], t, jnp.maximum(t - 1, low))
    return transitions_at(ring, t, env, n_step, gamma)


def transitions_at(ring: Ring, t: jax.Array, env: jax.Array, n_step: int, gamma: float) -> Batch:
    """Return the transitions of steps ``t``, integers (B,), in environments ``env``, integers (B,)."""
    length = len(ring.valid)
    # A termination or a final observation ends the n rewards early. A termination has no bootstrap.
    n_step_return = jnp.zeros(t.shape)
    m = jnp.zeros_like(t)  # rewards in the return
    running = jnp.ones(t.shape, bool)
    terminated = jnp.zeros(t.shape, bool)
    for k in range(n_step):
        slot = (t + k) % length
        running = running & ~terminated & ring.valid[slot, env]
        n_step_return = n_step_return + running * gamma**k * ring.reward[slot, env]
        m = m + running
        terminated = terminated | (running & ring.terminated[slot, env])
    slot = t % length
    return Batch(
        observation=stack_frames(ring, t, env),
        action=ring.action[slot, env],
        n_step_return=n_step_return,
        bootstrap_observation=stack_frames(ring, t + m, env),
        bootstrap_discount=gamma**m * ~terminated,
    )


def stack_frames(ring: Ring, t: jax.Array, env: jax.Array) -> jax.Array:
    """Return the observations at steps ``t``, uint8 (B, 4, 84, 84), with zeros for frames before the reset."""
    length = len(ring.valid)
    ago = jnp.arange(3, -1, -1)  # steps, oldest frame first
    in_episode = ring.age[t % length, env][:, None] >= ago
    return ring.frame[(t[:, None] - ago) % length, env[:, None]] * in_episode[:, :, None, None]


class Losses(NamedTuple):
    """The loss and the mean Q-value in it."""

    td_loss: jax.Array
    q_values: jax.Array  # the mean over the batch, of the actions taken


def td_target(target_params: Params, q_network: nn.Module, batch: Batch) -> jax.Array:
    """Compute y = Σ γᵏ r + γᵐ (1 − terminated) max Q'(s',·), float32 (B,)."""
    q_values = q_network.apply(target_params, batch.bootstrap_observation)
    return batch.n_step_return + batch.bootstrap_discount * q_values.max(axis=1)


def dqn_loss(params: Params, q_network: nn.Module, y: jax.Array, batch: Batch) -> tuple[jax.Array, Losses]:
    """Compute the mean squared TD error: mean (Q(s,a) − y)², with y of :func:`td_target`."""
    q_values = q_network.apply(params, batch.observation)
    # A masked sum instead of an index, whose gradient is a scatter, which is slow on a GPU.
    q_of_action = jnp.sum(q_values, axis=1, where=jnp.arange(q_values.shape[1]) == batch.action[:, None])
    td_loss = jnp.mean((q_of_action - y) ** 2)
    return td_loss, Losses(td_loss, q_of_action.mean())


class TrainState(NamedTuple):
    """The state that an update changes."""

    params: Params
    target_params: Params
    optimizer_state: optax.OptState
    key: jax.Array


def make_update(q_network: nn.Module, optimizer: optax.GradientTransformation, args: Args) -> Callable:
    """Return the compiled function that updates the state. The ring is an argument, since `Replay.add` replaces it."""
    gradient_of = jax.grad(dqn_loss, has_aux=True)

    def update(state: TrainState, ring: Ring, low: int, high: int) -> tuple[TrainState, Losses]:
        """Make a gradient step on transitions of steps [low, high)."""
        key, sample_key = jax.random.split(state.key)
        batch = sample(ring, low, high, args.batch_size, sample_key, args.n_step, args.gamma)
        y = td_target(state.target_params, q_network, batch)
        gradients, losses = gradient_of(state.params, q_network, y, batch)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, state.target_params, optimizer_state, key), losses

    return jax.jit(update, donate_argnums=0)


@functools.partial(jax.jit, donate_argnums=0)
def update_target(state: TrainState, tau: float) -> TrainState:
    """Move the target network towards the Q-network by the fraction ``tau``."""
    return state._replace(target_params=optax.incremental_update(state.params, state.target_params, tau))


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """Anneal linearly from ``start`` to ``end`` over ``duration`` steps."""
    if duration <= 0:
        return end
    return start + (end - start) * min(step / duration, 1.0)


def epsilon_greedy(q_values: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Choose actions, int64 (B,), from Q-values (B, A): random with probability ``epsilon``, otherwise greedy."""
    batch_size, num_actions = q_values.shape
    random_action = rng.integers(0, num_actions, batch_size)
    explore = rng.random(batch_size) < epsilon
    return np.where(explore, random_action, q_values.argmax(axis=1))


def times_due(start: int, end: int, every: int) -> int:
    """Return the number of multiples of ``every`` in (start, end]."""
    return end // every - start // every


def main(args: Args) -> None:
    # ==================== setup ====================
    dtype = set_up_jax(args.bf16)  # of all layers but the last
    check_args(args, jax.devices()[0], STEP_BYTES)
    args.num_envs = fitting_num_envs(args)  # logs and checkpoints have the reduced number
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    rng = np.random.default_rng(args.seed)

    make_envs = functools.partial(AtariEnvs, args.env_id, repeat_action_probability=args.repeat_action_probability)
    envs = make_envs(num_envs=args.num_envs)
    q_network = QNetwork(envs.num_actions, dtype)
    params = init_params(q_network, init_key)
    optimizer = optax.adam(args.learning_rate)
    # A copy: `update` donates both trees, and an array can be donated only once.
    target_params = jax.tree.map(jnp.copy, params)
    state = TrainState(params, target_params, optimizer.init(params), key)
    update = make_update(q_network, optimizer, args)
    q_values_of = jax.jit(q_network.apply)

    # Makes and locks runs/{run_name}, or the directory of --resume; starts TensorBoard and, with --track, W&B.
    run_dir, writer = start_logging(args)
    video_dir = VIDEOS / run_dir.name if args.capture_video else None
    progress = Progress()
    checkpoint = Checkpoint(args, run_dir, progress=progress, rng=rng, writer=writer)

    def evaluate(name: str) -> list[float]:
        """Play whole episodes and return their returns."""
        action_rng = np.random.default_rng((args.seed, Stream.EVALUATION_ACTIONS))  # the same in each evaluation

        def act(observation: np.ndarray) -> np.ndarray:
            checkpoint.exit_if_signalled()  # a resumed run repeats the evaluation
            q_values = np.asarray(q_values_of(state.params, observation))
            return epsilon_greedy(q_values, args.end_e, action_rng)

        return play_episodes(name, act, args.eval_episodes, make_envs, args.seed, video_dir)

    with writer, checkpoint:  # a signal stops the run after a checkpoint
        # JAX's arrays are replaced, not changed: `state` is returned by `restore` and passed to each save.
        state = checkpoint.restore(state)  # does nothing in a new run

        # ==================== training ====================
        if progress.step < args.total_timesteps:
            replay = Replay(args.buffer_size, args)
            if progress.step > 0:
                checkpoint.restore_replay(replay)  # its episodes end, since emulators can't be resumed
            exploration_steps = args.exploration_fraction * args.total_timesteps
            updates_per_log = max(LOG_EVERY // args.train_frequency, 1)
            observation = envs.reset((args.seed, Stream.TRAINING, progress.step))
            steps = range(progress.step, args.total_timesteps, args.num_envs)
            bar = ProgressBar("training", steps, "step")
            start_time = time.perf_counter()
            for global_step in bar:
                next_step = global_step + args.num_envs
                # The evaluation comes before the step, so that a run resumed from its checkpoint begins with it.
                if global_step > 0 and times_due(global_step - args.num_envs, global_step, args.eval_frequency):
                    check_finite(jax.tree.leaves(state.params))
                    checkpoint.save(state, replay)
                    mean_return = np.mean(evaluate(f"online {global_step}"))
                    writer.add_scalar("charts/online/avg_episodic_return", mean_return, global_step)
                    save_model(state.params, run_dir / f"{args.exp_name}-online-{global_step}.cleanrl_model")
                q_values = np.asarray(q_values_of(state.params, observation))
                epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
                action = epsilon_greedy(q_values, epsilon, rng)
                action = envs.send(action)  # the actions taken: FIRE starts an episode or a life

                # The Q-network learns while the emulators run. Nothing here synchronises with a GPU.
                low, high = replay.window
                updates_before = progress.update
                if global_step >= args.learning_starts and high > low:
                    for _ in range(times_due(global_step, next_step, args.train_frequency)):
                        state, losses = update(state, replay.ring, low, high)
                        progress.update += 1
                    # Several are due if the frequency is below num_envs, which matters for tau < 1.
                    for _ in range(times_due(global_step, next_step, args.target_network_frequency)):
                        state = update_target(state, args.tau)

                result = envs.recv()
                replay.add(observation, action, result)
                observation = result.observation

                progress.step = next_step
                if times_due(global_step, next_step, LOG_EVERY):
                    sps = (next_step - steps.start) / (time.perf_counter() - start_time)
                    writer.add_scalar("charts/SPS", int(sps), global_step)
                    writer.add_scalar("charts/epsilon", epsilon, global_step)
                if times_due(updates_before, progress.update, updates_per_log):
                    check_finite(losses)
                    for name, term in losses._asdict().items():
                        writer.add_scalar(f"losses/{name}", term.item(), global_step)
                for env, episodic_return, length in result.episodes:
                    progress.recent_returns = [*progress.recent_returns, episodic_return][-RECENT_EPISODES:]
                    # A step of its own for each environment: TensorBoard and W&B show one point per step. W&B needs
                    # increasing steps, so these come after the points of `global_step`.
                    writer.add_scalar("charts/episodic_return", episodic_return, global_step + env)
                    writer.add_scalar("charts/episodic_length", length, global_step + env)
                    bar.set_postfix_str(f"return {np.mean(progress.recent_returns):.1f}", refresh=False)
                checkpoint.save_if_due(state, replay)

        # ==================== save and evaluate ====================
        check_finite(jax.tree.leaves(state.params))
        checkpoint.save(state)  # without the replay buffer: a resumed run only repeats the evaluation
        model_path = run_dir / f"{args.exp_name}.cleanrl_model"
        if args.save_model:
            save_model(state.params, model_path)
            print(f"model saved to {model_path}")
        final_returns = evaluate("final")
        for i, episodic_return in enumerate(final_returns):
            writer.add_scalar("eval/episodic_return", episodic_return, progress.step + i)

    # ==================== upload ====================
    if args.upload_model:
        upload_model(args, run_dir, model_path, final_returns)
    checkpoint.finish()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
