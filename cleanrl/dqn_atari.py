"""DQN on Atari in PyTorch: how a teacher for QDagger is made when none is on the hub.

Mnih et al. (2015), Human-level control through deep reinforcement learning, with n-step returns as an option.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from cleanrl_utils.atari import AtariEnvs, Step
from cleanrl_utils.checkpoint import RandomState
from cleanrl_utils.checks import check_args, require_memory
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import epsilon_greedy
from cleanrl_utils.hub import check_upload_possible, upload_model
from cleanrl_utils.replay import STACK, n_step_return, ring_length, sampling_window, stack_rows
from cleanrl_utils.resume import Run, parse_args
from cleanrl_utils.schedules import linear_schedule, times_due
from cleanrl_utils.torch_checkpoint import GlobalRandomState, ModuleState, OptimizerState, ReplayState
from cleanrl_utils.torch_speed import WorkingCopy, cuda_graphs, pinned
from cleanrl_utils.torch_utils import available_memory, make_q_function, pick_device, save_model


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
    """if toggled, hidden layers compute in bfloat16 where the hardware does; last layer and loss stay float32"""
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
        # bfloat16 holds 0 to 255 exactly: the same numbers as dividing in float32 and rounding, in half the memory.
        x = x.to(dtype=self.network[0].weight.dtype, memory_format=torch.channels_last) / 255.0
        return self.network[-1](self.network[:-1](x).float())  # bfloat16 would round away differences of actions


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


class Replay:
    """A ring of rows per environment (`cleanrl_utils.replay` says what a row is); each frame is stored once."""

    def __init__(self, args: Args, device: torch.device):
        self.length, self.num_envs = ring_length(args.buffer_size, args.num_envs), args.num_envs
        self.n_step, self.gamma = args.n_step, args.gamma
        self.rows_written = 0
        shape = (self.length, self.num_envs)
        self.frame = torch.empty((*shape, 84, 84), dtype=torch.uint8, device=device)
        self.action = torch.empty(shape, dtype=torch.uint8, device=device)
        self.reward = torch.empty(shape, dtype=torch.float32, device=device)
        self.terminated = torch.empty(shape, dtype=torch.bool, device=device)
        self.age = torch.empty(shape, dtype=torch.int32, device=device)
        self.valid = torch.empty(shape, dtype=torch.bool, device=device)
        self.generator = torch.Generator(device).manual_seed(args.seed)
        self.offsets = torch.arange(STACK - 1, -1, -1, device=device)
        self.ahead = torch.arange(self.n_step, device=device)
        self.env_age = np.zeros(self.num_envs, np.int32)

    @staticmethod
    def num_bytes(buffer_size: int) -> int:
        """Bytes that a replay of this size takes."""
        return buffer_size * (84 * 84 + 1 + 4 + 1 + 4 + 1)

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step) -> None:
        """Appends a row per environment: what was seen, what was done, and what came of it."""
        slot = self.rows_written % self.length
        step_row = observation[:, -1], action, np.clip(step.reward, -1, 1), step.terminated, self.env_age, ~step.reset
        rings = self.frame, self.action, self.reward, self.terminated, self.age, self.valid
        for ring, values in zip(rings, step_row, strict=True):
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
        return Batch(
            self.stack(row, env), self.action[slots[:, 0], env].long(), returns, self.stack(row + steps, env), discount
        )

    def stack(self, row: torch.Tensor, env: torch.Tensor) -> torch.Tensor:
        """The observations at ``row``, uint8 (B, 4, 84, 84)."""
        rows, in_game = stack_rows(row, self.age[row % self.length, env], self.offsets)
        return self.frame[rows % self.length, env[:, None]] * in_game[:, :, None, None]


@torch.no_grad()
def td_target(target_network: nn.Module, batch: Batch) -> torch.Tensor:
    """y = Σ γᵏ r + γᵐ max Q'(s',·), float32 (B,)."""
    return batch.n_step_return + batch.bootstrap_discount * target_network(batch.bootstrap_observation).amax(dim=1)


def td_loss(q_network: nn.Module, target: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared TD error (Mnih et al., 2015, eq. 2), and the Q-values of the actions taken, float32 (B,)."""
    q_values = q_network(batch.observation).gather(1, batch.action[:, None])[:, 0]
    return F.mse_loss(q_values, target), q_values


def make_update(
    online: WorkingCopy, target: WorkingCopy, optimizer: torch.optim.Optimizer, replay: Replay, args: Args
) -> Callable[..., dict[str, torch.Tensor]]:
    """The ``count`` updates due as a function of the sampling window; on a GPU as one launch (`cuda_graph`).

    It returns the last one's loss, Q-values of the actions taken, and batch.
    """

    def update(low: int, high: int, *, count: int) -> dict[str, torch.Tensor]:
        # The target network is the same for all: a GPU takes hardly longer for all batches at once than for one.
        batches = replay.sample(count * args.batch_size, low, high)
        columns = (x.split(args.batch_size) for x in (td_target(target.network, batches), *batches))
        for y, *batch in zip(*columns, strict=True):
            loss, q_values = td_loss(online.network, y, Batch(*batch))
            online.network.zero_grad()
            loss.backward()
            online.step(optimizer)
        return {"loss": loss.detach(), "q_values": q_values.detach(), **Batch(*batch)._asdict()}

    device = replay.frame.device
    return cuda_graphs(update, device, replay.generator) if args.cuda_graph and device.type == "cuda" else update


@torch.no_grad()
def update_target(target: WorkingCopy, online: WorkingCopy, tau: float) -> None:
    """Moves the target network to the online one by the fraction ``tau``."""
    for parameter, other in zip(target.original.parameters(), online.original.parameters(), strict=True):
        parameter.lerp_(other, tau)
    target.refresh()


def main(args: Args) -> None:
    # ==================== setup ====================
    check_args(args)
    check_upload_possible(args)
    device, bf16 = pick_device(args.cuda, args.bf16)
    require_memory(
        Replay.num_bytes(args.buffer_size),
        available_memory(device),
        f"a replay of {args.buffer_size:,} steps",
        "lower --buffer-size",
    )
    run = Run(args)
    writer = run.writer
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    rng = np.random.default_rng(args.seed)

    envs = AtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability)
    q_network = QNetwork(envs.num_actions).to(device, memory_format=torch.channels_last)
    target_network = copy.deepcopy(q_network)
    cuda_graph = args.cuda_graph and device.type == "cuda"
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True, capturable=cuda_graph)
    run.keep(q_network=ModuleState(q_network), target_network=ModuleState(target_network))
    run.keep(optimizer=OptimizerState(optimizer), torch=GlobalRandomState(), exploration=RandomState(rng))
    online, target = WorkingCopy(q_network, bf16), WorkingCopy(target_network, bf16)
    q_function = make_q_function(online.network, device, cuda_graph)

    # ==================== phase 1: training ====================
    if run.phase == 1:
        replay = Replay(args, device)
        run.keep_replay("replay", ReplayState(replay))
        update = make_update(online, target, optimizer, replay, args)
        observation = run.reset(envs)
        recent_returns: list[int] = run.state.setdefault("recent_returns", [])
        for global_step in run.steps(args.total_timesteps, args.num_envs, "DQN", "step"):
            next_step = global_step + args.num_envs
            epsilon = linear_schedule(
                args.start_e, args.end_e, args.exploration_fraction * args.total_timesteps, global_step
            )
            action = envs.send(epsilon_greedy(q_function(observation), epsilon, rng))

            # The emulator plays while the network learns.
            updates_due = 0
            if global_step >= args.learning_starts:
                if updates_due := times_due(global_step, next_step, args.train_frequency):
                    run.last_update = update(*replay.window, count=updates_due)
                for _ in range(times_due(global_step, next_step, args.target_network_frequency)):
                    update_target(target, online, args.tau)

            step = envs.recv()
            replay.add(observation, action, step)
            observation = step.observation
            if updates_due and next_step >= run.state.get("next_loss_log", 0):  # seldom: reading waits for the device
                run.state["next_loss_log"] = next_step + 100
                run.check_learning()
                writer.add_scalar("losses/td_loss", run.last_update["loss"].item(), global_step)
                writer.add_scalar("losses/q_values", run.last_update["q_values"].mean().item(), global_step)
            for score, length in step.games:
                recent_returns.append(score)
                del recent_returns[:-10]
                writer.add_scalar("charts/episodic_return", score, global_step)
                writer.add_scalar("charts/episodic_length", length, global_step)
                run.show_return(recent_returns)
            if times_due(global_step, next_step, 100):
                writer.add_scalar("charts/SPS", int(next_step / run.seconds), global_step)
                writer.add_scalar("charts/epsilon", epsilon, global_step)
        del replay, update
        run.drop_replay()
        run.end_phase(2)
    envs.close()

    # ==================== phase 2: save and evaluate ====================
    model_path = run.dir / f"{args.exp_name}.cleanrl_model"
    if run.phase == 2:
        if args.save_model:
            save_model(q_network, model_path)
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
