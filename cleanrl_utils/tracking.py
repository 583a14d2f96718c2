"""The logs of a run: its directory, TensorBoard and W&B, the progress bar."""

import importlib.metadata
import inspect
import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary import text_pb
from tensorboard.summary.writer import event_file_writer
from tqdm import tqdm

from cleanrl_utils.errors import shell_command, user_errors
from cleanrl_utils.files import lock_run, retry

VIDEOS = Path("videos")  # has a directory per run


def script_of(args: Any) -> Path:
    """Return the script that was run: the file in which the class of these flags is defined."""
    path = Path(inspect.getfile(type(args)))
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def game_flags(args: Any) -> list[str]:
    """Return the flags with which other commands play the game of a run."""
    sticky = args.repeat_action_probability
    flags = [] if sticky is None else ["--repeat-action-probability", str(sticky)]
    return ["--env-id", args.env_id, *flags]


def versions(args: Any) -> str:
    """Return the versions of the packages that decide results: ``ale-py 0.12.1, gymnasium 1.4.0, torch 2.13.0``."""
    packages = ["ale-py", "gymnasium", "torch" if hasattr(args, "cuda") else "jax"]
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


def make_run_dir(args: Any) -> Path:
    """Make the directory of a new run, ``runs/{env_id}__{exp_name}__{seed}__{unix time}``; print and return it."""
    with user_errors(f"a run directory can't be made in {Path('runs').absolute()}", "use another folder", OSError):
        Path("runs").mkdir(exist_ok=True)
        for started in itertools.count(int(time.time())):  # the next free second, if the name is taken
            run_dir = Path("runs") / f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{started}"
            with suppress(FileExistsError):
                run_dir.mkdir()
                print(f"run directory: {run_dir}", flush=True)
                return run_dir


class Writer:
    """A writer of TensorBoard event files, part of a checkpoint: a resumed run has each point once."""

    def __init__(self, run_dir: Path, track: bool = False, lock: FileLock | None = None):
        self.run_dir = run_dir
        self.track = track
        self._lock = lock  # of the run directory, released with this object
        self._last_step = 0
        # Accessed as an attribute of its module, where W&B replaces it to follow the files.
        self._writer = event_file_writer.EventFileWriter(str(run_dir))
        self.file = Path(self._writer._file_name)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Log a point of the curve ``tag``."""
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step)

    def add_flags(self, flags: dict[str, Any]) -> None:
        """Log flags as a Markdown table in the tab TEXT, as CleanRL does."""
        # A path may have bytes that are not UTF-8, which an event file can't hold.
        texts = {key: str(value).encode(errors="backslashreplace").decode() for key, value in flags.items()}
        rows = "\n".join(f"|{key}|{text}|" for key, text in texts.items())
        self._add(text_pb("hyperparameters", f"|param|value|\n|-|-|\n{rows}"), 0)

    def _add(self, summary: Summary, step: int) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._last_step = max(self._last_step, step)

    def state_dict(self) -> dict[str, Any]:
        """Write all points to the disk; return the last step and the bytes of each event file of the run."""
        self._writer.flush()
        with retry(lambda: self.file.open("ab")) as file:  # Windows synchronises only a file that is open for writing
            os.fsync(file.fileno())
        sizes = {path.name: path.stat().st_size for path in self.run_dir.glob("events.out.tfevents.*")}
        return {"last_step": self._last_step, "sizes": sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Truncate the run's event files to their sizes in ``state``; one that is not in it becomes empty."""
        self._last_step = state["last_step"]
        for path in self.run_dir.glob("events.out.tfevents.*"):
            size = state["sizes"].get(path.name, 0)
            if path != self.file and path.stat().st_size > size:
                what = f"{path} can't be truncated"
                with user_errors(what, "allow it, or close the program that has it open", OSError):
                    retry(lambda path=path, size=size: os.truncate(path, size))
        self.purge(self._last_step + 1)

    def purge(self, step: int) -> None:
        """Let TensorBoard forget points from ``step`` on. It heeds this if a new run did the same at its start."""
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write all points, release the run directory and end the W&B run, without an exception with its videos."""
        self._writer.close()
        if self._lock is not None:
            self._lock.release()
        if self.track:
            import wandb

            videos = sorted((VIDEOS / self.run_dir.name).glob("*.mp4")) if kind is None else []
            for video in videos:
                wandb.run.log({f"videos/{video.stem}": wandb.Video(str(video), format="mp4")})
            wandb.finish(exit_code=int(kind is not None))


def start_logging(args: Any, **more: Any) -> tuple[Path, Writer]:
    """Open a TensorBoard writer and, with ``--track``, W&B.

    A new run gets a directory and logs its flags, with its command, the packages' versions and ``more``.

    Returns:
        The run directory and the writer.

    Raises:
        UserError: the run directory can't be made or written, another process runs it, or W&B can't start.
    """
    run_dir = make_run_dir(args) if args.resume is None else Path(args.resume)
    lock = lock_run(run_dir)
    try:
        if args.track:
            start_wandb(args, run_dir)
        with user_errors(f"{run_dir} can't be written", "make room or allow it", OSError):
            writer = Writer(run_dir, args.track, lock)
    except BaseException:
        lock.release()  # a notebook keeps the error, its traceback and so the lock
        raise
    if args.resume is None:
        writer.purge(0)
        command = shell_command(["python", *sys.argv])
        writer.add_flags({**vars(args), "command": command, "versions": versions(args), **more})
    return run_dir, writer


def start_wandb(args: Any, run_dir: Path) -> None:
    """Start a W&B run; a resumed run continues the one whose id is in ``{run_dir}/wandb_id``.

    A sweep chooses id, project and entity itself. Checkpoints then save these instead of the flags'.
    """
    with user_errors("W&B can't start", "check --wandb-* and WANDB_*, run `wandb login`, or set WANDB_MODE=offline"):
        import wandb

        id_file = run_dir / "wandb_id"
        resumed = {"id": id_file.read_text().strip(), "resume": "allow"} if id_file.exists() else {}
        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
        run = wandb.init(sync_tensorboard=True, save_code=True, config=vars(args), **names, **resumed)
        id_file.write_text(run.id)
    if not run.disabled:
        args.wandb_project_name = run.project
        args.wandb_entity = run.entity or None


class ProgressBar(tqdm):
    """A bar that iterates over the ``steps`` that are left of a phase, and counts them in their unit."""

    def __init__(self, phase: str, steps: range, unit: str):
        self.steps = steps
        mininterval = 0.5 if sys.stderr.isatty() else 30  # a log file gets fewer lines
        sizes = {"initial": steps.start, "total": steps.stop}
        super().__init__(desc=phase, unit=unit, smoothing=0.05, mininterval=mininterval, **sizes)

    def __iter__(self) -> Iterator[int]:
        """Yield the steps, and update the bar after each."""
        for step in self.steps:
            yield step
            self.update(min(self.steps.step, self.steps.stop - step))
        self.close()
