"""The benchmark runner on a real Slurm, with runs of a minute or so; ``make test-slurm`` starts one if it can."""

import itertools
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
ENV_IDS, SEEDS = ("Pong", "Breakout"), (1, 2)


def slurm_runs() -> bool:
    return shutil.which("sinfo") is not None and subprocess.run(["sinfo"], capture_output=True).returncode == 0


pytestmark = [pytest.mark.slurm, pytest.mark.skipif(not slurm_runs(), reason="no Slurm is running: sinfo fails")]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder to submit from, with the script."""
    (tmp_path / "cleanrl").mkdir()
    shutil.copy(ROOT / "tests" / "fake_run.py", tmp_path / "cleanrl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    slurm("scancel", "--me")


def slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


held: dict[str, float] = {}


def states() -> dict[str, str]:
    """What squeue shows. Slurm holds back for two minutes what is queued again; here it may be five seconds."""
    waiting = slurm("squeue", "--me", "--noheader", "--array", "--states=PENDING", "--format=%i %r").splitlines()
    for job_id, reason in (line.split() for line in waiting):
        if reason != "BeginTime":
            held.pop(job_id, None)
        elif time.monotonic() > held.setdefault(job_id, time.monotonic()) + 5:
            subprocess.run(["scontrol", "update", f"jobid={job_id}", "StartTime=now"], capture_output=True)
    return dict(
        line.split() for line in slurm("squeue", "--me", "--noheader", "--array", "--format=%i %T").splitlines()
    )


def running() -> list[str]:
    return [job_id for job_id, state in states().items() if state == "RUNNING"]


def eventually(condition: Callable[[], object], seconds: int = 300) -> object:
    for _ in range(seconds):
        if result := condition():
            return result
        time.sleep(1)
    raise AssertionError(f"it did not come to that in {seconds} seconds:\n{everything()}")


def everything() -> str:
    """For whoever has to find out why a test failed."""
    logs = [f"{path}:\n{path.read_text()}" for path in sorted(Path("logs").rglob("*log*")) if path.is_file()]
    return "\n".join([str(states()), *logs])


def submit(command: str, *flags: str) -> int:
    """The benchmark command; returns how many jobs it has submitted."""
    runner = [sys.executable, "-m", "cleanrl_utils.benchmark", "--env-ids", *ENV_IDS, "--num-seeds", str(len(SEEDS))]
    flags = ("--cluster", "slurm", "--slurm-mem-gb", "1", *flags)
    output = slurm(*runner, "--command", f"python cleanrl/fake_run.py {command}", *flags)
    return int(re.search(r"^(\d+) submitted", output, re.MULTILINE)[1])


def steps(env_ids: tuple[str, ...] = ENV_IDS, seeds: tuple[int, ...] = SEEDS) -> list[list[int]]:
    """The steps of all runs, which must be one for each game and seed."""
    names = sorted(path.name.rpartition("__")[0] for path in Path("runs").iterdir())
    assert names == sorted(f"{env_id}__fake_run__{seed}" for env_id, seed in itertools.product(env_ids, seeds))
    return [[int(line) for line in path.read_text().split()] for path in Path("runs").glob("*/steps.txt")]


def notes(text: str) -> int:
    """How often a log says this."""
    return sum(len(re.findall(text, path.read_text())) for path in Path("logs").glob("*.log"))


def two_scripts() -> list[psutil.Process]:
    """The runs that go on at this moment, if there are two and they have had time for a step."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "cleanrl/fake_run.py" in process.cmdline() and process.cwd() == str(Path.cwd()):
                found += [process] if time.time() > process.create_time() + 3 else []
    return found if len(found) == 2 else []


def test_a_time_limit_shorter_than_the_run():
    """Slurm's shortest limit, a minute, of which its signal leaves twenty or thirty seconds."""
    assert submit("--steps 140 --seconds 1 --save-every 0", "--num-seeds", "1", "--slurm-time", "1") == 2
    eventually(lambda: not states(), seconds=600)
    assert steps(seeds=(1,)) == [list(range(140))] * 2
    for path in Path("logs", "slurm").glob("*_log.err"):
        assert path.read_text().count("this job is timed-out") > 3  # where submitit ends of itself


def test_a_sweep_that_is_interrupted_in_every_way_has_every_step_once():
    command = "--steps 40 --seconds 1 --save-seconds 4"
    assert submit(command, "--workers", "2") == 4
    eventually(two_scripts)
    assert submit(command, "--workers", "2") == 0  # all are queued or running

    slurm("scancel", "--me")
    assert submit(command, "--workers", "2") == 4  # while they are still saving
    assert notes("stopped, exit code 143") == 2

    eventually(two_scripts)[0].kill()
    eventually(lambda: notes("failed, killed by SIGKILL") == 1)

    # A preemption that SIGTERM announces.
    eventually(two_scripts)
    with suppress(subprocess.TimeoutExpired):  # Slurm 22.05 sends it and says for two minutes that it could not
        subprocess.run(["scancel", "--signal=TERM", running()[0]], timeout=2)
    eventually(lambda: notes("stopped, exit code 143") == 3)

    # One that nothing announces.
    eventually(two_scripts)
    slurm("scontrol", "requeue", running()[0])
    eventually(lambda: notes("stopped, exit code 143") == 4)

    eventually(lambda: not states(), seconds=600)
    assert submit(command) == 1  # one has failed, and no other
    eventually(lambda: not states())
    assert steps() == [list(range(40))] * 4
    assert submit(command) == 0


def test_a_run_that_can_not_save_is_not_begun_for_ever():
    """As a script of CleanRL's own with a limit that is too short."""
    Path("cleanrl/plain.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    runner = [sys.executable, "-m", "cleanrl_utils.benchmark", "--env-ids", "Pong", "--num-seeds", "1"]
    slurm(*runner, "--command", "python cleanrl/plain.py", "--cluster", "slurm", "--slurm-time", "1")
    eventually(lambda: notes("begun"))
    time.sleep(16)
    for job_id in running():
        slurm("scancel", "--signal=USR2", job_id)
    eventually(lambda: not states())
    assert notes("begun") == 1
    assert notes("failed: no checkpoint was written in all of --slurm-time, give it more") == 1
