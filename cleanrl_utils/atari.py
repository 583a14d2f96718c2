"""Atari: a vector environment for training and evaluation, and the wrappers that published agents come from."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from ale_py.env import AtariEnv
from ale_py.vector_env import AtariVectorEnv

from cleanrl_utils.checks import EmulatorFailure, UserError, require_packages

MAX_FRAMES = 108_000  # 30 minutes of play at 60 frames/s, after which a game is truncated (Machado et al., 2018)
NOOP_MAX = 30
FRAME_SKIP = 4
LIST_GAMES = "python -c 'import ale_py, gymnasium; gymnasium.pprint_registry()'"


class Step(NamedTuple):
    """What one step of N environments returns."""

    observation: np.ndarray
    """uint8 (N, 4, 84, 84), newest frame last"""
    reward: np.ndarray
    """int32 (N,), change of the game's score, not clipped"""
    terminated: np.ndarray
    """bool (N,), a life was lost or the game is over: the value of what follows is zero"""
    truncated: np.ndarray
    """bool (N,), the game was cut off at 108,000 frames"""
    reset: np.ndarray
    """bool (N,), the game was over before this step: the action was ignored and the observation starts a new game"""
    games: list[tuple[int, int]]
    """(score, length in steps) of every game that these resets closed"""


def parse_env_id(env_id: str, repeat_action_probability: float | None = None) -> tuple[str, float]:
    """ale-py's name of the ROM, and the probability of a sticky action, per frame, that an environment id stands for.

    Reads ``{Game}NoFrameskip-v4`` or ``ALE/{Game}-v5``, for every single-player game that ale-py ships.
    ``repeat_action_probability`` overrides what the id stands for: 0 for -v4, 0.25 for -v5 (Machado et al., 2018).
    UserError where the id has another form, or names no single-player Atari game.
    """
    match = re.fullmatch(r"(?:ALE/(?P<v5>\w+)-v5)|(?:(?P<v4>\w+)NoFrameskip-v4)", env_id)
    if match is None:
        use = "use {Game}NoFrameskip-v4 or ALE/{Game}-v5, e.g. PongNoFrameskip-v4"
        raise UserError(f"--env-id {env_id!r} is no Atari environment that this script knows: {use}")
    try:
        rom = gym.spec(f"ALE/{match['v5'] or match['v4']}-v5").kwargs["game"]  # where ale-py registers all of them
    except gym.error.Error as error:
        raise UserError(f"--env-id {env_id!r} is no single-player game: {error} `{LIST_GAMES}` lists all") from error
    default = 0.25 if match["v5"] else 0.0
    sticky = default if repeat_action_probability is None else repeat_action_probability
    if not 0 <= sticky < 1:
        raise UserError(f"--repeat-action-probability is {sticky}; it must be at least 0 and below 1")
    return rom, sticky


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def emulator_errors(on_failure: Callable[[EmulatorFailure], None] = lambda failure: None) -> Iterator[None]:
    """Turns whatever the emulator raises into an EmulatorFailure, with which it first calls ``on_failure``."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        failure = EmulatorFailure(f"the emulator failed ({reason})")
        failure.__cause__ = error
        on_failure(failure)
        raise failure from error


class AtariEnvs:
    """N copies of one game, emulated in C++ threads, with the preprocessing of Mnih et al. (2015).

    Grayscale 84×84, every action repeated for 4 frames, maximum over the last two, 4 frames stacked (zeros before the
    first frame of a game), no-ops for up to 29 frames at the start of a game. A lost life is reported as ``terminated``
    and the game plays on. At the start of a game and after a lost life FIRE is pressed in place of the next action, as
    in the wrappers that published agents were trained in: without it an agent can stand still in Breakout forever.

    Emulation overlaps with whatever the caller does between :meth:`send` and :meth:`recv`. Whatever the emulator raises
    there or in :meth:`reset` becomes an :class:`EmulatorFailure`. Games, no-ops and sticky actions follow from
    ``seed``; :func:`parse_env_id` says what the others are.
    """

    def __init__(self, env_id: str, num_envs: int, seed: int, repeat_action_probability: float | None = None):
        rom, sticky = parse_env_id(env_id, repeat_action_probability)
        self.num_envs, self.num_threads = num_envs, min(num_envs, available_cores())
        self._envs = AtariVectorEnv(
            rom,
            num_envs,
            num_threads=self.num_threads,
            repeat_action_probability=sticky,
            max_num_frames_per_episode=MAX_FRAMES,
            frameskip=FRAME_SKIP,
            noop_max=NOOP_MAX,
            use_fire_reset=False,  # for a single frame, in which a sticky action can swallow it; see `send`
            reward_clipping=False,  # scores are reported unclipped; what learns clips for itself
            episodic_life=False,  # True would restart the whole game whenever a life is lost
            life_loss_info=True,
        )
        self.num_actions = int(self._envs.single_action_space.n)
        meanings = [action.name for action in self._envs.ale.get_action_set()]
        self._fire_action = meanings.index("FIRE") if "FIRE" in meanings else None
        self._seed = seed
        self.on_failure: Callable[[EmulatorFailure], None] = lambda failure: None

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Starts a new game in every copy; returns uint8 (N, 4, 84, 84). ``seed`` is in place of the constructor's."""
        # Those of seed 1 and seed 2 don't overlap, as consecutive ones would.
        seeds = np.random.SeedSequence(self._seed if seed is None else seed).generate_state(self.num_envs)
        with emulator_errors(self.on_failure):
            observation, info = self._envs.reset(seed=(seeds % (2**31 - 1) + 1).astype(np.int64))
        self._game_start = info["frame_number"] - info["episode_frame_number"]
        self._score, self._length = np.zeros((2, self.num_envs), np.int64)
        self._press_fire = np.ones(self.num_envs, bool)
        return observation

    def send(self, action: np.ndarray) -> np.ndarray:
        """Starts a step with ``action``; returns the actions really taken, FIRE where it is due. Both int64 (N,)."""
        if self._fire_action is not None:
            action = np.where(self._press_fire, self._fire_action, action)
        with emulator_errors(self.on_failure):
            self._envs.send(action)
        return action

    def recv(self) -> Step:
        """Waits for the step that :meth:`send` started."""
        with emulator_errors(self.on_failure):
            observation, reward, terminated, truncated, info = self._envs.recv()
        # The emulator counts frames since it started and since the game began: the difference moves only at a reset.
        # Lives do not tell: some games have none, and Q*bert plays on for a moment with none left.
        game_start = info["frame_number"] - info["episode_frame_number"]
        reset = game_start != self._game_start
        self._game_start = game_start
        games = [(int(self._score[i]), int(self._length[i])) for i in np.flatnonzero(reset)]
        self._score = np.where(reset, 0, self._score + reward)
        self._length = np.where(reset, 0, self._length + 1)
        self._press_fire = terminated | reset
        return Step(observation, reward, terminated & ~reset, truncated & ~reset, reset, games)

    def step(self, action: np.ndarray) -> Step:
        """:meth:`send` and :meth:`recv` in one call."""
        self.send(action)
        return self.recv()

    def close(self) -> None:
        """Ends the emulators' threads and frees their memory."""
        self._envs.close()
        del self._envs  # its threads live as long as it does


def make_wrapped_env(
    env_id: str, repeat_action_probability: float | None = None, render_mode: str | None = None
) -> gym.Env:
    """One game in stable-baselines3's Atari wrappers, where published teachers were trained.

    Observations are uint8 (4, 84, 84); rewards are not clipped; an episode ends with a life, and ``reset`` then goes on
    with the same game until ``env.unwrapped.ale.game_over()``. The oracle for :class:`AtariEnvs`: slower, but it can
    render video.
    """
    require_packages("this", "stable_baselines3")
    from stable_baselines3.common import atari_wrappers as sb3

    rom, sticky = parse_env_id(env_id, repeat_action_probability)
    env = AtariEnv(
        rom,
        frameskip=1,
        repeat_action_probability=sticky,
        max_num_frames_per_episode=MAX_FRAMES,
        render_mode=render_mode,
    )
    meanings = env.get_action_meanings()
    usual = meanings[0] == "NOOP"  # in all games but Backgammon and Video Checkers, which these wrappers refuse
    if usual:
        env = sb3.NoopResetEnv(env, NOOP_MAX)
    env = sb3.MaxAndSkipEnv(env, FRAME_SKIP)
    env = sb3.EpisodicLifeEnv(env)
    if usual and "FIRE" in meanings:
        env = sb3.FireResetEnv(env)
    env = gym.wrappers.ReshapeObservation(sb3.WarpFrame(env), (84, 84))
    return gym.wrappers.FrameStackObservation(env, 4)
