"""The JAX scripts against the PyTorch scripts: the same weights and batch give the same results."""

import contextlib
import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import dqn_atari
import dqn_atari_jax
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from flax.traverse_util import flatten_dict
from helpers import (
    AGENTS,
    SmallFlaxNetwork,
    SmallNetwork,
    cpu,
    flax_params,
    float64,
    jax_losses,
    random_batch,
    random_step,
    spread,
    torch_losses,
)  # fmt: skip

from cleanrl_utils.errors import UserError
from cleanrl_utils.models import flax_to_torch
from cleanrl_utils.networks import init_like_pytorch

A = 6
Params = qdagger_jax.Params

both_scripts = pytest.mark.parametrize(("script", "jax_script"), [(qdagger, qdagger_jax), (dqn_atari, dqn_atari_jax)])
every_network = pytest.mark.parametrize(
    ("network", "jax_network"),
    [
        (qdagger.QNetwork, qdagger_jax.QNetwork),
        (qdagger.TeacherNetwork, qdagger_jax.TeacherNetwork),
        (dqn_atari.QNetwork, dqn_atari_jax.QNetwork),
    ],
)


def to_jax(network: torch.nn.Module) -> Params:
    """Convert the weights of a network, in copies, since JAX may share an array's memory."""
    weights = {key: value.numpy().copy() for key, value in network.state_dict().items()}
    return jax.tree.map(jnp.array, flax_params(weights))


def to_torch(params: Params) -> dict[str, np.ndarray]:
    """Convert parameters, or gradients of their form, to the names and layout of PyTorch."""
    return flax_to_torch(flatten_dict(jax.tree.map(np.asarray, params), sep="/"))


def batch_of(script: Any, batch: dict[str, np.ndarray]) -> Any:
    """Convert a batch for the loss of a script."""
    as_array = torch.from_numpy if script in (qdagger, dqn_atari) else jnp.asarray
    return script.Batch(**{key: as_array(batch[key]) for key in script.Batch._fields})


# ==================== networks ====================


@every_network
def test_networks(network: Callable, jax_network: Callable) -> None:
    """The same weights give the same Q-values, and a new network has the same arrays.

    In bfloat16 the last layer computes in float32, as actions differ by less than 1/256.
    """
    torch_network = spread(network(A), seed=1)
    observation = random_batch(0, 4, A)["observation"]
    expected = torch_network(torch.from_numpy(observation)).detach().numpy()
    params = to_jax(torch_network)
    q_values = jax.jit(jax_network(A).apply)(params, observation)
    assert q_values.dtype == np.float32
    np.testing.assert_allclose(q_values, expected, rtol=1e-4, atol=1e-4)
    shapes = jax.eval_shape(jax_network(A).init, jax.random.key(0), observation)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    program = str(jax.make_jaxpr(jax_network(A, jnp.bfloat16).apply)(params, observation))
    products = re.findall(r":(\w+)\[[\d,]*\] = (?:conv_general_dilated|dot_general)", program)
    assert products == ["bf16"] * (len(jax.tree.leaves(params)) // 2 - 1) + ["f32"]


def test_initial_weights() -> None:
    """Kernels and biases have PyTorch's distribution, and no two layers or seeds the same numbers."""
    network = SmallFlaxNetwork(A)
    keys = jax.vmap(jax.random.PRNGKey)(np.arange(20))
    params = jax.jit(jax.vmap(lambda key: init_like_pytorch(network, key, qdagger_jax.BLANK)))(keys)
    arrays = jax.tree.map(np.asarray, params)
    found = [to_torch(jax.tree.map(operator.itemgetter(i), arrays)) for i in range(20)]
    torch.manual_seed(0)
    expected = [SmallNetwork(A).state_dict() for _ in range(20)]
    assert found[0].keys() == expected[0].keys()
    for name in found[0]:
        a, b = (np.stack([np.asarray(weights[name]) for weights in side]) for side in (found, expected))
        assert a.dtype == np.float32
        assert np.abs(a).max() == pytest.approx(np.abs(b).max(), rel=0.1), name
        assert a.std() == pytest.approx(b.std(), rel=0.2), name
    assert len({array.flat[0] for weights in found for array in weights.values()}) == 20 * len(found[0])


def test_max_pool_is_that_of_flax() -> None:
    """Value and gradient are the same, also where a window has several maxima, below 0 or at an edge."""

    def flax_pool(x: jax.Array) -> jax.Array:
        return flax.linen.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))

    rng = np.random.default_rng(0)
    x = rng.integers(-3, 0, (20, 11, 6, 3)).astype(np.float32)
    found, find_gradient = jax.vjp(qdagger_jax.max_pool, x)
    expected, expect_gradient = jax.vjp(flax_pool, x)
    gradient = rng.integers(-8, 8, expected.shape).astype(np.float32)  # sums of integers are exact in any order
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(find_gradient(gradient)[0], expect_gradient(gradient)[0])


# ==================== losses and updates ====================


@pytest.mark.parametrize(
    ("script", "jax_script", "coefficients", "flat"),
    [
        (qdagger, qdagger_jax, (0.3, 1.0), False),
        (qdagger, qdagger_jax, (1e-3, 1e-3), True),
        (dqn_atari, dqn_atari_jax, (), False),
    ],
)
def test_losses_and_gradients(script: Any, jax_script: Any, coefficients: tuple[float, ...], flat: bool) -> None:
    """Loss terms are the same to 1e-5, and the gradient of every array to 1e-4 of its norm.

    Where the two largest pixels of a window differ by rounding only, the libraries may choose different maxima. The
    batch of noise has no such window. With flat areas, max-pooling finds many maxima, and PyTorch computes in float64,
    since in float32 it rounds equal sums differently in different places. There, the temperature is so small that
    softmaxes underflow to zero, where 0 · log 0 is 0 and not NaN.
    """
    batch = random_batch(4 if flat else 5, 4, A, flat)
    batch["teacher_q_values"] = batch["teacher_q_values"].astype(float if flat else np.float32)
    with float64() if flat else contextlib.nullcontext():
        networks = [spread(script.QNetwork(A), seed) for seed in (2, 3)]
        expected = torch_losses(script, *networks, batch_of(script, batch), *coefficients)
        expected[0].backward()
    loss = functools.partial(jax_losses, jax_script, jax_script.QNetwork(A).apply)
    inputs = *map(to_jax, networks), batch_of(jax_script, batch), *coefficients
    gradients, losses = jax.jit(jax.grad(loss, has_aux=True))(*inputs)
    for name, term in losses._asdict().items():
        np.testing.assert_allclose(term, getattr(expected, name).detach().numpy(), rtol=1e-5, atol=1e-5, err_msg=name)
    found = to_torch(gradients)
    assert found.keys() == dict(networks[0].named_parameters()).keys()
    for name, parameter in networks[0].named_parameters():
        difference = np.linalg.norm(found[name] - parameter.grad.numpy())
        assert difference <= 1e-4 * np.linalg.norm(parameter.grad.numpy()), name


@both_scripts
def test_updates_are_those_of_torch_adam(script: Any, jax_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update has a sample, λ and learning rate of its own, and the target network does not change.

    QDagger makes four updates in two calls, the first of which is split.
    """
    monkeypatch.setattr(jax_script, "QNetwork", SmallFlaxNetwork)
    network, target_network = (spread(SmallNetwork(A), seed) for seed in (17, 18))
    adam = torch.optim.Adam(network.parameters())
    flags = {"gamma": 0.9, "learning_rate": 1e-3, "batch_size": 2} | ({"temperature": 0.5} if script is qdagger else {})
    agent = AGENTS[jax_script](jax_script.Args(**flags), A, cpu(jax_script))
    agent.state = agent.state._replace(params=to_jax(network), target_params=to_jax(target_network))
    replay = jax_script.Replay(60, 2, *[A] * (script is qdagger), 1, cpu(jax_script))
    rng = np.random.default_rng(1)
    for _ in range(40):  # the buffer has wrapped around
        replay.add(*random_step(jax_script, rng, 2, A))
    key = agent.state.key
    if script is qdagger:
        monkeypatch.setattr(jax_script, "UPDATES_PER_CALL", 2)  # compiles faster than 4
        coefficients = [*[(2.0, 0.5)] * 3, (0.7, 0.5)]
        rates = [5e-4, 1e-3, 9e-4, 2e-4]
        at_once = [2, 1, 1]
        agent.update(replay, 2.0, rates[:3])
        losses = agent.update(replay, 0.7, rates[3:])
    else:
        coefficients = [()] * 4
        rates = [1e-3] * 4
        at_once = [1] * 4
        for _ in range(4):
            losses = agent.update(replay)

    batches = []
    steps = replay.sampled_steps()
    sample = jax.jit(jax_script.sample, static_argnums=(3, 5))
    for updates in at_once:
        key, *sample_keys = jax.random.split(key, updates + 1)
        batches += [sample(replay.ring, steps.start, steps.stop, 2, k, 1, 0.9) for k in sample_keys]
    for batch, of_loss, rate in zip(batches, coefficients, rates, strict=True):
        arrays = {name: np.array(array) for name, array in batch._asdict().items()}
        arrays["action"] = arrays["action"].astype(np.int64)
        expected = torch_losses(script, network, target_network, batch_of(script, arrays), *of_loss)
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        expected[0].backward()
        adam.step()
    for found, term in zip(losses, expected, strict=True):
        np.testing.assert_allclose(found, term.detach().numpy(), rtol=1e-4)
    found = to_torch(agent.state.params)
    unchanged = to_torch(agent.state.target_params)
    for name, parameter in network.named_parameters():
        # Where a gradient is hardly more than rounding, Adam's step along it is not.
        close = np.isclose(found[name], parameter.detach().numpy(), rtol=0, atol=2e-6)
        assert close.mean() > 0.99, name
    for name, parameter in target_network.named_parameters():
        np.testing.assert_array_equal(unchanged[name], parameter.detach().numpy())


class BatchNormNetwork(flax.linen.Module):
    """A Q-network with running averages, which are no parameters."""

    num_actions: int
    dtype: Any = None

    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = flax.linen.BatchNorm(use_running_average=False)(x / 255.0)
        return SmallFlaxNetwork(self.num_actions)(x * 255.0)


@pytest.mark.parametrize("script", [qdagger_jax, dqn_atari_jax])
def test_running_averages_are_refused(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient steps would not update them: one line says so."""
    monkeypatch.setattr(script, "QNetwork", BatchNormNetwork)
    with pytest.raises(UserError, match=r"^QNetwork has batch_stats, and only layers with [^\n]*$"):
        AGENTS[script](script.Args(), A, cpu(script))
