"""Tests of the messages for users, and of output that can't be written."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cleanrl_utils.errors import one_line, one_line_errors, shell_command

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
PRINTS = """
import os, sys
from tqdm import tqdm
from cleanrl_utils.errors import UserError, one_line_errors
with one_line_errors():
    for i in tqdm(range(5_000), mininterval=0):
        print("a line of the output", i)
        if i % 100 == 0:
            tqdm.write("a line above the bar")
            print("a warning", file=sys.stderr)
    os.mkdir("end")
    raise UserError("of the user")
"""


def test_directory_that_becomes_unwritable(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit), one_line_errors():
        raise OSError(errno.EROFS, "Read-only file system", "runs/a.tmp")
    assert capsys.readouterr().err.startswith("error: runs/a.tmp could not be opened or written (Read-only file")


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    """The hub's reason comes last."""
    text = one_line(ValueError(f"first {'-' * 400}\nInvalid credentials"))
    assert len(text) == 300
    assert text.startswith("first -")
    assert text.endswith("- Invalid credentials")


@pytest.mark.posix
def test_characters_that_the_encoding_lacks() -> None:
    code = "from cleanrl_utils.errors import one_line_errors\nwith one_line_errors(): print('λ ±')"
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("? ?\n", "")


@pytest.mark.posix
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "output", ["terminal that was closed", "disk that is full", "pipe without a reader", "pipe that is full"]
)
def test_output_that_fails_is_dropped(output: str, unbuffered: str, tmp_path: Path) -> None:
    if output == "terminal that was closed":
        import pty  # not on Windows

        other_end, descriptor = pty.openpty()
        os.close(other_end)
    elif output == "disk that is full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        other_end, descriptor = os.pipe()
        if output == "pipe without a reader":
            os.close(other_end)
        os.set_blocking(descriptor, False)
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", PRINTS]
    process = subprocess.run(command, cwd=tmp_path, env=environment, stdout=descriptor, stderr=descriptor)
    os.close(descriptor)
    assert (tmp_path / "end").exists()
    assert process.returncode == 2  # of the UserError


def test_output_is_complete_and_in_order(tmp_path: Path) -> None:
    """The lines of stdout and stderr, which go to one file, keep their order."""
    with (tmp_path / "out.txt").open("w") as out:
        command = [sys.executable, "-c", PRINTS.replace("tqdm(range(5_000), mininterval=0)", "range(300)")]
        subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, stdout=out, stderr=out)
    lines = []
    for i in range(300):
        lines.append(f"a line of the output {i}")
        if i % 100 == 0:
            lines += ["a line above the bar", "a warning"]
    assert (tmp_path / "out.txt").read_text().splitlines() == [*lines, "error: of the user"]


def test_a_printed_command_can_be_pasted_into_the_shell_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["python", "cleanrl/dqn_atari.py", "--resume", "runs/it's a run"]
    monkeypatch.setattr(sys, "platform", "linux")
    assert shlex.split(shell_command(words)) == words
    monkeypatch.setattr(sys, "platform", "win32")
    assert shell_command(words) == 'python cleanrl/dqn_atari.py --resume "runs/it\'s a run"'
    assert shell_command(["python", r"C:\R&D\a.py", "--env-id", "ALE/Pong-v5"]) == (
        r'python "C:\R&D\a.py" --env-id ALE/Pong-v5'
    )
