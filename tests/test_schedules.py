"""Schedules: the weight of the distillation loss, exploration, what is due when, and the target network."""

import copy
import math
from collections.abc import Callable
from typing import Any

import dqn_atari
import dqn_atari_jax
import jax.numpy as jnp
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from hypothesis import given
from hypothesis import strategies as st

from cleanrl_utils import evaluation

every_qdagger = pytest.mark.parametrize("script", [qdagger, qdagger_jax])
every_script = pytest.mark.parametrize("script", [qdagger, qdagger_jax, dqn_atari, dqn_atari_jax])
scores = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6))
games = st.lists(scores, min_size=10, max_size=30)
coefficients = st.floats(0, 10)


# ==================== λ ====================


@every_qdagger
@given(st.lists(scores, max_size=30), scores, scores, coefficients)
def test_lambda_is_always_usable(
    script: Any, recent: list[float], teacher: float, random: float, coefficient: float
) -> None:
    """A NaN, an infinity or a negative weight would wreck the student without any error."""
    now = script.distill_coefficient_now(recent, teacher, random, coefficient)
    assert math.isfinite(now)
    assert 0 <= now <= coefficient


@every_qdagger
@given(games, scores, scores, coefficients)
def test_lambda_is_the_formula(
    script: Any, recent: list[float], teacher: float, random: float, coefficient: float
) -> None:
    """λ = distill_coefficient · clip( (G_T − G) / (G_T − G_random), 0, 1 ) wherever that is defined.

    In exact fractions rounded at the end: cases in which the divisor has no significant bits left are no test.
    """
    if teacher - random < 1e-3:
        return
    mean = math.fsum(recent[-10:]) / 10
    expected = coefficient * sorted((0.0, (teacher - mean) / (teacher - random), 1.0))[1]
    now = script.distill_coefficient_now(recent, teacher, random, coefficient)
    assert now == pytest.approx(expected, rel=1e-6, abs=1e-5)


@every_qdagger
@given(st.floats(1, 1e6), st.floats(0, 1), coefficients)
def test_lambda_is_the_papers_where_random_scores_nothing(
    script: Any, teacher: float, share: float, coefficient: float
) -> None:
    """Agarwal et al. (2022): max(1 − G/G_T, 0)."""
    student = share * teacher
    now = script.distill_coefficient_now([student] * 10, teacher, 0.0, coefficient)
    assert now == pytest.approx(coefficient * max(1 - student / teacher, 0), rel=1e-6, abs=1e-9)


@every_qdagger
def test_lambda_where_scores_are_negative(script: Any) -> None:
    """Pong: the paper's formula would give 1 − (−15)/19 > 1 here, and a negative weight to a teacher of −5."""
    assert script.distill_coefficient_now([-21] * 10, 19, -21, 1.0) == 1
    assert script.distill_coefficient_now([-1] * 10, 19, -21, 1.0) == 0.5
    assert script.distill_coefficient_now([-13] * 10, -5, -21, 2.0) == 1.0
    assert script.distill_coefficient_now([20] * 10, 19, -21, 1.0) == 0
    assert script.distill_coefficient_now([-21] * 10, 19, -19, 1.0) == 1  # a student worse than random


@every_qdagger
@given(st.lists(scores, max_size=9), scores, scores, coefficients)
def test_lambda_is_full_before_ten_games(
    script: Any, recent: list[float], teacher: float, random: float, coefficient: float
) -> None:
    """Nine lucky games don't end the teaching."""
    assert script.distill_coefficient_now(recent, teacher, random, coefficient) == coefficient


@every_qdagger
@given(st.lists(scores, max_size=20), games, scores, scores)
def test_lambda_forgets_all_but_ten_games(
    script: Any, before: list[float], recent: list[float], teacher: float, random: float
) -> None:
    """What the student was long ago does not count."""
    expected = script.distill_coefficient_now(recent[-10:], teacher, random, 1.0)
    assert script.distill_coefficient_now(before + recent, teacher, random, 1.0) == expected


@every_qdagger
@given(st.lists(st.integers(0, 100), min_size=10, max_size=10), st.integers(0, 9), st.integers(1, 50))
def test_lambda_falls_as_the_student_improves(script: Any, recent: list[int], index: int, gain: int) -> None:
    """Each of the ten games counts, and counts alike."""
    better = copy.copy(recent)
    better[index] += gain
    drop = script.distill_coefficient_now(recent, 1000, 0, 1.0) - script.distill_coefficient_now(better, 1000, 0, 1.0)
    assert drop == pytest.approx(gain / 10 / 1000)


@every_qdagger
@given(games, scores, st.floats(0, 1e6), coefficients)
def test_lambda_of_a_teacher_no_better_than_random(
    script: Any, recent: list[float], teacher: float, margin: float, coefficient: float
) -> None:
    """There is no way to come up: all or nothing, whichever side of the teacher the student is."""
    now = script.distill_coefficient_now(recent, teacher, teacher + margin, coefficient)
    assert now in (0.0, coefficient)
    assert script.distill_coefficient_now([teacher - 1] * 10, teacher, teacher + margin, coefficient) == coefficient
    assert script.distill_coefficient_now([teacher + 1] * 10, teacher, teacher + margin, coefficient) == 0


# ==================== exploration ====================


@every_script
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 10**7), st.integers(0, 10**7))
def test_epsilon(script: Any, start_e: float, end_e: float, duration: int, step: int) -> None:
    """From one end to the other along a straight line, and no further."""
    epsilon = script.linear_schedule(start_e, end_e, duration, step)
    share = min(step, duration) / duration
    assert epsilon == pytest.approx((1 - share) * start_e + share * end_e, abs=1e-9)
    assert min(start_e, end_e) - 1e-12 <= epsilon <= max(start_e, end_e) + 1e-12
    assert script.linear_schedule(start_e, end_e, duration, 0) == start_e
    assert script.linear_schedule(start_e, end_e, duration, duration + step) == pytest.approx(end_e)


@every_script
@pytest.mark.parametrize("step", [0, 1, 10**6])
def test_epsilon_without_exploration(script: Any, step: int) -> None:
    """`--exploration-fraction 0` is greedy from the first step, not a division by zero."""
    assert script.linear_schedule(1.0, 0.01, 0.0, step) == 0.01


Make = Callable[[np.ndarray], Any]
every_epsilon_greedy = pytest.mark.parametrize(
    ("module", "make"),
    [
        *((module, torch.from_numpy) for module in (qdagger, dqn_atari)),
        *((module, jnp.asarray) for module in (qdagger_jax, dqn_atari_jax)),
        (evaluation, np.asarray),
    ],
)


@every_epsilon_greedy
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy(module: Any, make: Make, epsilon: float) -> None:
    """The best action, or with probability ε any, the best one among them."""
    draws, rng = 40_000, np.random.default_rng(0)
    best = rng.integers(0, 5, draws)
    actions = module.epsilon_greedy(make(np.eye(5, dtype=np.float32)[best]), epsilon, rng)
    assert actions.dtype == np.int64
    assert actions.shape == (draws,)
    # Rows: the best action; columns: the action taken.
    share = np.bincount(5 * best + actions, minlength=25).reshape(5, 5) / np.bincount(best)[:, None]
    expected = np.full((5, 5), epsilon / 5) + (1 - epsilon) * np.eye(5)
    assert np.abs(share - expected).max() <= 5 * np.sqrt(0.25 * 5 / draws) * (epsilon > 0)


@every_epsilon_greedy
def test_epsilon_greedy_chances_are_independent(module: Any, make: Make) -> None:
    """Whether to explore is decided per game, not per batch."""
    rng = np.random.default_rng(0)
    q_values = make(np.tile(np.float32([0, 1, 0, 0]), (16, 1)))
    greedy = np.array([(module.epsilon_greedy(q_values, 0.5, rng) == 1).sum() for _ in range(200)])
    assert greedy.min() > 0
    assert greedy.max() <= 16
    assert np.abs(greedy.mean() - 16 * 0.625) < 1
    assert 1 < greedy.std() < 3


# ==================== what is due ====================


@every_script
@given(st.lists(st.integers(1, 64), max_size=50), st.integers(0, 10**6), st.integers(1, 1000))
def test_nothing_due_is_lost_or_repeated(script: Any, strides: list[int], start: int, every: int) -> None:
    """Whatever the strides: updates per environment step do not depend on `num_envs`."""
    end, total = start, 0
    for stride in strides:
        total += script.times_due(end, end + stride, every)
        end += stride
    assert total == sum(1 for step in range(start + 1, end + 1) if step % every == 0)


@every_script
@given(st.integers(1, 1000), st.integers(1, 100), st.integers(1, 64))
def test_due_at_the_end_of_its_interval(script: Any, every: int, times: int, stride: int) -> None:
    """A multiple belongs to the interval that ends with it, not to the next one as well."""
    multiple = every * times
    assert script.times_due(multiple - 1, multiple, every) == 1
    assert script.times_due(multiple, multiple + min(stride, every) - 1, every) == 0


# ==================== target network ====================


@pytest.mark.parametrize("script", [qdagger, dqn_atari])
@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_target_network_moves_by_tau(script: Any, tau: float) -> None:
    """tau 1 copies, bit for bit; anything less goes that share of the way; the online network stays where it is."""
    online, target = script.QNetwork(4), script.QNetwork(4)
    before, online_before = copy.deepcopy(target.state_dict()), copy.deepcopy(online.state_dict())
    script.update_target(target, online, tau)
    for key, value in target.state_dict().items():
        expected = (1 - tau) * before[key].double() + tau * online_before[key].double()
        if tau in (0.0, 1.0):
            assert torch.equal(value, expected.float()), key
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-7)
        assert torch.equal(online.state_dict()[key], online_before[key])
    if tau == 1:
        with torch.no_grad():
            next(online.parameters()).add_(1)
        assert not torch.equal(next(online.parameters()), next(target.parameters())), "the two share memory"
