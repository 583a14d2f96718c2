"""QDagger on Atari in PyTorch: a student learns from a trained teacher, first offline, then online.

Agarwal et al. (2022), Reincarnating Reinforcement Learning, arXiv 2206.01626. Docs: docs/qdagger.md
"""

import importlib.util
import os
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit("error: torch is not installed here; `source .venv/bin/activate`, or `pip install -e '.[atari]'`")

# PyTorch reads these settings at its import. Its threads spin only briefly while they wait for a busy core. Its large
# tensors lie in huge pages, if Linux has them: a CPU translates their addresses faster.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from cleanrl_utils.atari import AtariEnvs, Step, Stream
from cleanrl_utils.checkpoint import Checkpoint, parse_args
from cleanrl_utils.checks import check_args, check_finite, fitting_num_envs
from cleanrl_utils.device import cuda_graph, set_up_torch, to_device
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import play_episodes, summarise
from cleanrl_utils.files import atomic_write
from cleanrl_utils.hub import upload_model
from cleanrl_utils.models import find_model, read_model
from cleanrl_utils.tracking import VIDEOS, ProgressBar, start_logging

# Gradient steps of one call of `update`, at most. One forward pass computes all their targets, and a GPU runs them as
# one CUDA graph: both take less time than step by step.
UPDATES_PER_CALL = 4
LOG_EVERY = 100  # updates in the offline phase, environment steps in the online phase
RECENT_EPISODES = 10  # training episodes whose mean return anneals λ


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    torch_deterministic: bool = True
    """if toggled, cuDNN uses deterministic algorithms; otherwise it benchmarks its algorithms and takes the fastest"""
    cuda: bool = True
    """if toggled, a GPU is used when there is one"""
    cuda_graph: bool = True
    """if toggled, a GPU runs the updates, and the forward passes of an online step, as CUDA graphs"""
    compile: bool = False
    """if toggled, the loss is compiled by torch.compile, which takes half a minute or more at the start"""
    bf16: bool = True
    """if toggled, all layers but the last compute in bfloat16 where the hardware supports it"""
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
    """minutes between checkpoints, which are also saved at evaluations, after phases and when stopped; 0: none"""

    # Environment
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or ALE/{Game}-v5"""
    repeat_action_probability: float | None = None
    """probability of a sticky action per frame (paper: 0.25); the default is the id's own: 0 for -v4, 0.25 for -v5"""
    num_envs: int = 16
    """parallel environments, halved while a buffer or the run is too small; updates per step do not depend on them"""

    # DQN
    total_timesteps: int = 10000000
    """environment steps (4 frames each) of the online phase; 0 ends the run after the offline phase"""
    learning_rate: float = 1e-4
    """the learning rate of the optimizer"""
    buffer_size: int = 1000000
    """environment steps in the online replay buffer, 7.1 kB each"""
    gamma: float = 0.99
    """the discount factor"""
    n_step: int = 1
    """the number of rewards summed before bootstrapping (paper: 3)"""
    tau: float = 1.0
    """the target network update rate"""
    target_network_frequency: int = 1000
    """the updates (offline) or environment steps (online) between updates of the target network"""
    batch_size: int = 32
    """the batch size of a sample from the replay buffer"""
    start_e: float = 1.0
    """the starting epsilon for exploration"""
    end_e: float = 0.01
    """the ending epsilon for exploration, and the epsilon of evaluations"""
    exploration_fraction: float = 0.10
    """the fraction of `total_timesteps` over which epsilon is annealed, counted from the first offline update"""
    learning_starts: int = 80000
    """environment steps of the online phase before the first update"""
    train_frequency: int = 4
    """the online environment steps per update"""

    # QDagger
    teacher_policy_hf_repo: str | None = None
    """the teacher: a file, directory or hub repository; by default cleanrl/{env_id}-{teacher_model_exp_name}-seed1"""
    teacher_model_exp_name: str = "dqn_atari"
    """the name of the teacher's file without .cleanrl_model or .zip; by default, a single model may have any name"""
    teacher_eval_episodes: int = 10
    """episodes of the evaluation of the teacher, and of the random policy"""
    teacher_steps: int = 500000
    """environment steps of the teacher, which fill the teacher's replay buffer; epsilon is annealed over them, too"""
    offline_steps: int = 500000
    """offline updates on the teacher's replay buffer; 0 skips teacher data and offline phase (kickstarting)"""
    temperature: float = 0.1
    """the temperature of both softmaxes in the distillation loss (CleanRL: 1)"""
    distill_coefficient: float = 1.0
    """λ, the weight of the distillation loss, before it is annealed; 0 trains without this loss"""
    online_learning_rate: float | None = None
    """the learning rate at the end of the offline phase, annealed linearly from `learning_rate`; by default constant"""
    final_learning_rate: float | None = None
    """the learning rate at λ = 0, annealed with λ in the online phase (authors: 1e-5); by default constant"""
    warmup_updates: int = 0
    """updates of linear learning rate warmup; try 300 with a large learning rate"""

    # Evaluations of the student
    eval_episodes: int = 10
    """episodes of each evaluation of the student"""
    offline_eval_frequency: int = 100000
    """offline updates between evaluations of the student, which also save it"""
    online_eval_frequency: int = 500000
    """online environment steps between evaluations of the student, which also save it"""


@dataclass
class Progress:
    """The progress of a run, saved in each checkpoint."""

    returns: dict[str, list[float]] = field(default_factory=dict)  # episodic returns by the name of the evaluation
    offline_finished: bool = False  # True after the evaluation at the end of the offline phase
    teacher_step: int = 0  # environment steps of teacher data
    offline_update: int = 0
    online_step: int = 0  # environment steps of the student
    online_update: int = 0
    recent_returns: list[float] = field(default_factory=list)  # returns of the last training episodes


class ChannelPaddedConv2d(nn.Conv2d):
    """A convolution that a GPU computes in bfloat16 with channels of zeros up to a multiple of 8, which is faster."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        extra = -self.in_channels % 8  # channels of zeros
        if extra and self.groups == 1 and torch.is_autocast_enabled("cuda"):
            x = F.pad(x, (0, 0, 0, 0, 0, extra))
            weight = F.pad(weight, (0, 0, 0, 0, 0, extra))
        return self._conv_forward(x, weight, self.bias)


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection: (B, C, H, W) → (B, C, H, W)."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv1(F.relu(self.conv0(F.relu(x))))


class ConvSequence(nn.Module):
    """A convolution, a max-pooling and two residual blocks: (B, C, H, W) → (B, out_channels, ⌈H/2⌉, ⌈W/2⌉)."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = ChannelPaddedConv2d(in_channels, out_channels, 3, padding=1)
        self.res_block0 = ResidualBlock(out_channels)
        self.res_block1 = ResidualBlock(out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.conv(x), kernel_size=3, stride=2, padding=1)
        return self.res_block1(self.res_block0(x))


class QNetwork(nn.Module):
    """The student, an ImpalaCNN (Espeholt et al., 2018): uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.network = nn.Sequential(
            ConvSequence(4, 16), ConvSequence(16, 32), ConvSequence(32, 32), nn.Flatten(), nn.ReLU(),
            nn.Linear(32 * 11 * 11, 256), nn.ReLU(),
            nn.Linear(256, num_actions),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.network[:-1](x / 255.0)
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 would round away the differences between actions
            return self.network[-1](hidden.float())


class TeacherNetwork(nn.Module):
    """A teacher, the network of Mnih et al. (2015): uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(3136, 512), nn.ReLU(),
            nn.Linear(512, num_actions),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.network[:-1](x / 255.0)
        with torch.autocast(x.device.type, enabled=False):
            return self.network[-1](hidden.float())


class C51Network(TeacherNetwork):
    """A teacher of C51 (Bellemare et al., 2017): a Q-value is the mean of a distribution over 51 returns."""

    def __init__(self, num_actions: int):
        super().__init__(num_actions * 51)
        self.register_buffer("atoms", torch.zeros(51))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = super().forward(x).unflatten(1, (-1, 51)).softmax(dim=2)
        return (probabilities * self.atoms).sum(dim=2)  # @ would compute in bfloat16


def load_model(path: Path, num_actions: int, temperature: float) -> tuple[nn.Module, float]:
    """Load a model of any format.

    Args:
        path: the file, see `find_model`.
        num_actions: the number of actions of the game.
        temperature: a policy's logits are multiplied by it, so that softmax(outputs / temperature) is the policy.

    Returns:
        The network, and the temperature at which it samples its actions: 0 if it takes the largest Q-value.
    """
    networks = {network.__name__: network(num_actions) for network in (QNetwork, TeacherNetwork, C51Network)}
    layers = {name: network.state_dict() for name, network in networks.items()}
    name, weights, is_policy = read_model(path, "torch", layers)
    if is_policy:
        weights["network.9.weight"] *= temperature
        weights["network.9.bias"] *= temperature
    networks[name].load_state_dict({key: torch.from_numpy(array) for key, array in weights.items()})
    return networks[name], temperature if is_policy else 0.0


def save_model(network: nn.Module, path: Path) -> None:
    """Save the state dict, on the CPU and contiguous."""
    with atomic_write(path) as file:
        torch.save({key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}, file)


class Ring(NamedTuple):
    """The arrays of a replay buffer: L steps of N environments; step t is in slot t % L.

    :meth:`Replay.add` also uses it for a single step, without the axis L.
    """

    frame: torch.Tensor  # uint8 (L, N, 84, 84), the newest of each observation; stacks of 4 are built when sampling
    action: torch.Tensor  # uint8 (L, N)
    reward: torch.Tensor  # float32 (L, N), clipped to [−1, 1]
    terminated: torch.Tensor  # bool (L, N), a life was lost or the game ended
    age: torch.Tensor  # int32 (L, N), steps since the reset of the episode: a stack has no frames from before it
    valid: torch.Tensor  # bool (L, N), False where no transition starts: at the end of an episode, and of a stopped run
    teacher_q_values: torch.Tensor  # float32 (L, N, num_actions), computed once: a step is sampled often


# Of an environment step: frame, action, reward, terminated, age, valid, 18 Q-values at most.
STEP_BYTES = 84 * 84 + 1 + 4 + 1 + 4 + 1 + 18 * 4


class Batch(NamedTuple):
    """B transitions."""

    observation: torch.Tensor  # uint8 (B, 4, 84, 84)
    action: torch.Tensor  # int64 (B,)
    n_step_return: torch.Tensor  # float32 (B,), Σ γᵏ r of the rewards before the bootstrap observation
    bootstrap_observation: torch.Tensor  # uint8 (B, 4, 84, 84)
    bootstrap_discount: torch.Tensor  # float32 (B,), γᵐ after m rewards, or 0 after a termination
    teacher_q_values: torch.Tensor  # float32 (B, num_actions)


class Replay:
    """A replay buffer of the last ``size`` environment steps, on the device of the networks."""

    def __init__(self, size: int, num_actions: int, args: Args, device: torch.device):
        self.length = size // args.num_envs
        self.n_step = args.n_step
        self.steps_added = 0  # of each environment
        self.age = np.zeros(args.num_envs, np.int32)  # steps since the reset, of the next step to be added
        shape = (self.length, args.num_envs)
        self.ring = Ring(
            frame=torch.empty((*shape, 84, 84), dtype=torch.uint8, device=device),
            action=torch.empty(shape, dtype=torch.uint8, device=device),
            reward=torch.empty(shape, dtype=torch.float32, device=device),
            terminated=torch.empty(shape, dtype=torch.bool, device=device),
            age=torch.empty(shape, dtype=torch.int32, device=device),
            valid=torch.empty(shape, dtype=torch.bool, device=device),
            teacher_q_values=torch.empty((*shape, num_actions), dtype=torch.float32, device=device),
        )

    def add(self, observation: torch.Tensor, action: np.ndarray, result: Step, teacher_q_values: torch.Tensor) -> None:
        """Add a step of each environment: the observation before it, the action and its result; arrays (N, …)."""
        step = Ring(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(result.reward, -1, 1).astype(np.float32),
            terminated=result.terminated,  # a truncated episode bootstraps from its last observation, in the next step
            age=self.age,
            valid=~result.reset,  # in the step after its end, an episode is reset and the action is ignored
            teacher_q_values=teacher_q_values,
        )
        slot = self.steps_added % self.length
        for array, value in zip(self.ring, step, strict=True):
            array[slot].copy_(to_device(value, array.device), non_blocking=True)
        self.age = np.where(result.reset, 0, self.age + 1).astype(np.int32)
        self.steps_added += 1

    def truncate_episodes(self) -> None:
        """Truncate all episodes at the last step: a resumed run has new ones, as emulators can't be restored."""
        self.ring.valid[(self.steps_added - 1) % self.length] = False
        self.age = np.zeros_like(self.age)

    @property
    def window(self) -> tuple[int, int]:
        """The steps [low, high) that can be sampled: their stacks and bootstrap observations are in the buffer."""
        low = 0 if self.steps_added <= self.length else self.steps_added - self.length + 3  # 3 older frames of a stack
        return low, max(low, self.steps_added - self.n_step)


def sample(
    ring: Ring, low: int, high: int, batch_size: int, generator: torch.Generator, n_step: int, gamma: float
) -> Batch:
    """Sample a batch uniformly, with replacement, from the valid transitions of steps [low, high)."""
    length, num_envs = ring.valid.shape
    # Rejection sampling with 8 candidates at once: a loop or randint(low, high) would synchronise with the GPU.
    candidates = (8, batch_size)
    fraction = torch.rand(candidates, dtype=torch.float64, generator=generator, device=generator.device)
    t = low + (fraction * (high - low)).long()
    env = torch.randint(0, num_envs, candidates, generator=generator, device=generator.device)
    first_valid = ring.valid[t % length, env].int().argmax(dim=0, keepdim=True)
    t = t.gather(0, first_valid)[0]
    env = env.gather(0, first_valid)[0]
    # If all 8 are final observations, as is next to impossible, take the step before the first of them.
    t = torch.where(ring.valid[t % length, env], t, (t - 1).clamp(min=low))
    return transitions_at(ring, t, env, n_step, gamma)


def transitions_at(ring: Ring, t: torch.Tensor, env: torch.Tensor, n_step: int, gamma: float) -> Batch:
    """Return the transitions of steps ``t``, int64 (B,), in environments ``env``, int64 (B,)."""
    length = len(ring.valid)
    # A termination or a final observation ends the n rewards early. A termination has no bootstrap.
    n_step_return = torch.zeros_like(t, dtype=torch.float32)
    m = torch.zeros_like(t)  # rewards in the return
    running = torch.ones_like(t, dtype=torch.bool)
    terminated = torch.zeros_like(running)
    for k in range(n_step):
        slot = (t + k) % length
        running = running & ~terminated & ring.valid[slot, env]
        n_step_return = n_step_return + running * gamma**k * ring.reward[slot, env]
        m = m + running
        terminated = terminated | (running & ring.terminated[slot, env])
    slot = t % length
    return Batch(
        observation=stack_frames(ring, t, env),
        action=ring.action[slot, env].long(),  # as gather needs it
        n_step_return=n_step_return,
        bootstrap_observation=stack_frames(ring, t + m, env),
        bootstrap_discount=gamma**m * ~terminated,
        teacher_q_values=ring.teacher_q_values[slot, env],
    )


def stack_frames(ring: Ring, t: torch.Tensor, env: torch.Tensor) -> torch.Tensor:
    """Return the observations at steps ``t``, uint8 (B, 4, 84, 84), with zeros for frames before the reset."""
    length = len(ring.valid)
    ago = torch.arange(3, -1, -1, device=t.device)  # steps, oldest frame first
    in_episode = ring.age[t % length, env][:, None] >= ago
    return ring.frame[(t[:, None] - ago) % length, env[:, None]] * in_episode[:, :, None, None]


class Losses(NamedTuple):
    """The loss, its terms and the mean Q-value, which the online phase logs by these names."""

    loss: torch.Tensor
    td_loss: torch.Tensor
    distill_loss: torch.Tensor
    q_values: torch.Tensor  # the mean over the batch, of the actions taken


@torch.no_grad()
def td_target(target_network: nn.Module, batch: Batch) -> torch.Tensor:
    """Compute y = Σ γᵏ r + γᵐ (1 − terminated) max Q'(s',·), float32 (B,)."""
    return batch.n_step_return + batch.bootstrap_discount * target_network(batch.bootstrap_observation).amax(dim=1)


def qdagger_loss(
    q_network: nn.Module, y: torch.Tensor, batch: Batch, distill_coefficient: float, temperature: float
) -> Losses:
    """Compute the QDagger loss (Agarwal et al., 2022, section 4.2, eq. 2).

    L = mean (Q(s,a) − y)² + λ · mean KL( softmax(Q_T(s,·) / temperature) ‖ softmax(Q(s,·) / temperature) )

    with y of :func:`td_target`, λ = ``distill_coefficient`` and the teacher's Q-values Q_T.
    """
    q_values = q_network(batch.observation)
    q_of_action = q_values.gather(1, batch.action[:, None])[:, 0]
    td_loss = F.mse_loss(q_of_action, y)
    student_log_policy = F.log_softmax(q_values / temperature, dim=1)
    teacher_log_policy = F.log_softmax(batch.teacher_q_values / temperature, dim=1)
    kl = torch.sum(torch.exp(teacher_log_policy) * (teacher_log_policy - student_log_policy), dim=1)
    distill_loss = torch.mean(kl)
    loss = td_loss + distill_coefficient * distill_loss
    return Losses(loss, td_loss, distill_loss, q_of_action.mean())


def make_update(
    q_network: nn.Module, target_network: nn.Module, optimizer: torch.optim.Adam, ring: Ring,
    generator: torch.Generator, autocast: torch.autocast, args: Args,
) -> Callable[..., Losses]:  # fmt: skip
    """Return the function that updates the Q-network; on a GPU it runs as a CUDA graph, which reads this ring."""
    loss_function = torch.compile(qdagger_loss) if args.compile else qdagger_loss

    def update(low: int, high: int, distill_coefficient: float, *learning_rates: float) -> Losses:
        """Make as many gradient steps as there are learning rates, on transitions of steps [low, high).

        Return the losses of the last one. A CUDA graph gets numbers as tensors. Its Python code runs only in the first
        calls, so every value that changes is an argument. The next call overwrites the returned losses.
        """
        num_transitions = len(learning_rates) * args.batch_size
        batches = sample(ring, low, high, num_transitions, generator, args.n_step, args.gamma)
        with autocast:
            # All targets at once take less time. The target network does not change in a call.
            targets = td_target(target_network, batches)
        for i, learning_rate in enumerate(learning_rates):
            rows = slice(i * args.batch_size, (i + 1) * args.batch_size)
            batch = Batch(*(array[rows] for array in batches))
            optimizer.param_groups[0]["lr"] = learning_rate
            with autocast:
                losses = loss_function(q_network, targets[rows], batch, distill_coefficient, args.temperature)
            optimizer.zero_grad()
            losses.loss.backward()
            optimizer.step()
        return Losses(*(term.detach() for term in losses))

    return cuda_graph(update, generator, args.cuda_graph and ring.frame.is_cuda)


@torch.no_grad()
def update_target(target_network: nn.Module, q_network: nn.Module, tau: float) -> None:
    """Move the target network towards the Q-network by the fraction ``tau``."""
    for target, online in zip(target_network.parameters(), q_network.parameters(), strict=True):
        target.lerp_(online, tau)


def anneal_distillation(
    recent_returns: Sequence[float], teacher_return: float, random_return: float, args: Args
) -> float:
    """Compute λ from the last `RECENT_EPISODES` training episodes.

    This is section 4.2 of Agarwal et al. (2022), relative to the random policy's return as in the authors' code.

    λ = ``args.distill_coefficient`` · clip((G_T − G) / (G_T − G_random), 0, 1), where G is their mean return, or
    ``args.distill_coefficient`` before there are so many.
    """
    if len(recent_returns) < RECENT_EPISODES:
        return args.distill_coefficient
    gap = teacher_return - float(np.mean(recent_returns))
    full_gap = max(teacher_return - random_return, 1e-9)  # a teacher may be no better than the random policy
    return args.distill_coefficient * min(max(gap / full_gap, 0.0), 1.0)


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """Anneal linearly from ``start`` to ``end`` over ``duration`` steps."""
    if duration <= 0:
        return end
    return start + (end - start) * min(step / duration, 1.0)


def learning_rate_at(update: int, distill_coefficient: float, args: Args) -> float:
    """Compute the learning rate of an update, counted from the first offline one, at λ = ``distill_coefficient``."""
    warmup = linear_schedule(0.0, 1.0, args.warmup_updates, update + 1)
    online_rate = args.online_learning_rate or args.learning_rate
    if update < args.offline_steps:
        return warmup * linear_schedule(args.learning_rate, online_rate, args.offline_steps, update)
    # Online, the rate depends on λ instead of the update. `check_args` rejects a final rate where λ is always 0.
    if args.final_learning_rate is None:
        return warmup * online_rate
    share = distill_coefficient / args.distill_coefficient  # 1 at the first λ, 0 at λ = 0
    return warmup * (args.final_learning_rate + (online_rate - args.final_learning_rate) * share)


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


def times_due(start: int, end: int, every: int) -> int:
    """Return the number of multiples of ``every`` in (start, end]."""
    return end // every - start // every


def main(args: Args) -> None:
    # ==================== setup ====================
    device, bf16, memory_format = set_up_torch(args.cuda, args.bf16)
    check_args(args, device, STEP_BYTES, batches_per_call=UPDATES_PER_CALL)
    args.num_envs = fitting_num_envs(args)  # logs and checkpoints have the reduced number
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)  # for forward passes
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.benchmark = not args.torch_deterministic
    generator = torch.Generator(device).manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    make_envs = functools.partial(AtariEnvs, args.env_id, repeat_action_probability=args.repeat_action_probability)
    envs = make_envs(num_envs=args.num_envs)
    hub_name = f"cleanrl/{args.env_id.replace('/', '-')}-{args.teacher_model_exp_name}-seed1"
    teacher_path = find_model(args.teacher_policy_hf_repo or hub_name, args.teacher_model_exp_name)
    teacher, teacher_temperature = load_model(teacher_path, envs.num_actions, args.temperature)
    teacher.to(device, memory_format=memory_format)
    if bf16 and isinstance(teacher, TeacherNetwork):
        # The teacher's weights never change: cast once, not in each forward pass. A QNetwork may lack `network`.
        teacher.network[:-1].to(torch.bfloat16)

    torch.manual_seed(args.seed)  # here, since load_model draws random weights too
    q_network = QNetwork(envs.num_actions).to(device, memory_format=memory_format)
    target_network = copy.deepcopy(q_network)
    # `capturable` keeps Adam's step count on the GPU, as a CUDA graph needs.
    capturable = device.type == "cuda"
    optimizer = torch.optim.Adam(q_network.parameters(), args.learning_rate, fused=True, capturable=capturable)

    # Makes and locks runs/{run_name}, or the directory of --resume; starts TensorBoard and, with --track, W&B.
    run_dir, writer = start_logging(args, teacher_file=teacher_path)
    video_dir = VIDEOS / run_dir.name if args.capture_video else None
    progress = Progress()
    checkpoint = Checkpoint(
        args, run_dir, progress=progress, q_network=q_network, target_network=target_network, optimizer=optimizer,
        generator=generator, rng=rng, writer=writer, teacher=teacher_path,
    )  # fmt: skip

    @torch.no_grad()
    def q_values_of(network: nn.Module, observation: torch.Tensor) -> torch.Tensor:
        with autocast:
            return network(observation)

    def evaluate(name: str, network: nn.Module, episodes: int, epsilon: float, temperature: float = 0.0) -> list[float]:
        """Play whole episodes and return their returns."""
        action_rng = np.random.default_rng((args.seed, Stream.EVALUATION_ACTIONS))  # the same in each evaluation

        def act(observation: np.ndarray) -> np.ndarray:
            checkpoint.exit_if_signalled()  # a resumed run repeats the evaluation
            q_values = q_values_of(network, to_device(observation, device)).cpu().numpy()
            return epsilon_greedy(q_values, epsilon, action_rng, temperature)

        return play_episodes(name, act, episodes, make_envs, args.seed, video_dir)

    def evaluate_student(phase: str, step: int, global_step: int, replay: Replay) -> None:
        """Save a checkpoint, evaluate the student, log its mean return and save its weights."""
        check_finite(q_network.parameters())
        # A signal ends the evaluation at once, and the run that is resumed from this checkpoint repeats it.
        checkpoint.save(replay=replay)
        returns = evaluate(f"{phase} {step}", q_network, args.eval_episodes, args.end_e)
        progress.returns[f"{phase} {step}"] = returns
        writer.add_scalar(f"charts/{phase}/avg_episodic_return", np.mean(returns), global_step)
        save_model(q_network, run_dir / f"{args.exp_name}-{phase}-{step}.cleanrl_model")

    with writer, checkpoint:  # outside of evaluations, a signal stops the run after a checkpoint
        checkpoint.restore()  # does nothing in a new run

        # ==================== evaluate teacher and random policy ====================
        if "random" not in progress.returns:
            checkpoint.save()
            # At epsilon 1, the network does not matter.
            for name, epsilon in (("teacher", args.end_e), ("random", 1.0)):
                returns = evaluate(name, teacher, args.teacher_eval_episodes, epsilon, teacher_temperature)
                progress.returns[name] = returns
                writer.add_scalar(f"charts/{name}/avg_episodic_return", np.mean(returns), 0)
        teacher_return = float(np.mean(progress.returns["teacher"]))
        random_return = float(np.mean(progress.returns["random"]))
        if teacher_return <= random_return:
            print("WARNING: the teacher is no better than the random policy; λ is 0 once the student is as good")

        if args.offline_steps > 0 and not progress.offline_finished:
            replay = Replay(args.teacher_steps, envs.num_actions, args, device)
            data_steps = args.teacher_steps // args.num_envs * args.num_envs  # whole steps of all environments
            if progress.teacher_step > 0:
                checkpoint.restore_replay(replay)  # its episodes end, since emulators can't be resumed

            # ==================== teacher data ====================
            if progress.teacher_step < data_steps:
                # The step is in the seed, so that a resumed run does not repeat the first episodes.
                observation = to_device(envs.reset((args.seed, Stream.TEACHER_DATA, progress.teacher_step)), device)
                steps = range(progress.teacher_step, data_steps, args.num_envs)
                start_time = time.perf_counter()
                for step in ProgressBar("teacher data", steps, "step"):
                    teacher_q_values = q_values_of(teacher, observation)
                    epsilon = linear_schedule(args.start_e, args.end_e, args.teacher_steps, step)
                    action = epsilon_greedy(teacher_q_values.cpu().numpy(), epsilon, rng, teacher_temperature)
                    action = envs.send(action)  # the actions taken: FIRE starts an episode or a life
                    result = envs.recv()
                    replay.add(observation, action, result, teacher_q_values)
                    observation = to_device(result.observation, device)

                    progress.teacher_step = step + args.num_envs
                    checkpoint.save_if_due(replay=replay)
                sps = (data_steps - steps.start) / (time.perf_counter() - start_time)
                writer.add_scalar("charts/teacher/SPS", int(sps), 0)
                checkpoint.save(replay=replay)

            # ==================== offline: learn from the teacher's data ====================
            update = make_update(q_network, target_network, optimizer, replay.ring, generator, autocast, args)
            # In this phase, a step is an update. A call makes a number of them that divides all these, so that logs,
            # evaluations and target network updates are due between two calls. If it is 1, a GPU is slow.
            per_call = math.gcd(UPDATES_PER_CALL, LOG_EVERY, args.target_network_frequency, args.offline_eval_frequency)
            steps = range(progress.offline_update, args.offline_steps, per_call)
            start_time = time.perf_counter()
            for step in ProgressBar("offline", steps, "update"):
                # The evaluation comes before the update, so that a run resumed from its checkpoint begins with it.
                if step > 0 and step % args.offline_eval_frequency == 0:
                    evaluate_student("offline", step, step, replay)
                next_step = min(step + per_call, args.offline_steps)
                learning_rates = [learning_rate_at(i, args.distill_coefficient, args) for i in range(step, next_step)]
                losses = update(*replay.window, args.distill_coefficient, *learning_rates)
                if next_step % args.target_network_frequency == 0:
                    update_target(target_network, q_network, args.tau)

                progress.offline_update = next_step
                if next_step % LOG_EVERY == 0:  # seldom, since reading a value synchronises with a GPU
                    check_finite(losses)
                    writer.add_scalar("charts/offline/loss", losses.loss.item(), next_step)
                    writer.add_scalar("charts/offline/q_loss", losses.td_loss.item(), next_step)
                    writer.add_scalar("charts/offline/distill_loss", losses.distill_loss.item(), next_step)
                    updates_per_second = (next_step - steps.start) / (time.perf_counter() - start_time)
                    writer.add_scalar("charts/offline/updates_per_second", updates_per_second, next_step)
                checkpoint.save_if_due(replay=replay)
            evaluate_student("offline", args.offline_steps, args.offline_steps, replay)
            update_target(target_network, q_network, 1.0)  # the online phase starts with an up-to-date target network
            progress.offline_finished = True
            del replay, update  # before the online replay buffer is made: memory holds one of them
            checkpoint.save()  # without a replay buffer: that of the next save is another one

        # ==================== online: learn from the student's own data ====================
        if progress.online_step < args.total_timesteps:
            replay = Replay(args.buffer_size, envs.num_actions, args, device)
            if progress.online_step > 0:
                checkpoint.restore_replay(replay)  # its episodes end, since emulators can't be resumed
            update = make_update(q_network, target_network, optimizer, replay.ring, generator, autocast, args)

            # One function of both forward passes, so that a GPU runs them as one CUDA graph.
            def compute_both(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return q_values_of(q_network, observation), q_values_of(teacher, observation)

            both_q_values = cuda_graph(compute_both, generator, args.cuda_graph and device.type == "cuda")
            exploration_steps = args.exploration_fraction * args.total_timesteps
            updates_per_log = max(LOG_EVERY // args.train_frequency, 1)
            observation = to_device(envs.reset((args.seed, Stream.TRAINING, progress.online_step)), device)
            steps = range(progress.online_step, args.total_timesteps, args.num_envs)
            bar = ProgressBar("online", steps, "step")
            start_time = time.perf_counter()
            for step in bar:
                global_step = args.offline_steps + step  # offline updates count as steps
                next_step = step + args.num_envs
                # The evaluation comes before the step, so that a run resumed from its checkpoint begins with it.
                if step > 0 and times_due(step - args.num_envs, step, args.online_eval_frequency):
                    evaluate_student("online", step, global_step, replay)
                q_values, teacher_q_values = both_q_values(observation)
                epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
                action = epsilon_greedy(q_values.cpu().numpy(), epsilon, rng, temperature=0.0)
                action = envs.send(action)  # the actions taken: FIRE starts an episode or a life

                # The student learns while the emulators run. Nothing here synchronises with a GPU.
                distill_coefficient = anneal_distillation(progress.recent_returns, teacher_return, random_return, args)
                low, high = replay.window
                updates_before = progress.online_update
                if step >= args.learning_starts and high > low:  # n_step + 1 steps are in the buffer
                    progress.online_update += times_due(step, next_step, args.train_frequency)
                    updates = range(args.offline_steps + updates_before, args.offline_steps + progress.online_update)
                    learning_rates = [learning_rate_at(i, distill_coefficient, args) for i in updates]
                    for i in range(0, len(updates), UPDATES_PER_CALL):
                        losses = update(low, high, distill_coefficient, *learning_rates[i : i + UPDATES_PER_CALL])
                    # Several are due if the frequency is below num_envs, which matters for tau < 1.
                    for _ in range(times_due(step, next_step, args.target_network_frequency)):
                        update_target(target_network, q_network, args.tau)

                result = envs.recv()
                replay.add(observation, action, result, teacher_q_values)
                observation = to_device(result.observation, device)

                progress.online_step = next_step
                if times_due(step, next_step, LOG_EVERY):
                    sps = (next_step - steps.start) / (time.perf_counter() - start_time)
                    writer.add_scalar("charts/SPS", int(sps), global_step)
                    writer.add_scalar("charts/epsilon", epsilon, global_step)
                    writer.add_scalar("charts/distill_coeff", distill_coefficient, global_step)
                if times_due(updates_before, progress.online_update, updates_per_log):
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
                checkpoint.save_if_due(replay=replay)

        # ==================== save and evaluate ====================
        check_finite(q_network.parameters())
        checkpoint.save()  # without the replay buffer: a resumed run only repeats the evaluation
        model_path = run_dir / f"{args.exp_name}.cleanrl_model"
        if args.save_model:
            save_model(q_network, model_path)
            print(f"model saved to {model_path}")
        progress.returns["final"] = evaluate("final", q_network, args.eval_episodes, args.end_e)
        for i, episodic_return in enumerate(progress.returns["final"]):
            writer.add_scalar("eval/episodic_return", episodic_return, args.offline_steps + progress.online_step + i)

    # ==================== upload and summarise ====================
    if args.upload_model:
        upload_model(args, run_dir, model_path, progress.returns["final"])
    summarise(args, run_dir, progress.returns)
    checkpoint.finish()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
