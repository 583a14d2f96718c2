"""Environments and evaluation, compared with stable-baselines3's wrappers of the real emulator.

`AtariEnvs` differs from these wrappers by design; the tests align the difference or bound it:

- A frame is the maximum of two grayscale frames, not the grayscale of the maximum of two colour frames.
- The stack holds zeros before the first frame of an episode, not copies of it, and crosses a lost life.
- FIRE replaces the first action of an episode and of a life; the wrappers play FIRE and action 2 unseen.
- A loss of the last life is reported at once, not at the end of the episode.
- An episode is truncated after 108,000 frames without its no-ops, which are 0 to 29, not 1 to 30.
"""

import functools
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import gymnasium as gym
import imageio
import numpy as np
import pytest
from ale_py import roms
from ale_py.env import AtariEnv
from ale_py.vector_env import AtariVectorEnv
from stable_baselines3.common import atari_wrappers as sb3

from cleanrl_utils import atari, evaluation
from cleanrl_utils.atari import LIST_GAMES, STREAMS, AtariEnvs, parse_env_id
from cleanrl_utils.errors import UserError
from cleanrl_utils.evaluation import film_episode, play_episodes

NOOP, FIRE = 0, 1


@pytest.fixture(autouse=True)
def with_info(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let environments keep the last info, which has lives and frame numbers."""

    def keeping(method: Callable) -> Callable:
        def call(env: AtariVectorEnv, **kwargs: object) -> tuple:
            *_, env.info = result = method(env, **kwargs)
            return result

        return call

    for method in (AtariVectorEnv.reset, AtariVectorEnv.recv):
        monkeypatch.setattr(AtariVectorEnv, method.__name__, keeping(method))


# ==================== the wrappers as oracle ====================


class WrappedGame(gym.Wrapper):
    """Frame skip and warping of stable-baselines3 above this wrapper, which keeps the last two grayscale screens."""

    def __init__(self, env_id: str):
        super().__init__(AtariEnv(parse_env_id(env_id)[0], frameskip=1, repeat_action_probability=0.0))
        self.skipping = sb3.WarpFrame(sb3.MaxAndSkipEnv(self, 4))
        self.ale = self.unwrapped.ale
        self.screens = []

    def step(self, action: int) -> tuple:
        result = super().step(action)
        self.screens = [*self.screens[-1:], self.ale.getScreenGrayscale()]
        return result

    def start(self, noops: int) -> np.ndarray:
        """Start an episode with ``noops`` no-ops and return its first frame."""
        picture, _ = self.reset()
        for _ in range(noops):
            picture = self.step(NOOP)[0]
        self.lives = self.ale.lives()
        return self.skipping.observation(picture)[:, :, 0]

    def play(self, action: int) -> tuple[np.ndarray, int, bool]:
        """Return frame, reward, and whether a life was lost in a step of 4 frames."""
        frame, reward, *_ = self.skipping.step(action)
        lost = self.ale.lives() < self.lives
        self.lives = self.ale.lives()
        return frame[:, :, 0], int(reward), lost


@pytest.mark.parametrize(
    ("name", "steps", "episodes"),
    [("Pong", 960, 1), ("Breakout", 400, 2), ("SpaceInvaders", 400, 1), ("Qbert", 380, 1), ("MsPacman", 670, 1)],
)
def test_same_episodes_as_in_the_wrappers(name: str, steps: int, episodes: int) -> None:
    """Rewards, lost lives and ends of episodes are equal, frames too except for the order of maximum and grayscale."""
    env_id = f"{name}NoFrameskip-v4"
    wrapped = WrappedGame(env_id)
    rng = np.random.default_rng(0)
    differences = []
    ended = 0
    over = False
    with closing(AtariEnvs(env_id, 1)) as envs:
        observation = envs.reset(3, "online")
        np.testing.assert_array_equal(observation[0, -1], wrapped.start(envs._envs.info["episode_frame_number"][0]))
        assert not observation[0, :3].any()
        for t in range(steps):
            stack = np.zeros((3, 84, 84)) if over else observation[0, 1:]
            action = envs.send(rng.integers(0, envs.num_actions, 1))
            step = envs.recv()
            observation = step.observation
            np.testing.assert_array_equal(observation[0, :3], stack)
            assert step.reset[0] == over, f"step {t}"
            if over:
                frame = wrapped.start(envs._envs.info["episode_frame_number"][0])
                reward = 0
                lost = False
                over = False
                np.testing.assert_array_equal(observation[0, -1], frame)
            else:
                frame, reward, lost = wrapped.play(int(action[0]))
                over = wrapped.ale.game_over()
                ended += over
                grayscale = cv2.resize(np.maximum(*wrapped.screens), (84, 84), interpolation=cv2.INTER_AREA)
                if not over:  # the final frame of the wrappers is stale if an episode ends within a frame skip
                    np.testing.assert_array_equal(observation[0, -1], grayscale, f"step {t}")
                    differences.append(np.abs(frame.astype(int) - observation[0, -1]))
            assert step.reward[0] == reward, f"step {t}"
            assert step.terminated[0] == (lost or over), f"step {t}"
            assert not step.truncated[0]
            assert envs._envs.info["lives"][0] == wrapped.lives, f"step {t}"
    assert ended >= episodes
    assert (np.array(differences) > 2).mean((1, 2)).max() < 0.015
    assert np.max(differences) < 64


# ==================== episodes: starts, ends, lives, seeds ====================


@pytest.mark.parametrize("name", ["Breakout", "MsPacman"])
def test_returns_and_lengths_add_up(name: str) -> None:
    """The returns and lengths of episodes are sums of unclipped rewards and steps between resets, in Python's int."""
    rng = np.random.default_rng(4)
    total, length = np.zeros((2, 3), int)
    with closing(AtariEnvs(f"{name}NoFrameskip-v4", 3)) as envs:
        envs.reset(5, "online")
        episodes = []
        for _ in range(450):
            step = envs.step(rng.integers(0, envs.num_actions, 3))
            assert step.episodes == [(i, total[i], length[i]) for i in np.flatnonzero(step.reset)]
            assert not (step.reset & (step.terminated | step.truncated | (step.reward != 0))).any()
            episodes += step.episodes
            total, length = np.where(step.reset, 0, [total + step.reward, length + 1])
    longest = max((episodic_return, length) for _, episodic_return, length in episodes)
    assert longest > ((1, 100) if name == "Breakout" else (100, 200))
    if name == "Breakout":
        assert len(episodes) > len({env for env, *_ in episodes}), "no environment has a second episode"
    assert all(type(x) is int for episode in episodes for x in episode)


@pytest.mark.parametrize(("name", "has_fire", "actions"), [("Breakout", 1, 4), ("MsPacman", 0, 9)])
def test_fire_at_starts_and_after_a_lost_life(name: str, has_fire: bool, actions: int) -> None:
    """FIRE replaces the first action of each life, also of episodes that a reset cut short, and no other action."""
    rng = np.random.default_rng(0)
    lost = 0
    with closing(AtariEnvs(f"{name}NoFrameskip-v4", 2)) as envs:
        assert envs.num_actions == actions
        for seed in (1, 2):
            envs.reset(seed, "online")
            due = np.full(2, has_fire)
            for _ in range(200):
                wanted = rng.integers(2, envs.num_actions, 2)
                action = envs.send(wanted)
                assert action.dtype == np.int64
                np.testing.assert_array_equal(action, np.where(due, FIRE, wanted))
                step = envs.recv()
                due = (step.terminated | step.reset) & has_fire
                lost += step.terminated.sum()
    assert lost >= 1


def test_starts_of_episodes_with_sticky_actions() -> None:
    """Up to 29 no-ops start an episode, in which FIRE is not lost to a no-op that is repeated for its four frames."""
    with closing(AtariEnvs("ALE/Breakout-v5", 6)) as envs:
        envs.reset(1, "online")
        frames = envs._envs.info["episode_frame_number"]
        assert len(np.unique(frames)) >= 4
        assert 0 <= frames.min() < frames.max() < 30
        lost = np.zeros(6, bool)
        for _ in range(60):
            lost |= envs.step(np.full(6, NOOP)).terminated
    assert lost.sum() >= 5


def trajectory(env_id: str, num_envs: int, seed: int, before: int = 0) -> np.ndarray:
    """Return 51 frames of fixed actions, the same in all environments; uint8 (51, num_envs, 84, 84).

    The environments have made ``before`` steps of other episodes.
    """
    rng = np.random.default_rng(0)
    with closing(AtariEnvs(env_id, num_envs)) as envs:
        if before:
            envs.reset(9, "online")
        for _ in range(before):
            envs.step(np.full(num_envs, NOOP))
        frames = [envs.reset(seed, "online")[:, -1].copy()]
        for _ in range(50):
            action = np.full(num_envs, rng.integers(envs.num_actions))
            frames.append(envs.step(action).observation[:, -1].copy())
    return np.array(frames)


def test_trajectories_depend_on_the_seed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and earlier episodes make no difference; other seeds and other environments give other trajectories.

    The sticky actions and no-ops of later episodes depend on the seed too: here, episodes have 20 steps.
    """
    monkeypatch.setattr(atari, "MAX_FRAMES", 80)
    monkeypatch.setattr(atari, "available_cores", lambda: 1)
    first = trajectory("ALE/Breakout-v5", 2, 1)
    monkeypatch.setattr(atari, "available_cores", lambda: 3)
    np.testing.assert_array_equal(first, trajectory("ALE/Breakout-v5", 2, 1, before=30))
    other = trajectory("ALE/Breakout-v5", 2, 2)
    copies = [*first.swapaxes(0, 1), *other.swapaxes(0, 1)]
    assert all(not np.array_equal(copies[i], copies[j]) for i in range(4) for j in range(i))


def test_streams_have_seeds_of_their_own() -> None:
    """No two uses of random numbers, (seed, stream, step), have a seed of the emulator in common.

    So the training of seed 1001 has no episode of the evaluations of seed 1.
    """
    seeds: list[int] = []
    zeros = np.zeros(16, np.int64)

    def reset(seed: np.ndarray) -> tuple:
        seeds.extend(seed.tolist())
        return np.zeros((16, 4, 84, 84), np.uint8), {"frame_number": zeros, "episode_frame_number": zeros}

    envs = AtariEnvs.__new__(AtariEnvs)  # without emulators
    vars(envs).update(num_envs=16, _envs=SimpleNamespace(reset=reset))
    uses = list(itertools.product((0, 1, 2, 1001, 2**32 - 1), STREAMS, (0, 1, 16, 1000, 10**9)))
    for use in uses:
        envs.reset(*use)
    assert len(set(seeds)) == len(seeds) == 16 * len(uses)
    assert min(seeds) > 0
    assert max(seeds) < 2**31
    envs.reset(1, "online")
    assert set(seeds[-16:]) < set(seeds[:-16]), "it is the stream online from step 0"


def test_sticky_actions_follow_the_id() -> None:
    """-v5 has sticky actions and -v4 has none."""
    plain = trajectory("PongNoFrameskip-v4", 1, 1)
    sticky = trajectory("ALE/Pong-v5", 1, 1)
    np.testing.assert_array_equal(plain[0], sticky[0])  # no-ops repeat no-ops
    assert (plain != sticky).any()


def test_truncation_at_the_frame_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the cap, here 200 frames or 50 steps, an episode is truncated, not terminated, and the next step resets."""
    assert atari.MAX_FRAMES == 30 * 60 * 60, "half an hour (Machado et al., 2018)"
    monkeypatch.setattr(atari, "MAX_FRAMES", 200)
    with closing(AtariEnvs("PongNoFrameskip-v4", 2)) as envs:
        envs.reset(1, "online")
        for t in range(110):
            assert envs.send(np.full(2, NOOP)).tolist() == [FIRE if t % 51 == 0 else NOOP] * 2, f"step {t}"
            step = envs.recv()
            assert not step.terminated.any()
            assert step.truncated.tolist() == [t % 51 == 49] * 2, f"step {t}"
            assert step.reset.tolist() == [t % 51 == 50] * 2, f"step {t}"
            assert [length for _, _, length in step.episodes] == ([50, 50] if t % 51 == 50 else [])
            assert step.observation[0, :3].any() == (t % 51 != 50)


# ==================== environment ids ====================

MULTIPLAYER = {"combat", "joust", "maze_craze", "warlords"}  # the emulator aborts the process in single-player mode


def test_every_rom_has_both_spellings() -> None:
    """Each single-player ROM is found under its name in PascalCase, with the sticky actions of its protocol."""
    single_player = [rom for rom in roms.get_all_rom_ids() if rom not in MULTIPLAYER]
    assert len(single_player) >= 100
    for rom in single_player:
        name = rom.title().replace("_", "")
        assert parse_env_id(f"ALE/{name}-v5") == (rom, 0.25)
        assert parse_env_id(f"{name}NoFrameskip-v4") == (rom, 0.0)
    for rom in MULTIPLAYER:
        with pytest.raises(UserError, match="is not a single-player game"):
            parse_env_id(f"ALE/{rom.title().replace('_', '')}-v5")


@pytest.mark.parametrize("name", ["TicTacToe3D", "VideoChess", "Pacman", "MarioBros", "Backgammon"])
def test_unusual_games(name: str) -> None:
    """Games with unusual names, modes, sizes of the screen and actions run; the last one has no no-op."""
    with closing(AtariEnvs(f"ALE/{name}-v5", 1)) as envs:
        envs.reset(1, "online")
        for action in (0, envs.num_actions - 1):
            assert envs.step(np.array([action])).observation.shape == (1, 4, 84, 84)


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("PnogNoFrameskip-v4", "Did you mean: `Pong`?"),
        ("ALE/space_invaders-v5", "Did you mean: `SpaceInvaders`?"),
        ("ALE/Xyzzy-v5", f"`{LIST_GAMES}` lists all"),
        ("Pong-v4", "PongNoFrameskip-v4"),
        ("PongNoFrameskip-v4\n", "PongNoFrameskip-v4"),
    ],
)
def test_error_of_an_unknown_environment(env_id: str, hint: str) -> None:
    """One line names the flag, its value and the remedy."""
    with pytest.raises(UserError) as caught:
        parse_env_id(env_id)
    message = str(caught.value)
    assert message.startswith(f"--env-id {env_id!r}")
    assert hint in message
    assert "\n" not in message


def test_list_of_games() -> None:
    """The command in the message lists environment ids that exist."""
    command = [sys.executable, *shlex.split(LIST_GAMES)[1:]]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    env_ids = re.findall(r"ALE/\S+", output)
    assert {"ALE/Adventure-v5", "ALE/Pong-v5"} <= set(env_ids)
    for env_id in env_ids:
        parse_env_id(env_id)


# ==================== evaluation ====================


RNG = np.random.default_rng(0)
EPISODES = 7


class FakeEnvs:
    """One environment without an emulator: length, observations and return of an episode depend on seed and actions."""

    def __init__(self, length: int | None = None):
        self.length = length  # of all episodes
        self.closed = False

    def reset(self, seed: int, stream: str, step: int = 0) -> np.ndarray:
        self.rng = np.random.default_rng((seed, STREAMS[stream], step))
        self.steps_left = self.length or self.rng.integers(5, 50)
        self.episodic_return = 0
        self.observation = self.rng.integers(0, 256, (1, 4, 84, 84), np.uint8)
        return self.observation

    def send(self, action: np.ndarray) -> None:
        self.steps_left -= 1
        self.episodic_return += int(action[0])
        self.rng = np.random.default_rng((self.rng.integers(2**32), action[0]))
        self.observation = self.rng.integers(0, 256, (1, 4, 84, 84), np.uint8)

    def recv(self) -> SimpleNamespace:
        episodes = [] if self.steps_left else [(0, self.episodic_return, 1)]
        return SimpleNamespace(observation=self.observation, episodes=episodes)

    def step(self, action: np.ndarray) -> SimpleNamespace:
        self.send(action)
        return self.recv()

    def close(self) -> None:
        self.closed = True


def by_checksum(observation: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
    """Return actions of four that depend on every pixel."""
    return observation.astype(np.int64).sum(axis=(1, 2, 3)) % 4


@pytest.mark.parametrize(("parallel", "sizes"), [(3, {4, 2, 1}), (64, {8, 4, 2, 1})])
def test_every_episode_that_starts_counts(
    parallel: int, sizes: set[int], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """However many are played at once, the episodes are the same, and short ones are not over-represented.

    The batches have no row of an ended episode.
    """
    monkeypatch.setattr(evaluation, "MAX_PARALLEL_EPISODES", parallel)
    expected = []
    envs = FakeEnvs()
    for number in range(EPISODES):
        observation = envs.reset(1, "evaluation", number)
        while not (result := envs.step(by_checksum(observation))).episodes:
            observation = result.observation
        expected.append(result.episodes[0][1])
    assert len(set(expected)) > 4
    made = []
    found = set()

    def make_envs(num_envs: int) -> FakeEnvs:
        made.append(FakeEnvs())
        return made[-1]

    def act(observation: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        found.add(len(observation))
        return by_checksum(observation)

    returns = play_episodes("name", act, EPISODES, make_envs, 1)
    assert returns == expected
    assert found == sizes
    assert len(made) == min(parallel, EPISODES)
    assert all(envs.closed for envs in made)
    assert f"name: return {np.mean(returns):.1f} ± {np.std(returns):.1f} over 7" in capsys.readouterr().out


def test_sizes_of_batches() -> None:
    """JAX compiles for each: they are powers of two up to 8, and then multiples of 8."""
    lengths = iter(range(1, 21))
    sizes = []

    def act(observation: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        sizes.append(len(observation))
        return np.zeros(len(observation), int)

    assert play_episodes("name", act, 20, lambda num_envs: FakeEnvs(next(lengths)), seed=1) == [0.0] * 20
    assert sizes == [24] * 4 + [16] * 8 + [8] * 4 + [4] * 2 + [2, 1]


def test_same_seed_same_actions() -> None:
    """The random actions of evaluations are reproducible, and are not those of the training."""

    def actions(seed: int) -> list[int]:
        drawn = []

        def random_policy(observation: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            drawn.extend(rng.integers(0, 4, len(observation)).tolist())
            return np.array(drawn[-len(observation) :])

        play_episodes("student", random_policy, 2, lambda num_envs: FakeEnvs(50), seed)
        return drawn

    first = actions(1)
    assert first == actions(1)
    assert first[:100] != actions(2)[:100]
    assert first[:100] != np.random.default_rng(1).integers(0, 4, 100).tolist()


def test_film_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The video has a colour image of each observation, and shows the same episode.

    Both are cut off at the frame cap, here 400 frames: the first observation and 100 steps.
    """
    monkeypatch.setattr(atari, "MAX_FRAMES", 400)
    observations = []
    path = tmp_path / "videos" / "student.mp4"

    def act(observation: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        observations.append(observation[0, -1].astype(int))
        return by_checksum(observation)

    film_episode(act, path, functools.partial(AtariEnvs, "BreakoutNoFrameskip-v4"), 3, RNG)
    images = [np.asarray(image) for image in imageio.get_reader(path)]
    assert len(images) == len(observations) == 101
    assert images[0].shape == (210, 160, 3)
    for image, observation in zip(images, observations, strict=True):
        gray = cv2.resize(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA)
        assert np.abs(gray - observation).max() < 40


@pytest.mark.posix
@pytest.mark.parametrize("ffmpeg", ["fails", "is missing", "package is missing"])
def test_broken_ffmpeg_costs_a_warning(
    ffmpeg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A long run survives an ffmpeg that fails or is missing."""
    program = tmp_path / "ffmpeg"
    if ffmpeg == "fails":
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
    elif ffmpeg == "package is missing":
        monkeypatch.setitem(sys.modules, "imageio", None)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    monkeypatch.chdir(tmp_path)
    film_episode(by_checksum, Path("videos/1/offline-4.mp4"), lambda **images: FakeEnvs(50), 1, RNG)
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING: ")]
    assert "videos/1/offline-4.mp4 can't be written" in warning
