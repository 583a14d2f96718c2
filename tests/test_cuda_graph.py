"""CUDA graphs of the PyTorch scripts, emulated on a CPU: with them a run is the same, bit for bit."""

import contextlib
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dqn_atari
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import torch
from helpers import only, random_batch, results, spread, tiny, twin
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cleanrl_utils.device import CudaGraph, cuda_graph
from cleanrl_utils.evaluation import Act

every_script = pytest.mark.parametrize("script", [qdagger, dqn_atari])


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


def run(script: Any, args: Any, enabled: bool, stop_at: int | None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run ``main`` with or without graphs, stop it at a call of a graph; return the run directory.

    λ takes values that float32 represents exactly, as a graph has it in float32.
    """
    calls = itertools.count(1)
    coefficients = itertools.cycle([1.0, 0.5, 0.25])

    def graph_or_not(function: Callable[..., Any], generator: torch.Generator, _: bool) -> Callable[..., Any]:
        graphed = cuda_graph(function, generator, enabled)

        def call(*inputs: Any) -> Any:
            if next(calls) == stop_at:
                signal.raise_signal(signal.SIGTERM)
            return graphed(*inputs)

        return call

    monkeypatch.setattr(script, "cuda_graph", graph_or_not)
    monkeypatch.setattr(script, "distillation_share", lambda *_: next(coefficients), raising=False)
    with pytest.raises(SystemExit) if stop_at else contextlib.nullcontext():
        script.main(args)
    return only(Path("runs").iterdir())


def play(name: str, act: Act, *_: Any) -> list[float]:
    """Evaluate in a moment: return the mean of the actions for fixed observations."""
    return [float(act(random_batch(1, 8, 6)["observation"], np.random.default_rng(1)).mean())]


@pytest.mark.usefixtures("small_networks")
@every_script
def test_main_with_and_without_graphs(
    script: Any, graphs: list[RecordedGraph], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Curves and models are equal, of a run that is stopped in the online phase and resumed.

    The replay buffer wraps around. Window, λ and learning rate change, and calls have one to four updates.
    """
    args = tiny(
        teacher, num_envs=7, train_frequency=2, n_step=3, teacher_steps=70, offline_steps=10, buffer_size=140,
        learning_starts=30, total_timesteps=280, target_network_frequency=25, offline_eval_frequency=5,
        online_eval_frequency=140, learning_rate=2**-10, warmup_updates=1024, end_e=0,
    )  # fmt: skip
    monkeypatch.setattr(script, "play_episodes", play)
    monkeypatch.setattr(script, "LOG_EVERY", 5)
    stop_at = 50
    if script is dqn_atari:
        args = twin(args, script)
        stop_at = 55
    outcomes = []
    for enabled in (False, True):
        (tmp_path / str(enabled)).mkdir()
        monkeypatch.chdir(tmp_path / str(enabled))
        run_dir = run(script, args, enabled, stop_at, monkeypatch)
        run(script, type(args)(**{**vars(args), "resume": str(run_dir)}), enabled, None, monkeypatch)
        outcomes.append(results(run_dir))
    (curves, models), (graph_curves, graph_models) = outcomes
    assert len(set(curves["losses/q_values"])) > 5
    assert curves == graph_curves
    assert models.keys() == graph_models.keys()
    for name, weights in models.items():
        assert all(torch.equal(weight, graph_models[name][key]) for key, weight in weights.items()), name
    # Updates, and the forward passes of training steps. Evaluations have few steps here, and batches of their own.
    assert sum(graph.replays > 1 for graph in graphs) > (3 if script is qdagger else 1), "nothing but their capture"


def test_tensors_as_arguments(graphs: list[RecordedGraph]) -> None:
    """Q-values are those of eager execution bit by bit, while observations and weights change.

    The graph reads a copy of the observations: the caller's are not overwritten by later ones.
    """
    q_network = spread(qdagger.QNetwork(6), seed=1).requires_grad_(False)
    graphed = cuda_graph(q_network, torch.Generator(), True)
    observations = [torch.from_numpy(random_batch(seed, 2, 6)["observation"]) for seed in range(6)]
    copies = [observation.clone() for observation in observations]
    for observation in observations:
        assert torch.equal(q_network(observation), graphed(observation))
        spread(q_network, seed=int(observation.sum()))
    assert [graph.replays for graph in graphs] == [6 - CudaGraph.EAGER_CALLS]
    assert all(map(torch.equal, observations, copies))


@pytest.mark.parametrize(
    ("one", "other"), [(torch.arange(3.0), torch.ones(1)), (torch.ones(3), torch.arange(3)), (1, 0.5)]
)
def test_arguments_of_other_shapes_and_types(one: Any, other: Any, graphs: list[RecordedGraph]) -> None:
    """They are neither broadcast to the shape nor rounded to the type of those in a captured graph."""
    graphed = cuda_graph(lambda x: x * 2, torch.Generator(), True)
    for x in [one] * 5 + [other] * 5:
        doubled = graphed(x)
        assert doubled.dtype == torch.as_tensor(x).dtype
        assert torch.equal(doubled, torch.as_tensor(x) * 2)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.14.0"])
def test_registered_generator(version: str, graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """From PyTorch 2.14 on, graphs register it by themselves, and the function to do so will be removed."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    CudaGraph(lambda: None, torch.Generator())
    assert (graphs[0].generator is None) == (version == "2.14.0")
