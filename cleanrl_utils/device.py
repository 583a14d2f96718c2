"""What is only about devices: which one computes and whether it can, its memory, its threads, and CUDA graphs.

Neither library is needed for what concerns the other.
"""

import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cleanrl_utils.atari import available_cores
from cleanrl_utils.checks import TrainingFailure, UserError, available_host_memory

if TYPE_CHECKING:
    import torch

# mallopt's numbers of its parameters, from malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
ROOM_BESIDE_REPLAY = 2_000_000_000  # bytes for graphs, cuDNN's work spaces, weights and batches on a GPU, by estimate
DRIVER_OF_CUDA = {"13": 580, "12": 525}
"""the oldest NVIDIA driver, by its major version, that a library built for that CUDA runs on"""
SAME_DIRECTION = 0.99
"""cosine that a gradient on a GPU, in bfloat16 too, must have with that of float32 on the CPU"""


def nvidia_driver() -> int | None:
    """Major version of the NVIDIA driver, if this process may see a GPU through it; 0 if it does not tell its version.

    ``CUDA_VISIBLE_DEVICES`` that hides all GPUs counts as none.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return 0 if Path("/dev/nvidia0").exists() else None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
        version = answer.stdout.split(".")[0].strip()
        if answer.returncode == 0 and version:
            return int(version) if version.isdigit() else 0
    return None


def no_use_of_gpu(driver: int, why: str, install: dict[str, str], otherwise: str) -> UserError:
    """The error of a library that can't use the GPU of :func:`nvidia_driver`: says ``why``, what to ``install`` for the
    newest major version of CUDA that the driver runs, and how to compute on the CPU ``otherwise``.
    """
    cuda = next((cuda for cuda, oldest in DRIVER_OF_CUDA.items() if driver >= oldest), None) if driver else "12"
    remedy = install[cuda] if cuda else f"update the driver to {min(DRIVER_OF_CUDA.values())} or newer"
    version = driver or "of unknown version"
    return UserError(f"there is an NVIDIA GPU (driver {version}), but {why}; {remedy}, or {otherwise}")


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks, but those of 256 MB and more, for the next update: by itself it hands large ones
    back at every free, to be faulted in again page by page. Call it before the first threads are started.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_ARENA_MAX, 1)  # other threads' arenas would be too small for XLA's work space
        if not libc.mallopt(M_MMAP_THRESHOLD, 2**28):
            libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that an older glibc allows
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(M_TOP_PAD, 2**26)


# ==================== PyTorch ====================


def pick_torch_device(cuda: bool, bf16: bool) -> tuple["torch.device", "torch.autocast"]:
    """The device to compute on, and the context in which forward passes do so in bfloat16 if ``bf16`` and it has it.

    UserError where a GPU is wanted, and there, and PyTorch can't use it.
    """
    import torch

    if cuda and torch.cuda.is_available():
        # One thread for what little is done on the host: the others would compete with the emulators'.
        torch.set_num_threads(1)
        device = torch.device("cuda")
        in_hardware = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        if cuda and (driver := nvidia_driver()) is not None:
            raise no_cuda(driver)
        # Adam's averages of gradients that have become zero decay into denormal numbers, with which a processor
        # computes a hundred times slower. Set before the first parallel region, whose threads inherit it.
        torch.set_flush_denormal(True)
        torch.set_num_threads(available_cores())
        keep_freed_memory()
        device, in_hardware = torch.device("cpu"), torch.cpu._is_avx512_bf16_supported()
    return device, torch.autocast(device.type, torch.bfloat16, enabled=bf16 and in_hardware)


def no_cuda(driver: int) -> UserError:
    """Why PyTorch can't use the GPU that the driver shows, and what to do."""
    import torch

    why = f"PyTorch {torch.__version__} is built without CUDA"
    if torch.version.cuda:
        why = f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}, can't use it"
        try:
            torch.cuda.init()
        except Exception as error:
            why += f" ({str(error).split('. ')[0].rstrip('.')})"
    for_12 = "install it for CUDA 12 by the pip command that PyTorch's install page gives for that"
    install = {"13": "pip install -U torch", "12": for_12}
    return no_use_of_gpu(driver, why, install, "give --no-cuda to compute on the CPU")


def available_memory(device: "torch.device") -> int:
    """Bytes that a replay may take on ``device``."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] - ROOM_BESIDE_REPLAY
    return available_host_memory()


def describe_torch(device: "torch.device", autocast: "torch.autocast", cuda_graph: bool, emulator_threads: int) -> str:
    """One line that says what computes how."""
    import torch

    name = f"CPU with {torch.get_num_threads()} threads"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}, "
        name += "CUDA graph" if cuda_graph else "no CUDA graph"
    precision = "bfloat16" if autocast._enabled else "float32"
    return f"device: {name}; PyTorch {torch.__version__}, {precision}; {emulator_threads} emulator threads"


class CudaGraph:
    """A function as one launch: a GPU runs its hundreds of small kernels faster than Python can launch each of them.

    The first calls run as they are, since libraries and optimizers set themselves up in them; then the function is
    recorded, and from there on only its kernels run. They give the same numbers, random ones of ``generator`` included.
    The function gets numbers as tensors, returns tensors that later calls write over, and must not wait for the GPU.
    """

    CALLS_BEFORE = 3

    def __init__(self, function: Callable[..., Any], generator: "torch.Generator"):
        import torch

        self.function, self.device = function, generator.device
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self.graph.register_generator_state(generator)  # or every replay would draw the same numbers
        self.calls = 0

    def __call__(self, *inputs: float) -> Any:
        import torch

        self.calls += 1
        if self.calls <= self.CALLS_BEFORE + 1:
            self.inputs = [torch.as_tensor(value, device=self.device) for value in inputs]
        if self.calls <= self.CALLS_BEFORE:
            # Not on the default stream, with which nothing that is recorded later may have to do.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.function(*self.inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.calls == self.CALLS_BEFORE + 1:
            try:
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self.result = self.function(*self.inputs)
            except RuntimeError as error:  # after it PyTorch's generator and allocator are not to be trusted any more
                cause = error.__context__ or error  # what failed, not that the recording then could not be ended
                what = "--no-cuda-graph does without one, also with --resume"
                reason = f"an update could not be recorded as a CUDA graph ({first_line(cause)}); {what}"
                raise TrainingFailure(reason) from error
        for tensor, value in zip(self.inputs, inputs, strict=True):
            tensor.fill_(value)  # a kernel that nothing waits for, unlike a copy
        self.graph.replay()
        return self.result


def cuda_graphs(function: Callable[..., Any], generator: "torch.Generator") -> Callable[..., Any]:
    """``function`` as a :class:`CudaGraph` for each number of inputs."""
    graph = functools.cache(lambda number: CudaGraph(function, generator))
    return lambda *inputs: graph(len(inputs))(*inputs)


def rehearsed(rehearse: Callable[[Any, int], None], args: Any, num_actions: int) -> Any:
    """The flags with which an update works on this GPU: as they are, or else without compiler, deterministic
    kernels or CUDA graph, or without all of them.

    Found out before anything long, in processes of their own: a failed recording leaves PyTorch unusable. ``rehearse``
    is a script's function that makes updates as a run will. UserError where none can be made, or its gradient is wrong.
    """
    print("trying updates on the GPU" + ("; compiling takes minutes" if args.compile else ""), flush=True)
    problem = ""
    given = tuple(name for name in ("compile", "torch_deterministic", "cuda_graph") if getattr(args, name))
    for without in dict.fromkeys([(), *((name,) for name in given), given]):
        fewer = dataclasses.replace(args, **dict.fromkeys(without, False))
        try:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                pool.submit(rehearse, fewer, num_actions).result()
        except UserError:
            raise
        except Exception as error:
            problem = problem or first_line(error)
            continue
        if without:
            flags = ", ".join(f"--no-{name.replace('_', '-')}" for name in without)
            print(f"WARNING: an update fails on this GPU ({problem}); going on with {flags}", file=sys.stderr)
        return fewer
    raise UserError(f"no update can be made on this GPU ({problem}); update PyTorch or the driver, or give --no-cuda")


def first_line(error: Exception) -> str:
    """What an exception says at first."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def require_same_direction(fast: np.ndarray, exact: np.ndarray, library: str, remedy: str) -> None:
    """Raises UserError if the gradient ``fast`` of a GPU is not what it should be, by its cosine with ``exact``."""
    cosine = float(fast @ exact / np.sqrt((fast @ fast) * (exact @ exact)))
    if not cosine > SAME_DIRECTION:
        raise UserError(
            f"{library} computes wrong gradients on this GPU (their cosine with those of the CPU is {cosine:.3f}, and "
            f"should be above {SAME_DIRECTION}); update it or the driver, or try {remedy}"
        )


def fill_at_random(replay: Any, num_actions: int) -> None:
    """Fills the ring of a PyTorch script's replay with steps in the middle of a game, for a rehearsal."""
    for array in replay.ring:
        array.random_(0, 2)
    replay.ring.frame.random_(0, 256)
    replay.ring.action.random_(0, num_actions)
    replay.ring.age.fill_(3)
    replay.steps_added = replay.length


def check_torch_gradient(loss: Callable, networks: Sequence, batch: Any, autocast: "torch.autocast") -> None:
    """UserError where the gradient of ``loss(*networks, batch)``, by the first, is not that of float32 on the CPU."""
    import torch

    def gradient() -> np.ndarray:
        parts = torch.autograd.grad(loss(*networks, batch), list(networks[0].parameters()))
        return torch.cat([part.double().cpu().flatten() for part in parts]).numpy()

    with autocast:
        fast = gradient()
    networks = [network.cpu() for network in networks]
    batch = type(batch)(*(value.cpu() for value in batch))
    require_same_direction(fast, gradient(), "PyTorch", "--no-bf16 or --no-cuda")


# ==================== JAX ====================


def pick_jax_device(bf16: bool) -> Any:
    """The dtype of hidden layers: bfloat16 if ``bf16`` and a GPU or TPU has it, otherwise float32: XLA has no fast
    convolutions of bfloat16 for a CPU. UserError where there is a GPU and JAX can't use it.

    Sets up memory and the compilation cache: call it before anything else of JAX.
    """
    import jax
    import jax.numpy as jnp

    driver = None if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") else nvidia_driver()
    if driver is None:
        keep_freed_memory()  # before the first threads; on a GPU it would slow XLA's compiler
    # A replay of default size is one array of 7 GB, for which the usual 75 % of a 12 GB card leave no room.
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # its newer name; JAX takes one or the other
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    # A CPU computes on the same cores in any case: handing a call to another thread only takes time.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    reason = "it has no CUDA plugin"
    try:
        on_cpu = jax.default_backend() == "cpu"
    except RuntimeError as error:
        if driver is None:
            raise
        on_cpu, reason = True, str(error).splitlines()[0]
    if on_cpu and driver is not None:
        install = {cuda: f'pip install -U "jax[cuda{cuda}]"' for cuda in DRIVER_OF_CUDA}
        why = f"JAX {jax.__version__} can't use it ({reason})"
        raise no_use_of_gpu(driver, why, install, "set JAX_PLATFORMS=cpu to compute on the CPU")
    # Compiling for a GPU takes minutes, for a CPU seconds, and code for one processor may fail on another.
    if not on_cpu and jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(cache / "qdagger-jax"))
    # NVIDIA's GPUs have it from compute capability 8 on. AMD's, such as gfx90a, are no numbers.
    too_old = re.match(r"[1-7]\.", str(getattr(jax.devices()[0], "compute_capability", "")))
    return jnp.bfloat16 if bf16 and not on_cpu and not too_old else jnp.float32


def available_jax_memory() -> int:
    """Bytes that a replay may take where JAX computes."""
    import jax

    stats = jax.devices()[0].memory_stats()  # None on a CPU
    return stats["bytes_limit"] - stats["bytes_in_use"] - ROOM_BESIDE_REPLAY if stats else available_host_memory()


def describe_jax(dtype: Any, emulator_threads: int) -> str:
    """One line that says what computes how."""
    import jax

    device = jax.devices()[0]
    name = f"CPU with {available_cores()} threads" if device.platform == "cpu" else device.device_kind
    if stats := device.memory_stats():
        name += f" ({stats['bytes_limit'] / 2**30:.0f} GiB for JAX)"
    return f"device: {name}; JAX {jax.__version__}, {dtype.__name__}; {emulator_threads} emulator threads"


def check_jax_gradient(gradient: Callable[..., Any], exact_gradient: Callable[..., Any], *inputs: Any) -> None:
    """UserError where ``gradient(*inputs)`` on a GPU is not ``exact_gradient(*inputs)``, in float32 on the CPU."""
    import jax

    def flat(tree: Any) -> np.ndarray:
        return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])

    if jax.default_backend() == "cpu":
        return
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves no CPU to compare with
        return
    print("trying an update on the GPU; compiling may take minutes", flush=True)
    try:
        fast = flat(jax.jit(gradient)(*inputs))
    except Exception as error:
        remedy = "update JAX or the driver, or set JAX_PLATFORMS=cpu"
        raise UserError(f"no update can be made on this GPU ({first_line(error)}); {remedy}") from error
    exact = flat(jax.jit(exact_gradient)(*jax.device_put(inputs, cpu)))
    require_same_direction(fast, exact, "JAX", "--no-bf16 or JAX_PLATFORMS=cpu")
