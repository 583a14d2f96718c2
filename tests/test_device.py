"""Devices on a machine without a GPU, whose drivers and libraries are mocked; the CPU computes."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dqn_atari
import dqn_atari_jax
import jax
import jax.numpy as jnp
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from helpers import cpu, tiny, twin
from torch.nn.modules.module import register_module_forward_hook

from cleanrl_utils import device
from cleanrl_utils.benchmark import Job, run_locally
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
        hardware = device.set_up_jax(bf16=True)
        assert (hardware.device.platform, hardware.dtype) == ("cpu", jnp.float32)
    else:
        hardware = device.set_up_torch(cuda=wanted, bf16=True, cuda_graph=True)
        assert hardware == (torch.device("cpu"), hardware.bf16, torch.channels_last, False)
    printed, error = capsys.readouterr()
    assert re.fullmatch("device: CPU, threads: .*\n", printed)
    assert re.fullmatch(f"WARNING: {library} can't use the NVIDIA GPU.*\n" if nvidia_smi and wanted else "", error)
    for hidden in ("", "-1", "NoDevFiles"):  # the last is Slurm's
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        device.warn_of_unused_gpu(library)
    assert not capsys.readouterr().err, "the user or the cluster has hidden it"


@pytest.mark.parametrize("capability", ["7.5", "8.0", "12.0", "gfx90a"])  # the last is an AMD GPU's
def test_hardware_of_a_gpu(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA GPUs have bfloat16 from compute capability 8.0 on; older ones are slow with channels last."""
    gpu_of_jax(capability, monkeypatch)
    has_bf16 = capability != "7.5"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch, "zeros", mock.MagicMock())
    memory_format = torch.channels_last if has_bf16 else torch.contiguous_format
    monkeypatch.setattr(torch, "set_num_threads", mock.Mock())
    for script, wanted in itertools.product((qdagger_jax, dqn_atari_jax), (True, False)):
        found = script.choose_hardware(script.Args(bf16=wanted))
        assert found.dtype is (jnp.bfloat16 if has_bf16 and wanted else jnp.float32)
    for script, wanted in itertools.product((qdagger, dqn_atari), (True, False)):
        flags = script.Args(bf16=wanted, cuda_graph=wanted, torch_deterministic=wanted)
        assert script.choose_hardware(flags) == (torch.device("cuda"), has_bf16 and wanted, memory_format, wanted)
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (wanted, not wanted)
    torch.set_num_threads.assert_called_with(1)


@pytest.mark.usefixtures("small_networks", "no_evaluations")
@pytest.mark.parametrize("script", [qdagger, dqn_atari])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_networks_have_the_memory_format_of_the_device(
    script: Any, memory_format: torch.memory_format, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All convolutions of a run compute in it, those of the teacher too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "choose_hardware", lambda _: cpu(script)._replace(memory_format=memory_format))
    in_format = set()

    def note(layer: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        if isinstance(layer, torch.nn.Conv2d):
            in_format.add(output.is_contiguous(memory_format=memory_format))

    with register_module_forward_hook(note):
        script.main(twin(tiny(teacher), script))
    assert in_format == {True}


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


@pytest.mark.parametrize("xdg", ["/cache", ""])
def test_cache_of_a_user_without_home(xdg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_CACHE_HOME is enough for a cache of compiled programs; without it, there is none."""
    config = gpu_of_jax("9.0", monkeypatch)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and an entry in passwd
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    device.set_up_jax(bf16=True)
    caches = [value for name, value in (call.args for call in config.update.mock_calls) if "cache_dir" in name]
    assert caches == (["/cache/qdagger-jax"] if xdg else [])


def test_bfloat16_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only processors with AVX512-BF16 use it: on ARM it was not tried."""
    for found in ({"avx512_bf16": True}, {"avx512_bf16": False}, {"architecture": "arm64", "bf16": True}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", mock.Mock(return_value=found))
        hardware = device.set_up_torch(cuda=False, bf16=True, cuda_graph=False)
        assert hardware.bf16 == (found == {"avx512_bf16": True})


@pytest.mark.posix
def test_names_that_only_linux_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: no core affinity, control groups or mallopt; on ARM, /proc/cpuinfo does not name the CPU."""
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import throughput

    monkeypatch.setattr(sys, "platform", "darwin")
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    for module in (device, throughput):
        monkeypatch.setattr(module, "Path", lambda path: tmp_path / "missing")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(device.psutil, "RLIMIT_AS", raising=False)
    device.unbind_thread()
    assert available_cores() == os.cpu_count()
    assert 0 < device.available_host_memory() <= device.psutil.virtual_memory().total
    for without_mallopt in (mock.Mock(side_effect=OSError), lambda name: object()):
        monkeypatch.setattr(device.ctypes, "CDLL", without_mallopt)
        device.keep_freed_memory()
    (tmp_path / "missing").write_text("processor\t: 0\nCPU part\t: 0xd40\n")
    monkeypatch.setattr(throughput.platform, "processor", lambda: "")
    assert throughput.processor().endswith(f"cores of {throughput.platform.machine()}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    command = ["sh", "-c", "mkdir -p runs/a/finished && echo run directory: runs/a"]
    assert run_locally([Job("Pong", 1, "script.py", command)], workers=1) == 0


def test_jax_without_the_named_device() -> None:
    """JAX_PLATFORMS=cuda on a machine without CUDA ends in one line."""
    code = "from cleanrl_utils.device import *\ntry: set_up_jax(True)\nexcept UserError as error: print(error)"
    run = run_code(code, JAX_PLATFORMS="cuda")
    assert re.fullmatch(r"JAX can't start: .*JAX_PLATFORMS=cpu.*\n", run.stdout), run.stderr


def test_memory_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tightest limit counts: of the own control group or one around it. Its 1 GB of page cache makes room."""
    groups = tmp_path / "groups"
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    monkeypatch.setattr(device, "Path", lambda path: groups)
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: SimpleNamespace(available=50 * GB))
    assert device.available_host_memory() == 50 * GB  # without control groups
    groups.write_text("5:cpu,memory:/user/job\n")
    assert device.available_host_memory() == 50 * GB  # version 1 of control groups
    groups.write_text("1:name=systemd:/user/job\n0::/slice/job\n")
    assert device.available_host_memory() == 50 * GB  # without limits
    # The last one is the root, as a container sees its own group.
    for group, limit, available in (("slice/job", "max", 50), ("slice", 40, 32), ("slice/job", 30, 22), ("", 20, 12)):
        directory = tmp_path / group
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text("max\n" if limit == "max" else f"{limit * GB}\n")
        (directory / "memory.current").write_text(f"{9 * GB}\n")
        (directory / "memory.stat").write_text(f"file 8\ninactive_file {GB}\n")
        assert device.available_host_memory() == available * GB


@pytest.mark.skipif(not hasattr(device.psutil, "RLIMIT_AS"), reason="only on Linux")
@pytest.mark.parametrize("limit", ["-v", "-d"])
def test_memory_of_ulimit(limit: str) -> None:
    """What the process uses already, and what it will use beside a replay buffer, is not available."""
    code = "from cleanrl_utils.device import *; print(available_host_memory())"
    command = f"ulimit {limit} 4000000; {sys.executable} -c '{code}'"
    run = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert 0 < int(run.stdout) < 4_096_000_000 - device.ROOM_UNDER_LIMIT, run.stderr


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 7.06 GB of a replay buffer of default size fit on a card of 12 GB, in both backends."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11.5 * GB, 12 * GB))
    stats = {"bytes_limit": int(0.92 * 12 * GB), "bytes_in_use": 0}
    for gpu in (torch.device("cuda"), SimpleNamespace(memory_stats=lambda: stats)):
        assert 7.2 * GB < device.available_memory(gpu) < 10 * GB


def test_failed_capture_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the reason and the way to resume."""

    def function(x: torch.Tensor) -> torch.Tensor:
        if graph.calls > device.CudaGraph.EAGER_CALLS:
            raise RuntimeError("operation not permitted\nmore")
        return x + 1

    capture = mock.MagicMock()
    capture.return_value.__exit__.side_effect = RuntimeError("operation failed due to a previous error during capture")
    for name in ("CUDAGraph", "Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", capture)
    graph = device.CudaGraph(function, torch.Generator())
    assert [float(graph(i)) for i in range(3)] == [1, 2, 3]
    with pytest.raises(UserError, match=r"^[^\n]*operation not permitted\).*--no-cuda-graph.*--resume[^\n]*$"):
        graph(3)


@pytest.mark.parametrize("script", [qdagger_jax, dqn_atari_jax])
def test_update_lowers_for_cuda_without_scatters(script: Any) -> None:
    """Convolutions are in bfloat16, the last layer in full float32, and no slow scatter is in the update."""
    args = script.Args(batch_size=4)
    hardware = cpu(script, bf16=True)
    if script is qdagger_jax:
        student = script.Student(args, 6, hardware)
        ring = script.Replay(100, 2, 6, args.n_step, hardware).ring
        traced = student.compiled_gradient_steps.trace(student.state, ring, 0, 20, 1.0, 1e-4, 1e-4)
    else:
        agent = script.Agent(args, 6, hardware)
        ring = script.Replay(100, 2, args.n_step, hardware).ring
        traced = agent.compiled_gradient_step.trace(agent.state, ring, 0, 20)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.scatter" not in text
    convolutions = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert {"bf16" in line for line in convolutions} == {True}
    last = [line for line in text.splitlines() if "dot_general" in line and "x6xf32" in line]
    assert {"HIGHEST" in line for line in last if "bf16" not in line} == {True}


def test_throughput(tmp_path: Path) -> None:
    """The benchmark measures all phases of a script and passes on its flags."""
    flags = "--teacher-steps 200 --offline-steps 200 --online-steps 300 --num-envs 2 --batch-size 1 "
    flags += "--train-frequency 32"
    command = [sys.executable, ROOT / "benchmark" / "throughput.py", *flags.split()]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}  # on a busy machine, threads wait for each other
    run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^\| (.+?/s) \| ([\d.]+) \|$", run.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["teacher data, steps/s", "offline, updates/s", "online, steps/s"]
    assert all(float(speed) > 0 for _, speed in rows)


@pytest.mark.posix
def test_gpu_benchmark_without_a_gpu() -> None:
    """One line says so."""
    environ = os.environ | {"PYTHON": sys.executable}
    run = subprocess.run([ROOT / "benchmark" / "gpu.sh"], env=environ, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(r"error: neither PyTorch nor JAX .* can use a GPU; .*\n", run.stderr)


def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tightest limit counts: of the affinity, the CPU quotas around the process, or OMP_NUM_THREADS."""
    groups = tmp_path / "groups"
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    monkeypatch.setattr(device, "Path", lambda path: groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert available_cores() == 16  # without control groups
    groups.write_text("0::/slice/job\n")
    quotas = (("slice/job", "max 100000\n", 16), ("slice", "1250000 100000\n", 13), ("slice/job", "450000 50000\n", 9))
    for directory, quota, cores in quotas:
        (tmp_path / directory).mkdir(parents=True, exist_ok=True)
        (tmp_path / directory / "cpu.max").write_text(quota)
        assert available_cores() == cores
    for number in ("3", "3,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", number)
        assert available_cores() == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")
@pytest.mark.parametrize("places", ["threads", "{%d}"])
def test_bound_threads(places: str) -> None:
    """With OMP_PROC_BIND, PyTorch and the emulators use all cores of the process, unless OMP_PLACES names some."""
    cores = sorted(os.sched_getaffinity(0))
    code = "import os, torch\nfrom cleanrl_utils.device import *\nset_up_torch(False, False, False)\n"
    code += "print(available_cores(), sorted(os.sched_getaffinity(0)))"
    run = run_code(code, OMP_NUM_THREADS=None, OMP_PROC_BIND="true", OMP_PLACES=places.replace("%d", str(cores[-1])))
    expected = cores if places == "threads" else cores[-1:]
    assert run.stdout.endswith(f"\n{len(expected)} {expected}\n"), run.stderr


@pytest.mark.posix
def test_threads_of_jax() -> None:
    """XLA computes with as many threads as :func:`available_cores` returns."""
    code = "from cleanrl_utils import device\ndevice.available_cores = lambda: 5\ndevice.set_up_jax(True)\n"
    code += "import jax; jax.numpy.ones((500, 500)) @ jax.numpy.ones((500, 500))\n"
    code += "names = [file.read_text() for file in device.Path('/proc/self/task').glob('*/comm')]\n"
    code += "print(names.count('tf_XLAEigen\\n'))"
    run = run_code(code, NPROC=None)
    assert run.stdout.endswith("\n5\n"), run.stderr


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages")
@pytest.mark.parametrize("chosen", [{}, {"GOMP_SPINCOUNT": "7", "THP_MEM_ALLOC_ENABLE": "0"}])
@pytest.mark.parametrize("script", ["dqn_atari", "qdagger_dqn_atari_impalacnn"])
def test_settings_that_pytorch_reads_at_its_import(script: str, chosen: dict[str, str]) -> None:
    """GNU OpenMP has a limit of spins, and a large tensor is in huge pages, unless the user chose otherwise."""
    code = f"import {script}, torch; tensor = torch.ones(2**28, dtype=torch.uint8)\n"
    code += "print(' hg' in open('/proc/self/smaps').read())"
    default = {"GOMP_SPINCOUNT": None, "THP_MEM_ALLOC_ENABLE": None}
    run = run_code(code, OMP_DISPLAY_ENV="VERBOSE", **(default | chosen))
    assert run.stdout == f"{not chosen}\n", run.stderr
    if "GOMP" in run.stderr:  # PyTorch may have another OpenMP library
        assert f"GOMP_SPINCOUNT = '{chosen.get('GOMP_SPINCOUNT', '3000')}'" in run.stderr
