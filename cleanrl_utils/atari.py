"""Atari: a vector environment for training, evaluation and videos."""

import re
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv

from cleanrl_utils.device import available_cores
from cleanrl_utils.errors import UserError

MAX_FRAMES = 108_000  # 30 minutes at 60 frames/s, after which an episode is truncated (Machado et al., 2018)
NOOP_MAX = 30
FRAME_SKIP = 4
LIST_GAMES = 'python -c "import ale_py, gymnasium; gymnasium.pprint_registry()"'
# The uses of random numbers, by which the seed of a run gives independent streams. NumPy takes (seed, 0) for `seed`.
STREAMS = {"teacher data": 1, "online": 2, "evaluation": 3, "evaluation actions": 4, "video": 5}


class StepResult(NamedTuple):
    """The result of a step of N environments."""

    observation: np.ndarray  # uint8 (N, 4, 84, 84), newest frame last
    reward: np.ndarray  # int32 (N,), not clipped
    terminated: np.ndarray  # bool (N,), a life was lost or the episode ended: no bootstrap from the observation
    truncated: np.ndarray  # bool (N,), the episode was cut off at 108,000 frames
    reset: np.ndarray  # bool (N,), the episode had ended: the action was ignored, the observation starts a new one
    episodes: list[tuple[int, int, int]]  # (environment, return, length in steps) of each episode in `reset`


def parse_env_id(env_id: str) -> tuple[str, float]:
    """Return ale-py's name of the ROM and the probability of a sticky action per frame; UserError for another id.

    An id is ``{Game}NoFrameskip-v4`` or ``ALE/{Game}-v5``, of any single-player game that ale-py ships. The first has
    no sticky actions, the second has probability 0.25 (Machado et al., 2018).
    """
    match = re.fullmatch(r"(?:ALE/(?P<v5>\w+)-v5)|(?:(?P<v4>\w+)NoFrameskip-v4)", env_id)
    if match is None:
        use = "use {Game}NoFrameskip-v4 or ALE/{Game}-v5, e.g. PongNoFrameskip-v4"
        raise UserError(f"--env-id {env_id!r} is not a known Atari environment: {use}")
    try:
        rom = gym.spec(f"ALE/{match['v5'] or match['v4']}-v5").kwargs["game"]
    except gym.error.Error as error:
        raise UserError(f"--env-id {env_id!r} is not a single-player game: {error} `{LIST_GAMES}` lists all") from error
    return rom, 0.25 if match["v5"] else 0.0


class AtariEnvs:
    """N environments of one game, emulated in C++ threads, with the preprocessing of Mnih et al. (2015).

    Frames are grayscale 84×84, the maximum of the last two; an action is repeated for 4 frames; 4 frames are stacked,
    with zeros before the first frame; up to 29 no-ops start an episode. A lost life is reported as ``terminated`` and
    the episode continues. FIRE replaces the first action of an episode and the first after a lost life, as in the
    wrappers that published agents were trained in: some agents would otherwise stand still in Breakout.

    Emulation overlaps with the caller's code between :meth:`send` and :meth:`recv`. An ended episode is reset in the
    next step (gymnasium's NEXT_STEP mode).

    ``images`` are options of ``AtariVectorEnv`` for other observations.
    See also :func:`parse_env_id`.
    """

    def __init__(self, env_id: str, num_envs: int, **images: Any):
        rom, sticky = parse_env_id(env_id)
        self.num_envs = num_envs
        self._envs = AtariVectorEnv(
            rom,
            num_envs,
            num_threads=min(num_envs, available_cores()),
            repeat_action_probability=sticky,
            max_num_frames_per_episode=MAX_FRAMES,
            frameskip=FRAME_SKIP,
            noop_max=NOOP_MAX,
            use_fire_reset=False,  # it presses FIRE for one frame, which a sticky action can replace; see `send`
            reward_clipping=False,  # the scripts clip, and log unclipped returns
            episodic_life=False,  # it would restart the whole game when a life is lost
            life_loss_info=True,
            **images,
        )
        self.num_actions = int(self._envs.single_action_space.n)
        meanings = [action.name for action in self._envs.ale.get_action_set()]
        self._fire_action = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(self, seed: int, stream: str, step: int = 0) -> np.ndarray:
        """Start a new episode in every environment.

        Args:
            seed: the seed of the run. With stream and step it decides the no-ops and sticky actions.
            stream: the use of the environments, a key of `STREAMS`.
            step: the step of the phase or the number of the episode.

        Returns:
            The observations, uint8 (N, 4, 84, 84).
        """
        # With consecutive numbers instead, runs with seeds 1 and 2 would have environments with the same seed.
        seeds = np.random.SeedSequence((seed, STREAMS[stream], step)).generate_state(self.num_envs)
        observation, info = self._envs.reset(seed=(seeds % (2**31 - 1) + 1).astype(np.int64))
        self._episode_start = info["frame_number"] - info["episode_frame_number"]
        self._return = np.zeros(self.num_envs, np.int64)
        self._length = np.zeros(self.num_envs, np.int64)
        self._press_fire = np.ones(self.num_envs, bool)
        return observation

    def send(self, action: np.ndarray) -> np.ndarray:
        """Start a step with ``action``; return the actions taken, FIRE where it replaces one. Both int64 (N,)."""
        if self._fire_action is not None:
            action = np.where(self._press_fire, self._fire_action, action)
        self._envs.send(action)
        return action

    def recv(self) -> StepResult:
        """Wait for the step that :meth:`send` started and return its result."""
        observation, reward, terminated, truncated, info = self._envs.recv()
        # The difference of the two frame counters changes only at a reset. Some games have no lives, and
        # Q*bert continues for a moment with none left.
        episode_start = info["frame_number"] - info["episode_frame_number"]
        reset = episode_start != self._episode_start
        self._episode_start = episode_start
        episodes = [(env, int(self._return[env]), int(self._length[env])) for env in np.flatnonzero(reset).tolist()]
        self._return = np.where(reset, 0, self._return + reward)
        self._length = np.where(reset, 0, self._length + 1)
        self._press_fire = terminated | reset
        return StepResult(observation, reward, terminated & ~reset, truncated & ~reset, reset, episodes)

    def step(self, action: np.ndarray) -> StepResult:
        """Call :meth:`send` and :meth:`recv`."""
        self.send(action)
        return self.recv()

    def close(self) -> None:
        """End the emulators' threads and free their memory."""
        self._envs.close()
        del self._envs  # the threads live as long as this object
