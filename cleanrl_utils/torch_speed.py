"""What makes the PyTorch scripts fast: weights in bfloat16, CUDA graphs, threads."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn as nn


@contextlib.contextmanager
def half_of_the_threads() -> Iterator[None]:
    """Meanwhile PyTorch uses half of its threads on the CPU, and one at least."""
    threads = torch.get_num_threads()
    torch.set_num_threads((threads + 1) // 2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pinned(values: np.ndarray | torch.Tensor | Sequence[float], device: torch.device) -> torch.Tensor:
    """``values`` as a tensor that can be copied to ``device``, with `non_blocking`, while the host goes on.

    Out of any other memory than pinned the driver of a GPU may copy only when it has done all that came before.
    """
    tensor = torch.as_tensor(values)
    fetched = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.contiguous().pin_memory() if fetched else tensor


class WorkingCopy:
    """A network that computes in bfloat16, but for its last layer, and the float32 original that is learned and saved.

    Steps of the optimizer would be lost in rounding if only the copy's weights were there (Micikevicius et al., 2018,
    section 3.1). `torch.autocast` computes the same numbers, but it casts every array at every use, and a GPU has to
    launch each cast.

    Args:
        original: with its layers in `network`, a `Sequential`.
        bf16: if not, the copy is the original itself.
    """

    def __init__(self, original: nn.Module, bf16: bool):
        self.original = original
        """float32, what an optimizer changes"""
        self.network = original
        """the copy, what computes"""
        self._weights: list[nn.Parameter] = []
        self._originals: list[nn.Parameter] = []
        if bf16:
            self.network = copy.deepcopy(original)
            self.network.network[:-1].to(torch.bfloat16)
            self.network.network[-1] = original.network[-1]  # is float32 in both
            self._weights = list(self.network.network[:-1].parameters())
            self._originals = list(original.network[:-1].parameters())
            for parameter in self._originals:
                parameter.grad = torch.zeros_like(parameter)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the original's optimizer with the gradients of the copy."""
        if self._weights:
            gradients = [parameter.grad for parameter in self._originals]
            torch._foreach_copy_(gradients, [parameter.grad for parameter in self._weights])
        optimizer.step()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over the original's weights after they have changed."""
        if self._weights:
            torch._foreach_copy_(self._weights, self._originals)


class CudaGraph:
    """A function as one launch: a GPU runs its hundreds of small kernels faster than Python can launch each of them.

    The first calls run as they are, since libraries and optimizers set themselves up in them; then the function is
    recorded, and from there on only its kernels run. They give the same numbers, random ones included.

    Args:
        function: of tensors on ``device``; returns others, which later calls write over. It must not wait for the GPU.
        device: the GPU.
        generator: the source of its random numbers, if it is not PyTorch's own.
    """

    CALLS_BEFORE = 3

    def __init__(self, function: Callable[..., Any], device: torch.device, generator: torch.Generator | None = None):
        self.function, self.device = function, device
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        if generator is not None:
            self.graph.register_generator_state(generator)  # or every replay would draw the same numbers
        self.calls = 0

    def __call__(self, *inputs: float | Sequence[float] | np.ndarray) -> Any:
        """The function of ``inputs``, which it gets as tensors: numbers, or arrays of the same shape at every call."""
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
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = self.function(*self.inputs)
        for tensor, value in zip(self.inputs, inputs, strict=True):
            if isinstance(value, (int, float)):
                tensor.fill_(value)  # a kernel that nothing waits for, unlike a copy
            else:
                tensor.copy_(pinned(value, self.device), non_blocking=True)
        self.graph.replay()
        return self.result


def cuda_graphs(
    function: Callable[..., Any], device: torch.device, generator: torch.Generator | None = None
) -> Callable[..., Any]:
    """``function`` as one :class:`CudaGraph` for each combination of its inputs' shapes and keyword arguments."""
    graphs: dict[tuple, CudaGraph] = {}

    def launch(*inputs: float | Sequence[float] | np.ndarray, **fixed: int) -> Any:
        kind = *map(np.shape, inputs), *fixed.items()
        if kind not in graphs:
            graphs[kind] = CudaGraph(functools.partial(function, **fixed), device, generator)
        return graphs[kind](*inputs)

    return launch
