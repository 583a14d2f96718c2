"""The replay buffer against a naive oracle: whole episodes in lists, stacks of frames, and sums in float64."""

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import dqn_atari
import dqn_atari_jax
import jax
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from helpers import AGENTS, cpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleanrl_utils.atari import StepResult
from cleanrl_utils.checks import STACK, size_problem

NUM_ACTIONS = 7
SAMPLES = 32  # more than the windows of these tests have
STEP, LIFE, END, CUT, END_AND_CUT = "step", "life", "end", "cut", "end and cut"
"""Events in a step: none, a lost life, the end of the episode, its truncation, both at once"""
RESUME = "resume"
"""Event between two steps: the run is stopped and resumed with new episodes"""
TORCH = (qdagger, dqn_atari)

every_script = pytest.mark.parametrize("script", list(AGENTS))


@pytest.fixture(autouse=True, scope="module")
def compiled_transitions() -> Iterator[None]:
    """Compile `transitions_at` alone, since compiling all of `sample` takes a second for each size of the ring."""
    with pytest.MonkeyPatch.context() as patch:
        for script in (qdagger_jax, dqn_atari_jax):
            patch.setattr(script, "transitions_at", jax.jit(script.transitions_at, static_argnames="n_step"))
        yield


def make_replay(script: Any, size: int, num_envs: int, n_step: int) -> Any:
    """Make a replay buffer of a script."""
    num_actions = [NUM_ACTIONS] * (script in (qdagger, qdagger_jax))
    return script.Replay(size, num_envs, *num_actions, n_step, cpu(script))


# ==================== the oracle ====================


class Episode:
    """All observations, actions, rewards and terminations of an episode."""

    def __init__(self, first_frame: np.ndarray):
        self.observations = [np.concatenate([np.zeros((STACK - 1, 84, 84), np.uint8), first_frame[None]])]
        self.actions: list[int] = []
        self.rewards: list[int] = []
        self.terminated: list[bool] = []
        self.over = False

    def truncate(self) -> None:
        """Remove the newest action, if there is one: the observation after it was not stored."""
        if self.actions:
            for values in (self.observations, self.actions, self.rewards, self.terminated):
                values.pop()

    def transition(self, i: int, n_step: int, gamma: float) -> dict[str, np.ndarray | float | int]:
        """Return the n-step transition from step ``i``; at the final observation, only that."""
        if i == len(self.actions):
            return {"observation": self.observations[i]}
        end = next((j + 1 for j in range(i, len(self.actions)) if self.terminated[j]), len(self.actions))
        m = min(n_step, end - i)
        rewards = np.clip(self.rewards[i : i + m], -1, 1)
        return {
            "observation": self.observations[i],
            "action": self.actions[i],
            "n_step_return": float(sum(gamma**k * rewards[k] for k in range(m))),
            "bootstrap_observation": self.observations[i + m],
            "bootstrap_discount": 0.0 if self.terminated[i + m - 1] else gamma**m,
        }


def frame(env: int, t: int) -> np.ndarray:
    """Return a frame that differs from all others and contains its environment and its step."""
    image = np.full((84, 84), 1 + (env * 83 + t) % 251, np.uint8)
    image[0, :3] = env, t % 256, t // 256
    image[-1, -2:] = 255 - t % 256, 255 - env
    return image


def step_and_env(observation: np.ndarray) -> tuple[int, int]:
    """Return (t, env) of the newest frame of an observation."""
    env, low, high = observation[-1, 0, :3]
    return int(low) + 256 * int(high), int(env)


class Rollout:
    """Random actions and scripted events in several environments, added to a replay buffer and to the oracle."""

    def __init__(self, script: Any, num_envs: int, length: int, n_step: int, gamma: float, seed: int = 0):
        self.script = script
        self.replay = make_replay(script, length * num_envs, num_envs, n_step)
        self.generator = torch.Generator().manual_seed(seed)
        self.key = jax.random.key(seed)
        self.num_envs = num_envs
        self.length = length
        self.n_step = n_step
        self.gamma = gamma
        self.rng = np.random.default_rng(seed)
        self.episodes = [[Episode(frame(env, 0))] for env in range(num_envs)]
        self.places: list[list[tuple[Episode, int]]] = [[] for _ in range(num_envs)]  # of step t: episode, step in it
        self.teacher: list[np.ndarray] = []
        self.steps = 0

    def add(self, events: list[str]) -> None:
        """Add a step of each environment. Where an episode is over, the event is ignored and a new episode starts."""
        if RESUME in events:
            for env, episodes in enumerate(self.episodes):
                episodes[-1].truncate()
                episodes.append(Episode(frame(env, self.steps)))
            saved = self.replay
            self.replay = make_replay(self.script, saved.size, self.num_envs, self.n_step)
            self.replay.write(0, saved.read(0, self.length))
            self.replay.steps_added = saved.steps_added
            return self.replay.truncate_episodes()
        n = self.num_envs
        t = self.steps
        action = self.rng.integers(0, NUM_ACTIONS, n)
        reward = self.rng.choice([-400, -2, -1, 0, 1, 2, 7, 400], n).astype(np.int32)
        self.teacher.append(self.rng.normal(size=(n, NUM_ACTIONS)).astype(np.float32))
        terminated, truncated, reset = np.zeros((3, n), bool)
        observation = np.stack([episodes[-1].observations[-1] for episodes in self.episodes])
        for env, episodes in enumerate(self.episodes):
            episode = episodes[-1]
            image = frame(env, t + 1)
            self.places[env].append((episode, len(episode.actions)))
            if episode.over:
                reset[env] = True
                episodes.append(Episode(image))
                continue
            terminated[env] = events[env] in (LIFE, END, END_AND_CUT)
            truncated[env] = events[env] in (CUT, END_AND_CUT)
            episode.over = events[env] in (END, CUT, END_AND_CUT)
            episode.actions.append(int(action[env]))
            episode.rewards.append(int(reward[env]))
            episode.terminated.append(bool(terminated[env]))
            episode.observations.append(np.concatenate([episode.observations[-1][1:], image[None]]))
        result = StepResult(observation, reward, terminated, truncated, reset, [])
        of_teacher = [self.teacher[-1]] * (self.script in (qdagger, qdagger_jax))
        self.replay.add(observation, action, result, *of_teacher)
        self.steps += 1

    def batch(self, t: np.ndarray, env: np.ndarray) -> Any:
        """Return the replay buffer's transitions of steps ``t`` in environments ``env``, in NumPy arrays."""
        if self.script in TORCH:
            indices = [torch.from_numpy(index) for index in (t, env)]
        else:
            size = 2 if len(t) <= 2 else SAMPLES  # two shapes to compile for
            indices = [np.resize(index, size).astype(np.int32) for index in (t, env)]
        batch = self.script.transitions_at(self.replay.ring, *indices, self.n_step, self.gamma)
        return type(batch)(*(np.asarray(array)[: len(t)] for array in batch))

    def sample(self, batch_size: int = SAMPLES, **arrays: Any) -> Any:
        """Sample a batch from the steps that can be sampled; ``arrays`` replace those of the ring."""
        self.key, key = jax.random.split(self.key)
        random = self.generator if self.script in TORCH else key
        steps = self.replay.sampled_steps()
        ring = self.replay.ring._replace(**arrays)
        batch = self.script.sample(ring, steps.start, steps.stop, batch_size, random, self.n_step, self.gamma)
        return type(batch)(*map(np.asarray, batch))

    def window(self) -> list[tuple[int, int]]:
        """Return (t, env) of all steps that may be sampled if they are valid, oldest first."""
        return [(t, env) for t in window_of(self.steps, self.length, self.n_step) for env in range(self.num_envs)]

    def valid(self) -> list[tuple[int, int]]:
        """Return (t, env) of all transitions that may be sampled, oldest first."""
        places = {(t, env): self.places[env][t] for t, env in self.window()}
        return [at for at, (episode, i) in places.items() if i < len(episode.actions)]

    def check(self, batch: Any, steps: list[tuple[int, int]]) -> None:
        """Compare a batch with the oracle's transitions of these steps."""
        assert batch.observation.dtype == batch.bootstrap_observation.dtype == np.uint8
        assert batch.n_step_return.dtype == batch.bootstrap_discount.dtype == np.float32
        for b, (t, env) in enumerate(steps):
            episode, i = self.places[env][t]
            for name, value in episode.transition(i, self.n_step, self.gamma).items():
                tolerance = 1e-5 if isinstance(value, float) else 0
                found = getattr(batch, name)[b]
                np.testing.assert_allclose(found, value, tolerance, tolerance, err_msg=f"{name} of {t}, {env}")
            if self.script in (qdagger, qdagger_jax):
                np.testing.assert_array_equal(batch.teacher_q_values[b], self.teacher[t][env])

    def check_steps(self, steps: list[tuple[int, int]]) -> None:
        """Compare the replay buffer's transitions of these steps with the oracle's."""
        self.check(self.batch(*np.array(steps, np.int64).T), steps)

    def count(self, samples: int) -> Counter[tuple[int, int]]:
        """Sample many transitions; return how often each step of each environment was sampled."""
        corner = self.replay.ring.frame[:, :, :1, :8]  # it has step and environment, and takes less time
        return Counter(map(step_and_env, self.sample(samples, frame=corner).observation))


def window_of(steps: int, length: int, n_step: int) -> list[int]:
    """Return the steps whose stack and bootstrap observation are among the last ``length`` of ``steps`` steps."""
    oldest = max(0, steps - length)
    stacks = {t: [s for s in range(t - STACK + 1, t + 1) if s >= 0] for t in range(oldest, steps - n_step)}
    return [t for t, stack in stacks.items() if min(stack) >= oldest]


def scripted(script: Any, length: int, n_step: int, events: list[list[str]], gamma: float = 0.5) -> Rollout:
    """Play a list of events in each environment."""
    rollout = Rollout(script, len(events), length, n_step, gamma, seed=1)
    for step in zip(*events, strict=True):
        rollout.add(list(step))
    return rollout


# ==================== transitions ====================


@st.composite
def rollouts(draw: Callable) -> tuple[int, int, int, float, list[list[str]], int]:
    """Draw (num_envs, ring length, n_step, gamma, events, seed); the shortest ring is the shortest that is allowed."""
    # Few sizes, as JAX compiles for each of them.
    num_envs, more, n_step = draw(st.sampled_from([(2, 8, 1), (3, 3, 3), (1, 1, 4)]))
    length = STACK + n_step + more
    event = st.sampled_from([STEP, STEP, STEP, LIFE, LIFE, END, CUT, CUT, END_AND_CUT])
    step = st.lists(event, min_size=num_envs, max_size=num_envs)
    wrapped = draw(st.booleans())  # whether the ring is overwritten
    events = draw(st.lists(step, min_size=2 * length if wrapped else n_step + 1, max_size=3 * length + 5))
    for resumed_at in draw(st.sets(st.integers(1, len(events)), max_size=4)):
        events.insert(resumed_at, [RESUME])
    return num_envs, length, n_step, draw(st.floats(0, 1)), events, draw(st.integers(0, 2**16))


@every_script
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=rollouts())
def test_transitions_are_those_of_the_oracle(script: Any, case: tuple) -> None:
    """The oldest and newest are compared after each step, all of them and a sample at the end."""
    num_envs, length, n_step, gamma, events, seed = case
    rollout = Rollout(script, num_envs, length, n_step, gamma, seed)
    for step in events:
        rollout.add(step)
        if window := rollout.window():
            rollout.check_steps([window[0], window[-1]])
    if window := rollout.window():
        rollout.check_steps(window)
        batch = rollout.sample()
        sampled = [step_and_env(observation) for observation in batch.observation]
        assert set(sampled) <= set(window)
        rollout.check(batch, sampled)


# ==================== sampling ====================


@every_script
def test_sampling_is_uniform(script: Any) -> None:
    """All valid transitions are equally likely, though a fifth of the steps or more are final observations."""
    short_episodes = [STEP, END, STEP, LIFE, CUT, STEP] * 8
    events = [short_episodes, [*short_episodes[1:], STEP], [CUT, STEP, STEP] * 16]
    rollout = scripted(script, 20, 3, events)
    valid = rollout.valid()
    samples = 8_000
    assert len(rollout.window()) - len(valid) >= len(valid) / 4
    count = rollout.count(samples)
    oldest, _ = rollout.window()[0]
    assert set(valid) <= set(count)
    assert all(t == oldest for t, _ in set(count) - set(valid)), "the step before is in the window"
    expected = samples / len(valid)
    degrees = len(valid) - 1
    chi_square = sum((count[at] - expected) ** 2 / expected for at in valid)
    # The seed is fixed. Mean + 4 standard deviations are exceeded with about one seed in ten thousand.
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


@every_script
def test_samples_without_a_valid_candidate(script: Any) -> None:
    """The step before is taken, unless it is not in the window.

    First, every second step is a final observation, so that one of 256 samples has no valid candidate. Then each step
    is the last before a stop.
    """
    rollout = scripted(script, 40, 1, [[CUT] * 36])
    assert len(rollout.window()) == 35
    assert rollout.valid() == [(t, 0) for t in range(0, 35, 2)]
    assert set(rollout.count(8_000)) == set(rollout.valid())
    rollout = scripted(script, 6, 1, [[STEP, RESUME] * 3])
    batch = rollout.sample()
    sampled = [step_and_env(observation) for observation in batch.observation]
    assert rollout.window() == [(0, 0), (1, 0)]
    assert set(sampled) == {(0, 0)}
    rollout.check(batch, sampled)


# ==================== sizes and windows ====================


@every_script
@pytest.mark.parametrize(("size", "num_envs"), [(20, 2), (29, 3), (9, 1)])
def test_size(script: Any, size: int, num_envs: int) -> None:
    """The buffer has as many steps as fit, and stores each frame once."""
    replay = make_replay(script, size, num_envs, 1)
    assert replay.size == replay.length * num_envs <= size < replay.size + num_envs
    assert all(array.shape[:2] == (replay.length, num_envs) for array in replay.ring)
    assert 84 * 84 <= sum(array.nbytes for array in replay.ring) / replay.size < 84 * 84 + 50


@every_script
@given(steps=st.integers(0, 300), length=st.integers(STACK + 2, 100), n_step=st.integers(1, 8))
def test_sampled_steps_are_exact(script: Any, steps: int, length: int, n_step: int) -> None:
    """They are all steps that can be sampled, and no other."""
    replay = SimpleNamespace(steps_added=steps, length=length, n_step=n_step)
    assert list(script.Replay.sampled_steps(replay)) == window_of(steps, length, n_step)


@given(n_step=st.integers(1, 6), num_envs=st.integers(1, 9))
def test_shortest_ring_allowed_can_be_sampled(n_step: int, num_envs: int) -> None:
    """It has two steps to sample, of which one at least is valid."""
    length = STACK + n_step + 1
    args = dqn_atari.Args(buffer_size=length * num_envs, num_envs=num_envs, n_step=n_step)
    assert not size_problem(args, num_envs)
    args.buffer_size -= 1
    assert "--buffer-size" in size_problem(args, num_envs)
    args.total_timesteps = 0  # no replay buffer is made
    assert not size_problem(args, num_envs)
    assert all(len(window_of(steps, length, n_step)) >= 2 for steps in range(n_step + 2, 4 * length))


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 50), st.integers(1, 16), st.integers(1, 5))
def test_runs_without_an_update_are_refused(total: int, starts: int, every: int, num_envs: int, n_step: int) -> None:
    """All other runs are allowed. Updates are counted as in the online loop."""
    flags = {"total_timesteps": total, "learning_starts": starts, "train_frequency": every}
    problem = size_problem(qdagger.Args(n_step=n_step, **flags), num_envs)
    updates = 0
    for step in range(0, total, num_envs):
        if step >= starts and window_of(step // num_envs, 10**6, n_step):
            updates += qdagger.times_due(step, step + num_envs, every)
    assert (problem is None) == (updates > 0)
    assert problem is None or "--total-timesteps" in problem
