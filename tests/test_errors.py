"""Tests of the messages for users."""

import shlex
import sys

import pytest

from cleanrl_utils.errors import shell_command


def test_a_printed_command_can_be_pasted_into_the_shell_of_the_system(monkeypatch: pytest.MonkeyPatch):
    words = ["python", "cleanrl/dqn_atari.py", "--resume", "runs/it's a run"]
    monkeypatch.setattr(sys, "platform", "linux")
    assert shlex.split(shell_command(words)) == words
    monkeypatch.setattr(sys, "platform", "win32")
    assert shell_command(words) == 'python cleanrl/dqn_atari.py --resume "runs/it\'s a run"'
