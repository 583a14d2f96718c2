"""The JAX scripts against the PyTorch scripts: same weights, same batch, same numbers; and what only JAX has."""

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dqn_atari
import dqn_atari_jax
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import GAME, TIMED_TAGS, only, read_scalars, run_script, tiny, twin, without_torch, write_teacher

from cleanrl_utils.checks import UserError
from cleanrl_utils.convert import convert, flax_to_torch, read_flax, read_torch, torch_to_flax
from cleanrl_utils.device import pick_jax_device
from cleanrl_utils.evals import dqn_eval, dqn_jax_eval
from cleanrl_utils.hub import model_card
from cleanrl_utils.max_pool import max_pool
from cleanrl_utils.run import Run

REPO = Path(__file__).parent.parent
A = 6
Params = qdagger_jax.Params
SIZES = {"num_envs": 8, "teacher_steps": 160, "buffer_size": 160}
"""Of all runs here, so that each finds in the cache what the one before has compiled"""


def spread(network: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random weights, large enough that no term of the network is too small to be seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.5 / fan_in) ** 0.5)
    return network


def to_jax(network: torch.nn.Module) -> Params:
    """The network's weights as flax variables."""
    # Copies: JAX may share an array's memory, and compute with it later than PyTorch changes it.
    weights = {key: value.numpy().copy() for key, value in network.state_dict().items()}
    return jax.tree.map(jnp.array, unflatten_dict(torch_to_flax(weights), sep="/"))


def to_torch(params: Params) -> dict[str, np.ndarray]:
    """Flax variables, or gradients of that form, with torch's keys and shapes."""
    return flax_to_torch({key: np.asarray(value) for key, value in flatten_dict(params, sep="/").items()})


def observations(rng: np.random.Generator, size: int, flat: bool = False) -> np.ndarray:
    """Noise; or flat areas, as games have them, in which a pool finds many maxima of the same size."""
    if flat:
        return np.kron(rng.integers(0, 256, (size, 4, 6, 6)), np.ones((14, 14))).astype(np.uint8)
    return rng.integers(0, 256, (size, 4, 84, 84), dtype=np.uint8)


def make_batch(seed: int, size: int = 4, flat: bool = False) -> dict[str, np.ndarray]:
    """Random transitions, some of which end."""
    rng = np.random.default_rng(seed)
    return {
        "observation": observations(rng, size, flat),
        "action": rng.integers(0, A, size),
        "n_step_return": rng.uniform(-2, 2, size).astype(np.float32),
        "bootstrap_observation": observations(rng, size, flat),
        "bootstrap_discount": rng.choice([0.0, 0.99, 0.99**3], size).astype(np.float32),
        "teacher_q_values": rng.normal(size=(size, A)).astype(np.float32),
    }


def torch_batch(script: Any, batch: dict[str, np.ndarray]) -> Any:
    """The batch that a PyTorch script's loss takes."""
    return script.Batch(**{key: torch.from_numpy(batch[key]) for key in script.Batch._fields})


def jax_batch(script: Any, batch: dict[str, np.ndarray]) -> Any:
    """The batch that a JAX script's loss takes."""
    return script.Batch(**{key: jnp.asarray(batch[key]) for key in script.Batch._fields})


# ==================== parity ====================

every_network = pytest.mark.parametrize(
    ("network", "twin"),
    [
        (qdagger.QNetwork, qdagger_jax.QNetwork),
        (qdagger.TeacherNetwork, qdagger_jax.TeacherNetwork),
        (dqn_atari.QNetwork, dqn_atari_jax.QNetwork),
    ],
)


@every_network
def test_networks(network: Callable, twin: Callable) -> None:
    """The same weights give the same Q-values, and a new network has the same arrays."""
    torch_network = spread(network(A), seed=1)
    observation = observations(np.random.default_rng(0), 4)
    expected = torch_network(torch.from_numpy(observation)).detach().numpy()
    q_values = jax.jit(twin(A).apply)(to_jax(torch_network), observation)
    assert q_values.dtype == np.float32
    np.testing.assert_allclose(q_values, expected, rtol=1e-4, atol=1e-4)
    shapes = jax.eval_shape(twin(A).init, jax.random.key(0), observation)
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, to_jax(torch_network))


@every_network
def test_bfloat16_stays_close(network: Callable, twin: Callable) -> None:
    """Hidden layers are rounded to 8 bits, Q-values are not: they would come in steps of 1/256 of their size."""
    params, observation = to_jax(network(A)), observations(np.random.default_rng(2), 2)
    expected, q_values = (
        np.asarray(jax.jit(twin(A, dtype).apply)(params, observation)) for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert q_values.dtype == np.float32
    assert not np.array_equal(q_values, q_values.astype(jnp.bfloat16)), "the last layer is rounded to bfloat16"
    np.testing.assert_allclose(q_values, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    program = str(jax.make_jaxpr(twin(A, jnp.bfloat16).apply)(params, observation))
    products = re.findall(r":(\w+)\[[\d,]*\] = (?:conv_general_dilated|dot_general)", program)
    assert products == ["bf16"] * (len(jax.tree.leaves(params)) // 2 - 1) + ["f32"]


@pytest.mark.parametrize(("network", "script"), [(qdagger.QNetwork, qdagger_jax), (dqn_atari.QNetwork, dqn_atari_jax)])
def test_first_weights(network: Callable, script: Any) -> None:
    """Kernels and biases have the range and the spread of PyTorch's, and no two layers the same numbers."""
    ours = [to_torch(script.first_params(script.QNetwork(A), jax.random.PRNGKey(seed))) for seed in range(8)]
    torch.manual_seed(0)
    theirs = [network(A).state_dict() for _ in range(8)]
    assert ours[0].keys() == theirs[0].keys()
    for name in ours[0]:
        array, expected = (np.stack([np.asarray(weights[name]) for weights in side]) for side in (ours, theirs))
        assert array.dtype == np.float32
        # Eight draws of A biases each are the fewest.
        assert np.abs(array).max() == pytest.approx(np.abs(expected).max(), rel=0.1), name
        assert array.std() == pytest.approx(expected.std(), rel=0.25), name
    assert len({array.flat[0] for weights in ours for array in weights.values()}) == 8 * len(ours[0])


@pytest.fixture
def torch_in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The PyTorch networks in float64, though they ask for float32 before the last layer."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_same_gradient(network: torch.nn.Module, gradients: Params) -> None:
    """Every leaf differs by at most 1e-4 of its length."""
    leaves = to_torch(gradients)
    assert leaves.keys() == dict(network.named_parameters()).keys()
    for name, parameter in network.named_parameters():
        difference = np.linalg.norm(leaves[name] - parameter.grad.numpy())
        assert difference <= 1e-4 * np.linalg.norm(parameter.grad.numpy()), name


def check_qdagger_loss(batch: dict[str, np.ndarray], weight: float, temperature: float) -> None:
    """Loss terms to 1e-5, every leaf of the gradient to 1e-4 of its length."""
    student, target_network = (spread(qdagger.QNetwork(A), seed) for seed in (2, 3))
    apply = qdagger_jax.QNetwork(A).apply
    torch_side, jax_side = torch_batch(qdagger, batch), jax_batch(qdagger_jax, batch)
    td_targets = qdagger_jax.td_target(to_jax(target_network), jax_side, apply)
    gradients, losses = jax.jit(jax.grad(qdagger_jax.qdagger_loss, has_aux=True), static_argnums=5)(
        to_jax(student), td_targets, jax_side, weight, temperature, apply
    )
    expected = qdagger.qdagger_loss(
        student, qdagger.td_target(target_network, torch_side), torch_side, weight, temperature
    )
    expected.loss.backward()
    for name in ("loss", "td_loss", "distill_loss"):
        assert getattr(losses, name).item() == pytest.approx(getattr(expected, name).item(), rel=1e-5), name
    np.testing.assert_allclose(losses.q_values, expected.q_values.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert_same_gradient(student, gradients)


@pytest.mark.parametrize(("weight", "temperature"), [(1.0, 0.1), (0.3, 1.0)])
def test_qdagger_loss_and_gradient(weight: float, temperature: float) -> None:
    """Both backends in float32.

    The seed's batch has no window whose two largest pixels differ by rounding only: then either backend may take the
    other one for the maximum, and both differ from float64 by some 1e-4.
    """
    check_qdagger_loss(make_batch(5), weight, temperature)


@pytest.mark.usefixtures("torch_in_float64")
def test_qdagger_gradient_where_a_pool_has_many_maxima() -> None:
    """PyTorch in float64, for in float32 it rounds the same sum differently in different places of the image."""
    batch = make_batch(4, flat=True)
    check_qdagger_loss({k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in batch.items()}, 1.0, 0.1)


def test_dqn_loss_and_gradient() -> None:
    """The same of the DQN scripts."""
    online, target_network = (spread(dqn_atari.QNetwork(A), seed) for seed in (5, 6))
    batch, apply = make_batch(7), dqn_atari_jax.QNetwork(A).apply
    torch_side, jax_side = torch_batch(dqn_atari, batch), jax_batch(dqn_atari_jax, batch)
    loss, q_values = dqn_atari.dqn_loss(online, target_network, torch_side)
    loss.backward()
    gradients, (twin_loss, twin_q_values) = jax.grad(dqn_atari_jax.dqn_loss, has_aux=True)(
        to_jax(online), to_jax(target_network), jax_side, apply
    )
    assert twin_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(twin_q_values, q_values.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert_same_gradient(online, gradients)


def test_extreme_q_values_keep_the_loss_finite() -> None:
    """A teacher thousands of temperatures sure of its action has softmax zeros: 0 · log 0 is 0, not NaN."""
    q = jnp.array([[0.0, 5e3, -5e3], [1e4, 0.0, 0.0]])
    teacher_q = jnp.array([[1e4, 0.0, -1e4], [1e4, 0.0, 0.0]])
    batch = qdagger_jax.Batch(jnp.arange(2), jnp.array([0, 1]), jnp.zeros(2), jnp.arange(2), jnp.zeros(2), teacher_q)

    def look_up(q: jax.Array, state: jax.Array) -> jax.Array:
        return q[state]

    y = qdagger_jax.td_target(q, batch, look_up)
    gradient, losses = jax.grad(qdagger_jax.qdagger_loss, has_aux=True)(q, y, batch, 1.0, 0.1, look_up)
    assert losses.distill_loss.item() == pytest.approx(5e3 / 0.1 / 2)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize(("script", "final"), [(qdagger_jax, None), (qdagger_jax, 1e-4), (dqn_atari_jax, None)])
def test_updates_are_adams(
    script: Any, final: float | None, small_networks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates leave the weights that three of PyTorch leave, each draws anew, and the target network stays.

    QDagger's are made in two calls, of one update and of two; λ is at 35 % of what it began with, and with it the
    learning rate on its way up from the final one.
    """
    torch_script = qdagger if script is qdagger_jax else dqn_atari
    batches = [make_batch(seed, 2) for seed in (11, 12, 13)]
    student, target_network = (spread(torch_script.QNetwork(A), seed) for seed in (14, 15))
    optimizer = optax.adam(1e-3)
    params = to_jax(student)
    state = script.TrainState(params, to_jax(target_network), optimizer.init(params), jax.random.PRNGKey(5))

    # In place of a ring there are the batches themselves; the key says which one is drawn.
    ring = jax.tree.map(lambda *x: jnp.stack(x), *(jax_batch(script, batch) for batch in batches))
    keys: list[tuple[int, ...]] = []
    drawn: list[int] = []

    def note(key: np.ndarray, i: np.ndarray) -> None:
        keys.append(tuple(key.tolist()))
        drawn.append(int(i))

    def sample(ring: Any, key: jax.Array, low: int, high: int, args: Any) -> Any:
        assert args.gamma == 0.9
        i = jax.random.randint(key, (), low - 5, high - 6)
        jax.debug.callback(note, key, i, ordered=True)
        return jax.tree.map(lambda x: x[i], ring)

    monkeypatch.setattr(script, "sample", sample)
    args = script.Args(gamma=0.9, learning_rate=1e-3)
    args.temperature, args.distill_coefficient, args.final_learning_rate = 0.5, 2.0, final
    learn = functools.partial(script.update, args=args, apply=script.QNetwork(A).apply, optimizer=optimizer)
    if script is qdagger_jax:
        learn = jax.jit(learn, static_argnames="due")
        for due in (1, 2):
            state, losses = learn(state, ring, 5, 9, 0.7, due=due)
    else:
        learn = jax.jit(learn)
        for _ in range(3):
            state, losses = learn(state, ring, 5, 9)
    jax.effects_barrier()
    assert len(set(keys)) == 3
    assert len(set(drawn)) >= 2

    adam = torch.optim.Adam(student.parameters(), lr=final + 0.35 * (1e-3 - final) if final else 1e-3)
    for i in drawn:
        torch_side = torch_batch(torch_script, batches[i])
        if script is qdagger_jax:
            expected = qdagger.qdagger_loss(
                student, qdagger.td_target(target_network, torch_side), torch_side, 0.7, 0.5
            )
        else:
            expected = dqn_atari.dqn_loss(student, target_network, torch_side)
        adam.zero_grad()
        expected.loss.backward()
        adam.step()
    assert losses.loss.item() == pytest.approx(expected.loss.item(), rel=1e-4)
    after, target_after = to_torch(state.params), to_torch(state.target_params)
    for name, parameter in student.named_parameters():
        # Where a gradient is hardly more than rounding, so is Adam's step of full length along it.
        close = np.isclose(after[name], parameter.detach().numpy(), rtol=0, atol=5e-5)
        assert close.mean() > 0.995, name
    for name, parameter in target_network.named_parameters():
        np.testing.assert_array_equal(target_after[name], parameter.detach().numpy())


@pytest.mark.parametrize("offline_steps", [0, 6])
@pytest.mark.parametrize("online", [None, 1e-4])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_learning_rate_rises_and_falls(
    warmup: int, online: float | None, offline_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's optimizer makes the steps of PyTorch's Adam with a learning rate that moves in straight lines."""
    made = []
    adam = optax.adam
    monkeypatch.setattr(optax, "adam", lambda learning_rate: made.append(adam(learning_rate)) or made[-1])
    monkeypatch.setattr(Run, "evaluate", lambda *args: 1 / 0)  # far enough
    monkeypatch.chdir(tmp_path)
    args = tiny(write_teacher(tmp_path), learning_rate=1e-3, online_learning_rate=online, warmup_updates=warmup)
    args.offline_steps = offline_steps
    with pytest.raises(ZeroDivisionError):
        qdagger_jax.main(twin(args, qdagger_jax))
    rng, weight, parameter = np.random.default_rng(0), jnp.ones(3), torch.nn.Parameter(torch.ones(3))
    reference = torch.optim.Adam([parameter])
    state = made[0].init(weight)
    for number in range(1, 9):
        gradient = rng.normal(size=3).astype(np.float32)
        change, state = made[0].update(jnp.asarray(gradient), state)
        weight = optax.apply_updates(weight, change)
        fallen = min((number - 1) / offline_steps, 1) if offline_steps else 1
        learning_rate = 1e-3 + fallen * ((online or 1e-3) - 1e-3)
        reference.param_groups[0]["lr"] = learning_rate * (min(number / warmup, 1) if warmup else 1)
        parameter.grad = torch.from_numpy(gradient)
        reference.step()
        np.testing.assert_allclose(weight, parameter.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("script", [qdagger_jax, dqn_atari_jax])
def test_target_network_moves_by_tau(script: Any, tau: float) -> None:
    """tau 1 copies, bit for bit; anything less goes that share of the way; the online network stays where it is."""
    rng = np.random.default_rng(8)
    online, target = ({"w": rng.normal(size=50).astype(np.float32)} for _ in range(2))
    state = script.TrainState(*jax.tree.map(jnp.array, (online, target)), None, jax.random.key(0))
    state = script.update_target(state, tau)
    np.testing.assert_allclose(state.target_params["w"], (1 - tau) * target["w"] + tau * online["w"], atol=1e-6)
    if tau == 1:
        np.testing.assert_array_equal(state.target_params["w"], online["w"])
    np.testing.assert_array_equal(state.params["w"], online["w"])


# ==================== max-pooling ====================


@settings(max_examples=15)
@given(height=st.integers(1, 12), width=st.integers(1, 12), seed=st.integers(0, 100), values=st.sampled_from([2, 1000]))
def test_max_pool_is_flaxs(height: int, width: int, seed: int, values: int) -> None:
    """Value and gradient, also where a window has several maxima."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, values, (2, height, width, 3)).astype(np.float32) - values / 2

    def reference(x: jax.Array) -> jax.Array:
        return flax.linen.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))

    # Integers: sums of them are exact in any order.
    gradient = rng.integers(-8, 8, jax.eval_shape(reference, x).shape).astype(np.float32)

    @jax.jit
    def both(x: jax.Array, gradient: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        pairs = (jax.vjp(pool, x) for pool in (max_pool, reference))
        return [(pooled, pull(gradient)[0]) for pooled, pull in pairs]

    (pooled, pulled), (expected, expected_pulled) = both(x, gradient)
    np.testing.assert_array_equal(pooled, expected)
    np.testing.assert_array_equal(pulled, expected_pulled)


# ==================== files ====================


@pytest.mark.parametrize("network", [qdagger.QNetwork, qdagger.TeacherNetwork])
def test_convert_there_and_back(network: Callable, tmp_path: Path) -> None:
    """flax reads what comes out, and the way back gives the same weights under the same keys in the same order."""
    original = spread(network(A), seed=9).state_dict()
    torch.save(original, tmp_path / "torch")
    assert convert(tmp_path / "torch", tmp_path / "new" / "flax") == "flax"
    twin = qdagger_jax.QNetwork(A) if network is qdagger.QNetwork else qdagger_jax.TeacherNetwork(A)
    target = jax.tree.map(lambda array: np.zeros(array.shape), qdagger_jax.shapes_of(twin))
    restored = flax.serialization.from_bytes(target, (tmp_path / "new" / "flax").read_bytes())
    for name, value in to_torch(restored).items():
        np.testing.assert_array_equal(value, original[name].numpy())
    assert convert(tmp_path / "new" / "flax", tmp_path / "back") == "torch"
    back = torch.load(tmp_path / "back", weights_only=True)
    assert list(back) == list(original)
    assert all(torch.equal(back[key], original[key]) for key in original)


def test_embedded_teachers_are_one() -> None:
    """Both demos have the same teacher."""
    folder = REPO / "teachers"
    weights = read_torch(folder / "PongNoFrameskip-v4-dqn_atari-seed1" / "dqn_atari.cleanrl_model")
    flax_file = folder / "PongNoFrameskip-v4-dqn_atari_jax-seed1" / "dqn_atari_jax.cleanrl_model"
    twin_weights = flax_to_torch(read_flax(flax_file))
    assert weights.keys() == twin_weights.keys()
    assert all(np.array_equal(weights[key], twin_weights[key]) for key in weights)


def test_convert_refuses(tmp_path: Path) -> None:
    """Nothing is overwritten, and what is no model is called so."""
    torch.save(qdagger.TeacherNetwork(A).state_dict(), tmp_path / "model")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UserError, match="exists"):
        convert(tmp_path / "model", tmp_path / "text")
    with pytest.raises(UserError, match="no usable model"):
        convert(tmp_path / "text", tmp_path / "new")
    with pytest.raises(UserError, match="can't be written"):
        convert(tmp_path / "model", tmp_path / "text" / "new")
    assert (tmp_path / "text").read_text() == "hello"


@pytest.mark.parametrize("script", [qdagger_jax, dqn_atari_jax])
def test_save_model_is_what_flax_writes(script: Any, tmp_path: Path) -> None:
    """To the byte."""
    params = script.first_params(script.QNetwork(A), jax.random.PRNGKey(10))
    script.save_model(params, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == flax.serialization.to_bytes(params)


class Captured(Exception):
    """Ends a run that has shown what it was begun for."""


@pytest.mark.parametrize("script", [qdagger_jax, dqn_atari_jax])
def test_players_take_any_batch(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Games of an evaluation end one by one; what is left gets the Q-values that it would get alone."""

    def capture(run: Run, name: str, q_function: Callable[[np.ndarray], np.ndarray], episodes: int) -> None:
        observation = observations(np.random.default_rng(3), 5)
        expected = np.concatenate([q_function(row[None]) for row in observation])
        assert expected.std(axis=0).min() > 0
        for size in (1, 2, 3, 5):
            q_values = q_function(observation[:size])
            assert q_values.shape == (size, 18)
            np.testing.assert_allclose(q_values, expected[:size], rtol=1e-4, atol=1e-5)
        raise Captured

    monkeypatch.setattr(Run, "evaluate", capture)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Captured):
        script.main(twin(tiny(write_teacher(tmp_path), train_frequency=60, **SIZES), script))


def test_what_is_only_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """bfloat16; and compiled programs are kept in the user's cache, or where they said, for a CPU only if so."""
    was, elsewhere = jax.config.jax_compilation_cache_dir, str(tmp_path / "elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []
    try:
        for backend, given in (("cpu", None), ("gpu", None), ("gpu", elsewhere), ("cpu", elsewhere)):
            jax.config.update("jax_compilation_cache_dir", given)
            monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
            assert pick_jax_device(bf16=True) == (jnp.float32 if backend == "cpu" else jnp.bfloat16)
            assert pick_jax_device(bf16=False) == jnp.float32
            found.append(jax.config.jax_compilation_cache_dir)
    finally:
        jax.config.update("jax_compilation_cache_dir", was)
    assert found == [None, str(tmp_path / "qdagger-jax"), elsewhere, elsewhere]


@pytest.mark.parametrize("script", [dqn_atari, dqn_atari_jax, qdagger, qdagger_jax])
def test_model_card_names_scripts_of_its_backend(script: Any) -> None:
    """What plays a model, and what learns from it."""
    card = model_card(script.Args(), "alice/a-model", np.array([1.0]))
    module = dqn_jax_eval if script in (dqn_atari_jax, qdagger_jax) else dqn_eval
    student = qdagger_jax if module is dqn_jax_eval else qdagger
    assert f"\npython -m {module.__name__} --model alice/a-model " in card
    assert f"\npython {Path(student.__file__).relative_to(REPO)} --env-id BreakoutNoFrameskip-v4 " in card


# ==================== runs ====================


def test_nothing_is_compiled_after_the_first_updates(
    small_networks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acting and learning compile once per phase: every later step finds its program."""
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **kwargs: compiled.append(event) if event.endswith("jaxpr_to_mlir_module_duration") else None
    )
    seen: list[int] = []
    recv = qdagger_jax.AtariEnvs.recv

    monkeypatch.setattr(qdagger_jax.AtariEnvs, "recv", lambda envs: seen.append(len(compiled)) or recv(envs))
    monkeypatch.setattr("cleanrl_utils.run.play_games", lambda q_function, **game: np.zeros(1))
    monkeypatch.chdir(tmp_path)
    sizes = SIZES | {"offline_steps": 0, "total_timesteps": 240, "learning_starts": 80}
    teacher = write_teacher(tmp_path / "teacher")
    args = tiny(teacher, **sizes, train_frequency=4, target_network_frequency=40)
    qdagger_jax.main(twin(args, qdagger_jax))
    # Steps 0 to 9 fill the replay; updates begin with step 10, and the target network moves in one of steps 10 to 14.
    assert len(seen) == 30
    assert seen[9] > 0
    assert seen[15:] == [seen[15]] * 15


def test_runs_without_torch(tmp_path: Path) -> None:
    """DQN's script, from start to end where PyTorch can't be imported; QDagger's gives a teacher of PyTorch one line.

    With one of flax, test_cli.py runs it so.
    """
    environ = {"PYTHONPATH": f"{without_torch(tmp_path / 'no')}{os.pathsep}{REPO}"}
    flags = f"--env-id {GAME} --num-envs 8 --buffer-size 160 --total-timesteps 64 --learning-starts 40 --batch-size 4 "
    flags += "--eval-episodes 1 --end-e 0.8 --save-model --train-frequency 8"
    result = run_script("dqn_atari_jax", tmp_path, *flags.split(), **environ, short_games=True)
    assert result.returncode == 0, result.stderr
    run_dir = only((tmp_path / "runs").iterdir())
    assert read_scalars(run_dir)["eval/episodic_return"]
    assert len(read_flax(run_dir / "dqn_atari_jax.cleanrl_model")) == 10
    teacher = write_teacher(tmp_path / "torch")
    flags += f" --teacher-steps 160 --teacher-policy-hf-repo {teacher} --teacher-model-exp-name dqn_atari"
    result = run_script("qdagger_dqn_atari_jax_impalacnn", tmp_path, *flags.split(), **environ)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "PyTorch" in result.stderr
    assert "convert" in result.stderr


def test_same_seed_same_run(small_networks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same scalars, but for those that time something, and the same models; another seed gives others."""
    monkeypatch.setattr("cleanrl_utils.atari.MAX_FRAMES", 200)
    teacher = write_teacher(tmp_path / "teacher")
    scalars, models = [], []
    for name, seed in (("first", 3), ("second", 3), ("other", 4)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        changes = {"offline_steps": 10, "offline_eval_frequency": 10, "total_timesteps": 130, "train_frequency": 10}
        changes |= {"buffer_size": 60}  # as many as of the teacher's: one program for both
        qdagger_jax.main(twin(tiny(teacher, seed=seed, save_model=True, **changes), qdagger_jax))
        run_dir = only(Path("runs").iterdir())
        models.append([path.read_bytes() for path in sorted(run_dir.glob("*.cleanrl_model"))])
        scalars.append({tag: events for tag, events in read_scalars(run_dir).items() if tag not in TIMED_TAGS})
    assert "losses/td_loss" in scalars[0]
    assert len(models[0]) == 2
    assert (scalars[0], models[0]) == (scalars[1], models[1])
    assert scalars[0]["losses/td_loss"] != scalars[2]["losses/td_loss"]
    assert all(a != b for a, b in zip(models[0], models[2], strict=True))
