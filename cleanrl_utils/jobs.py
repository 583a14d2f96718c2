"""The runs of a benchmark: read their state from files, start and stop them on this machine.

A log is ``logs/{env_id}__{script}__{seed}__{hash of the command line}.log``. It contains the output of the script and
notes of the runner. The script holds a lock on it until it exits, so that no run is started twice.
"""

import fcntl
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOGS = Path("logs")
FINISHED = "finished"  # the file that a script writes to its run directory at its end
NOTE = re.compile(r"^\[benchmark\] \S+ \S+ (.*)$", re.MULTILINE)
SUBMITTED = "submitted to Slurm as "  # begins a note, which ends with the id of the job
# Only directories that lie directly in runs/ match. The runner resumes from them.
RUN_DIR = re.compile(r"^run directory: (runs/[^./\n][^/\n]*)\n", re.MULTILINE)


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
        """Append a note of the runner to the log."""
        with self.log.open("ab") as log:
            log.write(os.fsencode(f"\n[benchmark] {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"))

    def read_state(self) -> None:
        """Set `run_dir` and `slurm_id` from the files, and `state` to "finished", "interrupted" or "pending"."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        notes = NOTE.findall(text)
        names = RUN_DIR.findall(text)
        self.run_dir = Path(names[-1]) if names else None
        for note in notes:
            if note.startswith(SUBMITTED):
                self.slurm_id = note.removeprefix(SUBMITTED)

        self.state = "pending"
        if self.run_dir is None:
            # CleanRL's own scripts have no checkpoints, only an exit code in the log.
            if "exit code 0" in notes:
                self.state = "finished"
        elif (self.run_dir / FINISHED).exists():
            self.state = "finished"
        elif any(self.run_dir.glob("checkpoint/*.state")):
            self.state = "interrupted"

    def start(self, cores: Sequence[int], environment: dict[str, str]) -> None:
        """Start or resume the run, unless it is finished or another process runs it."""
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
            # The script inherits the lock with its output.
            self.process = subprocess.Popen(
                command,
                env=environment,
                preexec_fn=lambda: prepare_process(cores),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.state = "running"

    def finish(self, told_to_stop: bool) -> None:
        """Note the exit code of the process and set `state`, to "failed" if the run ended early by itself."""
        self.note(f"exit code {self.process.wait()}")
        self.process = None
        self.read_state()
        if self.state != "finished" and not told_to_stop:
            self.state = "failed"


def prepare_process(cores: Sequence[int]) -> None:
    """Pin this new process, in which a run starts, to ``cores``, and leave the signal of Slurm to its runner."""
    if cores:
        os.sched_setaffinity(0, cores)
    # Slurm sends it to all processes of a job. It would end a wrapper, or a script without a handler for it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def search_path() -> str:
    """Return PATH with the directory of this Python: `python` is this Python, also where no environment is active."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def run_environment(gpus: Sequence[str], runs_per_gpu: int) -> dict[str, str]:
    """Return the environment variables of a run on ``gpus``, each of which ``runs_per_gpu`` runs share."""
    environment = os.environ | {"PATH": search_path(), "PYTHONUNBUFFERED": "1"}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if runs_per_gpu > 1:
        # JAX allocates its share at the start. Alone on a GPU, the scripts take 0.92 of the memory.
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(920 // runs_per_gpu / 1000))
    return environment


def share(items: list, worker: int, workers: int) -> list:
    """Return one worker's part of the CPU cores or GPUs; workers share one item where there are fewer items."""
    begin = len(items) * worker // workers
    end = len(items) * (worker + 1) // workers
    return items[begin : max(end, begin + 1)]


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them, by index or UUID."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    if not shutil.which("nvidia-smi"):
        return []
    output = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    return re.findall(r"^GPU (\d+)", output, re.MULTILINE)


def run_locally(jobs: list[Job], workers: int) -> int:
    """Run all unfinished jobs on this machine, ``workers`` at a time, and print each change of state.

    Returns:
        Exit code: 0 if all runs are finished, otherwise 128 + the signal's number after a signal, otherwise 1.
    """
    for job in jobs:
        job.read_state()
    waiting = [job for job in jobs if job.state != "finished"]
    workers = max(1, min(workers, len(waiting)))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    gpus = visible_gpus()
    runs_per_gpu = math.ceil(workers / len(gpus)) if gpus else 1
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
                job.start(share(cores, worker, workers), run_environment(share(gpus, worker, workers), runs_per_gpu))
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


def print_state(job: Job) -> None:
    """Print a new state of a run."""
    print(f"{job.env_id} seed {job.seed}: {job.state}, see {job.log}", flush=True)
