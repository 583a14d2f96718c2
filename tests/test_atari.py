"""Environments and evaluation against the real emulator, and against stable-baselines3's wrappers.

What differs from the wrappers by design, and is aligned or bounded here:

- A frame is the maximum of two grayscale frames, where the wrappers take the grayscale of the maximum of two colours.
- Before a game's first frame the stack holds zeros; theirs repeats the first frame, and starts anew after a lost life.
- A game starts with 0 to 29 no-ops, and FIRE replaces its first action; theirs starts with 1 to 30 no-ops, then plays
  FIRE and action 2 without showing them.
- After a lost life FIRE replaces the next action; theirs plays a no-op, FIRE and action 2 without showing them.
- Where the last life goes but the game plays on for a moment, the loss is reported; theirs waits for the game's end.
- A game is cut off after 108,000 frames of play; theirs counts the no-ops too.
- The final frame of a game that is cut off is the maximum of the last screen but one and the frame before; theirs, as
  always, of the last two screens.
"""

import functools
import os
import shlex
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms
from ale_py.env import AtariEnv
from ale_py.vector_env import AtariVectorEnv
from stable_baselines3.common import atari_wrappers as sb3

from cleanrl_utils import atari, evaluation
from cleanrl_utils.atari import LIST_GAMES, AtariEnvs, Step, make_wrapped_env, parse_env_id
from cleanrl_utils.checks import EmulatorFailure, UserError

NOOP, FIRE = 0, 1


class TellingVectorEnv(AtariVectorEnv):
    """Keeps what the emulator said last, so that a test can know where in its game it is."""

    def reset(self, **kwargs) -> tuple:
        observation, self.info = super().reset(**kwargs)
        return observation, self.info

    def recv(self) -> tuple:
        result = super().recv()
        self.info = result[-1]
        return result


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `AtariEnvs` build its emulators as `TellingVectorEnv`."""
    monkeypatch.setattr(atari, "AtariVectorEnv", TellingVectorEnv)


# ==================== the wrappers as oracle ====================


def pooled(screens: list[np.ndarray]) -> np.ndarray:
    """Their maximum, uint8 (84, 84)."""
    return cv2.resize(np.maximum.reduce(screens), (84, 84), interpolation=cv2.INTER_AREA)


class GrayscaleMaximum(gym.Wrapper):
    """Beneath the frame skip, remembers the last two grayscale screens: what a frame is, by the design's definition."""

    def step(self, action: int) -> tuple:
        result = super().step(action)
        self.screens = [*self.screens[-1:], self.unwrapped.ale.getScreenGrayscale()]
        return result

    def reset(self, **kwargs) -> tuple:
        result = super().reset(**kwargs)
        self.screens = [self.unwrapped.ale.getScreenGrayscale()]
        return result

    def frame(self) -> np.ndarray:
        """What a step shows of these two."""
        return pooled(self.screens)


class WrappedGame:
    """Frame skip and warping of stable-baselines3 around gym's environment, started as `AtariEnvs` starts games."""

    def __init__(self, env_id: str):
        env = AtariEnv(parse_env_id(env_id)[0], frameskip=1, repeat_action_probability=0.0)
        self.raw = GrayscaleMaximum(env)
        self.env = sb3.WarpFrame(sb3.MaxAndSkipEnv(self.raw, 4))
        self.ale = env.unwrapped.ale

    def start(self, noops: int) -> np.ndarray:
        """A new game and so many no-ops; the frame it then shows."""
        picture, _ = self.raw.reset()
        for _ in range(noops):
            picture = self.raw.step(NOOP)[0]
        self.lives = self.ale.lives()
        return self.env.observation(picture)[:, :, 0]

    def step(self, action: int) -> tuple[np.ndarray, int, bool]:
        """Frame, reward, and whether a life was lost."""
        frame, reward, *_ = self.env.step(action)
        lost, self.lives = self.ale.lives() < self.lives, self.ale.lives()
        return frame[:, :, 0], int(reward), lost


@pytest.mark.usefixtures("telling")
@pytest.mark.parametrize(
    ("name", "steps", "games"),
    [("Pong", 1100, 1), ("Breakout", 500, 2), ("SpaceInvaders", 700, 1), ("Qbert", 500, 1), ("MsPacman", 500, 1)],
)
def test_same_game_as_in_the_wrappers(name: str, steps: int, games: int) -> None:
    """Same actions, same rewards, lost lives and ends of games, exactly; same frames but for the maximum's order."""
    env_id = f"{name}NoFrameskip-v4"
    wrapped, rng = WrappedGame(env_id), np.random.default_rng(0)
    differences, ended, over = [], 0, False
    with closing(AtariEnvs(env_id, 1, seed=3)) as envs:
        observation = envs.reset()
        np.testing.assert_array_equal(
            observation[0, -1], wrapped.start(int(envs._envs.info["episode_frame_number"][0]))
        )
        for t in range(steps):
            action = envs.send(rng.integers(0, envs.num_actions, 1))
            step = envs.recv()
            assert step.reset[0] == over, f"step {t}"
            if over:
                frame = wrapped.start(int(envs._envs.info["episode_frame_number"][0]))
                reward, lost, over = 0, False, False
                np.testing.assert_array_equal(step.observation[0, -1], frame)
            else:
                frame, reward, lost = wrapped.step(int(action[0]))
                over = wrapped.ale.game_over()
                ended += over
                # The wrappers' frame is stale where a game ends amid four frames, and nothing is learnt from it.
                if not over:
                    np.testing.assert_array_equal(step.observation[0, -1], wrapped.raw.frame(), f"step {t}")
                    differences.append(np.abs(frame.astype(int) - step.observation[0, -1]))
            assert step.reward[0] == reward, f"step {t}"
            assert step.terminated[0] == (lost or over), f"step {t}"
            assert not step.truncated[0]
            assert envs._envs.info["lives"][0] == wrapped.lives, f"step {t}"
    assert ended >= games
    differences = np.array(differences)
    print(f"{name}: {differences.max()} at most, {(differences > 2).mean((1, 2)).max():.2%} of a frame beyond 2")
    assert (differences > 2).mean((1, 2)).max() < 0.015
    assert differences.max() < 64


def set_noops(wrapped: gym.Env, noops: int) -> None:
    """Lets the wrappers start every game with so many no-ops; they can't do with none."""
    assert noops > 0
    while not isinstance(wrapped, sb3.NoopResetEnv):
        wrapped = wrapped.env
    wrapped.override_num_noops = noops


@pytest.mark.usefixtures("telling")
def test_same_game_as_the_evaluation_wrappers() -> None:
    """Ms. Pac-Man has no FIRE: `make_wrapped_env` plays it frame for frame, but for a no-op after a lost life."""
    env_id, rng = "MsPacmanNoFrameskip-v4", np.random.default_rng(1)
    with closing(AtariEnvs(env_id, 1, seed=2)) as envs, closing(make_wrapped_env(env_id)) as wrapped:
        observation = envs.reset()
        set_noops(wrapped, int(envs._envs.info["episode_frame_number"][0]))
        theirs, _ = wrapped.reset(seed=1)
        assert not observation[0, :3].any()
        for t in range(4):  # where ours is zero
            np.testing.assert_array_equal(theirs[t], observation[0, -1])
        age, lives_lost = 0, 0
        for t in range(600):
            action = int(rng.integers(envs.num_actions))
            step = envs.step(np.array([action]))
            theirs, reward, terminated, truncated, _ = wrapped.step(action)
            age += 1
            assert (reward, terminated, truncated) == (step.reward[0], step.terminated[0], False), f"step {t}"
            if wrapped.unwrapped.ale.game_over():
                break
            if age >= 3:  # our stack crosses a lost life, theirs does not
                assert np.mean(np.abs(np.asarray(theirs, int) - step.observation[0]) > 2) < 0.015
            if terminated:
                lives_lost += 1
                theirs, _ = wrapped.reset()
                step = envs.step(np.array([NOOP]))
                assert np.mean(np.abs(np.asarray(theirs[-1], int) - step.observation[0, -1]) > 2) < 0.015
                assert all(np.array_equal(theirs[i], theirs[-1]) for i in range(3))
                age = 0
        assert wrapped.unwrapped.ale.game_over()
        assert lives_lost == 2


@pytest.mark.usefixtures("telling")
def test_same_start_as_the_evaluation_wrappers() -> None:
    """Breakout: FIRE in place of the first action, then action 2, is what the wrappers play before they show a game."""
    env_id, rng = "BreakoutNoFrameskip-v4", np.random.default_rng(1)
    with closing(AtariEnvs(env_id, 1, seed=2)) as envs, closing(make_wrapped_env(env_id)) as wrapped:
        envs.reset()
        set_noops(wrapped, int(envs._envs.info["episode_frame_number"][0]))
        theirs, _ = wrapped.reset(seed=1)
        assert envs.send(np.array([NOOP])) == FIRE
        envs.recv()
        step = envs.step(np.array([2]))
        moving = 0
        for t in range(100):
            np.testing.assert_array_equal(theirs[-1], step.observation[0, -1], f"step {t}")
            moving += (step.observation[0, -1] != step.observation[0, -2]).any()
            action = int(rng.integers(envs.num_actions))
            theirs, reward, terminated, *_ = wrapped.step(action)
            assert envs.send(np.array([action])) == action
            step = envs.recv()
            assert (reward, terminated) == (step.reward[0], step.terminated[0]), f"step {t}"
            if terminated:
                break
        assert terminated
        assert moving > t / 2  # a ball was served


# ==================== games: starts, ends, lives, seeds ====================


@pytest.mark.usefixtures("telling")
def test_games_start_at_different_frames() -> None:
    """No-ops make games start anywhere from frame 0 to 29, and never later."""
    with closing(AtariEnvs("BreakoutNoFrameskip-v4", 8, seed=1)) as envs:
        observation = envs.reset()
        frames = envs._envs.info["episode_frame_number"]
    assert observation.shape == (8, 4, 84, 84)
    assert observation.dtype == np.uint8
    assert not observation[:, :3].any()
    assert len(np.unique(frames)) >= 5
    assert 0 <= frames.min() < frames.max() < atari.NOOP_MAX


@pytest.mark.usefixtures("telling")
@pytest.mark.parametrize(("name", "games"), [("Breakout", 6), ("Qbert", 2), ("MsPacman", 1)])
def test_scores_lengths_and_resets_add_up(name: str, games: int) -> None:
    """Scores and lengths are sums between resets; a reset comes after a game's last life, and only then."""
    num_envs, rng = 3, np.random.default_rng(4)
    score, length, over, ended = np.zeros(num_envs, int), np.zeros(num_envs, int), np.zeros(num_envs, bool), 0
    with closing(AtariEnvs(f"{name}NoFrameskip-v4", num_envs, seed=5)) as envs:
        envs.reset()
        lives = envs._envs.info["lives"].copy()
        for _ in range(450):
            step = envs.step(rng.integers(0, envs.num_actions, num_envs))
            np.testing.assert_array_equal(step.reset, over)
            assert step.games == [(score[i], length[i]) for i in np.flatnonzero(step.reset)]
            ended += len(step.games)
            assert not (step.reset & (step.terminated | step.truncated)).any()
            assert not step.reward[step.reset].any()
            assert not step.observation[step.reset, :3].any()
            assert all(type(x) is int for game in step.games for x in game)
            score = np.where(step.reset, 0, score + step.reward)
            length = np.where(step.reset, 0, length + 1)
            now = envs._envs.info["lives"].copy()
            np.testing.assert_array_equal(step.terminated, (now < lives) & ~step.reset)  # all these games count lives
            over, lives = step.terminated & (now == 0), now
    assert ended >= games


def test_fire_is_pressed_at_starts_and_after_a_lost_life() -> None:
    """An agent that never does a thing loses all lives in Breakout, as FIRE takes its action's place for each."""
    with closing(AtariEnvs("BreakoutNoFrameskip-v4", 2, seed=1)) as envs:
        for _ in range(2):  # the second time amid games
            envs.reset()
            due, games, fired = np.ones(2, bool), 0, 0
            for _ in range(180):
                action = envs.send(np.full(2, NOOP))
                assert action.dtype == np.int64
                np.testing.assert_array_equal(action, np.where(due, FIRE, NOOP))
                fired += (action == FIRE).sum()
                step = envs.recv()
                due = step.terminated | step.reset
                games += len(step.games)
            assert games >= 2
            assert fired >= 10


def test_games_are_served_with_sticky_actions() -> None:
    """Four frames of FIRE are rarely all swallowed by a repeated no-op: the ball falls past who does nothing."""
    served = 0
    with closing(AtariEnvs("BreakoutNoFrameskip-v4", 16, seed=1, repeat_action_probability=0.25)) as envs:
        for seed in range(4):
            envs.reset(seed)
            lost = np.zeros(16, bool)
            for _ in range(100):
                lost |= envs.step(np.full(16, NOOP)).terminated
                if lost.all():
                    break
            served += lost.sum()
    assert served >= 60  # of 64


def test_no_fire_where_there_is_none() -> None:
    """Ms. Pac-Man has no such button: all actions are the caller's, also after a lost life."""
    rng = np.random.default_rng(0)
    with closing(AtariEnvs("MsPacmanNoFrameskip-v4", 2, seed=1)) as envs:
        envs.reset()
        lost = 0
        for _ in range(200):
            wanted = rng.integers(0, envs.num_actions, 2)
            np.testing.assert_array_equal(envs.send(wanted), wanted)
            lost += envs.recv().terminated.sum()
    assert lost > 0


def trajectory(env_id: str, num_envs: int, seed: int, sticky: float | None = None) -> np.ndarray:
    """All frames under fixed actions, the same in all copies, uint8 (51, num_envs, 84, 84)."""
    rng = np.random.default_rng(0)
    with closing(AtariEnvs(env_id, num_envs, seed, sticky)) as envs:
        frames = [envs.reset()[:, -1].copy()]
        for _ in range(50):
            action = np.full(num_envs, rng.integers(envs.num_actions))
            frames.append(envs.step(action).observation[:, -1].copy())
    return np.array(frames)


def test_trajectories_follow_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same seed, same games, whatever the threads do; another seed or another copy plays another game."""
    monkeypatch.setattr(atari, "available_cores", lambda: 1)
    first = trajectory("ALE/Breakout-v5", 3, 1)
    monkeypatch.setattr(atari, "available_cores", lambda: 3)
    np.testing.assert_array_equal(first, trajectory("ALE/Breakout-v5", 3, 1))
    other = trajectory("ALE/Breakout-v5", 3, 2)
    copies = [*first.swapaxes(0, 1), *other.swapaxes(0, 1)]
    assert all(not np.array_equal(copies[i], copies[j]) for i in range(6) for j in range(i))


def test_sticky_actions_are_what_the_id_or_the_flag_says() -> None:
    """-v5 is -v4 with sticky actions: not the same game, and the same without them."""
    plain = trajectory("PongNoFrameskip-v4", 1, 1)
    sticky = trajectory("ALE/Pong-v5", 1, 1)
    np.testing.assert_array_equal(plain, trajectory("ALE/Pong-v5", 1, 1, sticky=0.0))
    np.testing.assert_array_equal(sticky, trajectory("PongNoFrameskip-v4", 1, 1, sticky=0.25))
    np.testing.assert_array_equal(plain[0], sticky[0])  # no-ops repeat no-ops
    assert (plain != sticky).any()


def test_truncation_is_no_termination(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the cap, here 200 frames or 50 steps, a game is cut off, the next step resets, and lives have not ended."""
    monkeypatch.setattr(atari, "MAX_FRAMES", 200)
    with closing(AtariEnvs("PongNoFrameskip-v4", 2, seed=1)) as envs:
        envs.reset()
        for t in range(110):
            assert envs.send(np.full(2, NOOP)).tolist() == [FIRE if t % 51 == 0 else NOOP] * 2, f"step {t}"
            step = envs.recv()
            assert not step.terminated.any()
            assert step.truncated.tolist() == [t % 51 == 49] * 2, f"step {t}"
            assert step.reset.tolist() == [t % 51 == 50] * 2, f"step {t}"
            assert [length for _, length in step.games] == ([50, 50] if t % 51 == 50 else [])
            assert step.observation[0, :3].any() == (t % 51 != 50)


@pytest.mark.usefixtures("telling")
@pytest.mark.parametrize("name", ["Pong", "Breakout", "SpaceInvaders"])
def test_final_frame_of_a_truncated_game(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a few pixels off: ale-py breaks off before it has the last screen, and pools what it had before instead.

    A transition bootstraps from it. Whether ale-py should one day pool the real screens, this test tells.
    """
    monkeypatch.setattr(atari, "MAX_FRAMES", 200)
    env_id = f"{name}NoFrameskip-v4"
    wrapped, rng = WrappedGame(env_id), np.random.default_rng(0)
    with closing(AtariEnvs(env_id, 1, seed=3)) as envs:
        observation = envs.reset()
        wrapped.start(int(envs._envs.info["episode_frame_number"][0]))
        for t in range(50):
            screens_before, stack_before = wrapped.raw.screens, observation[0]
            action = envs.send(rng.integers(0, envs.num_actions, 1))
            step = envs.recv()
            observation = step.observation
            wrapped.step(int(action[0]))
            assert step.truncated[0] == (t == 49)
            assert (observation[0, -1] == wrapped.raw.frame()).all() == (t < 49), f"step {t}"
    np.testing.assert_array_equal(observation[0, -1], pooled([*screens_before, wrapped.raw.screens[0]]))
    assert (observation[0, -1] != wrapped.raw.frame()).sum() < 50
    np.testing.assert_array_equal(observation[0, :3], stack_before[1:])


# ==================== the emulators themselves ====================


@pytest.mark.parametrize("env_id", ["ALE/Backgammon-v5", "ALE/VideoCheckers-v5"])
def test_games_without_a_no_op_can_be_filmed(env_id: str) -> None:
    """stable-baselines3's wrappers for the start of a game refuse them."""
    with closing(make_wrapped_env(env_id)) as wrapped:
        assert wrapped.unwrapped.get_action_meanings()[0] != "NOOP"
        assert np.asarray(wrapped.reset(seed=1)[0]).shape == wrapped.step(1)[0].shape == (4, 84, 84)


@pytest.mark.parametrize("function", ["send", "recv", "reset"])
def test_what_the_emulator_raises(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the caller as one line, and first whoever asked for it."""
    failures: list[EmulatorFailure] = []
    with closing(AtariEnvs("PongNoFrameskip-v4", 2, seed=1)) as envs:
        envs.on_failure = failures.append
        envs.reset()
        monkeypatch.setattr(envs._envs, function, lambda *args, **kwargs: 1 / 0)
        with pytest.raises(EmulatorFailure, match=r"^the emulator failed \(division by zero\)$") as raised:
            envs.reset() if function == "reset" else envs.step(np.zeros(2, np.int64))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert failures == [raised.value]


def threads() -> set[str]:
    """The threads of this process."""
    return set(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not list threads")
def test_close_ends_the_threads() -> None:
    """Also while someone still holds what is closed."""
    before = threads()
    envs = AtariEnvs("PongNoFrameskip-v4", 2, seed=1)
    started = threads() - before
    assert started
    envs.close()
    for _ in range(100):  # one that has ended may be listed for a moment more
        if not started & threads():
            break
        time.sleep(0.1)
    assert not started & threads()


# ==================== environment ids ====================

# ale-py's emulator ends the whole process when given one of these in its single-player mode, which they lack.
MULTIPLAYER = {"combat", "joust", "maze_craze", "warlords"}


def test_every_rom_has_both_spellings() -> None:
    """Each single-player ROM is found under its name in PascalCase; the defaults are the ids' protocols."""
    single_player = [rom for rom in roms.get_all_rom_ids() if rom not in MULTIPLAYER]
    assert len(single_player) >= 100
    for rom in single_player:
        name = rom.title().replace("_", "")
        assert parse_env_id(f"ALE/{name}-v5") == (rom, 0.25)
        assert parse_env_id(f"{name}NoFrameskip-v4") == (rom, 0.0)
    for rom in MULTIPLAYER:
        with pytest.raises(UserError, match="is no single-player game"):
            parse_env_id(f"ALE/{rom.title().replace('_', '')}-v5")


@pytest.mark.parametrize("name", ["TicTacToe3D", "VideoChess", "Pacman", "MarioBros"])
def test_odd_roms_play(name: str) -> None:
    """Games with odd names, modes and numbers of actions play a few steps."""
    with closing(AtariEnvs(f"ALE/{name}-v5", 1, seed=1)) as envs:
        envs.reset()
        for action in (NOOP, envs.num_actions - 1):
            assert envs.step(np.array([action])).observation.shape == (1, 4, 84, 84)


@pytest.mark.parametrize(("sticky", "expected"), [(None, 0.25), (0.0, 0.0), (0.5, 0.5)])
def test_sticky_override(sticky: float | None, expected: float) -> None:
    """The flag wins over the id, also when it says zero."""
    assert parse_env_id("ALE/Pong-v5", sticky) == ("pong", expected)


@pytest.mark.parametrize("sticky", [-0.1, 1.0, float("nan")])
def test_impossible_sticky_actions(sticky: float) -> None:
    """At 1 no action would ever be taken."""
    with pytest.raises(UserError, match="--repeat-action-probability"):
        parse_env_id("ALE/Pong-v5", sticky)


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("PnogNoFrameskip-v4", "Did you mean: `Pong`?"),
        ("pongNoFrameskip-v4", "Did you mean: `Pong`?"),
        ("ALE/SpaceInvader-v5", "Did you mean: `SpaceInvaders`?"),
        ("ALE/space_invaders-v5", "Did you mean: `SpaceInvaders`?"),
        ("ALE/Xyzzy-v5", f"`{LIST_GAMES}` lists all"),
        ("ALE/Warlords-v5", "is no single-player game"),
        ("JoustNoFrameskip-v4", "is no single-player game"),
        ("CartPole-v1", "is no Atari environment"),
        ("Pong", "PongNoFrameskip-v4"),
        ("Pong-v4", "PongNoFrameskip-v4"),
        ("ALE/Pong-v4", "PongNoFrameskip-v4"),
        ("PongNoFrameskip-v4\n", "PongNoFrameskip-v4"),
        ("", "PongNoFrameskip-v4"),
    ],
)
def test_unknown_environments_are_named_in_one_line(env_id: str, hint: str) -> None:
    """The message says which flag, which value, and what to give instead."""
    with pytest.raises(UserError) as caught:
        parse_env_id(env_id)
    message = str(caught.value)
    assert message.startswith(f"--env-id {env_id!r}")
    assert hint in message
    assert "\n" not in message


def test_list_of_games() -> None:
    """The command in the message prints ids that there are."""
    command = [sys.executable, *shlex.split(LIST_GAMES)[1:]]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    env_ids = [word for word in words if word.startswith("ALE/")]
    assert {"ALE/Adventure-v5", "ALE/Pong-v5"} <= set(env_ids)
    for env_id in env_ids:
        parse_env_id(env_id)


# ==================== evaluation ====================


class StubEnvs:
    """Environments whose bad games are short and whose good games are long; both are equally likely, scores differ."""

    num_actions = 3
    made: list["StubEnvs"]
    SHORT, LONG, SPREAD = (3, -200), (60, 400), 100  # (length, score), width of the scores

    def __init__(self, env_id: str, num_envs: int, seed: int, repeat_action_probability: float | None = None):
        self.num_envs, self.rng = num_envs, np.random.default_rng(seed)
        self.seed, self.closed = seed, False
        self.made.append(self)

    def new_game(self) -> tuple[int, int]:
        """Length and score."""
        length, score = self.SHORT if self.rng.random() < 0.5 else self.LONG
        return length, score + int(self.rng.integers(self.SPREAD))

    def reset(self) -> np.ndarray:
        self.now = [self.new_game() for _ in range(self.num_envs)]
        self.first = list(self.now)
        self.age = np.zeros(self.num_envs, int)
        return self.observation()

    def observation(self) -> np.ndarray:
        """Every frame tells the environment that it is of."""
        picture = np.zeros((self.num_envs, 4, 84, 84), np.uint8)
        picture[:, :, 0, 0] = np.arange(self.num_envs)[:, None]
        return picture

    def step(self, action: np.ndarray) -> Step:
        assert action.shape == (self.num_envs,)
        assert action.dtype == np.int64
        reset = np.array([age > length for age, (length, _) in zip(self.age + 1, self.now, strict=True)])
        games = [(self.now[i][1], self.now[i][0]) for i in np.flatnonzero(reset)]
        for i in np.flatnonzero(reset):
            self.now[i] = self.new_game()
        self.age = np.where(reset, 0, self.age + 1)
        terminated = np.array([age == length for age, (length, _) in zip(self.age, self.now, strict=True)])
        reward = np.where(terminated, [score for _, score in self.now], 0).astype(np.int32)
        return Step(self.observation(), reward, terminated, np.zeros(self.num_envs, bool), reset, games)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> list[StubEnvs]:
    """Lets `play_games` play stubs; returns those that it made."""
    monkeypatch.setattr(StubEnvs, "made", [], raising=False)
    monkeypatch.setattr(evaluation, "AtariEnvs", StubEnvs)
    return StubEnvs.made


def test_short_games_are_not_over_represented(stubs: list[StubEnvs]) -> None:
    """Each environment's first game counts, long or short: the mean is the games' mean."""
    scores = evaluation.play_games(None, "stub", episodes=200, epsilon=0.0, seed=1)
    assert scores.dtype == np.float64
    assert scores.tolist() == [score for envs in stubs for _, score in envs.first]
    assert sum(envs.num_envs for envs in stubs) == 200
    assert max(envs.num_envs for envs in stubs) <= evaluation.MAX_PARALLEL_GAMES
    assert len({envs.seed for envs in stubs}) == len(stubs) > 1
    assert all(envs.closed for envs in stubs)
    assert abs(scores.mean() - 150) < 4 * 301 / np.sqrt(200)


def test_only_games_that_count_ask_the_player(stubs: list[StubEnvs]) -> None:
    """Q-values, which evaluation takes its time for, are asked for until a game ends, and not after it."""
    asked = np.zeros(8, int)

    def q_function(observation: np.ndarray) -> np.ndarray:
        asked[observation[:, 0, 0, 0]] += 1
        return np.zeros((len(observation), 3), np.float32)

    evaluation.play_games(q_function, "stub", episodes=8, epsilon=0.5, seed=3)
    # A game's steps and the one that reports its end.
    assert asked.tolist() == [length + 1 for length, _ in stubs[0].first]
    assert {length for length, _ in stubs[0].first} == {3, 60}


def test_scores_are_whole_unclipped_games() -> None:
    """Space Invaders at random: the scores are the sums of all rewards of all lives; the same seed plays them again."""
    scores = evaluation.play_games(None, "SpaceInvadersNoFrameskip-v4", episodes=2, epsilon=0.0, seed=11)
    rng, total, playing, lives_lost = np.random.default_rng(11), np.zeros(2), np.ones(2, bool), np.zeros(2, int)
    with closing(AtariEnvs("SpaceInvadersNoFrameskip-v4", 2, seed=11)) as envs:
        envs.reset()
        while playing.any():
            action = np.zeros(2, np.int64)
            action[playing] = rng.integers(0, envs.num_actions, playing.sum())
            step = envs.step(action)
            playing &= ~step.reset
            total += np.where(playing, step.reward, 0)
            lives_lost += playing & step.terminated
    np.testing.assert_array_equal(scores, total)
    assert lives_lost.tolist() == [3, 3]
    assert (scores % 5 == 0).all()
    assert scores.max() > 40


def test_same_seed_same_scores() -> None:
    """Also where Q-values decide; another seed plays other games."""

    def q_function(observation: np.ndarray) -> np.ndarray:
        return observation[:, -1, 70:80, :4].astype(np.float32).sum(1) + observation[:, 0, 40:80].mean((1, 2))[:, None]

    play = functools.partial(evaluation.play_games, q_function, "BreakoutNoFrameskip-v4", 2, 0.5)
    first = play(1)
    np.testing.assert_array_equal(first, play(1))
    assert (first != play(2)).any()


def random_player(seed: int, num_actions: int = 4) -> evaluation.QFunction:
    """Q-values at random, counted in ``calls``."""
    rng = np.random.default_rng(seed)

    def q_function(observation: np.ndarray) -> np.ndarray:
        assert observation.shape == (1, 4, 84, 84)
        assert observation.dtype == np.uint8
        q_function.calls += 1
        return rng.random((1, num_actions)).astype(np.float32)

    q_function.calls = 0
    return q_function


def test_wrapped_game_writes_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One picture per step, in colour and in the emulator's size; filming does not change the game."""
    imageio = pytest.importorskip("imageio")
    pytest.importorskip("imageio_ffmpeg")
    made: list[gym.Env] = []

    def make_and_keep(*args, **kwargs) -> gym.Env:
        made.append(make_wrapped_env(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(evaluation, "make_wrapped_env", make_and_keep)
    player, path = random_player(0), tmp_path / "videos" / "game.mp4"
    score = evaluation.play_wrapped_game(player, "BreakoutNoFrameskip-v4", 0.0, seed=1, video=path)
    steps = player.calls
    assert made[0].unwrapped.ale.lives() == 0
    assert made[0].unwrapped.ale.game_over()
    with imageio.get_reader(path) as video:
        pictures = [np.asarray(picture) for picture in video]
        assert video.get_meta_data()["fps"] == 15
    assert len(pictures) == steps
    assert pictures[0].shape == (210, 160, 3)
    assert np.ptp(pictures[0]) > 100  # bricks on black
    assert any(np.abs(pictures[0].astype(int) - picture).max() > 100 for picture in pictures)
    again = random_player(0)
    assert evaluation.play_wrapped_game(again, "BreakoutNoFrameskip-v4", 0.0, seed=1) == score
    assert again.calls == steps
    first, second = (env.unwrapped.ale.getEpisodeFrameNumber() for env in made)
    assert first == second  # no-ops at the start, too, follow from the seed


def test_wrapped_game_ends_at_the_frame_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A player that stands still for good is stopped at the cap, with no-ops counted; Pong is not over by then."""
    monkeypatch.setattr(atari, "MAX_FRAMES", 200)
    player = random_player(0, num_actions=6)
    evaluation.play_wrapped_game(player, "PongNoFrameskip-v4", 0.0, seed=1)
    assert (200 - 30 - 8) // 4 <= player.calls <= 50


@pytest.mark.parametrize("cap", [108, 112, 116])
def test_wrapped_game_is_one_game(cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lost life the wrappers play three steps unseen; a game cut off there must not go on as the next."""
    monkeypatch.setattr(atari, "MAX_FRAMES", cap)
    steps = 0

    def stand_still(observation: np.ndarray) -> np.ndarray:
        nonlocal steps
        steps += 1
        return np.array([[1.0, 0.0, 0.0, 0.0]])

    evaluation.play_wrapped_game(stand_still, "BreakoutNoFrameskip-v4", 0.0, seed=1)
    assert steps * 4 <= cap
