"""The logs of a run: its directory, TensorBoard and W&B."""

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary import text_pb
from tensorboard.summary.writer import event_file_writer

from cleanrl_utils.errors import one_line, user_errors, warn

VIDEOS = Path("videos")  # has a directory per run
EVENT_FILES = "events.out.tfevents.*"
FLUSH_SECONDS = 10


def script_of(args: Any) -> Path:
    """Return the script to which these flags belong, relative to the current folder if it is in it."""
    path = Path(args.script).absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def versions() -> str:
    """Return the versions of the packages that decide results: ``ale-py 0.12.1, gymnasium 1.4.0, torch 2.13.0``."""
    libraries = [name for name in ("torch", "jax") if name in sys.modules]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("ale-py", "gymnasium", *libraries))


def commit_of(script: Path) -> str:
    """Return the git commit of a script, "" without git; "a1b2c3d-dirty" if files were changed or the script is new."""
    git = ["git", "-C", str(script.absolute().parent)]
    options = {"check": True, "capture_output": True, "text": True}
    try:
        commit = subprocess.run([*git, "describe", "--always", "--dirty", "--exclude=*"], **options).stdout.strip()
        untracked = subprocess.run([*git, "ls-files", "--others", script.name], **options).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit.removesuffix('-dirty')}-dirty" if untracked else commit


def make_run_dir(args: Any) -> Path:
    """Make the directory of a new run, ``runs/{env_id}__{exp_name}__{seed}__{unix time}``; print and return it."""
    run_dir = Path("runs") / f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(time.time())}"
    with user_errors(f"{run_dir.absolute()} can't be made", "start again or use another folder", OSError):
        run_dir.mkdir(parents=True)
    print(f"run directory: {run_dir}", flush=True)
    return run_dir


class Writer:
    """A writer of TensorBoard event files, part of a checkpoint: a resumed run has each point once."""

    def __init__(self, run_dir: Path, state: bytes | None = None):
        """Open a new event file; remove the points after the checkpoint of which :meth:`dump` returned ``state``."""
        self._run_dir = run_dir
        if state is not None:
            sizes = json.loads(state)["sizes"]
            for path in run_dir.glob(EVENT_FILES):
                size = sizes.get(path.name, 0)
                if path.stat().st_size > size:
                    os.truncate(path, size)
        # Accessed as an attribute of its module, where W&B replaces it to follow the files.
        self._writer = event_file_writer.EventFileWriter(str(run_dir), flush_secs=FLUSH_SECONDS)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Log a point of the curve ``tag``."""
        self._add(Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step)

    def add_flags(self, flags: dict[str, Any]) -> None:
        """Log flags as a Markdown table in the tab TEXT, as CleanRL does."""
        rows = "\n".join(f"|{key}|{value}|" for key, value in flags.items())
        self._add(text_pb("hyperparameters", f"|param|value|\n|-|-|\n{rows}"), 0)

    def dump(self) -> bytes:
        """Write all events to their file; return the state, the bytes of each event file of the run."""
        self._writer.flush()
        sizes = {path.name: path.stat().st_size for path in self._run_dir.glob(EVENT_FILES)}
        return json.dumps({"sizes": sizes}).encode()

    def close(self) -> None:
        """Write all events and close the file."""
        self._writer.close()

    def _add(self, summary: Summary, step: int) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def start_wandb(args: Any, run_dir: Path) -> None:
    """Start a W&B run; a resumed run continues the one whose id is in ``{run_dir}/wandb_id``.

    A sweep chooses id, project and entity itself. Checkpoints then save these instead of the flags'.
    """
    id_file = run_dir / "wandb_id"
    resumed = {"id": id_file.read_text().strip(), "resume": "allow"} if id_file.exists() else {}
    names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
    remedy = "check --wandb-* and WANDB_*, run `wandb login`, or set WANDB_MODE=offline"
    with user_errors("W&B can't start", remedy, ImportError):
        import wandb

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
