"""Windows, acted out: our modules need nothing that only POSIX has."""

import errno
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qdagger_dqn_atari_impalacnn as qdagger
from helpers import REPO, tiny

from cleanrl_utils.checkpoint import Checkpoints
from cleanrl_utils.checks import check_args
from cleanrl_utils.errors import UserError
from cleanrl_utils.files import atomic_write, lock_run
from cleanrl_utils.run import Run

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


def write_states(run_dir: Path) -> None:
    """Write the state files of two checkpoints."""
    (run_dir / "checkpoint").mkdir()
    for number in (1, 2):
        with zipfile.ZipFile(run_dir / f"checkpoint/00000{number}.state", "w") as file:
            state = {"members": [], "segments": [], "replay": None, "script": "dqn_atari", "number": number}
            file.writestr("state.json", json.dumps(state))


def test_a_file_that_is_open_elsewhere_is_replaced_later(refuse: Callable, tmp_path: Path) -> None:
    refuse(Path, "replace", 3)
    with atomic_write(tmp_path / "model") as file:
        file.write(b"new")
    assert (tmp_path / "model").read_bytes() == b"new"


def test_a_file_that_stays_open_elsewhere_is_kept_and_named(refuse: Callable, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"old")
    refuse(Path, "replace", float("inf"))
    with pytest.raises(PermissionError) as error, atomic_write(tmp_path / "model") as file:
        file.write(b"new")
    assert error.value.filename == str(tmp_path / "model")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model": b"old"}


def test_a_checkpoint_that_is_open_elsewhere_is_read_later(refuse: Callable, tmp_path: Path) -> None:
    write_states(tmp_path)
    refuse(zipfile, "ZipFile", 3)
    assert Checkpoints(tmp_path).load("dqn_atari")[0]["number"] == 2


def test_a_checkpoint_that_stays_open_elsewhere_is_not_taken_for_damaged(refuse: Callable, tmp_path: Path) -> None:
    """The run would be resumed from the one before, and overwrite the newest."""
    write_states(tmp_path)
    refuse(zipfile, "ZipFile", 20)
    with pytest.raises(UserError, match=r"000002\.state.*close the program"):
        Checkpoints(tmp_path).load("dqn_atari")


def test_an_event_file_that_stays_open_elsewhere_is_named(
    refuse: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Run(qdagger.Args()) as run:
        pass
    (run.directory / "events.out.tfevents.1").write_bytes(b"later points")
    refuse(os, "truncate", float("inf"))
    with pytest.raises(UserError, match=r"tfevents\.1.*close the program"), Run(qdagger.Args(resume=run.directory)):
        pass
    with lock_run(run.directory):  # it was released
        pass


@pytest.mark.parametrize("name", ["aux", "AUX.2", "com1"])
def test_names_of_devices_name_no_experiment(name: str) -> None:
    with pytest.raises(UserError, match="--exp-name"):
        check_args(tiny(exp_name=name), None, 1)
