"""The logs of a run: its directory, TensorBoard and W&B."""

import functools
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.text.summary import text_pb
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.tensor_util import make_tensor_proto

from cleanrl_utils.errors import one_line, shell_command, user_errors, warn
from cleanrl_utils.files import retry

VIDEOS = Path("videos")  # has a directory per run
EVENT_FILES = "events.out.tfevents.*"
FLUSH_SECONDS = 10
CHARTS = {  # of TensorBoard's tab CUSTOM SCALARS, with regular expressions of the tags that each shows together
    "Returns": ["charts/episodic_return", "charts/(teacher|random|offline|online|final)/avg_episodic_return"],
    "Losses": ["losses/(loss|td_loss|distill_loss)", "charts/offline/(loss|q_loss|distill_loss)"],
}


def script_of(args: Any) -> Path:
    """Return the script to which these flags belong, relative to the current folder if it is in it."""
    path = Path(args.script).absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def versions() -> str:
    """Return the versions of the packages that decide results: ``ale-py 0.12.1, gymnasium 1.4.0, torch 2.13.0``."""
    libraries = [name for name in ("torch", "jax") if name in sys.modules]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("ale-py", "gymnasium", *libraries))


def commit_of(script: Path) -> str:
    """Return the git commit of a script, "a1b2c3d" or "a1b2c3d, files changed"; "" without a repository or git."""

    def git(*command: str) -> str:
        command = ("git", "-C", str(script.absolute().parent), *command)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return f"{commit}, files changed" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def origin(script: Path) -> dict[str, str]:
    """Return the command, the versions and the commit with which this process runs a script."""
    return {"command": shell_command(["python", *sys.argv]), "versions": versions(), "commit": commit_of(script)}


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

    def __init__(self, run_dir: Path, state: bytes | None = None):
        """Open a new event file; ``state`` is that of the checkpoint from which a run is resumed.

        All methods raise a UserError if a file can't be written.
        """
        remedy = f"make room or allow it, then use --resume {run_dir}"
        self._errors = functools.partial(user_errors, f"a log in {run_dir} can't be written", remedy, OSError)
        self._last_step = 0
        self._sizes: dict[str, int] = {}  # bytes of each event file, up to its first event that is written again
        if state is not None:
            saved = json.loads(state)
            self._last_step = saved["last_step"]
            self._sizes = saved["sizes"]
        newest = 0
        for path in run_dir.glob(EVENT_FILES):
            newest = max(newest, int(path.name.split(".")[3]))
            size = self._sizes.get(path.name, 0)
            if state is not None and path.stat().st_size > size:
                retry(functools.partial(os.truncate, path, size))
        clock = event_file_writer.time
        # The time is in the name of the file, which sorts last even if the clock is behind.
        event_file_writer.time = SimpleNamespace(time=lambda: max(time.time(), newest + 1))
        try:
            # Accessed as an attribute of its module, where W&B replaces it to follow the files.
            self._writer = event_file_writer.EventFileWriter(str(run_dir), flush_secs=FLUSH_SECONDS)
        finally:
            event_file_writer.time = clock
        self.file = Path(self._writer._file_name)
        if state is not None:
            self.purge(self._last_step + 1)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Log a point of the curve ``tag``."""
        self._last_step = max(self._last_step, step)
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def add_flags(self, flags: dict[str, Any]) -> None:
        """Log flags as a Markdown table in the tab TEXT, as CleanRL does."""
        # A path may have bytes that are not UTF-8, which an event file can't hold.
        texts = {key: str(value).encode(errors="backslashreplace").decode() for key, value in flags.items()}
        rows = "\n".join(f"|{key}|{text}|" for key, text in texts.items())
        self._add(0, summary=text_pb("hyperparameters", f"|param|value|\n|-|-|\n{rows}"))

    def add_charts(self) -> None:
        """Log the charts of the tab CUSTOM SCALARS, which show several curves together."""
        layout = layout_pb2.Layout()
        category = layout.category.add(title="Returns and losses")
        for title, tags in CHARTS.items():
            category.chart.add(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
        # The plugin's own function for this summary needs TensorFlow.
        value = Summary.Value(
            tag=layout_metadata.CONFIG_SUMMARY_TAG, metadata=layout_metadata.create_summary_metadata()
        )
        value.tensor.CopyFrom(make_tensor_proto(layout.SerializeToString()))
        self._add(0, summary=Summary(value=[value]))

    def purge(self, step: int) -> None:
        """Let TensorBoard forget points from ``step`` on. It heeds this if a new run did the same at its start."""
        self._add(step, session_log=SessionLog(status=SessionLog.START))

    def dump(self) -> bytes:
        """Write all events to the disk; return the state, with the bytes of each event file of the run."""
        with self._errors():
            self._writer.flush()
            with retry(lambda: self.file.open("ab")) as file:  # Windows synchronises only a file open for writing
                os.fsync(file.fileno())
        self._sizes[self.file.name] = self.file.stat().st_size
        return json.dumps({"last_step": self._last_step, "sizes": self._sizes}).encode()

    def close(self) -> None:
        """Write all events and close the file."""
        with self._errors():
            self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        with self._errors():
            self._writer.add_event(Event(wall_time=time.time(), step=step, **content))


def start_wandb(args: Any, run_dir: Path) -> None:
    """Start a W&B run; a resumed run continues the one whose id is in ``{run_dir}/wandb_id``.

    A sweep chooses id, project and entity itself. Checkpoints then save these instead of the flags'.
    """
    remedy = "check --wandb-* and WANDB_*, run `wandb login`, or set WANDB_MODE=offline"
    with user_errors("W&B can't start", remedy, ImportError):
        import wandb

    id_file = run_dir / "wandb_id"
    resumed = {"id": id_file.read_text().strip(), "resume": "allow"} if id_file.exists() else {}
    names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
    with user_errors("W&B can't start", remedy, (wandb.Error, OSError, ValueError)):
        run = wandb.init(sync_tensorboard=True, save_code=True, config=vars(args), **names, **resumed)
    id_file.write_text(run.id)
    if not run.disabled:
        args.wandb_project_name = run.project
        args.wandb_entity = run.entity or None


def finish_wandb(run_dir: Path, succeeded: bool) -> None:
    """End the W&B run, with its videos if it succeeded; warn if W&B fails, which does not decide how a run ends."""
    import wandb

    try:
        videos = sorted((VIDEOS / run_dir.name).glob("*.mp4")) if succeeded else []
        for video in videos:
            wandb.run.log({f"videos/{video.stem}": wandb.Video(str(video), format="mp4")})
        wandb.finish(exit_code=int(not succeeded))
    except Exception as error:
        warn(f"W&B failed ({one_line(error)}); the run is in {run_dir}: `wandb sync` uploads what W&B saved locally")
