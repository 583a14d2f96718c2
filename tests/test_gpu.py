"""Tests that need an NVIDIA GPU: ``make test-gpu``. They are skipped elsewhere."""

import copy
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
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
    random_step,
    read_scalars,
    results,
    run_script,
    tiny,
    torch_losses,
    write_teacher,
)

from cleanrl_utils import device

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


def make_student(hardware: qdagger.Hardware, **flags: bool) -> tuple[qdagger.Student, qdagger.Replay]:
    """Make a student of fixed seed and a replay buffer of random steps."""
    args = qdagger.Args(**flags)
    replay = qdagger.Replay(64 * args.num_envs, args.num_envs, NUM_ACTIONS, args.n_step, hardware)
    rng = np.random.default_rng(1)
    for _ in range(64):
        replay.add(*random_step(qdagger, rng, args.num_envs, NUM_ACTIONS))
    return qdagger.Student(args, NUM_ACTIONS, hardware), replay


@needs_torch
def test_compiled_equals_eager() -> None:
    """The losses of 30 updates are equal, up to what Adam makes of the rounding of float32."""
    outcomes = []
    for flags in ({"compile": True}, {"cuda_graph": False}):
        student, replay = make_student(qdagger.Hardware.choose(qdagger.Args(bf16=False, **flags)), bf16=False, **flags)
        rates = [[2**-13 * (i + 1)] * due for i in range(6) for due in (1, 4)]
        losses = [student.update(replay, 0.5, learning_rates).loss.clone() for learning_rates in rates]
        outcomes.append(torch.stack(losses))
    torch.testing.assert_close(*outcomes, rtol=1e-2, atol=1e-3)


@needs_torch
@pytest.mark.parametrize("bf16", [False, True])
def test_gradient_equals_the_one_of_the_cpu(bf16: bool) -> None:
    """The direction is the same, up to the rounding of the precision."""
    on_cpu = qdagger.Hardware(torch.device("cpu"), False, torch.contiguous_format)
    student, replay = make_student(on_cpu, num_envs=4)
    steps = replay.sampled_steps()
    batch = qdagger.sample(replay.ring, steps.start, steps.stop, 32, student.generator, 1, 0.99)
    gradients = []
    for device_name, memory_format in (("cpu", torch.contiguous_format), ("cuda", torch.channels_last)):
        network = copy.deepcopy(student.q_network).to(device_name, memory_format=memory_format)
        on_device = qdagger.Batch(*(array.to(device_name) for array in batch))
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            torch_losses(qdagger, network, network, on_device, 1.0, 0.1).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten().cpu() for parameter in network.parameters()]))
    assert F.cosine_similarity(*gradients, dim=0) > (0.99 if bf16 else 0.9999)


@needs_torch
def test_nothing_synchronises_with_the_gpu() -> None:
    """Neither an update nor adding a step does: PyTorch raises an error at a synchronisation."""
    student, replay = make_student(qdagger.Hardware.choose(qdagger.Args()))
    for _ in range(device.CudaGraph.EAGER_CALLS + 1):
        student.update(replay, 0.5, [1e-4])
    step = random_step(qdagger, np.random.default_rng(2), 16, NUM_ACTIONS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        student.update(replay, 1.0, [2e-4])
        replay.add(*step)
        student.update_target(0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("script", SCRIPTS)
def test_replay_beyond_2_31_bytes(script: Any) -> None:
    """The end of a replay buffer of more bytes than an int32 counts is read correctly."""
    replay = script.Replay(2**31 // 7056 + 4000, 4, 6, 1, script.Hardware.choose(script.Args()))
    frames = np.broadcast_to(np.arange(1, 9, dtype=np.uint8)[:, None, None, None], (8, 4, 84, 84))
    last = {"frame": frames, "action": np.zeros((8, 4), np.uint8), "reward": np.zeros((8, 4), np.float32)}
    last |= {"terminated": np.zeros((8, 4), bool), "age": np.full((8, 4), 100, np.int32)}
    last |= {"valid": np.ones((8, 4), bool), "teacher_q_values": np.zeros((8, 4, 6), np.float32)}
    replay.write(replay.length - 8, {name: array.copy() for name, array in last.items()})
    t = np.full(2, replay.length - 2)
    env = np.array([0, 3])
    if script is qdagger:
        t = torch.tensor(t, device="cuda")
        env = torch.tensor(env, device="cuda")
    batch = script.transitions_at(replay.ring, t, env, 1, 0.99)
    assert batch.observation[:, :, 0, 0].tolist() == [[4, 5, 6, 7]] * 2
    assert batch.bootstrap_observation[:, :, 83, 83].tolist() == [[5, 6, 7, 8]] * 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_small_run(script: Any, tmp_path: Path) -> None:
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
    assert outcomes[1] == outcomes[0]
    assert outcomes[2] == outcomes[0]


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
