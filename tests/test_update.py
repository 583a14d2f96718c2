"""Networks, losses, gradients and updates of the PyTorch scripts against float64 NumPy references."""

import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import dqn_atari
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import torch
import torch.nn.functional as F
from helpers import dqn_losses, qdagger_losses, random_batch, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cleanrl_utils.atari import Step

Weights = dict[str, np.ndarray]
"""A state dict in float64"""
NETWORKS = [qdagger.QNetwork, qdagger.TeacherNetwork, dqn_atari.QNetwork]

every_network = pytest.mark.parametrize("network_class", NETWORKS)
every_script = pytest.mark.parametrize("script", [qdagger, dqn_atari])


# ==================== references ====================


def conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int = 1, padding: int = 0) -> np.ndarray:
    """Cross-correlate (B, C, H, W) with (O, C, K, K): a product for each place in the kernel."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    size = weight.shape[2]
    height, width = ((n - size) // stride + 1 for n in x.shape[2:])
    total = np.zeros((len(x), len(weight), height, width)) + bias[:, None, None]
    for i in range(size):
        for j in range(size):
            shifted = x[:, :, i : i + stride * height : stride, j : j + stride * width : stride]
            product = weight[:, :, i, j] @ shifted.reshape(*x.shape[:2], -1)
            total += product.reshape(total.shape)
    return total


def max_pool(x: np.ndarray) -> np.ndarray:
    """Take the 3×3 maximum with stride 2 and padding 1 on every side."""
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    height, width = ((n - 3) // 2 + 1 for n in x.shape[2:])
    windows = [x[:, :, i : i + 2 * height : 2, j : j + 2 * width : 2] for i in range(3) for j in range(3)]
    return np.maximum.reduce(windows)


def relu(x: np.ndarray) -> np.ndarray:
    """Compute max(x, 0)."""
    return np.maximum(x, 0)


def impala(weights: Weights, observation: np.ndarray) -> np.ndarray:
    """Compute the Q-values of the ImpalaCNN, float64 (B, num_actions)."""

    def layer(x: np.ndarray, name: str) -> np.ndarray:
        return conv(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    x = observation.astype(np.float64) / 255
    for i in range(3):
        x = max_pool(layer(x, f"network.{i}.conv"))
        for j in range(2):
            block = f"network.{i}.res_block{j}"
            x = x + layer(relu(layer(relu(x), f"{block}.conv0")), f"{block}.conv1")
    x = relu(x.reshape(len(x), -1))
    x = relu(x @ weights["network.5.weight"].T + weights["network.5.bias"])
    return x @ weights["network.7.weight"].T + weights["network.7.bias"]


def nature(weights: Weights, observation: np.ndarray) -> np.ndarray:
    """Compute the Q-values of the network of Mnih et al. (2015), float64 (B, num_actions)."""
    x = observation.astype(np.float64) / 255
    for index, stride in ((0, 4), (2, 2), (4, 1)):
        x = relu(conv(x, weights[f"network.{index}.weight"], weights[f"network.{index}.bias"], stride))
    x = relu(x.reshape(len(x), -1) @ weights["network.7.weight"].T + weights["network.7.bias"])
    return x @ weights["network.9.weight"].T + weights["network.9.bias"]


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Compute the logarithm of the softmax along the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


class Reference:
    """The loss terms of a batch in float64, and the gradient of the loss with respect to the Q-values (B, A)."""

    def __init__(self, batch: qdagger.Batch, bootstrap_q: np.ndarray, coefficient: float, temperature: float):
        arrays = {name: value.numpy().astype(float) for name, value in batch._asdict().items() if value.dim() < 3}
        self.y = arrays["n_step_return"] + arrays["bootstrap_discount"] * bootstrap_q.max(axis=1)
        self.teacher = log_softmax(arrays["teacher_q_values"] / temperature)
        self.action = batch.action.numpy()
        self.coefficient, self.temperature = coefficient, temperature

    def losses(self, q: np.ndarray) -> tuple[float, float, float]:
        """Compute the loss, its TD term and its distillation term."""
        td = np.mean([(q[b, a] - self.y[b]) ** 2 for b, a in enumerate(self.action)])
        kl = np.mean(np.sum(np.exp(self.teacher) * (self.teacher - log_softmax(q / self.temperature)), axis=1))
        return td + self.coefficient * kl, td, kl

    def gradient(self, q: np.ndarray) -> np.ndarray:
        """Compute dL/dQ in closed form, float64 (B, num_actions)."""
        policy = np.exp(log_softmax(q / self.temperature))
        rows = np.arange(len(q))
        gradient = self.coefficient / (len(q) * self.temperature) * (policy - np.exp(self.teacher))
        gradient[rows, self.action] += 2 / len(q) * (q[rows, self.action] - self.y)
        return gradient


# ==================== material ====================


class Table(torch.nn.Module):
    """A Q-function with a parameter for each state and action, whose gradient is dL/dQ."""

    def __init__(self, q_values: np.ndarray):
        super().__init__()
        self.q_values = torch.nn.Parameter(torch.from_numpy(q_values.copy()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.q_values[observation]


def float64_weights(network: torch.nn.Module) -> Weights:
    """Return the weights for a reference."""
    return {key: value.detach().double().numpy().copy() for key, value in network.state_dict().items()}


# ==================== networks ====================


def test_networks_of_dqn_are_teachers() -> None:
    """Names and shapes are those of CleanRL's file format, which test_teachers.py checks for QDagger's networks."""
    shapes = [{key: value.shape for key, value in network(6).state_dict().items()} for network in NETWORKS[1:]]
    assert shapes[0] == shapes[1]


@every_network
@pytest.mark.parametrize("channels_last", [False, True])
def test_q_values(network_class: type[torch.nn.Module], channels_last: bool) -> None:
    """They are the reference's in the memory format of the weights, and the input is unchanged."""
    network = spread(network_class(6), seed=1)
    observation = random_batch(1, 3, 6)["observation"]
    reference = impala if network_class is qdagger.QNetwork else nature
    expected = reference(float64_weights(network), observation)
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
    tensor = torch.from_numpy(observation.copy())
    contiguous = []
    first = next(module for module in network.modules() if isinstance(module, torch.nn.Conv2d))
    first.register_forward_hook(lambda module, inputs, output: contiguous.append(output.is_contiguous()))
    q_values = network(tensor)
    assert contiguous == [not channels_last]
    assert q_values.dtype == torch.float32
    assert expected.std() > 0.1
    np.testing.assert_allclose(q_values.detach().numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(tensor.numpy(), observation)


CHANGES = [{"stride": 2}, {"padding": 2}, {"padding_mode": "circular"}, {"groups": 2}, {"groups": 4}, {"bias": False}]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("gpu", [False, True])
def test_edited_convolution(change: dict[str, Any], gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes as it is declared, also with the channels of zeros that it has on a GPU in bfloat16."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: gpu and device_type == "cuda")
    sequence = qdagger.QNetwork(6).network[0]
    declared = torch.nn.Conv2d(4, 16, 3, **({"padding": 1} | change))
    sequence.conv = type(sequence.conv)(4, 16, 3, **({"padding": 1} | change))
    sequence.conv.load_state_dict(declared.state_dict())
    x = torch.randn(2, 4, 84, 84)
    expected = sequence.res_block1(sequence.res_block0(F.max_pool2d(declared(x), 3, 2, 1)))
    channels = []
    conv2d = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *args, **kw: channels.append(x.shape[1]) or conv2d(x, *args, **kw))
    torch.testing.assert_close(sequence(x), expected)
    assert channels[0] == (8 if gpu and "groups" not in change else 4)


@every_network
def test_bfloat16(network_class: type[torch.nn.Module]) -> None:
    """Hidden layers compute in bfloat16 and the last one in float32, as actions differ by less than 1/256."""
    network = network_class(6)
    observation = torch.from_numpy(random_batch(2, 4, 6)["observation"])
    expected = network(observation)
    with torch.autocast("cpu", torch.bfloat16):
        q_values = network(observation)
    assert q_values.dtype == torch.float32
    assert not torch.equal(q_values, expected), "autocast computes in float32"
    assert not torch.equal(q_values, q_values.bfloat16().float()), "the last layer is rounded to bfloat16"
    torch.testing.assert_close(q_values, expected, rtol=0, atol=0.02 * expected.abs().max().item())


# ==================== loss ====================


@settings(max_examples=250)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 9),
    num_actions=st.integers(2, 18),
    scale=st.sampled_from([1e-3, 0.1, 1.0, 20.0, 1e4]),  # at 1e4 softmaxes underflow, where 0 · log 0 is 0
    coefficient=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([0.1, 1.0, 3.0]),
)
def test_loss_and_its_gradient(
    seed: int, size: int, num_actions: int, scale: float, coefficient: float, temperature: float
) -> None:
    """Compare each term and dL/dQ. QDagger bootstraps from the network that learns: it has no gradient there.

    The rows of the table are states.
    """
    rng = np.random.default_rng(seed)
    q = rng.normal(scale=scale, size=(2 * size, num_actions))
    state = rng.permutation(2 * size)[:size]
    next_state = rng.integers(0, 2 * size, size)
    batch = qdagger.Batch(
        observation=torch.from_numpy(state),
        action=torch.from_numpy(rng.integers(0, num_actions, size)),
        n_step_return=torch.from_numpy(rng.uniform(-3, 3, size)),
        bootstrap_observation=torch.from_numpy(next_state),
        bootstrap_discount=torch.from_numpy(rng.choice([0.0, 0.9, 0.99], size)),
        teacher_q_values=torch.from_numpy(rng.normal(scale=scale, size=(size, num_actions))),
    )
    table = Table(q)
    reference = Reference(batch, q[next_state], coefficient, temperature)
    losses = qdagger_losses(table, table, batch, coefficient, temperature)
    found = [term.item() for term in losses[:3]]
    np.testing.assert_allclose(found, reference.losses(q[state]), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(losses.q_values.item(), q[state, batch.action.numpy()].mean(), rtol=1e-8, atol=1e-12)
    losses.loss.backward()
    expected = np.zeros_like(q)
    expected[state] = reference.gradient(q[state])
    np.testing.assert_allclose(table.q_values.grad.numpy(), expected, rtol=1e-8, atol=1e-12)

    table = Table(q)
    target_table = Table(rng.normal(scale=scale, size=q.shape))
    reference = Reference(batch, target_table.q_values.detach().numpy()[next_state], 0.0, temperature)
    columns = {name: getattr(batch, name) for name in dqn_atari.Batch._fields}
    td_loss, q_values = dqn_losses(table, target_table, dqn_atari.Batch(**columns))
    np.testing.assert_allclose(td_loss.item(), reference.losses(q[state])[1], rtol=1e-8)
    np.testing.assert_allclose(q_values.item(), q[state, batch.action.numpy()].mean(), rtol=1e-8, atol=1e-12)
    td_loss.backward()
    expected[state] = reference.gradient(q[state])
    np.testing.assert_allclose(table.q_values.grad.numpy(), expected, rtol=1e-8, atol=1e-12)
    assert target_table.q_values.grad is None


# ==================== updates ====================


class Learner(NamedTuple):
    """An update function of a script and all that it uses."""

    update: Callable[..., Any]
    replay: Any
    generator: torch.Generator
    q_network: torch.nn.Module
    target_network: torch.nn.Module
    rng: np.random.Generator

    def random_step(self) -> tuple:
        """Return random arguments for `Replay.add`."""
        rng = self.rng
        device = self.replay.ring.frame.device
        observation = torch.from_numpy(rng.integers(0, 256, (2, 4, 84, 84), dtype=np.uint8)).to(device)
        reward = rng.integers(-1, 2, 2, dtype=np.int32)
        flags = rng.random((2, 2)) < 0.1
        result = Step(observation, reward, terminated=flags[0], truncated=flags[1], reset=flags[1], episodes=[])
        step = observation, rng.integers(0, 6, 2), result
        if "teacher_q_values" not in self.replay.ring._fields:
            return step
        return *step, torch.from_numpy(rng.normal(size=(2, 6)).astype(np.float32)).to(device)


class MetaGenerator(torch.Generator):
    """A generator for tensors without data, on the device "meta"."""

    device = torch.device("meta")


def make_learner(script: Any, device: str = "cpu", bf16: bool = False) -> Learner:
    """Make two networks that differ, a replay buffer of 15 steps that has wrapped around, and the update."""
    args = script.Args(num_envs=2, n_step=3, batch_size=8)
    args.temperature = 0.5
    torch.manual_seed(7)
    generator = (torch.Generator if device == "cpu" else MetaGenerator)().manual_seed(7)
    replay = script.Replay(30, *[6] * (script is qdagger), args, torch.device(device))
    networks = [script.QNetwork(6).to(device, memory_format=torch.channels_last) for _ in range(2)]
    if device == "cpu":
        optimizer = torch.optim.Adam(networks[0].parameters(), lr=1e-3, fused=True)
    else:  # fused Adam does not know the device
        optimizer = SimpleNamespace(param_groups=[{}], zero_grad=lambda: None, step=lambda: None)
    autocast = torch.autocast(device, torch.bfloat16) if bf16 else contextlib.nullcontext()
    update = script.make_update(*networks, optimizer, replay.ring, generator, autocast, args)
    learner = Learner(update, replay, generator, *networks, np.random.default_rng(7))
    for _ in range(20):
        replay.add(*learner.random_step())
    return learner


def assert_same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Compare all weights bit by bit."""
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("bf16", [False, True])
@every_script
def test_update_is_a_sample_a_loss_and_a_step(script: Any, bf16: bool) -> None:
    """λ and learning rates are those of the call, steps are Adam's, and the target network does not change."""
    learner = make_learner(script, bf16=bf16)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    q_network = copy.deepcopy(learner.q_network)
    target_network = copy.deepcopy(learner.target_network)
    adam = torch.optim.Adam(q_network.parameters(), lr=1e-3, fused=True)
    for coefficient, learning_rates in ((1.0, [1e-3]), (0.3, [5e-4, 1e-4, 2e-3]), (0.0, [2e-3])):
        if script is dqn_atari:
            learning_rates = [1e-3]
        state = learner.generator.get_state()
        size = 8 * len(learning_rates)
        whole = script.sample(learner.replay.ring, *learner.replay.window, size, learner.generator, 3, 0.99)
        batches = [script.Batch(*parts) for parts in zip(*(column.split(8) for column in whole), strict=True)]
        learner.generator.set_state(state)
        losses = learner.update(*learner.replay.window, *([coefficient, *learning_rates] if script is qdagger else ()))
        with autocast:  # the target network is the same for all batches
            targets = qdagger.td_target(target_network, whole).split(8)
        for batch, y, learning_rate in zip(batches, targets, learning_rates, strict=True):
            with autocast:
                if script is qdagger:
                    expected = qdagger.qdagger_loss(q_network, y, batch, coefficient, 0.5)
                else:
                    expected = dqn_atari.dqn_loss(q_network, y, batch)
            adam.param_groups[0]["lr"] = learning_rate
            adam.zero_grad()
            expected[0].backward()
            adam.step()
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        assert_same_weights(learner.q_network, q_network)
        assert_same_weights(learner.target_network, target_network)
        learner.replay.add(*learner.random_step())
    assert all(parameter.grad is None for parameter in learner.target_network.parameters())


class NoSynchronisation(TorchDispatchMode):
    """Finds operations that would synchronise with a GPU, for which the device "meta" stands in.

    That device raises where its data are read and where a shape depends on data. There remain copies between it and
    the host, which must be explicit and non-blocking.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            assert func.overloadpacket is torch.ops.aten.copy_, f"{func} between devices"
            assert args[2:] == (True,), "a blocking copy"
        return result


@every_script
def test_nothing_synchronises_with_a_gpu(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither updates nor the target network, the forward pass of a network, and `Replay.add`."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # not for this device
    learner = make_learner(script, "meta")
    inputs = *learner.replay.window, *((0.5, 1e-3) if script is qdagger else ())
    tensors = [torch.as_tensor(value, device="meta") for value in inputs]
    step = learner.random_step()
    with NoSynchronisation():
        learner.update(*inputs)
        learner.update(*tensors)  # as in a CUDA graph
        script.update_target(learner.target_network, learner.q_network, 0.5)
        learner.q_network(step[0])
        learner.replay.add(*step)
