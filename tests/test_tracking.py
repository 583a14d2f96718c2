"""The logs of a run: event files that TensorBoard reads, W&B, progress, and the time between checkpoints."""

import contextlib
import dataclasses
import errno
import re
import signal
import subprocess
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
from tensorboard.summary.writer.record_writer import RecordWriter

from cleanrl_utils import run as run_module
from cleanrl_utils.checkpoint import Checkpoints
from cleanrl_utils.errors import UserError, one_line_errors
from cleanrl_utils.run import Run
from cleanrl_utils.tracking import Writer, commit_of, make_run_dir

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


def log(writer: Writer | Run, steps: range) -> None:
    """Log points of the curve x, whose values are the steps."""
    add = writer.log if isinstance(writer, Run) else writer.add_scalar
    for step in steps:
        add("x", step, step)


def test_run_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has a directory of its own: the same command in the same second is refused."""
    monkeypatch.setattr(time, "time", lambda: 10**9 + 0.5)
    args = qdagger.Args(env_id="ALE/Pong-v5", exp_name="test")
    assert make_run_dir(args) == Path("runs/ALE-Pong-v5__test__1__1000000000")
    with pytest.raises(UserError, match="File exists"):
        make_run_dir(args)


def test_commit(folder: Path) -> None:
    """It is the commit of the script's checkout, and shows that files were changed or that the script is not in it."""

    def git(*words: str) -> None:
        options = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *options, *words], check=True, capture_output=True)

    script = folder / "script.py"
    script.write_text("x = 1")
    assert commit_of(script) == ""
    git("init")
    git("add", ".")
    git("commit", "--message=first")
    commit = commit_of(script)
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    copy = folder / "copy.py"
    copy.write_text("x = 2")
    assert (commit_of(script), commit_of(copy)) == (commit, f"{commit}-dirty")
    script.write_text("x = 3")
    assert (commit_of(script), commit_of(copy)) == (f"{commit}-dirty", f"{commit}-dirty")


# ==================== event files ====================


def test_points_after_the_checkpoint_are_removed(folder: Path) -> None:
    """Also at the step of the checkpoint, and those of a process that was killed before its first checkpoint."""
    writer = Writer(folder)
    log(writer, range(5))
    state = writer.dump()
    log(writer, range(4, 8))
    writer.close()
    for _ in range(2):
        writer = Writer(folder, state)
        log(writer, range(5, 9))
        state_of_second = writer.dump()
        writer.close()
    assert points_of(folder) == [(i, i) for i in range(9)]
    Writer(folder, state_of_second).close()
    assert points_of(folder) == [(i, i) for i in range(9)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
def test_a_log_that_cannot_be_written(capsys: pytest.CaptureFixture) -> None:
    """It ends the run in one line, and the run can be resumed."""

    def train() -> None:
        with one_line_errors(), Run(qdagger.Args()) as run, pytest.MonkeyPatch.context() as patch:
            log(run, range(10))
            run.save()
            full = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(RecordWriter, "write", mock.Mock(side_effect=full))
            log(run, range(10, 1000))

    with pytest.raises(SystemExit, match="1"):
        train()
    line = "error: a file could not be opened or written (No space left on device); make room or allow it, and "
    assert capsys.readouterr().err.splitlines()[-1] == f"{line}start again, a training with `--resume`"
    run_dir = only(Path("runs").iterdir())
    with Run(qdagger.Args(resume=str(run_dir))) as run:
        log(run, range(10, 15))
    assert points_of(run_dir) == [(i, i) for i in range(15)]


# ==================== a run ====================


def test_only_finite_values_are_logged() -> None:
    """A NaN or infinite value ends the run with a line about divergence; the points before it are written."""
    for seed, value in enumerate((np.nan, -np.inf, np.float32(np.inf))):
        with Run(qdagger.Args(seed=seed)) as run:
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
    module.Error = type("Error", (Exception,), {})
    module.init.return_value.id = "a"
    module.init.return_value.disabled = False
    module.init.return_value.project = "of a sweep"
    module.init.return_value.entity = ""
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


def test_a_run_whose_wandb_cannot_start_can_be_resumed_again(wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory is not locked, although a notebook keeps the error; then it has the settings of the sweep.

    Resumed inside its directory, it has the run's name.
    """
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
    assert only(run.directory.glob("wandb_id")).read_text() == "a"
    monkeypatch.chdir(run.directory)
    with Run(dataclasses.replace(args, resume=".")):
        expected = {"id": "a", "resume": "allow", "name": run.directory.name}
        assert expected.items() <= wandb.init.call_args.kwargs.items()
