"""Helpers of several test files: small runs, small networks, and reading what a run wrote."""

import io
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dqn_atari
import dqn_atari_jax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from flax.traverse_util import unflatten_dict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanrl_utils.atari import StepResult
from cleanrl_utils.models import torch_to_flax

REPO = Path(__file__).parent.parent
PYTHONPATH = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])  # for scripts
GAME = "KlaxNoFrameskip-v4"  # with any policy, an episode of Klax ends after a few hundred steps
NUM_ACTIONS = 18
STUDENT = qdagger.__name__
DQN = dqn_atari.__name__
STUDENT_JAX = qdagger_jax.__name__
DQN_JAX = dqn_atari_jax.__name__
TIMED_TAGS = {"charts/teacher/SPS", "charts/SPS", "charts/offline/updates_per_second"}
Scalars = dict[str, list[tuple[int, float]]]  # the points (step, value) of each tag, in the order of the file


class SmallNetwork(torch.nn.Module):
    """A Q-network that is fast: uint8 (B, 4, 84, 84) → float32 (B, num_actions). Its names are those of a teacher."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.network = torch.nn.ModuleDict(
            {"0": torch.nn.Conv2d(4, 4, 12, stride=12), "7": torch.nn.Linear(4 * 7 * 7, num_actions)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.network["0"](x / 255.0).relu()
        return self.network["7"](hidden.flatten(1)).float()


class SmallFlaxNetwork(nn.Module):
    """The same in flax."""

    num_actions: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(4, (12, 12), 12, padding="VALID")(x.transpose(0, 2, 3, 1) / 255.0))
        return nn.Dense(self.num_actions)(x.reshape(x.shape[0], -1))


NETWORKS = {script: script.QNetwork for script in (qdagger, dqn_atari, qdagger_jax, dqn_atari_jax)}
SMALL_NETWORKS = {script: SmallFlaxNetwork if "jax" in script.__name__ else SmallNetwork for script in NETWORKS}
AGENTS = {
    qdagger: qdagger.Student,
    dqn_atari: dqn_atari.Agent,
    qdagger_jax: qdagger_jax.Student,
    dqn_atari_jax: dqn_atari_jax.Agent,
}


def cpu(script: Any, bf16: bool = False) -> Any:
    """Return the CPU as the hardware of a script."""
    if "bf16" in script.Hardware._fields:
        return script.Hardware(torch.device("cpu"), bf16, torch.channels_last, False)
    return script.Hardware(jax.devices("cpu")[0], jnp.bfloat16 if bf16 else jnp.float32)


def tiny(teacher: Path | None = None, **changes: Any) -> qdagger.Args:
    """Return the flags of a QDagger run that takes seconds."""
    flags = {"env_id": GAME, "teacher_policy_hf_repo": teacher and str(teacher), "teacher_model_exp_name": DQN}
    flags |= {"teacher_eval_episodes": 1, "eval_episodes": 1, "num_envs": 2, "batch_size": 4}
    flags |= {"teacher_steps": 60, "offline_steps": 4, "offline_eval_frequency": 4}
    flags |= {"total_timesteps": 60, "buffer_size": 1000, "learning_starts": 20}
    flags |= {"end_e": 0.8}  # a greedy policy that is hardly trained may repeat one action for a long time
    return qdagger.Args(**(flags | changes))


def twin(args: Any, script: Any) -> Any:
    """Return the same flags for another script, as far as it has them."""
    names = script.Args.__dataclass_fields__.keys() - ({"exp_name"} if args.exp_name == type(args).exp_name else set())
    return script.Args(**{name: value for name, value in vars(args).items() if name in names})


def flax_params(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """Convert weights of PyTorch to the nested parameters of flax."""
    return unflatten_dict(torch_to_flax(weights), sep="/")


def write_teacher(directory: Path, num_actions: int = NUM_ACTIONS, **changes: torch.Tensor | None) -> Path:
    """Write a teacher of random weights; ``changes`` replace or, if None, remove entries of its state dict."""
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        weights = {**qdagger.TeacherNetwork(num_actions).state_dict(), **changes}
    torch.save({key: value for key, value in weights.items() if value is not None}, directory / f"{DQN}.cleanrl_model")
    return directory


def torch_bytes(state: Any, **options: Any) -> bytes:
    """Return the file that ``torch.save`` writes; NumPy arrays in ``state`` become tensors."""
    if isinstance(state, dict):
        state = {key: torch.tensor(x) if isinstance(x, np.ndarray) else x for key, x in state.items()}
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


class Hostile:
    """Calls a function when it is unpickled."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call[0], self.call[1:]


def run_script(script: str, cwd: Path, *flags: object, **environ: str) -> subprocess.CompletedProcess:
    """Run ``python cleanrl/{script}.py flags`` in the folder ``cwd``."""
    return subprocess.run(
        [sys.executable, REPO / "cleanrl" / f"{script}.py", *map(str, flags)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", **environ},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )


def without(directory: Path, *packages: str) -> Path:
    """Make a directory that, first in PYTHONPATH, makes the import of these packages fail."""
    for name in packages:
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text(f"raise ImportError('No module named {name}')")
    return directory


def only(paths: Iterable[Path]) -> Path:
    """Return the only path of ``paths``."""
    (path,) = paths
    return path


def read_scalars(run_dir: Path) -> Scalars:
    """Read the curves of a run as TensorBoard shows them."""
    accumulator = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def warnings_of(capsys: pytest.CaptureFixture) -> list[str]:
    """Return the warnings since the last call."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING")]


def fake_steps(env_ids: tuple[str, ...] = ("Pong", "Breakout"), seeds: tuple[int, ...] = (1,)) -> list[list[int]]:
    """Return the steps that all runs of ``fake_run.py`` logged. There must be one run for each environment and seed."""
    names = sorted(path.name.rpartition("__")[0] for path in Path("runs").iterdir())
    assert names == sorted(f"{env_id}__fake_run__{seed}" for env_id in env_ids for seed in seeds)
    return [[int(line) for line in path.read_text().split()] for path in Path("runs").glob("*/steps.txt")]


Results = tuple[Scalars, dict[str, bytes]]


def results(run_dir: Path) -> Results:
    """Return the curves of a run, without the values of those that time something, and its models."""
    scalars = read_scalars(run_dir)
    curves = {tag: [(step, tag in TIMED_TAGS or value) for step, value in points] for tag, points in scalars.items()}
    return curves, {path.stem: path.read_bytes() for path in run_dir.glob("*.cleanrl_model")}


def spread(network: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Draw larger weights and random biases, so that no term of the network is negligible."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(noise * (1.5 / fan_in) ** 0.5)
    return network


def random_batch(seed: int, size: int, num_actions: int, flat: bool = False) -> dict[str, np.ndarray]:
    """Draw transitions in float32, of which the first is a termination.

    Observations are noise or, with ``flat``, flat areas as in Atari games, where max-pooling finds many equal maxima.
    """
    rng = np.random.default_rng(seed)
    if flat:
        observations = np.kron(rng.integers(0, 256, (2, size, 4, 6, 6)), np.ones((14, 14))).astype(np.uint8)
    else:
        observations = rng.integers(0, 256, (2, size, 4, 84, 84), dtype=np.uint8)
    return {
        "observation": observations[0],
        "action": rng.integers(0, num_actions, size),
        "n_step_return": rng.uniform(-2, 2, size).astype(np.float32),
        "bootstrap_observation": observations[1],
        "bootstrap_discount": np.where(np.arange(size) == 0, 0, rng.choice([0.99, 0.99**3], size)).astype(np.float32),
        "teacher_q_values": rng.normal(size=(size, num_actions)).astype(np.float32),
    }


def random_step(script: Any, rng: np.random.Generator, num_envs: int, num_actions: int) -> tuple:
    """Return random arguments for `Replay.add`."""
    observation = rng.integers(0, 256, (num_envs, 4, 84, 84), np.uint8)
    reward = rng.integers(-1, 2, num_envs, np.int32)
    terminated, reset = rng.random((2, num_envs)) < 0.1
    result = StepResult(observation, reward, terminated, truncated=reset, reset=reset, episodes=[])
    of_teacher = [rng.normal(size=(num_envs, num_actions)).astype(np.float32)] * (script in (qdagger, qdagger_jax))
    return observation, rng.integers(0, num_actions, num_envs), result, *of_teacher


@contextmanager
def float64() -> Iterator[None]:
    """Let PyTorch compute in float64, also where the networks convert to float32 before their last layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def torch_losses(script: Any, q_network: Any, target_network: Any, batch: Any, *coefficients: float) -> Any:
    """Compute the losses of a PyTorch script; the coefficients, of QDagger only, are λ and the temperature."""
    with torch.no_grad():
        target_q_values = target_network(batch.bootstrap_observation)
    loss = script.qdagger_loss if script is qdagger else script.dqn_loss
    return loss(q_network, target_q_values, batch, *coefficients)


def jax_losses(script: Any, apply: Any, params: Any, target_params: Any, batch: Any, *coefficients: float) -> Any:
    """Compute loss and losses of a JAX script in the same way; ``apply`` is the method of both networks."""
    target_q_values = apply(target_params, batch.bootstrap_observation)
    loss = script.qdagger_loss if script is qdagger_jax else script.dqn_loss
    return loss(params, SimpleNamespace(apply=apply), target_q_values, batch, *coefficients)
