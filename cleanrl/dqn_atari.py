"""DQN on Atari in PyTorch: how a teacher for QDagger is made when none is on the hub.

Mnih et al. (2015), Human-level control through deep reinforcement learning, with n-step returns as an option.
"""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from cleanrl_utils.atari import AtariEnvs, Step
from cleanrl_utils.checks import check_args, check_memory, one_line_errors
from cleanrl_utils.device import (
    CudaGraph,
    available_memory,
    check_torch_gradient,
    describe_torch,
    fill_at_random,
    pick_torch_device,
    rehearsed,
)
from cleanrl_utils.hub import check_upload_possible, upload_model
from cleanrl_utils.run import Run, parse_args
from cleanrl_utils.tracking import atomic_write


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    torch_deterministic: bool = True
    """if toggled, cuDNN computes deterministically; otherwise it tries which of its algorithms is fastest (by estimate,
    updates on a GPU take 1.1 to 1.5 times as long when toggled)"""
    cuda: bool = True
    """if toggled, a GPU is used when there is one"""
    cuda_graph: bool = True
    """if toggled, a GPU is given every update as one launch, a CUDA graph; the same numbers"""
    compile: bool = False
    """if toggled, loss and gradient are compiled by torch.compile: minutes at the start, fewer kernels from there on"""
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
    """parallel games, with the same updates per step; fewer if other sizes are too small for 16 and it is not given"""
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
        hidden = self.network[:-1](x.to(memory_format=torch.channels_last) / 255.0)
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 would round away differences of actions
            return self.network[-1](hidden.float())


def save_model(network: nn.Module, path: Path) -> None:
    """Writes the state dict, contiguous and on the CPU whatever the network's layout."""
    with atomic_write(path) as file:
        torch.save({key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}, file)


class Transitions(NamedTuple):
    """A ring of L environment steps of each of N environments, by slot: step t lies in slot t % L.

    Only the newest frame of an observation is stored; stacks of 4 are built when sampling.
    """

    frame: torch.Tensor
    """uint8 (L, N, 84, 84), the newest frame of what was observed"""
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


class Replay:
    """The last `buffer_size` environment steps of N environments, on the device that learns from them."""

    BYTES_PER_STEP = 84 * 84 + 1 + 4 + 1 + 4 + 1

    def __init__(self, args: Args, device: torch.device):
        self.length = args.buffer_size // args.num_envs
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
        )

    def add(self, observation: torch.Tensor, action: np.ndarray, step: Step) -> None:
        """Appends a step of each environment: what was observed and done, and what came of it."""
        reward = np.clip(step.reward, -1, 1)
        values = observation[:, -1], action, reward, step.terminated, self.age, ~step.reset
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
        action = self.ring.action[slot, env].long()
        return Batch(self.stack(t, env), action, n_step_return, self.stack(t + m, env), discount)

    def stack(self, t: torch.Tensor, env: torch.Tensor) -> torch.Tensor:
        """The observations at step ``t``, uint8 (B, 4, 84, 84); zero where a frame is of before the game's reset."""
        ago = torch.arange(3, -1, -1, device=t.device)
        in_game = self.ring.age[t % self.length, env][:, None] >= ago
        return self.ring.frame[(t[:, None] - ago) % self.length, env[:, None]] * in_game[:, :, None, None]


class Losses(NamedTuple):
    """The loss, a scalar, and the Q-values it is made of."""

    loss: torch.Tensor
    q_values: torch.Tensor
    """float32 (B,), of the actions taken"""


def dqn_loss(q_network: nn.Module, target_network: nn.Module, batch: Batch) -> Losses:
    """Mean squared TD error (Mnih et al., 2015, eq. 2): mean (Q(s,a) − y)², y = Σ γᵏ r + γᵐ max Q'(s',·)."""
    with torch.no_grad():
        bootstrap = target_network(batch.bootstrap_observation).amax(dim=1)
        td_target = batch.n_step_return + batch.bootstrap_discount * bootstrap
    q_of_action = q_network(batch.observation).gather(1, batch.action[:, None])[:, 0]
    return Losses(F.mse_loss(q_of_action, td_target), q_of_action)


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


def make_update(
    learner: Learner, replay: Replay, autocast: torch.autocast, args: Args
) -> Callable[[float, float], Losses]:
    """A function that makes gradient steps, on a GPU each as one launch if `cuda_graph`."""
    q_network, target_network, optimizer, generator = learner
    loss_of = torch.compile(dqn_loss) if args.compile else dqn_loss

    def update(low: float, high: float) -> Losses:
        """A step on transitions of steps [low, high). A CUDA graph's arguments are tensors, read at every launch."""
        batch = replay.sample(args.batch_size, low, high, generator)
        with autocast:
            losses = loss_of(q_network, target_network, batch)
        optimizer.zero_grad()
        losses.loss.backward()
        optimizer.step()
        return Losses(*(term.detach() for term in losses))

    return CudaGraph(update, generator) if args.cuda_graph and generator.device.type == "cuda" else update


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
    replay = Replay(dataclasses.replace(args, buffer_size=64 * args.num_envs), device)
    fill_at_random(replay, num_actions)
    update = make_update(learner, replay, autocast, args)
    for _ in range(CudaGraph.CALLS_BEFORE + 2):
        update(*replay.window)
    batch = replay.sample(args.batch_size, *replay.window, learner[3])
    check_torch_gradient(lambda *x: dqn_loss(*x).loss, learner[:2], batch, autocast)


def main(args: Args) -> None:
    # ==================== setup ====================
    check_args(args)
    check_upload_possible(args)
    device, autocast = pick_torch_device(args.cuda, args.bf16)
    envs = AtariEnvs(args.env_id, args.num_envs, args.seed, args.repeat_action_probability)
    if device.type == "cuda":
        args = rehearsed(rehearse, args, envs.num_actions)  # before anything else is on a GPU that may be exclusive
    check_memory(args, Replay.BYTES_PER_STEP, available_memory(device))

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

    # ==================== training ====================
    if not run.over("training"):
        replay = Replay(args, device)
        run.register_replay("replay", replay)
        update = make_update(learner, replay, autocast, args)
        observation = torch.as_tensor(run.reset(envs), device=device)
        recent_returns: list[int] = run.state.setdefault("recent_returns", [])
        exploration_steps = args.exploration_fraction * args.total_timesteps
        for global_step in run.steps("training", args.total_timesteps, by=args.num_envs):
            next_step = global_step + args.num_envs
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
            action = envs.send(epsilon_greedy(q_values_of(q_network, observation), epsilon, rng))

            # Emulation overlaps learning; nothing from here to `recv` waits for a GPU.
            low, high = replay.window
            if global_step >= args.learning_starts and high > low:
                for _ in range(times_due(global_step, next_step, args.train_frequency)):
                    run.losses = update(low, high)
                for _ in range(times_due(global_step, next_step, args.target_network_frequency)):
                    update_target(target_network, q_network, args.tau)
            result = envs.recv()
            replay.add(observation, action, result)
            observation = torch.as_tensor(result.observation, device=device)

            for score, length in result.games:
                recent_returns.append(score)
                del recent_returns[:-10]
                writer.add_scalar("charts/episodic_return", score, global_step)
                writer.add_scalar("charts/episodic_length", length, global_step)
                run.show_return(recent_returns)
            if times_due(global_step, next_step, 100):
                writer.add_scalar("charts/SPS", int(next_step / run.seconds), global_step)
                writer.add_scalar("charts/epsilon", epsilon, global_step)
                if run.losses:  # seldom: reading a loss waits for the device
                    run.check_learning()
                    writer.add_scalar("losses/td_loss", run.losses.loss.item(), global_step)
                    writer.add_scalar("losses/q_values", run.losses.q_values.mean().item(), global_step)
        del replay, update
        run.drop_replay()
        run.end_phase("training")
    envs.close()

    # ==================== save, evaluate, upload ====================
    model_path = run.dir / f"{args.exp_name}.cleanrl_model"
    if args.save_model:
        save_model(q_network, model_path)
        print(f"model saved to {model_path}")
    if not run.over("evaluation"):
        run.evaluate("eval", player(q_network), args.eval_episodes)
        for i, episodic_return in enumerate(run.results["eval"]):
            writer.add_scalar("eval/episodic_return", episodic_return, i)
        run.end_phase("evaluation")
    run.close(run.videos)
    if args.upload_model:
        upload_model(args, run.dir, model_path, run.results["eval"], run.videos)
    run.finish()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
