"""What needs an NVIDIA GPU: ``make test-gpu``. Everywhere else these tests are skipped, and counted as skipped."""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dqn_atari
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from test_cli import read_scalars, run_script, write_teacher

from cleanrl_utils import device
from cleanrl_utils.atari import Step

GAME, NUM_ACTIONS = "KlaxNoFrameskip-v4", 18
JAX_ON_GPU = os.environ.get("QDAGGER_TEST_GPU") == "1" and jax.default_backend() == "gpu"
needs_torch = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")
needs_jax = pytest.mark.skipif(not JAX_ON_GPU, reason="JAX sees no GPU")
pytestmark = pytest.mark.gpu

TINY = "--num-envs 4 --teacher-eval-episodes 1 --eval-episodes 1 --teacher-steps 200 --offline-steps 40 --end-e 0.8 "
TINY += "--offline-eval-frequency 40 --learning-starts 100 --buffer-size 1000 --batch-size 8 --env-id " + GAME


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """What a script sets, set back."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def learned(args: qdagger.Args, updates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and losses after so many single updates on random steps, and as often four in one call."""
    picked, autocast = device.pick_torch_device(args.cuda, args.bf16)
    learner = qdagger.make_learner(args, NUM_ACTIONS, picked)
    torch.manual_seed(2)
    replay = qdagger.Replay(64 * args.num_envs, NUM_ACTIONS, args, picked)
    device.fill_at_random(replay, NUM_ACTIONS)
    update = qdagger.make_update(learner, replay, autocast, args)
    # As offline and as online. A graph has float32 tensors of them, eager Python's numbers: these are the same in both.
    rates = [[2**-13 * (i + 1)] * due for i in range(updates) for due in (1, 4)]
    losses = [update(*replay.window, 0.5, *learning_rates).loss.clone() for learning_rates in rates]
    return torch.cat([parameter.detach().flatten() for parameter in learner[0].parameters()]), torch.stack(losses)


@needs_torch
@pytest.mark.parametrize("bf16", [False, True])
def test_graph_equals_eager(bf16: bool) -> None:
    """The same losses and weights to the last bit, with a learning rate that changes from one launch to the next."""
    weights, losses = learned(qdagger.Args(bf16=bf16, cuda_graph=True), 8)
    eager_weights, eager_losses = learned(qdagger.Args(bf16=bf16, cuda_graph=False), 8)
    torch.testing.assert_close(losses, eager_losses, rtol=0, atol=0)
    torch.testing.assert_close(weights, eager_weights, rtol=0, atol=0)


@needs_torch
def test_compiled_equals_eager() -> None:
    """To the rounding of float32; within a graph, as a run has it."""
    weights, losses = learned(qdagger.Args(bf16=False, compile=True), 6)
    eager_weights, eager_losses = learned(qdagger.Args(bf16=False, cuda_graph=False), 6)
    torch.testing.assert_close(losses, eager_losses, rtol=1e-2, atol=1e-3)
    assert torch.nn.functional.cosine_similarity(weights, eager_weights, dim=0) > 0.9999


@needs_torch
@pytest.mark.parametrize("script", [qdagger, dqn_atari])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradient_is_the_cpus(script: Any, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rehearsal compares; in float32 they are nearer than it asks for."""
    if not bf16:
        monkeypatch.setattr(device, "SAME_DIRECTION", 0.9999)
    script.rehearse(script.Args(bf16=bf16), NUM_ACTIONS)


@needs_torch
def test_rehearsal_finds_nothing_to_leave_out() -> None:
    """The flags stay as they are."""
    args = qdagger.Args()
    assert device.rehearsed(qdagger.rehearse, args, NUM_ACTIONS) == args


@needs_torch
def test_nothing_waits_for_the_gpu() -> None:
    """Neither an update nor a step's way into the replay: PyTorch raises at every synchronisation meanwhile."""
    args = qdagger.Args(num_envs=16)
    picked, autocast = device.pick_torch_device(args.cuda, args.bf16)
    learner = qdagger.make_learner(args, NUM_ACTIONS, picked)
    replay = qdagger.Replay(64 * 16, NUM_ACTIONS, args, picked)
    device.fill_at_random(replay, NUM_ACTIONS)
    update = qdagger.make_update(learner, replay, autocast, args)
    for _ in range(device.CudaGraph.CALLS_BEFORE + 1):
        update(*replay.window, 1.0, 1e-4)
    observation = torch.zeros((16, 4, 84, 84), dtype=torch.uint8, device=picked)
    zeros = np.zeros(16, bool)
    step = Step(np.zeros((16, 4, 84, 84), np.uint8), np.ones(16, np.int32), zeros, zeros, zeros, [])
    teacher_q_values = torch.zeros((16, NUM_ACTIONS), device=picked)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        update(*replay.window, 1.0, 1e-4)
        replay.add(observation, np.zeros(16, np.int64), step, teacher_q_values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_torch
def test_replay_beyond_2_31_elements() -> None:
    """What lies at the end of a ring of more bytes than an int32 counts comes back as it was written."""
    args = qdagger.Args(num_envs=4)
    replay = qdagger.Replay(2**31 // 7056 + 4000, 6, args, torch.device("cuda"))
    replay.ring.valid.fill_(True)
    replay.ring.age.fill_(100)
    replay.ring.terminated.fill_(False)
    replay.ring.frame[-8:] = torch.arange(8, device="cuda", dtype=torch.uint8)[:, None, None, None] + 1
    replay.steps_added = replay.length
    t = torch.full((2,), replay.length - 2, device="cuda")
    batch = replay.batch(t, torch.tensor([0, 3], device="cuda"))
    assert batch.observation[:, :, 0, 0].tolist() == [[4, 5, 6, 7]] * 2
    assert batch.bootstrap_observation[:, :, 83, 83].tolist() == [[5, 6, 7, 8]] * 2
    sampled = replay.sample(32, replay.length - 3, replay.length - 1, torch.Generator("cuda").manual_seed(1))
    assert sampled.observation[:, 3].min() >= 6


@needs_jax
def test_jax_replay_beyond_2_31_elements() -> None:
    """The same in JAX, whose indices are int32."""
    args = qdagger_jax.Args(num_envs=4)
    replay = qdagger_jax.Replay(2**31 // 7056 + 4000, 6, args)
    frame = replay.ring.frame.at[-8:].set((jnp.arange(8, dtype=jnp.uint8) + 1)[:, None, None, None])
    ring = replay.ring._replace(
        frame=frame, valid=jnp.ones_like(replay.ring.valid), age=jnp.full_like(replay.ring.age, 100)
    )
    t, env = jnp.full((2,), replay.length - 2), jnp.array([0, 3])
    batch = qdagger_jax.transitions(ring, t, env, 1, 0.99)
    assert batch.observation[:, :, 0, 0].tolist() == [[4, 5, 6, 7]] * 2
    assert batch.bootstrap_observation[:, :, 83, 83].tolist() == [[5, 6, 7, 8]] * 2


@needs_jax
def test_jax_gradient_is_the_cpus() -> None:
    """In both precisions."""
    for dtype in (jnp.float32, jnp.bfloat16):
        qdagger_jax.rehearse(qdagger_jax.Args(), NUM_ACTIONS, dtype)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a teacher of the game."""
    return write_teacher(tmp_path_factory.mktemp("teacher"))


def run(script: str, folder: Path, *flags: object) -> str:
    """Runs a script to its end and returns what it printed."""
    result = run_script(script, folder, *flags)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("qdagger_dqn_atari_impalacnn", marks=needs_torch),
        pytest.param("qdagger_dqn_atari_jax_impalacnn", marks=needs_jax),
    ],
)
def test_small_run(script: str, teacher: Path, tmp_path: Path) -> None:
    """All phases; one of the first lines says what computes."""
    flags = ["--teacher-policy-hf-repo", teacher, "--teacher-model-exp-name", "dqn_atari", *TINY.split()]
    printed = run(script, tmp_path, *flags, "--total-timesteps", 400)
    (computes,) = (line for line in printed.splitlines()[:3] if line.startswith("device: "))
    assert "CPU" not in computes
    scalars = read_scalars(next((tmp_path / "runs").iterdir()))
    assert all(np.isfinite(value) for _, value in scalars["losses/loss"])


@needs_torch
def test_from_cpu_to_gpu_and_back(teacher: Path, tmp_path: Path) -> None:
    """A run goes on wherever it is resumed: CPU, GPU, CPU; every step is logged once."""
    script = "qdagger_dqn_atari_impalacnn"
    endless = ["--teacher-policy-hf-repo", teacher, *TINY.split(), "--total-timesteps", 10**7]
    run(script, tmp_path, *endless, "--no-cuda", "--max-minutes", 0.1)
    (run_dir,) = (tmp_path / "runs").iterdir()
    run(script, tmp_path, "--resume", run_dir, "--cuda", "--max-minutes", 0.4)
    total = json.loads((run_dir / "progress.json").read_text())["done"] // 100 * 100 + 400
    run(script, tmp_path, "--resume", run_dir, "--no-cuda", "--max-minutes", 0, "--total-timesteps", total)
    steps = [step for step, _ in read_scalars(run_dir)["charts/epsilon"]]
    assert len(steps) == len(set(steps)) == total // 100


@needs_torch
def test_optimizer_goes_to_the_gpu_and_back() -> None:
    """Adam's averages keep the memory layout of their parameter, its settings are those of the device."""
    from cleanrl_utils import checkpoint

    args = qdagger.Args()
    learners = {}
    for name in ("cpu", "cuda"):
        network, _, optimizer, _ = qdagger.make_learner(args, NUM_ACTIONS, torch.device(name))
        network(torch.zeros((1, 4, 84, 84), dtype=torch.uint8, device=name)).sum().backward()
        optimizer.step()
        learners[name] = network, optimizer
    before = copy.deepcopy(learners["cpu"][1].state_dict()["state"])
    for source, target in (("cpu", "cuda"), ("cuda", "cpu")):
        checkpoint.load(learners[target][1], checkpoint.dump(learners[source][1], "optimizer"))
        checkpoint.load(learners[target][0], checkpoint.dump(learners[source][0], "q_network"))
        assert learners[target][1].param_groups[0]["capturable"] == (target == "cuda")
    for index, state in learners["cpu"][1].state_dict()["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(value, before[index][key], rtol=0, atol=0)
            assert value.stride() == before[index][key].stride()
