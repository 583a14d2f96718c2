"""A run that can be stopped by anything at any moment and goes on with ``--resume runs/{run_name}``.

A script is a row of phases, numbered from 1. It tells its :class:`Run` what a checkpoint has to hold (`keep`,
`keep_replay`, `state`), skips the phases that are over (`phase`), and lets it count the iterations of the others
(`steps`); between two of them the run writes checkpoints and stops when told to.
"""

import dataclasses
import fcntl
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import tyro
from tqdm import tqdm

from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.checkpoint import CheckpointStore, DamagedFile, ReplayRows, Tree
from cleanrl_utils.checks import flag
from cleanrl_utils.errors import EmulatorFailure, TrainingFailure, UserError
from cleanrl_utils.evaluation import QFunction, play_games, play_wrapped_game
from cleanrl_utils.hub import script_of
from cleanrl_utils.rollout import HalvedAtariEnvs
from cleanrl_utils.runs import (
    event_file_sizes,
    finish_run,
    progress_bar,
    reopen_run,
    start_run,
    wandb_run_id,
    warn_once,
)

T = TypeVar("T")
Result = TypeVar("Result")

MAY_CHANGE = {
    *("resume", "total_timesteps", "checkpoint_minutes", "max_minutes", "eval_episodes", "cuda", "cuda_graph"),
    *("track", "wandb_project_name", "wandb_entity", "capture_video", "save_model", "upload_model", "hf_entity"),
}
"""Flags that a resumed run may be given other values of; a longer total_timesteps stretches the fall of epsilon"""

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138, signal.SIGALRM: 0}
"""SIGALRM is what --max-minutes sends"""

MAX_ACTIONS = 18
"""of any Atari game, and thus the most different Q-values that a batch has if they follow from the action alone"""

WRITING = 0.02
"""the fraction of its time that a run may spend on the checkpoints of every `checkpoint_minutes`"""


class Part(Protocol):
    """Something that a checkpoint holds."""

    def save(self) -> Tree:
        """Its state."""

    def load(self, state: Tree) -> None:
        """Takes over what :meth:`save` returned."""


class Stopped(BaseException):
    """Raised by a signal in the middle of an evaluation."""


def parse_args(args_class: type[T], argv: Sequence[str] | None = None) -> T:
    """The flags of the command line; with ``--resume``, those of the run, but for what may change.

    Raises:
        UserError: the run can't be resumed, or a flag contradicts it.
    """
    args = tyro.cli(args_class, args=argv)
    if args.resume is None:
        return args
    flags = load_checkpoint(Path(args.resume), args, with_replay=False)[1]["flags"]
    try:
        saved = args_class(**flags)
    except TypeError as error:
        raise UserError(f"--resume {args.resume}: this script has other flags than the one that began it") from error
    # What is not given on the command line is now as it was in the run, so that all that differs was given.
    args = tyro.cli(args_class, default=saved, args=argv)
    for field in dataclasses.fields(args_class):
        given, was = getattr(args, field.name), getattr(saved, field.name)
        if given != was and field.name not in MAY_CHANGE:
            raise UserError(
                f"{flag(field.name)} is {given} and {args.resume} was started with {was}; leave the flag out, or start "
                "a new run without --resume"
            )
    return args


def load_checkpoint(run_dir: Path, args: Any, with_replay: bool = True) -> tuple[CheckpointStore, Tree]:
    """The checkpoints of a run, and the state of the newest that is whole (`CheckpointStore.load`).

    Raises:
        UserError: there is none, the run is over, or it is one of another script than that of ``args``.
    """
    if not run_dir.is_dir():
        raise UserError(f"--resume {run_dir}: there is no such directory; give that of a run, runs/{{run_name}}")
    store = CheckpointStore(run_dir / "checkpoint")
    state = store.load(with_replay)
    if state["script"] != script_of(args).stem:
        raise UserError(f"--resume {run_dir} is a run of {state['script']}.py; resume it with that script")
    if state["finished"]:
        raise UserError(f"--resume {run_dir}: this run is finished; start a new one without --resume")
    return store, state


class Run:
    """A run of a script, new or resumed: directory, logs, checkpoints, signals.

    Args:
        args: the script's ``Args``. With `checkpoint_minutes` 0 no checkpoint is written and signals do what they
            always do.

    Raises:
        UserError: see `start_run` and :func:`load_checkpoint`.
    """

    def __init__(self, args: Any):
        self.args = args
        self.phase = 1
        """the phase that the run is in"""
        self.done = 0
        """what :meth:`steps` has counted in this phase; the iteration in progress included"""
        self.results: dict[str, np.ndarray] = {}
        """the scores of every evaluation's games"""
        self.videos: list[Path] = []
        """the videos of the evaluations"""
        self.state: dict[str, Any] = {}
        """what else a script wants to find again: anything that JSON can hold"""
        self.last_update: dict[str, Any] = {}
        """the loss, and what it was made from: arrays of NumPy, JAX or PyTorch"""
        self.bar = tqdm(disable=True)
        """the progress bar of the phase"""
        self._parts: dict[str, Part] = {}
        self._replay: ReplayRows | None = None
        self._replay_name = ""
        self._envs: AtariEnvs | HalvedAtariEnvs | None = None
        self._loaded: Tree = None
        self._seconds = 0.0
        self._wandb_id: str | None = None
        if args.resume is None:
            self.dir, self.writer = start_run(args)
            self._lock = lock_directory(self.dir)
            self._store = CheckpointStore(self.dir / "checkpoint")
            print(f"run directory: {self.dir}", flush=True)
        else:
            self.dir = Path(args.resume)
            self._lock = lock_directory(self.dir)
            self._store, self._loaded = load_checkpoint(self.dir, args)
            self._wandb_id = self._loaded["wandb_id"]  # kept also while nothing is tracked
            self.writer = reopen_run(args, self.dir, self._loaded["event_files"], self._wandb_id)
            self.phase, self.done, self._seconds = (self._loaded[name] for name in ("phase", "done", "seconds"))
            self.results, self.state = self._loaded["results"], self._loaded["state"]
            self.videos = [Path(video) for video in self._loaded["videos"]]
            print(f"resuming {self.dir} in phase {self.phase} after {self.done:,} steps", flush=True)
        if args.track:
            self._wandb_id = wandb_run_id()
        self._phase_started = self._last_checkpoint = time.monotonic()
        self._pause = 0.0
        self._warned = False
        self._signal: signal.Signals | None = None
        self._interruptible = False
        self._handlers: dict[signal.Signals, Any] = {}
        if args.checkpoint_minutes:
            self._handlers = {number: signal.signal(number, self._on_signal) for number in EXIT_CODES}
            if args.max_minutes:
                signal.setitimer(signal.ITIMER_REAL, args.max_minutes * 60)

    # ==================== what is in a checkpoint ====================

    def keep(self, **parts: Part) -> None:
        """Makes ``parts`` belong to every checkpoint; in a resumed run, gives them the state that they had."""
        self._parts |= parts
        if self._loaded:
            for name, part in parts.items():
                part.load(self._loaded["parts"][name])

    def keep_replay(self, name: str, replay: ReplayRows) -> None:
        """Makes ``replay`` belong to every checkpoint, in place of another; in a resumed run, fills it again."""
        self._replay_name, self._replay = name, replay
        if self._loaded:
            try:
                self._store.load_replay(replay, name)
            except DamagedFile as error:
                raise UserError(f"--resume {self.dir}: {error}; try again") from error

    def drop_replay(self) -> None:
        """Lets go of the replay: the next checkpoint has none."""
        self._replay_name, self._replay = "", None

    def reset(self, envs: AtariEnvs | HalvedAtariEnvs) -> np.ndarray:
        """Starts the games of a phase; returns their first observations, uint8 (N, 4, 84, 84).

        Emulators can't be restored. In the middle of a phase new games begin, and those that were being played end in
        the replay as truncated, with the frame that was last seen.

        Raises:
            TrainingFailure: the emulator failed; the last checkpoint is what there is.
        """
        self._envs, envs.on_failure = envs, self._on_failed_step
        try:
            return self._begin_games(envs)
        except EmulatorFailure as failure:
            self._give_up(failure)

    def _begin_games(self, envs: AtariEnvs | HalvedAtariEnvs) -> np.ndarray:
        if not (self._loaded and self._replay and self._replay.rows_written):
            return envs.reset()
        frame, just_reset = self._loaded["frame"], self._loaded["just_reset"]
        # Stopped before the first step of games, there is nothing to end: final frames never follow each other.
        if not just_reset.all():
            self._replay.cut_games(frame)
        seeds = np.random.SeedSequence((self.args.seed, self.phase, self.done))
        observation = envs.reset(int(seeds.generate_state(1)[0]))
        envs.just_reset[:] = True
        return observation

    # ==================== the phases ====================

    @property
    def seconds(self) -> float:
        """Time spent in this phase, without evaluations and without the time between stopping and resuming."""
        return self._seconds + time.monotonic() - self._phase_started

    def steps(self, total: int, by: int, description: str, unit: str) -> Iterator[int]:
        """Counts what is left of the phase: done so far, in steps of ``by``, up to ``total``. Checkpoints in between.

        Args:
            description: what the progress bar says, which counts in ``unit``.
        """
        self.bar, self._by = progress_bar(total, description, unit, self.done), by
        self._phase_started = time.monotonic()
        while self.done < total:
            self._between_steps()
            start, self.done = self.done, self.done + by
            yield start
            self.bar.update(by)
        self.bar.close()

    def show_return(self, returns: Iterable[float]) -> None:
        """Puts the mean of ``returns``, if there are any, onto the progress bar."""
        if returns := list(returns):
            self.bar.set_postfix_str(f"return {np.mean(returns):.1f}", refresh=False)

    def _between_steps(self) -> None:
        minutes = self.args.checkpoint_minutes
        due = minutes and time.monotonic() - self._last_checkpoint >= max(minutes * 60, self._pause)
        if not (due or self._signal):
            return
        # Where a game has just ended, ending it once more would put two final frames after each other into the replay.
        if self._envs and self._envs.just_reset.any() and not self._envs.just_reset.all():
            return
        if self._signal:
            self._stop()
        started = time.monotonic()
        self.save()
        # Where all of a large replay is new each time, or the disk is slow, checkpoints become fewer, not training.
        self._pause = (time.monotonic() - started) / WRITING

    def end_phase(self, next_phase: int) -> None:
        """Goes on to another phase, with a checkpoint in between."""
        self.phase, self.done, self._seconds, self._envs = next_phase, 0, 0.0, None
        self._loaded = None
        if self._signal:
            self._stop()
        if self.args.checkpoint_minutes:
            self.save()
        self._phase_started = time.monotonic()

    def evaluate(self, name: str, q_function: QFunction | None, episodes: int) -> float:
        """Plays whole games at ε = `end_e` (at random without a Q-function), notes the scores, returns their mean.

        What an earlier part of the run has played is not played again. A signal does not wait for the games to end:
        they start from seeds, and the resumed run plays them anew, as it does when the emulator fails.

        Raises:
            TrainingFailure: the emulator failed; what there is was saved.
        """
        args = self.args
        if name not in self.results:
            self.check_learning()
            setting = (args.env_id, args.end_e, args.repeat_action_probability)
            returns = self._interrupt_by_signal(
                lambda: play_games(q_function, setting[0], episodes, setting[1], args.seed + 1000, setting[2], name)
            )
            tqdm.write(f"{name}: return {returns.mean():.1f} ± {returns.std():.1f} over {episodes} games")
            if args.capture_video and q_function is not None:
                video = Path("videos") / self.dir.name / f"{name.replace(' ', '-')}.mp4"
                self._interrupt_by_signal(
                    lambda: play_wrapped_game(q_function, setting[0], setting[1], args.seed, setting[2], video)
                )
                self.videos.append(video)
            self.results[name] = returns
        return float(self.results[name].mean())

    def _interrupt_by_signal(self, function: Callable[[], Result]) -> Result:
        started, result, failure = time.monotonic(), None, None
        try:
            self._interruptible = True
            if not self._signal:
                try:
                    result = function()
                except EmulatorFailure as error:
                    failure = error
            self._interruptible = False
        except Stopped:
            self._interruptible = False
        self._phase_started += time.monotonic() - started
        if self._signal:
            self._stop()
        if failure:
            self._fail_emulator(failure)
        return result

    def check_learning(self) -> None:
        """Stops the run if the last update's loss is not a finite number; warns if what learns does not see any more.

        Raises:
            TrainingFailure: with the step, the batch's statistics and the last checkpoint; exit code 3.
        """
        if not self.last_update:
            return
        if not np.isfinite(as_array(self.last_update["loss"])):
            self._fail_not_finite("the loss")
        q_values = as_array(self.last_update["q_values"])
        if q_values.size > MAX_ACTIONS >= np.unique(q_values).size and not self._warned:
            self._warned = True
            tqdm.write(
                f"WARNING: the network has the same Q-values for all observations (phase {self.phase}, step "
                f"{self.done:,}); if that stays so, no hidden unit is left: start anew with a lower --learning-rate "
                "or, if it is a student, --warmup-updates 1000",
                file=sys.stderr,
            )

    def _fail_not_finite(self, what: str) -> NoReturn:
        statistics = []
        for name, value in self.last_update.items():
            array = as_array(value)
            bad = array.size - np.count_nonzero(np.isfinite(array))
            numbers = f"{array.min():.4g} to {array.max():.4g}" if array.size > 1 else f"{array:.4g}"
            statistics.append(f"{name} {numbers}" + (f" ({bad} not finite)" if bad and array.size > 1 else ""))
        self.close()
        raise TrainingFailure(
            f"{what} is not finite in phase {self.phase} at step {self.done:,}; last batch: {', '.join(statistics)}; "
            f"{self._last_saved()}",
            exit_code=3,
        )

    # ==================== checkpoints and stopping ====================

    def save(self) -> bool:
        """Writes a checkpoint. If the disk is full, warns and returns False: the one before stays, training goes on.

        Raises:
            TrainingFailure: something that was learned is not finite; such a state never replaces a good one.
        """
        self.check_learning()
        state = {
            "script": script_of(self.args).stem,
            "finished": False,
            "flags": dataclasses.asdict(self.args) | {"resume": None},
            "phase": self.phase,
            "done": self.done,
            "seconds": self.seconds,
            "results": self.results,
            "videos": [str(video) for video in self.videos],
            "state": self.state,
            "parts": {name: part.save() for name, part in self._parts.items()},
        }
        if self._envs:
            state |= {"frame": self._envs.observation[:, -1], "just_reset": self._envs.just_reset}
        for name in list_not_finite(state["parts"]):
            self._fail_not_finite(name)
        try:
            self.writer.sync()
            state |= {"event_files": event_file_sizes(self.dir), "wandb_id": self._wandb_id}
            self._store.save(state, self._replay, self._replay_name)
        except OSError as error:
            warn_once("A CHECKPOINT COULD NOT BE WRITTEN", error, f"training goes on; {self._last_saved()}")
            return False
        finally:
            self._last_checkpoint = time.monotonic()
        return True

    def _last_saved(self) -> str:
        last = self._store.newest
        return f"the last checkpoint is {last}, resume with: {self._resume_command()}" if last else "no checkpoint yet"

    def _resume_command(self) -> str:
        return shlex.join(["python", f"cleanrl/{script_of(self.args).name}", "--resume", str(self.dir)])

    def _on_signal(self, number: int, frame: Any) -> None:
        """Notes the first signal; later ones change nothing, least of all a checkpoint that is being written."""
        if self._signal is None:
            self._signal = signal.Signals(number)
            # tqdm and print are not to be called from a signal handler: it may have interrupted one of them.
            os.write(2, f"\n{self._signal.name}: saving after this iteration\n".encode())
            if self._interruptible:
                raise Stopped

    def _stop(self) -> NoReturn:
        self.bar.close()  # or the message would end up in its line
        number = self._signal
        saved = self.save()
        message = f"resume with: {self._resume_command()}" if saved else f"NOT SAVED; {self._last_saved()}"
        print(f"stopped by {'--max-minutes' if number == signal.SIGALRM else number.name}; {message}", flush=True)
        self.close()
        sys.exit(EXIT_CODES[number])

    def _on_failed_step(self, failure: EmulatorFailure) -> NoReturn:
        """Does not count the iteration that failed, which a resumed run begins again with new games."""
        self.done -= self._by
        self._fail_emulator(failure)

    def _fail_emulator(self, failure: EmulatorFailure) -> NoReturn:
        if self.args.checkpoint_minutes:
            self.save()
        self._give_up(failure)

    def _give_up(self, failure: EmulatorFailure) -> NoReturn:
        self.close()
        raise TrainingFailure(f"{failure}; {self._last_saved()}", failure.exit_code) from failure

    def close(self, videos: Sequence[Path] = ()) -> None:
        """Closes the logs, adds ``videos`` to those of W&B; from here on signals do again what they always do."""
        self.bar.close()
        self._release_signals()
        os.close(self._lock)
        finish_run(self.args, self.writer, videos)

    def _release_signals(self) -> None:
        if self._handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def finish(self) -> None:
        """Ends the run for good: no checkpoint of it can be resumed any more, and none keeps its replay on the disk."""
        if self._store.newest:
            try:
                self._store.save({"script": script_of(self.args).stem, "finished": True})
                self._store.forget()
            except OSError as error:
                warn_once("the last checkpoint can't be removed", error, f"delete {self._store.directory} by hand")


def lock_directory(path: Path) -> int:
    """A file descriptor that keeps other processes from going on with the same run, until it is closed.

    Raises:
        UserError: there is no such directory, or another process has it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--resume {path}: {error.strerror}; give a run's directory, runs/{{run_name}}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(
            f"--resume {path}: this run is still running in another process; stop that one first"
        ) from error
    except OSError:
        pass  # a filesystem that knows no locks
    return descriptor


def as_array(value: Any) -> np.ndarray:
    """An array of NumPy, JAX or PyTorch as one of NumPy."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def list_not_finite(tree: Tree, name: str = "") -> list[str]:
    """Names of the arrays in a tree that hold NaN or infinity."""
    if isinstance(tree, dict):
        return [x for key, value in tree.items() for x in list_not_finite(value, f"{name} {key}".strip())]
    if isinstance(tree, list):
        return [x for i, value in enumerate(tree) for x in list_not_finite(value, f"{name} {i}")]
    return [name] if isinstance(tree, np.ndarray) and not np.isfinite(tree).all() else []
