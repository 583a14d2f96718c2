"""One run of a benchmark: start it, stop it, and read its state from its log.

The log is ``logs/{env_id}__{script}__{seed}__{hash of the command line}.log``. It contains the output of the script and
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
from dataclasses import dataclass
from pathlib import Path

import psutil

LOGS = Path("logs")
# Only directories that lie directly in runs/ match. The runner resumes from them and moves them.
RUN_DIR = re.compile(r"^run directory: (runs/[^./\n][^/\n]*)\n", re.MULTILINE)
FINISHED = re.compile(r"^\[benchmark\] \S+ \S+ finished", re.MULTILINE)
SLURM_ID = re.compile(r"^\[benchmark\] \S+ \S+ submitted to Slurm as (\S+)$", re.MULTILINE)
STOPPED = (124, 129, 130, 138, 143, -1, -2, -10, -15)  # `timeout`, SIGHUP, SIGINT, SIGUSR1, SIGTERM
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


@dataclass
class Job:
    """One run, known by its command line.

    `state` is "pending", "interrupted" (it has a checkpoint), "elsewhere" (another process runs it), "queued" (on
    Slurm), "running", "finished", "stopped" (by a signal) or "failed".
    """

    env_id: str
    seed: int
    script: list[str]  # the command up to and including the script
    flags: list[str]  # the rest of the command
    state: str = "pending"
    run_dir: Path | None = None
    slurm_id: str | None = None
    process: subprocess.Popen | None = None
    worker: int = 0

    def __post_init__(self) -> None:
        self.command = [*self.script, *self.flags, "--env-id", self.env_id, "--seed", str(self.seed)]
        name = f"{self.env_id.replace('/', '-')}__{Path(self.script[-1]).stem}__{self.seed}"
        self.log = LOGS / f"{name}__{hashlib.sha256(shlex.join(self.command).encode()).hexdigest()[:8]}.log"

    def __str__(self) -> str:
        return f"{self.env_id} seed {self.seed}"

    def note(self, text: str) -> None:
        """Append a note of the runner to the log."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n[benchmark] {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def read_log(self) -> str:
        """Return the text of the log, which is empty before the first start."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def last_lines(self) -> str:
        """Return the last ten lines of the log."""
        return "\n".join([line for line in self.read_log().splitlines() if line.strip()][-10:])

    def find_run_dir(self, log: str) -> bool:
        """Set `run_dir` to the last run directory in the log, if it exists, and return whether the log has one."""
        names = RUN_DIR.findall(log)
        self.run_dir = Path(names[-1]) if names and Path(names[-1]).is_dir() else None
        return bool(names)

    def read_state(self) -> None:
        """Set `run_dir`, `slurm_id` and `state` ("finished", "interrupted" or "pending") from the files."""
        log = self.read_log()
        self.slurm_id = (SLURM_ID.findall(log) or [None])[-1]
        # CleanRL's own scripts have no progress.json, only an exit code in the log.
        finished = self.progress().get("finished") if self.find_run_dir(log) else FINISHED.search(log)
        resumable = self.run_dir and any(self.run_dir.glob("checkpoint/*.state"))
        self.state = "finished" if finished else "interrupted" if resumable else "pending"

    def progress(self) -> dict:
        """Return the content of progress.json, or an empty dictionary if it cannot be read."""
        if self.process and not self.run_dir:
            self.find_run_dir(self.read_log())
        with suppress(OSError, ValueError):
            return json.loads((self.run_dir / "progress.json").read_bytes()) if self.run_dir else {}
        return {}

    def start(self, cores: Sequence[int] = (), gpus: Sequence[str] = ()) -> None:
        """Start or resume the run on ``cores`` and ``gpus``, unless it is finished or another process runs it."""
        with self.log.open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.state = "elsewhere"
                return
            except OSError:
                pass  # The file system has no locks. The script still locks its run directory.
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
                self.run_dir = None
            self.note(shlex.join(command))
            environment = os.environ | {"PYTHONUNBUFFERED": "1"}
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

            def prepare() -> None:
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it to every process, submitit handles it.
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

    def stop(self) -> None:
        """Send SIGTERM to the script, so that it saves a checkpoint and exits."""
        process = psutil.Process(self.process.pid)
        # Some wrappers, such as xvfb-run, do not pass signals on. Helper processes of the script must not get one.
        for candidate in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                words = candidate.cmdline()
                if self.script[-1] in words and Path(words[0]).name.startswith("python"):
                    return candidate.terminate()
        self.process.terminate()

    def kill(self) -> None:
        """Kill the script and every process that it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
