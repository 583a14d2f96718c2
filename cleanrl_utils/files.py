"""Files: written atomically, and the lock of a run."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from cleanrl_utils.errors import UserError, one_line, warn


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets the name ``path`` once all of it is on the disk; before that it is ``{path}.tmp``."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # that of a full disk names no file
        raise


def rename(source: Path, target: Path) -> None:
    """Rename a file, which Windows refuses while a virus scanner has it open: try again for a second."""
    for _ in range(10):
        with suppress(PermissionError):
            source.replace(target)
            return
        time.sleep(0.1)
    source.replace(target)


def lock_run(run_dir: Path) -> FileLock:
    """Lock a run directory until the lock is released or this process ends.

    Raises:
        UserError: another process holds the lock.
    """
    path = run_dir / ".lock"
    path.touch()  # raises an error where the directory can't be written
    lock = FileLock(path, fallback_to_soft=False)  # a kill would leave a soft lock behind
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"--resume {run_dir}: this run is still running in another process; stop it first") from error
    except (OSError, NotImplementedError) as error:  # a file system without locks
        warn(f"{run_dir} can't be locked ({one_line(error)}); resume it only while no other process runs it")
    return lock
