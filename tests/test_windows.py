"""Windows, acted out: our modules need nothing that only POSIX has."""

import errno
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import REPO

from cleanrl_utils.checkpoint import Checkpoints
from cleanrl_utils.errors import UserError
from cleanrl_utils.files import atomic_write

# Other packages are imported before, as they have their own ways on Windows.
PROGRAM = """
import importlib, os, signal, sys
import filelock, gymnasium, huggingface_hub, jax, flax, optax, psutil, tensorboard, torch, tqdm, tyro
import ale_py.vector_env
from tensorboard.backend.event_processing import event_accumulator
for module in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[module] = None
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGKILL", "SIGALRM", "SIGQUIT"):
    delattr(signal, name)
del os.sched_getaffinity, os.sched_setaffinity, os.fork, os.killpg, os.getuid
sys.path[:0] = ["cleanrl"]
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.posix
def test_imports_without_posix() -> None:
    scripts = [path.stem for path in (REPO / "cleanrl").glob("*_*.py") if not path.name.startswith("__")]
    helpers = [f"cleanrl_utils.{path.stem}" for path in (REPO / "cleanrl_utils").glob("*.py")]
    command = [sys.executable, "-c", PROGRAM, *scripts, *helpers]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert len(scripts) == 4
    assert result.returncode == 0, result.stderr


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, float], None]:
    """Return a function that lets another one fail so many times, as for a file that another program has open."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def refuse(owner: Any, name: str, times: float) -> None:
        access = getattr(owner, name)
        calls = []

        def refused(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) <= times:
                raise PermissionError(errno.EACCES, "Access denied", str(args[0]))
            return access(*args, **kwargs)

        monkeypatch.setattr(owner, name, refused)

    return refuse


def test_a_file_that_is_open_elsewhere(refuse: Callable, tmp_path: Path) -> None:
    """It is replaced later. If it stays open, it is kept and named."""
    path = tmp_path / "model"
    path.write_bytes(b"old")
    refuse(Path, "replace", 3)
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    refuse(Path, "replace", float("inf"))
    with pytest.raises(PermissionError) as error, atomic_write(path) as file:
        file.write(b"newer")
    assert error.value.filename == str(path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model": b"new"}


def test_a_checkpoint_that_is_open_elsewhere(refuse: Callable, tmp_path: Path) -> None:
    """It is read later. If it stays open, it is not taken for damaged: a resumed run would overwrite it."""
    checkpoints = Checkpoints(tmp_path)
    for number in (1, 2):
        checkpoints.save({"script": "dqn_atari", "number": number}, {})
    refuse(zipfile, "ZipFile", 3)
    assert Checkpoints(tmp_path).load("dqn_atari")[0]["number"] == 2
    refuse(zipfile, "ZipFile", 20)
    with pytest.raises(UserError, match=r"000002\.state.*close the program"):
        Checkpoints(tmp_path).load("dqn_atari")
