"""What a run shows of itself: its directory, TensorBoard and W&B, progress bars; files that are whole or not there."""

import atexit
import functools
import inspect
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c
from tqdm import tqdm

from cleanrl_utils.checks import UserError

WRITE_EVENTS_EVERY = 10  # seconds
WANDB_FINISH_TIMEOUT = 600  # seconds; what has not been sent by then is on the disk, for `wandb sync`


class EventWriter:
    """Writes scalars and texts to a new TensorBoard event file.

    tensorboardX's SummaryWriter hands them to a thread which a full disk ends, and then training waits for ever; nor
    does its ``flush`` wait until they are on the disk. Here they are kept and tried again while the disk is full.
    """

    def __init__(self, run_dir: Path):
        started = int(time.time())
        host = socket.gethostname()
        while (path := run_dir.absolute() / f"events.out.tfevents.{started:010d}.{host}").exists():
            started += 1  # a resumed run may begin in the second in which another writer did
        path.touch(exist_ok=False)
        sync_directory(run_dir)
        self._path, self._size, self._pending, self._written = path, 0, bytearray(), time.monotonic()
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        atexit.register(self.flush)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Notes a point of the curve ``tag``."""
        self._add(Event(wall_time=time.time(), step=step, summary=summary.scalar(tag, value)))

    def add_text(self, tag: str, text: str) -> None:
        """Notes a text, in Markdown."""
        self._add(Event(wall_time=time.time(), summary=summary.text(tag, text)))

    def _add(self, event: Event) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._pending += length + struct.pack("<I", masked_crc32c(length)) + data
        self._pending += struct.pack("<I", masked_crc32c(data))
        if time.monotonic() - self._written > WRITE_EVENTS_EVERY:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending; warns, once, if that can't be done."""
        try:
            self.sync()
        except OSError as error:
            warn_once(f"TensorBoard's {self._path} can't be written", error, "its points are kept in memory")

    def sync(self) -> None:
        """Writes what is pending to the disk; raises OSError if that can't be done."""
        self._written = time.monotonic()
        try:
            with self._path.open("ab") as file:
                file.write(self._pending)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self._path, self._size)  # TensorBoard stops reading at half an event
            raise
        self._size += len(self._pending)
        self._pending = bytearray()

    def close(self) -> None:
        """Writes what is pending."""
        self.flush()
        atexit.unregister(self.flush)


def warn_once(what: str, error: Exception, consequence: str) -> None:
    """A loud line on stderr, the first time that ``what`` fails for this reason; training goes on."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    if (what, reason) not in _warned:
        _warned.add((what, reason))
        tqdm.write(f"WARNING: {what} ({reason}); {consequence}", file=sys.stderr)


_warned: set[tuple[str, str]] = set()


def script_of(args: Any) -> Path:
    """The script that was run: the file that these flags' class is defined in."""
    return Path(inspect.getfile(type(args)))


def new_run_dir(args: Any) -> Path:
    """The directory of a new run, ``runs/{env_id}__{exp_name}__{seed}__{unix time}``."""
    return Path("runs") / f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(time.time())}"


def event_file_sizes(run_dir: Path) -> dict[str, int]:
    """Bytes of each of the run's event files."""
    return {path.name: path.stat().st_size for path in run_dir.glob("events.out.tfevents.*")}


def open_run(
    args: Any, run_dir: Path, sizes: dict[str, int] | None = None, wandb_id: str | None = None
) -> tuple[EventWriter, str | None]:
    """Makes a new run's directory and writes the flags down; with ``--track``, starts W&B or goes on with ``wandb_id``.

    A resumed run's event files are cut back to ``sizes``, so that what is done again is logged once. Returns the
    TensorBoard writer into the directory and the W&B run's id; UserError where either can't be had.
    """
    if args.track:
        wandb_id = start_wandb(args, run_dir, wandb_id)
    try:
        if sizes is None:
            run_dir.mkdir(parents=True)
        for name, size in event_file_sizes(run_dir).items():
            if name not in sizes:
                (run_dir / name).unlink()
            elif size > sizes[name]:
                os.truncate(run_dir / name, sizes[name])
        writer = EventWriter(run_dir)
    except FileExistsError as error:
        raise UserError(f"{run_dir} is a run that began in the same second; start this one again") from error
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{run_dir} can't be written ({reason}); work in a folder that you may write to") from error
    if args.track:
        import wandb

        # What sync_tensorboard does when a SummaryWriter of one of the libraries that it knows is made. Without the
        # root, W&B waits ten seconds for other directories to find out what they have in common.
        wandb.run._tensorboard_callback(str(run_dir), root_logdir=str(run_dir))
    if sizes is None:
        rows = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
    return writer, wandb_id


def start_wandb(args: Any, run_dir: Path, wandb_id: str | None) -> str:
    """Starts a W&B run, or goes on with the run ``wandb_id``; returns its id. UserError where nobody is logged in.

    ``WANDB_MODE=offline`` keeps it on disk, and so does a server that can't be reached.
    """
    import wandb

    # Of itself W&B sends what is left at the end for as long as it takes, also to a server that has gone.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(WANDB_FINISH_TIMEOUT))
    init = functools.partial(
        wandb.init,
        project=args.wandb_project_name,
        entity=args.wandb_entity,
        sync_tensorboard=True,
        config=vars(args),
        name=run_dir.name,
        save_code=True,
        id=wandb_id,
        resume="allow" if wandb_id else None,
    )
    try:
        init()
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"W&B can't start ({reason}); run `wandb login`, or set WANDB_MODE=offline") from error
    except wandb.errors.Error as error:
        warn_once("W&B can't be reached", error, "it is kept on disk: upload it afterwards with `wandb sync`")
        init(mode="offline")
    return wandb.run.id


def finish_run(args: Any, writer: EventWriter, videos: Sequence[Path]) -> None:
    """Closes the writer, and with ``--track`` the W&B run, to which it adds the videos first."""
    writer.close()
    if args.track:
        import wandb

        for video in videos:
            wandb.run.log({f"videos/{video.stem}": wandb.Video(str(video), format="mp4")})
        wandb.finish()


def progress_bar(total: int, description: str, unit: str, initial: int = 0) -> tqdm:
    """A bar that shows rate and time left; in a log file, a line every half minute instead of ten a second."""
    interval = 0.5 if sys.stderr.isatty() else 30
    return tqdm(total=total, desc=description, unit=unit, initial=initial, mininterval=interval, smoothing=0.05)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file opened for writing that takes the name ``path`` only once it is whole and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say which file is too much
            error.filename = str(path)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names of the files in a directory are on the disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
