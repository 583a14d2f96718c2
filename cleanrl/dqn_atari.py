"""DQN on Atari in PyTorch: make a teacher for QDagger.

Mnih et al. (2015), Human-level control through deep reinforcement learning; n-step returns are optional.
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
import time
from collections.abc import Callable
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
from cleanrl_utils.evaluation import play_episodes
from cleanrl_utils.files import atomic_write
from cleanrl_utils.hub import upload_model
from cleanrl_utils.tracking import VIDEOS, ProgressBar, start_logging

LOG_EVERY = 100  # environment steps
RECENT_EPISODES = 10  # training episodes whose mean return is shown


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
    """if toggled, a GPU runs each update as one CUDA graph, with the same results"""
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
    """minutes between checkpoints, which are also saved before each evaluation and when stopped; 0 disables them"""

    # Environment
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or ALE/{Game}-v5"""
    repeat_action_probability: float | None = None
    """probability of a sticky action per frame; the default is the id's own: 0 for -v4, 0.25 for -v5"""
    num_envs: int = 16
    """parallel environments, halved while a buffer or the run is too small; updates per step do not depend on them"""

    # DQN
    total_timesteps: int = 10000000
    """environment steps (4 frames each)"""
    learning_rate: float = 1e-4
    """the learning rate of the optimizer"""
    buffer_size: int = 1000000
    """environment steps in the replay buffer, 7.1 kB each"""
    gamma: float = 0.99
    """the discount factor"""
    n_step: int = 1
    """the number of rewards summed before bootstrapping"""
    tau: float = 1.0
    """the target network update rate"""
    target_network_frequency: int = 1000
    """the environment steps between updates of the target network"""
    batch_size: int = 32
    """the batch size of a sample from the replay buffer"""
    start_e: float = 1.0
    """the starting epsilon for exploration"""
    end_e: float = 0.01
    """the ending epsilon for exploration, and the epsilon of evaluations"""
    exploration_fraction: float = 0.10
    """the fraction of `total_timesteps` over which epsilon is annealed"""
    learning_starts: int = 80000
    """environment steps before the first update"""
    train_frequency: int = 4
    """the environment steps per update"""
    eval_episodes: int = 10
    """episodes of each evaluation"""
    eval_frequency: int = 500000
    """environment steps between evaluations, which also save the model"""


@dataclass
class Progress:
    """The progress of a run, saved in each checkpoint."""

    step: int = 0  # environment steps
    update: int = 0
    recent_returns: list[float] = field(default_factory=list)  # returns of the last training episodes


class QNetwork(nn.Module):
    """The Q-network of Mnih et al. (2015): uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

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
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 would round away the differences between actions
            return self.network[-1](hidden.float())


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


# Of an environment step: frame, action, reward, terminated, age, valid.
STEP_BYTES = 84 * 84 + 1 + 4 + 1 + 4 + 1


class Batch(NamedTuple):
    """B transitions."""

    observation: torch.Tensor  # uint8 (B, 4, 84, 84)
    action: torch.Tensor  # int64 (B,)
    n_step_return: torch.Tensor  # float32 (B,), Σ γᵏ r of the rewards before the bootstrap observation
    bootstrap_observation: torch.Tensor  # uint8 (B, 4, 84, 84)
    bootstrap_discount: torch.Tensor  # float32 (B,), γᵐ after m rewards, or 0 after a termination


class Replay:
    """A replay buffer of the last ``size`` environment steps, on the device of the networks."""

    def __init__(self, size: int, args: Args, device: torch.device):
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
        )

    def add(self, observation: torch.Tensor, action: np.ndarray, result: Step) -> None:
        """Add a step of each environment: the observation before it, the action and its result; arrays (N, …)."""
        step = Ring(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(result.reward, -1, 1).astype(np.float32),
            terminated=result.terminated,  # a truncated episode bootstraps from its last observation, in the next step
            age=self.age,
            valid=~result.reset,  # in the step after its end, an episode is reset and the action is ignored
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
    )


def stack_frames(ring: Ring, t: torch.Tensor, env: torch.Tensor) -> torch.Tensor:
    """Return the observations at steps ``t``, uint8 (B, 4, 84, 84), with zeros for frames before the reset."""
    length = len(ring.valid)
    ago = torch.arange(3, -1, -1, device=t.device)  # steps, oldest frame first
    in_episode = ring.age[t % length, env][:, None] >= ago
    return ring.frame[(t[:, None] - ago) % length, env[:, None]] * in_episode[:, :, None, None]


class Losses(NamedTuple):
    """The loss and the mean Q-value in it."""

    td_loss: torch.Tensor
    q_values: torch.Tensor  # the mean over the batch, of the actions taken


@torch.no_grad()
def td_target(target_network: nn.Module, batch: Batch) -> torch.Tensor:
    """Compute y = Σ γᵏ r + γᵐ (1 − terminated) max Q'(s',·), float32 (B,)."""
    return batch.n_step_return + batch.bootstrap_discount * target_network(batch.bootstrap_observation).amax(dim=1)


def dqn_loss(q_network: nn.Module, y: torch.Tensor, batch: Batch) -> Losses:
    """Compute the mean squared TD error: mean (Q(s,a) − y)², with y of :func:`td_target`."""
    q_of_action = q_network(batch.observation).gather(1, batch.action[:, None])[:, 0]
    return Losses(F.mse_loss(q_of_action, y), q_of_action.mean())


def make_update(
    q_network: nn.Module, target_network: nn.Module, optimizer: torch.optim.Adam, ring: Ring,
    generator: torch.Generator, autocast: torch.autocast, args: Args,
) -> Callable[..., Losses]:  # fmt: skip
    """Return the function that updates the Q-network; on a GPU it runs as a CUDA graph, which needs a fixed ring."""
    loss_function = torch.compile(dqn_loss) if args.compile else dqn_loss

    def update(low: int, high: int) -> Losses:
        """Make a gradient step on transitions of steps [low, high); both are tensors in a CUDA graph."""
        batch = sample(ring, low, high, args.batch_size, generator, args.n_step, args.gamma)
        with autocast:
            y = td_target(target_network, batch)
            losses = loss_function(q_network, y, batch)
        optimizer.zero_grad()
        losses.td_loss.backward()
        optimizer.step()
        return Losses(*(term.detach() for term in losses))

    return cuda_graph(update, generator, args.cuda_graph and ring.frame.is_cuda)


@torch.no_grad()
def update_target(target_network: nn.Module, q_network: nn.Module, tau: float) -> None:
    """Move the target network towards the Q-network by the fraction ``tau``."""
    for target, online in zip(target_network.parameters(), q_network.parameters(), strict=True):
        target.lerp_(online, tau)


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """Anneal linearly from ``start`` to ``end`` over ``duration`` steps."""
    if duration <= 0:
        return end
    return start + (end - start) * min(step / duration, 1.0)


def epsilon_greedy(q_values: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Choose actions, int64 (B,), from Q-values (B, A): random with probability ``epsilon``, otherwise greedy."""
    batch_size, num_actions = q_values.shape
    random_action = rng.integers(0, num_actions, batch_size)
    explore = rng.random(batch_size) < epsilon
    return np.where(explore, random_action, q_values.argmax(axis=1))


def times_due(start: int, end: int, every: int) -> int:
    """Return the number of multiples of ``every`` in (start, end]."""
    return end // every - start // every


def main(args: Args) -> None:
    # ==================== setup ====================
    device, bf16, memory_format = set_up_torch(args.cuda, args.bf16)
    check_args(args, device, STEP_BYTES)
    args.num_envs = fitting_num_envs(args)  # logs and checkpoints have the reduced number
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)  # for forward passes
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.benchmark = not args.torch_deterministic
    torch.manual_seed(args.seed)
    generator = torch.Generator(device).manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    make_envs = functools.partial(AtariEnvs, args.env_id, repeat_action_probability=args.repeat_action_probability)
    envs = make_envs(num_envs=args.num_envs)
    q_network = QNetwork(envs.num_actions).to(device, memory_format=memory_format)
    target_network = copy.deepcopy(q_network)
    # `capturable` keeps Adam's step count on the GPU, as a CUDA graph needs.
    capturable = device.type == "cuda"
    optimizer = torch.optim.Adam(q_network.parameters(), args.learning_rate, fused=True, capturable=capturable)

    # Makes and locks runs/{run_name}, or the directory of --resume; starts TensorBoard and, with --track, W&B.
    run_dir, writer = start_logging(args)
    video_dir = VIDEOS / run_dir.name if args.capture_video else None
    progress = Progress()
    checkpoint = Checkpoint(
        args, run_dir, progress=progress, q_network=q_network, target_network=target_network, optimizer=optimizer,
        generator=generator, rng=rng, writer=writer,
    )  # fmt: skip

    @torch.no_grad()
    def q_values_of(observation: torch.Tensor) -> torch.Tensor:
        with autocast:
            return q_network(observation)

    def evaluate(name: str) -> list[float]:
        """Play whole episodes and return their returns."""
        action_rng = np.random.default_rng((args.seed, Stream.EVALUATION_ACTIONS))  # the same in each evaluation

        def act(observation: np.ndarray) -> np.ndarray:
            checkpoint.exit_if_signalled()  # a resumed run repeats the evaluation
            q_values = q_values_of(to_device(observation, device)).cpu().numpy()
            return epsilon_greedy(q_values, args.end_e, action_rng)

        return play_episodes(name, act, args.eval_episodes, make_envs, args.seed, video_dir)

    with writer, checkpoint:  # a signal stops the run after a checkpoint
        checkpoint.restore()  # does nothing in a new run

        # ==================== training ====================
        if progress.step < args.total_timesteps:
            replay = Replay(args.buffer_size, args, device)
            if progress.step > 0:
                checkpoint.restore_replay(replay)  # its episodes end, since emulators can't be resumed
            update = make_update(q_network, target_network, optimizer, replay.ring, generator, autocast, args)
            exploration_steps = args.exploration_fraction * args.total_timesteps
            updates_per_log = max(LOG_EVERY // args.train_frequency, 1)
            observation = to_device(envs.reset((args.seed, Stream.TRAINING, progress.step)), device)
            steps = range(progress.step, args.total_timesteps, args.num_envs)
            bar = ProgressBar("training", steps, "step")
            start_time = time.perf_counter()
            for global_step in bar:
                next_step = global_step + args.num_envs
                # The evaluation comes before the step, so that a run resumed from its checkpoint begins with it.
                if global_step > 0 and times_due(global_step - args.num_envs, global_step, args.eval_frequency):
                    check_finite(q_network.parameters())
                    checkpoint.save(replay=replay)
                    mean_return = np.mean(evaluate(f"online {global_step}"))
                    writer.add_scalar("charts/online/avg_episodic_return", mean_return, global_step)
                    save_model(q_network, run_dir / f"{args.exp_name}-online-{global_step}.cleanrl_model")
                q_values = q_values_of(observation).cpu().numpy()
                epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
                action = epsilon_greedy(q_values, epsilon, rng)
                action = envs.send(action)  # the actions taken: FIRE starts an episode or a life

                # The Q-network learns while the emulators run. Nothing here synchronises with a GPU.
                low, high = replay.window
                updates_before = progress.update
                if global_step >= args.learning_starts and high > low:
                    for _ in range(times_due(global_step, next_step, args.train_frequency)):
                        losses = update(low, high)
                        progress.update += 1
                    # Several are due if the frequency is below num_envs, which matters for tau < 1.
                    for _ in range(times_due(global_step, next_step, args.target_network_frequency)):
                        update_target(target_network, q_network, args.tau)

                result = envs.recv()
                replay.add(observation, action, result)
                observation = to_device(result.observation, device)

                progress.step = next_step
                if times_due(global_step, next_step, LOG_EVERY):
                    sps = (next_step - steps.start) / (time.perf_counter() - start_time)
                    writer.add_scalar("charts/SPS", int(sps), global_step)
                    writer.add_scalar("charts/epsilon", epsilon, global_step)
                if times_due(updates_before, progress.update, updates_per_log):
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
        final_returns = evaluate("final")
        for i, episodic_return in enumerate(final_returns):
            writer.add_scalar("eval/episodic_return", episodic_return, progress.step + i)

    # ==================== upload ====================
    if args.upload_model:
        upload_model(args, run_dir, model_path, final_returns)
    checkpoint.finish()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
