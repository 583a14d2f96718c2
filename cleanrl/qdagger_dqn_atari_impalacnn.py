"""QDagger on Atari in PyTorch: a student learns from a trained teacher, offline, then online while the teaching fades.

Agarwal et al. (2022), Reincarnating Reinforcement Learning, arXiv 2206.01626. Docs: docs/qdagger.md
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from huggingface_hub import hf_hub_download

from cleanrl_utils.atari import AtariEnvs, Step
from cleanrl_utils.checks import check_args, check_memory, one_line_errors
from cleanrl_utils.convert import check_weights, flax_to_torch, is_torch_file, model_errors, read_flax
from cleanrl_utils.device import (
    CudaGraph,
    available_memory,
    check_torch_gradient,
    cuda_graphs,
    describe_torch,
    fill_at_random,
    pick_torch_device,
    rehearsed,
)
from cleanrl_utils.evaluation import print_summary, warn_of_weak_teacher
from cleanrl_utils.hub import check_upload_possible, download_errors, upload_model
from cleanrl_utils.run import Run, parse_args
from cleanrl_utils.tracking import atomic_write


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    torch_deterministic: bool = True
    """if toggled, cuDNN computes deterministically; otherwise it tries which of its algorithms is fastest"""
    cuda: bool = True
    """if toggled, a GPU is used when there is one"""
    cuda_graph: bool = True
    """if toggled, a GPU is given every update as one launch, a CUDA graph; the same numbers"""
    compile: bool = False
    """if toggled, loss and gradient are compiled by torch.compile: minutes at the start, fewer kernels from there on"""
    bf16: bool = True
    """if toggled, all layers but the last compute in bfloat16 where the processor does so in hardware"""
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
    teacher_model_exp_name: str = "dqn_atari"
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


class ResidualBlock(nn.Module):
    """(B, C, H, W) → (B, C, H, W), Espeholt et al. (2018)."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.conv0(F.relu(x)), inplace=True)  # in place: no gradient needs what a convolution returned
        return self.conv1(hidden).add_(x)


class ConvSequence(nn.Module):
    """(B, C, H, W) → (B, out_channels, ⌈H/2⌉, ⌈W/2⌉)."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.res_block0 = ResidualBlock(out_channels)
        self.res_block1 = ResidualBlock(out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.conv(x), kernel_size=3, stride=2, padding=1)
        return self.res_block1(self.res_block0(x))


class QNetwork(nn.Module):
    """The student: the ImpalaCNN of Espeholt et al. (2018). uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    def __init__(self, num_actions: int):
        super().__init__()
        c0, c1, c2, hidden = 16, 32, 32, 256
        self.network = nn.Sequential(
            ConvSequence(4, c0),
            ConvSequence(c0, c1),
            ConvSequence(c1, c2),
            nn.Flatten(),
            nn.ReLU(),
            nn.Linear(c2 * 11 * 11, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_actions),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.network[:-1](x.to(memory_format=torch.channels_last) / 255.0)
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 would round away differences of actions
            return self.network[-1](hidden.float())


class TeacherNetwork(nn.Module):
    """The Q-network of Mnih et al. (2015), a teacher's. uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, num_actions),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.network[:-1](x.to(memory_format=torch.channels_last) / 255.0)
        with torch.autocast(x.device.type, enabled=False):
            return self.network[-1](hidden.float())


def load_teacher(repo: str, exp_name: str, num_actions: int) -> nn.Module:
    """The teacher ``{exp_name}.cleanrl_model`` of a local directory or, where there is none, of a hub repository.

    UserError where there is no such file, it can't be had, or it is no model of this game.
    """
    filename = f"{exp_name}.cleanrl_model"
    with download_errors(repo, filename):
        directory = Path(repo).expanduser()
        path = directory / filename if directory.is_dir() else Path(hf_hub_download(repo, filename))
    return load_model(path, num_actions)


def load_model(path: Path, num_actions: int) -> nn.Module:
    """The network in a file: a DQN or a student, saved by PyTorch or by JAX.

    UserError where it is no model of either, or has another number of actions.
    """
    with model_errors(path):
        if is_torch_file(path):
            state_dict = torch.load(path, map_location="cpu", weights_only=True)  # it may be from anywhere: run no code
        else:
            state_dict = {key: torch.from_numpy(value) for key, value in flax_to_torch(read_flax(path)).items()}
        network = (QNetwork if "network.0.conv.weight" in state_dict else TeacherNetwork)(num_actions)
        check_weights(state_dict, network.state_dict(), type(network).__name__)
        network.load_state_dict(state_dict)
    return network


def save_model(network: nn.Module, path: Path) -> None:
    """Writes the state dict, contiguous and on the CPU whatever the network's layout."""
    with atomic_write(path) as file:
        torch.save({key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}, file)


class Transitions(NamedTuple):
    """A ring of L environment steps of each of N environments, by slot: step t lies in slot t % L."""

    frame: torch.Tensor
    """uint8 (L, N, 84, 84), the newest frame of what was observed; stacks of 4 are built when sampling"""
    action: torch.Tensor
    """uint8 (L, N), what was done then"""
    reward: torch.Tensor
    """float32 (L, N), what came of it, clipped to [−1, 1]"""
    terminated: torch.Tensor
    """bool (L, N), whether it cost a life or ended the game"""
    age: torch.Tensor
    """int32 (L, N), steps since the game's reset: where a stack of frames has to stop"""
    valid: torch.Tensor
    """bool (L, N), False for a game's final frame: its action was ignored and the next frame is of another game"""
    teacher_q_values: torch.Tensor
    """float32 (L, N, num_actions), asked for once, as an observation is sampled 8 times on average"""


class Batch(NamedTuple):
    """B transitions as the loss needs them."""

    observation: torch.Tensor
    """uint8 (B, 4, 84, 84)"""
    action: torch.Tensor
    """int64 (B,)"""
    n_step_return: torch.Tensor
    """float32 (B,), Σ γᵏ r of the rewards before the bootstrap state"""
    bootstrap_observation: torch.Tensor
    """uint8 (B, 4, 84, 84)"""
    bootstrap_discount: torch.Tensor
    """float32 (B,), γᵐ, or 0 where the life or the game ended before"""
    teacher_q_values: torch.Tensor
    """float32 (B, num_actions), of the observation"""


class Replay:
    """The last ``size`` environment steps of N environments, on the device that learns from them."""

    def __init__(self, size: int, num_actions: int, args: Args, device: torch.device):
        self.length = size // args.num_envs
        self.steps_added = 0
        self.age = np.zeros(args.num_envs, np.int32)
        self.n_step, self.gamma = args.n_step, args.gamma
        shape = (self.length, args.num_envs)
        self.ring = Transitions(
            frame=torch.empty((*shape, 84, 84), dtype=torch.uint8, device=device),
            action=torch.empty(shape, dtype=torch.uint8, device=device),
            reward=torch.empty(shape, dtype=torch.float32, device=device),
            terminated=torch.empty(shape, dtype=torch.bool, device=device),
            age=torch.empty(shape, dtype=torch.int32, device=device),
            valid=torch.empty(shape, dtype=torch.bool, device=device),
            teacher_q_values=torch.empty((*shape, num_actions), dtype=torch.float32, device=device),
        )

    @staticmethod
    def bytes_per_step(num_actions: int) -> int:
        """What an environment step takes."""
        return 84 * 84 + 1 + 4 + 1 + 4 + 1 + 4 * num_actions

    def add(self, observation: torch.Tensor, action: np.ndarray, step: Step, teacher_q_values: torch.Tensor) -> None:
        """Appends a step of each environment: what was observed and done, what came of it, what the teacher thinks."""
        reward = np.clip(step.reward, -1, 1)
        values = observation[:, -1], action, reward, step.terminated, self.age, ~step.reset, teacher_q_values
        for array, value in zip(self.ring, values, strict=True):
            # A plain assignment would wait until a GPU has learned all that it was asked to.
            array[self.steps_added % self.length].copy_(torch.as_tensor(value), non_blocking=True)
        self.age = np.where(step.reset, 0, self.age + 1).astype(np.int32)
        self.steps_added += 1

    def end_games(self) -> None:
        """Ends all games where they are, as truncated: what followed the last step was lost when the run stopped."""
        self.ring.valid[(self.steps_added - 1) % self.length] = False
        self.age[:] = 0

    @property
    def window(self) -> tuple[int, int]:
        """The steps [low, high) that may be sampled: bootstrap state added, stack's oldest frame not overwritten."""
        low = 0 if self.steps_added <= self.length else self.steps_added - self.length + 3
        return low, max(low, self.steps_added - self.n_step)

    def sample(self, batch_size: int, low: float, high: float, generator: torch.Generator) -> Batch:
        """A batch drawn uniformly, with replacement, from the valid transitions of steps [low, high) of all games."""
        # Final frames are no transitions and are drawn again: eight tries at once, so that no GPU need be waited for.
        # The window moves, and randint would want its ends on the host: float64 counts any replay's steps exactly.
        shape, device = (8, batch_size), generator.device
        fraction = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
        t = low + (fraction * (high - low)).long()
        env = torch.randint(0, self.ring.valid.shape[1], shape, generator=generator, device=device)
        first = self.ring.valid[t % self.length, env].int().argmax(dim=0, keepdim=True)
        return self.batch(t.gather(0, first)[0], env.gather(0, first)[0])

    def batch(self, t: torch.Tensor, env: torch.Tensor) -> Batch:
        """The transitions from step ``t``, int64 (B,), of environment ``env``, int64 (B,)."""
        # The n-step return ends with a life, without a bootstrap, and at a truncated game's final frame, with one.
        n_step_return, m, discount = torch.zeros_like(t, dtype=torch.float32), torch.zeros_like(t), 1.0
        playing = torch.ones_like(t, dtype=torch.bool)
        for k in range(self.n_step):
            slot = (t + k) % self.length
            playing = playing & self.ring.valid[slot, env]
            n_step_return = n_step_return + playing * self.gamma**k * self.ring.reward[slot, env]
            survives = self.gamma * ~self.ring.terminated[slot, env]
            discount = discount * torch.where(playing, survives, 1.0)
            m = m + playing
            playing = playing & ~self.ring.terminated[slot, env]
        slot = t % self.length
        action, teacher_q_values = self.ring.action[slot, env].long(), self.ring.teacher_q_values[slot, env]
        return Batch(self.stack(t, env), action, n_step_return, self.stack(t + m, env), discount, teacher_q_values)

    def stack(self, t: torch.Tensor, env: torch.Tensor) -> torch.Tensor:
        """The observations at step ``t``, uint8 (B, 4, 84, 84); zero where a frame is of before the game's reset."""
        ago = torch.arange(3, -1, -1, device=t.device)
        in_game = self.ring.age[t % self.length, env][:, None] >= ago
        return self.ring.frame[(t[:, None] - ago) % self.length, env[:, None]] * in_game[:, :, None, None]


class Losses(NamedTuple):
    """What the loss is made of; scalars, but for the last."""

    loss: torch.Tensor
    td_loss: torch.Tensor
    distill_loss: torch.Tensor
    q_values: torch.Tensor
    """float32 (B,), of the actions taken"""


@torch.no_grad()
def td_target(target_network: nn.Module, batch: Batch) -> torch.Tensor:
    """y = Σ γᵏ r + γᵐ max Q'(s',·), float32 (B,)."""
    return batch.n_step_return + batch.bootstrap_discount * target_network(batch.bootstrap_observation).amax(dim=1)


def qdagger_loss(
    q_network: nn.Module, y: torch.Tensor, batch: Batch, distill_coefficient: float, temperature: float
) -> Losses:
    """TD error plus distillation: Agarwal et al. (2022), section 4.2, eq. 2.

    L = mean (Q(s,a) − y)² + λ · mean KL( softmax(Q_T(s,·)/τ) ‖ softmax(Q(s,·)/τ) ),  y = `td_target`
    """
    q_values = q_network(batch.observation)
    q_of_action = q_values.gather(1, batch.action[:, None])[:, 0]
    td_loss = F.mse_loss(q_of_action, y)
    student = F.log_softmax(q_values / temperature, dim=1)
    teacher = F.log_softmax(batch.teacher_q_values / temperature, dim=1)
    distill_loss = F.kl_div(student, teacher, log_target=True, reduction="batchmean")  # over actions it is a sum
    return Losses(td_loss + distill_coefficient * distill_loss, td_loss, distill_loss, q_of_action)


Learner = tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.Generator]
"""What a run learns with: Q-network, target network, optimizer, the random numbers of sampling"""


def make_learner(args: Args, num_actions: int, device: torch.device) -> Learner:
    """A new one, from `seed`."""
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.benchmark = not args.torch_deterministic
    q_network = QNetwork(num_actions).to(device, memory_format=torch.channels_last)
    capturable = args.cuda_graph and device.type == "cuda"
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True, capturable=capturable)
    return q_network, copy.deepcopy(q_network), optimizer, torch.Generator(device).manual_seed(args.seed)


def make_update(learner: Learner, replay: Replay, autocast: torch.autocast, args: Args) -> Callable[..., Losses]:
    """A function that makes the gradient steps that are due, on a GPU as one launch if `cuda_graph`."""
    q_network, target_network, optimizer, generator = learner
    loss_of = torch.compile(qdagger_loss) if args.compile else qdagger_loss

    def update(low: float, high: float, distill_coefficient: float, *learning_rates: float) -> Losses:
        """A step for each learning rate on transitions of steps [low, high). A CUDA graph's arguments are tensors."""
        batches = replay.sample(len(learning_rates) * args.batch_size, low, high, generator)
        with autocast:
            td_targets = td_target(target_network, batches)  # the same network for all: one pass takes less time
        parts = zip(*(x.split(args.batch_size) for x in (td_targets, *batches)), strict=True)
        for learning_rate, (y, *batch) in zip(learning_rates, parts, strict=True):
            optimizer.param_groups[0]["lr"] = learning_rate
            with autocast:
                losses = loss_of(q_network, y, Batch(*batch), distill_coefficient, args.temperature)
            optimizer.zero_grad()
            losses.loss.backward()
            optimizer.step()
        return Losses(*(term.detach() for term in losses))

    return cuda_graphs(update, generator) if args.cuda_graph and generator.device.type == "cuda" else update


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


def epsilon_greedy(q_values: torch.Tensor, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """The action of largest Q-value, or with probability ``epsilon`` any action; int64 (B,) from float (B, A)."""
    batch, num_actions = q_values.shape
    random = rng.integers(0, num_actions, batch)
    return np.where(rng.random(batch) < epsilon, random, q_values.argmax(dim=1).cpu().numpy())


def times_due(start: int, end: int, every: int) -> int:
    """How many multiples of ``every`` lie in (start, end]."""
    return end // every - start // every


@torch.no_grad()
def update_target(target_network: nn.Module, q_network: nn.Module, tau: float) -> None:
    """Moves the target network to the online one by the fraction ``tau``."""
    for target, online in zip(target_network.parameters(), q_network.parameters(), strict=True):
        target.lerp_(online, tau)


def rehearse(args: Args, num_actions: int) -> None:
    """Makes a few updates as a run will, of throwaway networks on random steps, and checks a gradient."""
    device, autocast = pick_torch_device(args.cuda, args.bf16)
    learner = make_learner(args, num_actions, device)
    replay = Replay(64 * args.num_envs, num_actions, args, device)
    fill_at_random(replay, num_actions)
    update = make_update(learner, replay, autocast, args)
    for due in [1, max(args.num_envs // args.train_frequency, 1)] * (CudaGraph.CALLS_BEFORE + 2):  # offline, online
        update(*replay.window, 1.0, *[args.learning_rate] * due)
    batch = replay.sample(args.batch_size, *replay.window, learner[3])

    def loss(q_network: nn.Module, target_network: nn.Module, batch: Batch) -> torch.Tensor:
        return qdagger_loss(q_network, td_target(target_network, batch), batch, 1.0, args.temperature).loss

    check_torch_gradient(loss, learner[:2], batch, autocast)


def main(args: Args) -> None:
    # ==================== setup ====================
    check_args(args)
    check_upload_possible(args)
    device, autocast = pick_torch_device(args.cuda, args.bf16)
    envs = AtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability)
    hub_repo = f"cleanrl/{args.env_id.replace('/', '-')}-{args.teacher_model_exp_name}-seed1"
    teacher = load_teacher(args.teacher_policy_hf_repo or hub_repo, args.teacher_model_exp_name, envs.num_actions)
    if device.type == "cuda":
        args = rehearsed(rehearse, args, envs.num_actions)  # before anything else is on a GPU that may be exclusive
    check_memory(args, Replay.bytes_per_step(envs.num_actions), available_memory(device))
    teacher.to(device, memory_format=torch.channels_last)
    if autocast._enabled:
        teacher.network[:-1].to(torch.bfloat16)  # now, and not in every call: its weights stay as they are

    run = Run(args)
    print(describe_torch(device, autocast, args.cuda_graph, envs.num_threads), flush=True)
    writer = run.writer
    rng = np.random.default_rng(args.seed)
    q_network, target_network, optimizer, generator = learner = make_learner(args, envs.num_actions, device)
    run.register(q_network=q_network, target_network=target_network, optimizer=optimizer, rng=rng, generator=generator)

    @torch.no_grad()
    def q_values_of(network: nn.Module, observation: torch.Tensor) -> torch.Tensor:
        with autocast:
            return network(observation)

    def player(network: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
        """The network as evaluations want it: from and to NumPy arrays."""
        return lambda observation: q_values_of(network, torch.as_tensor(observation, device=device)).cpu().numpy()

    def learning_rate_at(updates: int, distill_coefficient: float) -> float:
        warmup = linear_schedule(0.0, 1.0, args.warmup_updates, updates + 1)
        online = args.online_learning_rate or args.learning_rate
        final = args.final_learning_rate or online
        online = linear_schedule(final, online, args.distill_coefficient, distill_coefficient)
        return warmup * linear_schedule(args.learning_rate, online, args.offline_steps, updates)

    # ==================== teacher: how well it plays, and how well one plays at random ====================
    teacher_return = run.evaluate("teacher", player(teacher), args.teacher_eval_episodes)
    random_return = run.evaluate("random", None, args.teacher_eval_episodes)
    if not run.over("teacher"):
        writer.add_scalar("charts/teacher/avg_episodic_return", teacher_return, 0)
        writer.add_scalar("charts/random/avg_episodic_return", random_return, 0)
        warn_of_weak_teacher(teacher_return, random_return, args.env_id)
        run.end_phase("teacher")

    if args.offline_steps > 0 and not run.over("offline"):
        replay = Replay(args.teacher_steps, envs.num_actions, args, device)
        run.register_replay("teacher", replay)

        # ==================== teacher data ====================
        if not run.over("teacher data"):
            observation = torch.as_tensor(run.reset(envs), device=device)
            for step in run.steps("teacher data", replay.length * args.num_envs, by=args.num_envs):
                teacher_q_values = q_values_of(teacher, observation)
                epsilon = linear_schedule(args.start_e, args.end_e, args.teacher_steps, step)
                action = envs.send(epsilon_greedy(teacher_q_values, epsilon, rng))
                result = envs.recv()
                replay.add(observation, action, result, teacher_q_values)
                observation = torch.as_tensor(result.observation, device=device)
                run.show_return(score for score, _ in result.games)
            writer.add_scalar("charts/teacher/SPS", int(run.done / run.seconds), 0)
            run.end_phase("teacher data")

        # ==================== offline ====================
        update = make_update(learner, replay, autocast, args)

        def evaluate_offline(updates: int) -> None:
            offline_return = run.evaluate(f"offline {updates}", player(q_network), args.eval_episodes)
            save_model(q_network, run.dir / f"{args.exp_name}-offline-{updates}.cleanrl_model")
            writer.add_scalar("charts/offline/avg_episodic_return", offline_return, updates)
            run.show_return([offline_return])

        for updates in run.steps("offline", args.offline_steps, unit="update"):
            if updates > 0 and updates % args.offline_eval_frequency == 0:
                evaluate_offline(updates)
            learning_rate = learning_rate_at(updates, args.distill_coefficient)
            run.losses = update(*replay.window, args.distill_coefficient, learning_rate)
            global_step = updates + 1
            if global_step % args.target_network_frequency == 0:
                update_target(target_network, q_network, args.tau)
            if global_step % 100 == 0:  # seldom: reading a loss waits for the device
                run.check_learning()
                writer.add_scalar("charts/offline/loss", run.losses.loss.item(), global_step)
                writer.add_scalar("charts/offline/q_loss", run.losses.td_loss.item(), global_step)
                writer.add_scalar("charts/offline/distill_loss", run.losses.distill_loss.item(), global_step)
                writer.add_scalar("charts/offline/updates_per_second", global_step / run.seconds, global_step)
        evaluate_offline(args.offline_steps)
        del replay, update  # before the online replay is made: the two never exist at once
        run.drop_replay()
        run.end_phase("offline")

    # ==================== online ====================
    if not run.over("online"):
        replay = Replay(args.buffer_size, envs.num_actions, args, device)
        run.register_replay("online", replay)
        update = make_update(learner, replay, autocast, args)
        observation = torch.as_tensor(run.reset(envs), device=device)
        recent_returns: list[int] = run.state.setdefault("recent_returns", [])
        run.state.setdefault("updates", args.offline_steps)
        exploration_steps = args.exploration_fraction * args.total_timesteps
        for step in run.steps("online", args.total_timesteps, by=args.num_envs):
            global_step, next_step = args.offline_steps + step, step + args.num_envs
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
            action = envs.send(epsilon_greedy(q_values_of(q_network, observation), epsilon, rng))

            # Emulation overlaps learning; nothing from here to `recv` waits for a GPU.
            distill_coefficient = distill_coefficient_now(
                recent_returns, teacher_return, random_return, args.distill_coefficient
            )
            low, high = replay.window
            if step >= args.learning_starts and high > low:
                if due := times_due(step, next_step, args.train_frequency):
                    numbers = range(run.state["updates"], run.state["updates"] + due)
                    learning_rates = [learning_rate_at(number, distill_coefficient) for number in numbers]
                    run.losses = update(low, high, distill_coefficient, *learning_rates)
                    run.state["updates"] += due
                for _ in range(times_due(step, next_step, args.target_network_frequency)):
                    update_target(target_network, q_network, args.tau)
            teacher_q_values = q_values_of(teacher, observation)
            result = envs.recv()
            replay.add(observation, action, result, teacher_q_values)
            observation = torch.as_tensor(result.observation, device=device)

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
        del replay, update
        run.drop_replay()
        run.end_phase("online")
    envs.close()

    # ==================== save, evaluate, upload ====================
    model_path = run.dir / f"{args.exp_name}.cleanrl_model"
    if args.save_model:
        save_model(q_network, model_path)
        print(f"model saved to {model_path}")
    if not run.over("evaluation"):
        run.evaluate("online", player(q_network), args.eval_episodes)
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
