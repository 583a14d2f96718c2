"""Run a script on several environments and seeds. On Slurm, benchmark/slurm.sh runs it in jobs.

    python -m cleanrl_utils.benchmark --env-ids PongNoFrameskip-v4 BreakoutNoFrameskip-v4 \\
        --command "python cleanrl/qdagger_dqn_atari_impalacnn.py --track" --num-seeds 3 --workers 2

The same command again skips finished runs and resumes the others. The output of each run is in ``logs/``.
"""

import functools
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from cleanrl_utils.device import available_cores
from cleanrl_utils.errors import UserError, one_line_errors, shell_command, user_errors

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


@dataclass
class Job:
    """One run, known by its command line. `state` is a text of the table."""

    env_id: str
    seed: int
    command: list[str]
    log: Path
    state: str = "not started"
    process: subprocess.Popen | None = None

    def run_dir(self) -> Path | None:
        """Return the run directory that the script printed last, or None."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        names = RUN_DIR.findall(text)
        return Path(names[-1]) if names else None

    def is_finished(self) -> bool:
        """Return whether the script has written the file that it writes at its end."""
        run_dir = self.run_dir()
        return run_dir is not None and (run_dir / "finished").exists()

    def start(self, environment: dict[str, str]) -> None:
        """Start the run, or resume it if it has a checkpoint; the log gets the command and the output."""
        run_dir = self.run_dir()
        command = self.command
        if run_dir and any(run_dir.glob("checkpoint/*.state")):
            command = [*command, "--resume", str(run_dir)]
        # The script ignores the signal that Slurm sends to all processes of a job, which would end a wrapper, or a
        # script without a handler for it.
        ignore = functools.partial(signal.signal, signal.SIGUSR2, signal.SIG_IGN)
        with user_errors("a run can't be started", "correct --command", OSError), self.log.open("a") as log:
            print(f"[benchmark] {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}", file=log, flush=True)
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(command, env=environment, preexec_fn=ignore, **streams)
        self.print_state("running")

    def wait(self) -> None:
        """Wait until the process has ended."""
        code = self.process.wait()
        ended = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        self.print_state("finished" if self.is_finished() else ended)

    def print_state(self, state: str) -> None:
        """Set and print a new state."""
        self.state = state
        print(f"{self.env_id} seed {self.seed}: {state}, see {self.log}", flush=True)


def make_jobs(args: Args) -> list[Job]:
    """Return all runs in CleanRL's order: every environment with the first seed, then with the next."""
    with user_errors("--command can't be parsed", "correct its quotes", ValueError):
        words = shlex.split(args.command)
    script = next((Path(word) for word in words if word.endswith(".py")), None)
    if script is None or not script.is_file():
        raise UserError(f'--command names no script in {Path.cwd()}; write "python cleanrl/dqn_atari.py"')
    jobs = []
    for seed in range(args.start_seed, args.start_seed + args.num_seeds):
        for env_id in dict.fromkeys(args.env_ids):
            game = env_id.replace("/", "-")
            command = [word.replace("{env_id}", game) for word in words]
            command += ["--env-id", env_id, "--seed", str(seed)]
            command_hash = hashlib.sha256(os.fsencode(shlex.join(command))).hexdigest()[:8]
            log = LOGS / f"{game}__{script.stem}__{seed}__{command_hash}.log"
            jobs.append(Job(env_id, seed, command, log))
    return jobs


def run_environment(worker: int, workers: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of one of ``workers`` runs at a time: its share of the CPU cores and GPUs."""
    # `python` is this Python, also where no environment is active.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    environment = os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // workers)))  # the scripts read it, too
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
    return environment


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    if not shutil.which("nvidia-smi"):
        return []
    output = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    return re.findall(r"\(UUID: (GPU-\S+)\)", output)


def run_jobs(jobs: Sequence[Job], workers: int) -> int:
    """Run all unfinished jobs, ``workers`` at a time. After a signal, the runs save a checkpoint and end.

    Returns:
        The number of the signal, or 0.
    """
    for job in jobs:
        if job.is_finished():
            job.state = "finished"
    waiting = [job for job in jobs if job.state != "finished"]
    workers = max(1, min(workers, len(waiting)))
    gpus = visible_gpus()
    running: dict[int, Job] = {}  # by worker
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: signals.append(number))
    try:
        while (running or waiting) and not signals:
            for worker in range(workers):
                if worker in running and running[worker].process.poll() is not None:
                    running.pop(worker).wait()
                if worker not in running and waiting:
                    job = waiting.pop(0)
                    job.start(run_environment(worker, workers, gpus))
                    running[worker] = job
            time.sleep(0.2)
    finally:  # after a signal or an error
        for job in running.values():
            job.process.terminate()
        for job in running.values():  # first, since printing fails if Ctrl-C ended `tee` as well
            job.process.wait()
        for job in running.values():
            job.wait()
    return signals[0] if signals else 0


def main(args: Args) -> None:
    """Run or print the commands; exit with 128 + the number of a signal, or with 1 if a run is not finished."""
    jobs = make_jobs(args)
    if args.workers < 1:
        print("\n".join(shell_command(job.command) for job in jobs))
        print("--workers is 0: the commands are only printed", file=sys.stderr)
        return
    if sys.platform == "win32":
        raise UserError("the benchmark runner needs Linux or macOS; run the commands that --workers 0 prints")
    LOGS.mkdir(exist_ok=True)
    number = run_jobs(jobs, args.workers)
    print(f"{'environment':30}  seed  {'state':16}  run directory")
    for job in jobs:
        print(f"{job.env_id:30}  {job.seed:4}  {job.state:16}  {job.run_dir() or ''}")
    if any(job.state != "finished" for job in jobs):
        print("the same command again skips finished runs and resumes the others")
        sys.exit(128 + number if number else 1)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, description=__doc__))
