"""A run: its directory, logs, checkpoints, signals and progress bars; ``--resume``."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tyro
from tqdm import tqdm

from cleanrl_utils.checkpoint import Checkpoints
from cleanrl_utils.checks import DIVERGED, annotations
from cleanrl_utils.errors import UserError, flag, shell_command, user_errors, warn
from cleanrl_utils.evaluation import summarise
from cleanrl_utils.files import lock_run
from cleanrl_utils.hub import upload_model
from cleanrl_utils.tracking import (
    VIDEOS,
    Writer,
    commit_of,
    finish_wandb,
    make_run_dir,
    script_of,
    start_wandb,
    versions,
)

T = TypeVar("T")
# Windows lacks some of them, and has SIGBREAK for Ctrl-Break.
SIGNALS = ("SIGTERM", "SIGINT", "SIGBREAK", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
LINE_SECONDS = 30  # between two lines about the progress in a log file
USE_THE_SAME = "resume it with the script and packages that started it"


def parse_args(args_class: type[T], argv: Sequence[str] | None = None) -> T:
    """Parse the command line; with ``--resume``, return the flags of the run.

    Raises:
        UserError: a flag differs from the run's, or the run can't be resumed.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = tyro.cli(args_class, args=argv)
    if args.resume is None:
        return args
    run_dir = Path(args.resume)
    if not run_dir.is_dir():
        raise UserError(f"--resume {run_dir}: there is no such directory; give that of a run, runs/{{run_name}}")
    lock = lock_run(run_dir)  # a process that runs it changes its checkpoints
    try:
        state, _ = Checkpoints(run_dir).load(script_of(args).stem)
    finally:
        lock.release()
    flags = state["flags"] | {"resume": None}
    if flags.keys() != vars(args).keys():
        raise UserError(f"--resume {run_dir}: this script has other flags than the run; {USE_THE_SAME}")
    # Now every difference was given on the command line.
    args = tyro.cli(args_class, default=args_class(**flags), args=argv)
    may_change = {"resume", *annotations(args_class, str)}
    for name, was in flags.items():
        value = getattr(args, name)
        if value != was and name not in may_change:
            found = f"{flag(name)} is {value!r:.60} and {run_dir} uses {was!r:.60}"
            raise UserError(f"{found}; leave out what changes it, or start a new run without --resume")
    return args


class Run:
    """A run, new or resumed, in a ``with`` block: its directory, logs, checkpoints, signals and progress bars.

    The block makes ``runs/{run_name}``, or restores the newest checkpoint of ``args.resume``. Inside it, a signal ends
    the run after a checkpoint: at the next :meth:`save_if_due` or :meth:`exit_if_signalled`. With
    `checkpoint_minutes` 0 there are neither checkpoints nor handlers of signals.

    ``state`` is all that a checkpoint holds besides flags, logs and a replay buffer, by name: dataclasses of JSON
    values, NumPy generators and objects with ``dump() -> bytes`` and ``load(bytes)``, all restored in place. Of a
    ``Path``, a hash of the file is saved, and a resumed run warns if it is another file.
    """

    def __init__(self, args: Any, **state: Any):
        self.args = args
        self._phase_start = math.nan  # seconds
        self._steps_made = 0  # of the phase since then, with the one that is being made
        self._script = script_of(args)
        self._files = {name: part for name, part in state.items() if isinstance(part, Path)}
        self._state = {name: part for name, part in state.items() if name not in self._files}
        files = {"code": self._script, **self._files}  # read now, since the script may be edited while it runs
        hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
        self._origin = {"versions": versions(), **hashes}
        self._last_save = time.monotonic()
        self._signal: signal.Signals | None = None
        self._status = ""

    # ==================== begin and end ====================

    def __enter__(self) -> "Run":
        """Make or restore the run.

        Raises:
            UserError: the directory can't be made, another process runs it, W&B can't start, or no checkpoint fits.
        """
        args = self.args
        with contextlib.ExitStack() as stack:
            self.directory = make_run_dir(args) if args.resume is None else Path(args.resume).resolve()
            self.video_dir = VIDEOS / self.directory.name if args.capture_video else None
            stack.callback(lock_run(self.directory).release)
            self._checkpoints = Checkpoints(self.directory)
            log = None if args.resume is None else self._restore()
            if args.track:
                start_wandb(args, self.directory)
                stack.push(lambda kind, *_: finish_wandb(self.directory, succeeded=kind is None))
            self._writer = Writer(self.directory, log)
            stack.callback(self._writer.close)
            command = shell_command(["python", *sys.argv])
            origin = {"command": command, "versions": versions(), "commit": commit_of(self._script)}
            files = {f"{name}_file": path for name, path in self._files.items()}
            self._writer.add_flags({**vars(args), **origin, **files})
            if log is None:
                self.save()
            self._handle_signals(stack)
            self._on_exit = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Handle signals as before, write all points, end the W&B run and release the run directory."""
        self._on_exit.__exit__(*error)

    def finish(self, returns: dict[str, list[float]]) -> None:
        """End a run that is complete: upload its model if asked, print its results, and delete the checkpoints.

        ``returns`` are the episodic returns by the name of the evaluation.
        """
        if self.args.upload_model:
            upload_model(self.args, self.directory, self.model_path(), returns["final"])
        summarise(self.args, self.directory, returns)
        (self.directory / "finished").touch()  # the benchmark runner reads it
        shutil.rmtree(self.directory / "checkpoint", ignore_errors=True)

    def model_path(self, suffix: str = "") -> Path:
        """Return the path of a model of this run: ``{exp_name}{suffix}.cleanrl_model``."""
        return self.directory / f"{self.args.exp_name}{suffix}.cleanrl_model"

    # ==================== logs and progress ====================

    def log(self, tag: str, value: Any, step: int) -> None:
        """Log a point of the curve ``tag``; the value may be an array of PyTorch or JAX without axes.

        Raises:
            UserError: the value is NaN or infinite.
        """
        value = float(value)
        if not math.isfinite(value):
            raise UserError(DIVERGED)
        self._writer.add_scalar(tag, value, step)

    @property
    def steps_per_second(self) -> float:
        """The speed of the phase since it began in this process, with the step that is being made."""
        return self._steps_made / max(time.perf_counter() - self._phase_start, 1e-9)

    def show(self, status: str) -> None:
        """Show a text beside the progress bar."""
        self._status = status

    def steps(self, phase: str, unit: str, steps: range) -> Iterator[int]:
        """Iterate over the steps of a phase that are left, with a progress bar or, in a log file, lines."""
        self._status = ""
        self._phase_start = time.perf_counter()
        last_line = self._phase_start
        is_terminal = sys.stderr.isatty()
        sizes = {"initial": steps.start, "total": steps.stop}
        with tqdm(desc=phase, unit=unit, smoothing=0.05, mininterval=0.5, disable=not is_terminal, **sizes) as bar:
            for step in steps:
                self._steps_made = step + steps.step - steps.start
                yield step
                done = min(step + steps.step, steps.stop)
                bar.set_postfix_str(self._status, refresh=False)
                bar.update(done - step)
                now = time.perf_counter()
                if not is_terminal and (now - last_line > LINE_SECONDS or done == steps.stop):
                    last_line = now
                    progress = f"{done:,} of {steps.stop:,} {unit}s"
                    speed = f"{self.steps_per_second:.1f} {unit}s/s"
                    print(", ".join(filter(None, [f"{phase}: {progress}", speed, self._status])), flush=True)

    # ==================== checkpoints and signals ====================

    def save(self, replay: Any = None) -> None:
        """Write a checkpoint, unless `checkpoint_minutes` is 0.

        Of ``replay`` only the steps since the last checkpoint are written. A call without it comes before another
        replay buffer is saved.
        """
        if self.args.checkpoint_minutes:
            serialised = {name: dump(part) for name, part in self._state.items()}
            serialised["log"] = self._writer.dump()
            state = {"script": self._script.stem, "flags": dataclasses.asdict(self.args), **self._origin}
            self._checkpoints.save(state, serialised, replay)
        self._last_save = time.monotonic()

    def save_if_due(self, replay: Any = None) -> None:
        """Save, if `checkpoint_minutes` are over or a signal came; after a signal, exit with 128 + its number."""
        if self._signal or time.monotonic() - self._last_save >= 60 * self.args.checkpoint_minutes:
            self.save(replay)
            self.exit_if_signalled()

    def exit_if_signalled(self) -> None:
        """Exit with 128 + its number if a signal came: for work that a resumed run repeats, such as an evaluation."""
        if self._signal:
            command = shell_command(["python", str(self._script), "--resume", str(self.directory)])
            message = f"\nstopped by {self._signal.name}; resume with: {command}\n"
            with contextlib.suppress(OSError):  # Ctrl-C ends `tee` as well, and then nobody reads the output
                os.write(2, message.encode())
            sys.exit(128 + self._signal)

    def restore_replay(self, replay: Any, step: int) -> None:
        """Fill the replay buffer of a phase that is resumed at ``step``; at 0 it stays empty.

        Raises:
            UserError: the checkpoint has no replay buffer that fits.
        """
        if step > 0:
            self._checkpoints.load_replay(replay)

    def _restore(self) -> bytes:
        """Restore the state from the newest checkpoint; return that of the log."""
        state, serialised = self._checkpoints.load(self._script.stem)
        changed = [name for name, value in self._origin.items() if state.get(name) != value]
        if changed:
            warn(f"{', '.join(changed)} changed since the last checkpoint of {self.directory}: results can differ")
        misfits = (ValueError, KeyError, RuntimeError)  # of PyTorch, flax and `load`
        with user_errors(f"--resume {self.directory}: the checkpoint does not fit this script", USE_THE_SAME, misfits):
            for name, part in self._state.items():
                load(part, serialised[name])
        print(f"resuming {self.directory}", flush=True)
        return serialised["log"]

    def _handle_signals(self, stack: contextlib.ExitStack) -> None:
        """Note signals instead of ending at once, so that the run saves a checkpoint and exits."""
        in_main_thread = threading.current_thread() is threading.main_thread()  # Python has no handlers in others
        if self.args.checkpoint_minutes and in_main_thread:
            for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
                if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                    stack.callback(signal.signal, number, signal.signal(number, self._on_signal))

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._signal is None:  # further signals are ignored: one may arrive while a checkpoint is written
            self._signal = signal.Signals(number)
            # tqdm and print are not reentrant, and the signal may have interrupted one of them.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self._signal.name}: stopping\n".encode())


def dump(part: Any) -> bytes:
    """Serialise the state of an object."""
    if dataclasses.is_dataclass(part):
        return json.dumps(dataclasses.asdict(part)).encode()
    if isinstance(part, np.random.Generator):
        return json.dumps(part.bit_generator.state).encode()
    return part.dump()


def load(part: Any, data: bytes) -> None:
    """Restore the state that :func:`dump` serialised.

    Raises:
        ValueError: the state is that of another object.
    """
    if dataclasses.is_dataclass(part):
        saved = json.loads(data)
        if saved.keys() != vars(part).keys():
            raise ValueError(f"its fields are {', '.join(saved)}")
        vars(part).update(saved)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = json.loads(data)
    else:
        part.load(data)
