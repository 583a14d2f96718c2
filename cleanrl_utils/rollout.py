"""Playing with nothing to do meanwhile but to choose the next actions."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cleanrl_utils.atari import AtariEnvs, Step, available_cores
from cleanrl_utils.errors import EmulatorFailure
from cleanrl_utils.evaluation import QFunction, epsilon_greedy

NICE = 5
"""how much nicer than the rest of the process the emulators' threads are"""


class Played(NamedTuple):
    """A step of N environments, with what led to it."""

    observation: np.ndarray
    """uint8 (N, 4, 84, 84), that the actions were chosen for"""
    action: np.ndarray
    """int64 (N,), really taken"""
    step: Step
    """what came of it"""
    q_values: np.ndarray
    """float32 (N, num_actions), of the observation"""


def thread_ids() -> set[int]:
    """The threads of this process; none where the system does not give each a priority of its own, as Linux does."""
    return {int(task.name) for task in Path("/proc/self/task").glob("*")}


def join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """What all halves have, in one array; no copy if there is only one half."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class HalvedAtariEnvs:
    """N copies of one game as two :class:`AtariEnvs` in turns: one is emulated while the other's actions are chosen.

    For when there is nothing else to do during emulation. The copies play as those of one :class:`AtariEnvs` would.

    Args:
        env_id, num_envs, seed, repeat_action_probability: see :class:`AtariEnvs`.
        overlap: half of the cores emulate, at a lower priority, so that the other half can choose. Otherwise all cores
            emulate all copies, and then all choose: better where choosing cannot do with fewer cores, as in XLA.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        seed: int,
        repeat_action_probability: float | None = None,
        overlap: bool = True,
    ):
        self.num_envs, middle = num_envs, (num_envs + 1) // 2 if overlap else num_envs
        threads = thread_ids()
        self._halves = [
            AtariEnvs(
                *(env_id, end - start, seed, repeat_action_probability),
                num_threads=min(end - start, (available_cores() + 1) // 2) if overlap else None,
                first=start,
            )
            for start, end in ((0, middle), (middle, num_envs))
            if end > start
        ]
        # Both halves wait for the thread that chooses. On few cores, emulators that have just been given their actions
        # would interrupt it.
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICE
        for thread in thread_ids() - threads if overlap else ():
            with contextlib.suppress(ProcessLookupError):  # it was somebody else's and is gone
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
        self._gather()

    def _gather(self) -> None:
        self.observation = join([half.observation for half in self._halves])
        """uint8 (N, 4, 84, 84), the newest"""
        self.just_reset = join([half.just_reset for half in self._halves])
        """bool (N,), the newest observation is a game's first, after another game"""

    @property
    def on_failure(self) -> Callable[[EmulatorFailure], None]:
        """Called when an emulator fails in a step, before the failure goes on its way."""
        return self._halves[0].on_failure

    @on_failure.setter
    def on_failure(self, function: Callable[[EmulatorFailure], None]) -> None:
        for half in self._halves:
            half.on_failure = function

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Starts a new game in every copy; returns uint8 (N, 4, 84, 84). ``seed`` is in place of the constructor's."""
        for half in self._halves:
            half.reset(seed)
        self._gather()
        return self.observation

    def rollout(
        self, q_function: QFunction, epsilon: Callable[[], float], rng: np.random.Generator
    ) -> Iterator[Played]:
        """Plays on without end, with ε-greedy actions; ``epsilon`` returns ε for now."""

        def send(half: AtariEnvs) -> tuple[np.ndarray, np.ndarray]:
            q_values = q_function(half.observation)
            return half.send(epsilon_greedy(q_values, epsilon(), rng)), q_values

        first, *second = self._halves
        next_of_first = send(first)
        while True:
            chosen = [next_of_first, *(send(half) for half in second)]
            steps = [first.recv()]
            next_of_first = send(first)
            steps += [half.recv() for half in second]
            action, q_values = map(join, zip(*chosen, strict=True))
            *arrays, games = zip(*steps, strict=True)
            step = Step(*map(join, arrays), [game for half in games for game in half])
            observation = self.observation
            self.observation, self.just_reset = step.observation, step.reset
            yield Played(observation, action, step, q_values)

    def close(self) -> None:
        """Ends the emulators' threads."""
        for half in self._halves:
            half.close()
