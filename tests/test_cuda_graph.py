"""CUDA graphs of the PyTorch scripts, emulated on a CPU: with them, learning is the same, bit for bit."""

import contextlib
from types import SimpleNamespace
from typing import Any

import dqn_atari
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import torch
from helpers import AGENTS, cpu, random_step
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cleanrl_utils.device import CudaGraph, cuda_graph
from cleanrl_utils.errors import UserError


class RecordedGraph(TorchDispatchMode):
    """A `torch.cuda.CUDAGraph` for a CPU: it records operations, and replays them on the same tensors.

    Values from the host are those of the capture, which also runs the operations, so that the first replay does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        self.generator: torch.Generator | None = None
        self.replays = 0

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Register a generator that replays may use."""
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if generator := kwargs.get("generator"):
            assert torch.equal(generator.get_state(), self.generator.get_state()), "not registered"
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        """Run the operations; results overwrite the earlier ones."""
        self.replays += 1
        with torch.inference_mode(), torch._C._AutoDispatchBelowAutograd():  # as kernels, without autograd
            for func, args, kwargs, result in self.operations if self.replays > 1 else ():
                for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Replace CUDA's graphs and streams; return the graphs that are made."""
    made: list[RecordedGraph] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(RecordedGraph()) or made[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: graph)
    return made


@pytest.mark.usefixtures("small_networks")
@pytest.mark.parametrize("script", [qdagger, dqn_atari])
def test_learning_with_and_without_graphs(script: Any, graphs: list[RecordedGraph]) -> None:
    """Losses, Q-values and weights are equal.

    The replay buffer wraps around. Window, target network, λ and learning rate change, and calls have one to five
    updates. λ and rates are values that float32 represents exactly, as a graph has them in float32.
    """
    outcomes = []
    for enabled in (False, True):
        hardware = cpu(script)._replace(cuda_graph=enabled)
        learner = AGENTS[script](script.Args(batch_size=4, learning_rate=2**-10, n_step=3), 6, hardware)
        replay = script.Replay(60, 2, *[6] * (script is qdagger), 3, hardware)
        rng = np.random.default_rng(1)
        found = []
        for i in range(60):
            replay.add(*random_step(script, rng, 2, 6))
            found.append(learner.q_values(rng.integers(0, 256, (2, 4, 84, 84), np.uint8)).copy())
            if i < 10:
                continue
            rates = [2.0 ** -(10 + i % 4)] * (1 + i % 5)
            losses = learner.update(replay, *([(1.0, 0.5, 0.25)[i % 3], rates] if script is qdagger else []))
            found += [term.numpy().copy() for term in losses]
            if i % 8 == 0:
                learner.update_target(0.5)
        outcomes.append(found + [array.numpy() for array in learner.q_network.state_dict().values()])
    assert all(map(np.array_equal, *outcomes))
    assert len({float(array) for array in outcomes[0] if array.shape == ()}) > 50
    # Forward passes, and updates, of which QDagger's graphs have one to four.
    assert [graph.replays > 1 for graph in graphs] == [True] * (5 if script is qdagger else 2)


@pytest.mark.parametrize(
    ("one", "other"), [(torch.arange(3.0), torch.ones(1)), (torch.ones(3), torch.arange(3)), (1, 0.5)]
)
def test_arguments_of_other_shapes_and_types(one: Any, other: Any, graphs: list[RecordedGraph]) -> None:
    """They are neither broadcast to the shape nor rounded to the type of those in a captured graph, nor changed."""
    graphed = cuda_graph(lambda x: x * 2, torch.Generator(), True)
    before = torch.as_tensor(one).clone()
    for x in [one] * 5 + [other] * 5 + [one + 1]:
        doubled = graphed(x)
        assert doubled.dtype == torch.as_tensor(x).dtype
        assert torch.equal(doubled, torch.as_tensor(x) * 2)
    assert torch.equal(torch.as_tensor(one), before)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.14.0"])
def test_registered_generator(version: str, graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """From PyTorch 2.14 on, graphs register it by themselves, and the function to do so will be removed."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    CudaGraph(lambda: None, torch.Generator())
    assert (graphs[0].generator is None) == (version == "2.14.0")


def test_failed_capture_is_one_line(graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the reason, which is that inside the capture, and the way to resume."""

    class FailingCapture(contextlib.AbstractContextManager):
        def __exit__(self, *error: Any) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def function(x: torch.Tensor) -> torch.Tensor:
        if graph.calls > CudaGraph.EAGER_CALLS:
            raise RuntimeError("operation not permitted\nmore")
        return x + 1

    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: FailingCapture())
    graph = CudaGraph(function, torch.Generator())
    assert [float(graph(i)) for i in range(3)] == [1, 2, 3]
    with pytest.raises(UserError, match=r"^[^\n]*operation not permitted\).*--no-cuda-graph.*--resume[^\n]*$"):
        graph(3)
