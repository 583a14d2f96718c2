"""DQN on Atari in PyTorch: make a teacher for QDagger.

Mnih et al. (2015), Human-level control through deep reinforcement learning; n-step returns are optional.
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
from dataclasses import dataclass
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
from cleanrl_utils.evaluation import play_episodes
from cleanrl_utils.networks import save_torch
from cleanrl_utils.run import Run, parse_args

LOG_EVERY = 100  # environment steps


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
    """whether to film an episode after the evaluation (check out the `videos` folder)"""
    save_model: Annotated[bool, MAY_CHANGE] = True
    """whether to save the model into `runs/{run_name}`"""
    upload_model: Annotated[bool, MAY_CHANGE] = False
    """whether to upload the saved model to the Hugging Face Hub"""
    hf_entity: Annotated[str, MAY_CHANGE] = ""
    """the user or organisation on the Hugging Face Hub; the owner of the token if empty"""
    resume: str | None = None
    """the directory `runs/{run_name}` of a run to resume with its flags"""
    checkpoint_minutes: Annotated[float, Range(0, 10**6), MAY_CHANGE] = 10
    """minutes between checkpoints, which are also saved before the evaluation and when stopped; 0 disables them"""

    # Environment
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or, with sticky actions of probability 0.25, ALE/{Game}-v5"""
    num_envs: Annotated[int, Range(1, 1000)] = 16
    """parallel environments, halved while a buffer or the run is too small; updates per step do not depend on them"""

    # DQN
    total_timesteps: Annotated[int, Range(0), MAY_CHANGE] = 10000000
    """environment steps (4 frames each)"""
    learning_rate: Annotated[float, Range(1e-12, 1000)] = 1e-4
    """the learning rate of the optimizer"""
    buffer_size: Annotated[int, Range(1), MAY_CHANGE] = 1000000
    """environment steps in the replay buffer, 7.1 kB each"""
    gamma: Annotated[float, Range(0, 1)] = 0.99
    """the discount factor"""
    n_step: Annotated[int, Range(1, 1000)] = 1
    """the number of rewards summed before bootstrapping"""
    tau: Annotated[float, Range(0, 1)] = 1.0
    """the target network update rate"""
    target_network_frequency: Annotated[int, Range(1)] = 1000
    """the environment steps between updates of the target network"""
    batch_size: Annotated[int, Range(1)] = 32
    """the batch size of a sample from the replay buffer"""
    start_e: Annotated[float, Range(0, 1)] = 1.0
    """the starting epsilon for exploration"""
    end_e: Annotated[float, Range(0, 1)] = 0.01
    """the ending epsilon for exploration, and the epsilon of the evaluation"""
    exploration_fraction: Annotated[float, Range(0, 1)] = 0.10
    """the fraction of `total_timesteps` over which epsilon is annealed"""
    learning_starts: Annotated[int, Range(0)] = 80000
    """environment steps before the first update"""
    train_frequency: Annotated[int, Range(1)] = 4
    """the environment steps per update"""
    eval_episodes: Annotated[int, Range(1), MAY_CHANGE] = 10
    """episodes of the evaluation at the end"""


@dataclass
class Progress:
    """The progress of a run, saved in each checkpoint."""

    step: int = 0  # environment steps


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


class Record(NamedTuple):
    """The arrays that are stored of environment steps: (L, N, …) of L steps of N environments, (N, …) of one step."""

    frame: torch.Tensor  # uint8 (…, 84, 84), the newest of each observation; stacks of 4 are built when sampling
    action: torch.Tensor  # uint8
    reward: torch.Tensor  # float32, clipped to [−1, 1]
    terminated: torch.Tensor  # bool, a life was lost or the episode ended
    age: torch.Tensor  # int32, steps since the reset of the episode: a stack has no frames from before it
    valid: torch.Tensor  # bool, False at the final observation of an episode or stopped run: no transition starts there


class Batch(NamedTuple):
    """B transitions."""

    observation: torch.Tensor  # uint8 (B, 4, 84, 84)
    action: torch.Tensor  # int64 (B,)
    n_step_return: torch.Tensor  # float32 (B,), Σ γᵏ r of the rewards before the bootstrap observation
    bootstrap_observation: torch.Tensor  # uint8 (B, 4, 84, 84)
    bootstrap_discount: torch.Tensor  # float32 (B,), γᵐ after m rewards, or 0 after a termination


class Replay:
    """A replay buffer of the last ``size`` environment steps, on the device of the networks.

    Here, a step is one of each environment: step t is in slot t % ``length`` of the ring.
    """

    def __init__(self, size: int, num_envs: int, n_step: int, hardware: Hardware):
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
        )
        # Set by `Agent.update`. It is kept here since a CUDA graph reads this ring: both are freed together.
        self.gradient_step = None

    def add(self, observation: np.ndarray, action: np.ndarray, result: StepResult) -> None:
        """Add a step of each environment: the observation before it, the action taken and the result; arrays (N, …)."""
        record = Record(
            frame=observation[:, -1],
            action=action.astype(np.uint8),
            reward=np.clip(result.reward, -1, 1).astype(np.float32),
            terminated=result.terminated,  # a truncated episode bootstraps from the observation in the next record
            age=self.age,
            valid=~result.reset,  # the step after the end of an episode only resets it: its action is ignored
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


class Losses(NamedTuple):
    """The loss and the mean Q-value in it."""

    td_loss: torch.Tensor
    q_values: torch.Tensor  # the mean over the batch, of the actions taken


def dqn_loss(q_network: nn.Module, target_q_values: torch.Tensor, batch: Batch) -> Losses:
    """Compute the mean squared TD error (Mnih et al., 2015): mean (Q(s,a) − y)².

    y = Σ γᵏ r + γᵐ (1 − terminated) max Q'(s',·), and ``target_q_values`` are Q'(s',·), float32 (B, num_actions).
    """
    y = batch.n_step_return + batch.bootstrap_discount * target_q_values.amax(dim=1)
    q_of_action = q_network(batch.observation).gather(1, batch.action[:, None])[:, 0]
    return Losses(F.mse_loss(q_of_action, y), q_of_action.mean())


class Agent:
    """The agent: Q-network, target network, optimizer and random numbers.

    Outside of a gradient step, the networks are in evaluation mode.
    """

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
        self.loss_function = torch.compile(dqn_loss) if args.compile else dqn_loss

    def q_values(self, observation: np.ndarray) -> np.ndarray:
        """Compute Q-values, float32 (B, num_actions), of observations, uint8 (B, 4, 84, 84)."""
        return self.forward(to_device(observation, self.hardware.device)).cpu().numpy()

    def update(self, replay: Replay) -> Losses:
        """Make a gradient step; the next one may overwrite the returned losses."""
        if replay.gradient_step is None:
            function = functools.partial(self.gradient_step, replay.ring)
            replay.gradient_step = cuda_graph(function, self.generator, self.hardware.cuda_graph)
        sampled = replay.sampled_steps()
        return replay.gradient_step(sampled.start, sampled.stop)

    def gradient_step(self, ring: Record, low: int, high: int) -> Losses:
        """Make a gradient step on transitions of steps [low, high); both are tensors in a CUDA graph."""
        args = self.args
        autocast = torch.autocast(self.hardware.device.type, torch.bfloat16, enabled=self.hardware.bf16)
        batch = sample(ring, low, high, args.batch_size, self.generator, args.n_step, args.gamma)
        with torch.no_grad(), autocast:
            target_q_values = self.target_network(batch.bootstrap_observation)
        self.q_network.train()
        with autocast:
            losses = self.loss_function(self.q_network, target_q_values, batch)
        self.optimizer.zero_grad()
        losses.td_loss.backward()
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
        """Serialise the state of the agent for a checkpoint."""
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


def set_up(args: Args) -> tuple[Args, Hardware]:
    """Choose the hardware and check the flags; return the flags that the run uses and the hardware."""
    hardware = Hardware.choose(args)
    one_step = Replay(size=1, num_envs=1, n_step=args.n_step, hardware=hardware)
    return check_args(args, hardware.device, step_bytes=sum(array.nbytes for array in one_step.ring)), hardware


def times_due(start: int, end: int, every: int) -> int:
    """Return the number of multiples of ``every`` in (start, end]."""
    return end // every - start // every


def main(args: Args) -> None:
    # ==================== setup ====================
    args, hardware = set_up(args)
    make_envs = functools.partial(AtariEnvs, args.env_id)
    envs = make_envs(num_envs=args.num_envs)
    agent = Agent(args, envs.num_actions, hardware)
    rng = np.random.default_rng(args.seed)
    progress = Progress()
    run = Run(args, progress=progress, agent=agent, rng=rng)  # a checkpoint holds these

    def act(observation: np.ndarray, action_rng: np.random.Generator) -> np.ndarray:
        """Choose the actions of the evaluation."""
        run.exit_if_signalled()  # a resumed run repeats the evaluation
        return epsilon_greedy(agent.q_values(observation), args.end_e, action_rng)

    with run:  # a checkpoint of a resumed run is restored here; in the training, a signal ends it after a checkpoint
        # ==================== training ====================
        if progress.step < args.total_timesteps:
            replay = Replay(args.buffer_size, args.num_envs, args.n_step, hardware)
            run.restore_replay(replay, progress.step)
            losses = None
            # The step is in the seed, so that a resumed run does not repeat the first episodes.
            observation = envs.reset(args.seed, "online", progress.step)
            steps = range(progress.step, args.total_timesteps, args.num_envs)
            for global_step in run.steps("training", "step", steps):
                next_step = global_step + args.num_envs
                epsilon_steps = args.exploration_fraction * args.total_timesteps
                epsilon = linear_schedule(args.start_e, args.end_e, epsilon_steps, global_step)
                action = epsilon_greedy(agent.q_values(observation), epsilon, rng)
                action = envs.send(action)  # the actions taken: FIRE starts an episode or a life

                # The Q-network learns while the emulators run.
                if global_step >= args.learning_starts and replay.sampled_steps():
                    for _ in range(times_due(global_step, next_step, args.train_frequency)):
                        losses = agent.update(replay)
                    # More than one may be due if the frequency is below num_envs; with tau = 1, one would do.
                    for _ in range(times_due(global_step, next_step, args.target_network_frequency)):
                        agent.update_target(args.tau)

                result = envs.recv()
                replay.add(observation, action, result)
                observation = result.observation
                progress.step = next_step
                if times_due(global_step, next_step, LOG_EVERY):
                    run.log("charts/SPS", run.steps_per_second, global_step)
                    run.log("charts/epsilon", epsilon, global_step)
                    if losses is not None:
                        run.log("losses/td_loss", losses.td_loss, global_step)
                        run.log("losses/q_values", losses.q_values, global_step)
                for env, episodic_return, length in result.episodes:
                    # A step of its own for each environment: TensorBoard and W&B show one point per step. W&B needs
                    # increasing steps, so these come after the points of `global_step`.
                    run.log("charts/episodic_return", episodic_return, global_step + env)
                    run.log("charts/episodic_length", length, global_step + env)
                    run.show(f"return {episodic_return}")
                run.save_if_due(replay)

        # ==================== save and evaluate ====================
        if args.save_model:
            agent.save(run.model_path())
            print(f"model saved to {run.model_path()}")
        run.save()  # without the replay buffer: a resumed run only repeats the evaluation
        returns = play_episodes("final", act, args.eval_episodes, make_envs, args.seed, run.video_dir)
        run.log("charts/final/avg_episodic_return", np.mean(returns), progress.step)
        for i, episodic_return in enumerate(returns):
            run.log("eval/episodic_return", episodic_return, progress.step + i)

    run.finish({"final": returns})  # uploads the model if asked, and prints the results


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args(Args))
