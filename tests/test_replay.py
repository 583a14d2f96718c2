"""The replay against a naive oracle: whole games kept as lists of whole stacks of frames, and sums in float64."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import dqn_atari
import dqn_atari_jax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cleanrl_utils.atari import Step
from cleanrl_utils.checks import check_args
from cleanrl_utils.errors import UserError
from cleanrl_utils.replay import STACK, n_step_return, ring_length, sampling_window, stack_rows

NUM_ACTIONS = 7
PLAY, LIFE, OVER, CUT, OVER_AND_CUT = "play", "life", "over", "cut", "over and cut"
"""What a step of a script does: nothing, lose a life, end the game, truncate it, do both in the same step."""

Arrays = dict[str, np.ndarray]
"""A batch's fields as NumPy arrays"""


# ==================== the replays under test ====================


class TorchReplay:
    """What the tests need of a PyTorch script's replay; another backend is another class like this one."""

    teacher = False

    def __init__(self, length: int, num_envs: int, n_step: int, gamma: float, seed: int = 0):
        sizes = {"buffer_size": length * num_envs, "num_envs": num_envs, "n_step": n_step, "gamma": gamma}
        self.replay = self.make(sizes | {"seed": seed})

    def make(self, flags: dict[str, int | float]) -> dqn_atari.Replay:
        """The script's replay, on the CPU."""
        return dqn_atari.Replay(dqn_atari.Args(**flags), torch.device("cpu"))

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step, teacher_q_values: np.ndarray) -> None:
        """Appends a row per environment."""
        self.replay.add(observation, action, step)

    def batch(self, row: np.ndarray, env: np.ndarray) -> Arrays:
        """The transitions that start at these rows."""
        return self.arrays(self.replay.batch(torch.from_numpy(row), torch.from_numpy(env)))

    @property
    def steps(self) -> int:
        """Environment steps held."""
        return min(self.replay.rows_written, self.replay.length) * self.replay.num_envs

    def sample(self, batch_size: int) -> Arrays:
        """Transitions that the replay draws."""
        return self.arrays(self.replay.sample(batch_size, *self.replay.window))

    def arrays(self, batch: NamedTuple) -> Arrays:
        """A batch of tensors as NumPy arrays."""
        return {name: value.numpy() for name, value in batch._asdict().items()}


class TorchQDaggerReplay(TorchReplay):
    """The replay that also stores what the teacher thinks."""

    teacher = True

    def make(self, flags: dict[str, int | float]) -> qdagger.Replay:
        return qdagger.Replay(flags["buffer_size"], NUM_ACTIONS, qdagger.Args(**flags), torch.device("cpu"))

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step, teacher_q_values: np.ndarray) -> None:
        self.replay.add(observation, action, step, teacher_q_values)


class JaxReplay(TorchReplay):
    """The replay of a JAX script, whose rows pure functions read."""

    script = dqn_atari_jax

    def __init__(self, length: int, num_envs: int, n_step: int, gamma: float, seed: int = 0):
        super().__init__(length, num_envs, n_step, gamma, seed)
        self.n_step, self.gamma, self.key = n_step, gamma, jax.random.key(seed)
        # Compiled once for all replays of a kind that have the same sizes.
        self.transitions = jax.jit(self.script.transitions, static_argnames="n_step")
        self.draw = jax.jit(self.script.sample, static_argnames=("batch_size", "n_step"))

    def make(self, flags: dict[str, int | float]) -> dqn_atari_jax.Replay:
        return dqn_atari_jax.Replay(flags["buffer_size"], dqn_atari_jax.Args(**flags))

    def batch(self, row: np.ndarray, env: np.ndarray) -> Arrays:
        size = 64 * (1 + (len(row) - 1) // 64)  # few different shapes to compile for
        padded = (jnp.asarray(np.resize(index, size)) for index in (row, env))
        batch = self.transitions(self.replay.rows, *padded, self.n_step, self.gamma)
        return {name: value[: len(row)] for name, value in self.arrays(batch).items()}

    def sample(self, batch_size: int) -> Arrays:
        self.key, key = jax.random.split(self.key)
        return self.arrays(self.draw(self.replay.rows, key, self.replay.window, batch_size, self.n_step, self.gamma))

    def arrays(self, batch: NamedTuple) -> Arrays:
        return {name: np.asarray(value) for name, value in batch._asdict().items()}


class JaxQDaggerReplay(JaxReplay):
    """The replay that also stores what the teacher thinks."""

    script, teacher = qdagger_jax, True

    def make(self, flags: dict[str, int | float]) -> qdagger_jax.Replay:
        return qdagger_jax.Replay(flags["buffer_size"], NUM_ACTIONS, qdagger_jax.Args(**flags))

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step, teacher_q_values: np.ndarray) -> None:
        self.replay.add(observation, action, step, teacher_q_values)


BACKENDS = [TorchReplay, TorchQDaggerReplay, JaxReplay, JaxQDaggerReplay]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


# ==================== the oracle ====================


class Game:
    """One game of one environment, with everything that was seen and done in it."""

    def __init__(self, first_frame: np.ndarray):
        self.observations = [np.concatenate([np.zeros((STACK - 1, 84, 84), np.uint8), first_frame[None]])]
        self.actions: list[int] = []
        self.rewards: list[int] = []
        self.terminated: list[bool] = []
        self.teacher: list[np.ndarray] = []
        self.over = False

    def transition(self, i: int, n_step: int, gamma: float) -> dict[str, np.ndarray | float | int]:
        """The transition that starts at the game's step ``i``, from the definition of an n-step return."""
        total, discount, m = 0.0, 1.0, 0
        while m < n_step and i + m < len(self.actions):  # the game may be cut off before n steps
            total += discount * float(np.clip(self.rewards[i + m], -1, 1))
            discount *= gamma
            m += 1
            if self.terminated[i + m - 1]:  # nothing is worth anything after a lost life
                discount = 0.0
                break
        return {
            "observation": self.observations[i],
            "action": self.actions[i],
            "n_step_return": total,
            "bootstrap_observation": self.observations[i + m],
            "bootstrap_discount": discount,
            "teacher_q_values": self.teacher[i],
        }


def frame(env: int, t: int) -> np.ndarray:
    """The frame that environment ``env`` shows at row ``t``: no other looks like it, and it says which one it is."""
    picture = np.full((84, 84), 1 + (env * 83 + t) % 251, np.uint8)
    picture[0, :3] = env, t % 256, t // 256
    picture[-1, -2:] = 255 - t % 256, 255 - env
    return picture


def row_and_env(observation: np.ndarray) -> tuple[int, int]:
    """(t, env) of an observation's newest frame."""
    env, low, high = observation[-1, 0, :3]
    return int(low) + 256 * int(high), int(env)


class Play:
    """Plays a script of events in several environments at once, into a replay and into the oracle's memory."""

    def __init__(self, replay: TorchReplay, num_envs: int, length: int, n_step: int, gamma: float, seed: int):
        self.replay, self.num_envs, self.length, self.n_step, self.gamma = replay, num_envs, length, n_step, gamma
        self.rng = np.random.default_rng(seed)
        self.games = [[Game(frame(env, 0))] for env in range(num_envs)]
        self.where: list[list[tuple[Game, int]]] = [[] for _ in range(num_envs)]  # row → game and step in it
        self.rows = 0

    def step(self, events: list[str]) -> None:
        """One step of every environment; where the game was over, its event is ignored and a new game begins."""
        n, t = self.num_envs, self.rows
        action = self.rng.integers(0, NUM_ACTIONS, n)
        reward = self.rng.choice([-400, -2, -1, 0, 1, 2, 7, 400], n).astype(np.int32)
        teacher = self.rng.normal(size=(n, NUM_ACTIONS)).astype(np.float32)
        terminated, truncated, reset = np.zeros((3, n), bool)
        observation = np.stack([games[-1].observations[-1] for games in self.games])
        for env, games in enumerate(self.games):
            game, picture = games[-1], frame(env, t + 1)
            self.where[env].append((game, len(game.actions)))
            if game.over:
                reset[env] = True
                games.append(Game(picture))
                continue
            terminated[env] = events[env] in (LIFE, OVER, OVER_AND_CUT)
            truncated[env] = events[env] in (CUT, OVER_AND_CUT)
            game.over = events[env] in (OVER, CUT, OVER_AND_CUT)
            game.actions.append(int(action[env]))
            game.rewards.append(int(reward[env]))
            game.terminated.append(bool(terminated[env]))
            game.teacher.append(teacher[env])
            game.observations.append(np.concatenate([game.observations[-1][1:], picture[None]]))
        self.replay.add(observation, action, Step(observation, reward, terminated, truncated, reset, []), teacher)
        self.rows += 1

    def usable(self) -> list[tuple[int, int]]:
        """(row, env) of all transitions that may be drawn now, oldest first."""
        oldest = max(0, self.rows - self.length)
        rows = [
            t
            for t in range(oldest, self.rows)
            if t + self.n_step < self.rows and all(r < 0 or r >= oldest for r in range(t - STACK + 1, t + 1))
        ]
        return [(t, env) for t in rows for env in range(self.num_envs) if self.is_transition(t, env)]

    def is_transition(self, t: int, env: int) -> bool:
        """False where row ``t`` is the final frame of a game: nothing was done there."""
        game, i = self.where[env][t]
        return i < len(game.actions)

    def check(self, batch: Arrays, transitions: list[tuple[int, int]]) -> None:
        """Compares a batch with the transitions that it should hold."""
        assert batch["observation"].dtype == batch["bootstrap_observation"].dtype == np.uint8
        assert batch["action"].dtype.kind in "iu"
        assert batch["n_step_return"].dtype == batch["bootstrap_discount"].dtype == np.float32
        assert ("teacher_q_values" in batch) == self.replay.teacher
        for b, (t, env) in enumerate(transitions):
            game, i = self.where[env][t]
            for name, value in game.transition(i, self.n_step, self.gamma).items():
                if name not in batch:
                    continue
                if name in ("n_step_return", "bootstrap_discount"):
                    np.testing.assert_allclose(batch[name][b], value, rtol=1e-5, atol=1e-6, err_msg=f"{name} {t} {env}")
                else:
                    np.testing.assert_array_equal(batch[name][b], value, err_msg=f"{name} of row {t}, env {env}")

    def check_rows(self, transitions: list[tuple[int, int]]) -> None:
        """Compares what the replay says of these rows with the oracle."""
        row, env = np.array(transitions, np.int64).T
        self.check(self.replay.batch(row, env), transitions)


@st.composite
def scripts(draw: Callable) -> tuple[int, int, int, float, list[list[str]], int]:
    """(num_envs, ring length, n_step, gamma, events, seed); rings are as short as `check_args` allows, and longer."""
    num_envs, n_step = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 3, 4]))
    length = STACK + n_step + draw(st.sampled_from([1, 2, 3, 6, 16]))
    event = st.sampled_from([PLAY, PLAY, PLAY, LIFE, LIFE, OVER, CUT, CUT, OVER_AND_CUT])
    step = st.lists(event, min_size=num_envs, max_size=num_envs)
    events = draw(st.lists(step, min_size=n_step + 1, max_size=3 * length + 5))
    return num_envs, length, n_step, draw(st.floats(0, 1)), events, draw(st.integers(0, 2**16))


# ==================== tests ====================


@every_backend
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(script=scripts())
def test_every_transition_is_what_happened(backend: type[TorchReplay], script: tuple) -> None:
    """Oldest and newest transitions are right at any time, and all of them in the end, wrapped around or not."""
    num_envs, length, n_step, gamma, events, seed = script
    play = Play(backend(length, num_envs, n_step, gamma), num_envs, length, n_step, gamma, seed)
    for step_events in events:
        play.step(step_events)
        if usable := play.usable():
            play.check_rows([usable[0], usable[-1]])
    if usable := play.usable():
        play.check_rows(usable)
    held = min(play.rows, length) * num_envs
    assert play.replay.steps == held


@every_backend
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(script=scripts())
def test_samples_are_usable_transitions(backend: type[TorchReplay], script: tuple) -> None:
    """Whatever was played, each draw is a transition that the oracle holds usable, whole in all its parts."""
    num_envs, length, n_step, gamma, events, seed = script
    play = Play(backend(length, num_envs, n_step, gamma, seed), num_envs, length, n_step, gamma, seed)
    for step_events in events:
        play.step(step_events)
    if usable := play.usable():
        batch = play.replay.sample(32)
        drawn = [row_and_env(observation) for observation in batch["observation"]]
        assert set(drawn) <= set(usable)
        play.check(batch, drawn)


def scripted(
    backend: type[TorchReplay], length: int, n_step: int, scripts: list[list[str]], gamma: float = 0.5
) -> Play:
    """Plays one list of events per environment."""
    play = Play(backend(length, len(scripts), n_step, gamma), len(scripts), length, n_step, gamma, seed=1)
    for events in zip(*scripts, strict=True):
        play.step(list(events))
    return play


@every_backend
@pytest.mark.parametrize("n_step", [1, 3])
def test_draws_are_uniform(backend: type[TorchReplay], n_step: int) -> None:
    """All transitions are drawn alike, oldest and newest too, where a fifth of the rows and more are final frames."""
    short_games = [PLAY, OVER, PLAY, LIFE, CUT, PLAY] * 8
    play = scripted(backend, 20, n_step, [short_games, [*short_games[1:], PLAY], [CUT, PLAY, PLAY] * 16])
    usable = play.usable()
    final_frames = 3 * (20 - STACK + 1 - n_step) - len(usable)
    assert final_frames >= len(usable) / 4
    draws = 8_000
    count = Counter(row_and_env(o) for _ in range(draws // 250) for o in play.replay.sample(250)["observation"])
    assert set(count) == set(usable)
    expected = draws / len(usable)
    chi_square = sum((count[x] - expected) ** 2 / expected for x in usable)
    degrees = len(usable) - 1
    # The seed is fixed; a fair draw exceeds mean + 4 standard deviations about once in ten thousand seeds.
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


@every_backend
@pytest.mark.parametrize("n_step", [1, 2, 3, 4])
@pytest.mark.parametrize("offset", range(4))
def test_draws_stay_in_the_window_of_the_shortest_ring(backend: type[TorchReplay], n_step: int, offset: int) -> None:
    """Two rows of one environment may be drawn, one of them often a final frame: the other one is drawn, no third."""
    length = STACK + n_step + 1
    play = scripted(backend, length, n_step, [([PLAY] * 8 + [CUT] + [PLAY] * 5 + [OVER, PLAY])[: 13 + offset]])
    for _ in range(6):
        usable = play.usable()
        drawn = Counter(row_and_env(o) for o in play.replay.sample(1000)["observation"])
        assert set(drawn) == set(usable), f"drawn {drawn}, usable {usable}"
        play.step([PLAY])


@every_backend
def test_sampling_depends_on_the_seed_alone(backend: type[TorchReplay]) -> None:
    """Two replays of one seed draw alike, and another seed draws otherwise."""
    drawn = []
    for seed in (1, 1, 2):
        play = Play(backend(20, 2, 1, 0.9, seed), 2, 20, 1, 0.9, seed=0)
        for _ in range(20):
            play.step([PLAY, PLAY])
        drawn.append([row_and_env(o) for o in play.replay.sample(64)["observation"]])
    assert drawn[0] == drawn[1] != drawn[2]


class Copies(TorchDispatchMode):
    """Notes for each tensor that is copied into another whether the host may go on before it has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            self.non_blocking.append(args[2] if len(args) > 2 else bool(kwargs and kwargs.get("non_blocking")))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", [TorchReplay, TorchQDaggerReplay])
def test_adding_a_row_does_not_wait_for_a_gpu(backend: type[TorchReplay]) -> None:
    """A copy that blocks would first wait for all updates that the GPU still has to do."""
    play = Play(backend(20, 2, 1, 0.9), 2, 20, 1, 0.9, seed=0)
    with Copies() as copies:
        play.step([PLAY, PLAY])
    assert copies.non_blocking == [True] * (7 if backend.teacher else 6)


@every_backend
def test_truncation_bootstraps_from_the_final_frame(backend: type[TorchReplay]) -> None:
    """The game that is cut off shows frames 0 … 4; frame 5 starts another one. Written out without the oracle."""
    play = scripted(backend, 32, 3, [[PLAY, PLAY, PLAY, CUT] + [PLAY] * 8])
    batch = play.replay.batch(np.array([1, 2, 3, 5]), np.zeros(4, np.int64))
    newest = [row_and_env(o)[0] for o in batch["bootstrap_observation"]]
    assert newest == [4, 4, 4, 8]
    np.testing.assert_array_equal(batch["bootstrap_discount"], np.float32([0.5**3, 0.5**2, 0.5, 0.5**3]))
    for stack, rows in (
        (batch["bootstrap_observation"][2], [1, 2, 3, 4]),
        (batch["observation"][0], [None, None, 0, 1]),
    ):
        for picture, row in zip(stack, rows, strict=True):
            np.testing.assert_array_equal(picture, np.zeros((84, 84)) if row is None else frame(0, row))


@every_backend
@pytest.mark.parametrize("event", [LIFE, OVER, OVER_AND_CUT])
def test_termination_does_not_bootstrap(backend: type[TorchReplay], event: str) -> None:
    """After a lost life or game, rewards and values beyond it count for nothing; before it, they do."""
    play = scripted(backend, 32, 3, [[PLAY, PLAY, PLAY, event] + [PLAY] * 8])
    batch = play.replay.batch(np.arange(4), np.zeros(4, np.int64))
    np.testing.assert_array_equal(batch["bootstrap_discount"], np.float32([0.5**3, 0, 0, 0]))
    game = play.games[0][0]
    np.testing.assert_array_equal(batch["n_step_return"][3], np.clip(game.rewards[3], -1, 1))


@every_backend
def test_stack_crosses_a_lost_life_and_no_reset(backend: type[TorchReplay]) -> None:
    """Frames before a lost life are still to be seen after it, those before a reset are not."""
    play = scripted(backend, 32, 1, [[PLAY, PLAY, LIFE] + [PLAY] * 6, [PLAY, PLAY, OVER] + [PLAY] * 6])
    batch = play.replay.batch(np.array([4, 4, 7]), np.array([0, 1, 1]))
    seen = [[int(picture[0, 1]) if picture.any() else None for picture in stack] for stack in batch["observation"]]
    assert seen == [[1, 2, 3, 4], [None, None, None, 4], [4, 5, 6, 7]]


# ==================== the index arithmetic itself ====================


@given(rows_written=st.integers(0, 300), length=st.integers(STACK + 2, 100), n_step=st.integers(1, 8), data=st.data())
def test_window_is_exact(rows_written: int, length: int, n_step: int, data: st.DataObject) -> None:
    """Low and high are the first and one past the last row that is whole: neither a row too many nor too few."""
    low, high = sampling_window(rows_written, length, n_step)
    oldest = max(0, rows_written - length)
    whole = [
        t
        for t in range(oldest, rows_written)
        if t + n_step < rows_written and all(r < 0 or r >= oldest for r in range(t - STACK + 1, t + 1))
    ]
    assert list(range(low, high)) == whole


@given(buffer_size=st.integers(1, 10_000), num_envs=st.integers(1, 64))
def test_ring_length_fills_the_buffer(buffer_size: int, num_envs: int) -> None:
    """As many rows as fit, in whole steps of all environments."""
    length = ring_length(buffer_size, num_envs)
    assert length * num_envs <= buffer_size < (length + 1) * num_envs


@given(n_step=st.integers(1, 6), num_envs=st.integers(1, 9))
def test_shortest_ring_allowed_can_be_sampled(n_step: int, num_envs: int) -> None:
    """What `check_args` lets through leaves two rows from the first update on, so that one is a transition."""
    length = STACK + n_step + 1
    sizes = {"num_envs": num_envs, "n_step": n_step, "learning_starts": (n_step + 2) * num_envs}
    check_args(dqn_atari.Args(buffer_size=length * num_envs, **sizes))
    with pytest.raises(UserError, match="--buffer-size"):
        check_args(dqn_atari.Args(buffer_size=length * num_envs - 1, **sizes))
    for rows_written in range(n_step + 2, 4 * length):
        low, high = sampling_window(rows_written, length, n_step)
        assert high - low >= 2


@given(data=st.data(), batch=st.integers(1, 8), n_step=st.integers(1, 5), gamma=st.floats(0, 1))
def test_numpy_torch_and_jax_agree(data: st.DataObject, batch: int, n_step: int, gamma: float) -> None:
    """One arithmetic for all libraries, on any input: also rows of which none is valid."""
    flags = st.lists(st.lists(st.booleans(), min_size=n_step, max_size=n_step), min_size=batch, max_size=batch)
    terminated, valid = np.array(data.draw(flags)), np.array(data.draw(flags))
    seed = data.draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    reward = rng.integers(-1, 2, (batch, n_step)).astype(np.float32)
    arrays = n_step_return(reward, terminated, valid, gamma)
    for make in (torch.from_numpy, jnp.asarray):
        others = n_step_return(*(make(x) for x in (reward, terminated, valid)), gamma)
        for array, other, kind in zip(arrays, others, "fif", strict=True):
            assert array.shape == tuple(other.shape) == (batch,)
            assert array.dtype.kind == np.asarray(other).dtype.kind == kind
            np.testing.assert_allclose(array, np.asarray(other), rtol=1e-5, atol=1e-6)
    row, age = rng.integers(0, 100, batch), rng.integers(0, 6, batch)
    offsets = np.arange(STACK - 1, -1, -1)
    arrays = stack_rows(row, age, offsets)
    for b in range(batch):
        assert arrays[0][b].tolist() == [row[b] - 3, row[b] - 2, row[b] - 1, row[b]]
        assert arrays[1][b].tolist() == [bool(age[b] >= k) for k in (3, 2, 1, 0)]
    for make in (torch.from_numpy, jnp.asarray):
        for array, other in zip(arrays, stack_rows(*(make(x) for x in (row, age, offsets))), strict=True):
            np.testing.assert_array_equal(array, np.asarray(other))
