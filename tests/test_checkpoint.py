"""The files of checkpoints: round trips, damage, a kill at every operation, and locks."""

import contextlib
import errno
import io
import os
import pickle
import re
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from helpers import Hostile, cpu, only
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_utils import checkpoint as checkpoint_module
from cleanrl_utils.checkpoint import Checkpoints
from cleanrl_utils.errors import UserError
from cleanrl_utils.files import lock_run
from cleanrl_utils.run import load

SCRIPT = "a_script"


class CountingReplay:
    """A replay buffer of two environments, whose arrays hold the number of the step."""

    def __init__(self, length: int):
        self.length = length
        self.steps_added = 0
        self.truncations = 0
        self.frame = np.zeros((length, 2, 3), np.uint8)
        self.reward = np.zeros((length, 2), np.float32)

    def add(self, steps: int) -> None:
        for step in range(self.steps_added, self.steps_added + steps):
            self.frame[step % self.length] = [[step % 251, step // 251, 7], [step % 241, 9, 9]]
            self.reward[step % self.length] = [step, -step]
        self.steps_added += steps

    def read(self, low: int, high: int) -> dict[str, np.ndarray]:
        return {"frame": self.frame[low:high], "reward": self.reward[low:high]}

    def write(self, low: int, arrays: dict[str, np.ndarray]) -> None:
        self.frame[low : low + len(arrays["frame"])] = arrays["frame"]
        self.reward[low : low + len(arrays["reward"])] = arrays["reward"]

    def truncate_episodes(self) -> None:
        self.truncations += 1


def save(checkpoints: Checkpoints, number: int, replay: Any = None) -> None:
    """Save a checkpoint whose state follows from ``number``."""
    checkpoints.save({"script": SCRIPT, "number": number}, {"agent": bytes([number] * 3), "ä": b""}, replay)


def resumed(run_dir: Path, length: int = 10) -> tuple[Checkpoints, CountingReplay, int]:
    """Load the newest checkpoint; return also its replay buffer and its number."""
    checkpoints = Checkpoints(run_dir)
    state, serialised = checkpoints.load(SCRIPT)
    assert serialised == {"agent": bytes([state["number"]] * 3), "ä": b""}
    replay = CountingReplay(length)
    checkpoints.load_replay(replay)
    return checkpoints, replay, state["number"]


def assert_newest(run_dir: Path, number: int, steps: int, length: int = 10) -> None:
    """Check that the newest checkpoint is that of ``number``, whose replay buffer has the last of ``steps`` steps."""
    expected = CountingReplay(length)
    expected.add(steps)
    _, replay, found = resumed(run_dir, length)
    assert found == number
    assert replay.steps_added == steps
    assert replay.truncations == 1, "the next step would continue an episode of the emulators that have gone"
    np.testing.assert_array_equal(replay.frame, expected.frame)
    np.testing.assert_array_equal(replay.reward, expected.reward)


def make_two(run_dir: Path) -> Path:
    """Save a run with two checkpoints, number 1 with 3 steps and number 2 with 5; return its directory."""
    run_dir.mkdir()
    checkpoints = Checkpoints(run_dir)
    replay = CountingReplay(10)
    for number, steps in ((1, 3), (2, 2)):
        replay.add(steps)
        save(checkpoints, number, replay)
    return run_dir


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """See :func:`make_two`."""
    return make_two(tmp_path / "run")


@settings(max_examples=20)
@given(
    length=st.integers(1, 30),
    saves=st.lists(st.tuples(st.integers(0, 70), st.booleans()), min_size=1, max_size=8),
    segment_bytes=st.sampled_from([40, 100, 10**6]),
)
def test_replay_round_trip(
    length: int, saves: list[tuple[int, bool]], segment_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every checkpoint restores all steps, after any number of new steps, whether the run was resumed or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "SEGMENT_BYTES", segment_bytes)
        checkpoints = Checkpoints(tmp_path_factory.mktemp("run"))
        replay = CountingReplay(length)
        for number, (steps, resume) in enumerate(saves):
            replay.add(steps)
            save(checkpoints, number, replay)
            assert_newest(checkpoints.run_dir, number, replay.steps_added, length)
            if resume:
                checkpoints, replay, _ = resumed(checkpoints.run_dir, length)
        # Of older checkpoints nothing is left.
        only(checkpoints.directory.glob("*.state"))
        assert not list(checkpoints.directory.glob("*.tmp"))


def test_only_new_steps_are_written(tmp_path: Path) -> None:
    """Each step is written once; segments that no checkpoint needs are deleted."""
    (tmp_path / "checkpoint" / "lost+found").mkdir(parents=True)  # a folder does not disturb it
    checkpoints = Checkpoints(tmp_path)
    replay = CountingReplay(10)
    written: set[str] = set()

    def segments(number: int, replay: CountingReplay | None) -> set[str]:
        """Save a checkpoint; return the segments that are present, without the unique end of their names."""
        save(checkpoints, number, replay)
        present = {path.name for path in checkpoints.directory.glob("*.replay")}
        written.update(present)
        return {name.rpartition("-")[0] for name in present}

    expected = ["0-4", "0-4 4-8", "0-4 4-8 8-10 10-12", "4-8 8-10 10-12 12-16", "10-12 12-16 16-20"]
    for number, names in enumerate(expected):
        replay.add(4)
        assert segments(number, replay) == set(names.split())
    assert len(written) == 6, "a step was written twice"
    checkpoints, replay, _ = resumed(tmp_path)
    replay.add(1)  # a resumed run may change the newest step, so that its segment is written again
    assert segments(5, replay) == {"10-12", "12-16", "16-20", "20-21"}
    assert len(written) == 8
    assert segments(6, None) == set()


@pytest.mark.filterwarnings("error")  # a file that is left open: Windows can't delete it
@pytest.mark.parametrize("name", ["000002.state", "3-5-*.replay"])
def test_any_damage_is_noticed(name: str, two: Path) -> None:
    """If a byte has a flipped bit, or the end is cut off, the file is named, unless it does no harm (as in a date)."""
    path = only(two.glob(f"checkpoint/{name}"))
    good = path.read_bytes()

    def is_noticed(data: bytes) -> bool:
        path.write_bytes(data)
        try:
            assert_newest(two, 2, 5)
        except UserError as error:
            message = str(error)
        else:
            return False
        assert re.search(rf"{path.name} can't be read: .+; restore it from a backup", message)
        return True

    assert all(is_noticed(data) for data in [*(good[:i] for i in range(0, len(good), 3)), bytes(len(good))])
    noticed = [is_noticed(good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :]) for i in range(len(good))]
    with zipfile.ZipFile(io.BytesIO(good)) as file:
        for content in map(file.read, file.namelist()):
            assert all(noticed[good.index(content) :][: len(content)])


def test_no_code_is_run(two: Path, small_networks: None, tmp_path: Path) -> None:
    """A pickle whose checksum is right is refused, in a segment and in every kind of object."""
    trap = tmp_path / "trap"
    hostile = Hostile(os.mkdir, str(trap))
    with only(two.glob("checkpoint/3-5-*.replay")).open("wb") as file:
        np.savez(file, frame=np.array([hostile], object), reward=np.zeros((2, 2)))
    with pytest.raises(UserError, match="allow_pickle"):
        resumed(two)
    torch.save([{"weight": hostile}, {}, {}, torch.zeros(1)], zipped := io.BytesIO())
    scripts = (qdagger, qdagger_jax)
    students = [script.Student(script.Args(), 4, cpu(script)) for script in scripts]
    for data in (zipped.getvalue(), pickle.dumps(hostile, protocol=2)):
        for part in [*students, np.random.default_rng(), qdagger.Progress()]:
            with pytest.raises(Exception):  # noqa: B017, PT011  each library has its own
                load(part, data)
    assert not trap.exists()


@pytest.mark.posix
@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS])
def test_file_system_without_locks(error: int, two: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A warning says so. test_resume.py has those with locks."""
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(error, os.strerror(error))))
    lock_run(two)
    assert re.fullmatch(rf"WARNING: {two} can't be locked \(.*\); .*\n", capsys.readouterr().err)


def kill_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Make this process kill itself at the ``number``-th operation on a file; a write is cut off in the middle."""
    left = number

    def count(before: Callable[[], object] = lambda: None) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            before()
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable) -> Callable:
        return lambda *args, **kwargs: count() or function(*args, **kwargs)

    class File(io.FileIO):
        """A file without a buffer, so that each write can be the last."""

        def write(self, data: Any) -> int:
            count(lambda: io.FileIO.write(self, bytes(data)[: len(data) // 2]))
            return super().write(data)

    patch.setattr(Path, "open", counted(File))
    patch.setattr(os, "fsync", counted(os.fsync))
    for name in ("replace", "unlink", "mkdir"):
        patch.setattr(Path, name, counted(getattr(Path, name)))


@pytest.mark.posix
def test_kill_at_every_operation(tmp_path: Path) -> None:
    """A kill at any operation leaves the checkpoint before or the new one, and the next save works."""
    outcomes = []
    while True:
        run_dir = make_two(tmp_path / str(len(outcomes)))
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                checkpoints, replay, _ = resumed(run_dir)
                replay.add(9)  # beyond the end of the ring: two segments are written, and one is deleted
                kill_at(len(outcomes), pytest.MonkeyPatch())
                save(checkpoints, 3, replay)
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        checkpoints, replay, number = resumed(run_dir)
        outcomes.append(number)
        assert_newest(run_dir, number, {2: 5, 3: 14}[number])
        replay.add(1)
        save(checkpoints, 4, replay)
        assert_newest(run_dir, 4, replay.steps_added)
        assert not list(checkpoints.directory.glob("*.tmp"))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert len(outcomes) > 20


@pytest.mark.posix
def test_names_follow_contents(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loss of power: a file is synchronised before it gets its name, the state after its segments."""
    done: list[str] = []
    fsync = os.fsync
    replace = Path.replace
    unlink = Path.unlink
    checkpoints, replay, _ = resumed(two)
    replay.add(9)
    monkeypatch.setattr(os, "fsync", lambda file: done.append("sync") or fsync(file))
    monkeypatch.setattr(Path, "replace", lambda path, to: done.append(f"name {to.suffix}") or replace(path, to))
    monkeypatch.setattr(Path, "unlink", lambda path: done.append("delete") or unlink(path))
    save(checkpoints, 3, replay)
    segment = ["sync", "name .replay"]
    assert done == [*segment, *segment, "sync", "name .state", "delete", "delete", "delete"]
