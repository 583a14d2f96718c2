"""The logs of a run: event files that TensorBoard reads, W&B, progress, and the time between checkpoints."""

import contextlib
import dataclasses
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
from helpers import only, read_scalars, warnings_of
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_ndarray

from cleanrl_utils import run as run_module
from cleanrl_utils.checkpoint import Checkpoints
from cleanrl_utils.errors import UserError, one_line_errors
from cleanrl_utils.run import Run, parse_args
from cleanrl_utils.tracking import EVENT_FILES, Writer, make_run_dir

Points = list[tuple[int, float]]
RETURNS = {"random": [1.0, 2.0], "final": [3.0]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def points_of(run_dir: Path) -> Points:
    """Return the points of the curve x as TensorBoard reads them."""
    return read_scalars(run_dir)["x"]


def log(writer: Writer | Run, steps: range, sign: int = 1) -> None:
    """Log points of the curve x, whose values are the steps or minus the steps."""
    add = writer.log if isinstance(writer, Run) else writer.add_scalar
    for step in steps:
        add("x", sign * step, step)


@pytest.mark.posix
def test_run_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that start in the same second have directories of their own. A dead link in their place is one line."""
    monkeypatch.setattr(time, "time", lambda: 10**9)
    args = qdagger.Args(env_id="ALE/Pong-v5", exp_name="test")
    assert {make_run_dir(args).name for _ in range(3)} == {f"ALE-Pong-v5__test__1__{10**9 + i}" for i in range(3)}
    Path("runs").rename("old")
    Path("runs").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"a run directory can't be made in .*/runs: .*; use another folder"):
        make_run_dir(args)


# ==================== event files ====================


def test_a_watching_tensorboard_forgets_points_that_are_logged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read points after the checkpoint when the run is killed, and sees them once after the resume.

    The disk is slow, so that a checkpoint has to wait for the thread that writes.
    """
    write = RecordWriter.write
    monkeypatch.setattr(RecordWriter, "write", lambda writer, data: time.sleep(0.05) or write(writer, data))
    server = EventMultiplexer()  # of TensorBoard's server, where it has no data server
    run_dir = Path("runs", "run")
    run_dir.mkdir(parents=True)

    def points() -> Points:
        server.AddRunsFromDirectory("runs").Reload()
        return [(event.step, make_ndarray(event.tensor_proto).item()) for event in server.Tensors("run", "x")]

    writer = Writer(run_dir)
    writer.purge(0)
    log(writer, range(1, 6))
    state = writer.dump()
    log(writer, range(6, 11))
    writer.close()
    assert len(points()) == 10
    writer = Writer(run_dir, state)
    log(writer, range(6, 9), -1)
    writer.close()
    assert points() == [*((i, i) for i in range(1, 6)), (6, -6), (7, -7), (8, -8)]
    assert points_of(run_dir) == points()


def test_points_after_the_checkpoint_are_removed(folder: Path) -> None:
    """Also at the step of the checkpoint, where TensorBoard would show both."""
    writer = Writer(folder)
    log(writer, range(5))
    state = writer.dump()
    log(writer, range(4, 8))
    writer.close()
    Writer(folder, state).close()
    assert points_of(folder) == [(i, i) for i in range(5)]


@pytest.mark.parametrize("seconds", [-(10**6), 0])
def test_a_clock_that_is_behind(seconds: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Event files sort in the order in which they were written, and TensorBoard reads all points."""
    now = time.time()
    state = None
    for i in range(12):
        monkeypatch.setattr(time, "time", lambda i=i: now + i * seconds)
        writer = Writer(folder, state)
        if state is None:
            writer.purge(0)
        log(writer, range(3 * i, 3 * i + 3))
        state = writer.dump()
        newest = max(folder.glob(EVENT_FILES), key=lambda path: path.name)
        assert newest == writer.file
        writer.close()
    assert len(list(folder.glob(EVENT_FILES))) == 12
    assert points_of(folder) == [(i, i) for i in range(36)]


@pytest.mark.posix
def test_a_log_that_cannot_be_written(capsys: pytest.CaptureFixture) -> None:
    """It ends the run in one line, and the run can be resumed. The limit of a file's size stands for a full disk."""
    import resource  # not on Windows

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def train() -> None:
        with one_line_errors(), Run(qdagger.Args()) as run:
            log(run, range(10))
            run.save()
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
            try:
                log(run, range(10, 1000))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == 2
    run_dir = only(Path("runs").iterdir())
    error = f"error: a log in {run_dir} can't be written: [Errno 27] File too large; "
    assert capsys.readouterr().err == f"{error}make room or allow it, then use --resume {run_dir}\n"
    with Run(qdagger.Args(resume=str(run_dir))) as run:
        log(run, range(10, 15))
    assert points_of(run_dir) == [(i, i) for i in range(15)]


# ==================== a run ====================


def test_only_finite_values_are_logged() -> None:
    """A NaN or infinite value ends the run with a line about divergence; the points before it are written."""
    for value in (np.nan, -np.inf, np.float32(np.inf)):
        with Run(qdagger.Args()) as run:
            run.log("x", np.float32(3), 1)
            with pytest.raises(UserError, match="diverged"):
                run.log("x", value, 2)
        assert points_of(run.directory) == [(1, 3)]


def test_minutes_between_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass from the end of a save to the next, and signals have the run's handler in the block."""
    now = 0.0
    begun = []
    handler = signal.getsignal(signal.SIGTERM)

    def save(*args: Any) -> None:
        nonlocal now
        begun.append(now)
        now += 27

    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Checkpoints, "save", save)
    with Run(qdagger.Args(checkpoint_minutes=10)) as run:
        assert signal.getsignal(signal.SIGTERM) == run._on_signal
        while now < 10_000:
            now += 1
            run.save_if_due()
    assert signal.getsignal(signal.SIGTERM) == handler
    assert begun[0] == 0
    assert set(np.diff(begun)) == {627}


def test_no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `checkpoint_minutes` 0 there are none, and signals keep their handlers."""
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with Run(qdagger.Args(checkpoint_minutes=0)) as run:
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before
        monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 10**9))
        run.save_if_due()
        run.save()
    assert not (run.directory / "checkpoint").exists()


@pytest.mark.parametrize("start", [0, 40])
def test_progress_in_a_log_file(start: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Without a terminal, progress is lines: now and then and at the end, of the steps of this process."""
    now = 100.0
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: now)
    run = Run(qdagger.Args())
    for step in run.steps("offline", "update", range(start, 98, 4)):
        now += 2
        run.show(f"return {step}")
        assert run.steps_per_second == pytest.approx((step + 4 - start) / (now - 100))
    out, err = capsys.readouterr()
    assert "\r" not in out + err
    assert not err
    lines = [f"offline: {start + 64} of 98 updates, 2.0 updates/s, return {start + 60}"] if start == 0 else []
    assert out.splitlines() == [*lines, "offline: 98 of 98 updates, 2.0 updates/s, return 96"]


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """There it is a bar, in a resumed run too; the last step may be shorter."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run = Run(qdagger.Args())
    assert list(run.steps("offline", "update", range(4, 9, 4))) == [4, 8]
    out, err = capsys.readouterr()
    assert not out
    last = re.split(r"[\r\n]+", err.strip())[-1]
    assert last.startswith("offline: 100%")
    assert " 9/9 " in last


# ==================== W&B ====================


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """Replace W&B."""
    module = mock.MagicMock()
    module.init.return_value.id = "a"
    module.init.return_value.disabled = False
    module.init.return_value.project = "of a sweep"
    module.init.return_value.entity = ""
    module.Error = type("Error", (Exception,), {})
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def end_with(error: BaseException | None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize("error", [None, UserError("the training diverged"), SystemExit(143)])
@pytest.mark.parametrize("dies", [False, True])
def test_the_end_of_a_run_in_wandb(error: Any, dies: bool, wandb: Any, capsys: pytest.CaptureFixture) -> None:
    """It gets an exit code, or `wandb.init` would return it to the next run of the process.

    If W&B dies, that is a warning: the error, the exit code and the results are as they would be.
    """
    if dies:
        wandb.finish.side_effect = RuntimeError("the connection was lost")
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected as raised, Run(qdagger.Args(track=True)) as run:
        log(run, range(3))
        end_with(error)
    assert error is None or raised.value is error
    wandb.finish.assert_called_once_with(exit_code=0 if error is None else 1)
    assert [("W&B failed (the connection was lost)" in warning) for warning in warnings_of(capsys)] == [True] * dies
    assert points_of(run.directory) == [(0, 0), (1, 1), (2, 2)]
    if error is None:
        run.finish(RETURNS)
        assert (run.directory / "finished").exists()
        assert not (run.directory / "checkpoint").exists()


def test_a_run_whose_wandb_cannot_start_can_be_resumed_again(wandb: Any, capsys: pytest.CaptureFixture) -> None:
    """Its directory is not locked, although a notebook keeps the error; then it has the settings of the sweep."""
    with Run(qdagger.Args()) as run:
        pass
    args = qdagger.Args(track=True, resume=str(run.directory))
    wandb.init.side_effect = wandb.Error("no API key")
    errors = []
    for _ in range(2):
        with pytest.raises(UserError, match=r"W&B can't start: no API key; .*wandb login") as error, Run(args):
            pass
        errors.append(error)
    wandb.init.side_effect = None
    with Run(args):
        assert args.wandb_project_name == "of a sweep"
    with Run(dataclasses.replace(args)):
        assert wandb.init.call_args.kwargs["id"] == "a"
        assert wandb.init.call_args.kwargs["resume"] == "allow"
    assert only(run.directory.glob("wandb_id")).read_text() == "a"


def test_a_run_resumed_inside_its_directory(
    wandb: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """W&B and the videos have the run's name, and the command that is printed resumes the run."""
    monkeypatch.setattr(qdagger.Args, "script", qdagger.__file__)
    with Run(qdagger.Args()) as run:
        pass
    run_dir = folder / run.directory
    for inside, resume in ((run_dir, "."), (run_dir / "checkpoint", "..")):
        monkeypatch.chdir(inside)
        args = parse_args(qdagger.Args, ["--resume", resume, "--track", "--capture-video"])
        with contextlib.suppress(SystemExit), Run(args) as run:
            signal.raise_signal(signal.SIGTERM)
            run.exit_if_signalled()
        assert run.video_dir == Path("videos", run_dir.name)
        assert wandb.init.call_args.kwargs["name"] == run_dir.name
        (command,) = re.findall("resume with: (.*)", capsys.readouterr().out)
        assert parse_args(qdagger.Args, shlex.split(command)[2:]).resume == str(run_dir)
