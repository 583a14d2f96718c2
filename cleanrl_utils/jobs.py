"""The runs of a benchmark: read their state from their logs, start and stop them on this machine.

A log is ``logs/{env_id}__{script}__{seed}__{hash of the command line}.log``. It contains the output of the script and
notes of the runner. The script holds a lock on it until it exits, so that no run is started twice.
"""

import ctypes
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from cleanrl_utils.errors import user_errors

LOGS = Path("logs")
NOTE = re.compile(r"^\[benchmark\] \S+ \S+ (.*)$", re.MULTILINE)
SUBMITTED = "submitted to Slurm as "  # begins a note, which ends with the id of the job
# Only directories that lie directly in runs/ match. The runner resumes from them.
RUN_DIR = re.compile(r"^run directory: (runs/[^./\n][^/\n]*)\n", re.MULTILINE)
STOP_CODES = (124, 129, 130, 138, 140, 143, 152, -1, -2, -10, -12, -15, -24)  # `timeout`, SIGNALS of checkpoint.py
REMEDY = "make room, allow it, or use another folder"
STARTABLE = ("interrupted", "pending", "elsewhere")
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
NOT_INHERITED = (  # by the runs
    # Of a W&B sweep or notebook: all runs would be the same run of W&B, or end with the notebook.
    "WANDB_LAUNCH",
    "WANDB_RUN_ID",
    "WANDB_SERVICE",
    "WANDB_SWEEP_ID",
    "WANDB_SWEEP_PARAM_PATH",
    "PYTHONINSPECT",  # changes exit codes
)


@dataclass
class Job:
    """One run, known by its command line.

    `state` is "pending", "interrupted" (it has a checkpoint), "elsewhere" (another process runs it), "queued" (on
    Slurm), "running", "finished", "stopped" (by a signal) or "failed".
    """

    env_id: str
    seed: int
    script: str
    command: list[str]
    state: str = "pending"
    run_dir: Path | None = None
    progress: dict = field(default_factory=dict)  # the content of progress.json
    slurm_id: str | None = None
    submitted: bool = False  # to Slurm, and not started since
    process: subprocess.Popen | None = None
    worker: int = 0

    def __post_init__(self) -> None:
        name = f"{self.env_id.replace('/', '-')}__{Path(self.script).stem}__{self.seed}"
        command_hash = hashlib.sha256(os.fsencode(shlex.join(self.command))).hexdigest()[:8]
        self.log = LOGS / f"{name}__{command_hash}.log"
        self.failure_log = self.log  # contains the reason where `state` is "failed"

    @contextmanager
    def open_log(self) -> Iterator[BinaryIO]:
        """Open the log to append to it; raise a UserError if it can't be written."""
        with user_errors(f"{self.log} can't be written", REMEDY, OSError), self.log.open("ab") as log:
            yield log

    def note(self, text: str) -> None:
        """Append a note of the runner to the log."""
        with self.open_log() as log:
            log.write(os.fsencode(f"\n[benchmark] {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"))

    def read_log(self) -> str:
        """Return the content of the log, which is empty before the first run."""
        with user_errors(f"{self.log} can't be read", REMEDY, OSError):
            try:
                return self.log.read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                return ""

    def read_state(self) -> None:
        """Set the other fields from the files, and `state` to "finished", "interrupted" or "pending"."""
        text = self.read_log()
        notes = NOTE.findall(text)
        submissions = [note for note in notes if note.startswith(SUBMITTED)]
        self.slurm_id = submissions[-1].removeprefix(SUBMITTED) if submissions else None
        self.submitted = bool(submissions) and notes[-1] == submissions[-1]

        names = RUN_DIR.findall(text)
        self.run_dir = None
        if names and os.path.isdir(names[-1]):
            self.run_dir = Path(names[-1])
        self.progress = {}
        if self.run_dir:
            with suppress(OSError, ValueError, TypeError):
                self.progress = dict(json.loads((self.run_dir / "progress.json").read_bytes()))

        self.state = "pending"
        # CleanRL's own scripts have no progress.json, only an exit code in the log.
        has_ended = any(note.startswith("finished") for note in notes)
        if self.progress.get("finished") or (has_ended and not names):
            self.state = "finished"
        elif self.run_dir and any(self.run_dir.glob("checkpoint/*.state")):
            self.state = "interrupted"

    def start(self, cores: Sequence[int] = (), gpus: Sequence[str] = (), runs_per_gpu: int = 1) -> None:
        """Start or resume the run on ``cores`` and ``gpus``, unless it is finished or another process runs it.

        Raises:
            UserError: the log can't be written, or the program can't be started.
        """
        with self.open_log() as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.state = "elsewhere"
                return
            except OSError:
                pass  # The file system has no locks. The script locks its run as well.
            self.read_state()
            if self.state == "finished":
                return
            command = self.command
            name = f"{self.env_id} seed {self.seed}"
            with user_errors(f"{name} can't be started", "check --command and the folder", OSError):
                if self.state == "interrupted":
                    command = [*command, "--resume", str(self.run_dir)]
                # In a new session, Ctrl-C reaches the runner only. The script inherits the lock with its output.
                self.process = subprocess.Popen(
                    command,
                    env=run_environment(gpus, runs_per_gpu),
                    preexec_fn=lambda: prepare_process(cores),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.note(shlex.join(command))
        self.state = "running"

    def finish(self) -> None:
        """Wait for the process to exit and set `state` to "finished", "stopped" or "failed"."""
        code = self.process.wait()
        self.process = None
        self.read_state()
        if code == 0 and self.state == "pending":  # a script without checkpoints, such as CleanRL's own
            self.state = "finished"
        elif self.state != "finished":
            self.state = "stopped" if code in STOP_CODES else "failed"
        ending = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        self.note(f"{self.state}, {ending}")


def make_logs() -> None:
    """Make the directory of the logs; raise a UserError if it can't be written."""
    with user_errors(f"logs can't be written in {Path.cwd()}", REMEDY, OSError):
        LOGS.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=LOGS).close()


def prepare_process(cores: Sequence[int]) -> None:
    """Set up this new process, in which a run starts, for the signals of its runner and for ``cores``."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it to the runner and its runs.
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # A run stops when its runner is killed.
    if cores:
        os.sched_setaffinity(0, cores)


def search_path() -> str:
    """Return PATH with the directory of this Python: `python` is this Python, also where no environment is active."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def run_environment(gpus: Sequence[str], runs_per_gpu: int) -> dict[str, str]:
    """Return the environment variables of a run on ``gpus``, each of which ``runs_per_gpu`` runs share."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    environment["PATH"] = search_path()
    environment["PYTHONUNBUFFERED"] = "1"
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    fraction_is_set = "XLA_PYTHON_CLIENT_MEM_FRACTION" in environment or "XLA_CLIENT_MEM_FRACTION" in environment
    if runs_per_gpu > 1 and not fraction_is_set:
        # JAX allocates its share at the start. Alone on a GPU, the scripts take 0.92 of the memory.
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(920 // runs_per_gpu / 1000)
    return environment


def share(items: list, worker: int, workers: int) -> list:
    """Return one worker's part of the CPU cores or GPUs; workers share one item where there are fewer items."""
    begin = len(items) * worker // workers
    end = len(items) * (worker + 1) // workers
    return items[begin : max(end, begin + 1)]


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them, by index or UUID."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = []
        for name in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
            if not re.fullmatch(r"\d+|(GPU|MIG)-.+", name.strip()):
                break  # CUDA ignores an invalid name, such as -1 or NoDevFiles, and all names after it.
            gpus.append(name.strip())
        return gpus
    if not shutil.which("nvidia-smi"):
        return []
    output = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    return re.findall(r"^GPU (\d+)", output, re.MULTILINE)


def mps_is_running() -> bool:
    """Return whether NVIDIA's MPS runs, which lets the kernels of several processes run on a GPU at the same time."""
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return Path(directory, "nvidia-cuda-mps-control.pid").exists()


def run_locally(jobs: list[Job], workers: int) -> int:
    """Run all unfinished jobs on this machine, ``workers`` at a time, and print each change of state.

    Returns:
        Exit code: 0 if all runs are finished, otherwise 128 + the signal's number after a signal, otherwise 1.
    """
    for job in jobs:
        job.read_state()
    unfinished = [job for job in jobs if job.state != "finished"]
    workers = max(1, min(workers, len(unfinished)))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    gpus = visible_gpus()
    runs_per_gpu = math.ceil(workers / len(gpus)) if gpus else 1
    if runs_per_gpu > 1 and not mps_is_running():
        mps = "they may be faster with NVIDIA's MPS, started before them: nvidia-cuda-mps-control -d"
        print(f"{runs_per_gpu} runs share a GPU; {mps}", flush=True)
    free_workers = list(range(workers))
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: signals.append(number))
    stopping = False
    while True:
        for job in jobs:
            previous = job.state
            if job.process and job.process.poll() is not None:
                job.finish()
                free_workers.append(job.worker)
            elif job.state in STARTABLE and free_workers and not signals:
                job.worker = min(free_workers)
                job.start(share(cores, job.worker, workers), share(gpus, job.worker, workers), runs_per_gpu)
                if job.process:
                    free_workers.remove(job.worker)
            if job.state != previous:
                print(f"{job.env_id} seed {job.seed}: {job.state}, see {job.log}", flush=True)
        processes = [job.process for job in jobs if job.process]
        if signals and not stopping:
            stopping = True
            print("stopping: the runs save a checkpoint; a second Ctrl-C kills them", flush=True)
            for process in processes:
                process.terminate()
        if signals.count(signal.SIGINT) > 1:
            for process in processes:
                os.killpg(process.pid, signal.SIGKILL)
        may_start = not signals and any(job.state in STARTABLE for job in jobs)
        if not processes and not may_start:
            break
        time.sleep(0.2)
    if all(job.state == "finished" for job in jobs):
        return 0
    return 128 + signals[0] if signals else 1
