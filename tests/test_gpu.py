"""Tests that need an NVIDIA GPU: ``make test-gpu``. They are skipped elsewhere."""

import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
import torch.nn.functional as F
from helpers import (
    GAME,
    NUM_ACTIONS,
    PYTHONPATH,
    REPO,
    only,
    qdagger_losses,
    read_scalars,
    run_script,
    tiny,
    write_teacher,
)
from test_cuda_graph import results

from cleanrl_utils import device
from cleanrl_utils.atari import Step

JAX_ON_GPU = os.environ.get("QDAGGER_TEST_GPU") == "1" and jax.default_backend() == "gpu"
needs_torch = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")
needs_jax = pytest.mark.skipif(not JAX_ON_GPU, reason="JAX sees no GPU")
SCRIPTS = [pytest.param(qdagger, marks=needs_torch), pytest.param(qdagger_jax, marks=needs_jax)]
pytestmark = pytest.mark.gpu

TINY = "--num-envs 4 --teacher-eval-episodes 1 --eval-episodes 1 --teacher-steps 200 --offline-steps 40 --end-e 0.8 "
TINY += "--learning-starts 100 --buffer-size 1000 --batch-size 8 --teacher-model-exp-name dqn_atari --env-id " + GAME


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuDNN use deterministic algorithms, as the script does by default, and float32 instead of TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Learner:
    """Networks, optimizer, an update and a replay buffer of random steps on a device; the seed is fixed."""

    def __init__(
        self, args: qdagger.Args, picked: torch.device, bf16: bool, memory_format: torch.memory_format
    ) -> None:
        torch.manual_seed(1)
        rng = np.random.default_rng(1)
        n = args.num_envs
        shape = (n, 4, 84, 84)
        self.q_network = qdagger.QNetwork(NUM_ACTIONS).to(picked, memory_format=memory_format)
        self.optimizer = torch.optim.Adam(
            self.q_network.parameters(), args.learning_rate, fused=True, capturable=picked.type == "cuda"
        )
        self.replay = qdagger.Replay(64 * n, NUM_ACTIONS, args, picked)
        none = np.zeros(n, bool)
        for _ in range(64):
            step = Step(np.zeros(0), rng.integers(-1, 2, n), rng.random(n) < 0.1, none, rng.random(n) < 0.1, [])
            observation = torch.as_tensor(rng.integers(0, 256, shape, np.uint8), device=picked)
            q_values = torch.as_tensor(rng.random((n, NUM_ACTIONS), np.float32), device=picked)
            self.replay.add(observation, rng.integers(0, NUM_ACTIONS, n), step, q_values)
        self.generator = torch.Generator(picked).manual_seed(1)
        autocast = torch.autocast(picked.type, torch.bfloat16, enabled=bf16)
        self.update = qdagger.make_update(
            self.q_network,
            copy.deepcopy(self.q_network),
            self.optimizer,
            self.replay.ring,
            self.generator,
            autocast,
            args,
        )

    def learn(self, updates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make single updates and updates of four gradient steps in turns; return the weights and the losses."""
        # A graph has the learning rate as float32: powers of 2 are the same in Python.
        rates = [[2**-13 * (i + 1)] * due for i in range(updates) for due in (1, 4)]
        losses = [self.update(*self.replay.window, 0.5, *learning_rates).loss.clone() for learning_rates in rates]
        return torch.cat([parameter.detach().flatten() for parameter in self.q_network.parameters()]), torch.stack(
            losses
        )


def learn(updates: int, **flags: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and losses after updates with these flags."""
    args = qdagger.Args(**flags)
    return Learner(args, *device.set_up_torch(args.cuda, args.bf16)).learn(updates)


@needs_torch
@pytest.mark.parametrize("bf16", [False, True])
def test_graph_equals_eager(bf16: bool) -> None:
    """Losses and weights are equal to the last bit, with a learning rate that changes."""
    graph = learn(8, bf16=bf16, cuda_graph=True)
    eager = learn(8, bf16=bf16, cuda_graph=False)
    torch.testing.assert_close(graph, eager, rtol=0, atol=0)


@needs_torch
def test_compiled_equals_eager() -> None:
    """The losses of 30 updates are equal, up to what Adam makes of the rounding of float32."""
    _, losses = learn(6, bf16=False, compile=True)
    _, eager = learn(6, bf16=False, cuda_graph=False)
    torch.testing.assert_close(losses, eager, rtol=1e-2, atol=1e-3)


@needs_torch
@pytest.mark.parametrize("bf16", [False, True])
def test_gradient_equals_the_one_of_the_cpu(bf16: bool) -> None:
    """The direction is the same, up to the rounding of the precision."""
    args = qdagger.Args(num_envs=4)
    formats = {"cpu": torch.contiguous_format, "cuda": torch.channels_last}
    learners = [Learner(args, torch.device(name), False, memory_format) for name, memory_format in formats.items()]
    cpu = learners[0]
    gradients = []
    batch = qdagger.sample(cpu.replay.ring, *cpu.replay.window, 32, cpu.generator, 1, 0.99)
    for learner in learners:
        on_device = qdagger.Batch(*(array.to(learner.generator.device) for array in batch))
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            qdagger_losses(learner.q_network, learner.q_network, on_device, 1.0, 0.1).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten().cpu() for parameter in learner.q_network.parameters()]))
    assert F.cosine_similarity(*gradients, dim=0) > (0.99 if bf16 else 0.9999)


@needs_torch
def test_nothing_synchronises_with_the_gpu() -> None:
    """Neither an update nor adding a step does: PyTorch raises an error at a synchronisation."""
    args = qdagger.Args()
    learner = Learner(args, *device.set_up_torch(args.cuda, args.bf16))
    learner.learn(device.CudaGraph.EAGER_CALLS + 1)
    observation = torch.zeros((16, 4, 84, 84), dtype=torch.uint8, device="cuda")
    none = np.zeros(16, bool)
    q_values = torch.zeros((16, NUM_ACTIONS), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.update(*learner.replay.window, 1.0, 1e-4)
        step = Step(np.zeros(0), np.ones(16, np.int32), none, none, none, [])
        learner.replay.add(observation, np.zeros(16, np.int64), step, q_values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("script", SCRIPTS)
def test_replay_beyond_2_31_bytes(script) -> None:
    """The end of a replay buffer of more bytes than an int32 counts is read correctly."""
    args = script.Args(num_envs=4)
    if script is qdagger:
        replay = qdagger.Replay(2**31 // 7056 + 4000, 6, args, torch.device("cuda"))
        replay.ring.frame[-8:] = torch.arange(8, device="cuda", dtype=torch.uint8)[:, None, None, None] + 1
        replay.ring.valid.fill_(True), replay.ring.age.fill_(100), replay.ring.terminated.fill_(False)
        t = torch.full((2,), replay.length - 2, device="cuda")
        batch = qdagger.transitions_at(replay.ring, t, torch.tensor([0, 3], device="cuda"), 1, 0.99)
    else:
        replay = qdagger_jax.Replay(2**31 // 7056 + 4000, 6, args)
        frame = replay.ring.frame.at[-8:].set((jnp.arange(8, dtype=jnp.uint8) + 1)[:, None, None, None])
        ring = replay.ring._replace(frame=frame, valid=replay.ring.valid | True, age=replay.ring.age + 100)
        batch = qdagger_jax.transitions_at(ring, jnp.full((2,), replay.length - 2), jnp.array([0, 3]), 1, 0.99)
    assert batch.observation[:, :, 0, 0].tolist() == [[4, 5, 6, 7]] * 2
    assert batch.bootstrap_observation[:, :, 83, 83].tolist() == [[5, 6, 7, 8]] * 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_small_run(script, tmp_path: Path) -> None:
    """A run on the GPU passes all phases and says which device computes."""
    teacher = write_teacher(tmp_path / "teacher")
    flags = ["--teacher-policy-hf-repo", teacher, *TINY.split(), "--total-timesteps", 400]
    run = run_script(script.__name__, tmp_path, *flags)
    assert run.returncode == 0, run.stderr
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("device: "))
    assert "CPU" not in line
    assert np.isfinite(read_scalars(only((tmp_path / "runs").iterdir()))["losses/loss"]).all()


@needs_torch
def test_runs_of_one_seed_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves and models of two runs are equal bit for bit, and those of a run without CUDA graphs.

    A graph has learning rate and λ as float32: this rate is a power of 2, and λ is 1 as no ten episodes end.
    """
    teacher = write_teacher(tmp_path / "teacher")
    flags = {"num_envs": 4, "teacher_steps": 200, "offline_steps": 40, "total_timesteps": 400}
    outcomes = []
    for name, cuda_graph in (("graph", True), ("again", True), ("eager", False)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        qdagger.main(tiny(teacher, **flags, learning_starts=100, learning_rate=2**-13, cuda_graph=cuda_graph))
        outcomes.append(results(only(Path("runs").iterdir())))
    for curves, models in outcomes[1:]:
        assert curves == outcomes[0][0]
        torch.testing.assert_close(models, outcomes[0][1], rtol=0, atol=0)


def logged_steps(folder: Path) -> list[int]:
    """Return the online steps that the run in a folder has logged."""
    return [step for run_dir in folder.glob("runs/*") for step, _ in read_scalars(run_dir).get("charts/epsilon", [])]


@needs_torch
def test_resume_on_another_device(tmp_path: Path) -> None:
    """A run continues on CPU, GPU and CPU, until each has logged online steps; each step is logged once."""
    flags = ["--teacher-policy-hf-repo", write_teacher(tmp_path / "teacher"), *TINY.split()]
    flags += ["--total-timesteps", "2000000", "--checkpoint-minutes", "0.05"]  # a checkpoint writes the logs, too
    for device_flag in ("--no-cuda", "--cuda", "--no-cuda"):
        command = [sys.executable, REPO / "cleanrl" / f"{qdagger.__name__}.py", *flags, device_flag]
        before = len(logged_steps(tmp_path))
        run = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": PYTHONPATH})
        end = time.monotonic() + 100
        while run.poll() is None and time.monotonic() < end and len(logged_steps(tmp_path)) == before:
            time.sleep(1)
        run.terminate()
        assert run.wait(60) == 143
        assert len(logged_steps(tmp_path)) > before
        flags = ["--resume", only((tmp_path / "runs").iterdir())]
    steps = logged_steps(tmp_path)
    assert len(steps) == len(set(steps))
