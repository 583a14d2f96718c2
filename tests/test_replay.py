"""The replay against a naive oracle: whole games kept as lists of whole stacks of frames, and sums in float64."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, NamedTuple

import dqn_atari
import dqn_atari_jax
import jax
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cleanrl_utils import atari
from cleanrl_utils.atari import AtariEnvs, Step
from cleanrl_utils.checks import STACK, UserError, check_args, check_sizes

NUM_ACTIONS = 7
PLAY, LIFE, OVER, CUT, OVER_AND_CUT = "play", "life", "over", "cut", "over and cut"
"""What happens in a step: nothing, a lost life, the game's end, its truncation, both in the same step."""
STOP = "stop"
"""What happens between two steps: the run stops and is resumed, with new games in all environments."""

Arrays = dict[str, np.ndarray]
"""A batch's fields as NumPy arrays"""


# ==================== the replays under test ====================


class TorchReplay:
    """What the tests need of a PyTorch script's replay; another backend is another class like this one."""

    script, teacher = dqn_atari, False

    def __init__(self, length: int, num_envs: int, n_step: int, gamma: float, seed: int = 0):
        sizes = {"buffer_size": length * num_envs, "num_envs": num_envs, "n_step": n_step, "gamma": gamma}
        self.replay, self.n_step, self.gamma = self.make(self.script.Args(**sizes)), n_step, gamma
        self.make_generator(seed)

    def make(self, args: Any) -> Any:
        """The script's replay, on the CPU."""
        sizes = (args.buffer_size, NUM_ACTIONS) if self.teacher else ()
        return self.script.Replay(*sizes, args, torch.device("cpu"))

    def make_generator(self, seed: int) -> None:
        """What draws depend on."""
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step, teacher_q_values: np.ndarray) -> None:
        """Appends a step of each environment."""
        teacher = (torch.from_numpy(teacher_q_values),) if self.teacher else ()
        self.replay.add(torch.from_numpy(observation), action, step, *teacher)

    def batch(self, t: np.ndarray, env: np.ndarray) -> Arrays:
        """The transitions from these steps of these environments."""
        return self.arrays(self.replay.batch(torch.from_numpy(t), torch.from_numpy(env)))

    def sample(self, batch_size: int) -> Arrays:
        """Transitions that the replay draws."""
        return self.arrays(self.replay.sample(batch_size, *self.replay.window, self.generator))

    def arrays(self, batch: NamedTuple) -> Arrays:
        """A batch of tensors as NumPy arrays."""
        return {name: np.asarray(value) for name, value in batch._asdict().items()}


class TorchQDaggerReplay(TorchReplay):
    """The replay that also stores what the teacher thinks."""

    script, teacher = qdagger, True


@pytest.fixture(autouse=True, scope="module")
def compiled_transitions() -> Iterator[None]:
    """Lets the JAX scripts compile `transitions` alone: all of `sample` takes a second for each size of ring."""
    with pytest.MonkeyPatch.context() as patch:
        for script in (dqn_atari_jax, qdagger_jax):
            patch.setattr(script, "transitions", jax.jit(script.transitions, static_argnames="n_step"))
        yield


class JaxReplay(TorchReplay):
    """The replay of a JAX script, whose ring pure functions read."""

    script = dqn_atari_jax

    def make(self, args: Any) -> Any:
        sizes = (args.buffer_size, NUM_ACTIONS) if self.teacher else ()
        return self.script.Replay(*sizes, args)

    def make_generator(self, seed: int) -> None:
        self.key = jax.random.key(seed)

    def add(self, observation: np.ndarray, action: np.ndarray, step: Step, teacher_q_values: np.ndarray) -> None:
        self.replay.add(observation, action, step, *((teacher_q_values,) if self.teacher else ()))

    def batch(self, t: np.ndarray, env: np.ndarray) -> Arrays:
        size = 8 if len(t) <= 8 else 250 * (1 + (len(t) - 1) // 250)  # few different shapes to compile for
        t_and_env = (np.resize(index, size).astype(np.int32) for index in (t, env))
        batch = self.script.transitions(self.replay.ring, *t_and_env, self.n_step, self.gamma)
        return {name: value[: len(t)] for name, value in self.arrays(batch).items()}

    def sample(self, batch_size: int) -> Arrays:
        self.key, key = jax.random.split(self.key)
        args = self.script.Args(batch_size=batch_size, n_step=self.n_step, gamma=self.gamma)
        return self.arrays(self.script.sample(self.replay.ring, key, *self.replay.window, args))


class JaxQDaggerReplay(JaxReplay):
    """The replay that also stores what the teacher thinks."""

    script, teacher = qdagger_jax, True


BACKENDS = [TorchReplay, TorchQDaggerReplay, JaxReplay, JaxQDaggerReplay]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_script = pytest.mark.parametrize("script", [backend.script for backend in BACKENDS])


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

    def cut(self) -> None:
        """Forgets the last step that was done, if any: what it led to was never stored."""
        if self.actions:
            for values in (self.observations, self.actions, self.rewards, self.terminated, self.teacher):
                values.pop()

    def transition(self, i: int, n_step: int, gamma: float) -> dict[str, np.ndarray | float | int]:
        """The transition that starts at the game's step ``i``, from the definition of an n-step return.

        At the final frame nothing was done: it is worth what it is worth.
        """
        total, discount, m = 0.0, 1.0, 0
        while m < n_step and i + m < len(self.actions):  # the game may be cut off before n steps
            total += discount * float(np.clip(self.rewards[i + m], -1, 1))
            discount *= gamma
            m += 1
            if self.terminated[i + m - 1]:  # nothing is worth anything after a lost life
                discount = 0.0
                break
        transition = {
            "observation": self.observations[i],
            "n_step_return": total,
            "bootstrap_observation": self.observations[i + m],
            "bootstrap_discount": discount,
        }
        return transition | ({"action": self.actions[i], "teacher_q_values": self.teacher[i]} if m else {})


def frame(env: int, t: int) -> np.ndarray:
    """The frame that environment ``env`` shows at step ``t``: no other looks like it, and it says which one it is."""
    picture = np.full((84, 84), 1 + (env * 83 + t) % 251, np.uint8)
    picture[0, :3] = env, t % 256, t // 256
    picture[-1, -2:] = 255 - t % 256, 255 - env
    return picture


def step_and_env(observation: np.ndarray) -> tuple[int, int]:
    """(t, env) of an observation's newest frame."""
    env, low, high = observation[-1, 0, :3]
    return int(low) + 256 * int(high), int(env)


class Play:
    """Plays a script of events in several environments at once, into a replay and into the oracle's memory."""

    def __init__(self, replay: TorchReplay, num_envs: int, length: int, n_step: int, gamma: float, seed: int):
        self.replay, self.num_envs, self.length, self.n_step, self.gamma = replay, num_envs, length, n_step, gamma
        self.rng = np.random.default_rng(seed)
        self.games = [[Game(frame(env, 0))] for env in range(num_envs)]
        self.where: list[list[tuple[Game, int]]] = [[] for _ in range(num_envs)]  # t → game and step in it
        self.steps = 0

    def step(self, events: list[str]) -> None:
        """One step of every environment; where the game was over, its event is ignored and a new game begins."""
        if STOP in events:
            return self.stop()
        n, t = self.num_envs, self.steps
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
        self.steps += 1

    def stop(self) -> None:
        """The run stops and is resumed: what the last step led to is lost, and new games begin."""
        for env, games in enumerate(self.games):
            games[-1].cut()
            games.append(Game(frame(env, self.steps)))
        self.replay.replay.end_games()

    def window(self) -> list[tuple[int, int]]:
        """(t, env) of all steps that may be drawn now if they are transitions, oldest first."""
        return [(t, env) for t in whole(self.steps, self.length, self.n_step) for env in range(self.num_envs)]

    def usable(self) -> list[tuple[int, int]]:
        """(t, env) of all transitions that may be drawn now, oldest first."""
        return [(t, env) for t, env in self.window() if self.is_transition(t, env)]

    def is_transition(self, t: int, env: int) -> bool:
        """False where step ``t`` is the final frame of a game: nothing was done there."""
        game, i = self.where[env][t]
        return i < len(game.actions)

    def check(self, batch: Arrays, steps: list[tuple[int, int]]) -> None:
        """Compares a batch with the transitions that it should hold."""
        assert batch["observation"].dtype == batch["bootstrap_observation"].dtype == np.uint8
        assert batch["action"].dtype.kind in "iu"
        assert batch["n_step_return"].dtype == batch["bootstrap_discount"].dtype == np.float32
        assert ("teacher_q_values" in batch) == self.replay.teacher
        for b, (t, env) in enumerate(steps):
            game, i = self.where[env][t]
            for name, value in game.transition(i, self.n_step, self.gamma).items():
                if name not in batch:
                    continue
                if name in ("n_step_return", "bootstrap_discount"):
                    np.testing.assert_allclose(batch[name][b], value, rtol=1e-5, atol=1e-6, err_msg=f"{name} {t} {env}")
                else:
                    np.testing.assert_array_equal(batch[name][b], value, err_msg=f"{name} of step {t}, env {env}")

    def check_steps(self, steps: list[tuple[int, int]]) -> None:
        """Compares what the replay says of these steps with the oracle."""
        t, env = np.array(steps, np.int64).T
        self.check(self.replay.batch(t, env), steps)


def whole(steps: int, length: int, n_step: int) -> list[int]:
    """The steps whose stack of frames and bootstrap state are all among the last ``length`` of so many ``steps``."""
    oldest = max(0, steps - length)
    return [
        t
        for t in range(oldest, steps)
        if t + n_step < steps and all(r < 0 or r >= oldest for r in range(t - STACK + 1, t + 1))
    ]


@st.composite
def scripts(draw: Callable) -> tuple[int, int, int, float, list[list[str]], int]:
    """(num_envs, ring length, n_step, gamma, events, seed); rings are as short as `check_sizes` allows, and longer."""
    # Few different ones, as JAX compiles for each.
    sizes = [(1, 1, 1), (2, 16, 1), (3, 3, 2), (3, 16, 3), (1, 1, 4)]
    num_envs, more, n_step = draw(st.sampled_from(sizes))
    length = STACK + n_step + more
    event = st.sampled_from([PLAY, PLAY, PLAY, LIFE, LIFE, OVER, CUT, CUT, OVER_AND_CUT])
    step = st.lists(event, min_size=num_envs, max_size=num_envs) | st.just([STOP])
    events = draw(st.lists(step, min_size=n_step + 1, max_size=3 * length + 5))
    return num_envs, length, n_step, draw(st.floats(0, 1)), events, draw(st.integers(0, 2**16))


# ==================== tests ====================


@every_backend
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(script=scripts())
def test_every_step_is_what_happened(backend: type[TorchReplay], script: tuple) -> None:
    """Oldest and newest steps are right at any time, and all of them in the end, wrapped around or not.

    Whatever is drawn lies in the window, and is whole in all its parts.
    """
    num_envs, length, n_step, gamma, events, seed = script
    play = Play(backend(length, num_envs, n_step, gamma, seed), num_envs, length, n_step, gamma, seed)
    for step_events in events:
        play.step(step_events)
        if window := play.window():
            play.check_steps([window[0], window[-1]])
    if window := play.window():
        play.check_steps(window)
        batch = play.replay.sample(250)
        drawn = [step_and_env(observation) for observation in batch["observation"]]
        assert set(drawn) <= set(window)
        play.check(batch, drawn[:32])


def scripted(
    backend: type[TorchReplay], length: int, n_step: int, scripts: list[list[str]], gamma: float = 0.5
) -> Play:
    """Plays one list of events per environment."""
    play = Play(backend(length, len(scripts), n_step, gamma), len(scripts), length, n_step, gamma, seed=1)
    for events in zip(*scripts, strict=True):
        play.step(list(events))
    return play


def draw(play: Play, draws: int) -> Counter[tuple[int, int]]:
    """How often each step of each environment is drawn."""
    batches = [play.replay.sample(250)["observation"] for _ in range(draws // 250)]
    return Counter(step_and_env(observation) for batch in batches for observation in batch)


@every_backend
@pytest.mark.parametrize("n_step", [1, 3])
def test_draws_are_uniform(backend: type[TorchReplay], n_step: int) -> None:
    """All transitions are drawn alike, oldest and newest too, where a fifth of the steps and more are final frames."""
    short_games = [PLAY, OVER, PLAY, LIFE, CUT, PLAY] * 8
    play = scripted(backend, 20, n_step, [short_games, [*short_games[1:], PLAY], [CUT, PLAY, PLAY] * 16])
    usable = play.usable()
    assert len(play.window()) - len(usable) >= len(usable) / 4
    draws = 8_000
    count = draw(play, draws)
    assert set(usable) <= set(count) <= set(play.window())
    assert sum(count[x] for x in usable) > 0.998 * draws  # eight final frames in a row are drawn, but seldom
    expected = draws / len(usable)
    chi_square = sum((count[x] - expected) ** 2 / expected for x in usable)
    degrees = len(usable) - 1
    # The seed is fixed; a fair draw exceeds mean + 4 standard deviations about once in ten thousand seeds.
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


@every_backend
@pytest.mark.parametrize("n_step", [1, 2, 3, 4])
def test_draws_stay_in_the_window_of_the_shortest_ring(backend: type[TorchReplay], n_step: int) -> None:
    """Two steps of one environment may be drawn, one of them often a final frame: nearly always it is the other."""
    length, final_frames = STACK + n_step + 1, 0
    play = scripted(backend, length, n_step, [[PLAY] * length])
    for event in [CUT, PLAY, PLAY, PLAY, PLAY, OVER, *[PLAY] * (n_step + 4)]:
        usable, drawn = play.usable(), draw(play, 500)
        assert set(usable) <= set(drawn) <= set(play.window()), f"drawn {drawn}, usable {usable}"
        assert sum(drawn[x] for x in usable) > 490  # of eight tries, all are final frames once in 256 draws
        final_frames += len(usable) == 1
        play.step([event])
    assert final_frames == 4


@every_backend
def test_sampling_depends_on_the_seed_alone(backend: type[TorchReplay]) -> None:
    """Two replays of one seed draw alike, and another seed draws otherwise."""
    drawn = []
    for seed in (1, 1, 2):
        play = Play(backend(32, 2, 1, 0.9, seed), 2, 32, 1, 0.9, seed=0)
        for _ in range(20):
            play.step([PLAY, PLAY])
        drawn.append([step_and_env(o) for o in play.replay.sample(250)["observation"]])
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
def test_adding_a_step_does_not_wait_for_a_gpu(backend: type[TorchReplay]) -> None:
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
    newest = [step_and_env(o)[0] for o in batch["bootstrap_observation"]]
    assert newest == [4, 4, 4, 8]
    np.testing.assert_array_equal(batch["bootstrap_discount"], np.float32([0.5**3, 0.5**2, 0.5, 0.5**3]))
    for stack, steps in (
        (batch["bootstrap_observation"][2], [1, 2, 3, 4]),
        (batch["observation"][0], [None, None, 0, 1]),
    ):
        for picture, t in zip(stack, steps, strict=True):
            np.testing.assert_array_equal(picture, np.zeros((84, 84)) if t is None else frame(0, t))


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


# ==================== a run that is stopped and resumed ====================


def seen(stack: np.ndarray) -> list[int | None]:
    """The steps that the frames of an observation are of; None for a black one."""
    return [int(picture[0, 1]) if picture.any() else None for picture in stack]


@every_backend
def test_a_stop_truncates_the_games(backend: type[TorchReplay]) -> None:
    """Step 5 is the last before the stop: its frame is what those before it lead to. Written out without the oracle."""
    play = scripted(backend, 32, 3, [[PLAY] * 6 + [STOP] + [PLAY] * 10, [PLAY] * 4 + [LIFE, OVER, STOP] + [PLAY] * 10])
    t, env = np.array([2, 3, 4, 5, 6, 7, 3, 5, 6]), np.array([0, 0, 0, 0, 0, 0, 1, 1, 1])
    batch = play.replay.batch(t, env)
    # Environment 1 loses a life in step 4; that its game was over after step 5 went with that step.
    assert [step_and_env(o) for o in batch["bootstrap_observation"]] == [
        *[(5, 0), (5, 0), (5, 0), (5, 0), (9, 0), (10, 0)],
        *[(5, 1), (5, 1), (9, 1)],
    ]
    np.testing.assert_array_equal(
        batch["bootstrap_discount"], np.float32([0.5**3, 0.5**2, 0.5, 1, 0.5**3, 0.5**3, 0, 1, 0.5**3])
    )
    rewards = np.clip(play.games[0][0].rewards, -1, 1)
    assert len(rewards) == 5
    np.testing.assert_array_equal(
        batch["n_step_return"][:4], [rewards[2:5] @ [1, 0.5, 0.25], rewards[3:5] @ [1, 0.5], rewards[4], 0]
    )
    assert [seen(stack) for stack in batch["observation"][3:6]] == [
        [2, 3, 4, 5],
        [None, None, None, 6],
        [None, None, 6, 7],
    ]
    assert seen(batch["bootstrap_observation"][2]) == [2, 3, 4, 5]
    drawn = draw(play, 4000)
    assert set(drawn) == {(t, env) for t in range(13) for env in range(2) if t != 5}


@every_backend
@pytest.mark.parametrize("n_step", [1, 3])
def test_steps_between_stops(backend: type[TorchReplay], n_step: int) -> None:
    """Stops upon stops, resets before and after them: what is no transition bootstraps from itself, without rewards."""
    events = [[STOP], [PLAY, OVER], [STOP], [PLAY, PLAY], [STOP], [STOP], [CUT, PLAY], [PLAY, PLAY], [STOP], [STOP]]
    play = Play(backend(32, 2, n_step, 0.5), 2, 32, n_step, 0.5, seed=2)
    for step_events in [*events, [PLAY, PLAY], *events[1:], *[[PLAY, PLAY]] * (n_step + 1)]:
        play.step(step_events)
    none = [x for x in play.window() if not play.is_transition(*x)]
    assert {(0, 0), (1, 0), (3, 0), (0, 1), (1, 1), (3, 1)} <= set(none)
    play.check_steps(play.window())
    batch = play.replay.batch(*np.array(none, np.int64).T)
    np.testing.assert_array_equal(batch["bootstrap_observation"], batch["observation"])
    np.testing.assert_array_equal(batch["bootstrap_discount"], np.ones(len(none)))
    np.testing.assert_array_equal(batch["n_step_return"], np.zeros(len(none)))


@every_backend
def test_where_no_step_is_a_transition(backend: type[TorchReplay]) -> None:
    """A draw is then a step all the same, and does no harm."""
    play = scripted(backend, 6, 1, [[PLAY, STOP] * 3])
    batch = play.replay.sample(250)
    drawn = [step_and_env(observation) for observation in batch["observation"]]
    assert set(drawn) <= {(0, 0), (1, 0)}
    play.check(batch, drawn)
    np.testing.assert_array_equal(batch["bootstrap_discount"], np.ones(250))


# ==================== sizes and windows ====================


@every_backend
@pytest.mark.parametrize(("size", "num_envs"), [(20, 2), (29, 3), (9, 1)])
def test_size_of_a_replay(backend: type[TorchReplay], size: int, num_envs: int) -> None:
    """As many steps of all environments as fit; each takes the bytes that `check_memory` is told."""
    replay = backend(1, 1, 1, 0.9).make(backend.script.Args(buffer_size=size, num_envs=num_envs))
    assert replay.length * num_envs <= size < (replay.length + 1) * num_envs
    assert all(array.shape[:2] == (replay.length, num_envs) for array in replay.ring)
    step_bytes = replay.bytes_per_step(NUM_ACTIONS) if backend.teacher else replay.BYTES_PER_STEP
    assert sum(array.nbytes for array in replay.ring) == replay.length * num_envs * step_bytes


@every_script
@given(steps=st.integers(0, 300), length=st.integers(STACK + 2, 100), n_step=st.integers(1, 8))
def test_window_is_exact(script: Any, steps: int, length: int, n_step: int) -> None:
    """Low and high are the first and one past the last step that is whole: neither one too many nor too few."""
    replay = SimpleNamespace(steps_added=steps, length=length, n_step=n_step)
    assert list(range(*script.Replay.window.fget(replay))) == whole(steps, length, n_step)


@given(n_step=st.integers(1, 6), num_envs=st.integers(1, 9))
def test_shortest_ring_allowed_can_be_sampled(n_step: int, num_envs: int) -> None:
    """What `check_args` lets through leaves two steps to draw from, so that one is a transition."""
    length = STACK + n_step + 1
    check_args(dqn_atari.Args(buffer_size=length * num_envs, num_envs=num_envs, n_step=n_step))
    with pytest.raises(UserError, match="--buffer-size"):
        check_args(dqn_atari.Args(buffer_size=length * num_envs - 1, num_envs=num_envs, n_step=n_step))
    assert all(len(whole(steps, length, n_step)) >= 2 for steps in range(n_step + 2, 4 * length))


@given(
    total=st.integers(1, 200),
    starts=st.integers(0, 200),
    every=st.integers(1, 50),
    num_envs=st.integers(1, 16),
    n_step=st.integers(1, 5),
)
def test_runs_that_would_never_update_are_refused(
    total: int, starts: int, every: int, num_envs: int, n_step: int
) -> None:
    """And no others: updates are counted as the online loop does."""
    flags = {"total_timesteps": total, "learning_starts": starts, "train_frequency": every}
    args = dqn_atari.Args(num_envs=num_envs, n_step=n_step, **flags)
    updates = 0
    for step in range(0, total, num_envs):
        if step >= starts and whole(step // num_envs, 10**6, n_step):
            updates += dqn_atari.times_due(step, step + num_envs, every)
    if updates:
        check_sizes(args)
    else:
        with pytest.raises(UserError, match="--total-timesteps"):
            check_sizes(args)


# ==================== with the real emulator ====================


@every_backend
def test_replay_gives_back_what_the_emulator_showed(
    backend: type[TorchReplay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three environments into a small ring: each observation and bootstrap observation comes back byte for byte."""
    monkeypatch.setattr(atari, "MAX_FRAMES", 400)  # so that games are cut off, too
    num_envs, length, rng = 3, 130, np.random.default_rng(0)
    replay = backend(length, num_envs, 1, 0.99)
    shown, actions, steps = [], [], []
    with closing(AtariEnvs("BreakoutNoFrameskip-v4", num_envs, seed=7)) as envs:
        observation = envs.reset()
        for _ in range(300):
            action = envs.send(rng.integers(0, envs.num_actions, num_envs))
            step = envs.recv()
            replay.add(observation, action, step, np.zeros((num_envs, NUM_ACTIONS), np.float32))
            shown.append(observation.copy()), actions.append(action.copy()), steps.append(step)
            observation = step.observation
    played = [(t, env) for t in range(300 - length + 3, 299) for env in range(num_envs) if not steps[t].reset[env]]
    assert len(played) < num_envs * (length - 4)  # final frames were among them
    assert any(steps[t].truncated[env] for t, env in played)
    batch = replay.batch(*np.array(played).T)
    for i, (t, env) in enumerate(played):
        np.testing.assert_array_equal(batch["observation"][i], shown[t][env], f"step {t}, env {env}")
        np.testing.assert_array_equal(batch["bootstrap_observation"][i], shown[t + 1][env], f"step {t}, env {env}")
        assert batch["action"][i] == actions[t][env]
        assert batch["n_step_return"][i] == np.clip(steps[t].reward[env], -1, 1)
        assert batch["bootstrap_discount"][i] == (0 if steps[t].terminated[env] else np.float32(0.99))
