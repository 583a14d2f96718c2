"""QDagger on Atari in PyTorch: a student learns from a trained teacher, offline, then online while the teaching fades.

Agarwal et al. (2022), Reincarnating Reinforcement Learning, arXiv 2206.01626. Docs: docs/rl-algorithms/qdagger.md
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from cleanrl_utils.atari import AtariEnvs, Step
from cleanrl_utils.checkpoint import RandomState
from cleanrl_utils.checks import check_args, require_replay_memory
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import epsilon_greedy, print_summary, warn_of_weak_teacher
from cleanrl_utils.hub import check_upload_possible, upload_model
from cleanrl_utils.replay import STACK, n_step_return, ring_length, sampling_window, stack_rows
from cleanrl_utils.resume import Run, parse_args
from cleanrl_utils.rollout import HalvedAtariEnvs
from cleanrl_utils.schedules import linear_schedule, offline_updates_per_call, times_due
from cleanrl_utils.teachers import architecture_of, find_teacher, read_teacher, teacher_repo
from cleanrl_utils.torch_checkpoint import GlobalRandomState, ModuleState, OptimizerState, ReplayState
from cleanrl_utils.torch_speed import WorkingCopy, cuda_graphs, half_of_the_threads, pinned
from cleanrl_utils.torch_utils import available_memory, make_judge, make_q_function, pick_device, save_model


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """if toggled, a GPU is used when there is one"""
    cuda_graph: bool = True
    """if toggled, a GPU is given every update and every forward pass as one launch, a CUDA graph; the same numbers"""
    bf16: bool = True
    """if toggled, hidden layers, student's and teacher's, compute in bfloat16 where the processor does so in hardware;
    the last ones and the losses stay float32"""
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
        self.network = nn.Sequential(
            ConvSequence(4, 16),
            ConvSequence(16, 32),
            ConvSequence(32, 32),
            nn.Flatten(),
            nn.ReLU(),
            nn.Linear(3872, 256),
            nn.ReLU(),
            nn.Linear(256, num_actions),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # bfloat16 holds 0 to 255 exactly: the same numbers as dividing in float32 and rounding, in half the memory.
        x = x.to(dtype=self.network[0].conv.weight.dtype, memory_format=torch.channels_last) / 255.0
        return self.network[-1](self.network[:-1](x).float())  # bfloat16 would round away differences of actions


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
        x = x.to(dtype=self.network[0].weight.dtype, memory_format=torch.channels_last) / 255.0
        return self.network[-1](self.network[:-1](x).float())


def load_teacher(path: Path, num_actions: int, env_id: str, bf16: bool = False) -> nn.Module:
    """The network in ``path``: a DQN or a former student, from PyTorch or JAX; ``bf16`` is for its hidden layers.

    Raises:
        UserError: the file is no model, or one of a game with another number of actions.
    """
    weights = read_teacher(path, num_actions, env_id)
    network = TeacherNetwork(num_actions) if architecture_of(weights) == "nature" else QNetwork(num_actions)
    network.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()})
    return WorkingCopy(network, bf16).network


class Batch(NamedTuple):
    """Transitions as the loss needs them; B of them."""

    observation: torch.Tensor
    """uint8 (B, 4, 84, 84)"""
    action: torch.Tensor
    """int64 (B,)"""
    n_step_return: torch.Tensor
    """float32 (B,), Σ γᵏ r of the rewards before the bootstrap state, each clipped to [−1, 1]"""
    bootstrap_observation: torch.Tensor
    """uint8 (B, 4, 84, 84)"""
    bootstrap_discount: torch.Tensor
    """float32 (B,), γᵐ, or 0 where the life or the game ended before"""
    teacher_q_values: torch.Tensor
    """float32 (B, num_actions), of the observation"""


class Replay:
    """A ring of rows per environment (`cleanrl_utils.replay` says what a row is); each frame is stored once.

    The teacher's Q-values are stored with the row, so that the teacher need not be asked again whenever it is sampled.
    """

    def __init__(self, buffer_size: int, num_actions: int, args: Args, device: torch.device):
        self.length, self.num_envs = ring_length(buffer_size, args.num_envs), args.num_envs
        self.n_step, self.gamma = args.n_step, args.gamma
        self.rows_written = 0
        shape = (self.length, self.num_envs)
        self.frame = torch.empty((*shape, 84, 84), dtype=torch.uint8, device=device)
        self.action = torch.empty(shape, dtype=torch.uint8, device=device)
        self.reward = torch.empty(shape, dtype=torch.float32, device=device)
        self.terminated = torch.empty(shape, dtype=torch.bool, device=device)
        self.age = torch.empty(shape, dtype=torch.int32, device=device)
        self.valid = torch.empty(shape, dtype=torch.bool, device=device)
        self.teacher_q_values = torch.empty((*shape, num_actions), dtype=torch.float32, device=device)
        self.generator = torch.Generator(device).manual_seed(args.seed)
        self.offsets = torch.arange(STACK - 1, -1, -1, device=device)
        self.ahead = torch.arange(self.n_step, device=device)
        self.env_age = np.zeros(self.num_envs, np.int32)

    @staticmethod
    def num_bytes(buffer_size: int, num_actions: int) -> int:
        """Bytes that a replay of this size takes."""
        return buffer_size * (84 * 84 + 1 + 4 + 1 + 4 + 1 + 4 * num_actions)

    def add(
        self, observation: np.ndarray, action: np.ndarray, step: Step, teacher_q_values: np.ndarray | torch.Tensor
    ) -> None:
        """Appends a row per environment: what was seen, what was done, what came of it, what the teacher thinks."""
        slot = self.rows_written % self.length
        step_row = observation[:, -1], action, np.clip(step.reward, -1, 1), step.terminated, self.env_age, ~step.reset
        rings = self.frame, self.action, self.reward, self.terminated, self.age, self.valid, self.teacher_q_values
        for ring, values in zip(rings, (*step_row, teacher_q_values), strict=True):
            # A plain assignment would wait until a GPU has learned all that it was asked to.
            ring[slot].copy_(pinned(values, ring.device), non_blocking=True)
        self.env_age = np.where(step.reset, 0, self.env_age + 1).astype(np.int32)
        self.rows_written += 1

    @property
    def window(self) -> tuple[int, int]:
        """The rows [low, high) that may be sampled."""
        return sampling_window(self.rows_written, self.length, self.n_step)

    def sample(self, batch_size: int, low: int | torch.Tensor, high: int | torch.Tensor) -> Batch:
        """A batch drawn uniformly, with replacement, from the transitions in rows [low, high), usually the window."""
        device = self.frame.device
        # Final frames are no transitions and are drawn again: eight tries at once, so that no GPU need be waited for.
        # Should all eight be final frames, a neighbour of the first is taken: no two final frames follow each other.
        # The window moves, and randint would want its ends on the host: float64 counts any replay's rows exactly.
        fraction = torch.rand((8, batch_size), generator=self.generator, device=device, dtype=torch.float64)
        row = low + (fraction * (high - low)).long()
        env = torch.randint(0, self.num_envs, (8, batch_size), generator=self.generator, device=device)
        first = self.valid[row % self.length, env].int().argmax(dim=0, keepdim=True)
        row, env = row.gather(0, first)[0], env.gather(0, first)[0]
        neighbour = torch.where(row > low, row - 1, row + 1)
        return self.batch(torch.where(self.valid[row % self.length, env], row, neighbour), env)

    def batch(self, row: torch.Tensor, env: torch.Tensor) -> Batch:
        """The transitions that start at ``row``, int64 (B,), of ring ``env``, int64 (B,)."""
        slots, envs = (row[:, None] + self.ahead) % self.length, env[:, None]
        returns, steps, discount = n_step_return(
            self.reward[slots, envs], self.terminated[slots, envs], self.valid[slots, envs], self.gamma
        )
        slot = row % self.length
        return Batch(
            self.stack(row, env),
            self.action[slot, env].long(),
            returns,
            self.stack(row + steps, env),
            discount,
            self.teacher_q_values[slot, env],
        )

    def stack(self, row: torch.Tensor, env: torch.Tensor) -> torch.Tensor:
        """The observations at ``row``, uint8 (B, 4, 84, 84)."""
        rows, in_game = stack_rows(row, self.age[row % self.length, env], self.offsets)
        return self.frame[rows % self.length, env[:, None]] * in_game[:, :, None, None]


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
    q_network: nn.Module, target: torch.Tensor, batch: Batch, distill_coefficient: float, temperature: float
) -> Losses:
    """TD error plus distillation: Agarwal et al. (2022), section 4.2, eq. 2.

    L = mean (Q(s,a) − y)² + λ · mean KL( softmax(Q_T(s,·)/τ) ‖ softmax(Q(s,·)/τ) ),  y = `td_target`
    """
    q_values = q_network(batch.observation)
    q_of_action = q_values.gather(1, batch.action[:, None])[:, 0]
    td_loss = F.mse_loss(q_of_action, target)
    distill_loss = F.kl_div(
        F.log_softmax(q_values / temperature, dim=1),
        F.log_softmax(batch.teacher_q_values / temperature, dim=1),
        reduction="batchmean",  # summed over actions, averaged over the batch
        log_target=True,
    )
    return Losses(td_loss + distill_coefficient * distill_loss, td_loss, distill_loss, q_of_action)


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


def make_update(
    student: WorkingCopy, target: WorkingCopy, optimizer: torch.optim.Optimizer, replay: Replay, args: Args
) -> Callable[[int, int, float, Sequence[float]], tuple[Losses, Batch]]:
    """The updates due, as a function of sampling window, λ and learning rates to the last one's losses and batch."""

    def update(low: int, high: int, distill_coefficient: float, rates: Sequence[float]) -> tuple[Losses, Batch]:
        # The target network is the same for all: a GPU takes hardly longer for all batches at once than for one.
        batches = replay.sample(len(rates) * args.batch_size, low, high)
        columns = (x.split(args.batch_size) for x in (td_target(target.network, batches), *batches))
        for learning_rate, y, *batch in zip(rates, *columns, strict=True):
            optimizer.param_groups[0]["lr"] = learning_rate  # a tensor in a CUDA graph, which reads it at every launch
            losses = qdagger_loss(student.network, y, Batch(*batch), distill_coefficient, args.temperature)
            student.network.zero_grad()
            losses.loss.backward()
            student.step(optimizer)
        return Losses(*(term.detach() for term in losses)), Batch(*batch)

    device = replay.frame.device
    return cuda_graphs(update, device, replay.generator) if args.cuda_graph and device.type == "cuda" else update


@torch.no_grad()
def update_target(target: WorkingCopy, student: WorkingCopy, tau: float) -> None:
    """Moves the target network to the online one by the fraction ``tau``."""
    for parameter, online in zip(target.original.parameters(), student.original.parameters(), strict=True):
        parameter.lerp_(online, tau)
    target.refresh()


def main(args: Args) -> None:
    # ==================== setup ====================
    check_args(args)
    check_upload_possible(args)
    device, bf16 = pick_device(args.cuda, args.bf16)
    envs = AtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability)
    num_bytes = functools.partial(Replay.num_bytes, num_actions=envs.num_actions)
    require_replay_memory(args, num_bytes, available_memory(device))
    teacher_path = find_teacher(teacher_repo(args), args.teacher_model_exp_name)
    teacher = load_teacher(teacher_path, envs.num_actions, args.env_id, bf16)
    teacher = teacher.to(device, memory_format=torch.channels_last)

    run = Run(args)
    writer = run.writer
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    rng = np.random.default_rng(args.seed)
    q_network = QNetwork(envs.num_actions).to(device, memory_format=torch.channels_last)
    target_network = copy.deepcopy(q_network)
    cuda_graph = args.cuda_graph and device.type == "cuda"
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True, capturable=cuda_graph)
    run.keep(student=ModuleState(q_network), target_network=ModuleState(target_network))
    run.keep(optimizer=OptimizerState(optimizer), torch=GlobalRandomState(), exploration=RandomState(rng))
    learning_rate_at = functools.partial(linear_schedule, 0.0, args.learning_rate, args.warmup_updates)
    student, target = WorkingCopy(q_network, bf16), WorkingCopy(target_network, bf16)
    teacher_q_function = make_q_function(teacher, device, cuda_graph)
    student_q_function = make_q_function(student.network, device, cuda_graph)
    teacher_judge = make_judge(teacher, device, cuda_graph)

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
        replay = Replay(args.teacher_steps, envs.num_actions, args, device)
        run.keep_replay("teacher", ReplayState(replay))
    if run.phase == 2:
        # The teacher chooses for one half of the games on half of the cores while the other half is being played.
        teacher_envs = HalvedAtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability)
        run.reset(teacher_envs)
        epsilon_at = functools.partial(linear_schedule, args.start_e, args.end_e, args.teacher_steps)
        rollout = teacher_envs.rollout(teacher_q_function, lambda: epsilon_at(run.done - args.num_envs), rng)
        with half_of_the_threads():
            for _ in run.steps(replay.length * args.num_envs, args.num_envs, "teacher data", "step"):
                played = next(rollout)
                replay.add(*played)
                run.show_return(score for score, _ in played.step.games)
        teacher_envs.close()
        writer.add_scalar("charts/teacher/SPS", int(run.done / run.seconds), 0)
        run.end_phase(3)

    # ==================== phase 3: offline ====================
    if run.phase == 3:
        update = make_update(student, target, optimizer, replay, args)

        def evaluate_if_due(global_step: int) -> None:
            name = f"offline {global_step}"
            due = global_step % args.offline_eval_frequency == 0 or global_step == args.offline_steps
            if due and global_step > 0 and name not in run.results:
                save_model(q_network, run.dir / f"{args.exp_name}-offline-{global_step}.cleanrl_model")
                offline_return = run.evaluate(name, student_q_function, args.eval_episodes)
                writer.add_scalar("charts/offline/avg_episodic_return", offline_return, global_step)
                run.show_return([offline_return])

        evaluate_if_due(run.done)  # a run that was stopped in an evaluation plays it again
        count = 1 if device.type == "cpu" else offline_updates_per_call(args)
        for updates in run.steps(args.offline_steps, count, "offline", "update"):
            global_step = updates + count
            rates = [learning_rate_at(n + 1) for n in range(updates, global_step)]
            losses, batch = update(*replay.window, args.distill_coefficient, rates)
            run.last_update = losses._asdict() | batch._asdict()
            if global_step % args.target_network_frequency == 0:
                update_target(target, student, args.tau)
            if global_step % 100 == 0:
                run.check_learning()
                writer.add_scalar("charts/offline/loss", losses.loss.item(), global_step)
                writer.add_scalar("charts/offline/q_loss", losses.td_loss.item(), global_step)
                writer.add_scalar("charts/offline/distill_loss", losses.distill_loss.item(), global_step)
                writer.add_scalar("charts/offline/updates_per_second", global_step / run.seconds, global_step)
            evaluate_if_due(global_step)
        del replay, update  # before the online replay is made: the two never exist at once
        run.drop_replay()
        run.end_phase(4)

    # ==================== phase 4: online ====================
    if run.phase == 4:
        replay = Replay(args.buffer_size, envs.num_actions, args, device)
        run.keep_replay("online", ReplayState(replay))
        update = make_update(student, target, optimizer, replay, args)
        observation = run.reset(envs)
        recent_returns: list[int] = run.state.setdefault("recent_returns", [])
        distill_coefficient = run.state.get("distill_coefficient", args.distill_coefficient)
        run.state.setdefault("updates", args.offline_steps)
        exploration_steps = args.exploration_fraction * args.total_timesteps
        for online_step in run.steps(args.total_timesteps, args.num_envs, "online", "step"):
            global_step, next_step = args.offline_steps + online_step, online_step + args.num_envs
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
            action = envs.send(epsilon_greedy(student_q_function(observation), epsilon, rng))

            # The emulator plays while the student learns and the teacher judges what it has shown: no call waits here.
            updates_due = 0
            if online_step >= args.learning_starts:
                if updates_due := times_due(online_step, next_step, args.train_frequency):
                    rates = [learning_rate_at(run.state["updates"] + i + 1) for i in range(updates_due)]
                    losses, batch = update(*replay.window, distill_coefficient, rates)
                    run.last_update = losses._asdict() | batch._asdict()
                    run.state["updates"] += updates_due
                for _ in range(times_due(online_step, next_step, args.target_network_frequency)):
                    update_target(target, student, args.tau)

            teacher_q_values, step = teacher_judge(observation), envs.recv()
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
        del replay, update
        run.drop_replay()
        run.end_phase(5)
    envs.close()

    # ==================== phase 5: save, evaluate ====================
    model_path = run.dir / f"{args.exp_name}.cleanrl_model"
    if run.phase == 5:
        if args.save_model:
            save_model(q_network, model_path)
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
