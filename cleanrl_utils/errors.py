"""Errors that a user can cause, each in one line."""

import errno
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tqdm import tqdm

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)


class UserError(Exception):
    """An error that the user can put right. The message is one line: the problem, the value found, the remedy."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print errors that a user can cause as one line.

    The exit code is 2 for a :class:`UserError`, 1 for a file that can't be written, 130 for Ctrl-C, and 141 if nobody
    reads the output any more, as after ``| head``.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has others
            # Windows' own encoding of a redirected output and some others lack λ and ±. Logs are read live.
            encoding = "utf-8" if sys.platform == "win32" else stream.encoding
            stream.reconfigure(encoding=encoding, errors="replace", line_buffering=True)
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would fail to write the rest at exit
        with suppress(OSError):  # stderr may have ended as well
            os.write(2, b"error: nobody reads the output any more\n")
        sys.exit(141)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        problem = f"{error.filename or 'a file'} could not be opened or written ({error.strerror})"
        print(f"error: {problem}; make room or allow it, and start again, a training with `--resume`", file=sys.stderr)
        sys.exit(1)


@contextmanager
def user_errors(what: str, remedy: str, kind: type[BaseException] | tuple[type[BaseException], ...]) -> Iterator[None]:
    """Turn an exception of this kind into the :class:`UserError` "{what}: {exception}; {remedy}".

    Name only kinds that a user can cause: a bug keeps its traceback.
    """
    try:
        yield
    except UserError:
        raise
    except kind as error:
        raise UserError(f"{what}: {one_line(error)}; {remedy}") from error


def warn(message: str) -> None:
    """Print a warning to stderr, above a progress bar."""
    tqdm.write(f"WARNING: {message}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Return an exception's message as one printable line of at most 300 characters, its beginning and its end."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return text if len(text) <= 300 else f"{text[:149]}…{text[-150:]}"


def flag(name: str) -> str:
    """Return the spelling of a field on the command line: ``total_timesteps`` → ``--total-timesteps``."""
    return "--" + name.replace("_", "-")


def shell_command(words: list[str]) -> str:
    """Join the words of a command so that it can be pasted into a shell: cmd.exe or PowerShell on Windows."""
    if sys.platform == "win32":  # both shells know double quotes, and need them for & and parentheses
        return " ".join(word if re.fullmatch(r"[\w.:\\/=+*-]+", word) else f'"{word}"' for word in words)
    return shlex.join(words)
