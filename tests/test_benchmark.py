"""Tests of the benchmark runner on this machine, with ``fake_run.py`` in place of a training script."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tyro
from helpers import REPO, fake_steps

from cleanrl_utils import benchmark as runner_module
from cleanrl_utils.benchmark import Args, main, make_jobs, run_environment, visible_gpus
from cleanrl_utils.errors import UserError

pytestmark = pytest.mark.posix
RUNNER = [sys.executable, "-m", "cleanrl_utils.benchmark"]
FAKE = "python cleanrl/fake_run.py"
PONG = ["--env-ids", "Pong", "--num-seeds", "1", "--workers", "1", "--command"]
BOTH = ["--env-ids", "Pong", "Breakout", "--num-seeds", "1", "--workers", "2", "--command"]
FOUR = [*BOTH[:3], "--num-seeds", "2", "--workers", "2", "--command"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to an empty directory with the script; kill all runners at the end."""
    (tmp_path / "cleanrl").mkdir()
    shutil.copy(REPO / "tests" / "fake_run.py", tmp_path / "cleanrl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    for child in psutil.Process().children():
        child.kill()


def benchmark(*flags: str) -> int:
    """Run the runner in this process and return its exit code."""
    try:
        main(tyro.cli(Args, args=flags))
    except SystemExit as error:
        return error.code
    return 0


def spawn(*flags: str) -> subprocess.Popen:
    """Start the runner in a process group of its own, as a shell does; it writes to out.txt."""
    with open("out.txt", "a") as out:
        return subprocess.Popen([*RUNNER, *flags], stdout=out, stderr=out, process_group=0)


def program(name: str, body: str) -> None:
    """Write a shell script to a directory of PATH."""
    path = Path("bin", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def eventually(condition: Callable[[], object]) -> object:
    """Wait for a condition, for a minute at most."""
    for _ in range(1200):
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError("the condition was not met in a minute")


def done(env_id: str, seed: int = 1) -> int:
    """Return the number of logged steps."""
    paths = Path("runs").glob(f"{env_id}__fake_run__{seed}__*/steps.txt")
    return sum(len(path.read_text().splitlines()) for path in paths)


@pytest.mark.parametrize("killed", ["run", "runner"])
def test_a_killed_benchmark_that_is_started_again_logs_every_step_once(killed: str):
    """A killed runner leaves its runs running. They are locked, so the next runner can't resume them yet."""
    flags = [*FOUR, f"{FAKE} --steps 60"]
    runner = spawn(*flags)
    eventually(lambda: done("Pong") > 7 and done("Breakout") > 7)
    run = next(child for child in psutil.Process(runner.pid).children() if "Pong" in child.cmdline())
    (run if killed == "run" else runner).kill()
    assert runner.wait(60) == (1 if killed == "run" else -signal.SIGKILL)
    assert Path("out.txt").read_text().count("seed 1: killed by SIGKILL, see logs/") == (killed == "run")
    assert (done("Breakout", 2) == 60) == (killed == "run")  # The other runs go on.
    benchmark(*flags)
    assert benchmark(*flags) == 0
    assert fake_steps(seeds=(1, 2)) == [list(range(60))] * 4
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    assert benchmark(*flags) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_save_after_a_signal_behind_a_wrapper_that_passes_it_on(number: int):
    flags = [*FOUR, f"timeout 60 {FAKE} --steps 60 --save-every 0 --save-seconds 0.5"]
    runner = spawn(*flags)
    eventually(lambda: done("Pong") > 7 and done("Breakout") > 7)
    if number == signal.SIGINT:
        os.killpg(runner.pid, number)  # Ctrl-C reaches the runs as well.
    else:
        runner.send_signal(number)
    assert runner.wait(60) == 128 + number
    assert len(list(Path("runs").glob("*/checkpoint/1.state"))) == 2
    assert re.search("(.*  not started  .*\n){2}the same command again skips", Path("out.txt").read_text())
    assert benchmark(*flags) == 0
    assert fake_steps(seeds=(1, 2)) == [list(range(60))] * 4


def test_a_failing_run_does_not_stop_others(capsys: pytest.CaptureFixture):
    flags = [*PONG, FAKE, "--env-ids", "Broken", "Pong"]
    assert benchmark(*flags) == 1
    output = capsys.readouterr().out
    log = re.search(r"^Broken seed 1: exit code 1, see (logs/Broken__.*)$", output, re.MULTILINE)[1]
    assert "RuntimeError: the emulator broke at step 7\n" in Path(log).read_text()
    assert re.search(r"^Pong +1  finished +runs/Pong__fake_run__1__\d+$", output, re.MULTILINE)
    assert benchmark(*flags) == 1  # It fails again, from its checkpoint.
    assert "Pong seed 1: running" not in capsys.readouterr().out
    assert all(part[:8] == list(range(8)) for part in fake_steps(("Broken", "Pong")))


@pytest.mark.parametrize("program", ["", "no-poetry run python "])
def test_a_program_that_cannot_be_started_is_one_line(program: str):
    with pytest.raises(UserError, match=r"a run can't be started: .*; correct --command"):
        benchmark(*BOTH, f"{program}cleanrl/fake_run.py")


def test_a_run_is_known_by_its_flags_and_repeated_when_its_directory_is_deleted():
    for flags in ("--steps 6", "--steps 0", "--steps 6"):
        assert benchmark(*PONG, f"{FAKE} {flags}") == 0
    assert len(list(Path("runs").iterdir())) == 2
    shutil.rmtree("runs")
    assert benchmark(*PONG, f"{FAKE} --steps 6") == 0
    assert fake_steps(("Pong",)) == [list(range(6))]


def test_a_command_of_cleanrl_runs_unchanged():
    for name in ("xvfb-run", "poetry"):  # as in its benchmark/qdagger.sh
        program(name, f'shift\nPATH="{Path(sys.executable).parent}:$PATH" exec "$@"')
    script = Path("cleanrl/qdagger_dqn_atari_impalacnn.py")
    script.write_text("import sys\nprint(*sys.argv[1:], file=open('ran.txt', 'a'))\n")
    block = """OMP_NUM_THREADS=1 xvfb-run -a poetry run python -m cleanrl_utils.benchmark \\
    --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 --num-seeds 2 --start-seed 6 --workers 1 \\
    --command "poetry run python cleanrl/qdagger_dqn_atari_impalacnn.py --track --capture_video"
"""
    games = ("Pong", "BeamRider")
    lines = [f"--track --capture_video --env-id {g}NoFrameskip-v4 --seed {s}" for s in (6, 7) for g in games]
    subprocess.run(["sh", "-c", block])
    assert Path("ran.txt").read_text().splitlines() == lines


def test_without_workers_the_commands_are_printed(capsys: pytest.CaptureFixture):
    """A game that is given twice counts once."""
    command = f"{FAKE} --exp-name 'a b' --teacher teachers/{{env_id}}-dqn_atari-seed1"
    assert benchmark("--env_ids", "Pong", "ALE/Pong-v5", "Pong", "--num-seeds", "1", "--command", command) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{FAKE} --exp-name 'a b' --teacher teachers/Pong-dqn_atari-seed1 --env-id Pong --seed 1",
        f"{FAKE} --exp-name 'a b' --teacher teachers/ALE-Pong-v5-dqn_atari-seed1 --env-id ALE/Pong-v5 --seed 1",
    ]
    assert not Path("logs").exists()


@pytest.mark.parametrize("command", ["python cleanrl/nothing.py", "python -m cleanrl.fake_run"])
def test_a_command_without_a_script_is_one_line(command: str):
    with pytest.raises(UserError, match=r"^--command names no script in /.*; write "):
        make_jobs(Args(["Pong"], command, workers=1))


def test_windows_runs_none(monkeypatch: pytest.MonkeyPatch):
    """It prints the commands. test_windows.py has the imports of this module."""
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match="needs Linux or macOS"):
        benchmark(*PONG, FAKE)


def test_runs_get_their_share_of_cores_and_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runner_module, "available_cores", lambda: 7)
    assert benchmark(*BOTH, FAKE) == 0
    for name in ("Pong", "Breakout"):
        log = next(Path("logs").glob(f"{name}__*.log")).read_text()
        assert f"python {sys.prefix}\n" in log
        assert "OMP_NUM_THREADS 3\nCUDA_VISIBLE_DEVICES GPU-8932f937\n" in log


def test_threads_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert run_environment(0, 2, ["0"])["OMP_NUM_THREADS"] == "6"


def test_gpus_are_found_and_shared(monkeypatch: pytest.MonkeyPatch):
    program("nvidia-smi", "echo No devices were found; exit 6")
    assert visible_gpus() == []
    gpus = "".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\n" for i in range(2))
    program("nvidia-smi", f'test "$*" = --list-gpus && printf "{gpus}"')
    assert visible_gpus() == ["GPU-0", "GPU-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    for workers, of_workers in ((2, "01"), (4, "0120"), (9, "012012012")):
        environments = [run_environment(worker, workers, visible_gpus()) for worker in range(workers)]
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == list(of_workers)


def test_a_slurm_job_trains_its_seed_and_is_queued_again_after_the_time_limit():
    """With programs in place of Slurm's: the time limit's signal reaches the processes of srun, not the job's shell."""
    group = 'python3 -c "import os, sys; os.setsid(); os.execvp(sys.argv[1], sys.argv[1:])"'
    program("srun", f'echo "$SRUN_CPUS_PER_TASK" >>srun.txt\n{group} "$@" & echo $! >runner.txt\nwait $!')
    program("scontrol", 'echo "$*" >>scontrol.txt')
    job = [str(REPO / "benchmark" / "slurm.sh"), "--env-ids", "Pong", "--command", f"{FAKE} --steps 60 --save-every 0"]
    slurm = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "5"}
    stopped = subprocess.Popen(job, env=os.environ | slurm)
    eventually(lambda: done("Pong", 3) > 7)
    os.killpg(int(Path("runner.txt").read_text()), signal.SIGUSR2)  # the runner and its run
    assert stopped.wait(60) == 128 + signal.SIGUSR2
    assert Path("scontrol.txt").read_text() == "requeue 7_3\n"
    assert subprocess.run(job, env=os.environ | slurm).returncode == 0
    assert fake_steps(("Pong",), (3,)) == [list(range(60))]
    assert Path("srun.txt").read_text() == "5\n5\n"
    assert Path("scontrol.txt").read_text() == "requeue 7_3\n"


@pytest.mark.parametrize("name", ["qdagger", "dqn", "qdagger_small"])
def test_the_published_benchmarks_use_flags_that_their_scripts_accept(monkeypatch: pytest.MonkeyPatch, name: str):
    """The shell is dash on Debian, and bash 3.2 on macOS."""
    monkeypatch.syspath_prepend(REPO / "benchmark")
    program("python", 'for word; do printf "%s\\0" "$word"; done; printf "\\n\\0"')  # prints its arguments
    shell_script = str(REPO / "benchmark" / f"{name}.sh")
    output = subprocess.run(["sh", shell_script, "--workers", "0"], check=True, capture_output=True).stdout
    monkeypatch.chdir(REPO)
    calls = [call.split("\0")[:-1] for call in output.decode().split("\n\0")[:-1]]
    assert len(calls) > 1
    for call in calls:
        assert call[:2] == ["-m", "cleanrl_utils.benchmark"]
        args = tyro.cli(Args, args=call[2:])
        assert args.workers == 0
        for job in make_jobs(args):
            args = tyro.cli(importlib.import_module(Path(job.command[1]).stem).Args, args=job.command[2:])
            teacher = getattr(args, "teacher_policy_hf_repo", None) or "teachers"
            made_before = f"runs/{job.env_id}__qdagger_dqn_atari_impalacnn__2", f"runs/{job.env_id}__ppo_teacher__1"
            assert (REPO / teacher).is_dir() or teacher.startswith(made_before)
