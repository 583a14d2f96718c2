"""Set-up and fixtures of all test files."""

import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

# Neither tests nor the scripts that they run use a GPU of the machine.
if os.environ.get("QDAGGER_TEST_GPU") != "1":
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # tests of JAX compile for longer than they compute
else:  # JAX would allocate most of the GPU's memory, and leave too little to PyTorch and to the scripts
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # may have no `python`

# Runs of the same sizes compile once. JAX reads these when it is imported, here or in a script that a test runs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

# Parallel test processes share the cores between them, or the threads of PyTorch and JAX would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    worker = int(os.environ["PYTEST_XDIST_WORKER"][2:])
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[worker::workers] or cores)

import pytest
import torch
from hypothesis import settings
from tensorboard.summary.writer import event_file_writer

ROOT = Path(__file__).resolve().parent.parent
# nohup and a shell's "&" ignore them, also in the runs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The scripts are run, not installed: tests import them by file name, as `python cleanrl/dqn_atari.py` would find them.
sys.path[:0] = [str(ROOT), str(ROOT / "cleanrl")]

torch.set_num_threads(min(2, torch.get_num_threads()))

# Files of the same second are read in the order of their names, which end in a counter without leading zeros.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)


# Their tests are marked as posix, but importing them already fails on Windows.
collect_ignore = ["test_benchmark.py"] if sys.platform == "win32" else []


def pytest_unconfigure() -> None:
    """Delete the compiled programs of JAX."""
    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Restore denormal numbers, which the scripts flush and hypothesis needs."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each run in this process one thread, since on a busy machine more of them wait for each other."""
    monkeypatch.setattr("cleanrl_utils.atari.available_cores", lambda: 1)
    monkeypatch.setattr("cleanrl_utils.device.available_cores", lambda: 1)


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the Q-networks of all scripts by small ones."""
    import helpers

    for script, network in helpers.SMALL_NETWORKS.items():
        monkeypatch.setattr(script, "QNetwork", network)


@pytest.fixture
def no_evaluations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace evaluations by a return that follows from their name; return the names of those that ran."""
    import helpers

    names: list[str] = []

    def play(name: str, *args: object) -> list[float]:
        names.append(name)
        return [float(zlib.crc32(name.encode()) % 1000)]

    for script in helpers.NETWORKS:
        monkeypatch.setattr(script, "play_episodes", play)
    return names


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a teacher for the game of the small runs."""
    import helpers

    return helpers.write_teacher(tmp_path_factory.mktemp("teacher"))


# No deadline: the machine may be busy.
settings.register_profile("default-without-deadline", deadline=None)
settings.load_profile("default-without-deadline")
