"""Tests of the benchmark runner on this machine, with ``fake_run.py`` in place of a training script."""

import fcntl
import importlib
import os
import pty
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
import tyro

from cleanrl_utils import benchmark as runner_module
from cleanrl_utils.benchmark import Args, Job, main, make_jobs, run_environment, run_locally, run_on_node, visible_gpus
from cleanrl_utils.errors import UserError

pytestmark = pytest.mark.posix
ROOT = Path(__file__).resolve().parent.parent
RUNNER = [sys.executable, "-m", "cleanrl_utils.benchmark"]
FAKE = "python cleanrl/fake_run.py"
PONG = ["--env-ids", "Pong", "--num-seeds", "1", "--workers", "1", "--command"]
BOTH = ["--env-ids", "Pong", "Breakout", "--num-seeds", "1", "--workers", "2", "--command"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to an empty directory with the script; kill all runners at the end."""
    (tmp_path / "cleanrl").mkdir()
    shutil.copy(ROOT / "tests" / "fake_run.py", tmp_path / "cleanrl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)  # a script that ran in this process sets it
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    for child in psutil.Process().children():
        child.kill()


def benchmark(*flags: str) -> int:
    """Run the runner in this process and return its exit code."""
    with mock.patch.object(sys, "argv", ["benchmark", *flags]):
        try:
            main()
        except SystemExit as error:
            return error.code or 0
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


def steps(env_ids: tuple[str, ...] = ("Pong", "Breakout"), seeds: tuple[int, ...] = (1,)) -> list[list[int]]:
    """Return the logged steps of all runs. There must be one run for each environment and seed."""
    names = sorted(path.name.rpartition("__")[0] for path in Path("runs").iterdir())
    assert names == sorted(f"{env_id}__fake_run__{seed}" for env_id in env_ids for seed in seeds)
    return [[int(line) for line in path.read_text().split()] for path in Path("runs").glob("*/steps.txt")]


def log_of(env_id: str) -> str:
    """Return the logs of a game."""
    return "".join(path.read_text() for path in sorted(Path("logs").glob(f"{env_id}__*.log")))


@pytest.mark.parametrize("killed", ["run", "runner"])
def test_a_killed_benchmark_that_is_started_again_logs_every_step_once(killed: str):
    """A killed runner leaves its runs running. The next one does not start them again."""
    flags = ["--env-ids", "Pong", "Breakout", "--num-seeds", "2", "--workers", "2", "--command", f"{FAKE} --steps 60"]
    runner = spawn(*flags)
    eventually(lambda: done("Pong") > 7 and done("Breakout") > 7)
    run = next(child for child in psutil.Process(runner.pid).children() if "Pong" in child.cmdline())
    (run if killed == "run" else runner).kill()
    assert runner.wait(60) == (1 if killed == "run" else -signal.SIGKILL)
    assert (done("Breakout", 2) == 60) == (killed == "run")  # The other runs go on.
    benchmark(*flags)
    assert benchmark(*flags) == 0
    assert steps(seeds=(1, 2)) == [list(range(60))] * 4
    logs = "".join(path.read_text() for path in Path("logs").glob("*.log"))
    assert logs.count("--seed 1 --resume runs/") == (1 if killed == "run" else 0)
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    assert benchmark(*flags) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before


@pytest.mark.parametrize(
    ("number", "wrapper"), [(signal.SIGINT, ""), (signal.SIGINT, "timeout 60 "), (signal.SIGTERM, "timeout 60 ")]
)
def test_runs_save_after_a_signal_also_behind_a_wrapper_that_passes_it_on(number: int, wrapper: str):
    command = f"{wrapper}{FAKE} --steps 60 --save-every 0 --save-seconds 0.5"
    flags = ["--env-ids", "Pong", "Breakout", "--num-seeds", "2", "--workers", "2", "--command", command]
    runner = spawn(*flags)
    eventually(lambda: done("Pong") > 7 and done("Breakout") > 7)
    if number == signal.SIGINT:
        os.killpg(runner.pid, number)  # Ctrl-C reaches the runs as well.
    else:
        runner.send_signal(number)
    assert runner.wait(60) == 128 + number
    assert len(list(Path("runs").glob("*/checkpoint/1.state"))) == 2
    assert "2 interrupted, 2 pending\nthe same command again skips" in Path("out.txt").read_text()
    assert benchmark(*flags) == 0
    assert steps(seeds=(1, 2)) == [list(range(60))] * 4


def test_a_failing_run_does_not_stop_others(capsys: pytest.CaptureFixture):
    flags = ["--env-ids", "Broken", "Pong", "--num-seeds", "1", "--workers", "1", "--command", FAKE]
    assert benchmark(*flags) == 1
    output = capsys.readouterr().out
    path = re.search(r"^Broken seed 1: failed, see (logs/Broken__fake_run__1__\w+.log)$", output, re.MULTILINE)[1]
    assert "RuntimeError: the emulator broke at step 7\n" in Path(path).read_text()
    assert re.search(r"^Pong +1  finished +runs/Pong__fake_run__1__\d+$", output, re.MULTILINE)
    assert "\n1 failed, 1 finished\n" in output
    assert benchmark(*flags) == 1  # It fails again, from its checkpoint.
    assert "Pong seed 1: running" not in capsys.readouterr().out
    assert all(part[:8] == list(range(8)) for part in steps(("Broken", "Pong")))


def test_a_run_is_known_by_its_flags_and_repeated_when_its_directory_is_deleted():
    for flags in ("--steps 6", "--steps 0", "--steps 6"):
        assert benchmark(*PONG, f"{FAKE} {flags}") == 0
    assert len(list(Path("runs").iterdir())) == 2
    shutil.rmtree("runs")
    assert benchmark(*PONG, f"{FAKE} --steps 6") == 0
    assert steps(("Pong",)) == [list(range(6))]


def test_a_run_of_another_process_is_not_started():
    (job,) = make_jobs(Args(["Pong"], FAKE, num_seeds=1))
    job.log.parent.mkdir()
    with job.log.open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert benchmark(*BOTH, FAKE) == 1
        assert steps(("Breakout",)) == [list(range(20))]
    assert benchmark(*BOTH, FAKE) == 0
    assert steps() == [list(range(20))] * 2


def test_a_command_of_cleanrl_runs_unchanged():
    for name in ("xvfb-run", "poetry"):  # as in its benchmark/qdagger.sh
        program(name, f'shift\nPATH="{Path(sys.executable).parent}:$PATH" exec "$@"')
    script = """import os, sys
print(*sys.argv[1:], file=open("ran.txt", "a"))
if "7" in sys.argv and not os.path.exists("mended"):
    sys.exit(1)
run_dir = f"runs/{sys.argv[-3]}-{sys.argv[-1]}"
print("run directory:", run_dir)
os.makedirs(f"{run_dir}/finished")
"""
    Path("cleanrl/qdagger_dqn_atari_impalacnn.py").write_text(script)
    block = """OMP_NUM_THREADS=1 xvfb-run -a poetry run python -m cleanrl_utils.benchmark \\
    --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 --num-seeds 2 --start-seed 6 --workers 1 \\
    --command "poetry run python cleanrl/qdagger_dqn_atari_impalacnn.py --track --capture_video"
"""
    games = ("Pong", "BeamRider")
    lines = [f"--track --capture_video --env-id {g}NoFrameskip-v4 --seed {s}" for s in (6, 7) for g in games]
    assert subprocess.run(["sh", "-c", block]).returncode == 1
    assert Path("ran.txt").read_text().splitlines() == lines
    Path("mended").touch()
    assert subprocess.run(["sh", "-c", block]).returncode == 0
    assert Path("ran.txt").read_text().splitlines() == lines + lines[2:]


@pytest.mark.parametrize("flags", [[], ["--workers", "0"], ["--workers", "2", "--dry-run"]])
def test_a_dry_run_prints_the_commands(capsys: pytest.CaptureFixture, flags: list[str]):
    command = f"{FAKE} --exp-name 'a b' --teacher teachers/{{env_id}}-dqn_atari-seed1"
    assert benchmark("--env_ids", "Pong", "ALE/Pong-v5", "--num-seeds", "1", "--command", command, *flags) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{FAKE} --exp-name 'a b' --teacher teachers/Pong-dqn_atari-seed1 --env-id Pong --seed 1",
        f"{FAKE} --exp-name 'a b' --teacher teachers/ALE-Pong-v5-dqn_atari-seed1 --env-id ALE/Pong-v5 --seed 1",
    ]
    assert not Path("logs").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python cleanrl/nothing.py", "names no script in /.*; write "),
        ("cleanrl/fake_run.py --track", 'is not a program; write "python cleanrl/fake_run.py --track"'),
        ("no-poetry run python cleanrl/fake_run.py --steps 7 --exp-name 'a b'", "run.py --steps 7 --exp-name 'a b'\"$"),
        ("python -m cleanrl.fake_run", "names no script in"),
        ("python cleanrl/fake_run.py --exp-name 'a", "No closing quotation; close the quotation"),
    ],
)
def test_a_command_without_a_program_or_script_is_one_line(command: str, message: str):
    with pytest.raises(UserError, match=message) as error:
        make_jobs(Args(["Pong"], command, workers=1))
    assert "\n" not in str(error.value)


def test_each_run_is_a_job_once():
    """A game that is given twice counts once; no seeds are an error."""
    assert len(make_jobs(Args(["Pong", "Pong"], FAKE, num_seeds=2))) == 2
    with pytest.raises(UserError, match="--num-seeds is 0; it must be at least 1"):
        make_jobs(Args(["Pong"], FAKE, num_seeds=0))


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_dry_run_needs_neither_slurm_nor_poetry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, cluster: str
):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    flags = ["--command", "no-poetry run python cleanrl/fake_run.py", "--cluster", cluster, "--dry-run"]
    assert benchmark("--env-ids", "Pong", *flags) == 0
    assert "no-poetry run python cleanrl/fake_run.py --env-id Pong --seed 3" in capsys.readouterr().out


WITHOUT_POSIX = """
import fcntl, os, signal, sys
sys.modules["fcntl"] = None
del os.sched_getaffinity, os.sched_setaffinity, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
from cleanrl_utils.benchmark import main
main()
"""


def test_windows_prints_commands_and_runs_none(monkeypatch: pytest.MonkeyPatch):
    command = [sys.executable, "-c", WITHOUT_POSIX, *PONG, FAKE, "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == f"{FAKE} --env-id Pong --seed 1\n", result.stderr
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match="needs Linux or macOS"):
        run_locally([], 1)


def test_a_terminal_that_was_closed_does_not_stop_the_runner():
    other_end, terminal = pty.openpty()
    os.close(other_end)
    assert subprocess.run([*RUNNER, *BOTH, FAKE], stdout=terminal, stderr=terminal).returncode == 0
    os.close(terminal)
    assert steps() == [list(range(20))] * 2


def test_a_full_disk_of_the_logs_does_not_stop_the_runner():
    Path("cleanrl/plain.py").write_text("import os, sys\nos.mkdir(sys.argv[-1])\n")
    flags = ["--env-ids", "Pong", "--num-seeds", "3", "--workers", "1", "--command", "python cleanrl/plain.py"]
    subprocess.run([*RUNNER, *flags], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
    assert {name for name in os.listdir() if name.isdigit()} == {"1", "2", "3"}


def test_runs_get_cores_and_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runner_module, "available_cores", lambda: 7)
    assert benchmark(*BOTH, FAKE) == 0
    for name, gpu in (("Pong", "3"), ("Breakout", "5")):
        log = log_of(name)
        assert f"python {sys.prefix}\n" in log
        assert f"OMP_NUM_THREADS 3\nCUDA_VISIBLE_DEVICES {gpu}\n" in log
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION None\n" in log
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert benchmark(*BOTH, f"{FAKE} --steps 3") == 0
    assert "OMP_NUM_THREADS 6\n" in log_of("Pong")


def test_runs_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    assert benchmark(*BOTH, FAKE) == 0
    for name in ("Pong", "Breakout"):
        assert "CUDA_VISIBLE_DEVICES GPU-8932f937\nXLA_PYTHON_CLIENT_MEM_FRACTION 0.46\n" in log_of(name)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    assert benchmark(*BOTH, f"{FAKE} --steps 3") == 0
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION 0.3\n" in log_of("Pong")


def test_memory_of_a_gpu_that_the_user_sets_by_the_newer_name_is_set_once(monkeypatch: pytest.MonkeyPatch):
    """JAX refuses both names together."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.2")
    assert benchmark(*BOTH, FAKE) == 0
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION None\nXLA_CLIENT_MEM_FRACTION 0.2\n" in log_of("Pong")


NVIDIA_SMI = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-a)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-b)
  MIG 3g.20gb     Device  0: (UUID: MIG-c)
  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-b/7/0)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-d)
"""


def test_gpus_are_found_and_shared(monkeypatch: pytest.MonkeyPatch):
    program("nvidia-smi", "echo No devices were found 6; exit 6")
    assert visible_gpus() == []
    program("nvidia-smi", f'test "$*" = --list-gpus && printf "{NVIDIA_SMI}"')
    assert visible_gpus() == ["GPU-a", "MIG-c", "MIG-GPU-b/7/0", "GPU-d"]
    for nothing in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    for workers, of_workers, memory in ((2, "01", None), (4, "0120", "0.46"), (9, "012012012", "0.306")):
        environments = [run_environment(worker, workers, visible_gpus()) for worker in range(workers)]
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == list(of_workers)
        assert {environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION") for environment in environments} == {memory}


def fake_slurm(job_id: int = 7) -> None:
    """Put programs in place of Slurm's: sbatch keeps its arguments and script, squeue prints a file, srun runs."""
    program("sbatch", f'printf "%s\\n" "$@" >flags.txt\nenv >env.txt\ncat >sbatch.sh\necho "{job_id};cluster"')
    program("squeue", 'test -z "$SQUEUE_STATES" && cat squeue.txt')
    program("srun", 'echo "$1" >srun.txt\nshift\nexec "$@"')
    Path("squeue.txt").touch()


def test_slurm_submission(capsys: pytest.CaptureFixture):
    fake_slurm()
    flags = shlex.split(f"""--env-ids Pong Breakout --command '{FAKE} --steps " 20"' --num-seeds 2 --workers 3
        --cluster slurm --slurm-gpus-per-task 1 --slurm-ntasks 2 --slurm-total-cpus 9 --slurm-time 600""")
    assert benchmark(*flags, "--dry-run") == 0
    output = capsys.readouterr()
    assert "4 pending" in output.out
    assert "nothing was submitted" in output.err
    assert not Path("logs").exists()
    assert benchmark(*flags) == 0
    assert "4 submitted; errors of Slurm are in logs/slurm-7_*.out\n" in capsys.readouterr().out
    lines = "array=0-3%3 cpus-per-task=5 gpus-per-node=1 time=600 signal=USR2@300"
    assert {f"--{line}" for line in ("requeue", *lines.split())} <= set(Path("flags.txt").read_text().splitlines())
    command = shlex.join(["sbatch", *Path("flags.txt").read_text().splitlines()])
    assert output.out.startswith(f"{command}\n{Path('sbatch.sh').read_text()}\n")  # of the dry run
    slurm_task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert subprocess.run(["sh", "sbatch.sh"], env=os.environ | slurm_task).returncode == 0  # as a node does
    assert Path("srun.txt").read_text() == "--cpus-per-task=5\n"
    assert steps(("Breakout",), (2,)) == [list(range(20))]
    # One is pending, one runs, and one has left the queue.
    fake_slurm(9)
    Path("squeue.txt").write_text("7_0 PENDING\n7_1 RUNNING\n8 RUNNING\n")
    assert benchmark(*flags) == 0
    output = capsys.readouterr().out
    assert "2 queued, 1 running, 1 finished" in output
    assert "1 submitted" in output
    assert "--array=0-0%3" in Path("flags.txt").read_text()
    Path("squeue.txt").write_text("7_0 PENDING\n7_1 COMPLETING\n9_0 RUNNING\n")
    assert benchmark(*flags) == 0
    assert "1 queued, 2 running, 1 finished" in capsys.readouterr().out


def test_jobs_do_not_inherit_the_job_that_submits_them(monkeypatch: pytest.MonkeyPatch):
    fake_slurm()
    kept = {"SLURM_CONF", "SLURM_JWT", "SBATCH_QOS"}
    for name in (*kept, "SLURM_JOB_ID", "SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SRUN_CPUS_PER_TASK", "SQUEUE_STATES"):
        monkeypatch.setenv(name, "1")
    assert benchmark(*PONG, FAKE, "--cluster", "slurm") == 0
    names = {line.partition("=")[0] for line in Path("env.txt").read_text().splitlines()}
    assert {name for name in names if name.startswith(("SLURM", "SRUN", "SBATCH", "SQUEUE"))} == kept


def test_slurm_that_fails_or_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    fake_slurm()
    flags = ["--env-ids", "Pong", "--command", FAKE, "--cluster", "slurm"]
    program("sbatch", "echo 'sbatch: error: invalid\n partition' >&2; exit 1")
    assert benchmark(*flags) == 2
    assert capsys.readouterr().err.startswith("error: sbatch failed (sbatch: error: invalid partition); change ")
    program("squeue", "echo 'no connection' >&2; exit 1")
    assert benchmark(*flags) == 2
    assert capsys.readouterr().err == "error: squeue failed (no connection); try again when Slurm answers\n"
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert benchmark(*flags) == 2
    assert "error: --cluster slurm: sbatch was not found" in capsys.readouterr().err


class Clock:
    """Time that passes only in sleep."""

    now = 0

    def monotonic(self) -> int:
        """Return the seconds since the begin."""
        return self.now

    def sleep(self, seconds: int) -> None:
        """Let time pass."""
        self.now += seconds


def stop_on_node(monkeypatch: pytest.MonkeyPatch, squeue: str, scontrol: str, state: str = "interrupted") -> str:
    """Run a job of an array that a signal stops at once; return the arguments of each call of scontrol."""

    def stopped(jobs: list[Job], workers: int) -> int:
        jobs[0].state = state
        return 128 + signal.SIGUSR2

    program("squeue", squeue)
    program("scontrol", f'echo "$*" >>scontrol.txt\n{scontrol}')
    monkeypatch.setattr(runner_module, "run_locally", stopped)
    monkeypatch.setattr(runner_module, "time", Clock())
    monkeypatch.setattr(sys, "argv", ["-c", "Pong", "1", "cleanrl/fake_run.py", *shlex.split(FAKE)])
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with pytest.raises(SystemExit) as stop:
        run_on_node()
    assert stop.value.code == 128 + signal.SIGUSR2
    return Path("scontrol.txt").read_text() if Path("scontrol.txt").exists() else ""


FAILS_TWICE = "echo >>{0}.txt; test $(wc -l <{0}.txt) -gt 2 || exit 1\n"


@pytest.mark.parametrize(
    ("squeue", "scontrol", "calls"),
    [
        ("echo 7_3 RUNNING", "", 1),
        (FAILS_TWICE.format("squeue") + "echo 7_3 RUNNING", "", 1),
        ("exit 1", "", 1),
        ("echo 7_3 RUNNING", FAILS_TWICE.format("calls"), 3),
        ("echo 7_3 COMPLETING", "", 0),  # after scancel
        (FAILS_TWICE.format("squeue") + "echo 7_3 COMPLETING", "", 0),
        ("true", "", 0),
    ],
)
def test_a_stopped_job_is_queued_again_also_if_slurm_does_not_answer_at_once(
    monkeypatch: pytest.MonkeyPatch, squeue: str, scontrol: str, calls: int
):
    assert stop_on_node(monkeypatch, squeue, scontrol) == "requeue 7_3\n" * calls


def test_a_job_without_a_checkpoint_is_not_queued_again(monkeypatch: pytest.MonkeyPatch):
    assert stop_on_node(monkeypatch, "echo 7_3 RUNNING", "", state="pending") == ""


def test_a_node_without_the_commands_of_slurm_warns_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert stop_on_node(monkeypatch, "", "") == ""
    assert capsys.readouterr().err == (
        "WARNING: this node lacks squeue or scontrol, so the run can't be queued again\n"
    )


@pytest.mark.parametrize("name", ["qdagger", "dqn", "qdagger_small"])
def test_the_published_benchmarks_use_flags_that_their_scripts_accept(monkeypatch: pytest.MonkeyPatch, name: str):
    program("python", 'for word; do printf "%s\\0" "$word"; done; printf "\\n\\0"')  # prints its arguments
    output = subprocess.run(["bash", str(ROOT / "benchmark" / f"{name}.sh")], check=True, capture_output=True).stdout
    monkeypatch.chdir(ROOT)
    calls = [call.split("\0")[:-1] for call in output.decode().split("\n\0")[:-1] if call.startswith("-m\0")]
    assert len(calls) > 1
    for call in calls:
        jobs = make_jobs(tyro.cli(Args, args=call[2:]))
        assert {job.seed for job in jobs} >= {1, 2, 3}  # make demo has five seeds
        for job in jobs:
            args = tyro.cli(importlib.import_module(Path(job.script).stem).Args, args=job.command[2:])
            teacher = getattr(args, "teacher_policy_hf_repo", None) or "teachers"
            made_before = f"runs/{job.env_id}__qdagger_dqn_atari_impalacnn__2", f"ppo-{job.env_id}.zip"
            assert (ROOT / teacher).is_dir() or teacher.startswith(made_before)
