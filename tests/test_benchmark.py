"""The benchmark runner on this machine. It runs ``fake_run.py``, which does what it relies on in the scripts."""

import fcntl
import importlib
import itertools
import json
import os
import pty
import shlex
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
from hypothesis import given
from hypothesis import strategies as st

from cleanrl_utils.benchmark import Args, Job, main, make_jobs, parse_command, share, summary, visible_gpus
from cleanrl_utils.checks import UserError

ROOT = Path(__file__).resolve().parent.parent
RUNNER = [sys.executable, "-m", "cleanrl_utils.benchmark"]
FAKE = "python cleanrl/fake_run.py"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, with the script."""
    (tmp_path / "cleanrl").mkdir()
    shutil.copy(ROOT / "tests" / "fake_run.py", tmp_path / "cleanrl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("WANDB_TAGS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what the runner sets is taken back
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The runner, in this process; returns its exit code."""

    def run(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmark", *flags])
        with pytest.raises(SystemExit) as exit_code:
            main()
        return exit_code.value.code

    return run


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen]]:
    """The runner, in a process of its own that writes to out.txt."""
    processes = []

    def start(*flags: str) -> subprocess.Popen:
        with open("out.txt", "a") as out:
            processes.append(subprocess.Popen([*RUNNER, *flags], stdout=out, stderr=out))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def eventually(condition: Callable[[], object]) -> object:
    """What the condition says when it says yes; a test that hangs is worse than one that waits long."""
    for _ in range(1200):
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError("it did not come to that in a minute")


def progress(env_id: str, seed: int) -> dict:
    """What the newest run of this game and seed says of itself."""
    paths = sorted(Path("runs").glob(f"{env_id}__fake_run__{seed}__*/progress.json"))
    return json.loads(paths[-1].read_text()) if paths else {"done": 0}


def steps(env_ids: tuple[str, ...] = ("Pong", "Breakout"), seeds: tuple[int, ...] = (1, 2)) -> list[list[int]]:
    """The steps of all runs, which must be one for each game and seed."""
    names = sorted(path.name.rpartition("__")[0] for path in Path("runs").iterdir())
    assert names == sorted(f"{env_id}__fake_run__{seed}" for env_id, seed in itertools.product(env_ids, seeds))
    return [[int(line) for line in path.read_text().split()] for path in Path("runs").glob("*/steps.txt")]


def scripts_of(runner: subprocess.Popen) -> list[psutil.Process]:
    """The runs that a runner has started."""
    return [child for child in psutil.Process(runner.pid).children(recursive=True) if "cleanrl" in str(child.cmdline())]


@pytest.mark.parametrize("killed", ["run", "runner", "both"])
def test_a_sweep_that_is_killed_and_started_again_has_every_step_once(
    spawn: Callable, benchmark: Callable, killed: str
):
    flags = ["--env-ids", "Pong", "Breakout", "--num-seeds", "2", "--workers", "2", "--command", f"{FAKE} --steps 60"]
    runner = spawn(*flags)
    eventually(lambda: progress("Pong", 1)["done"] > 7 and progress("Breakout", 1)["done"] > 7)
    first = next(script for script in scripts_of(runner) if "Pong" in script.cmdline())
    if killed != "runner":
        first.kill()
    if killed != "run":
        runner.kill()
    assert runner.wait(60) == (1 if killed == "run" else -signal.SIGKILL)
    assert progress("Pong", 1)["done"] < 60
    done = progress("Breakout", 2)["done"]
    assert (done == 60) == (killed == "run")  # it stops none of the others

    assert benchmark(*flags) == 0
    assert steps() == [list(range(60))] * 4
    logs = [path.read_text() for path in Path("logs").glob("*.log")]
    assert len(logs) == 4
    assert sum(log.count("resuming runs/") for log in logs) == (1 if killed == "run" else 2)
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    assert benchmark(*flags) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(spawn: Callable, benchmark: Callable):
    flags = ["--env-ids", "Pong", "--num-seeds", "1", "--workers", "1", "--command", f"{FAKE} --seconds 0.2 --steps 8"]
    runner = spawn(*flags)
    eventually(lambda: 0 < progress("Pong", 1)["done"] < 5)
    scripts_of(runner)[0].kill()
    assert runner.wait(60) == 1
    (abandoned,) = Path("runs").iterdir()
    assert not (abandoned / "checkpoint").exists()
    assert benchmark(*flags) == 0
    assert steps(("Pong",), (1,)) == [list(range(8))]
    assert (Path("logs") / abandoned.name / "steps.txt").exists()  # put aside, not thrown away


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_runs_save_also_behind_a_wrapper(spawn: Callable, benchmark: Callable, place: Path, number):
    wrapper = place / "wrapper"  # a shell that hands no signal on, like xvfb-run
    wrapper.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    wrapper.chmod(0o755)
    command = f"{wrapper} {FAKE} --steps 60 --save-every 0 --save-seconds 0.5"
    flags = ["--env-ids", "Pong", "Breakout", "--num-seeds", "1", "--workers", "2", "--command", command]
    runner = spawn(*flags)
    eventually(lambda: progress("Pong", 1)["done"] > 7 and progress("Breakout", 1)["done"] > 7)
    runner.send_signal(number)
    assert runner.wait(60) == 128 + number
    assert len(list(Path("runs").glob("*/checkpoint/1.state"))) == 2
    assert "2 of 2 runs are not finished; the same command goes on with them" in Path("out.txt").read_text()
    assert benchmark(*flags) == 0
    assert steps(seeds=(1,)) == [list(range(60))] * 2


def test_a_second_ctrl_c_insists(spawn: Callable):
    runner = spawn("--env-ids", "Pong", "--workers", "1", "--command", f"{FAKE} --steps 1000 --save-seconds 1000")
    eventually(lambda: progress("Pong", 1)["done"] > 7)
    (script,) = scripts_of(runner)
    runner.send_signal(signal.SIGINT)
    eventually(lambda: "Ctrl-C again kills them" in Path("out.txt").read_text())
    runner.send_signal(signal.SIGINT)
    assert runner.wait(60) == 130
    assert not script.is_running()


def test_a_failing_run_stops_no_other_and_shows_its_last_lines(benchmark: Callable, capsys: pytest.CaptureFixture):
    flags = ["--env-ids", "Broken", "Pong", "--num-seeds", "1", "--workers", "1", "--command", FAKE]
    assert benchmark(*flags) == 1
    output = capsys.readouterr().out
    assert "Broken seed 1: failed\nthe last lines of logs/Broken__fake_run__1__" in output
    assert "RuntimeError: the emulator broke at step 7\n" in output
    assert "Pong seed 1: finished" in output
    assert benchmark(*flags) == 1  # it fails again, from its checkpoint
    output = capsys.readouterr().out
    assert "Broken seed 1: failed" in output
    assert "Pong seed 1: running" not in output
    assert steps(("Broken", "Pong"), (1,))[0][:6] == list(range(6))


def test_exit_code_0_is_not_the_end_of_a_run_that_says_otherwise(benchmark: Callable, capsys: pytest.CaptureFixture):
    """By progress.json or, where it stopped before it could write one, by its checkpoint."""
    games = ("Pong", "Early")
    flags = ["--env-ids", *games, "--num-seeds", "1", "--workers", "1", "--command", f"{FAKE} --stop-at 10"]
    assert benchmark(*flags) == 1
    output = capsys.readouterr().out
    assert all(f"{game} seed 1: stopped" in output for game in games)
    assert benchmark(*flags) == 0
    assert steps(games, (1,)) == [list(range(20))] * 2


def test_other_flags_are_another_run(benchmark: Callable):
    for flags in ("--steps 6", "--steps 7", "--steps 6"):
        assert benchmark("--env-ids", "Pong", "--num-seeds", "1", "--workers", "1", "--command", f"{FAKE} {flags}") == 0
        time.sleep(1)  # directories are named by the second
    assert sorted(len(path.read_text().split()) for path in Path("runs").glob("*/steps.txt")) == [6, 7]


def test_what_another_process_runs_is_waited_for(spawn: Callable):
    """As after a restart, while a run that lost its runner is still saving."""
    (job,) = make_jobs(Args(["Pong"], FAKE, num_seeds=1))
    job.log.parent.mkdir()
    with job.log.open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        runner = spawn("--env-ids", "Pong", "Breakout", "--num-seeds", "1", "--workers", "1", "--command", FAKE)
        eventually(lambda: "Breakout seed 1: finished" in Path("out.txt").read_text())  # it does not hold up the others
        assert "Pong seed 1: elsewhere" in Path("out.txt").read_text()
        assert runner.poll() is None
    assert runner.wait(60) == 0
    assert steps(seeds=(1,)) == [list(range(20))] * 2


def run_once(job: Job) -> str:
    job.start()
    job.process.wait()
    job.end()
    return job.state


def test_what_a_script_refuses_to_resume_is_understood(place: Path):
    (job,) = make_jobs(Args(["Pong"], f"{FAKE} --stop-at 10", num_seeds=1))
    job.log.parent.mkdir()
    assert run_once(job) == "stopped"
    directory = os.open(job.run_dir, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    assert run_once(job) == "elsewhere"
    os.close(directory)
    assert run_once(job) == "finished"
    # Killed between its end and its last word: progress.json says there is more to do, the script that there is not.
    report = json.loads((job.run_dir / "progress.json").read_text())
    (job.run_dir / "progress.json").write_text(json.dumps(report | {"finished": False}))
    job.log.write_text(job.log.read_text().replace("finished, exit code 0", "failed, exit code 1"))
    job.judge()
    assert job.state == "unfinished"
    assert run_once(job) == "finished"
    assert "this run is finished" in job.last_lines()
    job.judge()
    assert job.state == "finished"


def test_a_directory_that_was_deleted_is_made_again(benchmark: Callable):
    flags = ["--env-ids", "Pong", "--num-seeds", "1", "--workers", "1", "--command", FAKE]
    assert benchmark(*flags) == 0
    shutil.rmtree("runs")
    assert benchmark(*flags) == 0
    assert steps(("Pong",), (1,)) == [list(range(20))]


def test_a_block_of_cleanrl_pasted_as_it_is(place: Path):
    """Flags, environment and wrappers as in its benchmark/qdagger.sh; of its scripts, only the exit code is known."""
    binaries = place / "bin"
    binaries.mkdir()
    for name in ("xvfb-run", "poetry"):
        (binaries / name).write_text('#!/bin/sh\nshift\nexec "$@"\n')
        (binaries / name).chmod(0o755)
    script = 'import os, sys\nprint(*sys.argv[1:], os.environ["OMP_NUM_THREADS"], file=open("ran.txt", "a"))\n'
    script += 'sys.exit("7" in sys.argv and not os.path.exists("mended"))\n'
    (place / "cleanrl" / "qdagger_dqn_atari_impalacnn.py").write_text(script)
    block = """OMP_NUM_THREADS=1 xvfb-run -a poetry run python -m cleanrl_utils.benchmark \\
    --env-ids PongNoFrameskip-v4 BeamRiderNoFrameskip-v4 \\
    --command "poetry run python cleanrl/qdagger_dqn_atari_impalacnn.py --track --capture_video" \\
    --num-seeds 2 \\
    --start-seed 6 \\
    --workers 1
"""
    path = os.pathsep.join([str(binaries), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path}
    lines = [
        f"--track --capture_video --env-id {game}NoFrameskip-v4 --seed {seed} 1"
        for seed in (6, 7)
        for game in ("Pong", "BeamRider")
    ]
    assert subprocess.run(["sh", "-c", block], env=environment).returncode == 1
    assert Path("ran.txt").read_text().splitlines() == lines
    Path("mended").touch()
    assert subprocess.run(["sh", "-c", block], env=environment).returncode == 0
    assert Path("ran.txt").read_text().splitlines() == lines + lines[2:]


def test_workers_0_prints_the_commands(benchmark: Callable, monkeypatch: pytest.MonkeyPatch, capsys):
    flags = ["--env_ids", "Pong", "ALE/Pong-v5", "--command", f"{FAKE} --exp-name 'a b'", "--num_seeds", "2"]
    expected = [
        f"{FAKE} --exp-name 'a b' --env-id {game} --seed {seed}" for seed in (1, 2) for game in ("Pong", "ALE/Pong-v5")
    ]
    for workers in (["--workers", "0"], []):
        monkeypatch.setattr(sys, "argv", ["benchmark", *flags, *workers])
        main()
        assert capsys.readouterr().out.splitlines() == expected
    assert [path.name for path in Path().iterdir()] == ["cleanrl"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"command": "python cleanrl/nothing.py"}, r"there is no cleanrl/nothing.py in .*; give the script's path"),
        (
            {"command": "cleanrl/fake_run.py --track"},
            "'cleanrl/fake_run.py --track' does not say python; write it like",
        ),
        ({"command": "python -m cleanrl.fake_run"}, "names no script; write it like"),
        ({"command": ""}, "does not say python"),
        ({"command": "python 'cleanrl/fake_run.py"}, r"can't be read \(No closing quotation\); close its quotes"),
        (
            {"command": f"no-such-tool run {FAKE}"},
            'there is no no-such-tool here; write "python cleanrl/fake_run.py …"',
        ),
        ({"env_ids": []}, "--env-ids names no game"),
        ({"workers": -1}, "--workers is -1; it must be at least 0"),
        ({"num_seeds": 0}, "--num-seeds is 0; it must be at least 1"),
        ({"slurm_nodes": 2}, "a run takes one node"),
        ({"slurm_partition": "gpu"}, "are for --cluster slurm; add it"),
        ({"slurm_template_path": "benchmark/x.slurm_template"}, "is replaced by --cluster slurm"),
    ],
)
def test_bad_input_is_one_line(flags: dict, message: str):
    with pytest.raises(UserError, match=message) as error:
        make_jobs(Args(**{"env_ids": ["Pong"], "command": FAKE} | flags))
    assert "\n" not in str(error.value)


def test_bad_input_ends_before_anything_starts(benchmark: Callable, capsys: pytest.CaptureFixture):
    assert benchmark("--env-ids", "Pong", "--workers", "1", "--command", "python nothing.py") == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: --command: there is no nothing.py in ")
    assert (output.err.count("\n"), output.out) == (1, "")
    assert not Path("logs").exists()


@pytest.mark.parametrize("program", ["uv run", "poetry run", "xvfb-run -a", "nice -n 5", ""])
def test_wrappers_stay_in_front_of_python(program: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: name)
    command = f"{program} python3.11 -u cleanrl/fake_run.py --x y.py".strip()
    script, flags = parse_command(command)
    assert (" ".join(script), flags) == (command.removesuffix(" --x y.py"), ["--x", "y.py"])


@given(st.lists(st.integers(), unique=True), st.integers(1, 20))
def test_shares_are_even_and_all_that_there_is(items: list[int], workers: int):
    shares = [share(items, worker, workers) for worker in range(workers)]
    assert {item for part in shares for item in part} == set(items)
    sizes = [len(part) for part in shares]
    assert max(sizes) - min(sizes) <= 1
    if len(items) >= workers:
        assert sum(sizes) == len(items)
    assert all(sizes) == bool(items)


def test_workers_have_their_own_cores_and_gpus(benchmark: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert benchmark("--env-ids", "Pong", "Breakout", "--num-seeds", "1", "--workers", "2", "--command", FAKE) == 0
    cores = sorted(os.sched_getaffinity(0))
    for worker, (name, gpus) in enumerate((("Pong", "3,5"), ("Breakout", "6,7"))):
        (log,) = Path("logs").glob(f"{name}__*.log")
        assert f"cores {share(cores, worker, 2)} gpus {gpus}\n" in log.read_text()


def test_gpus_are_found(place: Path, monkeypatch: pytest.MonkeyPatch):
    listed = (
        "GPU 0: NVIDIA H100 (UUID: GPU-a)\n  MIG 1g.10gb     Device  0: (UUID: MIG-b)\nGPU 1: NVIDIA H100 (UUID: GPU-c)"
    )
    (place / "nvidia-smi").write_text(f"#!/bin/sh\necho '{listed}'\n")
    (place / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    assert visible_gpus() == ["0", "1"]
    for visible, expected in (("1", ["1"]), ("", []), ("GPU-a,GPU-c", ["GPU-a", "GPU-c"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus() == expected


@pytest.mark.parametrize(
    ("flag", "mine", "expected"), [([], None, "v1.2"), (["--no-auto-tag"], None, None), ([], "a", "a")]
)
def test_runs_are_tagged(benchmark: Callable, monkeypatch: pytest.MonkeyPatch, flag: list, mine: str, expected: str):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"], ["tag", "v1.2"]):
        subprocess.run(["git", *command], check=True)
    if mine:
        monkeypatch.setenv("WANDB_TAGS", mine)
    assert benchmark("--env-ids", "Pong", "--num-seeds", "1", "--workers", "1", "--command", FAKE, *flag) == 0
    (log,) = Path("logs").glob("*.log")
    assert f"tags {expected}\n" in log.read_text()


def test_a_terminal_has_a_live_table(place: Path):
    terminal, theirs = pty.openpty()
    flags = ["--env-ids", "Pong", "--num-seeds", "2", "--workers", "1", "--command", f"{FAKE} --steps 75"]
    environment = os.environ | {"COLUMNS": "150", "LINES": "40", "TERM": "xterm"}
    runner = subprocess.Popen([*RUNNER, *flags], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    try:
        while part := os.read(terminal, 100_000):
            output += part
    except OSError:  # all that had it open have ended
        pass
    os.close(terminal)
    assert runner.wait(60) == 0
    text = output.decode()
    assert "1 running, 1 to do" in text
    rows = [line for line in text.splitlines() if "running" in line and "online" in line]
    assert rows
    assert all(word in rows[-1] for word in ("Pong", "12.3", "2 min", "runs/Pong__fake_run__"))
    assert "2 finished" in text.splitlines()[-8:][0] + text.splitlines()[-7]


def test_a_log_has_a_line_for_each_state(place: Path):
    jobs = make_jobs(Args(["Pong"], FAKE, num_seeds=4))
    for job, state, done in zip(jobs, ("to do", "running", "finished", "running"), (0, 250, 1000, 0), strict=True):
        job.state, job.run_dir = state, place / str(job.seed)
        job.run_dir.mkdir()
        report = {"phase": "offline", "done": done, "total": 1000, "return": -20.96, "seconds_left": 240.0}
        if done:
            (job.run_dir / "progress.json").write_text(json.dumps(report))
    lines = [line[6:] for line in summary(jobs).splitlines()]
    assert lines == [
        "2 running: Pong seed 2 offline 25% -21.0 4 min, Pong seed 4",
        "1 to do: Pong seed 1",
        "1 finished: Pong seed 3 offline 100% -21.0",
    ]


@pytest.mark.parametrize("content", ["", '{"done": 3', '{"done": 3, "total": 0}'])
def test_a_damaged_progress_file_is_none(place: Path, content: str):
    (job,) = make_jobs(Args(["Pong"], FAKE, num_seeds=1))
    job.run_dir = place
    (place / "progress.json").write_text(content)
    assert "Pong seed 1" in summary([job])


@pytest.fixture
def slurm_commands(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for Slurm's commands: sbatch keeps what it gets, squeue shows what is in a file."""
    pytest.importorskip("submitit")
    binaries = place / "bin"
    binaries.mkdir()
    bodies = {"sbatch": 'cp "$1" sbatch.txt\necho Submitted batch job 7', "squeue": "cat squeue.txt", "srun": ""}
    for name, body in bodies.items():
        (binaries / name).write_text(f"#!/bin/sh\n{body}\n")
        (binaries / name).chmod(0o755)
    (place / "squeue.txt").write_text("")
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    return binaries


def test_what_slurm_is_asked_for(slurm_commands: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    flags = ["--env-ids", "Pong", "Breakout", "--command", FAKE, "--num-seeds", "2", "--workers", "3"]
    flags += ["--cluster", "slurm", "--slurm-gpus-per-task", "1", "--slurm-ntasks", "2", "--slurm-total-cpus", "9"]
    flags += ["--slurm-nodes", "1", "--slurm-time", "600", "--slurm-mem-gb", "32", "--slurm-partition", "a"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags, "--slurm-account", "b"])
    main()
    text = Path("sbatch.txt").read_text()
    for line in (
        *("array=0-3%3", "cpus-per-task=5", "gpus-per-node=1", "mem=32GB", "time=600", "partition=a", "account=b"),
        *("requeue", "open-mode=append", "signal=USR2@300", "job-name=fake_run"),
    ):
        assert f"#SBATCH --{line}\n" in text
    assert "--cpus-per-task=5" in text.partition("\nsrun ")[2]
    assert "4 submitted" in capsys.readouterr().out
    assert "submitted to Slurm as 7_2" in next(Path("logs").glob("Pong__fake_run__2__*.log")).read_text()

    # Of these, one still waits, one runs, one is unknown to Slurm, and one has finished.
    Path("squeue.txt").write_text("7_0 PENDING\n7_1 RUNNING\n8 RUNNING\n")
    jobs = make_jobs(Args(["Pong", "Breakout"], FAKE, num_seeds=2))
    jobs[3].log.write_text("")
    jobs[3].note("finished, exit code 0")  # before the runner came to note that it has submitted it
    jobs[3].note("submitted to Slurm as 7_3")
    main()
    assert "1 submitted" in capsys.readouterr().out
    assert "--array" not in Path("sbatch.txt").read_text()
    for job, slurm_id in zip(jobs, ("7_0", "7_1", "7", "7_3"), strict=True):
        job.judge()
        assert job.slurm_id == slurm_id


def test_slurm_that_refuses_or_is_missing_is_one_line(slurm_commands: Path, benchmark: Callable, monkeypatch, capsys):
    flags = ["--env-ids", "Pong", "--command", FAKE, "--cluster", "slurm"]
    (slurm_commands / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid\n partition' >&2; exit 1\n")
    assert benchmark(*flags) == 2
    assert capsys.readouterr().err == "error: Slurm refuses: sbatch: error: invalid partition\n"
    (slurm_commands / "squeue").write_text("#!/bin/sh\necho 'no connection' >&2; exit 1\n")
    assert benchmark(*flags) == 2
    assert "error: Slurm does not answer (no connection)" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert benchmark(*flags) == 2
    assert "error: --cluster slurm: there is no sbatch here" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.delitem(sys.modules, "cleanrl_utils.slurm")
    assert benchmark(*flags) == 2
    error = capsys.readouterr().err
    assert "error: --cluster slurm needs submitit" in error
    assert error.endswith("pip install submitit\n")


@pytest.mark.parametrize("name", ["qdagger", "dqn", "qdagger_small"])
def test_the_published_benchmarks_give_flags_that_their_scripts_take(name: str):
    command = ["bash", str(ROOT / "benchmark" / f"{name}.sh"), "--workers", "0"]
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    lines = [shlex.split(line) for line in printed.splitlines()]
    assert len({tuple(line) for line in lines}) == (93 if name == "qdagger_small" else 18)
    for python, script, *flags in lines:
        assert python == "python"
        args = tyro.cli(importlib.import_module(Path(script).stem).Args, args=flags)
        assert args.seed in (1, 2, 3)
        assert args.save_model
        teacher = getattr(args, "teacher_policy_hf_repo", None)
        first_generation = "runs/PongNoFrameskip-v4__qdagger_dqn_atari_impalacnn__2__"
        assert teacher is None or (ROOT / teacher).is_dir() or teacher.startswith(first_generation)
