"""Speed of every phase of QDagger against the plain formulation, measured in turns on one machine.

    python benchmark/throughput.py --teacher teachers/PongNoFrameskip-v4-dqn_atari-seed1 [--backend jax]

The plain formulation is what scripts of this kind usually do: NCHW float32 networks in eager mode (JAX: flax's own
layers, jitted), one environment in stable-baselines3's wrappers, whole observations in the replay, acting and learning
one after the other, and the teacher evaluated in every update. It and the script run in processes of their own, one of
them at a time, so that a machine that slows down slows both.
"""

import importlib
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cleanrl"))

import numpy as np
import tyro

from cleanrl_utils.atari import AtariEnvs, available_cores, make_wrapped_env
from cleanrl_utils.checks import one_line_errors
from cleanrl_utils.evaluation import epsilon_greedy

SCRIPTS = {"torch": "qdagger_dqn_atari_impalacnn", "jax": "qdagger_dqn_atari_jax_impalacnn"}
PHASES = {"teacher data": "steps/s", "offline": "updates/s", "online": "steps/s"}


@dataclass
class Args:
    teacher: Path
    """a directory with the teacher's dqn_atari.cleanrl_model"""
    backend: Literal["torch", "jax"] = "torch"
    """the script under test"""
    env_id: str = "PongNoFrameskip-v4"
    """the environment"""
    num_envs: int = 16
    """parallel games of the script under test; the plain formulation has one"""
    batch_size: int = 32
    """transitions per update"""
    replay_steps: int = 20_000
    """size of the replay of the script under test"""
    seconds: float = 5.0
    """time of each measurement"""
    rounds: int = 3
    """measurements of each kind; medians are reported"""
    bf16: bool = True
    """as in the scripts"""
    cuda: bool = True
    """as in the PyTorch script; so are the next three"""
    cuda_graph: bool = True
    compile: bool = False
    torch_deterministic: bool = True


class Plain:
    """The plain formulation; subclasses have networks and updates."""

    def __init__(self, args: Args):
        self.args = args
        self.env = make_wrapped_env(args.env_id)
        self.observation = np.asarray(self.env.reset(seed=1)[0])
        self.replay: list[tuple] = []
        self.rng = np.random.default_rng(1)
        self.steps = 0

    def play(self, q_function: Callable[[np.ndarray], np.ndarray]) -> int:
        action = int(epsilon_greedy(q_function(self.observation[None]), 0.01, self.rng)[0])
        following, reward, terminated, truncated, _ = self.env.step(action)
        following = np.asarray(following)
        self.replay.append((self.observation, action, np.float32(np.sign(reward)), terminated, following))
        self.observation = np.asarray(self.env.reset()[0]) if terminated or truncated else following
        return 1

    def teacher_data(self) -> int:
        return self.play(self.teacher_q)

    def offline(self) -> int:
        chosen = [self.replay[i] for i in self.rng.integers(0, len(self.replay), self.args.batch_size)]
        self.update(*(np.stack(column) for column in zip(*chosen, strict=True)))
        return 1

    def online(self) -> int:
        self.steps += self.play(self.student_q)
        if self.steps % 4 == 0:
            self.offline()
        return 1


def plain_torch(args: Args) -> Plain:
    """In PyTorch."""
    import qdagger_dqn_atari_impalacnn as script
    import torch
    import torch.nn.functional as F

    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    num_actions = make_wrapped_env(args.env_id).action_space.n
    teacher = script.load_model(args.teacher / "dqn_atari.cleanrl_model", num_actions).to(device)
    student, target = (script.QNetwork(num_actions).to(device) for _ in range(2))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)

    def network_of(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: module.network(x / 255.0)  # without the script's memory format

    def q_of(module: torch.nn.Module) -> Callable[[np.ndarray], np.ndarray]:
        @torch.no_grad()
        def q_function(observation: np.ndarray) -> np.ndarray:
            return network_of(module)(torch.as_tensor(observation, device=device)).cpu().numpy()

        return q_function

    class PlainTorch(Plain):
        teacher_q, student_q = staticmethod(q_of(teacher)), staticmethod(q_of(student))

        def update(self, *columns: np.ndarray) -> None:
            observation, action, reward, done, following = (torch.as_tensor(x, device=device) for x in columns)
            with torch.no_grad():
                y = reward + 0.99 * network_of(target)(following).amax(dim=1) * ~done
                teacher_q = network_of(teacher)(observation)
            q_values = network_of(student)(observation)
            loss = F.mse_loss(q_values.gather(1, action[:, None])[:, 0], y)
            loss = loss + F.kl_div((q_values / 0.1).log_softmax(1), (teacher_q / 0.1).softmax(1), reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def wait(self) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()

    return PlainTorch(args)


def plain_jax(args: Args) -> Plain:
    """In JAX: flax's own max-pooling."""
    import functools

    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax
    import qdagger_dqn_atari_jax_impalacnn as script

    script.max_pool = functools.partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
    num_actions = make_wrapped_env(args.env_id).action_space.n
    teacher, teacher_params = script.load_model(args.teacher / "dqn_atari.cleanrl_model", num_actions)
    student = script.QNetwork(num_actions)
    params = script.first_params(student, jax.random.PRNGKey(1))
    target_params = jax.tree.map(jnp.copy, params)
    optimizer = optax.adam(1e-4)
    teacher_apply, student_apply = jax.jit(teacher.apply), jax.jit(student.apply)

    @jax.jit
    def update(params: Any, state: Any, columns: tuple) -> tuple:
        observation, action, reward, done, following = columns
        teacher_q = teacher.apply(teacher_params, observation)
        batch = script.Batch(observation, action, reward, following, 0.99 * ~done, teacher_q)
        y = script.td_target(target_params, batch, student.apply)
        gradients = jax.grad(lambda p: script.qdagger_loss(p, y, batch, 1.0, 0.1, student.apply)[0])(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    class PlainJax(Plain):
        def __init__(self, args: Args):
            super().__init__(args)
            self.state = params, optimizer.init(params)

        def teacher_q(self, observation: np.ndarray) -> np.ndarray:
            return np.asarray(teacher_apply(teacher_params, observation))

        def student_q(self, observation: np.ndarray) -> np.ndarray:
            return np.asarray(student_apply(self.state[0], observation))

        def update(self, *columns: np.ndarray) -> None:
            self.state = update(*self.state, columns)

        def wait(self) -> None:
            jax.block_until_ready(self.state)

    return PlainJax(args)


class Script:
    """The loops of the script under test; subclasses have its networks, replay and update."""

    def __init__(self, args: Args, script: Any):
        fields = script.Args.__dataclass_fields__
        self.script_args = script.Args(**{name: value for name, value in asdict(args).items() if name in fields})
        self.script, self.num_envs = script, args.num_envs
        self.envs = AtariEnvs(args.env_id, args.num_envs, 1)
        self.observation = self.on_device(self.envs.reset())
        self.rng = np.random.default_rng(1)
        self.steps = 0

    def on_device(self, observation: np.ndarray) -> Any:
        return observation

    def add(self, action: np.ndarray, teacher_q_values: Any) -> int:
        result = self.envs.recv()
        self.replay.add(self.observation, action, result, teacher_q_values)
        self.observation = self.on_device(result.observation)
        return self.num_envs

    def teacher_data(self) -> int:
        teacher_q_values = self.teacher_q(self.observation)
        return self.add(self.envs.send(self.script.epsilon_greedy(teacher_q_values, 0.01, self.rng)), teacher_q_values)

    def offline(self) -> int:
        self.update(1)
        return 1

    def online(self) -> int:
        action = self.envs.send(self.script.epsilon_greedy(self.student_q(self.observation), 0.01, self.rng))
        if due := self.script.times_due(self.steps, self.steps + self.num_envs, 4):
            self.update(due)
        self.steps += self.num_envs
        return self.add(action, self.teacher_q(self.observation))


def script_torch(args: Args) -> Script:
    """The PyTorch script."""
    import qdagger_dqn_atari_impalacnn as script
    import torch

    device, autocast = script.pick_torch_device(args.cuda, args.bf16)

    class TorchScript(Script):
        def __init__(self, args: Args):
            super().__init__(args, script)
            num_actions = self.envs.num_actions
            teacher = script.load_model(args.teacher / "dqn_atari.cleanrl_model", num_actions)
            self.teacher = teacher.to(device, memory_format=torch.channels_last)
            if autocast._enabled:
                self.teacher.network[:-1].to(torch.bfloat16)
            learner = script.make_learner(self.script_args, num_actions, device)
            self.student = learner[0]
            self.replay = script.Replay(args.replay_steps, num_actions, self.script_args, device)
            update = script.make_update(learner, self.replay, autocast, self.script_args)
            self.update = lambda due: update(*self.replay.window, 1.0, *[1e-4] * due)

        def on_device(self, observation: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(observation, device=device)

        @torch.no_grad()
        def teacher_q(self, observation: torch.Tensor) -> torch.Tensor:
            with autocast:
                return self.teacher(observation)

        @torch.no_grad()
        def student_q(self, observation: torch.Tensor) -> torch.Tensor:
            with autocast:
                return self.student(observation)

        def wait(self) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()

    return TorchScript(args)


def script_jax(args: Args) -> Script:
    """The JAX script."""
    import functools

    import jax
    import jax.numpy as jnp
    import optax
    import qdagger_dqn_atari_jax_impalacnn as script

    dtype = script.pick_jax_device(args.bf16)

    class JaxScript(Script):
        def __init__(self, args: Args):
            super().__init__(args, script)
            num_actions = self.envs.num_actions
            teacher, params = script.load_model(args.teacher / "dqn_atari.cleanrl_model", num_actions, dtype)
            self.teacher_q = functools.partial(jax.jit(teacher.apply), params)
            student, optimizer = script.QNetwork(num_actions, dtype), optax.adam(1e-4)
            self.replay = script.Replay(args.replay_steps, num_actions, self.script_args)
            key = jax.random.PRNGKey(1)
            params = script.first_params(student, key)
            self.state = script.TrainState(params, jax.tree.map(jnp.copy, params), optimizer.init(params), key)
            self.apply = jax.jit(student.apply)
            learn = functools.partial(script.update, args=self.script_args, apply=student.apply, optimizer=optimizer)
            self.learn = jax.jit(learn, static_argnames="due", donate_argnames="state")

        def student_q(self, observation: np.ndarray) -> jax.Array:
            return self.apply(self.state.params, observation)

        def update(self, due: int) -> None:
            self.state, _ = self.learn(self.state, self.replay.ring, *self.replay.window, 1.0, due=due)

        def wait(self) -> None:
            jax.block_until_ready(self.state)

    return JaxScript(args)


MAKERS = {
    ("plain", "torch"): plain_torch,
    ("script", "torch"): script_torch,
    ("plain", "jax"): plain_jax,
    ("script", "jax"): script_jax,
}


def measure(connection: Connection, kind: str, args: Args) -> None:
    """Process of one kind: answers each phase's name with its rate, an empty one with the GPU; None ends it."""
    loops = MAKERS[kind, args.backend](args)
    for phase in iter(connection.recv, None):
        if phase == "":
            connection.send(device_memory(args.backend))
            continue
        call, done = getattr(loops, phase.replace(" ", "_")), 0
        for _ in range(8):  # what compiles and records graphs, and something to sample from
            call()
        loops.wait()
        start = time.perf_counter()
        while time.perf_counter() - start < args.seconds:
            done += call()
        loops.wait()
        connection.send(done / (time.perf_counter() - start))


def device_memory(backend: str) -> str:
    """The GPU and the most memory that was allocated on it; empty without one."""
    if backend == "torch":
        import torch

        if not torch.cuda.is_available():
            return ""
        return f"{torch.cuda.get_device_name()}, {torch.cuda.max_memory_allocated() / 1e9:.2f} GB allocated at most"
    import jax

    device = jax.devices()[0]
    stats = device.memory_stats()
    return f"{device.device_kind}, {stats['peak_bytes_in_use'] / 1e9:.2f} GB allocated at most" if stats else ""


def processor() -> str:
    """The CPU's name and the cores that may be used."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{available_cores()} cores of {names[0] if names else platform.processor()}"


def main(args: Args) -> None:
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # its newer name; JAX takes one or the other
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")  # two processes share a GPU
    context = multiprocessing.get_context("spawn")
    connections = {}
    for kind in ("plain", "script"):
        connections[kind], end = context.Pipe()
        context.Process(target=measure, args=(end, kind, args), daemon=True).start()
        end.close()  # so that a process that dies is noticed
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for phase in PHASES:
            for kind, connection in connections.items():
                connection.send(phase)
                rates.setdefault((phase, kind), []).append(connection.recv())
    connections["script"].send("")
    gpu = connections["script"].recv()
    for connection in connections.values():
        connection.send(None)
    median = {key: statistics.median(values) for key, values in rates.items()}
    flags = [
        f"--no-{name}" for name in ("bf16", "cuda", "cuda_graph", "torch_deterministic") if not getattr(args, name)
    ]
    flags += ["--compile"] * args.compile
    print(
        f"{args.backend} {' '.join(flags).replace('_', '-')}; {processor()}{'; ' + gpu if gpu else ''}; {args.env_id}, "
    )
    print(f"batch {args.batch_size}, {args.num_envs} games, medians of {args.rounds} × {args.seconds:g} s\n")
    print("| phase | plain | script | ratio |\n|---|---|---|---|")
    for phase, unit in PHASES.items():
        plain, script = median[phase, "plain"], median[phase, "script"]
        print(f"| {phase}, {unit} | {plain:.1f} | {script:.1f} | {script / plain:.2f}× |")
    full = importlib.import_module(SCRIPTS[args.backend]).Args
    sizes = (full.teacher_steps, full.offline_steps, full.total_timesteps)
    hours = {
        kind: sum(size / median[phase, kind] for size, phase in zip(sizes, PHASES, strict=True)) / 3600
        for kind in connections
    }
    print(f"| run of full size, hours | {hours['plain']:.1f} | {hours['script']:.1f} | |")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
