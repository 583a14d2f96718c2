"""Errors that end a script with one line on stderr instead of a traceback."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something the user can put right. The message says what is wrong, what was found and what to do, in one line."""


class TrainingFailure(Exception):
    """A run that can't go on. The message says what happened and what was saved, in one line."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class EmulatorFailure(TrainingFailure):
    """A game can't go on. What the emulator raised is its ``__cause__``."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns these errors, and a full disk, into one line on stderr and an exit code, 2 for a :class:`UserError`."""
    try:
        yield
    except (UserError, TrainingFailure) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code if isinstance(error, TrainingFailure) else 2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        what = "make room; a run goes on from its last checkpoint with --resume"
        print(f"error: {error.filename or 'a file'} could not be written ({error.strerror}); {what}", file=sys.stderr)
        sys.exit(1)
