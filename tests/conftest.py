"""Set-up that every test file shares."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Tests keep off a GPU that the machine happens to have, and so do the scripts that they run.
if os.environ.get("QDAGGER_TEST_GPU") != "1":
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
else:  # where JAX would take most of its memory at once, and leave too little to PyTorch and to the scripts
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Runs of the same sizes need not compile again. JAX reads it when it is imported, here or in a script that a test runs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

# Of two tests at a time, each gets its share of the cores, or PyTorch's and JAX's threads would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    worker, workers = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[worker::workers] or cores)

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
# The scripts are run, not installed: tests import them by file name, as `python cleanrl/dqn_atari.py` would find them.
sys.path[:0] = [str(ROOT), str(ROOT / "cleanrl")]

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_unconfigure() -> None:
    """The session is over, and with it the use of what JAX has compiled."""
    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Scripts that run in this process flush denormal numbers; hypothesis needs them back."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """A run that is broken off in this process leaves its signal handlers behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of those of the scripts: for tests to which it is all the same what learns."""
    from test_cli import NETWORKS, SmallFlaxNetwork, SmallNetwork

    for script in NETWORKS:
        monkeypatch.setattr(script, "QNetwork", SmallNetwork if "jax" not in script.__name__ else SmallFlaxNetwork)


# No deadline: a machine that also trains is slow at times, and that is no failure.
settings.register_profile("default-without-deadline", deadline=None)
settings.load_profile("default-without-deadline")
