"""Tests of the benchmark runner on a real Slurm, with runs of a minute: ``make test-slurm``."""

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
from helpers import fake_steps

ROOT = Path(__file__).resolve().parent.parent
HAS_SLURM = shutil.which("sinfo") is not None and subprocess.run(["sinfo"], capture_output=True).returncode == 0
pytestmark = [
    pytest.mark.posix,
    pytest.mark.slurm,
    pytest.mark.skipif(not HAS_SLURM, reason="no Slurm is running: sinfo fails"),
]
CALLER = {  # of a job that the runner is started in
    "SLURM_JOB_ID": "999",
    "SLURM_MEM_PER_CPU": "100",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPUS_PER_TASK": "64",
    "SRUN_CPUS_PER_TASK": "64",
}
SBATCH = {"SBATCH_MEM_PER_NODE": "1G"}  # options of sbatch, as a user sets them
first_seen: dict[str, float] = {}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to an empty directory with the script, as in a job; cancel all jobs at the end."""
    (tmp_path / "cleanrl").mkdir()
    shutil.copy(ROOT / "tests" / "fake_run.py", tmp_path / "cleanrl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in (CALLER | SBATCH).items():
        monkeypatch.setenv(name, value)
    yield
    slurm("scancel", "--me")


def slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def states() -> dict[str, str]:
    """Return the state of every job. Requeued jobs, which Slurm holds for two minutes, are released after 5 seconds."""
    jobs = [line.split() for line in slurm("squeue", "--me", "--noheader", "--array", "--format=%i %T %r").splitlines()]
    for job_id, _, reason, *_ in jobs:
        if reason != "BeginTime":
            first_seen.pop(job_id, None)
        elif time.monotonic() > first_seen.setdefault(job_id, time.monotonic()) + 5:
            subprocess.run(["scontrol", "update", f"jobid={job_id}", "StartTime=now"], capture_output=True)
    return {job_id: state for job_id, state, *_ in jobs}


def running() -> list[str]:
    return [job_id for job_id, state in states().items() if state == "RUNNING"]


def eventually(condition: Callable[[], object], seconds: int = 600) -> object:
    for _ in range(seconds):
        states()
        if result := condition():
            return result
        time.sleep(1)
    logs = [f"{path}:\n{path.read_text()}" for path in sorted(Path("logs").rglob("*log*")) if path.is_file()]
    raise AssertionError("\n".join([f"the condition was not met in {seconds} seconds: {states()}", *logs]))


def submit(command: str, *flags: str, env_ids: tuple[str, ...] = ("Pong", "Breakout")) -> int:
    """Run the benchmark command and return the number of submitted jobs."""
    runner = [sys.executable, "-m", "cleanrl_utils.benchmark", "--env-ids", *env_ids, "--command", command]
    runner += ["--cluster", "slurm", *flags]
    output = slurm(*runner)
    return sum(map(int, re.findall(r"^(\d+) submitted", output, re.MULTILINE)))


def count(text: str) -> int:
    return sum(path.read_text().count(text) for path in Path("logs").glob("*.log"))


def two_scripts() -> list[psutil.Process]:
    """Return the running scripts, if there are two that have had time for a step."""
    scripts = []
    for process in psutil.process_iter(["cwd", "cmdline", "create_time"]):
        is_script = process.info["cwd"] == str(Path.cwd()) and "cleanrl/fake_run.py" in process.info["cmdline"][1:2]
        if is_script and time.time() > process.info["create_time"] + 3:
            scripts.append(process)
    return scripts if len(scripts) == 2 else []


def test_a_time_limit_shorter_than_the_run():
    """The shortest time limit of Slurm is a minute. Its signal comes after 20 to 30 seconds."""
    command = "python cleanrl/fake_run.py --steps 140 --seconds 1 --save-every 0"
    assert submit(command, "--num-seeds", "1", "--slurm-time", "1") == 2
    eventually(lambda: not states())
    assert fake_steps(seeds=(1,)) == [list(range(140))] * 2
    assert count("--resume") > 7


def test_every_step_is_logged_once_after_all_kinds_of_interruption():
    command = "python cleanrl/fake_run.py --steps 40 --seconds 1 --save-seconds 4"
    flags = ["--num-seeds", "2", "--workers", "2"]
    assert submit(command, *flags) == 4
    eventually(two_scripts)
    assert submit(command, *flags) == 0  # All are queued or running.

    slurm("scancel", "--me")
    eventually(lambda: not states())  # The runs have saved.
    assert submit(command, *flags) == 4
    assert count("exit code 143") == 2

    eventually(two_scripts)[0].kill()
    eventually(lambda: count("killed by SIGKILL") == 1)

    eventually(two_scripts)  # A preemption that SIGTERM announces.
    with suppress(subprocess.TimeoutExpired):  # scancel of Slurm 22.05 sends it and then hangs.
        subprocess.run(["scancel", "--signal=TERM", running()[0]], timeout=2)
    eventually(lambda: count("exit code 143") == 3)

    eventually(two_scripts)  # A preemption without announcement.
    slurm("scontrol", "requeue", running()[0])
    eventually(lambda: count("exit code 143") == 4)

    eventually(lambda: not states())
    assert submit(command, *flags) == 1  # the one that has failed
    eventually(lambda: not states())
    assert fake_steps(seeds=(1, 2)) == [list(range(40))] * 4
    assert submit(command, *flags) == 0
