"""Exactness of the update: networks, losses and gradients against an independent float64 NumPy reference."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import dqn_atari
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cleanrl_utils.atari import Step
from cleanrl_utils.device import CudaGraph, cuda_graphs, pick_torch_device

Weights = dict[str, np.ndarray]
"""A state dict in float64"""

SEQUENCES = ((4, 16), (16, 32), (32, 32))
"""(input, output) channels of the design's three convolutional sequences"""


# ==================== the reference ====================


def conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int = 1, padding: int = 0) -> np.ndarray:
    """Cross-correlation of (B, C, H, W) with (O, C, K, K): one shifted product per kernel position."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    size = weight.shape[2]
    height, width = ((n - size) // stride + 1 for n in x.shape[2:])
    total = np.zeros((len(x), len(weight), height, width)) + bias[:, None, None]
    for i in range(size):
        for j in range(size):
            shifted = x[:, :, i : i + stride * height : stride, j : j + stride * width : stride]
            total += np.einsum(
                "oc,bcp->bop", weight[:, :, i, j], shifted.reshape(*x.shape[:2], -1), optimize=True
            ).reshape(total.shape)
    return total


def max_pool(x: np.ndarray) -> np.ndarray:
    """3×3 maximum with stride 2 and a pixel of padding on every side."""
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    height, width = ((n - 3) // 2 + 1 for n in x.shape[2:])
    windows = [x[:, :, i : i + 2 * height : 2, j : j + 2 * width : 2] for i in range(3) for j in range(3)]
    return np.maximum.reduce(windows)


def relu(x: np.ndarray) -> np.ndarray:
    """max(x, 0)."""
    return np.maximum(x, 0)


def impala(weights: Weights, observation: np.ndarray) -> np.ndarray:
    """Q-values of the design's ImpalaCNN, float64 (B, num_actions)."""

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
    """Q-values of the network of Mnih et al. (2015), float64 (B, num_actions)."""
    x = observation.astype(np.float64) / 255
    for index, stride in ((0, 4), (2, 2), (4, 1)):
        x = relu(conv(x, weights[f"network.{index}.weight"], weights[f"network.{index}.bias"], stride))
    x = relu(x.reshape(len(x), -1) @ weights["network.7.weight"].T + weights["network.7.bias"])
    return x @ weights["network.9.weight"].T + weights["network.9.bias"]


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def td_target(batch: qdagger.Batch, bootstrap_q_values: np.ndarray) -> np.ndarray:
    """y, float64 (B,)."""
    returns, discount = batch.n_step_return.double().numpy(), batch.bootstrap_discount.double().numpy()
    return returns + discount * bootstrap_q_values.max(axis=1)


def reference_losses(
    q: np.ndarray, action: np.ndarray, target: np.ndarray, teacher_q: np.ndarray, temperature: float
) -> tuple[float, float]:
    """TD term and distillation term."""
    td = np.mean([(q[b, a] - target[b]) ** 2 for b, a in enumerate(action)])
    log_p, log_q = log_softmax(teacher_q / temperature), log_softmax(q / temperature)
    kl = [sum(np.exp(log_p[b, a]) * (log_p[b, a] - log_q[b, a]) for a in range(q.shape[1])) for b in range(len(q))]
    return float(td), float(np.mean(kl))


def reference_gradient(
    q: np.ndarray, action: np.ndarray, target: np.ndarray, teacher_q: np.ndarray, weight: float, temperature: float
) -> np.ndarray:
    """dL/dQ in closed form, float64 (B, num_actions)."""
    probabilities, teacher_probabilities = (np.exp(log_softmax(x / temperature)) for x in (q, teacher_q))
    gradient = weight / (len(q) * temperature) * (probabilities - teacher_probabilities)
    rows = np.arange(len(q))
    gradient[rows, action] += 2 / len(q) * (q[rows, action] - target)
    return gradient


# ==================== material ====================


class Table(torch.nn.Module):
    """A Q-function with one parameter per state and action: what reaches its parameters is dL/dQ itself."""

    def __init__(self, q_values: np.ndarray):
        super().__init__()
        self.q_values = torch.nn.Parameter(torch.from_numpy(q_values))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.q_values[observation]


def make_batch(
    rng: np.random.Generator, size: int, num_actions: int, dtype: torch.dtype = torch.float32
) -> qdagger.Batch:
    """Random images, actions, returns, discounts (some 0) and teacher."""
    discount = rng.choice([0.0, 0.99, 0.99**3], size)
    discount[0], discount[1] = 0, 0.99
    return qdagger.Batch(
        torch.from_numpy(rng.integers(0, 256, (size, 4, 84, 84), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, num_actions, size)),
        torch.from_numpy(rng.uniform(-2, 2, size)).to(dtype),
        torch.from_numpy(rng.integers(0, 256, (size, 4, 84, 84), dtype=np.uint8)),
        torch.from_numpy(discount).to(dtype),
        torch.from_numpy(rng.normal(size=(size, num_actions))).to(dtype),
    )


def spread(network: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Makes the weights larger and the biases random, so that no term of the network is too small to be seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(noise * (1.5 / fan_in) ** 0.5)
    return network


def float64_weights(network: torch.nn.Module) -> Weights:
    """The state dict for the reference."""
    return {key: value.detach().double().numpy().copy() for key, value in network.state_dict().items()}


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The script's networks in float64, though they ask for float32 before the last layer."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ==================== networks ====================


@pytest.mark.parametrize("num_actions", [4, 6, 18])
def test_student_has_the_layers_of_the_design(num_actions: int) -> None:
    """Names and shapes are a file format: published students are loaded by them."""
    expected = {}
    for i, (inputs, outputs) in enumerate(SEQUENCES):
        expected[f"network.{i}.conv.weight"], expected[f"network.{i}.conv.bias"] = (outputs, inputs, 3, 3), (outputs,)
        for j in range(2):
            for k in range(2):
                name = f"network.{i}.res_block{j}.conv{k}"
                expected[f"{name}.weight"], expected[f"{name}.bias"] = (outputs, outputs, 3, 3), (outputs,)
    for index, inputs, outputs in ((5, 32 * 11 * 11, 256), (7, 256, num_actions)):
        expected[f"network.{index}.weight"], expected[f"network.{index}.bias"] = (outputs, inputs), (outputs,)
    network = qdagger.QNetwork(num_actions)
    assert {key: tuple(value.shape) for key, value in network.state_dict().items()} == expected
    assert all(value.dtype == torch.float32 for value in network.state_dict().values())
    count = sum(int(np.prod(shape)) for shape in expected.values())
    assert count == 97_744 + 991_488 + 257 * num_actions  # convolutions and linear layers, worked out by hand
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    assert network(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, num_actions)


@pytest.mark.parametrize("network_class", [qdagger.TeacherNetwork, dqn_atari.QNetwork])
def test_teacher_has_the_layers_of_the_design(network_class: type[torch.nn.Module]) -> None:
    """What dqn_atari.py saves is what the QDagger script loads, and what the hub holds."""
    shapes = {0: (32, 4, 8, 8), 2: (64, 32, 4, 4), 4: (64, 64, 3, 3), 7: (512, 3136), 9: (6, 512)}
    expected = {f"network.{i}.weight": shape for i, shape in shapes.items()}
    expected |= {f"network.{i}.bias": shape[:1] for i, shape in shapes.items()}
    network = network_class(6)
    assert {key: tuple(value.shape) for key, value in network.state_dict().items()} == expected
    assert network(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, 6)


def test_sequences_halve_the_image() -> None:
    """84 → 42 → 21 → 11; the last one tells padding on every side from padding on one."""
    x = torch.rand(2, 4, 84, 84)
    for layer, (_, channels), size in zip(qdagger.QNetwork(6).network, SEQUENCES, (42, 21, 11), strict=False):
        x = layer(x)
        assert x.shape == (2, channels, size, size)


@pytest.mark.parametrize(
    ("network_class", "reference"),
    [(qdagger.QNetwork, impala), (qdagger.TeacherNetwork, nature), (dqn_atari.QNetwork, nature)],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_forward(network_class: type[torch.nn.Module], reference: object, channels_last: bool) -> None:
    """Q-values are the reference's in either memory layout, and the input is left as it was."""
    network = spread(network_class(6), seed=1)
    observation = np.random.default_rng(1).integers(0, 256, (3, 4, 84, 84), dtype=np.uint8)
    expected = reference(float64_weights(network), observation)
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
    given = torch.from_numpy(observation.copy())
    q_values = network(given)
    assert q_values.dtype == torch.float32
    assert expected.std() > 0.1
    np.testing.assert_allclose(q_values.detach().numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(given.numpy(), observation)


@pytest.mark.parametrize("network_class", [qdagger.QNetwork, qdagger.TeacherNetwork, dqn_atari.QNetwork])
def test_bfloat16_stays_close(network_class: type[torch.nn.Module]) -> None:
    """Hidden layers are rounded to 8 bits, Q-values are not: they would come in steps of 1/256 of their size."""
    network = network_class(6)
    observation = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (4, 4, 84, 84), dtype=np.uint8))
    expected = network(observation)
    with torch.autocast("cpu", torch.bfloat16):
        q_values = network(observation)
    assert q_values.dtype == torch.float32
    assert not torch.equal(q_values, expected), "autocast computes in float32"
    assert not torch.equal(q_values, q_values.bfloat16().float()), "the last layer is rounded to bfloat16"
    torch.testing.assert_close(q_values, expected, rtol=0, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("in_hardware", [False, True])
def test_bfloat16_where_the_hardware_has_it(kind: str, in_hardware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated it is slower than float32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: in_hardware or including_emulation
    )
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: in_hardware)
    for bf16 in (False, True):
        device, autocast = pick_torch_device(True, bf16)
        assert device.type == kind
        with autocast:
            assert torch.is_autocast_enabled(kind) == (bf16 and in_hardware)
            assert torch.get_autocast_dtype(kind) == torch.bfloat16
    assert pick_torch_device(False, True)[0].type == "cpu"


# ==================== loss and its gradient at the Q-values ====================


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 9),
    num_actions=st.integers(2, 18),
    scale=st.sampled_from([1e-3, 0.1, 1.0, 20.0]),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([0.1, 1.0, 3.0]),
)
def test_loss_and_its_gradient(
    seed: int, size: int, num_actions: int, scale: float, weight: float, temperature: float
) -> None:
    """Each term, their sum and dL/dQ, with the bootstrap taken from the network that learns: no gradient passes there.

    Rows of the table are states; the next states are among those that the batch starts from.
    """
    rng = np.random.default_rng(seed)
    q = rng.normal(scale=scale, size=(2 * size, num_actions))
    state, next_state = rng.permutation(2 * size)[:size], rng.integers(0, 2 * size, size)
    batch = qdagger.Batch(
        torch.from_numpy(state),
        torch.from_numpy(rng.integers(0, num_actions, size)),
        torch.from_numpy(rng.uniform(-3, 3, size)),
        torch.from_numpy(next_state),
        torch.from_numpy(rng.choice([0.0, 0.9, 0.99], size)),
        torch.from_numpy(rng.normal(scale=scale, size=(size, num_actions))),
    )
    action, teacher_q = batch.action.numpy(), batch.teacher_q_values.numpy()
    target = td_target(batch, q[next_state])
    td, kl = reference_losses(q[state], action, target, teacher_q, temperature)

    table = Table(q.copy())
    losses = qdagger.qdagger_loss(table, qdagger.td_target(table, batch), batch, weight, temperature)
    np.testing.assert_allclose(losses.td_loss.item(), td, rtol=1e-10)
    np.testing.assert_allclose(losses.distill_loss.item(), kl, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(losses.loss.item(), td + weight * kl, rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(losses.q_values.detach().numpy(), q[state, action])
    losses.loss.backward()
    expected = np.zeros_like(q)
    expected[state] = reference_gradient(q[state], action, target, teacher_q, weight, temperature)
    np.testing.assert_allclose(table.q_values.grad.numpy(), expected, rtol=1e-8, atol=1e-12)

    bootstrap_q = rng.normal(scale=scale, size=q.shape)
    dqn_table, dqn_target = Table(q.copy()), Table(bootstrap_q)
    target = td_target(batch, bootstrap_q[next_state])
    dqn_batch = dqn_atari.Batch(*batch[:5])
    loss, taken = dqn_atari.dqn_loss(dqn_table, dqn_target, dqn_batch)
    td, _ = reference_losses(q[state], action, target, teacher_q, temperature)
    np.testing.assert_allclose(loss.item(), td, rtol=1e-10)
    np.testing.assert_array_equal(taken.detach().numpy(), q[state, action])
    loss.backward()
    expected[state] = reference_gradient(q[state], action, target, teacher_q, 0, temperature)
    np.testing.assert_allclose(dqn_table.q_values.grad.numpy(), expected, rtol=1e-8, atol=1e-12)
    assert dqn_target.q_values.grad is None


def test_reference_gradient_is_the_derivative_of_the_reference_loss() -> None:
    """The two halves of the oracle, both written by hand, agree: central differences in every Q-value."""
    rng = np.random.default_rng(3)
    q, teacher_q, target, action = rng.normal(size=(3, 5)), rng.normal(size=(3, 5)), rng.normal(size=3), [4, 0, 2]
    gradient = reference_gradient(q, np.array(action), target, teacher_q, 0.3, 0.5)
    for index in np.ndindex(q.shape):
        sides = []
        for sign in (1, -1):
            moved = q.copy()
            moved[index] += sign * 1e-6
            td, kl = reference_losses(moved, np.array(action), target, teacher_q, 0.5)
            sides.append(td + 0.3 * kl)
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient[index], rel=1e-6, abs=1e-8)


def test_extreme_q_values_keep_the_loss_finite() -> None:
    """A teacher thousands of temperatures sure of its action has softmax zeros: 0 · log 0 is 0, not NaN."""
    table = Table(np.array([[0.0, 5e3, -5e3], [1e4, 0.0, 0.0]]))
    zeros = torch.zeros(2, dtype=torch.float64)
    teacher_q = torch.tensor([[1e4, 0.0, -1e4], [1e4, 0.0, 0.0]], dtype=torch.float64)
    batch = qdagger.Batch(torch.arange(2), torch.tensor([0, 1]), zeros, torch.arange(2), zeros, teacher_q)
    losses = qdagger.qdagger_loss(table, qdagger.td_target(table, batch), batch, 1.0, 0.1)
    losses.loss.backward()
    assert losses.distill_loss.item() == pytest.approx(5e3 / 0.1 / 2)  # one row: certain of an action 5e3 below; one: 0
    assert torch.isfinite(table.q_values.grad).all()


# ==================== the whole update ====================


@pytest.mark.parametrize(("weight", "temperature"), [(0.0, 1.0), (0.3, 0.1), (1.0, 0.1), (1.0, 1.0)])
def test_losses_in_float32(weight: float, temperature: float) -> None:
    """Networks and loss as they train: float32, channels_last, against the reference on the same weights."""
    rng = np.random.default_rng(int(10 * weight + temperature))
    student, target_network = (
        spread(qdagger.QNetwork(6), seed).to(memory_format=torch.channels_last) for seed in (10, 11)
    )
    batch = make_batch(rng, 3, 6)
    q = impala(float64_weights(student), batch.observation.numpy())
    target = td_target(batch, impala(float64_weights(target_network), batch.bootstrap_observation.numpy()))
    td, kl = reference_losses(
        q, batch.action.numpy(), target, batch.teacher_q_values.numpy().astype(float), temperature
    )
    losses = qdagger.qdagger_loss(student, qdagger.td_target(target_network, batch), batch, weight, temperature)
    assert losses.td_loss.item() == pytest.approx(td, rel=1e-5)
    assert losses.distill_loss.item() == pytest.approx(kl, rel=1e-5)
    assert losses.loss.item() == pytest.approx(td + weight * kl, rel=1e-5)


@pytest.mark.usefixtures("float64")
def test_gradient_of_every_parameter() -> None:
    """Directional derivatives of the reference, by central differences, along a random direction in every leaf.

    In float64 on both sides, so that a wrong term can't hide behind rounding.
    """
    rng = np.random.default_rng(5)
    student = spread(qdagger.QNetwork(4), seed=20)
    target_network = spread(qdagger.QNetwork(4), seed=21)
    batch = make_batch(rng, 3, 4, torch.float64)
    losses = qdagger.qdagger_loss(student, qdagger.td_target(target_network, batch), batch, 0.7, 0.5)
    losses.loss.backward()

    weights, action, teacher_q = float64_weights(student), batch.action.numpy(), batch.teacher_q_values.numpy()
    target = td_target(batch, impala(float64_weights(target_network), batch.bootstrap_observation.numpy()))

    def loss(changed: Weights) -> float:
        q = impala(weights | changed, batch.observation.numpy())
        td, kl = reference_losses(q, action, target, teacher_q, 0.5)
        return td + 0.7 * kl

    assert losses.loss.item() == pytest.approx(loss({}), rel=1e-10)
    leaves = dict(student.named_parameters())
    assert len(leaves) == 34
    for name, parameter in leaves.items():
        # Half of it along the gradient, or the derivative of a large leaf would drown in the differences' rounding.
        gradient = parameter.grad.numpy()
        direction = rng.normal(size=gradient.shape)
        direction = direction / np.linalg.norm(direction) + gradient / np.linalg.norm(gradient)
        eps = 1e-6
        ahead, behind = loss({name: weights[name] + eps * direction}), loss({name: weights[name] - eps * direction})
        assert (ahead - behind) / (2 * eps) == pytest.approx((gradient * direction).sum(), rel=1e-4), name


class Learner(NamedTuple):
    """What a script's updates are made of."""

    update: Callable[..., Any]
    replay: Any
    q_network: torch.nn.Module
    target_network: torch.nn.Module
    rng: np.random.Generator

    def step(self) -> tuple:
        """A step of two games, as the replay wants it, with random numbers in all that is kept."""
        rng, device = self.rng, self.replay.ring.frame.device
        observation = torch.from_numpy(rng.integers(0, 256, (2, 4, 84, 84), dtype=np.uint8)).to(device)
        reward, flags = rng.integers(-1, 2, 2, dtype=np.int32), rng.random((2, 2)) < 0.1
        result = Step(observation, reward, terminated=flags[0], truncated=flags[1], reset=flags[1], games=[])
        step = observation, rng.integers(0, 6, 2), result
        if "teacher_q_values" not in self.replay.ring._fields:
            return step
        return *step, torch.from_numpy(rng.normal(size=(2, 6)).astype(np.float32)).to(device)


class MetaGenerator(torch.Generator):
    """The numbers of a device without data, that of "meta" tensors."""

    device = torch.device("meta")


def learner(script: Any, device: str = "cpu", bf16: bool = False, graph: bool = False) -> Learner:
    """Updates with a replay of 15 steps, which 20 have filled, of two networks that differ."""
    args = script.Args(num_envs=2, n_step=3, batch_size=8, buffer_size=30)
    args.temperature = 0.5
    torch.manual_seed(7)
    replay = script.Replay(*((30, 6, args) if script is qdagger else (args,)), torch.device(device))
    q_network, target_network = (script.QNetwork(6).to(device, memory_format=torch.channels_last) for _ in range(2))
    if device == "cpu":
        optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3, fused=True)
    else:
        optimizer = SimpleNamespace(param_groups=[{}], zero_grad=lambda: None, step=lambda: None)  # Adam refuses
    generator = (torch.Generator if device == "cpu" else MetaGenerator)().manual_seed(7)
    autocast = torch.autocast(device, torch.bfloat16) if bf16 else contextlib.nullcontext()
    update = script.make_update((q_network, target_network, optimizer, generator), replay, autocast, args)
    made = Learner(
        cuda_graphs(update, generator) if graph else update, replay, q_network, target_network, np.random.default_rng(7)
    )
    for _ in range(20):
        replay.add(*made.step())
    return made


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("script", [qdagger, dqn_atari])
def test_update_is_a_draw_a_loss_and_a_step(script: Any, bf16: bool) -> None:
    """λ and learning rates are those of the call, the steps are Adam's, and nothing but the student changes."""
    made, autocast = learner(script, bf16=bf16), torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    student, target_weights = copy.deepcopy(made.q_network), copy.deepcopy(made.target_network.state_dict())
    generator = torch.Generator().manual_seed(7)
    adam = torch.optim.Adam(student.parameters(), lr=1e-3, fused=True)
    for weight, learning_rates in ((1.0, [1e-3]), (0.3, [5e-4, 1e-4, 2e-3]), (0.0, [2e-3])):
        if script is dqn_atari:
            learning_rates = [1e-3]
        draw = made.replay.sample(8 * len(learning_rates), *made.replay.window, generator)
        if script is qdagger:
            with autocast:
                td_targets = qdagger.td_target(made.target_network, draw)
            losses = made.update(*made.replay.window, weight, *learning_rates)
        else:
            losses = made.update(*made.replay.window)
        for i, learning_rate in enumerate(learning_rates):
            part = slice(8 * i, 8 * i + 8)
            batch = script.Batch(*(column[part] for column in draw))
            with autocast:
                if script is qdagger:
                    expected = qdagger.qdagger_loss(student, td_targets[part], batch, weight, 0.5)
                else:
                    expected = dqn_atari.dqn_loss(student, made.target_network, batch)
            adam.param_groups[0]["lr"] = learning_rate
            adam.zero_grad()
            expected.loss.backward()
            adam.step()
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(made.q_network.parameters(), student.parameters(), strict=True))
        made.replay.add(*made.step())
    assert all(parameter.grad is None for parameter in made.target_network.parameters())
    assert all(torch.equal(value, target_weights[key]) for key, value in made.target_network.state_dict().items())


class NothingWaits(TorchDispatchMode):
    """Finds what would make the host wait for a GPU, for which the device without data stands in.

    That one raises by itself where the host asks for a number of it or for a shape that depends on its data. So what
    remains are copies between it and the host: they must be asked for as such, and to go on in the background.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if len(devices) > 1:
            assert func.overloadpacket is torch.ops.aten.copy_, f"{func} of tensors on {devices}"
            assert args[2:] == (True,), "a copy that waits"
        return result


@pytest.mark.parametrize("script", [qdagger, dqn_atari])
def test_nothing_waits_for_a_gpu(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, moves of the target network, the teacher's forward pass, and what adds to the replay."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # knows no such device
    made = learner(script, "meta")
    changing = (0.5, 1e-3) if script is qdagger else ()
    inputs = *made.replay.window, *changing
    tensors = [torch.as_tensor(value, device="meta") for value in inputs]
    teacher = (qdagger.TeacherNetwork if script is qdagger else script.QNetwork)(6).to("meta")
    step = made.step()
    with NothingWaits():
        made.update(*inputs)
        made.update(*tensors)  # as in a CUDA graph
        script.update_target(made.target_network, made.q_network, 0.5)
        teacher(torch.empty(2, 4, 84, 84, dtype=torch.uint8, device="meta"))
        made.replay.add(*step)


# ==================== updates as CUDA graphs ====================


class Recording(TorchDispatchMode):
    """Stands in for `torch.cuda.CUDAGraph` on a CPU: replays run the recorded operations, on the very same tensors.

    As in a real one, whatever the function took from the host is what it was when it was recorded. Unlike there, the
    operations are also carried out while they are recorded, so that the first replay has nothing left to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        self.replays = 0
        self.generators: list[torch.Generator] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        """What random numbers come from."""
        self.generators.append(generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if generator := kwargs.get("generator"):  # another wrapper of the same one
            assert any(torch.equal(generator.get_state(), x.get_state()) for x in self.generators), "not registered"
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        """Runs what was recorded; new results go where the old ones lie."""
        self.replays += 1
        with torch.inference_mode(), torch._C._AutoDispatchBelowAutograd():  # as kernels, which know no gradients
            for func, args, kwargs, result in self.operations if self.replays > 1 else ():
                again = func(*args, **kwargs)
                pairs = zip(result, again, strict=True) if isinstance(result, (tuple, list)) else [(result, again)]
                for old, new in pairs:
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The graphs that `CudaGraph` makes from here on; on a CPU, in place of CUDA's."""
    made: list[Recording] = []

    def make() -> Recording:
        made.append(Recording())
        return made[-1]

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: graph)
    return made


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("script", [qdagger, dqn_atari])
def test_graph_and_plain_updates_are_the_same(script: Any, bf16: bool, graphs: list[Recording]) -> None:
    """All updates give the same losses, batches and weights, to the last bit.

    Meanwhile the replay's window moves, λ falls and the learning rate rises, by numbers that float32 holds exactly.
    """
    plain, graphed = (learner(script, bf16=bf16, graph=graph) for graph in (False, True))
    for i in range(12):
        # One update in a call, then three, then one: as offline, and as online.
        changing = (1 - i / 16, *[2**-13 * (i + 1)] * (1 + i % 2 * 2)) if script is qdagger else ()
        expected, got = (made.update(*made.replay.window, *changing) for made in (plain, graphed))
        for a, b in zip(expected, got, strict=True):
            assert not a.requires_grad
            assert torch.equal(a, b), i
        for a, b in zip(plain.q_network.parameters(), graphed.q_network.parameters(), strict=True):
            assert torch.equal(a, b), i
        for made in (plain, graphed):
            made.replay.add(*made.step())
    kinds = 2 if script is qdagger else 1
    assert [graph.replays for graph in graphs] == [12 // kinds - CudaGraph.CALLS_BEFORE] * kinds
