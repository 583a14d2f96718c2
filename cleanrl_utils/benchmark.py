"""Run a script on several environments and seeds. On Slurm, benchmark/slurm.sh runs it in jobs.

    python -m cleanrl_utils.benchmark --env-ids PongNoFrameskip-v4 BreakoutNoFrameskip-v4 \\
        --command "python cleanrl/qdagger_dqn_atari_impalacnn.py --track" --num-seeds 3 --workers 2

The same command again skips finished runs and resumes the others.

The log of a run, in ``logs/``, contains the output of the script and notes of the runner.
"""

import contextlib
import functools
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from cleanrl_utils.device import available_cores
from cleanrl_utils.errors import UserError, one_line, one_line_errors, shell_command, user_errors

LOGS = Path("logs")
# Only directories that lie directly in runs/ match. The runner resumes from them.
RUN_DIR = re.compile(r"^run directory: (runs/[^./\n][^/\n]*)\n", re.MULTILINE)


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
    """the number of runs at a time, which share CPU cores and GPUs; 0 prints the commands"""
    dry_run: bool = False
    """print the commands of all runs and start nothing"""


@dataclass
class Job:
    """One run, known by its command line.

    `state` is "pending", "interrupted" (it has a checkpoint), "running", "finished" or "failed". `reason` tells how its
    process ended, or why it was not started.
    """

    env_id: str
    seed: int
    script: str
    command: list[str]
    state: str = "pending"
    reason: str = ""
    run_dir: Path | None = None
    process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        name = f"{self.env_id.replace('/', '-')}__{Path(self.script).stem}__{self.seed}"
        command_hash = hashlib.sha256(os.fsencode(shlex.join(self.command))).hexdigest()[:8]
        self.log = LOGS / f"{name}__{command_hash}.log"

    @contextlib.contextmanager
    def fails_alone(self) -> Iterator[None]:
        """Turn an error of the system, as for a log of another user, into the state "failed" of this run."""
        try:
            yield
        except (OSError, ValueError) as error:
            self.state = "failed"
            self.reason = one_line(error)

    def note(self, text: str) -> None:
        """Append a note of the runner to the log."""
        with self.log.open("ab") as log:
            log.write(os.fsencode(f"\n[benchmark] {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"))

    def read_state(self) -> None:
        """Set `run_dir` from the log, and `state` to "finished", "interrupted" or "pending"."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        names = RUN_DIR.findall(text)
        self.run_dir = Path(names[-1]) if names else None
        self.state = "pending"
        if self.run_dir and (self.run_dir / "finished").exists():  # a script writes it at its end
            self.state = "finished"
        elif self.run_dir and any(self.run_dir.glob("checkpoint/*.state")):
            self.state = "interrupted"

    def start(self, environment: dict[str, str]) -> None:
        """Start the run, or resume it if it has a checkpoint."""
        resume = ["--resume", str(self.run_dir)] if self.state == "interrupted" else []
        command = [*self.command, *resume]
        with contextlib.suppress(OSError):  # A full disk stops no run.
            self.note(shlex.join(command))
        # The script ignores the signal that Slurm sends to all processes of a job, which would end a wrapper, or a
        # script without a handler for it.
        ignore = functools.partial(signal.signal, signal.SIGUSR2, signal.SIG_IGN)
        with self.log.open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(command, env=environment, preexec_fn=ignore, **streams)
        self.state = "running"

    def finish(self, told_to_stop: bool) -> None:
        """Note how the process ended and set `state`, to "failed" if the run ended early by itself."""
        self.reason = exit_text(self.process.wait())
        with contextlib.suppress(OSError):
            self.note(self.reason)
        self.read_state()
        if self.state != "finished" and not told_to_stop:
            self.state = "failed"


def exit_text(code: int) -> str:
    """Describe an exit code of a process, which is negative after a signal: "exit code 1", "killed by SIGKILL"."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def make_jobs(args: Args) -> list[Job]:
    """Return all runs in CleanRL's order: every environment with the first seed, then with the next."""
    if args.num_seeds < 1:
        raise UserError(f"--num-seeds is {args.num_seeds}; it must be at least 1")
    with user_errors("--command", "close the quotation", ValueError):
        words = shlex.split(args.command)
    script = next((word for word in words if word.endswith(".py")), "")
    if not Path(script).is_file():
        raise UserError(f'--command names no script in {Path.cwd()}; write "python cleanrl/dqn_atari.py"')
    jobs = []
    for seed in range(args.start_seed, args.start_seed + args.num_seeds):
        for env_id in dict.fromkeys(args.env_ids):
            command = [word.replace("{env_id}", env_id.replace("/", "-")) for word in words]
            jobs.append(Job(env_id, seed, script, [*command, "--env-id", env_id, "--seed", str(seed)]))
    return jobs


def print_state(job: Job) -> None:
    """Print a new state of a run."""
    reason = f" ({job.reason})" if job.reason and job.state != "finished" else ""
    print(f"{job.env_id} seed {job.seed}: {job.state}{reason}, see {job.log}", flush=True)


def print_table(jobs: list[Job]) -> None:
    """Print the state of each run, and the number of runs in each state."""
    rows = [(job.env_id, job.seed, job.state, job.run_dir or job.reason) for job in jobs]
    for row in [("environment", "seed", "state", "run directory"), *rows]:
        print("{:30}  {:>4}  {:11}  {}".format(*map(str, row)))
    print(", ".join(f"{count} {state}" for state, count in Counter(job.state for job in jobs).items()))


def run_environment(worker: int, workers: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of one of ``workers`` runs at a time: its share of the CPU cores and GPUs."""
    # `python` is this Python, also where no environment is active.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    environment = os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // workers)))  # the scripts read it, too
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
    if 0 < len(gpus) < workers and "XLA_CLIENT_MEM_FRACTION" not in environment:  # JAX refuses both names at once
        runs_per_gpu = math.ceil(workers / len(gpus))  # JAX allocates a share; alone, the scripts take 0.92
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


def run_jobs(jobs: list[Job], workers: int) -> int:
    """Run all unfinished jobs, ``workers`` at a time, and print each change of state.

    Returns:
        The exit code: 0 if all runs are finished, otherwise 128 + the signal's number after a signal, otherwise 1.
    """
    if sys.platform == "win32":
        raise UserError("the benchmark runner needs Linux or macOS; run the commands that --dry-run prints")
    for job in jobs:
        with job.fails_alone():
            job.read_state()
    waiting = [job for job in jobs if job.state != "finished"]
    workers = max(1, min(workers, len(waiting)))
    gpus = visible_gpus()
    running: dict[int, Job] = {}  # by worker
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: signals.append(number))
    while (running or waiting) and not signals:
        for worker in range(workers):
            job = running.get(worker)
            if job and job.process.poll() is not None:
                with job.fails_alone():
                    job.finish(told_to_stop=bool(signals))
                del running[worker]
                print_state(job)
            if worker not in running and waiting and not signals:
                job = waiting.pop(0)
                with job.fails_alone():
                    job.start(run_environment(worker, workers, gpus))
                    running[worker] = job
                print_state(job)
        time.sleep(0.2)
    if running:
        print("stopping: the runs save a checkpoint", flush=True)
    for job in running.values():
        job.process.terminate()
    for job in running.values():
        with job.fails_alone():
            job.finish(told_to_stop=True)
        print_state(job)
    if all(job.state == "finished" for job in jobs):
        return 0
    return 128 + signals[0] if signals else 1


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        args = tyro.cli(Args, description=__doc__)
        jobs = make_jobs(args)
        if args.dry_run or args.workers < 1:
            print("\n".join(shell_command(job.command) for job in jobs))
            if not args.dry_run:
                print("these commands were not run; --workers 1 runs them, one at a time", file=sys.stderr)
            return
        with user_errors("the logs need a directory", f"make {LOGS} one that you can write", OSError):
            LOGS.mkdir(exist_ok=True)
        code = run_jobs(jobs, args.workers)
        print_table(jobs)
        if any(job.state != "finished" for job in jobs):
            print("the same command again skips finished runs and resumes the others")
        sys.exit(code)


if __name__ == "__main__":
    main()
