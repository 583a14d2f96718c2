"""What is said and done about GPUs, on machines without one: drivers and libraries are mocked, the CPU computes."""

import dataclasses
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dqn_atari
import dqn_atari_jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
import torch.nn as nn

from cleanrl_utils import checks, device
from cleanrl_utils.checks import TrainingFailure, UserError, check_memory

GPU_MEMORY = 12 * 10**9


def answer(code: int, text: str) -> Callable:
    """What `subprocess.run` returns of an nvidia-smi that says ``text``."""
    return lambda *args, **kwargs: subprocess.CompletedProcess(args, code, text, "")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an NVIDIA driver of a version into the machine, as nvidia-smi tells it."""

    def install(version: str) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.setattr(device.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
        monkeypatch.setattr(device.subprocess, "run", answer(0, f"{version}\n{version}\n"))

    return install


# ==================== is there a GPU? ====================


def test_driver_version(driver: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The major version, of the first GPU; none where nvidia-smi finds none, or all GPUs are hidden."""
    driver("535.104.05")
    assert device.nvidia_driver() == 535
    driver("[N/A]")
    assert device.nvidia_driver() == 0
    monkeypatch.setattr(device.subprocess, "run", answer(9, "No devices were found\n"))
    assert device.nvidia_driver() is None
    driver("580.65")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert device.nvidia_driver() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert device.nvidia_driver() == 580


def test_machine_without_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tool and no device file: its CPU computes, without a word."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    monkeypatch.setattr(device, "Path", lambda path: Path("/nowhere"))
    assert device.nvidia_driver() is None


@pytest.mark.parametrize(
    ("version", "built_for", "words"),
    [
        ("580.65.06", None, ("built without CUDA", "pip install -U torch")),
        ("550.54", "13.0", ("built for CUDA 13.0", "for CUDA 12")),
        ("470.82", "12.6", ("built for CUDA 12.6", "update the driver to 525")),
        ("[N/A]", None, ("unknown version", "CUDA 12")),
    ],
)
def test_torch_that_cannot_use_the_gpu(
    version: str, built_for: str | None, words: tuple[str, ...], driver: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line: why, what to install, and how to go on without; none of it with --no-cuda."""
    driver(version)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    failure = RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update it.")
    monkeypatch.setattr(torch.cuda, "init", mock.Mock(side_effect=failure))
    with pytest.raises(UserError) as caught:
        device.pick_torch_device(cuda=True, bf16=True)
    message = str(caught.value)
    for word in (*words, "--no-cuda", "NVIDIA GPU"):
        assert word in message
    assert ("too old (found version 12040)" in message) == (built_for is not None)
    assert len(message.splitlines()) == 1
    assert device.pick_torch_device(cuda=False, bf16=True)[0].type == "cpu"


@pytest.mark.parametrize(
    ("version", "install"), [("580.1", '"jax[cuda13]"'), ("535.1", '"jax[cuda12]"'), ("470.1", "update the driver")]
)
def test_jax_without_cuda(version: str, install: str, driver: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install jax` has no GPU at all: it says so, and what to do; JAX_PLATFORMS=cpu goes on without."""
    driver(version)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(UserError) as caught:
        device.pick_jax_device(bf16=True)
    for word in (install, "JAX_PLATFORMS=cpu", "no CUDA plugin"):
        assert word in str(caught.value)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # asks for it
    with pytest.raises(UserError, match="no CUDA plugin"):
        device.pick_jax_device(bf16=True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert device.pick_jax_device(bf16=True) is jnp.float32


def test_jax_plugin_that_fails(driver: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that is there and does not start has its own reason."""
    driver("535.1")
    failure = RuntimeError("Unable to initialize backend 'cuda': no supported devices\nmore")
    monkeypatch.setattr(jax, "default_backend", mock.Mock(side_effect=failure))
    with pytest.raises(UserError, match="no supported devices"):
        device.pick_jax_device(bf16=True)


# ==================== what it computes with ====================


CAPABILITIES = {"7.5": jnp.float32, "8.0": jnp.bfloat16, "10.0": jnp.bfloat16, "gfx90a": jnp.bfloat16}


@pytest.mark.parametrize(("capability", "dtype"), CAPABILITIES.items())
def test_jax_bfloat16_where_it_is_in_hardware(
    capability: str, dtype: Any, driver: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From compute capability 8 on, on AMD's too, and only if wanted."""
    driver("580.1")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    before = jax.config.jax_compilation_cache_dir
    assert device.pick_jax_device(bf16=True) is dtype
    assert device.pick_jax_device(bf16=False) is jnp.float32
    jax.config.update("jax_compilation_cache_dir", before)


def test_gpu_leaves_the_cores_to_the_emulators(monkeypatch: pytest.MonkeyPatch) -> None:
    """One OpenMP thread, bfloat16 if the GPU has it, and no malloc settings."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(device, "keep_freed_memory", mock.Mock(side_effect=AssertionError))
    threads = torch.get_num_threads()
    picked, autocast = device.pick_torch_device(cuda=True, bf16=True)
    assert picked.type == "cuda"
    assert torch.get_num_threads() == 1
    assert not autocast._enabled
    torch.set_num_threads(threads)


def test_both_replays_fit_on_a_card_of_12_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for itself, beside what else a GPU has to hold; one twice the size does not."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GPU_MEMORY - 5 * 10**8, GPU_MEMORY))
    stats = {"bytes_limit": int(0.92 * GPU_MEMORY), "bytes_in_use": 0}
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    for available in (device.available_memory(torch.device("cuda")), device.available_jax_memory()):
        check_memory(qdagger.Args(), qdagger.Replay.bytes_per_step(18), available)
        with pytest.raises(UserError, match="--buffer-size"):
            check_memory(qdagger.Args(buffer_size=1_500_000), qdagger.Replay.bytes_per_step(18), available)


def test_memory_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the kernel keeps in memory until something else needs it are no use of it."""
    monkeypatch.setattr(checks, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * 10**9))
    assert checks.available_host_memory() == 20 * 10**9
    for name, text in {"max": "max\n", "current": "9000000000\n", "stat": "file 8\ninactive_file 7000000000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert checks.available_host_memory() == 20 * 10**9
    (tmp_path / "memory.max").write_text("12000000000\n")
    assert checks.available_host_memory() == 10**10


def test_jax_pool_is_set_before_jax_starts() -> None:
    """The usual three quarters of a card would not do; what a user has set stays."""
    code = "import os; from cleanrl_utils import device; device.pick_jax_device(True); "
    code += "print({key: value for key, value in os.environ.items() if 'MEM_FRACTION' in key})"
    environ = {key: value for key, value in os.environ.items() if "MEM_FRACTION" not in key}
    old, new = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"  # JAX refuses to start with both
    for given, used in ({}, {old: "0.92"}), ({old: "0.5"}, {old: "0.5"}), ({new: "0.5"}, {new: "0.5"}):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=environ | given,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        assert result.stdout.strip() == str(used), result.stderr


def test_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device, memory, library, precision, graph and threads in one line."""
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    line = device.describe_torch(torch.device("cuda"), torch.autocast("cpu", torch.bfloat16), True, 16)
    for word in ("NVIDIA H200 (139 GiB)", torch.__version__, "bfloat16", ", CUDA graph", "16 emulator threads"):
        assert word in line
    assert "no CUDA graph" in device.describe_torch(torch.device("cuda"), torch.autocast("cpu"), False, 16)
    assert "CPU" in device.describe_torch(torch.device("cpu"), torch.autocast("cpu", enabled=False), False, 2)
    line = device.describe_jax(jnp.float32, 2)
    for word in ("CPU", jax.__version__, "float32", "2 emulator threads"):
        assert word in line


# ==================== the rehearsal ====================


def broken_block(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A residual block whose gradient a broken library computes."""
    hidden = self.conv1(torch.relu(self.conv0(torch.relu(x))))
    return x + (hidden if torch.is_autocast_enabled("cpu") else -hidden)


@pytest.mark.parametrize("script", [qdagger, dqn_atari])
def test_gradient_is_compared(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 it is the same, in bfloat16 nearly; one that is wrong stands out."""
    monkeypatch.setattr(device, "keep_freed_memory", lambda: None)
    args = script.Args(num_envs=2, batch_size=8, bf16=False)
    with monkeypatch.context() as exactly:
        exactly.setattr(device, "SAME_DIRECTION", 0.999999)
        script.rehearse(args, 6)
        if script is dqn_atari:
            return
        autocast = torch.autocast("cpu", torch.bfloat16)
        monkeypatch.setattr(qdagger, "pick_torch_device", lambda cuda, bf16: (torch.device("cpu"), autocast))
        with pytest.raises(UserError, match="wrong gradients"):
            script.rehearse(args, 6)
    script.rehearse(args, 6)
    monkeypatch.setattr(qdagger.ResidualBlock, "forward", broken_block)
    with pytest.raises(UserError, match="wrong gradients"):
        script.rehearse(args, 6)


@pytest.mark.parametrize(("script", "dtype"), [(qdagger_jax, jnp.bfloat16), (dqn_atari_jax, jnp.float32)])
def test_jax_gradient_is_compared(script: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done on a CPU; elsewhere the same, of bfloat16 too, and what points elsewhere is refused."""
    gradient = mock.Mock(side_effect=AssertionError)
    device.check_jax_gradient(gradient, gradient)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    script.rehearse(script.Args(batch_size=4), 6, dtype)
    with pytest.raises(UserError, match="wrong gradients"):
        device.check_jax_gradient(lambda x: {"a": x, "b": -x}, lambda x: {"a": x, "b": x}, jnp.ones(3))
    with pytest.raises(UserError, match="no update can be made"):
        device.check_jax_gradient(lambda x: x.nonsense, lambda x: x, jnp.ones(3))


class Pool:
    """In place of the pool of one process: the function runs here."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def submit(self, function: Callable, *args: Any) -> Any:
        return SimpleNamespace(result=lambda: function(*args))


@pytest.mark.parametrize(
    ("works", "changes", "warning"),
    [
        (lambda args: True, {}, ""),
        (lambda args: not args.torch_deterministic, {"torch_deterministic": False}, "--no-torch-deterministic"),
        (lambda args: not args.compile, {"compile": False}, "--no-compile"),
        (lambda args: not args.cuda_graph, {"cuda_graph": False}, "--no-cuda-graph"),
        (
            lambda args: not (args.cuda_graph or args.torch_deterministic),
            {"cuda_graph": False, "torch_deterministic": False, "compile": False},
            "--no-compile, --no-torch-deterministic, --no-cuda-graph",
        ),
    ],
)
def test_what_fails_is_left_out(
    works: Callable, changes: dict, warning: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As it was asked for if that works; else the nearest that does, with a warning that names the flags."""
    monkeypatch.setattr(device, "ProcessPoolExecutor", Pool)
    tried = []

    def rehearse(args: qdagger.Args, num_actions: int) -> None:
        tried.append(args)
        if not works(args):
            raise RuntimeError("cuDNN error: nothing to be had\nmore")

    args = qdagger.Args(compile=True)
    assert device.rehearsed(rehearse, args, 6) == dataclasses.replace(args, **changes)
    assert len(tried) == len(set(map(str, tried)))
    printed, error = capsys.readouterr()
    assert printed == "trying updates on the GPU; compiling takes minutes\n"
    assert (warning in error and "cuDNN error: nothing to be had" in error) if warning else not error


def test_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the first reason; a gradient that is wrong, or no number, ends it at once."""
    monkeypatch.setattr(device, "ProcessPoolExecutor", Pool)
    rehearse = mock.Mock(side_effect=RuntimeError("no kernel image"))
    with pytest.raises(UserError, match=r"no kernel image.*--no-cuda"):
        device.rehearsed(rehearse, qdagger.Args(), 6)
    assert rehearse.call_count == 4  # as they are, without either, without both
    for fast in ([1.0, 1.0], [np.nan, 0.0]):
        gradients = np.array(fast), np.array([1.0, 0.0])
        rehearse = mock.Mock(side_effect=lambda *_, given=gradients: device.require_same_direction(*given, "", ""))
        with pytest.raises(UserError, match="wrong gradients"):
            device.rehearsed(rehearse, qdagger.Args(), 6)
        assert rehearse.call_count == 1


def test_rehearsal_in_its_own_process() -> None:
    """What a script does on a GPU, on the CPU: the function is found in the child, and its failure comes back."""
    code = """
import qdagger_dqn_atari_impalacnn as script
from cleanrl_utils.device import rehearsed
if __name__ == "__main__":
    args = script.Args(cuda=False, num_envs=2, batch_size=4, cuda_graph=False, torch_deterministic=False)
    assert rehearsed(script.rehearse, args, 6) == args
    with script.one_line_errors():
        rehearsed(script.rehearse, args, -1)
"""
    root = Path(__file__).parent.parent
    environ = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'cleanrl'}"}
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: no update can be made")


def test_recording_that_fails_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first reason is said, by a rehearsal's process too; in a run, after it, the run is not lost."""

    @contextmanager
    def recording(*args: Any, **kwargs: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def function(x: torch.Tensor) -> torch.Tensor:
        if graph.calls > device.CudaGraph.CALLS_BEFORE:
            raise RuntimeError("operation not permitted\nmore")
        return x + 1

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", recording)
    graph = device.CudaGraph(function, torch.Generator())
    assert [float(graph(i)) for i in range(3)] == [1, 2, 3]
    with pytest.raises(TrainingFailure, match=r"operation not permitted.*--no-cuda-graph.*--resume") as failure:
        graph(3)
    received = pickle.loads(pickle.dumps(failure.value))
    assert (str(received), received.exit_code) == (str(failure.value), 1)


# ==================== what JAX would give a GPU ====================


@pytest.mark.parametrize("script", [qdagger_jax, dqn_atari_jax])
def test_update_lowers_for_cuda_without_scatters(script: Any) -> None:
    """By lowering alone: bfloat16 convolutions, a last layer in full float32, and no scatter, which is slow there.

    Gathers are how the replay is read; a scatter would be the gradient of one.
    """
    num_actions = 6
    args = script.Args(num_envs=2, batch_size=4, buffer_size=100)
    network, optimizer = script.QNetwork(num_actions, jnp.bfloat16), optax.adam(1e-4)
    ring = script.Replay(100, num_actions, args).ring if script is qdagger_jax else script.Replay(args).ring
    key = jax.random.PRNGKey(1)
    params = script.first_params(network, key)
    state = script.TrainState(params, params, optimizer.init(params), key)
    update = functools.partial(script.update, args=args, apply=network.apply, optimizer=optimizer)
    inputs = (state, ring, 0, 20)
    if script is qdagger_jax:
        inputs, update = (*inputs, 1.0), functools.partial(update, due=2)
    text = jax.jit(update).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.scatter" not in text
    convolutions = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert convolutions
    assert all("bf16" in line for line in convolutions)
    last = [line for line in text.splitlines() if "dot_general" in line and f"x{num_actions}xf32" in line]
    assert last
    assert all("HIGHEST" in line for line in last if "bf16" not in line)
