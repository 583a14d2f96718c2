"""Devices: selection, precision, memory, CUDA graphs. Functions import PyTorch or JAX, as a script has only one."""

import contextlib
import ctypes
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from cleanrl_utils.errors import UserError, user_errors, warn

if TYPE_CHECKING:
    import numpy as np
    import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8  # from malloc.h
CGROUP = Path("/sys/fs/cgroup")
ROOM_BESIDE_REPLAY = 2_000_000_000  # bytes for graphs, cuDNN's work spaces, weights and batches on a GPU, an estimate


def warn_of_unused_gpu(library: str) -> None:
    """Print a warning where the machine has an NVIDIA GPU that ``library`` can't use."""
    if shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        warn(f"{library} can't use the NVIDIA GPU and computes on the CPU; install its build for the GPU's driver")


def available_memory(device: Any) -> int:
    """Return the bytes that a replay buffer may take on a device of PyTorch or JAX."""
    if getattr(device, "type", "") == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0] - ROOM_BESIDE_REPLAY
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None  # of a device of JAX; None on a CPU
    if not stats:
        return available_host_memory()
    return stats["bytes_limit"] - stats["bytes_in_use"] - ROOM_BESIDE_REPLAY


def available_host_memory() -> int:
    """Return the bytes of memory that this process can still allocate, within its control groups."""
    available = [psutil.virtual_memory().available]
    for limit, usage, *stat in control_groups("memory.max", "memory.current", "memory.stat"):
        if limit != "max":
            # The page cache, for example of a checkpoint that was just written, makes room on demand.
            cached = dict(zip(stat[::2], stat[1::2], strict=True))["inactive_file"]
            available.append(int(limit) - int(usage) + int(cached))
    return min(available)


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, within its CPU quota and OMP_NUM_THREADS."""
    cores = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    cores += [math.ceil(int(quota) / int(period)) for quota, period in control_groups("cpu.max") if quota != "max"]
    cores += map(int, re.findall(r"^[1-9]\d*", os.environ.get("OMP_NUM_THREADS", "")))  # of a list, the first
    return min(cores)


def control_groups(*names: str) -> Iterator[list[str]]:
    """Yield the words in files of these names, for the control group of this process and each of its parents."""
    groups = Path("/proc/self/cgroup")
    own = re.search("^0::/(.*)$", groups.read_text(), re.MULTILINE) if groups.exists() else None
    directory = CGROUP / own[1] if own else CGROUP.parent  # Linux before version 2 of control groups, or another system
    while directory != CGROUP.parent:
        with contextlib.suppress(OSError):  # a group without limits has no such files
            yield " ".join((directory / name).read_text() for name in names).split()
        directory = directory.parent


class TorchHardware(NamedTuple):
    """Where and how PyTorch's networks compute."""

    device: "torch.device"
    bf16: bool  # whether forward passes compute in bfloat16
    memory_format: "torch.memory_format"  # in which convolutions are fastest
    cuda_graph: bool  # whether functions run as CUDA graphs

    @classmethod
    def choose(cls, args: Any) -> "TorchHardware":
        """Choose and print device and precision; set PyTorch's algorithms, threads and handling of memory.

        ``args`` has the flags `torch_deterministic`, `cuda`, `cuda_graph` and `bf16`. Forward passes compute in
        bfloat16 if the hardware has it. Only a GPU has CUDA graphs.
        """
        import torch

        torch.backends.cudnn.deterministic = args.torch_deterministic
        torch.backends.cudnn.benchmark = not args.torch_deterministic
        if args.cuda and torch.cuda.is_available():
            # The host has little to compute, and more threads would compete with those of the emulators.
            torch.set_num_threads(1)
            device = torch.device("cuda")
            with user_errors("the GPU can't compute", "add --no-cuda or set CUDA_VISIBLE_DEVICES=", RuntimeError):
                torch.zeros(1, device=device).cos().item()  # fails if the GPU is busy, or too old for this build
            in_hardware = torch.cuda.is_bf16_supported(including_emulation=False)
            # A GPU without bfloat16 has no TF32, and float32 is slow with channels last.
            memory_format = torch.channels_last if in_hardware else torch.contiguous_format
            name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
        else:
            if args.cuda:
                warn_of_unused_gpu("PyTorch")
            # Adam's averages of gradients that became zero decay into denormal numbers, which are a hundred times
            # slower. Threads inherit the setting, so it comes before the first parallel region.
            torch.set_flush_denormal(True)
            torch.set_num_threads(available_cores())
            keep_freed_memory()
            device = torch.device("cpu")
            memory_format = torch.channels_last
            in_hardware = torch.cpu.get_capabilities().get("avx512_bf16", False)  # ARM processors lack the key
            name = f"CPU, threads: {torch.get_num_threads()}"
        bf16 = args.bf16 and in_hardware
        print(f"device: {name}; PyTorch {torch.__version__}, {'bfloat16' if bf16 else 'float32'}", flush=True)
        return cls(device, bf16, memory_format, args.cuda_graph and device.type == "cuda")


class JaxHardware(NamedTuple):
    """Where and how JAX's networks compute."""

    device: Any
    dtype: Any  # of hidden layers

    @classmethod
    def choose(cls, args: Any) -> "JaxHardware":
        """Choose and print device and precision; set JAX's memory, threads and cache of compiled programs.

        With the flag `bf16`, hidden layers compute in bfloat16 if a GPU or TPU has it: XLA has no fast bfloat16
        convolution for a CPU. Call it before anything else of JAX; it raises a UserError if JAX has no device that
        JAX_PLATFORMS names.
        """
        import jax
        import jax.numpy as jnp

        if not shutil.which("nvidia-smi"):  # with a GPU, it would slow XLA's compiler
            keep_freed_memory()
        # The replay buffer of default size is one array of 7 GB. The usual 75 % of a 12 GB card leave no room for it.
        if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name; JAX refuses both at once
            os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
        os.environ.setdefault("NPROC", str(available_cores()))  # XLA's threads on a CPU
        # On a CPU another thread would compute on the same cores, and the hand-over takes time.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        with user_errors("JAX can't start", "set JAX_PLATFORMS=cpu", (RuntimeError, AssertionError)):  # no GPU
            device = jax.devices()[0]
        if device.platform == "cpu":
            if not os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
                warn_of_unused_gpu("JAX")
            name = f"CPU, threads: {available_cores()}"
        else:
            name = device.device_kind
            # Compiling takes minutes for a GPU. It takes seconds for a CPU, where code of another processor may fail.
            if jax.config.jax_compilation_cache_dir is None:
                jax.config.update("jax_compilation_cache_dir", os.path.expanduser("~/.cache/qdagger-jax"))
        capability = str(getattr(device, "compute_capability", ""))  # "7.5"; an AMD GPU has a name, a TPU has none
        in_hardware = device.platform != "cpu" and not re.match(r"[1-7]\.", capability)
        dtype = jnp.bfloat16 if args.bf16 and in_hardware else jnp.float32
        print(f"device: {name}; JAX {jax.__version__}, {dtype.__name__}", flush=True)
        return cls(device, dtype)


def to_device(array: "np.ndarray", device: "torch.device") -> "torch.Tensor":
    """Return an array as a tensor on a device: on a CPU with the same memory, on a GPU as an asynchronous copy."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class CudaGraph:
    """A function that a GPU runs as one CUDA graph instead of hundreds of kernels that Python launches one by one.

    The first calls run eagerly, as libraries initialise themselves in them. The next call captures the graph. It and
    all later ones replay it, with the same results and random numbers of ``generator``. Arguments are numbers, which
    the function gets as tensors (int64 or float32), and tensors on the GPU, which are copied. The function must not
    synchronise with the GPU, and returns tensors that later calls overwrite.
    """

    EAGER_CALLS = 3

    def __init__(self, function: Callable[..., Any], generator: "torch.Generator"):
        import torch

        self.function = function
        self.device = generator.device
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream()
        if torch.__version__ < "2.14":  # newer versions register it by themselves
            self.graph.register_generator_state(generator)  # or every replay would draw the same numbers
        self.calls = 0

    def __call__(self, *inputs: "float | torch.Tensor") -> Any:
        import torch

        self.calls += 1
        if self.calls <= self.EAGER_CALLS + 1:
            # Cloned: a graph reads the memory of the arguments that it was captured with.
            self.inputs = [torch.as_tensor(value, device=self.device).clone() for value in inputs]
        if self.calls <= self.EAGER_CALLS:
            # On a side stream, as the capture will be: work on the default stream could not be captured later.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.function(*self.inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.calls == self.EAGER_CALLS + 1:
            try:
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self.result = self.function(*self.inputs)
            except RuntimeError as error:  # it leaves PyTorch's generator and allocator unusable
                reason = str(error.__context__ or error).splitlines()[0]  # the context is the error inside the capture
                what = f"a CUDA graph could not be captured ({reason})"
                raise UserError(f"{what}; add --no-cuda-graph, also with --resume to continue this run") from error
        for tensor, value in zip(self.inputs, inputs, strict=True):
            fill = tensor.copy_ if isinstance(value, torch.Tensor) else tensor.fill_
            fill(value)  # neither synchronises with the GPU
        self.graph.replay()
        return self.result


def cuda_graph(function: Callable[..., Any], generator: "torch.Generator", enabled: bool) -> Callable[..., Any]:
    """Return ``function`` as CUDA graphs, one for each signature of its arguments, or itself if not ``enabled``."""
    if not enabled:
        return function
    graphs = defaultdict(lambda: CudaGraph(function, generator))  # by signature

    def call(*inputs: "float | torch.Tensor") -> Any:
        # The arguments of a graph can't change their types and shapes.
        signature = tuple(type(x) if isinstance(x, int | float) else (x.dtype, x.shape) for x in inputs)
        return graphs[signature](*inputs)

    return call


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of up to 256 MB: it makes updates a tenth faster on a CPU."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_ARENA_MAX, 1)  # the arenas of other threads would be too small for XLA's work space
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that an older glibc allows: it ignores the next line
        libc.mallopt(M_MMAP_THRESHOLD, 2**28)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(M_TOP_PAD, 2**26)
