"""The runs of a benchmark: read their state from their logs, start and stop them on this machine.

A log is ``logs/{env_id}__{script}__{seed}__{hash of the command line}.log``. It contains the output of the script and
notes of the runner. The script holds a lock on it until it exits, so that no run is started twice.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

LOGS = Path("logs")
# Only directories that lie directly in runs/ match. The runner resumes from them and moves them.
RUN_DIR = re.compile(r"^run directory: (runs/[^./\n][^/\n]*)\n", re.MULTILINE)
FINISHED = re.compile(r"^\[benchmark\] \S+ \S+ finished", re.MULTILINE)
SLURM_ID = re.compile(r"^\[benchmark\] \S+ \S+ submitted to Slurm as (\S+)$", re.MULTILINE)
STOPPED = (124, 129, 130, 138, 140, 143, 152, -1, -2, -10, -12, -15, -24)  # `timeout`, and SIGNALS of checkpoint.py
STARTABLE = ("interrupted", "pending", "elsewhere")
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


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
    process: subprocess.Popen | None = None
    worker: int = 0

    def __post_init__(self) -> None:
        name = f"{self.env_id.replace('/', '-')}__{Path(self.script).stem}__{self.seed}"
        self.log = LOGS / f"{name}__{hashlib.sha256(shlex.join(self.command).encode()).hexdigest()[:8]}.log"

    def note(self, text: str) -> None:
        """Append a note of the runner to the log."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n[benchmark] {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def read_state(self) -> None:
        """Set `run_dir`, `progress`, `slurm_id` and `state` ("finished", "interrupted" or "pending") from the files."""
        log = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        self.slurm_id = (SLURM_ID.findall(log) or [None])[-1]
        names = RUN_DIR.findall(log)
        self.run_dir = Path(names[-1]) if names and Path(names[-1]).is_dir() else None
        self.progress = {}
        if self.run_dir:
            with suppress(OSError, ValueError, TypeError):
                self.progress = dict(json.loads((self.run_dir / "progress.json").read_bytes()))
        # CleanRL's own scripts have no progress.json, only an exit code in the log.
        finished = self.progress.get("finished") if names else FINISHED.search(log)
        resumable = self.run_dir and any(self.run_dir.glob("checkpoint/*.state"))
        self.state = "finished" if finished else "interrupted" if resumable else "pending"

    def start(self, cores: Sequence[int] = (), gpus: Sequence[str] = ()) -> None:
        """Start or resume the run on ``cores`` and ``gpus``, unless it is finished or another process runs it."""
        with self.log.open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # Another one if the file system has no locks. The script locks its run as well.
                if isinstance(error, BlockingIOError):
                    self.state = "elsewhere"
                    return
            self.read_state()
            if self.state == "finished":
                return
            command = self.command
            if self.state == "interrupted":
                # The script restores its flags, except those of an upload.
                command = [*command, "--resume", str(self.run_dir)]
            elif self.run_dir:
                # The report would count an abandoned directory as a run of its own.
                shutil.move(self.run_dir, LOGS)
            self.note(shlex.join(command))
            environment = os.environ | {"PYTHONUNBUFFERED": "1"}
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

            def prepare() -> None:
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it to the runner and its runs.
                if sys.platform == "linux":
                    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # A run stops when its runner is killed.
                if cores:
                    os.sched_setaffinity(0, cores)

            # In a new session, Ctrl-C reaches the runner only. The script inherits the lock with its standard output.
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen(command, env=environment, preexec_fn=prepare, **options)
        self.state = "running"

    def finish(self) -> None:
        """Wait for the process to exit and set `state` to "finished", "stopped" or "failed"."""
        code, self.process = self.process.wait(), None
        self.read_state()
        if code == 0 and self.state == "pending":  # a script without checkpoints, such as CleanRL's own
            self.state = "finished"
        elif self.state != "finished":
            self.state = "stopped" if code in STOPPED else "failed"
        self.note(f"{self.state}, {f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}")


def share(items: list, worker: int, workers: int) -> list:
    """Return one worker's part of the CPU cores or GPUs; workers share one item where there are fewer items."""
    begin, end = (len(items) * i // workers for i in (worker, worker + 1))
    return items[begin:end] or [items[worker % len(items)]] if items else []


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    output = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    return re.findall(r"^GPU (\d+)", output, re.MULTILINE)


def run_locally(jobs: list[Job], workers: int) -> int:
    """Run all unfinished jobs on this machine, ``workers`` at a time, and print each change of state.

    Returns:
        Exit code: 0 if all runs are finished, otherwise 128 + the signal's number after a signal, otherwise 1.
    """
    workers = max(1, min(workers, sum(job.state != "finished" for job in jobs)))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    gpus, free_workers = visible_gpus(), list(range(workers))
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: signals.append(number))
    stopping = False
    while any(job.process for job in jobs) or (not signals and any(job.state in STARTABLE for job in jobs)):
        for job in jobs:
            previous = job.state
            if job.process and job.process.poll() is not None:
                job.finish()
                free_workers.append(job.worker)
            elif job.state in STARTABLE and free_workers and not signals:
                job.worker = min(free_workers)
                job.start(share(cores, job.worker, workers), share(gpus, job.worker, workers))
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
        time.sleep(0.2)
    if all(job.state == "finished" for job in jobs):
        return 0
    return 128 + signals[0] if signals else 1
