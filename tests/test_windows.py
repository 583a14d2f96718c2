"""Windows, acted out: our modules need nothing that only POSIX has."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import REPO

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


def test_a_file_that_is_open_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced later. If it stays open, it is kept and the error names it."""
    path = tmp_path / "model"
    path.write_bytes(b"old")
    replace = Path.replace
    refusals = [PermissionError("Access denied")] * 3

    def refuse(source: Path, target: Path) -> None:
        if refusals:
            raise refusals.pop()
        replace(source, target)

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(Path, "replace", refuse)
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    refusals += [PermissionError("Access denied")] * 1000
    with pytest.raises(PermissionError) as error, atomic_write(path) as file:
        file.write(b"newer")
    assert error.value.filename == str(path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model": b"new"}
