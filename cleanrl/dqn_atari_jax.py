"""DQN on Atari in JAX: how a teacher for QDagger is made when none is on the hub.

Mnih et al. (2015), Human-level control through deep reinforcement learning, with n-step returns as an option.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from cleanrl_utils.atari import AtariEnvs, Step
from cleanrl_utils.checkpoint import RandomState
from cleanrl_utils.checks import check_args, require_memory
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import epsilon_greedy
from cleanrl_utils.hub import check_upload_possible, upload_model
from cleanrl_utils.jax_checkpoint import ReplayState, TreeState
from cleanrl_utils.jax_layers import first_params, of_action
from cleanrl_utils.jax_utils import Apply, Params, available_memory, make_q_function, pick_device, save_model
from cleanrl_utils.replay import STACK, n_step_return, ring_length, sampling_window, stack_rows
from cleanrl_utils.resume import Run, parse_args
from cleanrl_utils.schedules import linear_schedule, times_due


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
    """the number of parallel games; updates per environment step do not depend on it"""
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
        return nn.Dense(self.num_actions)(x.astype(jnp.float32))  # bfloat16 would round away differences of actions


class Batch(NamedTuple):
    """Transitions as the loss needs them; B of them."""

    observation: jax.Array
    """uint8 (B, 4, 84, 84)"""
    action: jax.Array
    """uint8 (B,)"""
    n_step_return: jax.Array
    """float32 (B,), Σ γᵏ r of the rewards before the bootstrap state, each clipped to [−1, 1]"""
    bootstrap_observation: jax.Array
    """uint8 (B, 4, 84, 84)"""
    bootstrap_discount: jax.Array
    """float32 (B,), γᵐ, or 0 where the life or the game ended before"""


class Rows(NamedTuple):
    """A ring of rows per environment (`cleanrl_utils.replay` says what a row is); each frame is stored once.

    L rows of N environments: frame uint8 (L, N, 84, 84), the rest (L, N):
    action uint8, reward float32 and clipped, terminated bool, age int32, valid bool.
    """

    frame: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    age: jax.Array
    valid: jax.Array


@functools.partial(jax.jit, donate_argnums=0)  # donated: a row is written in place, not into a copy of gigabytes
def write_row(rows: Rows, slot: int, row: Rows) -> Rows:
    """``rows`` with those in ``slot`` replaced, of all environments; ``row`` has the shapes without L."""
    return jax.tree.map(lambda ring, value: jax.lax.dynamic_update_index_in_dim(ring, value, slot, 0), rows, row)


class Replay:
    """Rows on the device, and what the host has to know of them."""

    def __init__(self, buffer_size: int, args: Args):
        self.length, self.num_envs, self.n_step = ring_length(buffer_size, args.num_envs), args.num_envs, args.n_step
        self.rows_written = 0
        self.env_age = np.zeros(self.num_envs, np.int32)
        shape = (self.length, self.num_envs)
        self.rows = Rows(
            frame=jnp.zeros((*shape, 84, 84), jnp.uint8),
            action=jnp.zeros(shape, jnp.uint8),
            reward=jnp.zeros(shape, jnp.float32),
            terminated=jnp.zeros(shape, bool),
            age=jnp.zeros(shape, jnp.int32),
            valid=jnp.zeros(shape, bool),
        )

    @staticmethod
    def num_bytes(buffer_size: int) -> int:
        """Bytes that a replay of this size takes."""
        return buffer_size * (84 * 84 + 1 + 4 + 1 + 4 + 1)

    @property
    def window(self) -> tuple[int, int]:
        """The rows [low, high) that may be sampled."""
        return sampling_window(self.rows_written, self.length, self.n_step)

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step) -> None:
        """Appends a row per environment: what was seen, what was done, and what came of it."""
        row = Rows(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(step.reward, -1, 1).astype(np.float32),
            terminated=step.terminated,
            age=self.env_age,
            valid=~step.reset,
        )
        self.rows = write_row(self.rows, self.rows_written % self.length, row)
        self.env_age = np.where(step.reset, 0, self.env_age + 1).astype(np.int32)
        self.rows_written += 1


def transitions(rows: Rows, row: jax.Array, env: jax.Array, n_step: int, gamma: float) -> Batch:
    """The transitions that start at ``row``, integer (B,), of ring ``env``, integer (B,)."""
    length = rows.frame.shape[0]
    slots, envs = (row[:, None] + jnp.arange(n_step)) % length, env[:, None]
    returns, steps, discount = n_step_return(
        rows.reward[slots, envs], rows.terminated[slots, envs], rows.valid[slots, envs], gamma
    )

    def stack(row: jax.Array) -> jax.Array:
        """The observations at ``row``, uint8 (B, 4, 84, 84)."""
        stacked, in_game = stack_rows(row, rows.age[row % length, env], jnp.arange(STACK - 1, -1, -1))
        return rows.frame[stacked % length, envs] * in_game[:, :, None, None]

    return Batch(stack(row), rows.action[row % length, env], returns, stack(row + steps), discount)


def sample(rows: Rows, key: jax.Array, window: tuple[int, int], batch_size: int, n_step: int, gamma: float) -> Batch:
    """A batch drawn uniformly, with replacement, from the transitions in the ``window`` [low, high) of rows."""
    length, num_envs = rows.action.shape
    row_key, env_key = jax.random.split(key)
    # Final frames are no transitions and are drawn again: eight tries at once, for the shapes are fixed.
    # Should all eight be final frames, a neighbour of the first is taken: no two final frames follow each other.
    row = jax.random.randint(row_key, (8, batch_size), *window)
    env = jax.random.randint(env_key, (8, batch_size), 0, num_envs)
    first = rows.valid[row % length, env].argmax(axis=0)[None]
    row, env = jnp.take_along_axis(row, first, 0)[0], jnp.take_along_axis(env, first, 0)[0]
    neighbour = jnp.where(row > window[0], row - 1, row + 1)
    return transitions(rows, jnp.where(rows.valid[row % length, env], row, neighbour), env, n_step, gamma)


def td_target(target_params: Params, batch: Batch, apply: Apply) -> jax.Array:
    """y = Σ γᵏ r + γᵐ max Q'(s',·), float32 (B,)."""
    bootstrap = apply(target_params, batch.bootstrap_observation).max(axis=1)
    return batch.n_step_return + batch.bootstrap_discount * bootstrap


def td_loss(params: Params, target: jax.Array, batch: Batch, apply: Apply) -> tuple[jax.Array, jax.Array]:
    """Mean squared TD error (Mnih et al., 2015, eq. 2), and the Q-values of the actions taken, float32 (B,)."""
    q_values = of_action(apply(params, batch.observation), batch.action)
    return jnp.mean((q_values - target) ** 2), q_values


class TrainState(NamedTuple):
    """All that learning changes."""

    params: Params
    target_params: Params
    optimizer_state: optax.OptState
    key: jax.Array


def update(
    state: TrainState,
    rows: Rows,
    window: tuple[int, int],
    count: int,
    args: Args,
    apply: Apply,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
    """``count`` updates, each on a batch of its own from the ``window`` of rows; returns what the last one lost too."""

    def one(state: TrainState, part: tuple[jax.Array, Batch]) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
        losses, gradients = jax.value_and_grad(td_loss, has_aux=True)(state.params, *part, apply)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, optimizer_state=optimizer_state), losses

    def draw(key: jax.Array, size: int) -> tuple[jax.Array, Batch]:
        batch = sample(rows, key, window, size, args.n_step, args.gamma)
        return td_target(state.target_params, batch, apply), batch

    if jax.default_backend() == "cpu":  # within a loop, its convolutions are thirty times slower
        for _ in range(count):
            key, sample_key = jax.random.split(state.key)
            state, losses = one(state._replace(key=key), draw(sample_key, args.batch_size))
        return state, losses
    # The target network is the same for all: a GPU takes hardly longer for all batches at once than for one.
    key, sample_key = jax.random.split(state.key)
    parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), draw(sample_key, count * args.batch_size))
    state, losses = jax.lax.scan(one, state._replace(key=key), parts)
    return state, jax.tree.map(lambda value: value[-1], losses)


@functools.partial(jax.jit, donate_argnums=0)
def update_target(state: TrainState, tau: float) -> TrainState:
    """Moves the target network to the online one by the fraction ``tau``."""
    return state._replace(target_params=optax.incremental_update(state.params, state.target_params, tau))


def main(args: Args) -> None:
    # ==================== setup ====================
    check_args(args)
    check_upload_possible(args)
    on_cpu = pick_device()  # where XLA computes bfloat16 convolutions more slowly than float32 ones
    require_memory(
        Replay.num_bytes(args.buffer_size),
        available_memory(),
        f"a replay of {args.buffer_size:,} steps",
        "lower --buffer-size",
    )
    run = Run(args)
    writer = run.writer
    rng = np.random.default_rng(args.seed)

    envs = AtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability)
    q_network = QNetwork(envs.num_actions, jnp.bfloat16 if args.bf16 and not on_cpu else jnp.float32)
    optimizer = optax.adam(args.learning_rate)
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    params = first_params(q_network, init_key)
    state = TrainState(params, jax.tree.map(jnp.copy, params), optimizer.init(params), key)
    kept = TreeState(lambda: state)
    run.keep(state=kept, exploration=RandomState(rng))
    state = kept.restored(state)
    learn = functools.partial(update, args=args, apply=q_network.apply, optimizer=optimizer)
    learn = jax.jit(learn, static_argnames="count", donate_argnames="state")
    q_function = make_q_function(jax.jit(q_network.apply), lambda: state.params)

    # ==================== phase 1: training ====================
    if run.phase == 1:
        replay = Replay(args.buffer_size, args)
        run.keep_replay("replay", ReplayState(replay))
        observation = run.reset(envs)
        recent_returns: list[int] = run.state.setdefault("recent_returns", [])
        for global_step in run.steps(args.total_timesteps, args.num_envs, "DQN", "step"):
            next_step = global_step + args.num_envs
            epsilon = linear_schedule(
                args.start_e, args.end_e, args.exploration_fraction * args.total_timesteps, global_step
            )
            action = envs.send(epsilon_greedy(q_function(observation), epsilon, rng))

            # The emulator plays while the network learns: neither of these calls waits for its result.
            updates_due = 0
            if global_step >= args.learning_starts:
                if updates_due := times_due(global_step, next_step, args.train_frequency):
                    state, (loss, q_values) = learn(state, replay.rows, replay.window, updates_due)
                    run.last_update = {"loss": loss, "q_values": q_values}
                for _ in range(times_due(global_step, next_step, args.target_network_frequency)):
                    state = update_target(state, args.tau)

            step = envs.recv()
            replay.add(observation, action, step)
            observation = step.observation
            if updates_due and next_step >= run.state.get("next_loss_log", 0):  # seldom: reading waits for the device
                run.state["next_loss_log"] = next_step + 100
                run.check_learning()
                writer.add_scalar("losses/td_loss", loss.item(), global_step)
                writer.add_scalar("losses/q_values", q_values.mean().item(), global_step)
            for score, length in step.games:
                recent_returns.append(score)
                del recent_returns[:-10]
                writer.add_scalar("charts/episodic_return", score, global_step)
                writer.add_scalar("charts/episodic_length", length, global_step)
                run.show_return(recent_returns)
            if times_due(global_step, next_step, 100):
                writer.add_scalar("charts/SPS", int(next_step / run.seconds), global_step)
                writer.add_scalar("charts/epsilon", epsilon, global_step)
        del replay
        run.drop_replay()
        run.end_phase(2)
    envs.close()

    # ==================== phase 2: save and evaluate ====================
    model_path = run.dir / f"{args.exp_name}.cleanrl_model"
    if run.phase == 2:
        if args.save_model:
            save_model(state.params, model_path)
            print(f"model saved to {model_path}")
        run.evaluate("eval", q_function, args.eval_episodes)
        for i, episodic_return in enumerate(run.results["eval"]):
            writer.add_scalar("eval/episodic_return", episodic_return, i)
        run.end_phase(3)

    # ==================== phase 3: upload ====================
    run.close(run.videos)
    if args.upload_model:
        upload_model(args, run.dir, model_path, run.results["eval"], run.videos)
    run.finish()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
