"""Schedules: λ, learning rate, exploration, when updates are due, and the target network; the seed of an agent."""

import math
from typing import Any

import dqn_atari
import jax
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
from flax.traverse_util import flatten_dict
from helpers import AGENTS, cpu, spread
from hypothesis import given, settings
from hypothesis import strategies as st

every_qdagger = pytest.mark.parametrize("script", [qdagger, qdagger_jax])
every_script = pytest.mark.parametrize("script", list(AGENTS))
returns = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6))
ten = st.lists(returns, min_size=10, max_size=10)
rates = st.floats(1e-6, 1e-2)


# ==================== λ ====================


@every_qdagger
@settings(max_examples=200)
@given(st.lists(returns, max_size=9) | ten, returns, returns)
def test_share_of_lambda_is_the_formula(script: Any, recent: list[float], teacher: float, random: float) -> None:
    """It is clip((G_T − G) / (G_T − G_random), 0, 1), where G is the mean of 10 episodes.

    With fewer than 10 it is 1. Where the divisor is hardly more than rounding, only the bounds are known.
    """
    found = script.distillation_share(recent, teacher, random)
    assert 0 <= found <= 1
    if len(recent) < 10:
        assert found == 1
    elif teacher - random >= 1e-3:
        share = (teacher - math.fsum(recent) / 10) / (teacher - random)
        assert found == pytest.approx(min(max(share, 0.0), 1.0), rel=1e-6, abs=1e-6)


@every_qdagger
@given(returns, st.floats(0, 1e6))
def test_share_of_lambda_with_a_teacher_no_better_than_the_random_policy(
    script: Any, teacher: float, margin: float
) -> None:
    """It is a step function of the student's return."""
    assert script.distillation_share([teacher - 1] * 10, teacher, teacher + margin) == 1
    assert script.distillation_share([teacher + 1] * 10, teacher, teacher + margin) == 0


# ==================== learning rate ====================


schedule_flags = st.builds(
    dict,
    learning_rate=rates,
    online_learning_rate=st.none() | rates,
    final_learning_rate=st.none() | rates,
    warmup_updates=st.integers(0, 30),
    offline_steps=st.integers(0, 60),
)


@given(st.integers(0, 100), st.floats(0, 1), schedule_flags)
def test_learning_rate_is_the_formula_in_both_scripts(update: int, share: float, flags: dict[str, Any]) -> None:
    """Linear warmup; linear over the offline phase to the online rate; online with λ to the final rate."""
    args = qdagger.Args(**flags)
    online = update >= flags["offline_steps"]
    target = args.learning_rate if args.online_learning_rate is None else args.online_learning_rate
    if args.final_learning_rate is not None and online:
        target = args.final_learning_rate + share * (target - args.final_learning_rate)
    expected = target if online else args.learning_rate + update / args.offline_steps * (target - args.learning_rate)
    expected *= min((update + 1) / args.warmup_updates, 1) if args.warmup_updates else 1
    for script in (qdagger, qdagger_jax):
        found = script.learning_rate_at(update, script.Args(**flags), share)
        assert found == pytest.approx(expected, rel=1e-9)


# ==================== exploration ====================


@every_script
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 10**7), st.integers(0, 10**7))
def test_linear_schedule(script: Any, start: float, end: float, duration: int, step: int) -> None:
    """It is linear, then constant; a duration of 0 is the end from the first step."""
    share = min(step, duration) / duration
    found = script.linear_schedule(start, end, duration, step)
    assert found == pytest.approx((1 - share) * start + share * end, abs=1e-9)
    assert script.linear_schedule(start, end, duration, duration + step) == pytest.approx(end)
    assert script.linear_schedule(start, end, 0.0, step) == end


SAMPLES = 40_000


@every_script
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy(script: Any, epsilon: float) -> None:
    """Each action is a random one with probability ε. The order of the random numbers reproduces older runs."""
    rng = np.random.default_rng(0)
    twin = np.random.default_rng(0)
    best = rng.integers(0, 5, SAMPLES)
    random = twin.integers(0, 5, (2, SAMPLES))[1]
    temperature = [0.0] if script in (qdagger, qdagger_jax) else []
    actions = script.epsilon_greedy(np.eye(5, dtype=np.float32)[best], epsilon, rng, *temperature)
    np.testing.assert_array_equal(actions, np.where(twin.random(SAMPLES) < epsilon, random, best))
    assert rng.random() == twin.random()
    assert actions.dtype == np.int64


@every_qdagger
@pytest.mark.parametrize(("temperature", "epsilon"), [(0.1, 0.0), (1.0, 0.0), (0.1, 0.3)])
def test_sampling(script: Any, temperature: float, epsilon: float) -> None:
    """Actions are drawn from softmax(Q / temperature), with random ones on top: χ² at the level of 0.1 %."""
    q_values = np.array([0.3, 0.1, 0.0, -0.2, 0.25], np.float32)
    rows = np.tile(q_values, (SAMPLES, 1))
    rng = np.random.default_rng(0)
    actions = script.epsilon_greedy(rows, epsilon, rng, temperature)
    policy = np.exp(q_values / temperature) / np.exp(q_values / temperature).sum()
    expected = SAMPLES * (epsilon / 5 + (1 - epsilon) * policy)
    assert ((np.bincount(actions, minlength=5) - expected) ** 2 / expected).sum() < 18.5


# ==================== when updates are due ====================


@every_script
@given(st.lists(st.integers(1, 64), max_size=50), st.integers(0, 10**6), st.integers(1, 1000))
def test_each_multiple_is_due_once(script: Any, strides: list[int], start: int, every: int) -> None:
    """The updates per environment step do not depend on `num_envs`; a multiple belongs to the stride it ends."""
    end = start
    for stride in strides:
        expected = sum(step % every == 0 for step in range(end + 1, end + stride + 1))
        assert script.times_due(end, end + stride, every) == expected
        end += stride


# ==================== target network ====================


def weights_of(agent: Any) -> list[dict[Any, np.ndarray]]:
    """Return copies of the arrays of Q-network and target network."""
    if isinstance(agent, qdagger.Student | dqn_atari.Agent):
        networks = [network.state_dict() for network in (agent.q_network, agent.target_network)]
    else:
        networks = [flatten_dict(params) for params in (agent.state.params, agent.state.target_params)]
    return [{name: np.asarray(array).copy() for name, array in network.items()} for network in networks]


@pytest.mark.usefixtures("small_networks")
@every_script
def test_seed(script: Any) -> None:
    """It decides all weights, and the random numbers of updates."""
    agent, same, other = (AGENTS[script](script.Args(seed=seed), 4, cpu(script)) for seed in (1, 1, 2))
    assert agent.dump() == same.dump()
    for name, array in weights_of(agent)[0].items():
        assert (array != weights_of(other)[0][name]).all(), name
    is_torch = script in (qdagger, dqn_atari)
    states = [each.generator.get_state() if is_torch else each.state.key for each in (agent, other)]
    assert not np.array_equal(*states)


@pytest.mark.usefixtures("small_networks")
@every_script
@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_target_network_moves_by_tau(script: Any, tau: float) -> None:
    """It begins as a copy of the Q-network, and tau 1 copies that bit for bit. The Q-network does not change."""
    agent = AGENTS[script](script.Args(), 4, cpu(script))
    weights, before = weights_of(agent)
    assert all(np.array_equal(before[name], array) for name, array in weights.items())
    if script in (qdagger, dqn_atari):
        spread(agent.target_network, seed=1)
    else:
        target_params = jax.tree.map(lambda array: array + 1, agent.state.params)
        agent.state = agent.state._replace(target_params=target_params)
    weights, before = weights_of(agent)
    agent.update_target(tau)
    unchanged, found = weights_of(agent)
    for name, array in weights.items():
        expected = (1 - tau) * before[name] + tau * array
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=0 if tau in (0, 1) else 1e-6)
        np.testing.assert_array_equal(unchanged[name], array)
