"""QDagger on Atari in JAX: a student learns from a trained teacher, offline, then online while the teaching fades.

Agarwal et al. (2022), Reincarnating Reinforcement Learning, arXiv 2206.01626. Docs: docs/qdagger.md
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from huggingface_hub import hf_hub_download

from cleanrl_utils import convert
from cleanrl_utils.atari import AtariEnvs, Step
from cleanrl_utils.checks import check_args, check_memory, one_line_errors
from cleanrl_utils.device import available_jax_memory, check_jax_gradient, describe_jax, pick_jax_device
from cleanrl_utils.evaluation import print_summary, warn_of_weak_teacher
from cleanrl_utils.hub import check_upload_possible, download_errors, upload_model
from cleanrl_utils.max_pool import max_pool
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
    """if toggled, all layers but the last compute in bfloat16 on a GPU or TPU"""
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
    online_learning_rate: float | None = None
    """the learning rate of the online phase, to which it falls over the offline one; by default the same"""
    final_learning_rate: float | None = None
    """the learning rate at λ = 0, to which the online one falls with λ (the authors: 1e-5); by default the same"""
    warmup_updates: int = 0
    """the first updates, in which the learning rate rises from 0 in a straight line: for large ones, try 300"""
    num_envs: int = 16
    """parallel games, with the same updates per step; fewer if other sizes are too small for 16 and it is not given"""
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


Conv3x3 = functools.partial(nn.Conv, kernel_size=(3, 3), padding=1)
# bfloat16, or the TF32 that a GPU makes of float32, would round away differences of actions.
LastDense = functools.partial(nn.Dense, dtype=jnp.float32, precision="highest")


class ResidualBlock(nn.Module):
    """(B, H, W, C) → (B, H, W, C), Espeholt et al. (2018)."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = Conv3x3(self.channels, dtype=self.dtype)(nn.relu(x))
        return x + Conv3x3(self.channels, dtype=self.dtype)(nn.relu(hidden))


class ConvSequence(nn.Module):
    """(B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, channels)."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = max_pool(Conv3x3(self.channels, dtype=self.dtype)(x))
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
        return LastDense(self.num_actions)(x)


class TeacherNetwork(nn.Module):
    """The Q-network of Mnih et al. (2015), a teacher's. uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    num_actions: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.transpose(0, 2, 3, 1) / 255.0
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(channels, (size, size), stride, padding="VALID", dtype=self.dtype)(x))
        x = nn.relu(nn.Dense(512, dtype=self.dtype)(x.reshape(x.shape[0], -1)))
        return LastDense(self.num_actions)(x)


def shapes_of(network: nn.Module) -> Params:
    """The variables of a network, shapes and types only."""
    return jax.eval_shape(network.init, jax.random.PRNGKey(0), np.zeros((1, 4, 84, 84), np.uint8))


def first_params(network: nn.Module, key: jax.Array) -> Params:
    """A new network's variables, float32: kernels and biases uniform in ±1/√fan_in, as PyTorch's layers begin.

    flax's biases begin as zeros. An ImpalaCNN that does so too can collapse in the first hundred updates at a large
    learning rate: all its ReLUs die, and it returns the same Q-values for every observation.
    """
    params = {}
    for layer, arrays in flatten_dict(shapes_of(network), is_leaf=lambda path, node: "kernel" in node).items():
        bound = math.prod(arrays["kernel"].shape[:-1]) ** -0.5
        for name, array in arrays.items():
            key, own_key = jax.random.split(key)
            params[(*layer, name)] = jax.random.uniform(own_key, array.shape, array.dtype, -bound, bound)
    return unflatten_dict(params)


def load_teacher(repo: str, exp_name: str, num_actions: int, dtype: jnp.dtype) -> tuple[nn.Module, Params]:
    """The teacher ``{exp_name}.cleanrl_model`` of a local directory or, where there is none, of a hub repository.

    UserError where there is no such file, it can't be had, or it is no model of this game.
    """
    filename = f"{exp_name}.cleanrl_model"
    with download_errors(repo, filename):
        directory = Path(repo).expanduser()
        path = directory / filename if directory.is_dir() else Path(hf_hub_download(repo, filename))
    return load_model(path, num_actions, dtype)


def load_model(path: Path, num_actions: int, dtype: jnp.dtype = jnp.float32) -> tuple[nn.Module, Params]:
    """The network in a file and its variables: a DQN or a student, saved by PyTorch or by JAX.

    Its hidden layers compute in ``dtype``. UserError where it is no model of either, or has another number of actions.
    """
    with convert.model_errors(path):
        is_torch = convert.is_torch_file(path)
        weights = convert.torch_to_flax(convert.read_torch(path)) if is_torch else convert.read_flax(path)
        student = "params/ConvSequence_0/Conv_0/kernel" in weights
        network = (QNetwork if student else TeacherNetwork)(num_actions, dtype)
        convert.check_weights(weights, flatten_dict(shapes_of(network), sep="/"), type(network).__name__)
    return network, unflatten_dict({key: jnp.asarray(value) for key, value in weights.items()}, sep="/")


def save_model(params: Params, path: Path) -> None:
    """Writes the variables as msgpack that ``flax.serialization.from_bytes`` reads."""
    convert.write_flax(path, {key: np.asarray(value) for key, value in flatten_dict(params, sep="/").items()})


class Transitions(NamedTuple):
    """A ring of L environment steps of each of N environments, by slot: step t lies in slot t % L."""

    frame: jax.Array
    """uint8 (L, N, 84, 84), the newest frame of what was observed; stacks of 4 are built when sampling"""
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
    teacher_q_values: jax.Array
    """float32 (L, N, num_actions), asked for once, as an observation is sampled 8 times on average"""


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
    teacher_q_values: jax.Array
    """float32 (B, num_actions), of the observation"""


@functools.partial(jax.jit, donate_argnums=0)  # donated: written in place, not into a copy of gigabytes
def write_step(ring: Transitions, slot: int, step: Transitions) -> Transitions:
    """``ring`` with what is in ``slot`` replaced, of all environments; ``step`` has the shapes without L."""
    return jax.tree.map(lambda array, value: jax.lax.dynamic_update_index_in_dim(array, value, slot, 0), ring, step)


class Replay:
    """The last ``size`` environment steps of N environments: on the device, and what the host has to know of them."""

    def __init__(self, size: int, num_actions: int, args: Args):
        self.length = size // args.num_envs
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
            teacher_q_values=jnp.zeros((*shape, num_actions), jnp.float32),
        )

    @staticmethod
    def bytes_per_step(num_actions: int) -> int:
        """What an environment step takes."""
        return 84 * 84 + 1 + 4 + 1 + 4 + 1 + 4 * num_actions

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step, teacher_q_values: jax.Array) -> None:
        """Appends a step of each environment: what was observed and done, what came of it, what the teacher thinks."""
        values = Transitions(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(step.reward, -1, 1).astype(np.float32),
            terminated=step.terminated,
            age=self.age,
            valid=~step.reset,
            teacher_q_values=teacher_q_values,
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
    action, teacher_q_values = ring.action[slot, env], ring.teacher_q_values[slot, env]
    return Batch(stack(t), action, n_step_return, stack(t + m), discount, teacher_q_values)


class Losses(NamedTuple):
    """What the loss is made of; scalars, but for the last."""

    loss: jax.Array
    td_loss: jax.Array
    distill_loss: jax.Array
    q_values: jax.Array
    """float32 (B,), of the actions taken"""


def td_target(target_params: Params, batch: Batch, apply: Callable) -> jax.Array:
    """y = Σ γᵏ r + γᵐ max Q'(s',·), float32 (B,)."""
    bootstrap = apply(target_params, batch.bootstrap_observation).max(axis=1)
    return batch.n_step_return + batch.bootstrap_discount * bootstrap


def qdagger_loss(
    params: Params, y: jax.Array, batch: Batch, distill_coefficient: float, temperature: float, apply: Callable
) -> tuple[jax.Array, Losses]:
    """TD error plus distillation: Agarwal et al. (2022), section 4.2, eq. 2.

    L = mean (Q(s,a) − y)² + λ · mean KL( softmax(Q_T(s,·)/τ) ‖ softmax(Q(s,·)/τ) ), with the :func:`td_target` y.
    """
    q_values = apply(params, batch.observation)
    # A sum over what is equal, and not an index: the gradient of one is a scatter, which is slow on a GPU.
    q_of_action = jnp.sum(q_values, axis=1, where=jnp.arange(q_values.shape[1]) == batch.action[:, None])
    td_loss = jnp.mean((q_of_action - y) ** 2)
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
    ring: Transitions,
    low: int,
    high: int,
    distill_coefficient: float,
    due: int,
    args: Args,
    apply: Callable,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Losses]:
    """``due`` gradient steps on transitions of steps [low, high), in one program; the losses are the last one's."""
    key, *sample_keys = jax.random.split(state.key, due + 1)
    batches = [sample(ring, sample_key, low, high, args) for sample_key in sample_keys]
    td_targets = [td_target(state.target_params, batch, apply) for batch in batches]  # first: XLA is faster so
    gradient = jax.grad(qdagger_loss, has_aux=True)
    scale = 1.0  # of Adam's updates, which are in proportion to the learning rate
    if args.final_learning_rate:
        final = args.final_learning_rate / (args.online_learning_rate or args.learning_rate)
        scale = final + (1 - final) * distill_coefficient / args.distill_coefficient
    for y, batch in zip(td_targets, batches, strict=True):
        gradients, losses = gradient(state.params, y, batch, distill_coefficient, args.temperature, apply)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state)
        updates = jax.tree.map(lambda x: scale * x, updates)
        state = state._replace(params=optax.apply_updates(state.params, updates), optimizer_state=optimizer_state)
    return state._replace(key=key), losses


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
    left, way = teacher_return - float(np.mean(recent_returns[-10:])), teacher_return - random_return
    if way <= 0:
        return distill_coefficient if left > 0 else 0.0
    return distill_coefficient * min(max(left / way, 0.0), 1.0)


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
    batch = Batch(frames, one.astype(jnp.uint8), one, frames, one, jax.random.normal(key, (len(one), num_actions)))

    def gradient(network: nn.Module) -> Callable:
        return jax.grad(lambda *x: qdagger_loss(*x, 1.0, args.temperature, network.apply)[0])

    params = first_params(QNetwork(num_actions), key)
    check_jax_gradient(gradient(QNetwork(num_actions, dtype)), gradient(QNetwork(num_actions)), params, one, batch)


def player(apply: Callable, params: Params) -> Callable[[np.ndarray], np.ndarray]:
    """The network as evaluations want it: from and to NumPy arrays, of any batch size."""

    def q_values_of(observation: np.ndarray) -> np.ndarray:
        # Games end one by one, and `apply` is compiled for each size: 1, 2, 4, then every 8, black observations behind.
        batch = len(observation)
        size = -(-batch // 8) * 8 if batch > 4 else 1 << (batch - 1).bit_length()
        padded = np.pad(observation, [(0, size - batch), (0, 0), (0, 0), (0, 0)])
        return np.asarray(apply(params, padded))[:batch]

    return q_values_of


def main(args: Args) -> None:
    # ==================== setup ====================
    check_args(args)
    check_upload_possible(args)
    dtype = pick_jax_device(args.bf16)
    envs = AtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability)
    check_memory(args, Replay.bytes_per_step(envs.num_actions), available_jax_memory())
    repo = args.teacher_policy_hf_repo or f"cleanrl/{args.env_id.replace('/', '-')}-{args.teacher_model_exp_name}-seed1"
    teacher, teacher_params = load_teacher(repo, args.teacher_model_exp_name, envs.num_actions, dtype)
    rehearse(args, envs.num_actions, dtype)

    run = Run(args)
    print(describe_jax(dtype, envs.num_threads), flush=True)
    writer = run.writer
    rng = np.random.default_rng(args.seed)
    q_network = QNetwork(envs.num_actions, dtype)
    end = args.online_learning_rate or args.learning_rate
    fall = optax.linear_schedule(args.learning_rate if args.offline_steps else end, end, max(args.offline_steps, 1))
    optimizer = optax.adam(lambda n: fall(n) * jnp.minimum((n + 1) / max(args.warmup_updates, 1), 1.0))
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    params = first_params(q_network, init_key)
    state = TrainState(params, jax.tree.map(jnp.copy, params), optimizer.init(params), key)
    run.register(state=lambda: state, rng=rng)
    state = run.restored("state", state)
    learn = functools.partial(update, args=args, apply=q_network.apply, optimizer=optimizer)
    learn = jax.jit(learn, static_argnames="due", donate_argnames="state")
    teacher_apply, student_apply = jax.jit(teacher.apply), jax.jit(q_network.apply)

    # ==================== teacher: how well it plays, and how well one plays at random ====================
    teacher_return = run.evaluate("teacher", player(teacher_apply, teacher_params), args.teacher_eval_episodes)
    random_return = run.evaluate("random", None, args.teacher_eval_episodes)
    if not run.over("teacher"):
        writer.add_scalar("charts/teacher/avg_episodic_return", teacher_return, 0)
        writer.add_scalar("charts/random/avg_episodic_return", random_return, 0)
        warn_of_weak_teacher(teacher_return, random_return, args.env_id)
        run.end_phase("teacher")

    if args.offline_steps > 0 and not run.over("offline"):
        replay = Replay(args.teacher_steps, envs.num_actions, args)
        run.register_replay("teacher", replay)

        # ==================== teacher data ====================
        if not run.over("teacher data"):
            observation = run.reset(envs)
            for step in run.steps("teacher data", replay.length * args.num_envs, by=args.num_envs):
                teacher_q_values = teacher_apply(teacher_params, observation)
                epsilon = linear_schedule(args.start_e, args.end_e, args.teacher_steps, step)
                action = envs.send(epsilon_greedy(teacher_q_values, epsilon, rng))
                result = envs.recv()
                replay.add(observation, action, result, teacher_q_values)
                observation = result.observation
                run.show_return(score for score, _ in result.games)
            writer.add_scalar("charts/teacher/SPS", int(run.done / run.seconds), 0)
            run.end_phase("teacher data")

        # ==================== offline ====================
        def evaluate_offline(updates: int) -> None:
            offline_return = run.evaluate(f"offline {updates}", player(student_apply, state.params), args.eval_episodes)
            save_model(state.params, run.dir / f"{args.exp_name}-offline-{updates}.cleanrl_model")
            writer.add_scalar("charts/offline/avg_episodic_return", offline_return, updates)
            run.show_return([offline_return])

        for updates in run.steps("offline", args.offline_steps, unit="update"):
            if updates > 0 and updates % args.offline_eval_frequency == 0:
                evaluate_offline(updates)
            state, run.losses = learn(state, replay.ring, *replay.window, args.distill_coefficient, due=1)
            global_step = updates + 1
            if global_step % args.target_network_frequency == 0:
                state = update_target(state, args.tau)
            if global_step % 100 == 0:  # seldom: reading a loss waits for the device
                run.check_learning()
                writer.add_scalar("charts/offline/loss", run.losses.loss.item(), global_step)
                writer.add_scalar("charts/offline/q_loss", run.losses.td_loss.item(), global_step)
                writer.add_scalar("charts/offline/distill_loss", run.losses.distill_loss.item(), global_step)
                writer.add_scalar("charts/offline/updates_per_second", global_step / run.seconds, global_step)
        evaluate_offline(args.offline_steps)
        del replay  # before the online replay is made: the two never exist at once
        run.drop_replay()
        run.end_phase("offline")

    # ==================== online ====================
    if not run.over("online"):
        replay = Replay(args.buffer_size, envs.num_actions, args)
        run.register_replay("online", replay)
        observation = run.reset(envs)
        recent_returns: list[int] = run.state.setdefault("recent_returns", [])
        exploration_steps = args.exploration_fraction * args.total_timesteps
        for step in run.steps("online", args.total_timesteps, by=args.num_envs):
            global_step, next_step = args.offline_steps + step, step + args.num_envs
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
            action = envs.send(epsilon_greedy(student_apply(state.params, observation), epsilon, rng))

            # Emulation overlaps learning; nothing from here to `recv` waits for a GPU.
            distill_coefficient = distill_coefficient_now(
                recent_returns, teacher_return, random_return, args.distill_coefficient
            )
            low, high = replay.window
            if step >= args.learning_starts and high > low:
                if due := times_due(step, next_step, args.train_frequency):
                    state, run.losses = learn(state, replay.ring, low, high, distill_coefficient, due=due)
                for _ in range(times_due(step, next_step, args.target_network_frequency)):
                    state = update_target(state, args.tau)
            teacher_q_values = teacher_apply(teacher_params, observation)
            result = envs.recv()
            replay.add(observation, action, result, teacher_q_values)
            observation = result.observation

            for score, length in result.games:
                recent_returns.append(score)
                del recent_returns[:-10]
                writer.add_scalar("charts/episodic_return", score, global_step)
                writer.add_scalar("charts/episodic_length", length, global_step)
                run.show_return(recent_returns)
            if times_due(step, next_step, 100):
                writer.add_scalar("charts/SPS", int(next_step / run.seconds), global_step)
                writer.add_scalar("charts/epsilon", epsilon, global_step)
                writer.add_scalar("charts/distill_coeff", distill_coefficient, global_step)
                if run.losses:
                    run.check_learning()
                    writer.add_scalar("losses/loss", run.losses.loss.item(), global_step)
                    writer.add_scalar("losses/td_loss", run.losses.td_loss.item(), global_step)
                    writer.add_scalar("losses/distill_loss", run.losses.distill_loss.item(), global_step)
                    writer.add_scalar("losses/q_values", run.losses.q_values.mean().item(), global_step)
        del replay
        run.drop_replay()
        run.end_phase("online")
    envs.close()

    # ==================== save, evaluate, upload ====================
    model_path = run.dir / f"{args.exp_name}.cleanrl_model"
    if args.save_model:
        save_model(state.params, model_path)
        print(f"model saved to {model_path}")
    if not run.over("evaluation"):
        run.evaluate("online", player(student_apply, state.params), args.eval_episodes)
        for i, episodic_return in enumerate(run.results["online"]):
            writer.add_scalar("eval/episodic_return", episodic_return, i)
        run.end_phase("evaluation")
    run.close(run.videos)
    if args.upload_model:
        upload_model(args, run.dir, model_path, run.results["online"], run.videos)
    run.finish()
    print_summary(run.results, args.env_id, args.end_e)


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
