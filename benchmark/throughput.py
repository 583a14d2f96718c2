"""Speed of every phase of QDagger against the plain formulation, measured in one run on one machine.

The plain formulation is what scripts of this kind usually do: NCHW float32 networks in eager mode, one environment in
the stable-baselines3 wrappers, whole observations in the replay, acting and learning one after the other, and the
teacher evaluated in every update. Both sides run on the same weights and in alternation, so that a machine that slows
down slows both.

    python benchmark/throughput.py --teacher teachers/PongNoFrameskip-v4-dqn_atari-seed1 [--backend jax]

Both backends read the same teacher. In JAX the plain formulation is flax's own layers in one jitted update.
"""

import functools
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tyro

from cleanrl_utils.atari import AtariEnvs, available_cores, make_wrapped_env
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import epsilon_greedy
from cleanrl_utils.schedules import times_due
from cleanrl_utils.teachers import find_teacher


@dataclass
class Args:
    teacher: str
    """the teacher: a directory or hub repository with dqn_atari.cleanrl_model"""
    backend: Literal["torch", "jax"] = "torch"
    """the script under test"""
    env_id: str = "PongNoFrameskip-v4"
    """the environment"""
    num_envs: int = 8
    """parallel games of the script under test; the plain formulation has one"""
    batch_size: int = 32
    """transitions per update"""
    seconds: float = 8.0
    """time for each measurement of each round"""
    rounds: int = 3
    """how often each measurement is repeated; medians are reported"""
    memory_steps: int = 200_000
    """size of both replays in the run whose peak memory is measured; 0 leaves it out"""
    bf16: bool = True
    """as in the script"""
    cuda: bool = True
    """as in the PyTorch script"""


class Plain:
    """The plain formulation: everything the fast path does without."""

    def __init__(self, args: Args):
        self.args = args
        self.env = make_wrapped_env(args.env_id)
        self.observation = np.asarray(self.env.reset(seed=1)[0])
        self.replay: list[tuple] = []
        self.rng = np.random.default_rng(1)
        self.steps = 0

    def play(self, q_function: Callable[[np.ndarray], np.ndarray]) -> None:
        action = int(epsilon_greedy(q_function(self.observation[None]), 0.01, self.rng)[0])
        following, reward, terminated, truncated, _ = self.env.step(action)
        following = np.asarray(following)
        self.replay.append((self.observation, action, np.float32(np.sign(reward)), terminated, following))
        self.observation = following
        if terminated or truncated:
            self.observation = np.asarray(self.env.reset()[0])

    def teacher_step(self) -> int:
        self.play(self.teacher_q_function)
        return 1

    def offline_update(self) -> int:
        rows = [self.replay[i] for i in self.rng.integers(0, len(self.replay), self.args.batch_size)]
        self.update(*(np.stack(column) for column in zip(*rows, strict=True)))
        return 1

    def online_step(self) -> int:
        self.play(self.student_q_function)
        self.steps += 1
        if self.steps % 4 == 0:
            self.offline_update()
        return 1


class Script:
    """The loops of the script under test."""

    def __init__(self, args: Args):
        self.args = args
        self.envs = AtariEnvs(args.env_id, args.num_envs, 1)
        self.observation = self.envs.reset()
        self.rng = np.random.default_rng(1)
        self.steps = 0

    def teacher_step(self) -> int:
        teacher_q_values = self.teacher_q_function(self.observation)
        action = self.envs.send(epsilon_greedy(teacher_q_values, 0.01, self.rng))
        step = self.envs.recv()
        self.replay.add(self.observation, action, step, teacher_q_values)
        self.observation = step.observation
        return self.args.num_envs

    def offline_update(self) -> int:
        return self.updates(self.offline_count)

    def online_step(self) -> int:
        action = self.envs.send(epsilon_greedy(self.student_q_function(self.observation), 0.01, self.rng))
        teacher_q_values = self.judge(self.observation)
        self.updates(times_due(self.steps, self.steps + self.args.num_envs, 4))
        self.steps += self.args.num_envs
        step = self.envs.recv()
        self.replay.add(self.observation, action, step, teacher_q_values)
        self.observation = step.observation
        return self.args.num_envs


def make_torch(args: Args) -> tuple[Plain, Script, Callable[[], None], str]:
    """Both sides in PyTorch, on the same weights; what waits for the device; and what computes."""
    import torch
    import torch.nn.functional as F

    from cleanrl import qdagger_dqn_atari_impalacnn as script
    from cleanrl_utils.torch_utils import make_q_function, pick_device

    device, bf16 = pick_device(args.cuda, args.bf16)
    torch.manual_seed(1)
    plain, fast = Plain(args), Script(args)
    num_actions = fast.envs.num_actions
    teacher = script.load_teacher(find_teacher(args.teacher, "dqn_atari"), num_actions, args.env_id)
    weights = script.QNetwork(num_actions).state_dict()

    def nchw_forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """float32, contiguous: what a network does that nobody tuned."""
        return self.network(x / 255.0)

    def make(network_class: type, state: dict[str, torch.Tensor]) -> torch.nn.Module:
        network = network_class(num_actions).to(device)
        network.load_state_dict(state)
        network.forward = nchw_forward.__get__(network)
        return network

    plain_teacher = make(script.TeacherNetwork, teacher.state_dict())
    plain_student, plain_target = make(script.QNetwork, weights), make(script.QNetwork, weights)
    plain_optimizer = torch.optim.Adam(plain_student.parameters(), lr=1e-4)
    plain.teacher_q_function = make_q_function(plain_teacher, device)
    plain.student_q_function = make_q_function(plain_student, device)

    def plain_update(*columns: np.ndarray) -> None:
        observation, action, reward, terminated, following = (torch.from_numpy(x).to(device) for x in columns)
        with torch.no_grad():
            target = reward + 0.99 * ~terminated * plain_target(following).max(dim=1).values
            teacher_q_values = plain_teacher(observation)
        q_values = plain_student(observation)
        loss = F.mse_loss(q_values.gather(1, action[:, None])[:, 0], target) + F.kl_div(
            F.log_softmax(q_values / 0.1, dim=1), F.softmax(teacher_q_values / 0.1, dim=1), reduction="batchmean"
        )
        plain_optimizer.zero_grad()
        loss.backward()
        plain_optimizer.step()

    plain.update = plain_update

    teacher = teacher.to(device, memory_format=torch.channels_last)
    student, target = (
        script.QNetwork(num_actions, bf16).to(device, memory_format=torch.channels_last) for _ in range(2)
    )
    student.load_state_dict(weights)
    target.load_state_dict(weights)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-4, fused=True)
    script_args = script.Args(env_id=args.env_id, num_envs=args.num_envs, batch_size=args.batch_size)
    fast.replay = script.Replay(50_000, num_actions, script_args, device)
    fast.teacher_q_function = fast.judge = make_q_function(teacher, device)
    fast.student_q_function, fast.offline_count = make_q_function(student, device), 1

    def updates(count: int) -> int:
        for _ in range(count):
            losses = script.qdagger_loss(student, target, fast.replay.sample(args.batch_size), 1.0, 0.1)
            optimizer.zero_grad()
            losses.loss.backward()
            optimizer.step()
        return count

    fast.updates = updates
    on_gpu = device.type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else f"{available_cores()} cores of {cpu_name()}"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    return plain, fast, wait, f"{where}; torch {torch.__version__}; bfloat16 {'on' if bf16 else 'off'}"


def make_jax(args: Args) -> tuple[Plain, Script, Callable[[], None], str]:
    """Both sides in JAX, on the same weights; what waits for the device; and what computes."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    from cleanrl import qdagger_dqn_atari_jax_impalacnn as script
    from cleanrl_utils.jax_layers import max_pool
    from cleanrl_utils.jax_utils import make_q_function, pick_device

    on_cpu = pick_device()
    plain, fast = Plain(args), Script(args)
    num_actions = fast.envs.num_actions
    teacher, teacher_params = script.load_teacher(find_teacher(args.teacher, "dqn_atari"), num_actions, args.env_id)
    bf16 = args.bf16 and not on_cpu
    student = script.QNetwork(num_actions, jnp.bfloat16 if bf16 else jnp.float32)
    optimizer = optax.adam(1e-4)
    params = student.init(jax.random.key(1), np.zeros((1, 4, 84, 84), np.uint8))

    def new_state() -> script.TrainState:
        copies = (jax.tree.map(jnp.copy, params) for _ in range(2))
        return script.TrainState(*copies, optimizer.init(params), jax.random.key(2))

    states = {"plain": new_state(), "fast": new_state()}
    flax_pool = functools.partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))

    def plain_apply(params: Any, observation: jax.Array) -> jax.Array:
        """flax's own max-pooling, where the script has one whose gradient is faster."""
        script.max_pool = flax_pool
        try:
            return script.QNetwork(num_actions).apply(params, observation)
        finally:
            script.max_pool = max_pool

    @jax.jit
    def plain_learn(state: script.TrainState, *columns: np.ndarray) -> script.TrainState:
        observation, action, reward, terminated, following = columns
        teacher_q_values = teacher.apply(teacher_params, observation)
        batch = script.Batch(observation, action, reward, following, 0.99 * ~terminated, teacher_q_values)
        loss = functools.partial(script.qdagger_loss, apply=plain_apply)
        gradients, _ = jax.grad(loss, has_aux=True)(state.params, state.target_params, batch, 1.0, 0.1)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state)
        return state._replace(params=optax.apply_updates(state.params, updates), optimizer_state=optimizer_state)

    def plain_update(*columns: np.ndarray) -> None:
        states["plain"] = plain_learn(states["plain"], *columns)

    teacher_apply = jax.jit(teacher.apply)
    plain.update = plain_update
    plain.teacher_q_function = fast.teacher_q_function = make_q_function(teacher_apply, lambda: teacher_params)
    plain.student_q_function = make_q_function(jax.jit(plain_apply), lambda: states["plain"].params)
    fast.student_q_function = make_q_function(jax.jit(student.apply), lambda: states["fast"].params)
    fast.judge = functools.partial(teacher_apply, teacher_params)
    fast.offline_count = 1 if on_cpu else 20
    script_args = script.Args(env_id=args.env_id, num_envs=args.num_envs, batch_size=args.batch_size)
    fast.replay = script.Replay(50_000, num_actions, script_args)
    learn = functools.partial(script.update, args=script_args, apply=student.apply, optimizer=optimizer)
    learn = jax.jit(learn, static_argnames="count", donate_argnames="state")

    def updates(count: int) -> int:
        states["fast"], _ = learn(states["fast"], fast.replay.rows, fast.replay.window, 1.0, count)
        return count

    fast.updates = updates
    where = f"{available_cores()} cores of {cpu_name()}" if on_cpu else jax.devices()[0].device_kind
    wait = lambda: jax.block_until_ready((states, fast.replay.rows))  # noqa: E731
    return plain, fast, wait, f"{where}; jax {jax.__version__}; bfloat16 {'on' if bf16 else 'off'}"


def rate(work: Callable[[], int], seconds: float, wait: Callable[[], None]) -> float:
    """Units of work per second, after a few that are not counted."""
    for _ in range(3):
        work()
    wait()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        done += work()
        wait()  # or calls that only queue work would run ahead of the clock
    return done / (time.perf_counter() - start)


def peak_memory(args: Args) -> float:
    """GB of resident memory at the peak of a run of the script whose two replays fill up to ``memory_steps``.

    The replays are filled, so that every page is touched; few updates are made.
    """
    name = "qdagger_dqn_atari_jax_impalacnn" if args.backend == "jax" else "qdagger_dqn_atari_impalacnn"
    script = Path(__file__).resolve().parents[1] / "cleanrl" / f"{name}.py"
    command = [
        sys.executable, script, "--env-id", args.env_id, "--teacher-policy-hf-repo", args.teacher,
        "--teacher-model-exp-name", "dqn_atari", "--checkpoint-minutes", 0,
        "--teacher-steps", args.memory_steps, "--buffer-size", args.memory_steps,
        "--total-timesteps", args.memory_steps + 400, "--learning-starts", args.memory_steps - 400,
        "--offline-steps", 20, "--teacher-eval-episodes", 1, "--eval-episodes", 1,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    if not args.cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    subprocess.run([str(word) for word in command], check=True, env=environment, capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9


def main(args: Args) -> None:
    args.teacher = str(Path(args.teacher).resolve()) if Path(args.teacher).is_dir() else args.teacher
    plain, fast, wait, where = (make_jax if args.backend == "jax" else make_torch)(args)
    for _ in range(2000):  # something to sample from
        plain.teacher_step()
    for _ in range(2000 // args.num_envs):
        fast.teacher_step()

    phases = ("teacher_step", "offline_update", "online_step")
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for phase in phases:
            for name, side in (("plain", plain), ("script", fast)):
                rates.setdefault((phase, name), []).append(rate(getattr(side, phase), args.seconds, wait))

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"\n{where}; commit {commit}")
    print(f"batch {args.batch_size}, num_envs {args.num_envs}, medians of {args.rounds} rounds of {args.seconds:g} s\n")
    print("| phase | plain | this script | ratio |\n|---|---|---|---|")
    for phase, unit in zip(phases, ("teacher data, steps/s", "offline, updates/s", "online, steps/s"), strict=True):
        slow, fast = (float(np.median(rates[phase, name])) for name in ("plain", "script"))
        print(f"| {unit} | {slow:.1f} | {fast:.1f} | {fast / slow:.2f}× |", flush=True)
    if args.memory_steps:
        print(f"\npeak host memory with two replays of {args.memory_steps:,} steps: {peak_memory(args):.2f} GB")


def cpu_name() -> str:
    """The processor's model and whether it computes bfloat16 in tiles (AMX)."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    return model + (" with AMX" if any("amx_bf16" in line for line in lines) else "")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
