"""Devices on a machine without a GPU, whose drivers and libraries are mocked; the CPU computes."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import dqn_atari
import dqn_atari_jax
import jax
import jax.numpy as jnp
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch

from cleanrl_utils import device
from cleanrl_utils.device import available_cores  # before a fixture replaces it
from cleanrl_utils.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
GB = 10**9


def run_code(code: str, **environ: str | None) -> subprocess.CompletedProcess:
    """Run Python code with changes of this environment; None removes a variable."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cleanrl")])} | environ
    environ = {name: value for name, value in environ.items() if value is not None}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)


def gpu_of_jax(capability: str, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Let JAX have a GPU; return the mock of its configuration."""
    gpu = SimpleNamespace(compute_capability=capability, platform="gpu", device_kind="a GPU")
    config = mock.Mock(jax_compilation_cache_dir=None)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setattr(jax, "config", config)
    return config


@pytest.mark.parametrize("library", ["PyTorch", "JAX"])
@pytest.mark.parametrize(("nvidia_smi", "wanted"), [(True, True), (True, False), (False, True)])
def test_warning_of_an_unused_gpu(
    library: str, nvidia_smi: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One line says that a GPU is not used, unless the user wants the CPU; another says which device is."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "" if wanted else "cpu")
    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}" if nvidia_smi else None)
    monkeypatch.setattr(device, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if library == "JAX":
        hardware = device.JaxHardware.choose(SimpleNamespace(bf16=True))
        assert (hardware.device.platform, hardware.dtype) == ("cpu", jnp.float32)
    else:
        hardware = device.TorchHardware.choose(qdagger.Args(cuda=wanted))
        assert hardware == (torch.device("cpu"), hardware.bf16, torch.channels_last, False)
    printed, error = capsys.readouterr()
    assert re.fullmatch("device: CPU, threads: .*\n", printed)
    assert re.fullmatch(f"WARNING: {library} can't use the NVIDIA GPU.*\n" if nvidia_smi and wanted else "", error)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        device.warn_of_unused_gpu(library)
    assert not capsys.readouterr().err, "the user has hidden it"


@pytest.mark.parametrize("capability", ["7.5", "8.0", "12.0", "gfx90a"])  # the last is an AMD GPU's
def test_hardware_of_a_gpu(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA GPUs have bfloat16 from compute capability 8.0 on; older ones are slow with channels last."""
    gpu_of_jax(capability, monkeypatch)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    has_bf16 = capability != "7.5"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch, "zeros", mock.MagicMock())
    memory_format = torch.channels_last if has_bf16 else torch.contiguous_format
    monkeypatch.setattr(torch, "set_num_threads", mock.Mock())
    for script, wanted in itertools.product((qdagger_jax, dqn_atari_jax), (True, False)):
        found = script.Hardware.choose(script.Args(bf16=wanted))
        assert found.dtype is (jnp.bfloat16 if has_bf16 and wanted else jnp.float32)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.92"
    for script, wanted in itertools.product((qdagger, dqn_atari), (True, False)):
        flags = script.Args(bf16=wanted, cuda_graph=wanted, torch_deterministic=wanted)
        assert script.Hardware.choose(flags) == (torch.device("cuda"), has_bf16 and wanted, memory_format, wanted)
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (wanted, not wanted)
    torch.set_num_threads.assert_called_with(1)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error:\nbusy"), AttributeError("a bug")], ids=["busy", "bug"])
def test_a_gpu_that_fails(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first computation on it ends in one line, before a run directory is made. A bug keeps its traceback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=error))
    monkeypatch.setattr(jax, "devices", mock.Mock(side_effect=error))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", mock.Mock())
    for script, message in ((dqn_atari, "the GPU can't compute: .*--no-cuda"), (dqn_atari_jax, "JAX can't start: ")):
        is_bug = isinstance(error, AttributeError)
        with pytest.raises(AttributeError if is_bug else UserError, match="a bug" if is_bug else message) as caught:
            script.main(script.Args())
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_bfloat16_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only processors with AVX512-BF16 use it: on ARM it was not tried."""
    for found in ({"avx512_bf16": True}, {"avx512_bf16": False}, {"architecture": "arm64", "bf16": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", mock.Mock(return_value=found))
        hardware = device.TorchHardware.choose(qdagger.Args(cuda=False))
        assert hardware.bf16 == (found == {"avx512_bf16": True})


def test_denormal_numbers_of_a_cpu() -> None:
    """They become 0: Adam's averages decay into them, and they are slow."""
    torch.set_flush_denormal(False)
    assert (torch.tensor([1e-38]) * 0.01).item() != 0
    device.TorchHardware.choose(qdagger.Args(cuda=False))
    assert (torch.tensor([1e-38]) * 0.01).item() == 0


def test_names_that_only_linux_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: no core affinity, control groups or mallopt."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(device, "Path", lambda path: tmp_path / "missing")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert available_cores() == os.cpu_count()
    assert 0 < device.available_host_memory() <= device.psutil.virtual_memory().total
    for without_mallopt in (mock.Mock(side_effect=OSError), lambda name: object()):
        monkeypatch.setattr(device.ctypes, "CDLL", without_mallopt)
        device.keep_freed_memory()


def test_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tightest limit counts, of the own group, one around it or OMP_NUM_THREADS. 1 GB of page cache makes room."""
    groups = tmp_path / "groups"
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    monkeypatch.setattr(device, "Path", lambda path: groups)
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: SimpleNamespace(available=50 * GB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    # None, version 1 of control groups, and a group without limits.
    for own_groups in (None, "5:cpu,memory:/user/job\n", "1:name=systemd:/user/job\n0::/slice/job\n"):
        if own_groups:
            groups.write_text(own_groups)
        assert (device.available_host_memory(), available_cores()) == (50 * GB, 16)
    for group, limit, quota, available, cores in (
        ("slice/job", "max", "max 100000\n", 50, 16),
        ("slice", 40 * GB, "1250000 100000\n", 32, 13),
        ("slice/job", 30 * GB, "450000 50000\n", 22, 9),
        ("", 20 * GB, "max 100000\n", 12, 9),  # the root, as a container sees its own group
    ):
        directory = tmp_path / group
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{9 * GB}\n")
        (directory / "memory.stat").write_text(f"file 8\ninactive_file {GB}\n")
        (directory / "cpu.max").write_text(quota)
        assert (device.available_host_memory(), available_cores()) == (available * GB, cores)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert available_cores() == 3


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 7.06 GB of a replay buffer of default size fit on a card of 12 GB, of which 1 GB is used."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10.5 * GB, 12 * GB))
    stats = {"bytes_limit": int(0.92 * 12 * GB), "bytes_in_use": GB}
    for gpu in (torch.device("cuda"), SimpleNamespace(memory_stats=lambda: stats)):
        assert 7.2 * GB < device.available_memory(gpu) < 9 * GB


def test_throughput(tmp_path: Path) -> None:
    """The benchmark measures all phases of a script and passes on its flags."""
    flags = "--teacher-steps 200 --offline-steps 200 --online-steps 300 --num-envs 8 --batch-size 1 "
    game = "BreakoutNoFrameskip-v4"  # with shorter episodes than Pong
    flags += f"--train-frequency 32 --env-id {game} --teacher-policy-hf-repo {ROOT}/teachers/{game}-dqn_atari-seed1"
    command = [sys.executable, ROOT / "benchmark" / "throughput.py", *flags.split()]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}  # on a busy machine, threads wait for each other
    run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^\| (.+?/s) \| ([\d.]+) \|$", run.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["teacher data, steps/s", "offline, updates/s", "online, steps/s"]
    assert all(float(speed) > 0 for _, speed in rows)


@pytest.mark.posix
def test_threads_of_jax() -> None:
    """XLA computes with as many threads as :func:`available_cores` returns."""
    code = "from cleanrl_utils import device\ndevice.available_cores = lambda: 5\n"
    code += "import types; device.JaxHardware.choose(types.SimpleNamespace(bf16=True))\n"
    code += "import jax; jax.numpy.ones((500, 500)) @ jax.numpy.ones((500, 500))\n"
    code += "names = [file.read_text() for file in device.Path('/proc/self/task').glob('*/comm')]\n"
    code += "print(names.count('tf_XLAEigen\\n'))"
    run = run_code(code, NPROC=None)
    assert run.stdout.endswith("\n5\n"), run.stderr
