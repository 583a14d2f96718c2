"""DQN on Atari in JAX: make a teacher for QDagger.

Mnih et al. (2015), Human-level control through deep reinforcement learning; n-step returns are optional.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the helpers beside this script

import functools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict

from cleanrl_utils.atari import AtariEnvs, StepResult
from cleanrl_utils.checks import MAY_CHANGE, Range, check_args
from cleanrl_utils.device import JaxHardware as Hardware
from cleanrl_utils.errors import UserError, one_line_errors
from cleanrl_utils.evaluation import play_episodes
from cleanrl_utils.networks import init_like_pytorch, save_flax
from cleanrl_utils.run import Run, parse_args

Params = dict[str, Any]  # the variables of a flax network: {"params": {layer: {"kernel": …, "bias": …}}}

LOG_EVERY = 100  # environment steps


@dataclass
class Args:
    # A resumed run keeps the flags without MAY_CHANGE. Range has the values that are allowed.
    script: ClassVar[str] = __file__

    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 1
    """seed of the experiment"""
    bf16: bool = True
    """if toggled, all layers but the last compute in bfloat16 on a GPU or TPU that supports it"""
    track: Annotated[bool, MAY_CHANGE] = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: Annotated[str, MAY_CHANGE] = "cleanRL"
    """the wandb's project name"""
    wandb_entity: Annotated[str | None, MAY_CHANGE] = None
    """the entity (team) of wandb's project"""
    capture_video: Annotated[bool, MAY_CHANGE] = False
    """whether to film an episode after the evaluation (check out the `videos` folder)"""
    save_model: Annotated[bool, MAY_CHANGE] = True
    """whether to save the model into `runs/{run_name}`"""
    upload_model: Annotated[bool, MAY_CHANGE] = False
    """whether to upload the saved model to the Hugging Face Hub"""
    hf_entity: Annotated[str, MAY_CHANGE] = ""
    """the user or organisation on the Hugging Face Hub; the owner of the token if empty"""
    resume: str | None = None
    """the directory `runs/{run_name}` of a run to resume with its flags"""
    checkpoint_minutes: Annotated[float, Range(0, 10**6), MAY_CHANGE] = 10
    """minutes between checkpoints, which are also saved before the evaluation and when stopped; 0 disables them"""

    # Environment
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or, with sticky actions of probability 0.25, ALE/{Game}-v5"""
    num_envs: Annotated[int, Range(1, 1000)] = 16
    """parallel environments, halved while a buffer or the run is too small; updates per step do not depend on them"""

    # DQN
    total_timesteps: Annotated[int, Range(0), MAY_CHANGE] = 10000000
    """environment steps (4 frames each)"""
    learning_rate: Annotated[float, Range(1e-12, 1000)] = 1e-4
    """the learning rate of the optimizer"""
    buffer_size: Annotated[int, Range(1), MAY_CHANGE] = 1000000
    """environment steps in the replay buffer, 7.1 kB each"""
    gamma: Annotated[float, Range(0, 1)] = 0.99
    """the discount factor"""
    n_step: Annotated[int, Range(1, 1000)] = 1
    """the number of rewards summed before bootstrapping"""
    tau: Annotated[float, Range(0, 1)] = 1.0
    """the target network update rate"""
    target_network_frequency: Annotated[int, Range(1)] = 1000
    """the environment steps between updates of the target network"""
    batch_size: Annotated[int, Range(1)] = 32
    """the batch size of a sample from the replay buffer"""
    start_e: Annotated[float, Range(0, 1)] = 1.0
    """the starting epsilon for exploration"""
    end_e: Annotated[float, Range(0, 1)] = 0.01
    """the ending epsilon for exploration, and the epsilon of the evaluation"""
    exploration_fraction: Annotated[float, Range(0, 1)] = 0.10
    """the fraction of `total_timesteps` over which epsilon is annealed"""
    learning_starts: Annotated[int, Range(0)] = 80000
    """environment steps before the first update"""
    train_frequency: Annotated[int, Range(1)] = 4
    """the environment steps per update"""
    eval_episodes: Annotated[int, Range(1), MAY_CHANGE] = 10
    """episodes of the evaluation at the end"""


@dataclass
class Progress:
    """The progress of a run, saved in each checkpoint."""

    step: int = 0  # environment steps


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


class Record(NamedTuple):
    """The arrays that are stored of environment steps: (L, N, …) of L steps of N environments, (N, …) of one step."""

    frame: jax.Array  # uint8 (…, 84, 84), the newest of each observation; stacks of 4 are built when sampling
    action: jax.Array  # uint8
    reward: jax.Array  # float32, clipped to [−1, 1]
    terminated: jax.Array  # bool, a life was lost or the episode ended
    age: jax.Array  # int32, steps since the reset of the episode: a stack has no frames from before it
    valid: jax.Array  # bool, False at the final observation of an episode or stopped run: no transition starts there


class Batch(NamedTuple):
    """B transitions."""

    observation: jax.Array  # uint8 (B, 4, 84, 84)
    action: jax.Array  # uint8 (B,)
    n_step_return: jax.Array  # float32 (B,), Σ γᵏ r of the rewards before the bootstrap observation
    bootstrap_observation: jax.Array  # uint8 (B, 4, 84, 84)
    bootstrap_discount: jax.Array  # float32 (B,), γᵐ after m rewards, or 0 after a termination


class Replay:
    """A replay buffer of the last ``size`` environment steps, on the device of the networks.

    Here, a step is one of each environment: step t is in slot t % ``length`` of the ring.
    """

    def __init__(self, size: int, num_envs: int, n_step: int, hardware: Hardware):
        self.length = size // num_envs  # steps of each environment
        self.size = self.length * num_envs
        self.n_step = n_step
        self.steps_added = 0
        self.age = np.zeros(num_envs, np.int32)  # steps since the reset, of the next step to be added
        shape = (self.length, num_envs)
        self.ring = Record(
            frame=jnp.zeros((*shape, 84, 84), jnp.uint8, device=hardware.device),
            action=jnp.zeros(shape, jnp.uint8, device=hardware.device),
            reward=jnp.zeros(shape, jnp.float32, device=hardware.device),
            terminated=jnp.zeros(shape, bool, device=hardware.device),
            age=jnp.zeros(shape, jnp.int32, device=hardware.device),
            valid=jnp.zeros(shape, bool, device=hardware.device),
        )

    def add(self, observation: np.ndarray, action: np.ndarray, result: StepResult) -> None:
        """Add a step of each environment: the observation before it, the action taken and the result; arrays (N, …)."""
        record = Record(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(result.reward, -1, 1).astype(np.float32),
            terminated=result.terminated,  # a truncated episode bootstraps from the observation in the next record
            age=self.age,
            valid=~result.reset,  # the step after the end of an episode only resets it: its action is ignored
        )
        one_step = jax.tree.map(lambda array: array[None], record)
        self.ring = write_slots(self.ring, self.steps_added % self.length, one_step)
        self.age = np.where(result.reset, 0, self.age + 1).astype(np.int32)
        self.steps_added += 1

    def sampled_steps(self) -> range:
        """Return the steps that can be sampled: their stacks and bootstrap observations are in the buffer."""
        low = 0 if self.steps_added <= self.length else self.steps_added - self.length + 3  # 3 older frames of a stack
        return range(low, max(low, self.steps_added - self.n_step))

    # ==================== checkpoints ====================

    def read(self, low: int, high: int) -> dict[str, np.ndarray]:
        """Return the arrays of slots [low, high)."""
        # Compiled once per number of slots; an index compiles for each slot.
        ring = jax.tree.map(lambda array: np.asarray(jax.lax.dynamic_slice_in_dim(array, low, high - low)), self.ring)
        return ring._asdict()

    def write(self, low: int, arrays: dict[str, np.ndarray]) -> None:
        """Write arrays, as :meth:`read` returns them, to the slots from ``low`` on."""
        self.ring = write_slots(self.ring, low, Record(**arrays))

    def truncate_episodes(self) -> None:
        """Truncate all episodes at the last step: a resumed run has new ones, as emulators can't be restored."""
        self.ring = self.ring._replace(valid=self.ring.valid.at[(self.steps_added - 1) % self.length].set(False))


@functools.partial(jax.jit, donate_argnums=0)  # donated: written in place, not into a copy of gigabytes
def write_slots(ring: Record, slot: int, records: Record) -> Record:
    """Write steps of each environment, arrays (steps, N, …), to the slots from ``slot`` on."""
    return jax.tree.map(lambda array, value: jax.lax.dynamic_update_slice_in_dim(array, value, slot, 0), ring, records)


def sample(ring: Record, low: int, high: int, batch_size: int, key: jax.Array, n_step: int, gamma: float) -> Batch:
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
    # If none of the 8 is valid, which is next to impossible, take the step before the first of them.
    t = jnp.where(ring.valid[t % length, env], t, jnp.maximum(t - 1, low))
    return transitions_at(ring, t, env, n_step, gamma)


def transitions_at(ring: Record, t: jax.Array, env: jax.Array, n_step: int, gamma: float) -> Batch:
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


def stack_frames(ring: Record, t: jax.Array, env: jax.Array) -> jax.Array:
    """Return the observations at steps ``t``, uint8 (B, 4, 84, 84), with zeros for frames before the reset."""
    length = len(ring.valid)
    ago = jnp.arange(3, -1, -1)  # steps, oldest frame first
    in_episode = ring.age[t % length, env][:, None] >= ago
    return ring.frame[(t[:, None] - ago) % length, env[:, None]] * in_episode[:, :, None, None]


class Losses(NamedTuple):
    """The loss and the mean Q-value in it."""

    td_loss: jax.Array
    q_values: jax.Array  # the mean over the batch, of the actions taken


def dqn_loss(
    params: Params, q_network: nn.Module, target_q_values: jax.Array, batch: Batch
) -> tuple[jax.Array, Losses]:
    """Compute the mean squared TD error (Mnih et al., 2015): mean (Q(s,a) − y)².

    y = Σ γᵏ r + γᵐ (1 − terminated) max Q'(s',·), and ``target_q_values`` are Q'(s',·), float32 (B, num_actions).
    """
    y = batch.n_step_return + batch.bootstrap_discount * target_q_values.max(axis=1)
    q_values = q_network.apply(params, batch.observation)
    # A masked sum instead of an index, whose gradient is a scatter, which is slow on a GPU.
    q_of_action = jnp.sum(q_values, axis=1, where=jnp.arange(q_values.shape[1]) == batch.action[:, None])
    td_loss = jnp.mean((q_of_action - y) ** 2)
    return td_loss, Losses(td_loss, q_of_action.mean())


class TrainState(NamedTuple):
    """The state that a gradient step changes."""

    params: Params
    target_params: Params
    optimizer_state: optax.OptState
    key: jax.Array


class Agent:
    """The agent: Q-network, target network, optimizer and random numbers."""

    def __init__(self, args: Args, num_actions: int, hardware: Hardware):
        self.args = args
        self.device = hardware.device
        key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
        self.q_network = QNetwork(num_actions, hardware.dtype)
        params = init_like_pytorch(self.q_network, init_key, np.zeros((1, 4, 84, 84), np.uint8))
        if params.keys() != {"params"}:
            has = ", ".join(sorted(params.keys() - {"params"}))
            raise UserError(f"QNetwork has {has}, and only layers with nothing but parameters can be trained here")
        self.optimizer = optax.adam(args.learning_rate)
        state = TrainState(params, params, self.optimizer.init(params), key)
        # As arrays of no particular device, they would change in the first call, and the second would compile again.
        self.state = jax.device_put(state, hardware.device)
        self.forward = jax.jit(self.q_network.apply)
        self.compiled_gradient_step = jax.jit(self.gradient_step)

    def q_values(self, observation: np.ndarray) -> np.ndarray:
        """Compute Q-values, float32 (B, num_actions), of observations, uint8 (B, 4, 84, 84)."""
        return np.asarray(self.forward(self.state.params, observation))

    def update(self, replay: Replay) -> Losses:
        """Make a gradient step."""
        sampled = replay.sampled_steps()
        self.state, losses = self.compiled_gradient_step(self.state, replay.ring, sampled.start, sampled.stop)
        return losses

    def gradient_step(self, state: TrainState, ring: Record, low: int, high: int) -> tuple[TrainState, Losses]:
        """Make a gradient step on transitions of steps [low, high); return the new state and the losses.

        The function is compiled: its Python code runs only in the first call, so every value that changes is an
        argument.
        """
        args = self.args
        key, sample_key = jax.random.split(state.key)
        batch = sample(ring, low, high, args.batch_size, sample_key, args.n_step, args.gamma)
        target_q_values = self.q_network.apply(state.target_params, batch.bootstrap_observation)
        gradients, losses = jax.grad(dqn_loss, has_aux=True)(state.params, self.q_network, target_q_values, batch)
        updates, optimizer_state = self.optimizer.update(gradients, state.optimizer_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, state.target_params, optimizer_state, key), losses

    def update_target(self, tau: float) -> None:
        """Move the target network towards the Q-network by the fraction ``tau``."""
        target_params = jax.jit(optax.incremental_update)(self.state.params, self.state.target_params, tau)
        self.state = self.state._replace(target_params=target_params)

    def save(self, path: Path) -> None:
        """Save the variables of the Q-network; raise a UserError if one is NaN or infinite."""
        save_flax(path, self.state.params)

    def dump(self) -> bytes:
        """Serialise the state of the agent for a checkpoint."""
        return msgpack_serialize(to_state_dict(self.state))

    def load(self, data: bytes) -> None:
        """Restore the state that :meth:`dump` serialised; ValueError if it is that of another network."""
        state = from_state_dict(self.state, msgpack_restore(data))
        for old, new in zip(jax.tree.leaves(self.state), jax.tree.leaves(state), strict=True):
            if old.shape != new.shape:
                raise ValueError(f"an array has shape {new.shape}, now it is {old.shape}")
        self.state = jax.device_put(state, self.device)


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


def set_up(args: Args) -> tuple[Args, Hardware]:
    """Choose the hardware and check the flags; return the flags that the run uses and the hardware."""
    hardware = Hardware.choose(args)
    one_step = Replay(size=1, num_envs=1, n_step=args.n_step, hardware=hardware)
    return check_args(args, hardware.device, step_bytes=sum(array.nbytes for array in one_step.ring)), hardware


def times_due(start: int, end: int, every: int) -> int:
    """Return the number of multiples of ``every`` in (start, end]."""
    return end // every - start // every


def main(args: Args) -> None:
    # ==================== setup ====================
    args, hardware = set_up(args)
    make_envs = functools.partial(AtariEnvs, args.env_id)
    envs = make_envs(num_envs=args.num_envs)
    agent = Agent(args, envs.num_actions, hardware)
    rng = np.random.default_rng(args.seed)
    progress = Progress()
    run = Run(args, progress=progress, agent=agent, rng=rng)  # a checkpoint holds these

    def act(observation: np.ndarray, action_rng: np.random.Generator) -> np.ndarray:
        """Choose the actions of the evaluation."""
        run.exit_if_signalled()  # a resumed run repeats the evaluation
        return epsilon_greedy(agent.q_values(observation), args.end_e, action_rng)

    with run:  # a checkpoint of a resumed run is restored here; in the training, a signal ends it after a checkpoint
        # ==================== training ====================
        if progress.step < args.total_timesteps:
            replay = Replay(args.buffer_size, args.num_envs, args.n_step, hardware)
            run.restore_replay(replay, progress.step)
            losses = None
            # The step is in the seed, so that a resumed run does not repeat the first episodes.
            observation = envs.reset(args.seed, "online", progress.step)
            steps = range(progress.step, args.total_timesteps, args.num_envs)
            for global_step in run.steps("training", "step", steps):
                next_step = global_step + args.num_envs
                epsilon_steps = args.exploration_fraction * args.total_timesteps
                epsilon = linear_schedule(args.start_e, args.end_e, epsilon_steps, global_step)
                action = epsilon_greedy(agent.q_values(observation), epsilon, rng)
                action = envs.send(action)  # the actions taken: FIRE starts an episode or a life

                # The Q-network learns while the emulators run.
                if global_step >= args.learning_starts and replay.sampled_steps():
                    for _ in range(times_due(global_step, next_step, args.train_frequency)):
                        losses = agent.update(replay)
                    # More than one may be due if the frequency is below num_envs; with tau = 1, one would do.
                    for _ in range(times_due(global_step, next_step, args.target_network_frequency)):
                        agent.update_target(args.tau)

                result = envs.recv()
                replay.add(observation, action, result)
                observation = result.observation
                progress.step = next_step
                if times_due(global_step, next_step, LOG_EVERY):
                    run.log("charts/SPS", run.steps_per_second, global_step)
                    run.log("charts/epsilon", epsilon, global_step)
                    if losses is not None:
                        run.log("losses/td_loss", losses.td_loss, global_step)
                        run.log("losses/q_values", losses.q_values, global_step)
                for env, episodic_return, length in result.episodes:
                    # A step of its own for each environment: TensorBoard and W&B show one point per step. W&B needs
                    # increasing steps, so these come after the points of `global_step`.
                    run.log("charts/episodic_return", episodic_return, global_step + env)
                    run.log("charts/episodic_length", length, global_step + env)
                    run.show(f"return {episodic_return}")
                run.save_if_due(replay)

        # ==================== save and evaluate ====================
        if args.save_model:
            agent.save(run.model_path())
            print(f"model saved to {run.model_path()}")
        run.save()  # without the replay buffer: a resumed run only repeats the evaluation
        returns = play_episodes("final", act, args.eval_episodes, make_envs, args.seed, run.video_dir)
        run.log("charts/final/avg_episodic_return", np.mean(returns), progress.step)
        for i, episodic_return in enumerate(returns):
            run.log("eval/episodic_return", episodic_return, progress.step + i)

    run.finish({"final": returns})  # uploads the model if asked, and prints the results


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
