"""Files: written atomically, locked, and read from zip archives."""

import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from filelock import FileLock, Timeout

from cleanrl_utils.errors import UserError, one_line, user_errors, warn

T = TypeVar("T")


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets the name ``path`` once all of it is on the disk; before that it is ``{path}.tmp``."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        retry(lambda: temporary.replace(path))
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):  # that of a full disk names no file
            error.filename = str(path)
        raise


def retry(access: Callable[[], T]) -> T:
    """Call a function, again for a second while Windows refuses it because another program has the file open."""
    for _ in range(10):
        with suppress(PermissionError):
            return access()
        time.sleep(0.1)
    return access()


def lock_run(run_dir: Path) -> FileLock:
    """Lock a run directory until the lock is released or this process ends.

    Raises:
        UserError: the directory can't be written, or another process holds the lock.
    """
    path = run_dir / ".lock"
    with user_errors(f"{run_dir} can't be written", "allow it, or copy it to another folder", OSError):
        path.touch()
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"--resume {run_dir}: this run is still running in another process; stop it first") from error
    except (OSError, NotImplementedError) as error:  # a file system without locks
        problem = f"{run_dir} can't be locked ({one_line(error)})"
        warn(f"{problem}; resume it only while no other process runs it")
    return lock


def read_zip(path: Path, members: Iterable[str]) -> dict[str, bytes]:
    """Read members of a zip file. It has a checksum for each, so a damaged file raises an exception."""
    with retry(lambda: zipfile.ZipFile(path)) as file:
        return {name: file.read(name) for name in members}
