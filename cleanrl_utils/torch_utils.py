"""What the PyTorch scripts share: device, memory, networks as functions of NumPy arrays, saving."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from cleanrl_utils.atari import available_cores
from cleanrl_utils.checks import available_host_memory
from cleanrl_utils.evaluation import QFunction, pad_to_power_of_two
from cleanrl_utils.memory import keep_freed_memory
from cleanrl_utils.runs import atomic_write
from cleanrl_utils.torch_speed import cuda_graphs


def pick_device(cuda: bool, bf16: bool) -> tuple[torch.device, bool]:
    """The device to learn on, and whether to use bfloat16 (wanted and in hardware); sets up threads and malloc."""
    if cuda and torch.cuda.is_available():
        return torch.device("cuda"), bf16 and torch.cuda.is_bf16_supported(including_emulation=False)
    # Adam's averages of gradients that have become zero decay into denormal numbers, with which a processor computes a
    # hundred times slower. Set before the first parallel region, whose threads inherit it.
    torch.set_flush_denormal(True)
    torch.set_num_threads(available_cores())
    keep_freed_memory()
    return torch.device("cpu"), bf16 and torch.cpu._is_avx512_bf16_supported()


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_memory()


def make_judge(network: nn.Module, device: torch.device, graph: bool = False) -> Callable[[np.ndarray], torch.Tensor]:
    """The network as a function from uint8 (B, 4, 84, 84) arrays to float32 (B, num_actions) tensors on ``device``.

    Args:
        graph: whether to launch it as a CUDA graph, one for each power of two that B is rounded up to; its result is
            written over by the next call of the same size.
    """

    @torch.inference_mode()
    def judge(observation: np.ndarray | torch.Tensor) -> torch.Tensor:
        return network(torch.as_tensor(observation, device=device))

    if not graph:
        return judge
    graphs = cuda_graphs(judge, device)

    def graphed(observation: np.ndarray) -> torch.Tensor:
        return graphs(pad_to_power_of_two(observation))[: len(observation)]

    return graphed


def make_q_function(network: nn.Module, device: torch.device, graph: bool = False) -> QFunction:
    """As :func:`make_judge`, but to NumPy arrays, which waits for the device."""
    judge = make_judge(network, device, graph)
    return lambda observation: judge(observation).cpu().numpy()


def save_model(network: nn.Module, path: Path) -> None:
    """Writes the state dict, contiguous and on the CPU whatever the network's layout."""
    with atomic_write(path) as file:
        torch.save({key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}, file)
