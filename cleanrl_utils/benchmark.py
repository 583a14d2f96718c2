"""Run a script on several environments and seeds, on this machine or on Slurm.

    python -m cleanrl_utils.benchmark --env-ids PongNoFrameskip-v4 BreakoutNoFrameskip-v4 \\
        --command "python cleanrl/qdagger_dqn_atari_impalacnn.py --track" --num-seeds 3 --workers 2

The same command again skips finished runs and resumes the others.

The log of a run is ``logs/{env_id}__{script}__{seed}__{hash of the command line}.log``. It contains the output of the
script and notes of the runner. The script holds a lock on it until it exits, so that no run is started twice.
"""

import contextlib
import hashlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from cleanrl_utils.device import available_cores
from cleanrl_utils.errors import UserError, one_line_errors, shell_command, user_errors

LOGS = Path("logs")
SUBMITTED = re.compile(r"^\[benchmark\] .* submitted to Slurm as (\S+)$", re.MULTILINE)
# Only directories that lie directly in runs/ match. The runner resumes from them.
RUN_DIR = re.compile(r"^run directory: (runs/[^./\n][^/\n]*)\n", re.MULTILINE)
ROW = "{:30}  {:>4}  {:11}  {}"


@dataclass
class Args:
    env_ids: list[str]
    """the environment ids"""
    command: str
    """the command to run for each environment and seed, without --env-id and --seed: "python cleanrl/dqn_atari.py".
    {env_id} is replaced by the environment id, with a dash for a slash, as in teachers/{env_id}-dqn_atari-seed1"""
    num_seeds: int = 3
    """the number of seeds for each environment"""
    start_seed: int = 1
    """the first seed"""
    workers: int = 0
    """the number of runs at a time, which share CPU cores and GPUs; 0 prints the commands, or starts all on Slurm"""
    dry_run: bool = False
    """print the commands of all runs, or with --cluster slurm the jobs that would be submitted, and start nothing"""
    cluster: Literal["local", "slurm"] = "local"
    """where to run"""
    slurm_time: int = 1440
    """the time limit of a job in minutes. A longer run saves a checkpoint before it, is queued again and resumes"""
    slurm_gpus_per_task: int | None = None
    """the number of GPUs of a run"""
    slurm_total_cpus: int | None = None
    """the number of CPU cores of --slurm-ntasks runs"""
    slurm_ntasks: int = 1
    """the number of runs that share --slurm-total-cpus"""


@dataclass
class Job:
    """One run, known by its command line.

    `state` is "pending", "interrupted" (it has a checkpoint), "queued" (on Slurm), "running" (also by another process),
    "finished" or "failed".
    """

    env_id: str
    seed: int
    script: str
    command: list[str]
    state: str = "pending"
    run_dir: Path | None = None
    slurm_id: str | None = None
    process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        name = f"{self.env_id.replace('/', '-')}__{Path(self.script).stem}__{self.seed}"
        command_hash = hashlib.sha256(os.fsencode(shlex.join(self.command))).hexdigest()[:8]
        self.log = LOGS / f"{name}__{command_hash}.log"

    def note(self, text: str) -> None:
        """Append a note of the runner to the log. A full disk does not end the runner."""
        with contextlib.suppress(OSError), self.log.open("ab") as log:
            log.write(os.fsencode(f"\n[benchmark] {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"))

    def read_state(self) -> None:
        """Set `run_dir` and `slurm_id` from the files, and `state` to "finished", "interrupted" or "pending"."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        names = RUN_DIR.findall(text)
        self.run_dir = Path(names[-1]) if names else None
        slurm_ids = SUBMITTED.findall(text)
        self.slurm_id = slurm_ids[-1] if slurm_ids else None
        self.state = "pending"
        if self.run_dir and (self.run_dir / "finished").exists():  # a script writes it at its end
            self.state = "finished"
        elif self.run_dir and any(self.run_dir.glob("checkpoint/*.state")):
            self.state = "interrupted"

    def start(self, environment: dict[str, str]) -> None:
        """Start or resume the run, unless it is finished or another process runs it."""
        import fcntl  # not on Windows

        with self.log.open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.state = "running"
                return
            except OSError:
                pass  # The file system has no locks. The script locks its run as well.
            self.read_state()
            if self.state == "finished":
                return
            command = self.command
            if self.state == "interrupted":
                command = [*command, "--resume", str(self.run_dir)]
            self.note(shlex.join(command))
            # The script inherits the lock with its output. It ignores the signal that Slurm sends to all processes of a
            # job, which would end a wrapper, or a script without a handler for it.
            self.process = subprocess.Popen(
                command,
                env=environment,
                preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.state = "running"

    def finish(self, told_to_stop: bool) -> None:
        """Note the exit code of the process and set `state`, to "failed" if the run ended early by itself."""
        self.note(f"exit code {self.process.wait()}")
        self.read_state()
        if self.state != "finished" and not told_to_stop:
            self.state = "failed"


def make_jobs(args: Args) -> list[Job]:
    """Return all runs in CleanRL's order: every environment with the first seed, then with the next."""
    if args.num_seeds < 1:
        raise UserError(f"--num-seeds is {args.num_seeds}; it must be at least 1")
    with user_errors("--command", "close the quotation", ValueError):
        words = shlex.split(args.command)
    script = next((word for word in words if word.endswith(".py")), "")
    if not Path(script).is_file():
        raise UserError(f'--command names no script in {Path.cwd()}; write "python cleanrl/dqn_atari.py"')
    starts = not args.dry_run and (args.workers > 0 or args.cluster == "slurm")
    if starts and not shutil.which(words[0], path=search_path()):
        command = shell_command(["python", *words[words.index(script) :]])
        raise UserError(f'--command: {words[0]} is not a program; write "{command}"')
    jobs = []
    for seed in range(args.start_seed, args.start_seed + args.num_seeds):
        for env_id in dict.fromkeys(args.env_ids):
            command = [word.replace("{env_id}", env_id.replace("/", "-")) for word in words]
            jobs.append(Job(env_id, seed, script, [*command, "--env-id", env_id, "--seed", str(seed)]))
    return jobs


def search_path() -> str:
    """Return PATH with the directory of this Python: `python` is this Python, also where no environment is active."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def print_state(job: Job) -> None:
    """Print a new state of a run."""
    print(f"{job.env_id} seed {job.seed}: {job.state}, see {job.log}", flush=True)


def print_table(jobs: list[Job]) -> None:
    """Print the state of each run, and the number of runs in each state."""
    print(ROW.format("environment", "seed", "state", "run directory"))
    for job in jobs:
        print(ROW.format(job.env_id, job.seed, job.state, job.run_dir or ""))
    print(", ".join(f"{count} {state}" for state, count in Counter(job.state for job in jobs).items()))


# ==================== on this machine ====================


def run_environment(worker: int, workers: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of one of ``workers`` runs at a time: its share of the CPU cores and GPUs."""
    environment = os.environ | {"PATH": search_path(), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // workers)))  # the scripts read it, too
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
    if 0 < len(gpus) < workers and "XLA_CLIENT_MEM_FRACTION" not in environment:  # JAX refuses both names at once
        # JAX allocates its share at the start. Alone on a GPU, the scripts take 0.92 of the memory.
        runs_per_gpu = math.ceil(workers / len(gpus))
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(920 // runs_per_gpu / 1000))
    return environment


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs, or the MIG devices of a divided GPU, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return [name for name in names if name not in ("", "-1", "NoDevFiles")]  # Slurm sets NoDevFiles without a GPU
    if not shutil.which("nvidia-smi"):
        return []
    output = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    usable = re.sub(r"^GPU .*\n(?= +MIG)", "", output, flags=re.MULTILINE)  # not a GPU above its MIG devices
    return re.findall(r"\(UUID: (\S+)\)", usable)


def run_locally(jobs: list[Job], workers: int) -> int:
    """Run all unfinished jobs on this machine, ``workers`` at a time, and print each change of state.

    Returns:
        Exit code: 0 if all runs are finished, otherwise 128 + the signal's number after a signal, otherwise 1.
    """
    if sys.platform == "win32":
        raise UserError("the benchmark runner needs Linux or macOS; run the commands that --dry-run prints")
    for job in jobs:
        job.read_state()
    waiting = [job for job in jobs if job.state != "finished"]
    workers = max(1, min(workers, len(waiting)))
    gpus = visible_gpus()
    running: dict[int, Job] = {}  # by worker
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: signals.append(number))
    stopping = False
    while running or (waiting and not signals):
        for worker in range(workers):
            job = running.get(worker)
            if job and job.process.poll() is not None:
                job.finish(told_to_stop=bool(signals))
                del running[worker]
                print_state(job)
            if worker not in running and waiting and not signals:
                job = waiting.pop(0)
                job.start(run_environment(worker, workers, gpus))
                if job.process:
                    running[worker] = job
                print_state(job)
        if signals and not stopping:
            stopping = True
            print("stopping: the runs save a checkpoint", flush=True)
            for job in running.values():
                job.process.terminate()
        time.sleep(0.2)
    if all(job.state == "finished" for job in jobs):
        return 0
    return 128 + signals[0] if signals else 1


# ==================== on Slurm ====================

# If the runner runs in a job, SLURM_* and SRUN_* describe that job. New jobs would inherit its cores (SLURM_CPU_BIND)
# or end because of another kind of memory limit (SLURM_MEM_PER_CPU). SQUEUE_* can hide jobs.
NOT_INHERITED = ("SLURM_", "SRUN_", "SQUEUE_")
INHERITED = ("SLURM_CONF", "SLURM_JWT")  # how to reach the cluster; also SLURM_CONF_SERVER
ON_NODE = "from cleanrl_utils.benchmark import run_on_node; run_on_node()"
PATIENCE = 120  # seconds for which a job asks a Slurm that does not answer


def run_slurm(command: list[str], remedy: str, script: str | None = None, patience: int = 0) -> str:
    """Run a command of Slurm, again for ``patience`` seconds while it fails, and return its output.

    Raises:
        UserError: the command still fails. The message ends with the ``remedy``.
    """
    names = [name for name in os.environ if name.startswith(INHERITED) or not name.startswith(NOT_INHERITED)]
    environment = {name: os.environ[name] for name in names}
    end = time.monotonic() + patience
    while True:
        result = subprocess.run(command, input=script, env=environment, capture_output=True, text=True)
        if result.returncode == 0:
            return result.stdout
        if time.monotonic() >= end:
            raise UserError(f"{command[0]} failed ({' '.join(result.stderr.split())}); {remedy}")
        time.sleep(10)


def queue(patience: int = 0) -> dict[str, str]:
    """Return the state of the user's queued and running jobs by their ids."""
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T"]
    output = run_slurm(command, "try again when Slurm answers", patience=patience)
    return dict(line.split() for line in output.splitlines())


def submit(jobs: list[Job], args: Args) -> None:
    """Set the state of every job, and submit those that are neither finished nor in the queue.

    With ``args.dry_run``, print the submission instead.
    """
    has_slurm = shutil.which("sbatch") is not None
    if not has_slurm and not args.dry_run:
        raise UserError("--cluster slurm: sbatch was not found; run this command on a machine that submits to Slurm")
    states = queue() if has_slurm else {}  # before the files, so that those of a job that has left are complete
    for job in jobs:
        job.read_state()
        if job.state != "finished" and job.slurm_id in states:
            job.state = "queued" if states[job.slurm_id] == "PENDING" else "running"
    left = [job for job in jobs if job.state in ("pending", "interrupted")]
    if not left:
        return
    command, script = job_array(left, args)
    if args.dry_run:
        print(f"{shlex.join(command)}\n{script}")
        return
    output = run_slurm(command, "change the flags --slurm-* or the variables SBATCH_*", script)
    array_id = output.strip().partition(";")[0]
    for i, job in enumerate(left):
        job.note(f"submitted to Slurm as {array_id}_{i}")
        job.state = "queued"
    print(f"{len(left)} submitted; errors of Slurm are in {LOGS}/slurm-{array_id}_*.out")


def job_array(jobs: list[Job], args: Args) -> tuple[list[str], str]:
    """Return the command that submits the jobs as an array, and the script for its standard input."""
    cpus = math.ceil(args.slurm_total_cpus / args.slurm_ntasks) if args.slurm_total_cpus else None
    workers = args.workers if args.workers > 0 else len(jobs)
    options = {
        "job-name": Path(jobs[0].script).stem,
        "output": LOGS / "slurm-%A_%a.out",
        "open-mode": "append",
        "array": f"0-{len(jobs) - 1}%{workers}",
        "ntasks": 1,
        "time": args.slurm_time,
        "signal": f"USR2@{min(300, 15 * args.slurm_time)}",  # the seconds before the time limit
        "gpus-per-node": args.slurm_gpus_per_task,
        "cpus-per-task": cpus,
    }
    command = ["sbatch", "--parsable", "--requeue"]
    command += [f"--{name}={value}" for name, value in options.items() if value]
    # Slurm sends its signals to the processes of srun, which does not inherit --cpus-per-task since Slurm 22.05.
    srun = ["srun", f"--cpus-per-task={cpus}"] if cpus else ["srun"]
    lines = ["#!/bin/sh", "case $SLURM_ARRAY_TASK_ID in"]
    for i, job in enumerate(jobs):
        on_node = [sys.executable, "-c", ON_NODE, job.env_id, str(job.seed), job.script, *job.command]
        lines.append(f"{i}) {shlex.join([*srun, *on_node])} ;;")
    lines.append("esac\n")
    return command, "\n".join(lines)


def run_on_node() -> None:
    """Run a job of the array, given by the arguments. A run that was stopped is queued again if it has a checkpoint."""
    with one_line_errors():
        env_id, seed, script, *command = sys.argv[1:]
        can_requeue = shutil.which("squeue") and shutil.which("scontrol")
        if not can_requeue:
            print("WARNING: this node lacks squeue or scontrol, so the run can't be queued again", file=sys.stderr)
        job = Job(env_id, int(seed), script, command)
        code = run_locally([job], 1)
        # A script that cannot resume would start from the beginning after every time limit.
        if can_requeue and code > 128 and job.state == "interrupted":
            requeue(f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}")
        sys.exit(code)


def requeue(slurm_id: str) -> None:
    """Queue the running job ``slurm_id`` again, but not after scancel."""
    state = "RUNNING"
    # Where squeue never answers, the job was hardly cancelled: Slurm kills a cancelled one after 30 seconds.
    with contextlib.suppress(UserError):
        state = queue(PATIENCE).get(slurm_id)
    if state == "RUNNING":
        run_slurm(["scontrol", "requeue", slurm_id], "run the command of the benchmark again", patience=PATIENCE)


# ==================== the command line ====================


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        args = tyro.cli(Args, description=__doc__)
        jobs = make_jobs(args)
        if args.cluster == "local" and (args.dry_run or args.workers < 1):
            print("\n".join(shell_command(job.command) for job in jobs))
            print("these commands were not run; to run them, give --workers and no --dry-run", file=sys.stderr)
            return
        if not args.dry_run:
            LOGS.mkdir(exist_ok=True)
        if args.cluster == "local":
            code = run_locally(jobs, args.workers)
        else:
            submit(jobs, args)
            code = 0
        print_table(jobs)
        if args.dry_run:
            print("nothing was submitted; leave out --dry-run to submit", file=sys.stderr)
        elif any(job.state != "finished" for job in jobs):
            print("the same command again skips finished runs and resumes or submits the others")
        sys.exit(code)


if __name__ == "__main__":
    main()
