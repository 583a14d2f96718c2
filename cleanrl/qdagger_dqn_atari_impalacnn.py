"""QDagger on Atari in PyTorch: a student learns from a trained teacher, first offline, then online.

Agarwal et al. (2022), Reincarnating Reinforcement Learning, arXiv 2206.01626. Docs: docs/qdagger.md
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the helpers beside this script
# PyTorch reads these settings at its import. Its threads spin only briefly while they wait for a busy core. Its large
# tensors lie in huge pages, if Linux has them: a CPU translates their addresses faster.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import copy
import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from cleanrl_utils.atari import AtariEnvs, StepResult
from cleanrl_utils.checks import MAY_CHANGE, Range, check_args
from cleanrl_utils.device import TorchHardware as Hardware
from cleanrl_utils.device import cuda_graph, to_device
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import play_episodes, warn_of_weak_teacher
from cleanrl_utils.models import find_model, read_model
from cleanrl_utils.networks import save_torch
from cleanrl_utils.run import Run, parse_args

# Gradient steps that are made at once, at most. One forward pass of the target network serves them all, and a GPU runs
# them as one CUDA graph: both take less time than step by step.
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
    torch_deterministic: Annotated[bool, MAY_CHANGE] = True
    """if toggled, cuDNN uses deterministic algorithms; otherwise it benchmarks its algorithms and takes the fastest"""
    cuda: Annotated[bool, MAY_CHANGE] = True
    """if toggled, a GPU is used when there is one"""
    cuda_graph: Annotated[bool, MAY_CHANGE] = True
    """if toggled, a GPU runs updates and forward passes as CUDA graphs, with the same results"""
    compile: Annotated[bool, MAY_CHANGE] = False
    """if toggled, the loss is compiled by torch.compile, which takes half a minute or more at the start"""
    bf16: bool = True
    """if toggled, all layers but the last compute in bfloat16 where the hardware supports it"""
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
    teacher_model_exp_name: str = "dqn_atari"
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
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
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


class Record(NamedTuple):
    """The arrays that are stored of environment steps: (L, N, …) of L steps of N environments, (N, …) of one step."""

    frame: torch.Tensor  # uint8 (…, 84, 84), the newest of each observation; stacks of 4 are built when sampling
    action: torch.Tensor  # uint8
    reward: torch.Tensor  # float32, clipped to [−1, 1]
    terminated: torch.Tensor  # bool, a life was lost or the episode ended
    age: torch.Tensor  # int32, steps since the reset of the episode: a stack has no frames from before it
    valid: torch.Tensor  # bool, False at the final observation of an episode or stopped run: no transition starts there
    teacher_q_values: torch.Tensor  # float32 (…, num_actions), computed once: a step is sampled often


class Batch(NamedTuple):
    """B transitions."""

    observation: torch.Tensor  # uint8 (B, 4, 84, 84)
    action: torch.Tensor  # int64 (B,)
    n_step_return: torch.Tensor  # float32 (B,), Σ γᵏ r of the rewards before the bootstrap observation
    bootstrap_observation: torch.Tensor  # uint8 (B, 4, 84, 84)
    bootstrap_discount: torch.Tensor  # float32 (B,), γᵐ after m rewards, or 0 after a termination
    teacher_q_values: torch.Tensor  # float32 (B, num_actions)


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
            frame=torch.empty((*shape, 84, 84), dtype=torch.uint8, device=hardware.device),
            action=torch.empty(shape, dtype=torch.uint8, device=hardware.device),
            reward=torch.empty(shape, dtype=torch.float32, device=hardware.device),
            terminated=torch.empty(shape, dtype=torch.bool, device=hardware.device),
            age=torch.empty(shape, dtype=torch.int32, device=hardware.device),
            valid=torch.empty(shape, dtype=torch.bool, device=hardware.device),
            teacher_q_values=torch.empty((*shape, num_actions), dtype=torch.float32, device=hardware.device),
        )
        # Set by `Student.update`. It is kept here since a CUDA graph reads this ring: both are freed together.
        self.captured_gradient_steps = None

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
        slot = self.steps_added % self.length
        for array, value in zip(self.ring, record, strict=True):
            array[slot] = to_device(value, array.device)
        self.age = np.where(result.reset, 0, self.age + 1).astype(np.int32)
        self.steps_added += 1

    def sampled_steps(self) -> range:
        """Return the steps that can be sampled: their stacks and bootstrap observations are in the buffer."""
        low = 0 if self.steps_added <= self.length else self.steps_added - self.length + 3  # 3 older frames of a stack
        return range(low, max(low, self.steps_added - self.n_step))

    # ==================== checkpoints ====================

    def read(self, low: int, high: int) -> dict[str, np.ndarray]:
        """Return the arrays of slots [low, high)."""
        return {name: array[low:high].cpu().numpy() for name, array in self.ring._asdict().items()}

    def write(self, low: int, arrays: dict[str, np.ndarray]) -> None:
        """Write arrays, as :meth:`read` returns them, to the slots from ``low`` on."""
        for name, array in self.ring._asdict().items():
            array[low : low + len(arrays[name])].copy_(torch.from_numpy(arrays[name]))

    def truncate_episodes(self) -> None:
        """Truncate all episodes at the last step: a resumed run has new ones, as emulators can't be restored."""
        self.ring.valid[(self.steps_added - 1) % self.length] = False


def sample(
    ring: Record, low: int, high: int, batch_size: int, generator: torch.Generator, n_step: int, gamma: float
) -> Batch:
    """Sample a batch uniformly, with replacement, from the valid transitions of steps [low, high)."""
    length, num_envs = ring.valid.shape
    # Rejection sampling with 8 candidates at once: a loop or randint(low, high) would synchronise with the GPU.
    candidates = (8, batch_size)
    # In float32, the fraction could round up to `high`.
    fraction = torch.rand(candidates, dtype=torch.float64, generator=generator, device=generator.device)
    t = low + (fraction * (high - low)).long()
    env = torch.randint(0, num_envs, candidates, generator=generator, device=generator.device)
    first_valid = ring.valid[t % length, env].int().argmax(dim=0, keepdim=True)
    t = t.gather(0, first_valid)[0]
    env = env.gather(0, first_valid)[0]
    # If none of the 8 is valid, which is next to impossible, take the step before the first of them.
    t = torch.where(ring.valid[t % length, env], t, (t - 1).clamp(min=low))
    return transitions_at(ring, t, env, n_step, gamma)


def transitions_at(ring: Record, t: torch.Tensor, env: torch.Tensor, n_step: int, gamma: float) -> Batch:
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


def stack_frames(ring: Record, t: torch.Tensor, env: torch.Tensor) -> torch.Tensor:
    """Return the observations at steps ``t``, uint8 (B, 4, 84, 84), with zeros for frames before the reset."""
    ago = torch.arange(3, -1, -1, device=t.device)  # steps, oldest frame first
    in_episode = ring.age[t % len(ring.age), env][:, None] >= ago
    frame = ring.frame.flatten(2).view(torch.int64)  # 8 of 84 · 84 pixels at once: faster on a CPU
    stack = frame[(t[:, None] - ago) % len(frame), env[:, None]] * in_episode[:, :, None]
    return stack.view(torch.uint8).unflatten(2, ring.frame.shape[2:])


@torch.no_grad()
def forward_pass(network: nn.Module, hardware: Hardware, observation: torch.Tensor) -> torch.Tensor:
    """Compute Q-values, float32 (B, num_actions), of observations, uint8 (B, 4, 84, 84)."""
    with torch.autocast(hardware.device.type, torch.bfloat16, enabled=hardware.bf16):
        return network(observation)


class Teacher:
    """A trained agent, whose weights do not change, from a model file of any format.

    A policy's logits are multiplied by ``temperature``: softmax(Q-values / temperature) is then the policy.
    """

    def __init__(self, path: Path, num_actions: int, temperature: float, hardware: Hardware):
        candidates = [network(num_actions) for network in (QNetwork, TeacherNetwork, C51Network)]
        layers = {network: network.state_dict() for network in candidates}
        self.network, weights, is_policy = read_model(path, "torch", layers)
        if is_policy:
            weights["network.9.weight"] *= temperature
            weights["network.9.bias"] *= temperature
        self.network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        self.network.to(hardware.device, memory_format=hardware.memory_format).eval()
        if hardware.bf16 and isinstance(self.network, TeacherNetwork):
            # The weights never change: cast once, not in each forward pass. A QNetwork may lack `network`.
            self.network.network[:-1].to(torch.bfloat16)
        # A policy samples its actions; a Q-network takes the one with the largest Q-value.
        self.action_temperature = temperature if is_policy else 0.0
        self.hardware = hardware
        forward = functools.partial(forward_pass, self.network, hardware)
        self.forward = cuda_graph(forward, torch.Generator(hardware.device), hardware.cuda_graph)

    def q_values(self, observation: np.ndarray) -> np.ndarray:
        """Compute Q-values, float32 (B, num_actions), of observations, uint8 (B, 4, 84, 84)."""
        return self.forward(to_device(observation, self.hardware.device)).cpu().numpy()


class Losses(NamedTuple):
    """The loss, its terms and the mean Q-value."""

    loss: torch.Tensor
    td_loss: torch.Tensor
    distill_loss: torch.Tensor
    q_values: torch.Tensor  # the mean over the batch, of the actions taken


def qdagger_loss(
    q_network: nn.Module, target_q_values: torch.Tensor, batch: Batch, distill_coefficient: float, temperature: float
) -> Losses:
    """Compute the QDagger loss (Agarwal et al., 2022, section 4.2, eq. 2).

    L = mean (Q(s,a) − y)² + λ · mean KL( softmax(Q_T(s,·) / temperature) ‖ softmax(Q(s,·) / temperature) )

    with y = Σ γᵏ r + γᵐ (1 − terminated) max Q'(s',·), λ = ``distill_coefficient`` and the teacher's Q-values Q_T.
    ``target_q_values`` are Q'(s',·), float32 (B, num_actions).
    """
    y = batch.n_step_return + batch.bootstrap_discount * target_q_values.amax(dim=1)
    q_values = q_network(batch.observation)
    q_of_action = q_values.gather(1, batch.action[:, None])[:, 0]
    td_loss = F.mse_loss(q_of_action, y)
    student_log_policy = F.log_softmax(q_values / temperature, dim=1)
    teacher_log_policy = F.log_softmax(batch.teacher_q_values / temperature, dim=1)
    kl = torch.sum(torch.exp(teacher_log_policy) * (teacher_log_policy - student_log_policy), dim=1)
    distill_loss = torch.mean(kl)
    loss = td_loss + distill_coefficient * distill_loss
    return Losses(loss, td_loss, distill_loss, q_of_action.mean())


class Student:
    """The student: Q-network, target network, optimizer and random numbers.

    Outside of gradient steps, the networks are in evaluation mode.
    """

    action_temperature = 0.0  # it takes the action with the largest Q-value

    def __init__(self, args: Args, num_actions: int, hardware: Hardware):
        self.args = args
        self.hardware = hardware
        torch.manual_seed(args.seed)
        self.generator = torch.Generator(hardware.device).manual_seed(args.seed)
        self.q_network = QNetwork(num_actions).to(hardware.device, memory_format=hardware.memory_format).eval()
        self.target_network = copy.deepcopy(self.q_network)
        weights = self.q_network.parameters()
        self.optimizer = torch.optim.Adam(weights, args.learning_rate, fused=True, capturable=True)  # for CUDA graphs
        forward = functools.partial(forward_pass, self.q_network, hardware)
        self.forward = cuda_graph(forward, self.generator, hardware.cuda_graph)
        self.loss_function = torch.compile(qdagger_loss) if args.compile else qdagger_loss

    def q_values(self, observation: np.ndarray) -> np.ndarray:
        """Compute Q-values, float32 (B, num_actions), of observations, uint8 (B, 4, 84, 84)."""
        return self.forward(to_device(observation, self.hardware.device)).cpu().numpy()

    def update(self, replay: Replay, distill_coefficient: float, learning_rates: Sequence[float]) -> Losses:
        """Make a gradient step for each learning rate, at least one; return the losses of the last one.

        The next call may overwrite the returned losses.
        """
        if replay.captured_gradient_steps is None:
            function = functools.partial(self.gradient_steps, replay.ring)
            replay.captured_gradient_steps = cuda_graph(function, self.generator, self.hardware.cuda_graph)
        sampled = replay.sampled_steps()
        for i in range(0, len(learning_rates), UPDATES_PER_CALL):
            rates = learning_rates[i : i + UPDATES_PER_CALL]
            losses = replay.captured_gradient_steps(sampled.start, sampled.stop, distill_coefficient, *rates)
        return losses

    def gradient_steps(
        self, ring: Record, low: int, high: int, distill_coefficient: float, *learning_rates: float
    ) -> Losses:
        """Make gradient steps on transitions of steps [low, high).

        In a CUDA graph, numbers are tensors, and this code runs only in the first calls: changing values are arguments.
        """
        args = self.args
        autocast = torch.autocast(self.hardware.device.type, torch.bfloat16, enabled=self.hardware.bf16)
        num_transitions = len(learning_rates) * args.batch_size
        batches = sample(ring, low, high, num_transitions, self.generator, args.n_step, args.gamma)
        with torch.no_grad(), autocast:  # the target network does not change in a call
            target_q_values = self.target_network(batches.bootstrap_observation)
        self.q_network.train()
        for i, learning_rate in enumerate(learning_rates):
            rows = slice(i * args.batch_size, (i + 1) * args.batch_size)
            batch = Batch(*(array[rows] for array in batches))
            self.optimizer.param_groups[0]["lr"] = learning_rate
            with autocast:
                losses = self.loss_function(
                    self.q_network, target_q_values[rows], batch, distill_coefficient, args.temperature
                )
            self.optimizer.zero_grad()
            losses.loss.backward()
            self.optimizer.step()
        self.q_network.eval()
        return Losses(*(term.detach() for term in losses))

    @torch.no_grad()
    def update_target(self, tau: float) -> None:
        """Move the target network towards the Q-network by the fraction ``tau``; copy its buffers."""
        for target, online in zip(self.target_network.parameters(), self.q_network.parameters(), strict=True):
            target.lerp_(online, tau)
        for target, online in zip(self.target_network.buffers(), self.q_network.buffers(), strict=True):
            target.copy_(online)

    def save(self, path: Path) -> None:
        """Save the Q-network's state dict; raise a UserError if it has NaN or infinite values."""
        save_torch(path, self.q_network.state_dict())

    def dump(self) -> bytes:
        """Serialise the state of the student for a checkpoint."""
        parts = (self.q_network, self.target_network, self.optimizer)
        file = io.BytesIO()
        torch.save([*(part.state_dict() for part in parts), self.generator.get_state()], file)
        return file.getvalue()

    def load(self, data: bytes) -> None:
        """Restore the state that :meth:`dump` serialised, of a CPU or a GPU."""
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        q_network, target_network, optimizer, generator_state = state
        self.q_network.load_state_dict(q_network)
        self.target_network.load_state_dict(target_network)
        optimizer["param_groups"] = self.optimizer.state_dict()["param_groups"]  # they follow from flags and script
        self.optimizer.load_state_dict(optimizer)
        if generator_state.shape == self.generator.get_state().shape:  # otherwise of another kind of device
            self.generator.set_state(generator_state)


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
