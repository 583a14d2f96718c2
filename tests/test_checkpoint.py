"""Checkpoints: the files, the modules in them, and runs that are stopped and resumed."""

import contextlib
import dataclasses
import errno
import functools
import importlib.metadata
import io
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import dqn_atari
import dqn_atari_jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from ale_py.vector_env import AtariVectorEnv
from helpers import (
    NETWORKS,
    NUM_ACTIONS,
    REPO,
    STUDENT,
    TIMED_TAGS,
    Scalars,
    only,
    read_scalars,
    tiny,
    twin,
    write_teacher,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util.tensor_util import make_ndarray

from cleanrl_utils import checkpoint as checkpoint_module
from cleanrl_utils.checkpoint import Checkpoint, dump, load, load_checkpoint, parse_args
from cleanrl_utils.errors import UserError
from cleanrl_utils.files import lock_run
from cleanrl_utils.tracking import make_run_dir, start_logging

# Windows lacks both.
KILL = getattr(signal, "SIGKILL", 9)
USR1 = getattr(signal, "SIGUSR1", signal.SIGTERM)

# ==================== files ====================


@dataclass
class Args:
    """The flags that a checkpoint needs."""

    env_id: str = "Game"
    exp_name: str = "test"
    seed: int = 1
    resume: str | None = None
    checkpoint_minutes: float = 10


@dataclass
class Progress:
    """The counters of a run."""

    number: int = 0
    nested: dict[str, list] = field(default_factory=lambda: {"ä": [1e-300, None]})


class Ring(NamedTuple):
    """The arrays of a replay buffer."""

    frame: torch.Tensor
    reward: torch.Tensor


class CountingReplay:
    """A replay buffer of two environments, whose arrays hold the number of the step."""

    def __init__(self, length: int):
        self.length = length
        self.steps_added = 0
        self.truncations = 0
        self.ring = Ring(torch.zeros(length, 2, 3, dtype=torch.uint8), torch.zeros(length, 2))

    def add(self, steps: int) -> None:
        for step in range(self.steps_added, self.steps_added + steps):
            self.ring.frame[step % self.length] = torch.tensor([[step % 251, step // 251, 7], [step % 241, 9, 9]])
            self.ring.reward[step % self.length] = torch.tensor([step, -step])
        self.steps_added += steps

    def truncate_episodes(self) -> None:
        self.truncations += 1


def make_checkpoint(run_dir: Path, resume: bool = False, **more: Any) -> Checkpoint:
    """Return the checkpoint of a new or resumed run, whose state is a counter, a generator and ``more``."""
    args = Args(resume=str(run_dir) if resume else None)
    return Checkpoint(args, run_dir, progress=Progress(), rng=np.random.default_rng(), **more)


def save(checkpoint: Checkpoint, number: int, replay: Any = None) -> None:
    """Save a checkpoint whose state follows from ``number``."""
    checkpoint.state["progress"].number = number
    checkpoint.state["rng"].bit_generator.state = np.random.default_rng(number).bit_generator.state
    checkpoint.save({"layer": np.full(3, number, np.float32)}, replay)


def resumed(run_dir: Path, length: int = 10) -> tuple[Checkpoint, CountingReplay, dict[str, Any]]:
    """Restore the newest checkpoint; return also its replay buffer and the state of JAX."""
    checkpoint = make_checkpoint(run_dir, resume=True)
    train_state = checkpoint.restore({"layer": np.zeros(3, np.float32)})
    replay = CountingReplay(length)
    checkpoint.restore_replay(replay)
    return checkpoint, replay, train_state


def assert_newest(run_dir: Path, number: int, steps: int, length: int = 10) -> None:
    """Check that the newest checkpoint is that of ``number``, whose replay buffer has the last of ``steps`` steps."""
    expected = CountingReplay(length)
    expected.add(steps)
    checkpoint, replay, train_state = resumed(run_dir, length)
    assert checkpoint.state["progress"] == Progress(number)
    assert checkpoint.state["rng"].random() == np.random.default_rng(number).random()
    np.testing.assert_array_equal(train_state["layer"], number)
    assert isinstance(train_state["layer"], jax.Array), "it is copied to the device at each use"
    assert replay.steps_added == steps
    assert replay.truncations == 1, "the next step would continue an episode of the emulators that have gone"
    assert all(torch.equal(array, other) for array, other in zip(replay.ring, expected.ring, strict=True))


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a run with two checkpoints, number 1 with 3 steps and number 2 with 5; return its directory."""
    monkeypatch.chdir(tmp_path)
    return make_two()


def make_two() -> Path:
    """See `two`."""
    checkpoint = make_checkpoint(make_run_dir(Args()))
    replay = CountingReplay(10)
    for number, steps in ((1, 3), (2, 2)):
        replay.add(steps)
        save(checkpoint, number, replay)
    return checkpoint.run_dir


@pytest.mark.posix
def test_run_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that start in the same second have directories of their own. A dead link in their place is one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 10**9)
    assert {make_run_dir(Args()).name for _ in range(3)} == {f"Game__test__1__{10**9 + i}" for i in range(3)}
    Path("runs").rename("old")
    Path("runs").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"a run directory can't be made in .*/runs: .*; use another folder"):
        make_run_dir(Args())


def newest_segment(run_dir: Path) -> Path:
    """Return the segment that only the second checkpoint of `two` has."""
    return only(run_dir.glob("checkpoint/3-5-*.replay"))


def newest_state(run_dir: Path) -> Path:
    """Return the state of the second checkpoint of `two`."""
    return run_dir / "checkpoint" / "000002.state"


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
        checkpoint = make_checkpoint(tmp_path_factory.mktemp("run"))
        replay = CountingReplay(length)
        for number, (steps, resume) in enumerate(saves):
            replay.add(steps)
            save(checkpoint, number, replay)
            assert_newest(checkpoint.run_dir, number, replay.steps_added, length)
            if resume:
                checkpoint, replay, _ = resumed(checkpoint.run_dir, length)
        # Of older checkpoints nothing is left.
        assert len(list(checkpoint.directory.glob("*.state"))) == min(len(saves), 2)
        assert not list(checkpoint.directory.glob("*.tmp"))


def test_only_new_steps_are_written(tmp_path: Path) -> None:
    """Each step is written once; segments that no checkpoint needs are deleted."""
    checkpoint = make_checkpoint(tmp_path)
    replay = CountingReplay(10)
    present: set[str] = set()

    def changes(number: int, replay: CountingReplay | None) -> tuple[set[str], set[str]]:
        """Return the segments that a save writes, and those that it deletes, without the unique end of their names."""
        nonlocal present
        save(checkpoint, number, replay)
        before = present
        present = {path.name for path in checkpoint.directory.glob("*.replay")}
        return tuple({name.rpartition("-")[0] for name in names} for names in (present - before, before - present))

    (tmp_path / "checkpoint" / "lost+found").mkdir(parents=True)  # a folder does not disturb it
    for number, expected in enumerate(
        [({"0-4"}, set()), ({"4-8"}, set()), ({"8-10", "10-12"}, set()), ({"12-16"}, set()), ({"16-20"}, {"0-4"})]
    ):
        replay.add(4)
        assert changes(number, replay) == expected, number
    checkpoint, replay, _ = resumed(tmp_path)
    replay.add(1)  # a resumed run may change the newest step, so that its segment is written again
    assert changes(5, replay) == ({"16-20", "20-21"}, {"4-8", "8-10"})
    changes(6, None)
    other = CountingReplay(10)
    other.add(3)
    assert changes(7, other)[0] == {"0-3"}
    changes(8, None)
    changes(9, None)
    assert not present


@pytest.mark.filterwarnings("error")  # a file that is left open: Windows can't delete it
@pytest.mark.parametrize("find", [newest_state, newest_segment])
def test_any_damage_is_noticed(find: Callable[[Path], Path], two: Path, capsys: pytest.CaptureFixture) -> None:
    """If any byte has a flipped bit, or the end is cut off, the file is named.

    Instead of a state, the one before is used. A segment ends the run, since most belong to both checkpoints. Or the
    damage does no harm: for example, a zip file has dates, which nothing reads.
    """
    path = find(two)
    good = path.read_bytes()
    capsys.readouterr()

    def is_noticed(data: bytes) -> bool:
        path.write_bytes(data)
        message = ""
        try:
            number = resumed(two)[0].state["progress"].number
        except UserError as error:
            message = str(error)
        if message:
            assert re.search(rf"{path.name}.*delete the newest \.state", message)
            assert path.suffix == ".replay"
            return True
        errors = capsys.readouterr().err.splitlines()
        if number == 2:
            assert not errors
            assert_newest(two, 2, 5)
            return False
        assert number == 1
        assert len(errors) == 1
        assert re.match(rf"WARNING: .*{path.name} is damaged", errors[0])
        return True

    assert all(is_noticed(data) for data in [*(good[:i] for i in range(0, len(good), 3)), bytes(len(good))])
    noticed = [is_noticed(good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :]) for i in range(len(good))]
    with zipfile.ZipFile(io.BytesIO(good)) as file:
        for content in map(file.read, file.namelist()):
            assert all(noticed[good.index(content) :][: len(content)])
    path.unlink()
    newest_state(two).unlink(missing_ok=True)
    assert_newest(two, 1, 3)


def test_resumed_after_damage(two: Path) -> None:
    """The checkpoint after a damaged one takes its place, and the one that was resumed is kept."""
    newest_state(two).write_bytes(b"")
    checkpoint, replay, _ = resumed(two)
    replay.add(2)
    save(checkpoint, 3, replay)
    assert_newest(two, 3, 5)
    newest_state(two).write_bytes(b"")
    assert_newest(two, 1, 3)
    (two / "checkpoint" / "000001.state").write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint .* is undamaged .*000002.*000001.*new run"):
        resumed(two)


def test_no_code_is_run(two: Path, tmp_path: Path) -> None:
    """A pickle whose checksum is right is refused, in a segment and in every kind of object."""

    class Touch:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "trap"),)

    np.savez(newest_segment(two).open("wb"), frame=np.array([Touch()], object), reward=np.zeros((2, 2)))
    with pytest.raises(UserError, match="allow_pickle"):
        resumed(two)
    torch.save({"weight": Touch()}, zipped := io.BytesIO())
    network = torch.nn.Linear(1, 1)
    parts = [network, torch.optim.Adam(network.parameters()), torch.Generator(), np.random.default_rng(), Progress()]
    for data in (zipped.getvalue(), pickle.dumps(Touch(), protocol=2)):
        for part in [*parts, {"weight": np.zeros(1)}]:
            with pytest.raises(Exception):  # noqa: B017, PT011  each library has its own
                load(part, data)
    assert not (tmp_path / "trap").exists()


@pytest.mark.posix
def test_locks_of_network_file_systems(two: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """NFS locks only files that are open for writing. Where there are no locks, a warning says so."""
    import fcntl

    flock = fcntl.flock

    def nfs_flock(file: Any, operation: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    def no_flock(number: int, file: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", nfs_flock)
    lock = lock_run(two)
    with pytest.raises(UserError, match="still running in another process"):
        lock_run(two)
    lock.release()
    assert "WARNING" not in capsys.readouterr().err
    for number in (errno.ENOLCK, errno.EOPNOTSUPP):
        monkeypatch.setattr(fcntl, "flock", functools.partial(no_flock, number))
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

    open_for_writing = counted(File)
    open_path = Path.open
    # Files that are read have more arguments than the mode.
    patch.setattr(Path, "open", lambda path, *args, **kw: (open_path if kw else open_for_writing)(path, *args, **kw))
    patch.setattr(os, "fsync", counted(os.fsync))
    for name in ("replace", "unlink", "mkdir"):
        patch.setattr(Path, name, counted(getattr(Path, name)))


@pytest.mark.posix
def test_kill_at_every_operation(two: Path, capfd: pytest.CaptureFixture) -> None:
    """A kill at any operation leaves the checkpoint before or the new one, and the next save works."""
    outcomes = []
    while True:
        run_dir = make_two()
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                checkpoint, replay, _ = resumed(run_dir)
                replay.add(9)  # beyond the end of the ring: two segments are written, and one is deleted
                kill_at(len(outcomes), pytest.MonkeyPatch())
                save(checkpoint, 3, replay)
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        outcomes.append(load_checkpoint(run_dir, "test_checkpoint")[0])
        assert_newest(run_dir, outcomes[-1], {2: 5, 3: 14}[outcomes[-1]])
        checkpoint, replay, _ = resumed(run_dir)
        replay.add(1)
        save(checkpoint, 4, replay)
        assert_newest(run_dir, 4, replay.steps_added)
        assert not list(checkpoint.directory.glob("*.tmp"))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert "damaged" not in capfd.readouterr().err, "a file had its name before it was complete"
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert len(outcomes) > 20


@pytest.mark.posix
def test_names_follow_contents(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loss of power: a file is synchronised before it gets its name, the state after its segments."""
    done: list[tuple[str, str]] = []
    fsync = os.fsync
    replace = Path.replace
    unlink = Path.unlink

    def note(operation: str, path: str | Path) -> None:
        name = Path(path).name.removesuffix(".tmp")
        done.append((operation, "state" if name.endswith(".state") else name.rpartition("-")[0] or name))

    checkpoint, replay, _ = resumed(two)
    replay.add(9)
    monkeypatch.setattr(os, "fsync", lambda file: note("sync", os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    monkeypatch.setattr(Path, "replace", lambda path, other: note("name", other) or replace(path, other))
    monkeypatch.setattr(Path, "unlink", lambda path, **kw: note("delete", path) or unlink(path, **kw))
    save(checkpoint, 3, replay)
    save(checkpoint, 4, replay)
    expected = []
    for name in ("4-10", "10-14", "state", "state"):
        expected += [("sync", name), ("name", name)]
    assert [operation for operation in done if operation[0] != "delete"] == expected
    assert {name for operation, name in done if operation == "delete"} == {"state", "0-3", "3-5"}
    assert "delete" not in {operation for operation, _ in done[:6]}


# ==================== state ====================


def test_a_watching_tensorboard_forgets_points_that_are_logged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read points after the checkpoint when the run is killed, and sees them once after the resume.

    The class is that of TensorBoard's server, where it has no data server.
    """
    monkeypatch.chdir(tmp_path)
    args = qdagger.Args()
    run_dir, writer = start_logging(args)
    server = EventMultiplexer()

    def points() -> list[tuple[int, float]]:
        server.AddRunsFromDirectory("runs").Reload()
        events = server.Tensors(run_dir.name, "x")
        return [(event.step, make_ndarray(event.tensor_proto).item()) for event in events]

    with writer:
        for step in range(1, 11):
            writer.add_scalar("x", step, step)
            if step == 5:
                state = writer.state_dict()
    assert len(points()) == 10
    del writer  # and with it the lock
    _, resumed = start_logging(dataclasses.replace(args, resume=str(run_dir)))
    with resumed:
        resumed.load_state_dict(state)
        for step in range(6, 9):
            resumed.add_scalar("x", -step, step)
    assert points() == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, -6), (7, -7), (8, -8)]


def test_a_failed_run_ends_its_run_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `wandb.init` returns it to the next run of the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", wandb := mock.MagicMock())
    wandb.init.return_value.id = "a"
    _, writer = start_logging(qdagger.Args(track=True))
    with contextlib.suppress(UserError), writer:
        raise UserError("the training diverged")
    wandb.finish.assert_called_once_with(exit_code=1)


def test_a_run_whose_wandb_cannot_start_can_be_resumed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory is not locked, although a notebook keeps the error."""
    (tmp_path / "run").mkdir()
    monkeypatch.setitem(sys.modules, "wandb", wandb := mock.MagicMock())
    wandb.init.side_effect = RuntimeError("no API key")
    errors = []
    for _ in range(2):
        with pytest.raises(UserError, match="W&B can't start: no API key") as error:
            start_logging(qdagger.Args(track=True, resume=str(tmp_path / "run")))
        errors.append(error)


def test_optimizer() -> None:
    """A restored optimizer has the saved state, in the memory layout of its parameters, and settings of its own."""
    parameters = [list(qdagger.QNetwork(5).to(memory_format=torch.channels_last).parameters()) for _ in range(2)]
    saved, restored = (torch.optim.Adam(p, lr, fused=lr > 0.1) for p, lr in zip(parameters, (0.5, 0.01), strict=True))
    for parameter in parameters[0]:
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    load(restored, dump(saved))
    assert (restored.param_groups[0]["lr"], restored.param_groups[0]["fused"]) == (0.01, False)
    for parameter, other in zip(*parameters, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            array = restored.state[other][name]
            assert torch.equal(array, saved.state[parameter][name])
            assert array.stride() == other.stride()


LINEAR = torch.nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (LINEAR, torch.nn.Linear(3, 4)),
        (LINEAR, torch.nn.Conv2d(3, 2, 1)),
        ({"kernel": jnp.ones((3, 2))}, {"kernel": jnp.ones((3, 4))}),
        (optax.adam(1e-3).init(jnp.ones(3)), optax.sgd(1e-3).init(jnp.ones(3))),
    ],
)
def test_script_that_was_changed(saved: Any, now: Any, tmp_path: Path) -> None:
    """A changed layer or optimizer ends in one line."""
    make_checkpoint(tmp_path, part=saved).save()
    for changed in ({"part": now}, {"new": saved}):
        with pytest.raises(UserError, match="the checkpoint does not fit this script") as error:
            make_checkpoint(tmp_path, resume=True, **changed).restore()
        assert len(str(error.value).splitlines()) == 1


# ==================== runs ====================

SMALL = {"teacher_steps": 40, "offline_steps": 100, "offline_eval_frequency": 50, "total_timesteps": 300}
SMALL |= {"train_frequency": 16, "batch_size": 2, "target_network_frequency": 30, "warmup_updates": 120}
SMALL |= {"online_eval_frequency": 101}
EVALUATIONS = ["teacher", "random", "offline 50", "offline 100", "online 102", "online 202", "final"]


class Killed(BaseException):
    """Raised in place of a SIGKILL."""


@pytest.fixture
def evaluations(
    small_networks: None, no_evaluations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Make runs in this process fast, in a folder of their own; return the names of their evaluations."""
    monkeypatch.chdir(tmp_path)
    return no_evaluations


def args_of(script: Any, teacher: Path, **changes: Any) -> Any:
    """Return the flags of a small run of any script."""
    args = tiny(teacher, **(SMALL | changes))
    other = twin(args, script)
    if hasattr(other, "eval_frequency"):
        other.eval_frequency = args.online_eval_frequency
    return other


def stop(script: Any, args: Any, number: int = signal.SIGTERM, **counters: int) -> Path:
    """Run a script and send it a signal when its progress has these counters; return the run directory."""
    save_if_due = Checkpoint.save_if_due
    sent = []

    def interrupt(checkpoint: Checkpoint, *args: Any, **kwargs: Any) -> None:
        if not sent and counters.items() <= vars(checkpoint.state["progress"]).items():
            sent.append(True)
            if number == KILL:
                checkpoint.state["writer"].add_scalar("charts/SPS", 1.0, 12345)  # a point after the checkpoint
                raise Killed
            signal.raise_signal(number)
        save_if_due(checkpoint, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "save_if_due", interrupt)
        with pytest.raises((SystemExit, Killed)) as stopped:
            script.main(args)
    assert isinstance(stopped.value, Killed) or stopped.value.code == 128 + number
    return only(Path("runs").iterdir())


def resume(script: Any, run_dir: Path, *flags: object) -> None:
    """Resume a run as the command line does."""
    script.main(parse_args(script.Args, ["--resume", str(run_dir), *map(str, flags)]))


def steps_of(run_dir: Path) -> dict[str, list[int]]:
    """Return the steps of each curve."""
    return {tag: [step for step, _ in points] for tag, points in read_scalars(run_dir).items()}


Results = tuple[Scalars, dict[str, bytes]]


def results(run_dir: Path) -> Results:
    """Return the curves of a run, without the values of those that time something, and its models."""
    scalars = read_scalars(run_dir)
    curves = {tag: [(step, tag in TIMED_TAGS or value) for step, value in points] for tag, points in scalars.items()}
    return curves, {path.stem: path.read_bytes() for path in run_dir.glob("*.cleanrl_model")}


@pytest.fixture
def whole(evaluations: list[str], teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Return a function that returns the curves and models of a whole run of a script with its present network."""

    def get(script: Any) -> Results:
        if (key := (script, script.QNetwork)) not in WHOLE_RUNS:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path_factory.mktemp("whole"))
                script.main(args_of(script, teacher))
                WHOLE_RUNS[key] = results(only(Path("runs").iterdir()))
            evaluations.clear()
        return WHOLE_RUNS[key]

    return get


WHOLE_RUNS: dict[Any, Results] = {}
STOPS = [
    (qdagger, signal.SIGTERM, {"offline_update": 36}),
    (qdagger, KILL, {"teacher_step": 12}),  # each kill is resumed from the checkpoint before the phase
    (qdagger, KILL, {"online_step": 102}),
    (qdagger_jax, signal.SIGTERM, {"offline_update": 36}),
    (qdagger_jax, KILL, {"online_step": 102}),
]


@pytest.mark.parametrize(("script", "number", "counters"), STOPS)
def test_resumed_run_equals_whole_run(
    script: Any, number: int, counters: dict, whole: Callable, teacher: Path, evaluations: list[str]
) -> None:
    """A run that resumes between two phases or offline updates has the same curves and models, bit for bit."""
    expected = whole(script)
    run_dir = stop(script, args_of(script, teacher), number, **counters)
    resume(script, run_dir)
    assert results(run_dir) == expected
    assert list(dict.fromkeys(evaluations)) == EVALUATIONS
    assert not (run_dir / "checkpoint").exists()
    assert (run_dir / "finished").exists()
    with pytest.raises(UserError, match="finished"):
        resume(script, run_dir)


def test_resumed_impala_equals_whole_run(
    whole: Callable, teacher: Path, evaluations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds with the network of the script, in its memory layout and precision."""
    monkeypatch.setattr(qdagger, "QNetwork", NETWORKS[qdagger])
    test_resumed_run_equals_whole_run(qdagger, signal.SIGINT, {"offline_update": 36}, whole, teacher, evaluations)


WITHIN_EPISODES = [(qdagger, {"teacher_step": 16}), (qdagger, {"online_step": 196}), (dqn_atari, {"step": 196})]
WITHIN_EPISODES += [(qdagger_jax, {"online_step": 196}), (dqn_atari_jax, {"step": 196})]


def assert_same_steps(run_dir: Path, expected: Scalars) -> None:
    """Check that the curves have the expected steps, but for episodes, and the same ε."""
    scalars = read_scalars(run_dir)
    for tag in expected.keys() - {"charts/episodic_return", "charts/episodic_length"}:
        assert [step for step, _ in scalars[tag]] == [step for step, _ in expected[tag]], tag
    assert scalars["charts/epsilon"] == expected["charts/epsilon"]


@pytest.mark.parametrize(("script", "counters"), WITHIN_EPISODES)
def test_resumed_within_episodes(
    script: Any, counters: dict, whole: Callable, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that resumes between environment steps has the same steps, updates and schedules, and new episodes.

    Updates come every 16 steps, at 30, 46 and so on, and each sixth is logged. From step 196 to 200 there is none.
    """
    expected, _ = whole(script)
    offline = 100 if hasattr(script, "qdagger_loss") else 0
    for tag in ("losses/td_loss", "losses/q_values"):
        assert [step for step, _ in expected[tag]] == [offline + 110, offline + 206]
    seeds = []
    replays = []
    reset = AtariVectorEnv.reset
    add = script.Replay.add
    monkeypatch.setattr(AtariVectorEnv, "reset", lambda envs, seed: seeds.append(tuple(seed)) or reset(envs, seed=seed))
    run_dir = stop(script, args_of(script, teacher), USR1, **counters)
    before = len(seeds)
    monkeypatch.setattr(script.Replay, "add", lambda self, *args: replays.append(self) or add(self, *args))
    resume(script, run_dir)
    assert_same_steps(run_dir, expected)
    assert seeds[before] not in seeds[:before], "episodes are repeated"

    (done,) = counters.values()
    total = 40 if "teacher_step" in counters else 300
    seam = done // 2  # of two environments
    replay = replays[0]
    assert sum(other is replay for other in replays) == total // 2 - seam
    assert replay.steps_added == total // 2
    valid = np.asarray(replay.ring.valid)
    age = np.asarray(replay.ring.age)
    assert not valid[seam - 1].any(), "a transition leads from one episode to another"
    assert valid[[seam - 2, seam]].all()
    assert not age[seam].any()
    assert (age[seam - 1] == age[seam - 2] + 1).all()


def stop_in_evaluation(script: Any, args: Any, name: str, number: int) -> Path:
    """Run a script and send it a signal when it plays the evaluation ``name``; return the run directory."""
    play = script.play_episodes

    def interrupted(playing: str, act: Callable, *args: Any) -> list[float]:
        if playing == name:
            signal.raise_signal(number)
            act(np.zeros((1, 4, 84, 84), np.uint8))
            raise AssertionError("the evaluation continues")
        return play(playing, act, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "play_episodes", interrupted)
        with pytest.raises(SystemExit, match=str(128 + number)):
            script.main(args)
    return only(Path("runs").iterdir())


IN_EVALUATIONS = [("random", signal.SIGINT), ("offline 50", signal.SIGTERM), ("offline 100", USR1)]
IN_EVALUATIONS += [("final", signal.SIGTERM)]


@pytest.mark.parametrize(("name", "number"), IN_EVALUATIONS)
def test_signal_in_an_evaluation(
    name: str, number: int, whole: Callable, teacher: Path, evaluations: list[str]
) -> None:
    """The evaluation ends at once, the resumed run repeats it, and the results are the same."""
    expected = whole(qdagger)
    run_dir = stop_in_evaluation(qdagger, args_of(qdagger, teacher), name, number)
    resume(qdagger, run_dir)
    assert results(run_dir) == expected
    assert list(dict.fromkeys(evaluations)) == EVALUATIONS


@pytest.mark.parametrize("script", list(NETWORKS), ids=lambda script: script.__name__)
def test_signal_in_an_evaluation_during_the_online_phase(
    script: Any, whole: Callable, teacher: Path, evaluations: list[str]
) -> None:
    """The same holds there, but for what follows from the new episodes.

    Every 101 steps, the first steps of both environments that reach a multiple are 102 and 202. The model of an
    evaluation is saved after it.
    """
    scalars, models = whole(script)
    run_dir = stop_in_evaluation(script, args_of(script, teacher), "online 102", signal.SIGTERM)
    assert not list(run_dir.glob("*-online-*.cleanrl_model"))
    resume(script, run_dir)
    assert_same_steps(run_dir, scalars)
    found_scalars, found_models = results(run_dir)
    offline = 100 if hasattr(script, "qdagger_loss") else 0
    tag = "charts/online/avg_episodic_return"
    assert [step for step, _ in found_scalars[tag]] == [offline + 102, offline + 202]
    assert found_scalars[tag] == scalars[tag]
    assert found_models.keys() == models.keys()
    before = f"{script.__name__}-online-102"
    assert found_models[before] == models[before]
    assert evaluations == (EVALUATIONS if offline else EVALUATIONS[-3:])


def test_resumed_at_odd_counts(teacher: Path, evaluations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each log point, evaluation and update of the target network comes once, wherever and how often a run stops."""
    moved = []
    update_target = qdagger.update_target
    monkeypatch.setattr(qdagger, "update_target", lambda *args: moved.append(True) or update_target(*args))
    args = args_of(qdagger, teacher, offline_steps=203, offline_eval_frequency=70, target_network_frequency=40)
    for done in (36, 38, 40, 102, 140, 202, 203):
        run_dir = stop(qdagger, args, offline_update=done)
        args = parse_args(qdagger.Args, ["--resume", str(run_dir)])
    assert len(moved) == 5
    for done in (2, 12, 200):
        stop(qdagger, args, online_step=done)
    resume(qdagger, run_dir, "--total-timesteps", 400)
    assert len(moved) == 5 + 1 + 400 // 40  # one at the end of the offline phase
    steps = steps_of(run_dir)
    for tag in ("loss", "q_loss", "distill_loss", "updates_per_second"):
        assert steps[f"charts/offline/{tag}"] == [100, 200], tag
    assert steps["charts/offline/avg_episodic_return"] == [70, 140, 203]
    for tag in ("charts/SPS", "charts/epsilon", "charts/distill_coeff"):
        assert steps[tag] == [203 + step - 2 for step in (100, 200, 300, 400)], tag
    names = ["offline 70", "offline 140", "offline 203", "online 102", "online 202", "online 304"]
    assert evaluations == ["teacher", "random", *names, "final"]
    models = {path.stem.removeprefix(f"{STUDENT}-") for path in run_dir.glob("*-*.cleanrl_model")}
    assert models == {name.replace(" ", "-") for name in names}


def test_minutes_between_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass from the end of a save to the next; with 0 nothing is written, and signals keep their handlers."""
    monkeypatch.chdir(tmp_path)
    now = 0.0
    begun = []

    def write(*args: Any) -> None:
        nonlocal now
        begun.append(now)
        now += 27

    monkeypatch.setattr(checkpoint_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Checkpoint, "_write", write)
    checkpoint = make_checkpoint(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "it would not end a login at W&B, which comes first"
    with checkpoint:
        assert signal.getsignal(signal.SIGTERM) == checkpoint._on_signal
        while now < 10_000:
            now += 1
            checkpoint.save_if_due()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert begun[0] == 600
    assert set(np.diff(begun)) == {627}
    begun.clear()
    with Checkpoint(Args(checkpoint_minutes=0), tmp_path) as checkpoint:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        now += 10_000
        checkpoint.save_if_due()
        checkpoint.save()
    assert not begun


DIVERGING = [(qdagger, {"offline_update": 20}), (qdagger_jax, {"offline_update": 20}), (qdagger, {"online_step": 104})]
DIVERGING += [(dqn_atari, {"step": 104}), (dqn_atari_jax, {"step": 104})]


@pytest.mark.parametrize(("script", "counters"), DIVERGING)
def test_diverged(script: Any, counters: dict, teacher: Path, evaluations: list[str], whole: Callable) -> None:
    """A network that becomes NaN ends the run in one line, before it is evaluated, saved as a model or logged."""
    expected, _ = whole(script)
    update_target = script.update_target

    def poison(target: Any, *args: Any) -> Any:
        state = update_target(target, *args)
        if not hasattr(script, "jax"):
            next(iter(target.parameters())).data[0, 0, 0, 0] = torch.inf
            return None
        leaves, tree = jax.tree.flatten(state.target_params)
        return state._replace(target_params=jax.tree.unflatten(tree, [leaves[0] + jnp.inf, *leaves[1:]]))

    run_dir = stop(script, args_of(script, teacher), **counters)
    evaluations.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update_target", poison)
        with pytest.raises(UserError, match=r"the training diverged to NaN or infinite values; .*--learning-rate"):
            resume(script, run_dir)
    assert not evaluations
    assert all(np.isfinite(value) for points in read_scalars(run_dir).values() for _, value in points)
    resume(script, run_dir)
    assert_same_steps(run_dir, expected)


@pytest.mark.parametrize(
    ("script", "offline_steps"),
    [(qdagger, 4), (qdagger, 0), (qdagger_jax, 4), (qdagger_jax, 0), (dqn_atari, 0), (dqn_atari_jax, 0)],
)
def test_diverged_losses(
    script: Any, offline_steps: int, teacher: Path, evaluations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is NaN ends the run when it would be logged, also where the weights are still finite."""
    make_update = script.make_update

    def make_diverging(*args: Any) -> Any:
        update = make_update(*args)

        def diverging(*args: Any) -> Any:
            result = update(*args)
            if hasattr(script, "jax"):
                return result[0], result[1]._replace(td_loss=result[1].td_loss * np.nan)
            return result._replace(td_loss=result.td_loss * np.nan)

        return diverging

    monkeypatch.setattr(script, "make_update", make_diverging)
    monkeypatch.setattr(script, "LOG_EVERY", 4)
    with pytest.raises(UserError, match="diverged"):
        script.main(args_of(script, teacher, offline_steps=offline_steps, total_timesteps=60))
    assert set(evaluations) <= {"teacher", "random"}
    points = read_scalars(only(Path("runs").iterdir()))
    assert not [tag for tag in points if "loss" in tag]


# ==================== flags ====================


@pytest.fixture
def stopped(evaluations: list[str], teacher: Path) -> Path:
    """Return the directory of a run that was stopped before its online phase."""
    return stop(qdagger, args_of(qdagger, teacher, offline_steps=1, hf_entity="somebody"), offline_update=1)


def test_flags_of_a_resumed_run(stopped: Path, teacher: Path) -> None:
    """They are those of the run; some may change; a repeated one contradicts nothing."""
    flags = ["--resume", str(stopped)]
    was = vars(args_of(qdagger, teacher, offline_steps=1, hf_entity="somebody"))
    assert vars(parse_args(qdagger.Args, flags)) == was | {"resume": str(stopped)}
    changes = {"total_timesteps": 999, "save_model": False, "batch_size": 2}
    flags += ["--total-timesteps", "999", "--no-save-model", "--batch_size", "2"]
    assert vars(parse_args(qdagger.Args, flags)) == was | changes | {"resume": str(stopped)}
    for contradiction, words in (
        ("--batch-size 32", "--batch-size is 32 .* 2"),  # the default, but given
        ("--env_id PongNoFrameskip-v4", "--env-id is .Pong.* .Klax"),
        ("--no-bf16", "--bf16 is False .* True"),
        ("--buffer-size 999", "--buffer-size is 999"),
    ):
        with pytest.raises(UserError, match=words):
            parse_args(qdagger.Args, ["--resume", str(stopped), *contradiction.split()])


def test_finished_training_has_no_more_steps(
    teacher: Path, evaluations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After training, --total-timesteps can't be raised, and --save-model still can be given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "finish", lambda self: sys.exit(0))
        with pytest.raises(SystemExit):
            qdagger.main(args_of(qdagger, teacher, save_model=False))
    run_dir = only(Path("runs").iterdir())
    with pytest.raises(UserError, match=r"deleted at the end of the training: leave --total-timesteps out"):
        resume(qdagger, run_dir, "--total-timesteps", 999)


@pytest.mark.parametrize(("script", "steps"), [(qdagger, 10), (qdagger_jax, 0)])
def test_training_that_is_ended(script: Any, steps: int, teacher: Path, evaluations: list[str]) -> None:
    """The student is evaluated also if --total-timesteps is now below its steps, and below --learning-starts."""
    run_dir = stop(script, args_of(script, teacher, offline_steps=1), online_step=120)
    resume(script, run_dir, "--total-timesteps", steps)
    assert evaluations[-1] == "final"


def test_run_in_a_thread(teacher: Path, evaluations: list[str]) -> None:
    """Notebooks and Ray may call main in a thread, where Python has no signal handlers; checkpoints are saved."""
    with ThreadPoolExecutor() as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "finish", lambda self: None)
        executor.submit(qdagger.main, args_of(qdagger, teacher)).result()
    resume(qdagger, only(Path("runs").iterdir()))
    assert evaluations == [*EVALUATIONS, "final"]


def test_run_that_cannot_be_resumed(stopped: Path, tmp_path: Path) -> None:
    """No run, the run of another or a changed script, or a run that another process runs: one line each."""
    for path, words in ((tmp_path / "no", "no such directory"), (tmp_path, "give the directory of a run")):
        with pytest.raises(UserError, match=words):
            parse_args(qdagger.Args, ["--resume", str(path)])
    with pytest.raises(UserError, match=r"qdagger_dqn_atari_impalacnn\.py"):
        parse_args(dqn_atari.Args, ["--resume", str(stopped)])
    changed = dataclasses.make_dataclass("Args", [("new_flag", int, 1)], bases=(qdagger.Args,))
    changed.__module__ = STUDENT
    with pytest.raises(UserError, match="this script has other flags than the run; resume it with the script"):
        parse_args(changed, ["--resume", str(stopped)])
    args = parse_args(qdagger.Args, ["--resume", str(stopped)])
    running = start_logging(args)
    with pytest.raises(UserError, match="still running in another process"):
        start_logging(args)
    del running


def rewrite_state(path: Path, **changes: Any) -> None:
    """Change values in a state, or delete those that are None."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    state = json.loads(members["state.json"]) | changes
    members["state.json"] = json.dumps({name: value for name, value in state.items() if value is not None}).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def test_run_of_an_earlier_version(stopped: Path) -> None:
    """Its checkpoints have other entries, and may have other flags: one line."""
    state = sorted(stopped.glob("checkpoint/*.state"))[-1]
    rewrite_state(
        state, members=None, steps_added=None, versions=None, parts=["q_network"], progress={"teacher_step": 3}
    )
    with pytest.raises(UserError, match=rf"--resume {re.escape(str(stopped))}: an earlier version.*with the script"):
        parse_args(qdagger.Args, ["--resume", str(stopped)])


def test_resumed_under_other_versions(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Versions are in the table of flags, and a run that is resumed under others prints both in a warning."""
    (table,) = EventAccumulator(str(stopped)).Reload().Tensors("hyperparameters")
    packages = ("ale-py", "gymnasium", "torch")
    was = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    assert f"|versions|{was}|" in table.tensor_proto.string_val[0].decode()
    now = was.replace("ale-py ", "ale-py 9.")
    monkeypatch.setattr(checkpoint_module, "versions", lambda args: now)
    resume(qdagger, stopped)
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING: the run used")]
    assert was in warning
    assert now in warning


@pytest.mark.parametrize("script", [qdagger, qdagger_jax])
def test_teacher_that_was_replaced(script: Any, evaluations: list[str], tmp_path: Path) -> None:
    """A resumed run with other weights in the teacher's file ends in one line, also if it is resumed again."""
    directory = write_teacher(tmp_path / "teacher")
    run_dir = stop(script, args_of(script, directory, offline_steps=1), offline_update=1)
    write_teacher(directory, **{"network.9.bias": torch.zeros(NUM_ACTIONS)})
    errors = []
    for _ in range(2):  # an error is kept with its traceback, as in a notebook
        with pytest.raises(UserError, match="another file than at the start; give that file or revision") as error:
            resume(script, run_dir)
        errors.append(error)


# ==================== processes ====================


def newest_number(folder: Path) -> int:
    """Return the number of the newest checkpoint of the run in ``folder``."""
    return max((int(path.stem) for path in folder.glob("runs/*/checkpoint/*.state")), default=0)


def progress_of(run_dir: Path) -> dict[str, Any]:
    """Return the progress in the newest checkpoint."""
    return json.loads(load_checkpoint(run_dir, STUDENT)[2]["progress"])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Wait until ``condition`` holds, while the process runs."""
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.posix
def test_signals_to_a_process(teacher: Path, tmp_path: Path) -> None:
    """Nohup, Ctrl-C pressed several times, and one that also ends the reader of the output: the run can be resumed."""
    flags = [f"--{name}={value}" for name, value in dataclasses.asdict(tiny(teacher)).items() if name in (
        "env_id", "teacher_policy_hf_repo", "num_envs", "buffer_size", "learning_starts", "batch_size", "end_e",
        "teacher_steps", "teacher_eval_episodes",
    )]  # fmt: skip
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(REPO)}, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, str(REPO / "cleanrl" / f"{STUDENT}.py"), *flags, "--offline-steps=100000"]
    ignore_hangups = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    process = subprocess.Popen([*command, "--checkpoint-minutes=0.001"], preexec_fn=ignore_hangups, **options)
    wait_for(lambda: newest_number(tmp_path) > 4, process)
    process.send_signal(signal.SIGHUP)
    number = newest_number(tmp_path)
    wait_for(lambda: newest_number(tmp_path) > number + 1, process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    (run_dir,) = (tmp_path / "runs").iterdir()
    (command,) = (line.partition("resume with: ")[2] for line in output.splitlines() if "resume with: " in line)
    assert command.startswith("python ")
    assert "stopped by SIGINT" in output

    command = [sys.executable, *shlex.split(command)[1:], "--checkpoint-minutes=1000"]
    process = subprocess.Popen(command, **options)
    done = progress_of(run_dir)
    output = b""
    while b"/100000" not in output:  # the offline phase begins
        output += os.read(process.stdout.fileno(), 1000)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(120) in (130, 141)
    now = progress_of(run_dir)
    assert (now["teacher_step"], now["offline_update"]) > (done["teacher_step"], done["offline_update"])


FULL_DISK = """
import os, resource, signal, sys, tempfile
import helpers, qdagger_dqn_atari_impalacnn as qdagger
from cleanrl_utils.checkpoint import parse_args
from cleanrl_utils.errors import one_line_errors
qdagger.QNetwork = helpers.SmallNetwork
tempfile.gettempdir()  # found now, as the disk of /tmp is not full

def run(limit, flags):
    if os.fork() == 0:
        with one_line_errors():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            qdagger.main(parse_args(qdagger.Args, flags))
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.wait()[1])

for limit in map(int, sys.argv[1].split()):
    os.makedirs(str(limit))
    os.chdir(str(limit))
    print("limit", limit, file=sys.stderr)
    code = run(limit, sys.argv[2:])
    print("exit code", code, flush=True, file=sys.stderr)
    os.chdir("..")
if os.path.isdir("100000/runs"):
    os.chdir("100000")
    print("resumed", run(-1, ["--resume", "runs/" + os.listdir("runs")[0]]), file=sys.stderr)
"""


@pytest.mark.parametrize("script", [qdagger, qdagger_jax], ids=lambda script: script.__name__)
def test_first_checkpoint_comes_before_the_first_phase(
    script: Any, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Checkpoint, "_write", write)
    monkeypatch.setattr(AtariVectorEnv, "send", lambda *args: pytest.fail("a phase has begun"))
    with pytest.raises(UserError, match="No space left on device; make room or allow it, then start it again"):
        script.main(args_of(script, teacher))


@pytest.mark.posix
def test_full_disk(teacher: Path, tmp_path: Path) -> None:
    """A run ends in one line: at the start, before the teacher's evaluation, or later; then it can be resumed."""
    args = args_of(qdagger, teacher)
    flags = [f"--{name}={value}" for name, value in vars(args).items() if value != getattr(qdagger.Args(), name)]
    flags = [flag.replace("=True", "") for flag in flags]
    environ = {"PYTHONPATH": os.pathsep.join(map(str, (REPO, REPO / "cleanrl", REPO / "tests")))}
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "0 3000 100000", *flags],
        cwd=tmp_path,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    errors = [line for line in result.stderr.splitlines() if "%|" not in line and line.strip()]
    for i, limit in enumerate((0, 3000, 100_000)):
        start, error, end = errors[3 * i : 3 * i + 3]
        assert (start, end) in {(f"limit {limit}", f"exit code {code}") for code in (1, 2)}
        assert error.startswith("error: ")
        assert "File too large" in error
        assert "make room" in error
    assert errors[9:] == ["resumed 0"]
    evaluations = result.stdout.count("teacher: return")
    assert evaluations == 2, "the teacher was evaluated before the first checkpoint"  # once before and once resumed
    steps = steps_of(only((tmp_path / "100000" / "runs").iterdir()))
    assert steps["charts/offline/loss"] == [100]
    assert steps["charts/SPS"] == [198, 298, 398]
