"""A run that can be stopped by anything at any moment and goes on with ``--resume runs/{run_name}``.

A script is a row of phases. It tells its :class:`Run` what a checkpoint has to hold (`register`, `register_replay`,
`state`), skips the phases that are over (`over`), and lets it count the iterations of the others (`steps`); between
two of them the run writes checkpoints and stops when told to.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import tyro
from tqdm import tqdm

from cleanrl_utils import checkpoint, tracking
from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.checkpoint import CheckpointStore, NotFinite, as_array
from cleanrl_utils.checks import EmulatorFailure, TrainingFailure, UserError, drop_dead_streams, fit_num_envs, flag
from cleanrl_utils.evaluation import QFunction, play_games, play_wrapped_game
from cleanrl_utils.tracking import script_of, warn_once

T = TypeVar("T")

MAY_CHANGE = {
    *("resume", "total_timesteps", "checkpoint_minutes", "max_minutes", "eval_episodes", "cuda", "cuda_graph"),
    *("compile", "torch_deterministic", "track", "wandb_project_name", "wandb_entity", "capture_video"),
    *("save_model", "upload_model", "hf_entity", "teacher_policy_hf_repo"),
}
"""Flags that a resumed run may be given other values of; a longer total_timesteps stretches the fall of epsilon, and a
teacher may have been moved"""

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 138, signal.SIGALRM: 0}
"""SIGALRM is what --max-minutes sends"""

MAX_ACTIONS = 18
"""of any Atari game, and thus the most different Q-values that a batch has if they follow from the action alone"""

HARDLY = 0.005
"""of all variation in a batch's Q-values; on Pong a healthy student has five times that after 100 updates"""

PROGRESS_EVERY = 5.0
"""seconds between two versions of progress.json"""


def parse_args(args_class: type[T], argv: Sequence[str] | None = None) -> T:
    """The flags of the command line; with ``--resume``, those of the run, but for what may change.

    UserError where the run can't be resumed, or a flag contradicts it.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = tyro.cli(args_class, args=argv)
    if args.resume is None:
        num_envs_given = any(re.match(r"--num[-_]envs\b", word) for word in argv)
        return args if num_envs_given else fit_num_envs(args)
    state = load_checkpoint(Path(args.resume), args, with_replay=False)[1]
    try:
        saved = args_class(**state["flags"])
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
    if args.total_timesteps != saved.total_timesteps and {"online", "training"} & set(state["over"]):
        raise UserError(
            f"--total-timesteps is {args.total_timesteps} and the training of {args.resume} is over, after "
            f"{saved.total_timesteps}; leave the flag out"
        )
    return args


def load_checkpoint(
    run_dir: Path, args: Any, with_replay: bool = True
) -> tuple[CheckpointStore, dict[str, Any], dict[str, bytes]]:
    """The checkpoints of a run, state and parts of the newest that is whole (`CheckpointStore.load`).

    UserError where there is none, or it is of another script than ``args``.
    """
    if not run_dir.is_dir():
        raise UserError(f"--resume {run_dir}: there is no such directory; give that of a run, runs/{{run_name}}")
    store = CheckpointStore(run_dir / "checkpoint")
    state, parts = store.load(with_replay)
    if state["script"] != script_of(args).stem:
        raise UserError(f"--resume {run_dir} is a run of {state['script']}.py; resume it with that script")
    return store, state, parts


class Run:
    """A run of a script, new or resumed: directory, logs, checkpoints, signals.

    With `checkpoint_minutes` 0 no checkpoint is written, and signals do what they always do.
    """

    def __init__(self, args: Any):
        self.args = args
        self.phase = ""
        """the phase that the run is in"""
        self.done = 0
        """what :meth:`steps` has counted in this phase, without the iteration in progress"""
        self.results: dict[str, np.ndarray] = {}
        """the scores of every evaluation's games"""
        self.videos: list[Path] = []
        """the videos of the evaluations"""
        self.state: dict[str, Any] = {}
        """what else a script wants to find again: anything that JSON can hold"""
        self.losses: Any = None
        """NamedTuple of arrays of the phase's last update, `loss` and `q_values` among them; None before the first"""
        self.bar = tqdm(disable=True)
        """the progress bar of the phase"""
        self._over: list[str] = []
        self._parts: dict[str, Any] = {}
        self._replay: checkpoint.Replay | None = None
        self._replay_name = ""
        self._loaded_parts: dict[str, bytes] = {}
        self._seconds = 0.0
        self._total, self._return, self._progress_written = 0, None, 0.0
        if args.resume is None:
            self.dir = tracking.new_run_dir(args)
            self.writer, self._wandb_id = tracking.open_run(args, self.dir)
            self._lock = lock_directory(self.dir)
            self._store = CheckpointStore(self.dir / "checkpoint")
            print(f"run directory: {self.dir}", flush=True)
        else:
            self.dir = Path(args.resume)
            self._lock = lock_directory(self.dir)
            self._store, loaded, self._loaded_parts = load_checkpoint(self.dir, args)
            self.writer, self._wandb_id = tracking.open_run(args, self.dir, loaded["event_files"], loaded["wandb_id"])
            self._over, self.phase, self.done = loaded["over"], loaded["phase"], loaded["done"]
            self._seconds, self.state = loaded["seconds"], loaded["state"]
            self.results = {name: np.array(scores) for name, scores in loaded["results"].items()}
            self.videos = [path for video in loaded["videos"] if (path := Path(video)).is_file()]
            where = f"in {self.phase} after {self.done:,} steps" if self.phase else f"after {', '.join(self._over)}"
            print(f"resuming {self.dir} {where}", flush=True)
        self._clock: float | None = None  # when `seconds` was last noted, if it is running
        self._last_checkpoint = time.monotonic()
        self._warned = False
        self._signal: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        if args.checkpoint_minutes:
            self._handlers = {number: signal.signal(number, self._on_signal) for number in EXIT_CODES}
            if self._handlers[signal.SIGHUP] == signal.SIG_IGN:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
            if args.max_minutes:
                signal.setitimer(signal.ITIMER_REAL, args.max_minutes * 60)

    # ==================== what is in a checkpoint ====================

    def register(self, **parts: Any) -> None:
        """Makes ``parts`` belong to every checkpoint; in a resumed run, gives them the state that they had.

        A part is a PyTorch module, optimizer or generator, a generator of NumPy, or a function that returns a tree of
        JAX's arrays, which :meth:`restored` then gives back.
        """
        self._parts |= parts
        for name, part in parts.items():
            if name in self._loaded_parts:
                self._loaded_parts[name] = checkpoint.load(part, self._loaded_parts[name])

    def restored(self, name: str, value: T) -> T:
        """What the function registered as ``name`` returned in a resumed run, or ``value`` in a new one."""
        return self._loaded_parts.get(name, value)

    def register_replay(self, name: str, replay: checkpoint.Replay) -> None:
        """Makes ``replay`` belong to every checkpoint, in place of another; in a resumed run, fills it again."""
        self._replay_name, self._replay = name, replay
        if self._store.newest:
            self._store.load_replay(replay, name)

    def drop_replay(self) -> None:
        """Lets go of the replay: the next checkpoint has none."""
        self._replay_name, self._replay = "", None

    def reset(self, envs: AtariEnvs) -> np.ndarray:
        """Starts the games of a phase; returns their first observations, uint8 (N, 4, 84, 84).

        Emulators can't be restored. In the middle of a phase new games begin, and those that were being played end in
        the replay as truncated. If the emulator fails, now or in a later step, what there is is saved.
        """
        envs.on_failure = self._fail_emulator
        if self.done == 0:
            return envs.reset()
        self._replay.end_games()
        seeds = np.random.SeedSequence((self.args.seed, zlib.crc32(self.phase.encode()), self.done))
        return envs.reset(int(seeds.generate_state(1)[0]))

    # ==================== the phases ====================

    @property
    def seconds(self) -> float:
        """Time spent in this phase, without evaluations and without the time between stopping and resuming."""
        return self._seconds + (time.monotonic() - self._clock if self._clock else 0.0)

    def over(self, phase: str) -> bool:
        """Whether the run has that phase behind it."""
        return phase in self._over

    def steps(self, phase: str, total: int, by: int = 1, unit: str = "step") -> Iterator[int]:
        """Counts what is left of a phase: done so far, in steps of ``by``, up to ``total``. Checkpoints in between."""
        if self.over(phase):
            return
        self.phase, self._total = phase, total
        self.bar = tracking.progress_bar(total, phase, unit, self.done)
        self._clock = time.monotonic()
        while self.done < total:
            self._between_steps()
            yield self.done
            self.done += by
            self.bar.update(by)
        self.bar.close()

    def show_return(self, returns: Iterable[float]) -> None:
        """Puts the mean of ``returns``, if there are any, onto the progress bar."""
        if returns := list(returns):
            self._return = float(np.mean(returns))
            self.bar.set_postfix_str(f"return {self._return:.1f}", refresh=False)

    def _between_steps(self) -> None:
        now = time.monotonic()
        if now - self._progress_written > PROGRESS_EVERY:
            self._write_progress()
        self._stop_if_told()
        minutes = self.args.checkpoint_minutes
        if minutes and now - self._last_checkpoint >= minutes * 60:
            self.save()

    def _write_progress(self, finished: bool = False) -> bool:
        """Writes progress.json, by which others, the benchmark runner for one, see how far the run is; False if not."""
        self._progress_written = time.monotonic()
        rate = self.bar.format_dict["rate"]
        progress = {
            "phase": self.phase or "evaluation",
            "done": self.done,
            "total": self._total,
            "return": self._return,
            "seconds_left": (self._total - self.done) / rate if rate else None,
            "finished": finished,
        }
        try:
            temporary = self.dir / "progress.json.tmp"
            temporary.write_text(json.dumps(progress))
            temporary.replace(self.dir / "progress.json")
        except OSError as error:  # a full disk; what matters says so itself
            warn_once("progress.json can't be written", error, "nothing else is affected")
            return False
        return True

    def end_phase(self, phase: str) -> None:
        """Notes that a phase is over, with a checkpoint before the next."""
        self.check_learning()
        self._over.append(phase)
        self.phase, self.done, self._seconds, self._clock = "", 0, 0.0, None
        self._total, self.bar = 0, tqdm(disable=True)
        self._stop_if_told()
        if self.args.checkpoint_minutes:
            self.save()
        self.losses = None

    def evaluate(self, name: str, q_function: QFunction | None, episodes: int) -> float:
        """Plays whole games at ε = `end_e` (at random without a Q-function), notes the scores, returns their mean.

        What an earlier part of the run has played is not played again. A signal does not wait for the games to end:
        they start from seeds, and the resumed run plays them anew, as it does when the emulator fails.
        """
        args = self.args
        if name not in self.results:
            self.check_learning()
            game = {"env_id": args.env_id, "epsilon": args.end_e, "between": self._stop_if_told}
            game["repeat_action_probability"] = args.repeat_action_probability
            self._seconds, running, self._clock = self.seconds, self._clock, None
            try:
                returns = play_games(q_function, episodes=episodes, seed=args.seed + 1000, description=name, **game)
                if args.capture_video and q_function is not None:
                    video = Path("videos") / self.dir.name / f"{name.replace(' ', '-')}.mp4"
                    play_wrapped_game(q_function, seed=args.seed, video=video, **game)
                    self.videos.append(video)
            except EmulatorFailure as failure:
                self._fail_emulator(failure)
            except OSError as error:
                warn_once("a video can't be written", error, "training goes on without it")
            tqdm.write(f"{name}: return {returns.mean():.1f} ± {returns.std():.1f} over {episodes} games")
            self._clock = running and time.monotonic()
            self.results[name], self._return = returns, float(returns.mean())
            self._write_progress()
        return float(self.results[name].mean())

    def check_learning(self) -> None:
        """TrainingFailure, exit code 3, where the last update's loss is not finite; warns of a collapsed network."""
        if self.losses is None:
            return
        if not np.isfinite(as_array(self.losses.loss)):
            self._fail_not_finite("the loss")
        q_values = as_array(self.losses.q_values)
        # The widest gaps may lie between actions; the others are what differs from observation to observation. Of a few
        # gaps chance may make so little.
        gaps = np.sort(np.diff(np.sort(q_values, axis=None)))[: 1 - MAX_ACTIONS]
        if gaps.size > 10 and gaps.sum() <= HARDLY * np.ptp(q_values) and not self._warned:
            self._warned = True
            warning = (
                f"the network has nearly the same Q-values for all observations ({self.phase}, step {self.done:,}); if "
                "that stays so, it has collapsed (dead ReLUs): start anew with a lower --learning-rate or, if it is a "
                "student, --warmup-updates 300"
            )
            tqdm.write(f"WARNING: {warning}", file=sys.stderr)
            self.writer.add_text("warning", warning)

    def _fail_not_finite(self, what: str) -> NoReturn:
        values = {name: as_array(value) for name, value in self.losses._asdict().items()} if self.losses else {}
        ends = {name: dict.fromkeys((f"{x.min():.4g}", f"{x.max():.4g}")) for name, x in values.items()}
        last = [f"{name} {' to '.join(least_and_largest)}" for name, least_and_largest in ends.items()]
        self.close()
        where = f"({self.phase}, step {self.done:,}); last update: {', '.join(last)}; {self._last_saved()}"
        raise TrainingFailure(f"{what} is not finite {where}", exit_code=3)

    # ==================== checkpoints and stopping ====================

    def save(self) -> bool:
        """Writes a checkpoint. If the disk is full, warns and returns False: the one before stays, training goes on.

        TrainingFailure where something that was learned is not finite: that never replaces a good state.
        """
        self.check_learning()
        state = {
            "script": script_of(self.args).stem,
            "flags": dataclasses.asdict(self.args) | {"resume": None},
            "over": self._over,
            "phase": self.phase,
            "done": self.done,
            "seconds": self.seconds,
            "results": {name: scores.tolist() for name, scores in self.results.items()},
            "videos": [str(video) for video in self.videos],
            "state": self.state,
            "wandb_id": self._wandb_id,
        }
        try:
            parts = {name: checkpoint.dump(part, name) for name, part in self._parts.items()}
        except NotFinite as error:
            self._fail_not_finite(str(error))
        try:
            self.writer.sync()
            state["event_files"] = tracking.event_file_sizes(self.dir)
            self._store.save(state, parts, self._replay, self._replay_name)
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
        script, here = script_of(self.args).resolve(), Path.cwd()
        path = script.relative_to(here) if script.is_relative_to(here) else script
        return shlex.join(["python", str(path), "--resume", str(self.dir)])

    def _on_signal(self, number: int, frame: Any) -> None:
        """Notes the first signal; later ones change nothing, least of all a checkpoint that is being written."""
        if self._signal is None:
            self._signal = signal.Signals(number)
            # tqdm and print are not to be called from a signal handler: it may have interrupted one of them.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self._signal.name}: saving after this iteration\n".encode())

    def _stop_if_told(self) -> None:
        if self._signal is None:
            return
        drop_dead_streams()
        self.bar.close()  # or the message would end up in its line
        number = self._signal
        saved = self.save()
        message = f"resume with: {self._resume_command()}" if saved else f"NOT SAVED; {self._last_saved()}"
        print(f"stopped by {'--max-minutes' if number == signal.SIGALRM else number.name}; {message}", flush=True)
        self.close()
        sys.exit(EXIT_CODES[number])

    def _fail_emulator(self, failure: EmulatorFailure) -> NoReturn:
        """Saves what there is; the iteration that failed is not counted, and a resumed run begins it again."""
        if self.args.checkpoint_minutes:
            self.save()
        self.close()
        raise TrainingFailure(f"{failure}; {self._last_saved()}", failure.exit_code) from failure

    def close(self, videos: Sequence[Path] = ()) -> None:
        """Closes the logs, adds ``videos`` to those of W&B; from here on signals do again what they always do."""
        self.bar.close()
        if self._handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._lock)
        tracking.finish_run(self.args, self.writer, videos)

    def finish(self) -> None:
        """Ends the run for good: progress.json says so, and no checkpoint can be resumed or takes room any more."""
        if self._write_progress(finished=True):
            shutil.rmtree(self._store.directory, ignore_errors=True)


def lock_directory(path: Path) -> int:
    """A file descriptor that, until closed, keeps other processes from the same run; UserError where one has it."""
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a filesystem that knows no locks
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            reason = "this run is still running in another process; stop that one first"
            raise UserError(f"--resume {path}: {reason}") from error
    return descriptor
