"""QDagger on Atari in JAX: a student learns from a trained teacher, first offline, then online.

Agarwal et al. (2022), Reincarnating Reinforcement Learning, arXiv 2206.01626. Docs: docs/qdagger.md
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the helpers beside this script

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.serialization import from_state_dict, msgpack_restore, msgpack_serialize, to_state_dict
from flax.traverse_util import flatten_dict, unflatten_dict

from cleanrl_utils.atari import AtariEnvs, StepResult
from cleanrl_utils.checks import MAY_CHANGE, Range, check_args
from cleanrl_utils.device import JaxHardware as Hardware
from cleanrl_utils.errors import UserError, one_line_errors
from cleanrl_utils.evaluation import play_episodes, warn_of_weak_teacher
from cleanrl_utils.models import find_model, read_model
from cleanrl_utils.networks import init_like_pytorch, save_flax
from cleanrl_utils.run import Run, parse_args

BLANK = np.zeros((1, 4, 84, 84), np.uint8)  # an observation, to initialise networks
Params = dict[str, Any]  # the variables of a flax network: {"params": {layer: {"kernel": …, "bias": …}}}

# Gradient steps that are made at once, at most. They are compiled into one program, which takes less time.
UPDATES_PER_CALL = 4
LOG_EVERY = 100  # updates in the offline phase, environment steps in the online phase
RECENT_EPISODES = 10  # training episodes whose mean return anneals λ


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
    """whether to film an episode after each evaluation (check out the `videos` folder)"""
    save_model: Annotated[bool, MAY_CHANGE] = True
    """whether to save the final model into `runs/{run_name}`; those of earlier evaluations are always saved"""
    upload_model: Annotated[bool, MAY_CHANGE] = False
    """whether to upload the saved model to the Hugging Face Hub"""
    hf_entity: Annotated[str, MAY_CHANGE] = ""
    """the user or organisation on the Hugging Face Hub; the owner of the token if empty"""
    resume: str | None = None
    """the directory `runs/{run_name}` of a run to resume with its flags"""
    checkpoint_minutes: Annotated[float, Range(0, 10**6), MAY_CHANGE] = 10
    """minutes between checkpoints, which are also saved at evaluations, after phases and when stopped; 0: none"""

    # Environment
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or, with sticky actions of probability 0.25, ALE/{Game}-v5"""
    num_envs: Annotated[int, Range(1, 1000)] = 16
    """parallel environments, halved while a buffer or the run is too small; updates per step do not depend on them"""

    # DQN
    total_timesteps: Annotated[int, Range(0), MAY_CHANGE] = 10000000
    """environment steps (4 frames each) of the online phase; 0 ends the run after the offline phase"""
    learning_rate: Annotated[float, Range(1e-12, 1000)] = 1e-4
    """the learning rate of the optimizer"""
    buffer_size: Annotated[int, Range(1), MAY_CHANGE] = 1000000
    """environment steps in the online replay buffer, 7.1 kB each"""
    gamma: Annotated[float, Range(0, 1)] = 0.99
    """the discount factor"""
    n_step: Annotated[int, Range(1, 1000)] = 1
    """the number of rewards summed before bootstrapping (paper: 3)"""
    tau: Annotated[float, Range(0, 1)] = 1.0
    """the target network update rate"""
    target_network_frequency: Annotated[int, Range(1)] = 1000
    """the updates (offline) or environment steps (online) between updates of the target network"""
    batch_size: Annotated[int, Range(1)] = 32
    """the batch size of a sample from the replay buffer"""
    start_e: Annotated[float, Range(0, 1)] = 1.0
    """the starting epsilon for exploration"""
    end_e: Annotated[float, Range(0, 1)] = 0.01
    """the ending epsilon for exploration, and the epsilon of evaluations"""
    exploration_fraction: Annotated[float, Range(0, 1)] = 0.10
    """the fraction of `total_timesteps` over which epsilon is annealed, counted from the first offline update"""
    learning_starts: Annotated[int, Range(0)] = 80000
    """environment steps of the online phase before the first update"""
    train_frequency: Annotated[int, Range(1)] = 4
    """the online environment steps per update"""

    # QDagger
    teacher_policy_hf_repo: Annotated[str | None, MAY_CHANGE] = None
    """the teacher: a file, directory or hub repository; by default cleanrl/{env_id}-{teacher_model_exp_name}-seed1"""
    teacher_model_exp_name: str = "dqn_atari_jax"
    """the name of the teacher's file without .cleanrl_model or .zip; by default, a single model may have any name"""
    teacher_eval_episodes: Annotated[int, Range(1)] = 10
    """episodes of the evaluation of the teacher, and of the random policy"""
    teacher_steps: Annotated[int, Range(1)] = 500000
    """environment steps of the teacher in its replay buffer; its epsilon is annealed over them"""
    offline_steps: Annotated[int, Range(0)] = 500000
    """offline updates on the teacher's replay buffer; 0 skips teacher data and offline phase (kickstarting)"""
    temperature: Annotated[float, Range(1e-12, 1000)] = 0.1
    """the temperature of both softmaxes in the distillation loss (CleanRL: 1)"""
    distill_coefficient: Annotated[float, Range(0, 10**6)] = 1.0
    """λ, the weight of the distillation loss, before it is annealed; 0 trains without this loss"""
    online_learning_rate: Annotated[float | None, Range(1e-12, 1000)] = None
    """the learning rate of the online phase, to which the offline one is annealed linearly; by default the same"""
    final_learning_rate: Annotated[float | None, Range(1e-12, 1000)] = None
    """the learning rate at λ = 0, annealed online like λ, also if λ stays 0 (authors: 1e-5); by default constant"""
    warmup_updates: Annotated[int, Range(0)] = 0
    """updates of linear learning rate warmup; try 300 with a large learning rate"""

    # Evaluations of the student
    eval_episodes: Annotated[int, Range(1), MAY_CHANGE] = 10
    """episodes of each evaluation of the student"""
    offline_eval_frequency: Annotated[int, Range(1)] = 100000
    """offline updates between evaluations of the student, which also save it"""
    online_eval_frequency: Annotated[int, Range(1), MAY_CHANGE] = 500000
    """online environment steps between evaluations of the student, which also save it"""


@dataclass
class Progress:
    """The progress of a run, saved in each checkpoint."""

    returns: dict[str, list[float]] = field(default_factory=dict)  # episodic returns by the name of the evaluation
    teacher_step: int = 0  # environment steps of teacher data
    offline_update: int = 0
    online_step: int = 0  # environment steps of the student
    online_update: int = 0
    recent_returns: list[float] = field(default_factory=list)  # returns of the last training episodes


Conv3x3 = functools.partial(nn.Conv, kernel_size=(3, 3), padding=1)
# bfloat16 and TF32 would round away the differences between actions.
LastDense = functools.partial(nn.Dense, dtype=jnp.float32, precision="highest")


def largest(first: jax.Array, second: jax.Array, third: jax.Array) -> jax.Array:
    """Return the largest of three elements. The gradient goes to the first of equal ones, as in PyTorch."""
    best = jnp.where(second > first, second, first)
    return jnp.where(third > best, third, best)


@jax.checkpoint  # the backward pass compares again, which takes less time than storing the results
def max_pool(x: jax.Array) -> jax.Array:
    """Max-pool with 3×3 windows, stride 2 and padding 1: (B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, C).

    Its gradient takes less time on a CPU than that of `flax.linen.max_pool`.
    """
    padding = (0, 0), (1, x.shape[1] % 2), (1, x.shape[2] % 2), (0, 0)
    x = jnp.pad(x, padding, constant_values=-jnp.inf)
    x = largest(x[:, :, :-2:2], x[:, :, 1:-1:2], x[:, :, 2::2])
    return largest(x[:, :-2:2], x[:, 1:-1:2], x[:, 2::2])


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection: (B, H, W, C) → (B, H, W, C)."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = Conv3x3(self.channels, dtype=self.dtype)(nn.relu(x))
        return x + Conv3x3(self.channels, dtype=self.dtype)(nn.relu(hidden))


class ConvSequence(nn.Module):
    """A convolution, a max-pooling and two residual blocks: (B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, channels)."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = max_pool(Conv3x3(self.channels, dtype=self.dtype)(x))
        x = ResidualBlock(self.channels, self.dtype)(x)
        return ResidualBlock(self.channels, self.dtype)(x)


class QNetwork(nn.Module):
    """The student, an ImpalaCNN (Espeholt et al., 2018): uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    num_actions: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.transpose(0, 2, 3, 1) / 255.0  # flax has the channels last
        for channels in (16, 32, 32):
            x = ConvSequence(channels, self.dtype)(x)
        x = nn.relu(x).reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(256, dtype=self.dtype)(x))
        return LastDense(self.num_actions)(x)


class TeacherNetwork(nn.Module):
    """A teacher, the network of Mnih et al. (2015): uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    num_actions: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.transpose(0, 2, 3, 1) / 255.0
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(channels, (size, size), stride, padding="VALID", dtype=self.dtype)(x))
        x = nn.relu(nn.Dense(512, dtype=self.dtype)(x.reshape(x.shape[0], -1)))
        return LastDense(self.num_actions)(x)


class C51Network(nn.Module):
    """A teacher of C51 (Bellemare et al., 2017): a Q-value is the mean of a distribution over 51 returns."""

    num_actions: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        atoms = self.param("atoms", nn.initializers.zeros, (51,))
        network = TeacherNetwork(self.num_actions * 51, self.dtype)
        nn.share_scope(self, network)  # its layers have no further prefix
        probabilities = nn.softmax(network(x).reshape(len(x), self.num_actions, 51))
        return jnp.sum(probabilities * atoms, axis=2)  # @ would compute in TF32 on a GPU


class Record(NamedTuple):
    """The arrays that are stored of environment steps: (L, N, …) of L steps of N environments, (N, …) of one step."""

    frame: jax.Array  # uint8 (…, 84, 84), the newest of each observation; stacks of 4 are built when sampling
    action: jax.Array  # uint8
    reward: jax.Array  # float32, clipped to [−1, 1]
    terminated: jax.Array  # bool, a life was lost or the episode ended
    age: jax.Array  # int32, steps since the reset of the episode: a stack has no frames from before it
    valid: jax.Array  # bool, False at the final observation of an episode or stopped run: no transition starts there
    teacher_q_values: jax.Array  # float32 (…, num_actions), computed once: a step is sampled often


class Batch(NamedTuple):
    """B transitions."""

    observation: jax.Array  # uint8 (B, 4, 84, 84)
    action: jax.Array  # uint8 (B,)
    n_step_return: jax.Array  # float32 (B,), Σ γᵏ r of the rewards before the bootstrap observation
    bootstrap_observation: jax.Array  # uint8 (B, 4, 84, 84)
    bootstrap_discount: jax.Array  # float32 (B,), γᵐ after m rewards, or 0 after a termination
    teacher_q_values: jax.Array  # float32 (B, num_actions)


class Replay:
    """A replay buffer of the last ``size`` environment steps, on the device of the networks.

    Here, a step is one of each environment: step t is in slot t % ``length`` of the ring.
    """

    def __init__(self, size: int, num_envs: int, num_actions: int, n_step: int, hardware: Hardware):
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
            teacher_q_values=jnp.zeros((*shape, num_actions), jnp.float32, device=hardware.device),
        )

    def add(
        self, observation: np.ndarray, action: np.ndarray, result: StepResult, teacher_q_values: np.ndarray
    ) -> None:
        """Add a step of each environment: the observation before it, the action taken and the result; arrays (N, …)."""
        record = Record(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(result.reward, -1, 1).astype(np.float32),
            terminated=result.terminated,  # a truncated episode bootstraps from the observation in the next record
            age=self.age,
            valid=~result.reset,  # the step after the end of an episode only resets it: its action is ignored
            teacher_q_values=teacher_q_values,
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
        teacher_q_values=ring.teacher_q_values[slot, env],
    )


def stack_frames(ring: Record, t: jax.Array, env: jax.Array) -> jax.Array:
    """Return the observations at steps ``t``, uint8 (B, 4, 84, 84), with zeros for frames before the reset."""
    length = len(ring.valid)
    ago = jnp.arange(3, -1, -1)  # steps, oldest frame first
    in_episode = ring.age[t % length, env][:, None] >= ago
    return ring.frame[(t[:, None] - ago) % length, env[:, None]] * in_episode[:, :, None, None]


class Teacher:
    """A trained agent, whose weights do not change, from a model file of any format.

    A policy's logits are multiplied by ``temperature``: softmax(Q-values / temperature) is then the policy.
    """

    def __init__(self, path: Path, num_actions: int, temperature: float, hardware: Hardware):
        candidates = [network(num_actions, hardware.dtype) for network in (QNetwork, TeacherNetwork, C51Network)]
        layers = {}
        for network in candidates:
            shapes = jax.eval_shape(network.init, jax.random.PRNGKey(0), BLANK)
            layers[network] = flatten_dict(shapes, sep="/")
        self.network, weights, is_policy = read_model(path, "flax", layers)
        if is_policy:
            weights["params/Dense_1/kernel"] *= temperature
            weights["params/Dense_1/bias"] *= temperature
        self.params = jax.tree.map(jnp.asarray, unflatten_dict(weights, sep="/"))
        self.forward = jax.jit(self.network.apply)
        # A policy samples its actions; a Q-network takes the one with the largest Q-value.
        self.action_temperature = temperature if is_policy else 0.0

    def q_values(self, observation: np.ndarray) -> np.ndarray:
        """Compute Q-values, float32 (B, num_actions), of observations, uint8 (B, 4, 84, 84)."""
        return np.asarray(self.forward(self.params, observation))


class Losses(NamedTuple):
    """The loss, its terms and the mean Q-value."""

    loss: jax.Array
    td_loss: jax.Array
    distill_loss: jax.Array
    q_values: jax.Array  # the mean over the batch, of the actions taken


def qdagger_loss(
    params: Params, q_network: nn.Module, target_q_values: jax.Array, batch: Batch, distill_coefficient: float,
    temperature: float,
) -> tuple[jax.Array, Losses]:  # fmt: skip
    """Compute the QDagger loss (Agarwal et al., 2022, section 4.2, eq. 2).

    L = mean (Q(s,a) − y)² + λ · mean KL( softmax(Q_T(s,·) / temperature) ‖ softmax(Q(s,·) / temperature) )

    with y = Σ γᵏ r + γᵐ (1 − terminated) max Q'(s',·), λ = ``distill_coefficient`` and the teacher's Q-values Q_T.
    ``target_q_values`` are Q'(s',·), float32 (B, num_actions).
    """
    y = batch.n_step_return + batch.bootstrap_discount * target_q_values.max(axis=1)
    q_values = q_network.apply(params, batch.observation)
    # A masked sum instead of an index, whose gradient is a scatter, which is slow on a GPU.
    q_of_action = jnp.sum(q_values, axis=1, where=jnp.arange(q_values.shape[1]) == batch.action[:, None])
    td_loss = jnp.mean((q_of_action - y) ** 2)
    student_log_policy = jax.nn.log_softmax(q_values / temperature)
    teacher_log_policy = jax.nn.log_softmax(batch.teacher_q_values / temperature)
    kl = jnp.sum(jnp.exp(teacher_log_policy) * (teacher_log_policy - student_log_policy), axis=1)
    distill_loss = jnp.mean(kl)
    loss = td_loss + distill_coefficient * distill_loss
    return loss, Losses(loss, td_loss, distill_loss, q_of_action.mean())


class TrainState(NamedTuple):
    """The state that gradient steps change."""

    params: Params
    target_params: Params
    optimizer_state: optax.OptState
    key: jax.Array


class Student:
    """The student: Q-network, target network, optimizer and random numbers."""

    action_temperature = 0.0  # it takes the action with the largest Q-value

    def __init__(self, args: Args, num_actions: int, hardware: Hardware):
        self.args = args
        self.device = hardware.device
        key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
        self.q_network = QNetwork(num_actions, hardware.dtype)
        params = init_like_pytorch(self.q_network, init_key, BLANK)
        if params.keys() != {"params"}:
            has = ", ".join(sorted(params.keys() - {"params"}))
            raise UserError(f"QNetwork has {has}, and only layers with nothing but parameters can be trained here")
        self.optimizer = optax.inject_hyperparams(optax.adam)(args.learning_rate)
        state = TrainState(params, params, self.optimizer.init(params), key)
        # As arrays of no particular device, they would change in the first call, and the second would compile again.
        self.state = jax.device_put(state, hardware.device)
        self.forward = jax.jit(self.q_network.apply)
        self.compiled_gradient_steps = jax.jit(self.gradient_steps)

    def q_values(self, observation: np.ndarray) -> np.ndarray:
        """Compute Q-values, float32 (B, num_actions), of observations, uint8 (B, 4, 84, 84)."""
        return np.asarray(self.forward(self.state.params, observation))

    def update(self, replay: Replay, distill_coefficient: float, learning_rates: Sequence[float]) -> Losses:
        """Make a gradient step for each learning rate, at least one; return the losses of the last one."""
        sampled = replay.sampled_steps()
        for i in range(0, len(learning_rates), UPDATES_PER_CALL):
            rates = learning_rates[i : i + UPDATES_PER_CALL]
            self.state, losses = self.compiled_gradient_steps(
                self.state, replay.ring, sampled.start, sampled.stop, distill_coefficient, *rates
            )
        return losses

    def gradient_steps(
        self, state: TrainState, ring: Record, low: int, high: int, distill_coefficient: float, *learning_rates: float
    ) -> tuple[TrainState, Losses]:
        """Make gradient steps on transitions of steps [low, high); return the new state and the last losses.

        The function is compiled: its Python code runs only in the first calls, so every value that changes is an
        argument.
        """
        args = self.args
        key, *sample_keys = jax.random.split(state.key, len(learning_rates) + 1)
        # One large batch, as in the PyTorch script, is slower here.
        batches = [sample(ring, low, high, args.batch_size, k, args.n_step, args.gamma) for k in sample_keys]
        # The target network does not change in a call. XLA computes its forward passes faster if they come first.
        target_q_values = [self.q_network.apply(state.target_params, batch.bootstrap_observation) for batch in batches]
        params = state.params
        optimizer_state = state.optimizer_state
        for i, learning_rate in enumerate(learning_rates):
            gradients, losses = jax.grad(qdagger_loss, has_aux=True)(
                params, self.q_network, target_q_values[i], batches[i], distill_coefficient, args.temperature
            )
            optimizer_state.hyperparams["learning_rate"] = learning_rate  # in a dict of this trace
            updates, optimizer_state = self.optimizer.update(gradients, optimizer_state, params)
            params = optax.apply_updates(params, updates)
        return TrainState(params, state.target_params, optimizer_state, key), losses

    def update_target(self, tau: float) -> None:
        """Move the target network towards the Q-network by the fraction ``tau``."""
        target_params = jax.jit(optax.incremental_update)(self.state.params, self.state.target_params, tau)
        self.state = self.state._replace(target_params=target_params)

    def save(self, path: Path) -> None:
        """Save the variables of the Q-network; raise a UserError if one is NaN or infinite."""
        save_flax(path, self.state.params)

    def dump(self) -> bytes:
        """Serialise the state of the student for a checkpoint."""
        return msgpack_serialize(to_state_dict(self.state))

    def load(self, data: bytes) -> None:
        """Restore the state that :meth:`dump` serialised; ValueError if it is that of another network."""
        state = from_state_dict(self.state, msgpack_restore(data))
        for old, new in zip(jax.tree.leaves(self.state), jax.tree.leaves(state), strict=True):
            if old.shape != new.shape:
                raise ValueError(f"an array has shape {new.shape}, now it is {old.shape}")
        # The settings of the optimizer follow from flags and script.
        settings = self.state.optimizer_state.hyperparams
        state = state._replace(optimizer_state=state.optimizer_state._replace(hyperparams=settings))
        self.state = jax.device_put(state, self.device)


def distillation_share(recent_returns: Sequence[float], teacher_return: float, random_return: float) -> float:
    """Compute λ's share of `distill_coefficient`: clip((G_T − G) / (G_T − G_random), 0, 1).

    G is the mean return of the last `RECENT_EPISODES` training episodes; before there are so many, the share is 1. This
    is section 4.2 of Agarwal et al. (2022), relative to the random policy's return as in the authors' code.
    """
    if len(recent_returns) < RECENT_EPISODES:
        return 1.0
    gap = teacher_return - float(np.mean(recent_returns))
    full_gap = max(teacher_return - random_return, 1e-9)  # a teacher may be no better than the random policy
    return min(max(gap / full_gap, 0.0), 1.0)


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """Anneal linearly from ``start`` to ``end`` over ``duration`` steps."""
    if duration <= 0:
        return end
    return start + (end - start) * min(step / duration, 1.0)


def learning_rate_at(update: int, args: Args, share: float = 1.0) -> float:
    """Compute the learning rate of an update, counted from the first offline one, at this share of λ."""
    warmup = linear_schedule(0.0, 1.0, args.warmup_updates, update + 1)
    online_rate = args.online_learning_rate or args.learning_rate
    if update < args.offline_steps:
        return warmup * linear_schedule(args.learning_rate, online_rate, args.offline_steps, update)
    final_rate = args.final_learning_rate or online_rate  # online, the rate depends on λ instead of the update
    return warmup * (final_rate + (online_rate - final_rate) * share)


def epsilon_greedy(q_values: np.ndarray, epsilon: float, rng: np.random.Generator, temperature: float) -> np.ndarray:
    """Choose actions, int64 (B,), from Q-values (B, A): random ones with probability ``epsilon``.

    The others have the largest Q-value or, above ``temperature`` 0, are sampled from softmax(Q / temperature).
    """
    batch_size, num_actions = q_values.shape
    random_action = rng.integers(0, num_actions, batch_size)
    explore = rng.random(batch_size) < epsilon
    if temperature > 0:
        q_values = q_values + temperature * rng.gumbel(size=q_values.shape)  # the Gumbel-max trick samples the softmax
    return np.where(explore, random_action, q_values.argmax(axis=1))


def log_losses(run: Run, phase: str, losses: Losses, step: int) -> None:
    """Log the losses of an update by CleanRL's names."""
    if phase == "offline":
        run.log("charts/offline/loss", losses.loss, step)
        run.log("charts/offline/q_loss", losses.td_loss, step)
        run.log("charts/offline/distill_loss", losses.distill_loss, step)
    else:
        for name, term in losses._asdict().items():
            run.log(f"losses/{name}", term, step)


def set_up(args: Args) -> tuple[Args, Hardware]:
    """Choose the hardware and check the flags; return the flags that the run uses and the hardware."""
    hardware = Hardware.choose(args)
    one_step = Replay(size=1, num_envs=1, num_actions=18, n_step=args.n_step, hardware=hardware)  # no game has more
    return check_args(args, hardware.device, step_bytes=sum(array.nbytes for array in one_step.ring)), hardware


def times_due(start: int, end: int, every: int) -> int:
    """Return the number of multiples of ``every`` in (start, end]."""
    return end // every - start // every


def main(args: Args) -> None:
    # ==================== setup ====================
    args, hardware = set_up(args)
    make_envs = functools.partial(AtariEnvs, args.env_id)
    envs = make_envs(num_envs=args.num_envs)
    default_teacher = f"cleanrl/{args.env_id.replace('/', '-')}-{args.teacher_model_exp_name}-seed1"
    teacher_path = find_model(args.teacher_policy_hf_repo or default_teacher, args.teacher_model_exp_name)
    teacher = Teacher(teacher_path, envs.num_actions, args.temperature, hardware)
    student = Student(args, envs.num_actions, hardware)
    rng = np.random.default_rng(args.seed)
    progress = Progress()
    run = Run(args, progress=progress, student=student, rng=rng, teacher=teacher_path)  # a checkpoint holds these

    def evaluate(name: str, policy: Teacher | Student, episodes: int, epsilon: float) -> float:
        """Play whole episodes, keep their returns, and return the mean."""

        def act(observation: np.ndarray, action_rng: np.random.Generator) -> np.ndarray:
            run.exit_if_signalled()  # a resumed run repeats the evaluation
            return epsilon_greedy(policy.q_values(observation), epsilon, action_rng, policy.action_temperature)

        progress.returns[name] = play_episodes(name, act, episodes, make_envs, args.seed, run.video_dir)
        return float(np.mean(progress.returns[name]))

    def evaluate_student(phase: str, step: int, global_step: int, replay: Replay) -> None:
        """Save the student and a checkpoint, evaluate the student and log its mean return.

        Call it before the updates of a step: a run resumed from the checkpoint then begins with the evaluation.
        """
        student.save(run.model_path(f"-{phase}-{step}"))
        run.save(replay)
        mean_return = evaluate(f"{phase} {step}", student, args.eval_episodes, args.end_e)
        run.log(f"charts/{phase}/avg_episodic_return", mean_return, global_step)

    with run:  # restores student, rng and progress of a resumed run, in place; a signal ends it after a checkpoint
        # ==================== evaluate teacher and random policy ====================
        for name, epsilon in (("teacher", args.end_e), ("random", 1.0)):  # at epsilon 1, the network does not matter
            if name not in progress.returns:
                mean_return = evaluate(name, teacher, args.teacher_eval_episodes, epsilon)
                run.log(f"charts/{name}/avg_episodic_return", mean_return, 0)
        warn_of_weak_teacher(progress.returns)
        teacher_return = float(np.mean(progress.returns["teacher"]))
        random_return = float(np.mean(progress.returns["random"]))

        if args.offline_steps > 0 and f"offline {args.offline_steps}" not in progress.returns:
            replay = Replay(args.teacher_steps, args.num_envs, envs.num_actions, args.n_step, hardware)
            run.restore_replay(replay, progress.teacher_step)

            # ==================== teacher data ====================
            if progress.teacher_step < replay.size:
                # The step is in the seed, so that a resumed run does not repeat the first episodes.
                observation = envs.reset(args.seed, "teacher data", progress.teacher_step)
                steps = range(progress.teacher_step, replay.size, args.num_envs)
                for step in run.steps("teacher data", "step", steps):
                    teacher_q_values = teacher.q_values(observation)
                    epsilon = linear_schedule(args.start_e, args.end_e, args.teacher_steps, step)
                    action = epsilon_greedy(teacher_q_values, epsilon, rng, teacher.action_temperature)
                    action = envs.send(action)  # the actions taken: FIRE starts an episode or a life
                    result = envs.recv()
                    replay.add(observation, action, result, teacher_q_values)
                    observation = result.observation
                    progress.teacher_step = step + args.num_envs
                    run.save_if_due(replay)
                run.log("charts/teacher/SPS", run.steps_per_second, 0)
                run.save(replay)

            # ==================== offline: learn from the teacher's data ====================
            # A divisor of all these: evaluations and updates of the target network come between two calls.
            at_once = math.gcd(UPDATES_PER_CALL, args.target_network_frequency, args.offline_eval_frequency)
            for step in run.steps("offline", "update", range(progress.offline_update, args.offline_steps, at_once)):
                if step > 0 and step % args.offline_eval_frequency == 0:
                    evaluate_student("offline", step, step, replay)
                updates = range(step, min(step + at_once, args.offline_steps))
                learning_rates = [learning_rate_at(i, args) for i in updates]
                losses = student.update(replay, args.distill_coefficient, learning_rates)
                if updates.stop % args.target_network_frequency == 0:
                    student.update_target(args.tau)
                progress.offline_update = updates.stop
                if times_due(step, updates.stop, LOG_EVERY):  # seldom, since reading a value synchronises with a GPU
                    log_losses(run, "offline", losses, updates.stop)
                    run.log("charts/offline/updates_per_second", run.steps_per_second, updates.stop)
                run.save_if_due(replay)
            evaluate_student("offline", args.offline_steps, args.offline_steps, replay)
            student.update_target(1.0)  # the online phase starts with an up-to-date target network
            del replay  # before the online replay buffer is made: memory holds one of them
            run.save()

        # ==================== online: learn from the student's own data ====================
        if progress.online_step < args.total_timesteps:
            replay = Replay(args.buffer_size, args.num_envs, envs.num_actions, args.n_step, hardware)
            run.restore_replay(replay, progress.online_step)
            losses = None
            observation = envs.reset(args.seed, "online", progress.online_step)
            steps = range(progress.online_step, args.total_timesteps, args.num_envs)
            for step in run.steps("online", "step", steps):
                next_step = step + args.num_envs
                global_step = args.offline_steps + step  # offline updates count as steps
                if step > 0 and times_due(step - args.num_envs, step, args.online_eval_frequency):
                    evaluate_student("online", step, global_step, replay)
                epsilon_steps = args.exploration_fraction * args.total_timesteps
                epsilon = linear_schedule(args.start_e, args.end_e, epsilon_steps, global_step)
                action = epsilon_greedy(student.q_values(observation), epsilon, rng, student.action_temperature)
                action = envs.send(action)  # the actions taken: FIRE starts an episode or a life

                # The student learns while the emulators run.
                teacher_q_values = teacher.q_values(observation)
                share = distillation_share(progress.recent_returns, teacher_return, random_return)
                distill_coefficient = args.distill_coefficient * share
                if step >= args.learning_starts and replay.sampled_steps():
                    first = args.offline_steps + progress.online_update
                    updates = range(first, first + times_due(step, next_step, args.train_frequency))
                    if updates:
                        learning_rates = [learning_rate_at(i, args, share) for i in updates]
                        losses = student.update(replay, distill_coefficient, learning_rates)
                        progress.online_update += len(updates)
                    # More than one may be due if the frequency is below num_envs; with tau = 1, one would do.
                    for _ in range(times_due(step, next_step, args.target_network_frequency)):
                        student.update_target(args.tau)

                result = envs.recv()
                replay.add(observation, action, result, teacher_q_values)
                observation = result.observation
                progress.online_step = next_step
                if times_due(step, next_step, LOG_EVERY):
                    run.log("charts/SPS", run.steps_per_second, global_step)
                    run.log("charts/epsilon", epsilon, global_step)
                    run.log("charts/distill_coeff", distill_coefficient, global_step)
                    if losses is not None:
                        log_losses(run, "online", losses, global_step)
                for env, episodic_return, length in result.episodes:
                    progress.recent_returns = [*progress.recent_returns, episodic_return][-RECENT_EPISODES:]
                    # A step of its own for each environment: TensorBoard and W&B show one point per step. W&B needs
                    # increasing steps, so these come after the points of `global_step`.
                    run.log("charts/episodic_return", episodic_return, global_step + env)
                    run.log("charts/episodic_length", length, global_step + env)
                    run.show(f"return {np.mean(progress.recent_returns):.1f}")
                run.save_if_due(replay)

        # ==================== save and evaluate ====================
        if args.save_model:
            student.save(run.model_path())
            print(f"model saved to {run.model_path()}")
        run.save()  # without the replay buffer: a resumed run only repeats the evaluation
        mean_return = evaluate("final", student, args.eval_episodes, args.end_e)
        last_step = args.offline_steps + progress.online_step
        run.log("charts/final/avg_episodic_return", mean_return, last_step)
        for i, episodic_return in enumerate(progress.returns["final"]):
            run.log("eval/episodic_return", episodic_return, last_step + i)

    run.finish(progress.returns)  # uploads the model if asked, and prints the results


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
