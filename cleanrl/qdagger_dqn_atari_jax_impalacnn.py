"""QDagger on Atari in JAX: a student learns from a trained teacher, offline, then online while the teaching fades.

Agarwal et al. (2022), Reincarnating Reinforcement Learning, arXiv 2206.01626. Docs: docs/rl-algorithms/qdagger.md
"""

import functools
from collections.abc import Sequence
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
from cleanrl_utils.checks import check_args, require_replay_memory
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import epsilon_greedy, print_summary, warn_of_weak_teacher
from cleanrl_utils.hub import check_upload_possible, upload_model
from cleanrl_utils.jax_checkpoint import ReplayState, TreeState
from cleanrl_utils.jax_layers import DenseInFloat32, StridedConv, fast_dtype, first_params, max_pool, of_action
from cleanrl_utils.jax_utils import Apply, Params, available_memory, make_q_function, params_of, pick_device, save_model
from cleanrl_utils.replay import STACK, n_step_return, ring_length, sampling_window, stack_rows
from cleanrl_utils.resume import Run, parse_args
from cleanrl_utils.rollout import HalvedAtariEnvs
from cleanrl_utils.schedules import linear_schedule, offline_updates_per_call, times_due
from cleanrl_utils.teachers import architecture_of, find_teacher, read_teacher, teacher_repo


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    bf16: bool = True
    """if toggled, hidden layers compute in bfloat16 where that is faster: on a GPU or TPU all, on a CPU that has it
    those of a DQN teacher; the last layers and the losses stay float32"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_project_name: str = "cleanRL"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """whether to write a video of one game after every evaluation of teacher and student (see the `videos` folder)"""
    save_model: bool = False
    """whether to save the final model into the `runs/{run_name}` folder (those of the offline phase always are)"""
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
    """probability of a sticky action, per frame (paper: 0.25); by default what the id stands for: -v4 0, -v5 0.25"""
    total_timesteps: int = 10000000
    """environment steps (4 frames each) of the online phase; more of them, given to a resumed run, change epsilon"""
    learning_rate: float = 1e-4
    """the learning rate of Adam"""
    warmup_updates: int = 0
    """the first updates, in which the learning rate rises from 0 in a straight line: for large ones, try 1000"""
    num_envs: int = 16
    """the number of parallel games; updates per environment step do not depend on it"""
    buffer_size: int = 1000000
    """the online replay's size in environment steps; 7.1 kB each"""
    gamma: float = 0.99
    """the discount factor"""
    n_step: int = 1
    """the number of rewards summed before bootstrapping (the paper: 3)"""
    tau: float = 1.0
    """the target network's update rate; 1 copies"""
    target_network_frequency: int = 1000
    """updates (offline) or environment steps (online) between updates of the target network"""
    batch_size: int = 32
    """transitions per update"""
    start_e: float = 1.0
    """epsilon at the start"""
    end_e: float = 0.01
    """epsilon in the end, and of every evaluation"""
    exploration_fraction: float = 0.10
    """the fraction of `total_timesteps`, from the first offline update on, over which epsilon falls to `end_e`"""
    learning_starts: int = 80000
    """environment steps in the online replay before the first online update"""
    train_frequency: int = 4
    """online environment steps per update"""
    eval_episodes: int = 10
    """whole games in every evaluation of the student"""

    teacher_policy_hf_repo: str | None = None
    """the teacher: a local directory or a hub repository; by default cleanrl/{env_id}-{teacher_model_exp_name}-seed1"""
    teacher_model_exp_name: str = "dqn_atari_jax"
    """what made the teacher; its file is {teacher_model_exp_name}.cleanrl_model"""
    teacher_eval_episodes: int = 10
    """whole games played by the teacher, and as many at random"""
    teacher_steps: int = 500000
    """environment steps that the teacher plays to fill its replay"""
    offline_steps: int = 500000
    """updates on the teacher's replay; 0 skips teacher data and offline phase (kickstarting)"""
    offline_eval_frequency: int = 100000
    """updates between evaluations of the student in the offline phase, each of which saves it too"""
    temperature: float = 0.1
    """the temperature of both softmaxes in the distillation loss (CleanRL: 1)"""
    distill_coefficient: float = 1.0
    """the weight of the distillation loss before it fades; 0 leaves offline pre-training only"""


Conv = functools.partial(nn.Conv, kernel_size=(3, 3), padding=1)


class ResidualBlock(nn.Module):
    """(B, H, W, C) → (B, H, W, C), Espeholt et al. (2018)."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = Conv(self.channels, dtype=self.dtype)(nn.relu(x))
        return x + Conv(self.channels, dtype=self.dtype)(nn.relu(hidden))


class ConvSequence(nn.Module):
    """(B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, channels)."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = max_pool(Conv(self.channels, dtype=self.dtype)(x))
        x = ResidualBlock(self.channels, self.dtype)(x)
        return ResidualBlock(self.channels, self.dtype)(x)


class QNetwork(nn.Module):
    """The student: the ImpalaCNN of Espeholt et al. (2018). uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    num_actions: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.transpose(0, 2, 3, 1) / 255.0  # flax wants the channels last
        for channels in (16, 32, 32):
            x = ConvSequence(channels, self.dtype)(x)
        x = nn.relu(x).reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(256, dtype=self.dtype)(x))
        return nn.Dense(self.num_actions)(x.astype(jnp.float32))  # bfloat16 would round away differences of actions


class TeacherNetwork(nn.Module):
    """The Q-network of Mnih et al. (2015), a teacher's. uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    num_actions: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.transpose(0, 2, 3, 1) / 255.0
        for i, (channels, size, stride) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1))):
            x = nn.relu(StridedConv(channels, size, stride, self.dtype, name=f"Conv_{i}")(x))
        x = nn.relu(DenseInFloat32(512, dtype=self.dtype)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_actions)(x)


def load_teacher(path: Path, num_actions: int, env_id: str, bf16: bool = False) -> tuple[nn.Module, Params]:
    """The network in ``path``, and its weights: a DQN or student, from PyTorch or JAX; ``bf16`` is for hidden layers.

    Raises:
        UserError: the file is no model, or one of a game with another number of actions.
    """
    weights = read_teacher(path, num_actions, env_id)
    nature = architecture_of(weights) == "nature"
    dtype = fast_dtype(bf16, products=nature)
    return (TeacherNetwork if nature else QNetwork)(num_actions, dtype), params_of(weights, dtype)


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
    teacher_q_values: jax.Array
    """float32 (B, num_actions), of the observation"""


class Rows(NamedTuple):
    """A ring of rows per environment (`cleanrl_utils.replay` says what a row is); each frame is stored once.

    L rows of N environments: frame uint8 (L, N, 84, 84), teacher_q_values float32 (L, N, num_actions), kept so that the
    teacher is asked once, and (L, N): action uint8, clipped reward float32, terminated bool, age int32, valid bool.
    """

    frame: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    age: jax.Array
    valid: jax.Array
    teacher_q_values: jax.Array


@functools.partial(jax.jit, donate_argnums=0)  # donated: a row is written in place, not into a copy of gigabytes
def write_row(rows: Rows, slot: int, row: Rows) -> Rows:
    """``rows`` with those in ``slot`` replaced, of all environments; ``row`` has the shapes without L."""
    return jax.tree.map(lambda ring, value: jax.lax.dynamic_update_index_in_dim(ring, value, slot, 0), rows, row)


class Replay:
    """Rows on the device, and what the host has to know of them."""

    def __init__(self, buffer_size: int, num_actions: int, args: Args):
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
            teacher_q_values=jnp.zeros((*shape, num_actions), jnp.float32),
        )

    @staticmethod
    def num_bytes(buffer_size: int, num_actions: int) -> int:
        """Bytes that a replay of this size takes."""
        return buffer_size * (84 * 84 + 1 + 4 + 1 + 4 + 1 + 4 * num_actions)

    @property
    def window(self) -> tuple[int, int]:
        """The rows [low, high) that may be sampled."""
        return sampling_window(self.rows_written, self.length, self.n_step)

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step, teacher_q_values: jax.Array) -> None:
        """Appends a row per environment: what was seen, what was done, what came of it, what the teacher thinks."""
        row = Rows(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(step.reward, -1, 1).astype(np.float32),
            terminated=step.terminated,
            age=self.env_age,
            valid=~step.reset,
            teacher_q_values=teacher_q_values,
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

    at = row % length, env
    return Batch(stack(row), rows.action[at], returns, stack(row + steps), discount, rows.teacher_q_values[at])


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


class Losses(NamedTuple):
    """What the loss is made of; scalars, but for the last."""

    loss: jax.Array
    td_loss: jax.Array
    distill_loss: jax.Array
    q_values: jax.Array
    """float32 (B,), of the actions taken"""


def td_target(target_params: Params, batch: Batch, apply: Apply) -> jax.Array:
    """y = Σ γᵏ r + γᵐ max Q'(s',·), float32 (B,)."""
    bootstrap = apply(target_params, batch.bootstrap_observation).max(axis=1)
    return batch.n_step_return + batch.bootstrap_discount * bootstrap


def qdagger_loss(
    params: Params, target: jax.Array, batch: Batch, distill_coefficient: float, temperature: float, apply: Apply
) -> tuple[jax.Array, Losses]:
    """TD error plus distillation: Agarwal et al. (2022), section 4.2, eq. 2.

    L = mean (Q(s,a) − y)² + λ · mean KL( softmax(Q_T(s,·)/τ) ‖ softmax(Q(s,·)/τ) ),  y = `td_target`
    """
    q_values = apply(params, batch.observation)
    q_of_action = of_action(q_values, batch.action)
    td_loss = jnp.mean((q_of_action - target) ** 2)
    student = jax.nn.log_softmax(q_values / temperature)
    teacher = jax.nn.log_softmax(batch.teacher_q_values / temperature)
    distill_loss = jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - student), axis=1))
    loss = td_loss + distill_coefficient * distill_loss
    return loss, Losses(loss, td_loss, distill_loss, q_of_action)


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
    distill_coefficient: float,
    count: int,
    args: Args,
    apply: Apply,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Losses]:
    """``count`` updates, each on a batch of its own from the ``window`` of rows; returns the last one's losses too."""

    def one(state: TrainState, part: tuple[jax.Array, Batch]) -> tuple[TrainState, Losses]:
        gradients, losses = jax.grad(qdagger_loss, has_aux=True)(
            state.params, *part, distill_coefficient, args.temperature, apply
        )
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


def distill_coefficient_now(
    recent_returns: Sequence[float], teacher_return: float, random_return: float, distill_coefficient: float
) -> float:
    """λ: falls from ``distill_coefficient`` to 0 as the student's last 10 games come up from random to the teacher.

    With a random return of 0 it is the paper's max(1 − G/G_T, 0). A teacher no better than random leaves no way to come
    up: then λ is ``distill_coefficient`` below the teacher's return, and 0 from there on.
    """
    if len(recent_returns) < 10:
        return distill_coefficient
    gap, advantage = teacher_return - float(np.mean(recent_returns[-10:])), teacher_return - random_return
    if advantage <= 0:
        return distill_coefficient if gap > 0 else 0.0
    return distill_coefficient * min(max(gap / advantage, 0.0), 1.0)


def main(args: Args) -> None:
    # ==================== setup ====================
    check_args(args)
    check_upload_possible(args)
    on_cpu = pick_device()
    envs = AtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability)
    require_replay_memory(args, functools.partial(Replay.num_bytes, num_actions=envs.num_actions), available_memory())
    teacher_path = find_teacher(teacher_repo(args), args.teacher_model_exp_name)
    teacher, teacher_params = load_teacher(teacher_path, envs.num_actions, args.env_id, args.bf16)

    run = Run(args)
    writer = run.writer
    rng = np.random.default_rng(args.seed)
    student = QNetwork(envs.num_actions, fast_dtype(args.bf16))
    optimizer = optax.adam(lambda n: args.learning_rate * jnp.minimum((n + 1) / max(args.warmup_updates, 1), 1.0))
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    params = first_params(student, init_key)
    state = TrainState(params, jax.tree.map(jnp.copy, params), optimizer.init(params), key)
    run.keep(state=(kept := TreeState(lambda: state)), exploration=RandomState(rng))
    state = kept.restored(state)
    learn = functools.partial(update, args=args, apply=student.apply, optimizer=optimizer)
    learn = jax.jit(learn, static_argnames="count", donate_argnames="state")
    teacher_apply = jax.jit(teacher.apply)
    teacher_q_function = make_q_function(teacher_apply, lambda: teacher_params)
    student_q_function = make_q_function(jax.jit(student.apply), lambda: state.params)

    # ==================== phase 1: the teacher ====================
    teacher_return = run.evaluate("teacher", teacher_q_function, args.teacher_eval_episodes)
    random_return = run.evaluate("random", None, args.teacher_eval_episodes)
    if run.phase == 1:
        writer.add_scalar("charts/teacher/avg_episodic_return", teacher_return, 0)
        writer.add_scalar("charts/random/avg_episodic_return", random_return, 0)
        warn_of_weak_teacher(teacher_return, random_return, args.env_id)
        run.end_phase(2 if args.offline_steps > 0 else 4)

    # ==================== phase 2: teacher data ====================
    if run.phase in (2, 3):
        replay = Replay(args.teacher_steps, envs.num_actions, args)
        run.keep_replay("teacher", ReplayState(replay))
    if run.phase == 2:
        # On a GPU the teacher chooses for one half of the games while the other half is being played.
        games = HalvedAtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability, not on_cpu)
        run.reset(games)
        epsilon_at = functools.partial(linear_schedule, args.start_e, args.end_e, args.teacher_steps)
        rollout = games.rollout(teacher_q_function, lambda: epsilon_at(run.done - args.num_envs), rng)
        for _ in run.steps(replay.length * args.num_envs, args.num_envs, "teacher data", "step"):
            played = next(rollout)
            replay.add(*played)
            run.show_return(score for score, _ in played.step.games)
        games.close()
        writer.add_scalar("charts/teacher/SPS", int(run.done / run.seconds), 0)
        run.end_phase(3)

    # ==================== phase 3: offline ====================
    if run.phase == 3:

        def evaluate_if_due(global_step: int) -> None:
            name = f"offline {global_step}"
            due = global_step % args.offline_eval_frequency == 0 or global_step == args.offline_steps
            if due and global_step > 0 and name not in run.results:
                save_model(state.params, run.dir / f"{args.exp_name}-offline-{global_step}.cleanrl_model")
                offline_return = run.evaluate(name, student_q_function, args.eval_episodes)
                writer.add_scalar("charts/offline/avg_episodic_return", offline_return, global_step)
                run.show_return([offline_return])

        evaluate_if_due(run.done)  # a run that was stopped in an evaluation plays it again
        count = 1 if on_cpu else offline_updates_per_call(args)
        for updates in run.steps(args.offline_steps, count, "offline", "update"):
            global_step = updates + count
            state, losses = learn(state, replay.rows, replay.window, args.distill_coefficient, count)
            run.last_update = losses._asdict()
            if global_step % args.target_network_frequency == 0:
                state = update_target(state, args.tau)
            if global_step % 100 == 0:
                run.check_learning()
                writer.add_scalar("charts/offline/loss", losses.loss.item(), global_step)
                writer.add_scalar("charts/offline/q_loss", losses.td_loss.item(), global_step)
                writer.add_scalar("charts/offline/distill_loss", losses.distill_loss.item(), global_step)
                writer.add_scalar("charts/offline/updates_per_second", global_step / run.seconds, global_step)
            evaluate_if_due(global_step)
        del replay  # before the online replay is made: the two never exist at once
        run.drop_replay()
        run.end_phase(4)

    # ==================== phase 4: online ====================
    if run.phase == 4:
        replay = Replay(args.buffer_size, envs.num_actions, args)
        run.keep_replay("online", ReplayState(replay))
        observation = run.reset(envs)
        recent_returns: list[int] = run.state.setdefault("recent_returns", [])
        distill_coefficient = run.state.get("distill_coefficient", args.distill_coefficient)
        exploration_steps = args.exploration_fraction * args.total_timesteps
        for online_step in run.steps(args.total_timesteps, args.num_envs, "online", "step"):
            global_step, next_step = args.offline_steps + online_step, online_step + args.num_envs
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
            action = envs.send(epsilon_greedy(student_q_function(observation), epsilon, rng))

            # The emulator plays while the student learns and the teacher judges what it showed; on a GPU no call waits.
            updates_due = 0
            if online_step >= args.learning_starts:
                if updates_due := times_due(online_step, next_step, args.train_frequency):
                    state, losses = learn(state, replay.rows, replay.window, distill_coefficient, updates_due)
                    run.last_update = losses._asdict()
                for _ in range(times_due(online_step, next_step, args.target_network_frequency)):
                    state = update_target(state, args.tau)

            teacher_q_values, step = teacher_apply(teacher_params, observation), envs.recv()
            replay.add(observation, action, step, teacher_q_values)
            observation = step.observation
            if updates_due and next_step >= run.state.get("next_loss_log", 0):  # seldom: reading waits for the device
                run.state["next_loss_log"] = next_step + 100
                run.check_learning()
                writer.add_scalar("losses/loss", losses.loss.item(), global_step)
                writer.add_scalar("losses/td_loss", losses.td_loss.item(), global_step)
                writer.add_scalar("losses/distill_loss", losses.distill_loss.item(), global_step)
                writer.add_scalar("losses/q_values", losses.q_values.mean().item(), global_step)
            for score, length in step.games:
                recent_returns.append(score)
                del recent_returns[:-10]
                writer.add_scalar("charts/episodic_return", score, global_step)
                writer.add_scalar("charts/episodic_length", length, global_step)
                run.show_return(recent_returns)
            run.state["distill_coefficient"] = distill_coefficient = distill_coefficient_now(
                recent_returns, teacher_return, random_return, args.distill_coefficient
            )
            if times_due(online_step, next_step, 100):
                writer.add_scalar("charts/SPS", int(next_step / run.seconds), global_step)
                writer.add_scalar("charts/epsilon", epsilon, global_step)
                writer.add_scalar("charts/distill_coeff", distill_coefficient, global_step)
        del replay
        run.drop_replay()
        run.end_phase(5)
    envs.close()

    # ==================== phase 5: save, evaluate ====================
    model_path = run.dir / f"{args.exp_name}.cleanrl_model"
    if run.phase == 5:
        if args.save_model:
            save_model(state.params, model_path)
            print(f"model saved to {model_path}")
        run.evaluate("online", student_q_function, args.eval_episodes)
        for i, episodic_return in enumerate(run.results["online"]):
            writer.add_scalar("eval/episodic_return", episodic_return, i)
        run.end_phase(6)

    # ==================== phase 6: upload ====================
    run.close(run.videos)
    if args.upload_model:
        upload_model(args, run.dir, model_path, run.results["online"], run.videos)
    run.finish()
    print_summary(run.results, args.env_id, args.end_e)


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
