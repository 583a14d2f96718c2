"""Networks, losses, gradients and updates of the PyTorch scripts against float64 NumPy references."""

import copy
from collections.abc import Sequence
from typing import Any

import dqn_atari
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import torch
from helpers import AGENTS, SmallNetwork, cpu, random_batch, random_step, spread, torch_losses
from hypothesis import given, settings
from hypothesis import strategies as st
from references import Weights, impala, log_softmax, nature

NUM_ACTIONS = 6
BATCH_SIZE = 4
NETWORKS = [qdagger.QNetwork, qdagger.TeacherNetwork, dqn_atari.QNetwork]
LOSSES = {qdagger: qdagger.qdagger_loss, dqn_atari: dqn_atari.dqn_loss}

every_network = pytest.mark.parametrize("network_class", NETWORKS)
every_script = pytest.mark.parametrize("script", list(LOSSES))


# ==================== reference ====================


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
    """Compare each term and dL/dQ. QDagger bootstraps from the network that learns: it has no gradient there."""
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
    losses = torch_losses(qdagger, table, table, batch, coefficient, temperature)
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
    td_loss, q_values = torch_losses(dqn_atari, table, target_table, dqn_atari.Batch(**columns))
    np.testing.assert_allclose(td_loss.item(), reference.losses(q[state])[1], rtol=1e-8)
    np.testing.assert_allclose(q_values.item(), q[state, batch.action.numpy()].mean(), rtol=1e-8, atol=1e-12)
    td_loss.backward()
    expected[state] = reference.gradient(q[state])
    np.testing.assert_allclose(table.q_values.grad.numpy(), expected, rtol=1e-8, atol=1e-12)
    assert target_table.q_values.grad is None


# ==================== updates ====================


def make_replay(script: Any, rng: np.random.Generator, hardware: Any) -> Any:
    """Make a replay buffer of 15 steps that has wrapped around."""
    replay = script.Replay(30, 2, *[NUM_ACTIONS] * (script is qdagger), 3, hardware)
    for _ in range(20):
        replay.add(*random_step(script, rng, 2, NUM_ACTIONS))
    return replay


def make_agent(script: Any, hardware: Any) -> Any:
    """Make an agent with networks that differ."""
    args = script.Args(seed=7, num_envs=2, n_step=3, batch_size=BATCH_SIZE, learning_rate=1e-3)
    if script is qdagger:
        args.temperature = 0.5
    agent = AGENTS[script](args, NUM_ACTIONS, hardware)
    spread(agent.target_network, seed=8)
    return agent


def update(script: Any, agent: Any, replay: Any, coefficient: float, learning_rates: Sequence[float]) -> Any:
    """Call `update`, which takes λ and learning rates in QDagger and makes a step for each rate."""
    return agent.update(replay, *([coefficient, learning_rates] if script is qdagger else ()))


def naive_update(
    script: Any, agent: Any, q_network: torch.nn.Module, adam: Any, replay: Any, coefficient: float, rates: list[float]
) -> Any:
    """Let a Q-network learn as the agent's should: by single gradient steps on the batches that it would sample now."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=agent.hardware.bf16)
    coefficients = (coefficient, 0.5) if script is qdagger else ()
    state = agent.generator.get_state()
    steps = replay.sampled_steps()
    for i in range(0, len(rates), 4):
        size = BATCH_SIZE * len(rates[i : i + 4])
        whole = script.sample(replay.ring, steps.start, steps.stop, size, agent.generator, 3, 0.99)
        with autocast, torch.no_grad():  # the target network is the same for all batches
            target_q_values = agent.target_network(whole.bootstrap_observation).split(BATCH_SIZE)
        columns = zip(*(array.split(BATCH_SIZE) for array in whole), strict=True)
        for arrays, q_values, rate in zip(columns, target_q_values, rates[i : i + 4], strict=True):
            with autocast:
                losses = LOSSES[script](q_network, q_values, script.Batch(*arrays), *coefficients)
            adam.param_groups[0]["lr"] = rate
            adam.zero_grad()
            losses[0].backward()
            adam.step()
    agent.generator.set_state(state)
    return losses


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Return whether all weights are equal bit by bit."""
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize("bf16", [False, True])
@every_script
def test_update_is_a_sample_a_loss_and_a_step(script: Any, bf16: bool) -> None:
    """λ and learning rates are those of the call, steps are Adam's, and the target network does not change."""
    rng = np.random.default_rng(7)
    agent = make_agent(script, cpu(script, bf16))
    replay = make_replay(script, rng, agent.hardware)
    q_network = copy.deepcopy(agent.q_network)
    target_network = copy.deepcopy(agent.target_network)
    adam = torch.optim.Adam(q_network.parameters(), fused=True)
    for coefficient, learning_rates in ((1.0, [1e-3]), (0.3, [5e-4, 1e-4, 2e-3, 3e-4, 1e-3]), (0.0, [2e-3])):
        if script is dqn_atari:
            learning_rates = [1e-3]
        expected = naive_update(script, agent, q_network, adam, replay, coefficient, learning_rates)
        losses = update(script, agent, replay, coefficient, learning_rates)
        assert all(map(torch.equal, losses, expected))
        assert same_weights(agent.q_network, q_network)
        assert same_weights(agent.target_network, target_network)
        replay.add(*random_step(script, rng, 2, NUM_ACTIONS))
    assert all(parameter.grad is None for parameter in agent.target_network.parameters())


class NormNetwork(SmallNetwork):
    """A Q-network with a layer that computes otherwise in training."""

    def __init__(self, num_actions: int):
        super().__init__(num_actions)
        self.norm = torch.nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x / 255.0) * 255.0)


@every_script
def test_evaluation_mode(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the Q-network, and only in gradient steps, computes in training mode. Its buffers are copied with tau."""
    monkeypatch.setattr(script, "QNetwork", NormNetwork)
    rng = np.random.default_rng(7)
    agent = make_agent(script, cpu(script))
    replay = make_replay(script, rng, agent.hardware)
    modes: list[tuple[str, bool]] = []
    for name in ("q_network", "target_network"):
        norm = getattr(agent, name).norm
        norm.register_forward_hook(lambda norm, inputs, output, name=name: modes.append((name, norm.training)))
    observation = rng.integers(0, 256, (3, 4, 84, 84), np.uint8)
    for _ in range(2):
        agent.q_values(observation)
        update(script, agent, replay, 0.5, [1e-3, 1e-3])
    steps = [("target_network", False)] + [("q_network", True)] * (2 if script is qdagger else 1)
    assert modes == [("q_network", False), *steps] * 2
    buffers = [list(network.buffers()) for network in (agent.q_network, agent.target_network)]
    assert not any(map(torch.equal, *buffers))
    agent.update_target(0.25)
    assert all(map(torch.equal, *buffers))
    assert not same_weights(agent.q_network, agent.target_network)
