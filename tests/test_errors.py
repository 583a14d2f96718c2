"""Tests of the messages for users, and of the output of scripts."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cleanrl_utils.errors import one_line, one_line_errors, shell_command

ROOT = Path(__file__).resolve().parent.parent
PRINTS = """
import sys
from cleanrl_utils.errors import UserError, one_line_errors
with one_line_errors():
    print("λ ±")
    print("a warning", file=sys.stderr)
    print("the end")
    raise UserError("of the user")
"""


@pytest.mark.posix
def test_output_that_nobody_reads() -> None:
    """One line instead of a traceback, and the exit code of other programs before ``| head``."""
    source = "from cleanrl_utils.errors import one_line_errors\nwith one_line_errors():\n    while True: print(1)"
    options = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", source], **options)
    process.stdout.close()
    assert process.stderr.read() == b"error: nobody reads the output any more\n"
    assert process.wait() == 141


def test_directory_that_becomes_unwritable(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="1"), one_line_errors():
        raise OSError(errno.EROFS, "Read-only file system", "runs/a.tmp")
    assert capsys.readouterr().err.startswith("error: runs/a.tmp could not be opened or written (Read-only file")


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    """The hub's reason comes last."""
    text = one_line(ValueError(f"first {'-' * 400}\nInvalid credentials"))
    assert len(text) == 300
    assert text.startswith("first -")
    assert text.endswith("- Invalid credentials")


@pytest.mark.posix
def test_output_in_a_log_file(tmp_path: Path) -> None:
    """The lines of stdout and stderr keep their order; characters that the encoding lacks are replaced."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.run([sys.executable, "-c", PRINTS], env=environment, stdout=log, stderr=log)
    assert process.returncode == 2
    assert (tmp_path / "log").read_text().splitlines() == ["? ?", "a warning", "the end", "error: of the user"]


def test_a_printed_command_can_be_pasted_into_the_shell_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["python", "cleanrl/dqn_atari.py", "--resume", "runs/it's a run"]
    monkeypatch.setattr(sys, "platform", "linux")
    assert shlex.split(shell_command(words)) == words
    monkeypatch.setattr(sys, "platform", "win32")
    assert shell_command(words) == 'python cleanrl/dqn_atari.py --resume "runs/it\'s a run"'
    assert shell_command(["python", r"C:\R&D\a.py", "--env-id", "ALE/Pong-v5"]) == (
        r'python "C:\R&D\a.py" --env-id ALE/Pong-v5'
    )
