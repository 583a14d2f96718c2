"""Schedules: the weight of the distillation loss, epsilon, what is due when, and the target network."""

import copy
import math

import dqn_atari
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import torch
from hypothesis import given
from hypothesis import strategies as st

from cleanrl_utils.torch_speed import WorkingCopy

scores = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6))
games = st.lists(scores, min_size=10, max_size=30)
coefficients = st.floats(0, 10)


# ==================== λ ====================


@given(st.lists(scores, max_size=30), scores, scores, coefficients)
def test_lambda_is_always_usable(recent: list[float], teacher: float, random: float, coefficient: float) -> None:
    """A NaN, an infinity or a negative weight would wreck the student without any error."""
    now = qdagger.distill_coefficient_now(recent, teacher, random, coefficient)
    assert math.isfinite(now)
    assert 0 <= now <= coefficient


@given(games, scores, scores, coefficients)
def test_lambda_is_the_formula(recent: list[float], teacher: float, random: float, coefficient: float) -> None:
    """λ = distill_coefficient · clip( (G_T − G) / (G_T − G_random), 0, 1 ) wherever that is defined.

    In exact fractions rounded at the end: cases in which the divisor has no significant bits left are no test.
    """
    if teacher - random < 1e-3:
        return
    mean = math.fsum(recent[-10:]) / 10
    expected = coefficient * sorted((0.0, (teacher - mean) / (teacher - random), 1.0))[1]
    now = qdagger.distill_coefficient_now(recent, teacher, random, coefficient)
    assert now == pytest.approx(expected, rel=1e-6, abs=1e-5)


@given(st.floats(1, 1e6), st.floats(0, 1), coefficients)
def test_lambda_is_the_papers_where_random_scores_nothing(teacher: float, share: float, coefficient: float) -> None:
    """Agarwal et al. (2022): max(1 − G/G_T, 0)."""
    student = share * teacher
    now = qdagger.distill_coefficient_now([student] * 10, teacher, 0.0, coefficient)
    assert now == pytest.approx(coefficient * max(1 - student / teacher, 0), rel=1e-6, abs=1e-9)


def test_lambda_where_scores_are_negative() -> None:
    """Pong: the paper's formula would give 1 − (−15)/19 > 1 here, and a negative weight to a teacher of −5."""
    assert qdagger.distill_coefficient_now([-21] * 10, 19, -21, 1.0) == 1
    assert qdagger.distill_coefficient_now([-1] * 10, 19, -21, 1.0) == 0.5
    assert qdagger.distill_coefficient_now([-13] * 10, -5, -21, 2.0) == 1.0
    assert qdagger.distill_coefficient_now([20] * 10, 19, -21, 1.0) == 0
    assert qdagger.distill_coefficient_now([-21] * 10, 19, -19, 1.0) == 1  # a student worse than random


@given(st.lists(scores, max_size=9), scores, scores, coefficients)
def test_lambda_is_full_before_ten_games(
    recent: list[float], teacher: float, random: float, coefficient: float
) -> None:
    """Nine lucky games don't end the teaching."""
    assert qdagger.distill_coefficient_now(recent, teacher, random, coefficient) == coefficient


@given(st.lists(scores, max_size=20), games, scores, scores)
def test_lambda_forgets_all_but_ten_games(
    before: list[float], recent: list[float], teacher: float, random: float
) -> None:
    """What the student was long ago does not count."""
    expected = qdagger.distill_coefficient_now(recent[-10:], teacher, random, 1.0)
    assert qdagger.distill_coefficient_now(before + recent, teacher, random, 1.0) == expected


@given(st.lists(st.integers(0, 100), min_size=10, max_size=10), st.integers(0, 9), st.integers(1, 50))
def test_lambda_falls_as_the_student_improves(recent: list[int], index: int, gain: int) -> None:
    """Each of the ten games counts, and counts alike."""
    better = copy.copy(recent)
    better[index] += gain
    drop = qdagger.distill_coefficient_now(recent, 1000, 0, 1.0) - qdagger.distill_coefficient_now(better, 1000, 0, 1.0)
    assert drop == pytest.approx(gain / 10 / 1000)


@given(games, scores, st.floats(0, 1e6), coefficients)
def test_lambda_of_a_teacher_no_better_than_random(
    recent: list[float], teacher: float, advantage: float, coefficient: float
) -> None:
    """There is no way to come up: all or nothing, whichever side of the teacher the student is."""
    now = qdagger.distill_coefficient_now(recent, teacher, teacher + advantage, coefficient)
    assert now in (0.0, coefficient)
    assert qdagger.distill_coefficient_now([teacher - 1] * 10, teacher, teacher + advantage, coefficient) == coefficient
    assert qdagger.distill_coefficient_now([teacher + 1] * 10, teacher, teacher + advantage, coefficient) == 0


# ==================== ε ====================


@pytest.mark.parametrize("script", [qdagger, dqn_atari])
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 10**7), st.integers(0, 10**7))
def test_epsilon(script: object, start_e: float, end_e: float, duration: int, step: int) -> None:
    """From one end to the other along a straight line, and no further."""
    epsilon = script.linear_schedule(start_e, end_e, duration, step)
    share = min(step, duration) / duration
    assert epsilon == pytest.approx((1 - share) * start_e + share * end_e, abs=1e-9)
    assert min(start_e, end_e) - 1e-12 <= epsilon <= max(start_e, end_e) + 1e-12
    assert script.linear_schedule(start_e, end_e, duration, 0) == start_e
    assert script.linear_schedule(start_e, end_e, duration, duration + step) == pytest.approx(end_e)


@pytest.mark.parametrize("script", [qdagger, dqn_atari])
@pytest.mark.parametrize("step", [0, 1, 10**6])
def test_epsilon_without_exploration(script: object, step: int) -> None:
    """`--exploration-fraction 0` is greedy from the first step, not a division by zero."""
    assert script.linear_schedule(1.0, 0.01, 0.0, step) == 0.01


# ==================== what is due ====================


@given(st.lists(st.integers(1, 64), max_size=50), st.integers(0, 10**6), st.integers(1, 1000))
def test_nothing_due_is_lost_or_repeated(strides: list[int], start: int, every: int) -> None:
    """Whatever the strides: updates per environment step do not depend on `num_envs`."""
    end, total = start, 0
    for stride in strides:
        total += qdagger.times_due(end, end + stride, every)
        end += stride
    assert total == sum(1 for step in range(start + 1, end + 1) if step % every == 0)


@given(st.integers(1, 1000), st.integers(1, 100), st.integers(1, 64))
def test_due_at_the_end_of_its_interval(every: int, times: int, stride: int) -> None:
    """A multiple belongs to the interval that ends with it, not to the next one as well."""
    multiple = every * times
    assert qdagger.times_due(multiple - 1, multiple, every) == 1
    assert qdagger.times_due(multiple, multiple + min(stride, every) - 1, every) == 0


@given(st.lists(st.integers(1, 10**6).map(lambda n: n * 10) | st.integers(1, 100), min_size=3, max_size=3))
def test_offline_updates_per_call(every: list[int]) -> None:
    """As many as 20, and never past a copy of the target network, an evaluation, a log entry or the end."""
    names = "target_network_frequency", "offline_eval_frequency", "offline_steps"
    count = qdagger.offline_updates_per_call(qdagger.Args(**dict(zip(names, every, strict=True))))
    assert count == max(n for n in (1, 2, 4, 5, 10, 20) if not any(interval % n for interval in (100, *every)))


# ==================== target network ====================


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_target_network_moves_by_tau(tau: float) -> None:
    """tau 1 copies, bit for bit; anything less goes that share of the way; the online network stays where it is."""
    online, target = qdagger.QNetwork(4), qdagger.QNetwork(4)
    copy_of_target = WorkingCopy(target, bf16=True)
    before, online_before = copy.deepcopy(target.state_dict()), copy.deepcopy(online.state_dict())
    qdagger.update_target(copy_of_target, WorkingCopy(online, bf16=True), tau)
    for rounded, value in zip(copy_of_target.network.parameters(), target.parameters(), strict=True):
        assert torch.equal(rounded, value.to(rounded.dtype))
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
