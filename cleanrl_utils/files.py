"""Files: written atomically, and read from zip archives."""

import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from cleanrl_utils.errors import user_errors


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets the name ``path`` once all of it is on the disk; before that it is ``{path}.tmp``."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # the error of a full disk names no file
            error.filename = str(path)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Write the names of the files in a directory to the disk, where the file system can do that."""
    directory = os.open(path, os.O_RDONLY)
    with suppress(OSError):  # EINVAL on some network file systems
        os.fsync(directory)
    os.close(directory)


def read_zip(path: Path, members: Iterable[str]) -> dict[str, bytes]:
    """Read members of a zip file, which has a checksum for each; raise a UserError if it is damaged."""
    with user_errors(f"{path.name} can't be read", "it is damaged"), zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in members}
