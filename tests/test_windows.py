"""Windows, acted out: our modules need nothing that only POSIX has. docs/contributing.md runs them under Wine."""

import subprocess
import sys

from helpers import REPO

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


def test_imports_without_posix() -> None:
    scripts = [path.stem for path in (REPO / "cleanrl").glob("*_*.py") if not path.name.startswith("__")]
    helpers = [f"cleanrl_utils.{path.stem}" for path in (REPO / "cleanrl_utils").glob("*.py")]
    command = [sys.executable, "-c", PROGRAM, *scripts, *helpers]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert len(scripts) == 4
    assert result.returncode == 0, result.stderr
