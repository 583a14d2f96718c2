"""Speed of every phase of QDagger against the plain formulation, measured in one run on one machine.

The plain formulation is what scripts of this kind usually do: NCHW float32 networks in eager mode, one environment in
the stable-baselines3 wrappers, whole observations in the replay, acting and learning one after the other, and the
teacher evaluated in every update. It runs in a process of its own, which has not been tuned either (memory allocation,
denormal numbers), and in alternation with the script, so that a machine that slows down slows both.

    python benchmark/throughput.py --teacher teachers/PongNoFrameskip-v4-dqn_atari-seed1 [--backend jax]

Beside the rates it tells where the time of the online phase goes, how long choosing the actions of all games takes, and
the peak of memory. ``--profile`` writes a trace that https://ui.perfetto.dev opens.

Both backends read the same teacher. In JAX the plain formulation is flax's own layers in one jitted update.
"""

import contextlib
import functools
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tyro

from cleanrl_utils.atari import AtariEnvs, available_cores, make_wrapped_env
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import epsilon_greedy
from cleanrl_utils.rollout import HalvedAtariEnvs
from cleanrl_utils.schedules import offline_updates_per_call, times_due
from cleanrl_utils.teachers import find_teacher


@dataclass
class Args:
    teacher: str
    """the teacher: a directory or hub repository with dqn_atari.cleanrl_model"""
    backend: Literal["torch", "jax"] = "torch"
    """the script under test"""
    env_id: str = "PongNoFrameskip-v4"
    """the environment"""
    num_envs: int = 16
    """parallel games of the script under test; the plain formulation has one"""
    batch_size: int = 32
    """transitions per update"""
    replay_steps: int = 50_000
    """size of the replay of the script under test"""
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
    profile: Path | None = None
    """a folder for a trace of the script's three phases, some steps of each; nothing is measured then"""


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

    def __init__(self, args: Args, overlap: bool = True):
        self.args = args
        self.envs = AtariEnvs(args.env_id, args.num_envs, 1)
        self.observation = self.envs.reset()
        self.rng = np.random.default_rng(1)
        self.teacher_envs = HalvedAtariEnvs(args.env_id, args.num_envs, 1, overlap=overlap)
        self.teacher_envs.reset()
        self.rollout = self.teacher_envs.rollout(lambda x: self.teacher_q_function(x), lambda: 0.01, self.rng)
        self.steps = 0
        self.half_of_the_threads = contextlib.nullcontext
        self.noting, self.seconds = False, dict[str, float]()

    def teacher_step(self) -> int:
        with self.half_of_the_threads():
            self.replay.add(*next(self.rollout))
        return self.args.num_envs

    def offline_update(self) -> int:
        return self.updates(self.offline_count)

    def online_step(self) -> int:
        with self.spent_on("choosing actions"):
            q_values = self.student_q_function(self.observation)
        action = self.envs.send(epsilon_greedy(q_values, 0.01, self.rng))
        with self.spent_on("learning"):
            if updates_due := times_due(self.steps, self.steps + self.args.num_envs, 4):
                self.updates(updates_due)
            teacher_q_values = self.judge(self.observation)
            if self.noting:
                self.wait()
        self.steps += self.args.num_envs
        with self.spent_on("waiting for the emulator"):
            step = self.envs.recv()
        self.replay.add(self.observation, action, step, teacher_q_values)
        self.observation = step.observation
        return self.args.num_envs

    @contextlib.contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Adds the time that it takes to `seconds`, if this is being noted."""
        start = time.perf_counter()
        yield
        if self.noting:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start

    def shares(self) -> str:
        """Where the time of an online step goes, and how long choosing the actions of all games takes.

        Measured by itself, since it waits for a GPU after learning, which the rates do not.
        """
        self.seconds, self.noting = {}, True
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < self.args.seconds:
            steps += self.online_step()
        total = time.perf_counter() - start
        self.noting = False
        latency = 1e3 * self.seconds["choosing actions"] * self.args.num_envs / steps
        self.seconds["everything else (Python)"] = total - sum(self.seconds.values())
        shares = ", ".join(f"{what} {seconds / total:.0%}" for what, seconds in self.seconds.items())
        return f"an online step: {shares}; choosing actions for {self.args.num_envs} games takes {latency:.2f} ms"


def plain_torch(args: Args) -> tuple[Plain, Callable[[], None]]:
    """The plain formulation in PyTorch, and what waits for the device."""
    import torch
    import torch.nn.functional as F

    from cleanrl import qdagger_dqn_atari_impalacnn as script
    from cleanrl_utils.torch_utils import make_q_function

    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    side = Plain(args)
    num_actions = int(side.env.action_space.n)

    def nchw_forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """float32, contiguous: what a network does that nobody tuned."""
        return self.network(x / 255.0)

    def make(network: torch.nn.Module) -> torch.nn.Module:
        network.forward = nchw_forward.__get__(network)
        return network.to(device)

    teacher = make(script.load_teacher(find_teacher(args.teacher, "dqn_atari"), num_actions, args.env_id))
    student, target_network = (make(script.QNetwork(num_actions)) for _ in range(2))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)

    def update(*columns: np.ndarray) -> None:
        observation, action, reward, terminated, following = (torch.from_numpy(x).to(device) for x in columns)
        with torch.no_grad():
            target = reward + 0.99 * ~terminated * target_network(following).max(dim=1).values
            teacher_q_values = teacher(observation)
        q_values = student(observation)
        loss = F.mse_loss(q_values.gather(1, action[:, None])[:, 0], target) + F.kl_div(
            F.log_softmax(q_values / 0.1, dim=1), F.softmax(teacher_q_values / 0.1, dim=1), reduction="batchmean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    side.update = update
    side.teacher_q_function, side.student_q_function = (
        make_q_function(teacher, device),
        make_q_function(student, device),
    )
    return side, torch.cuda.synchronize if device.type == "cuda" else lambda: None


def script_torch(args: Args) -> tuple[Script, str]:
    """The PyTorch script, and what computes."""
    import torch

    from cleanrl import qdagger_dqn_atari_impalacnn as script
    from cleanrl_utils.torch_speed import WorkingCopy, half_of_the_threads
    from cleanrl_utils.torch_utils import make_judge, make_q_function, pick_device

    device, bf16 = pick_device(args.cuda, args.bf16)
    side = Script(args)
    side.half_of_the_threads = half_of_the_threads
    num_actions = side.envs.num_actions
    teacher = script.load_teacher(find_teacher(args.teacher, "dqn_atari"), num_actions, args.env_id, bf16)
    teacher = teacher.to(device, memory_format=torch.channels_last)
    student, target = (
        WorkingCopy(script.QNetwork(num_actions).to(device, memory_format=torch.channels_last), bf16) for _ in range(2)
    )
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.Adam(student.original.parameters(), lr=1e-4, fused=True, capturable=on_gpu)
    side.script_args = script_args = script.Args(env_id=args.env_id, num_envs=args.num_envs, batch_size=args.batch_size)
    side.replay = script.Replay(args.replay_steps, num_actions, script_args, device)
    side.teacher_q_function, side.judge = make_q_function(teacher, device, on_gpu), make_judge(teacher, device, on_gpu)
    side.student_q_function = make_q_function(student.network, device, on_gpu)
    side.offline_count = offline_updates_per_call(script_args) if on_gpu else 1
    update = script.make_update(student, target, optimizer, side.replay, script_args)

    def updates(count: int) -> int:
        update(*side.replay.window, 1.0, count * [1e-4])
        return count

    side.updates = updates
    where = torch.cuda.get_device_name() if on_gpu else f"{available_cores()} cores of {cpu_name()}"
    side.wait = torch.cuda.synchronize if on_gpu else lambda: None
    side.device_memory = torch.cuda.max_memory_allocated if on_gpu else lambda: None
    return side, f"{where}; torch {torch.__version__}; bfloat16 {'on' if bf16 else 'off'}"


def plain_jax(args: Args) -> tuple[Plain, Callable[[], None]]:
    """The plain formulation in JAX, and what waits for the device."""
    import flax.linen as nn
    import jax
    import optax

    from cleanrl import qdagger_dqn_atari_jax_impalacnn as script
    from cleanrl_utils.jax_utils import make_q_function

    # flax's own layers, where the script has some that are faster
    script.max_pool = functools.partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
    script.StridedConv = lambda features, size, stride, dtype, name: nn.Conv(
        features, (size, size), stride, padding="VALID", dtype=dtype, name=name
    )
    side = Plain(args)
    num_actions = int(side.env.action_space.n)
    teacher, teacher_params = script.load_teacher(find_teacher(args.teacher, "dqn_atari"), num_actions, args.env_id)
    apply, optimizer = script.QNetwork(num_actions).apply, optax.adam(1e-4)
    state = new_state(script, num_actions, optimizer)

    @jax.jit
    def learn(state: Any, *columns: np.ndarray) -> Any:
        observation, action, reward, terminated, following = columns
        teacher_q_values = teacher.apply(teacher_params, observation)
        batch = script.Batch(observation, action, reward, following, 0.99 * ~terminated, teacher_q_values)
        target = script.td_target(state.target_params, batch, apply)
        gradients, _ = jax.grad(script.qdagger_loss, has_aux=True)(state.params, target, batch, 1.0, 0.1, apply)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state)
        return state._replace(params=optax.apply_updates(state.params, updates), optimizer_state=optimizer_state)

    def update(*columns: np.ndarray) -> None:
        nonlocal state
        state = learn(state, *columns)

    side.update = update
    side.teacher_q_function = make_q_function(jax.jit(teacher.apply), lambda: teacher_params)
    side.student_q_function = make_q_function(jax.jit(apply), lambda: state.params)
    return side, lambda: jax.block_until_ready(state)


def script_jax(args: Args) -> tuple[Script, str]:
    """The JAX script, and what computes."""
    import jax
    import optax

    from cleanrl import qdagger_dqn_atari_jax_impalacnn as script
    from cleanrl_utils.jax_layers import fast_dtype
    from cleanrl_utils.jax_utils import make_q_function, pick_device

    on_cpu = pick_device()
    side = Script(args, overlap=not on_cpu)
    num_actions = side.envs.num_actions
    teacher_path = find_teacher(args.teacher, "dqn_atari")
    teacher, teacher_params = script.load_teacher(teacher_path, num_actions, args.env_id, args.bf16)
    student = script.QNetwork(num_actions, fast_dtype(args.bf16))
    optimizer = optax.adam(1e-4)
    state = new_state(script, num_actions, optimizer)
    teacher_apply = jax.jit(teacher.apply)
    side.teacher_q_function = make_q_function(teacher_apply, lambda: teacher_params)
    side.student_q_function = make_q_function(jax.jit(student.apply), lambda: state.params)
    side.judge = functools.partial(teacher_apply, teacher_params)
    side.script_args = script_args = script.Args(env_id=args.env_id, num_envs=args.num_envs, batch_size=args.batch_size)
    side.offline_count = 1 if on_cpu else offline_updates_per_call(script_args)
    side.replay = script.Replay(args.replay_steps, num_actions, script_args)
    learn = functools.partial(script.update, args=script_args, apply=student.apply, optimizer=optimizer)
    learn = jax.jit(learn, static_argnames="count", donate_argnames="state")

    def updates(count: int) -> int:
        nonlocal state
        state, _ = learn(state, side.replay.rows, side.replay.window, 1.0, count)
        return count

    side.updates = updates
    where = f"{available_cores()} cores of {cpu_name()}" if on_cpu else jax.devices()[0].device_kind
    what = f"{where}; jax {jax.__version__}; teacher {teacher.dtype.__name__}, student {student.dtype.__name__}"
    side.wait = lambda: jax.block_until_ready((state, side.replay.rows))
    side.device_memory = lambda: (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return side, what


def new_state(script: Any, num_actions: int, optimizer: Any) -> Any:
    """The JAX script's state at the start of a run."""
    import jax

    from cleanrl_utils.jax_layers import first_params

    params = first_params(script.QNetwork(num_actions), jax.random.key(1))
    copy = jax.tree.map(jax.numpy.copy, params)
    return script.TrainState(params, copy, optimizer.init(params), jax.random.key(2))


def serve_plain(args: Args, connection: Any) -> None:
    """Runs the plain formulation in a process of its own: answers the name of a phase with its rate."""
    side, wait = (plain_jax if args.backend == "jax" else plain_torch)(args)
    for _ in range(2000):  # something to sample from
        side.teacher_step()
    while phase := connection.recv():
        connection.send(rate(getattr(side, phase), args.seconds, wait))


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


def write_profile(script: Script, args: Args) -> None:
    """Traces the three phases into `profile`, after they have run often enough to be compiled."""

    def work(times: int) -> None:
        for phase in PHASES:
            for _ in range(times):
                getattr(script, phase)()
        script.wait()

    work(10)
    args.profile.mkdir(parents=True, exist_ok=True)
    if args.backend == "jax":
        import jax

        with jax.profiler.trace(str(args.profile), create_perfetto_trace=True):
            work(5)
        path = max(args.profile.rglob("perfetto_trace.json.gz"), key=os.path.getmtime)
        print(f"trace written to {path}; open it in https://ui.perfetto.dev")
        return
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        work(5)
    path = args.profile / "trace.json"
    profiler.export_chrome_trace(str(path))
    print(f"trace written to {path}; open it in https://ui.perfetto.dev")


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


PHASES = {
    "teacher_step": ("teacher data, steps/s", "teacher_steps"),
    "offline_update": ("offline, updates/s", "offline_steps"),
    "online_step": ("online, steps/s", "total_timesteps"),
}
"""Methods of both sides, what their rates are, and the flag that says how much of it a run does"""


def main(args: Args) -> None:
    args.teacher = str(Path(args.teacher).resolve()) if Path(args.teacher).is_dir() else args.teacher
    make_script = script_jax if args.backend == "jax" else script_torch
    if args.profile:
        script, _ = make_script(args)
        fill(script)
        write_profile(script, args)
        return
    connection, other_end = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=serve_plain, args=(args, other_end), daemon=True).start()
    script, what = make_script(args)
    fill(script)

    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for phase in PHASES:
            connection.send(phase)
            rates.setdefault((phase, "plain"), []).append(connection.recv())
            rates.setdefault((phase, "script"), []).append(rate(getattr(script, phase), args.seconds, script.wait))
    connection.send("")

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"\n{what}; commit {commit}")
    print(f"batch {args.batch_size}, num_envs {args.num_envs}, medians of {args.rounds} rounds of {args.seconds:g} s\n")
    print("| phase | plain | this script | ratio |\n|---|---|---|---|")
    hours = np.zeros(2)
    for phase, (unit, flag) in PHASES.items():
        slow, fast = (float(np.median(rates[phase, name])) for name in ("plain", "script"))
        hours += getattr(script.script_args, flag) / np.array([slow, fast]) / 3600
        print(f"| {unit} | {slow:.1f} | {fast:.1f} | {fast / slow:.2f}× |", flush=True)
    print(f"\nat these rates the phases of a run of full size take {hours[1]:.1f} h (plain: {hours[0]:.1f} h)")
    print(script.shares(), flush=True)
    if device_memory := script.device_memory():
        print(f"peak of device memory, with a replay of {args.replay_steps:,} steps: {device_memory / 1e9:.2f} GB")
    if args.memory_steps:
        print(f"peak of host memory with two replays of {args.memory_steps:,} steps: {peak_memory(args):.2f} GB")


def fill(script: Script) -> None:
    """Plays 2000 steps, so that there is something to sample from."""
    for _ in range(2000 // script.args.num_envs):
        script.teacher_step()


def cpu_name() -> str:
    """The processor's model and whether it computes bfloat16 in tiles (AMX)."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    return model + (" with AMX" if any("amx_bf16" in line for line in lines) else "")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
