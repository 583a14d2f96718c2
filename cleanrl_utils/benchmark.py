"""Runs a script on several games and seeds, as many at a time as there are workers, on this machine or on Slurm.

    python -m cleanrl_utils.benchmark --env-ids PongNoFrameskip-v4 BreakoutNoFrameskip-v4 \\
        --command "python cleanrl/qdagger_dqn_atari_impalacnn.py --track" --num-seeds 3 --workers 2

The same command again does what is left, whatever ended the one before. What has to be known of a run for that is in
its log, logs/{game}__{script}__{seed}__{hash of its command line}.log: the script writes into it, and holds it locked
for as long as it lives, so that it is never started twice. The log says where the run's directory is, and progress.json
in there how far the run has come.
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
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import tyro
from rich.console import Console
from rich.live import Live
from rich.table import Table

from cleanrl_utils.checks import UserError, one_line_errors

LOGS = Path("logs")
RUN_DIR = re.compile(r"^(?:run directory:|resuming) (runs/\S*\w)", re.MULTILINE)
NOTE = re.compile(r"^\[benchmark\] \S+ \S+ (.*)$", re.MULTILINE)
SUBMITTED_AS = "submitted to Slurm as "
STATES = ("running", "elsewhere", "failed", "stopped", "unfinished", "to do", "queued", "finished")
TO_BE_RUN = ("unfinished", "to do", "elsewhere")
STOPPED = (0, 143, 130, 129, 138, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGUSR1)
"""Exit codes of a run that was told to stop; 0 is that of --max-minutes where progress.json says that more is to do"""
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


@dataclass
class Args:
    env_ids: list[str]
    """the games"""
    command: str
    """what is run for each game and seed, with --env-id and --seed added: "python cleanrl/dqn_atari.py --track\""""
    num_seeds: int = 3
    """seeds of each game"""
    start_seed: int = 1
    """the first of them"""
    workers: int | None = None
    """runs at a time, each with its share of the cores and GPUs; 0 prints the commands. Without the flag they are
    printed, too, or with `--cluster slurm` run as many at a time as Slurm allows"""
    auto_tag: bool = True
    """tags runs in W&B with what `git describe` says, unless WANDB_TAGS is set"""
    cluster: Literal["local", "slurm"] = "local"
    """where to run"""
    slurm_partition: str | None = None
    """as sbatch's --partition"""
    slurm_account: str | None = None
    """as sbatch's --account"""
    slurm_time: int = 1440
    """minutes that a job may take; a run that takes longer saves in time, is queued again and goes on"""
    slurm_mem_gb: int | None = None
    """memory of a run, GB"""
    slurm_gpus_per_task: int | None = None
    """GPUs of a run"""
    slurm_total_cpus: int | None = None
    """cores of --slurm-ntasks runs"""
    slurm_ntasks: int = 1
    """how many runs --slurm-total-cpus is for"""
    slurm_nodes: int = 1
    """a run takes one node"""
    slurm_template_path: str | None = None
    """replaced by `--cluster slurm` and the flags above"""


@dataclass
class Job:
    """One run of the benchmark.

    `state` is "to do", "unfinished" (there is a checkpoint to go on from) or "elsewhere" (another process has it) at
    first; then "queued" (on Slurm) and "running"; at last "finished", "stopped" (it was told to) or "failed".
    """

    env_id: str
    seed: int
    script: list[str]
    """the command up to its script"""
    flags: list[str]
    """the rest of it"""
    state: str = "to do"
    run_dir: Path | None = None
    slurm_id: str | None = None
    process: subprocess.Popen | None = None
    worker: int = 0
    not_before: float = 0
    """of the monotonic clock"""
    log_start: int = 0
    """size of the log before this process"""

    def __str__(self) -> str:
        return f"{self.env_id} seed {self.seed}"

    @property
    def command(self) -> list[str]:
        """What starts the run, and tells it from others."""
        return [*self.script, *self.flags, "--env-id", self.env_id, "--seed", str(self.seed)]

    @property
    def log(self) -> Path:
        name = f"{self.env_id.replace('/', '-')}__{Path(self.script[-1]).stem}__{self.seed}"
        return LOGS / f"{name}__{hashlib.sha256(shlex.join(self.command).encode()).hexdigest()[:8]}.log"

    def note(self, text: str) -> None:
        """Adds a line of the runner's own to the log."""
        with self.log.open("a") as log:
            log.write(f"\n[benchmark] {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def last_lines(self) -> str:
        """What the script said last."""
        with self.log.open("rb") as log:
            log.seek(max(self.log_start, log.seek(0, os.SEEK_END) - 20_000))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip() and not NOTE.match(line)][-10:])

    def judge(self) -> None:
        """Sets the state to "finished", "unfinished" or "to do", by the log and the run's directory."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        run_dirs, slurm_ids = RUN_DIR.findall(text), re.findall(SUBMITTED_AS + r"(\S+)$", text, re.MULTILINE)
        outcome = [note for note in NOTE.findall(text) if not note.startswith(SUBMITTED_AS)][-1:]
        self.slurm_id = slurm_ids[-1] if slurm_ids else None
        self.run_dir = Path(run_dirs[-1]) if run_dirs else None
        gone = self.run_dir is not None and not self.run_dir.exists()
        if gone:
            self.run_dir = None
        if self.progress().get("finished") or (not gone and outcome and outcome[0].startswith("finished")):
            self.state = "finished"
        else:
            self.state = "unfinished" if self.run_dir and any(self.run_dir.glob("checkpoint/*.state")) else "to do"

    def progress(self) -> dict[str, Any]:
        """How far the run has come, by its own account; empty where it gives none."""
        if self.run_dir is None and self.process:
            with self.log.open("rb") as log:
                log.seek(self.log_start)
                found = RUN_DIR.search(log.read(100_000).decode(errors="replace"))
            self.run_dir = Path(found[1]) if found else None
        with suppress(OSError, ValueError):
            return json.loads((self.run_dir / "progress.json").read_text()) if self.run_dir else {}
        return {}

    def start(self, cores: Sequence[int] = (), gpus: Sequence[str] = ()) -> None:
        """Starts the run, or goes on with it, unless it is finished or another process has it.

        Args:
            cores: those that it may use; none given, all.
            gpus: likewise, as CUDA_VISIBLE_DEVICES names them.
        """
        with self.log.open("ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.state, self.not_before = "elsewhere", time.monotonic() + 1
                return
            except OSError:
                pass  # a filesystem that knows no locks; the script still looks after its own directory
            self.judge()
            if self.state == "finished":
                return
            command = self.command
            if self.state == "unfinished":
                command = [*self.script, "--resume", str(self.run_dir)]
            elif self.run_dir:
                # Without a checkpoint it begins again in another directory, and this one would count as a second run.
                shutil.move(self.run_dir, LOGS)
                self.run_dir = None
            self.note(shlex.join(command))
            self.log_start = self.log.stat().st_size
            environment = os.environ | {"PATH": search_path(), "PYTHONUNBUFFERED": "1"}
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            runner = os.getpid()

            def prepare() -> None:
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it to all processes, and means submitit's
                if sys.platform == "linux":
                    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
                    if os.getppid() != runner:
                        os.kill(os.getpid(), signal.SIGTERM)
                    os.sched_setaffinity(0, cores or os.sched_getaffinity(0))

            # In a session of its own: Ctrl-C is for the runner. Standard output is the log, and hands on its lock.
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(
                command, **streams, env=environment, start_new_session=True, preexec_fn=prepare
            )
        self.state = "running"

    def end(self) -> int:
        """Sets the state to what came of the process, which has ended; returns its exit code."""
        code, said = self.process.wait(), self.last_lines()
        self.process = None
        self.judge()
        if self.state != "finished":
            without_checkpoints = self.state == "to do" and not self.progress()  # such as CleanRL's own
            if (code == 0 and without_checkpoints) or (code == 2 and "this run is finished" in said):
                self.state = "finished"
            elif code == 2 and "still running in another process" in said:
                self.state, self.not_before = "elsewhere", time.monotonic() + 10
            else:
                self.state = "stopped" if code in STOPPED else "failed"
        self.note(f"{self.state}, {f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}")
        return code

    def stop(self) -> None:
        """SIGTERM to the script itself: not every wrapper hands it on, and what else it has started is to live on."""
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            for candidate in [process, *process.children(recursive=True)]:
                with suppress(psutil.Error, IndexError):
                    words = candidate.cmdline()
                    if Path(words[0]).name.startswith("python") and self.script[-1] in words:
                        return candidate.terminate()
        self.process.terminate()

    def kill(self) -> None:
        """Ends the script and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def search_path() -> str:
    """PATH behind the directory of this Python, which `python` then is also where no environment is active."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def parse_command(text: str) -> tuple[list[str], list[str]]:
    """Divides a command behind its script.

    Raises:
        UserError: it runs no Python script, or one that is not there.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--command {text!r} can't be read ({error}); close its quotes") from error
    python = next((i for i, word in enumerate(words) if re.fullmatch(r"python[\d.]*", Path(word).name)), None)
    script = next((i for i, word in enumerate(words[python:], python or 0) if word.endswith(".py")), None)
    if python is None or script is None:
        missing = "does not say python" if python is None else "names no script"
        raise UserError(f'--command {text!r} {missing}; write it like "python cleanrl/dqn_atari.py --track"')
    if not Path(words[script]).is_file():
        raise UserError(f"--command: there is no {words[script]} in {Path.cwd()}; give the script's path from there")
    if not shutil.which(words[0], path=search_path()):
        raise UserError(f'--command: there is no {words[0]} here; write "python {words[script]} …" without it')
    return words[: script + 1], words[script + 1 :]


def make_jobs(args: Args) -> list[Job]:
    """The runs, in CleanRL's order: every game with the first seed, then with the next.

    Raises:
        UserError: a flag can't be meant like that.
    """
    if args.slurm_template_path:
        raise UserError(
            "--slurm-template-path is replaced by --cluster slurm, which needs no template: add --slurm-partition, "
            "--slurm-account, --slurm-time (minutes) and --slurm-mem-gb as your template has them"
        )
    if args.cluster == "local" and (args.slurm_partition or args.slurm_account or args.slurm_mem_gb):
        raise UserError("--slurm-partition, --slurm-account and --slurm-mem-gb are for --cluster slurm; add it")
    least = {"workers": 0, "num_seeds": 1, "start_seed": 0, "slurm_time": 1, "slurm_mem_gb": 1}
    least |= {"slurm_gpus_per_task": 0, "slurm_total_cpus": 1, "slurm_ntasks": 1}
    for name, number in least.items():
        value = getattr(args, name)
        if value is not None and value < number:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {number}")
    if args.slurm_nodes != 1:
        raise UserError(f"--slurm-nodes is {args.slurm_nodes}; a run takes one node, Slurm chooses which: leave it out")
    if not args.env_ids:
        raise UserError("--env-ids names no game; give one or more, such as PongNoFrameskip-v4")
    script, flags = parse_command(args.command)
    seeds = range(args.start_seed, args.start_seed + args.num_seeds)
    return [Job(env_id, seed, script, flags) for seed in seeds for env_id in dict.fromkeys(args.env_ids)]


def share(items: Sequence[Any], worker: int, workers: int) -> Sequence[Any]:
    """A worker's part of the cores or GPUs; one that it has with others, where they are fewer than workers."""
    begin, end = (len(items) * i // workers for i in (worker, worker + 1))
    return items[begin:end] or [items[worker % len(items)]] if items else []


def visible_gpus() -> list[str]:
    """NVIDIA's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    if visible is not None or not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed))]


def columns(job: Job) -> list[str]:
    """Phase with progress, latest return, and the time that the phase still takes."""
    progress = job.progress()
    done, total, score, left = (progress.get(key) for key in ("done", "total", "return", "seconds_left"))
    phase = f"{progress.get('phase') or ''} {f'{done / total:.0%}' if total else ''}".strip()
    minutes = "" if left is None or job.state != "running" else f"{left / 60:.0f} min"
    return [phase, "" if score is None else f"{score:.1f}", minutes]


def table(jobs: Sequence[Job]) -> Table:
    """A row for each run."""
    result = Table(title=", ".join(f"{number} {state}" for state, number in Counter(job.state for job in jobs).items()))
    for name in ("game", "seed", "state", "phase", "return", "left of it", "directory"):
        result.add_column(name, justify="right" if name in ("seed", "return", "left of it") else "left")
    for job in jobs:
        result.add_row(job.env_id, str(job.seed), job.state, *columns(job), str(job.run_dir or ""))
    return result


def summary(jobs: Sequence[Job]) -> str:
    """For a log: a line for each state, with the progress of what is running."""
    lines = []
    for state in sorted({job.state for job in jobs}, key=STATES.index):
        those = [" ".join([str(job), *filter(None, columns(job))]) for job in jobs if job.state == state]
        lines.append(f"{time.strftime('%H:%M')} {len(those)} {state}: {', '.join(those)}")
    return "\n".join(lines)


def make_console() -> Console:
    """Standard output; a log is as wide as the table."""
    return Console(width=None if sys.stdout.isatty() else 160)


def run_here(jobs: list[Job], workers: int) -> int:
    """Runs what is left on this machine.

    Returns:
        Exit code: 0 if all runs are finished, 1 if not, 130 or 143 after a signal.
    """
    for job in jobs:
        job.judge()
    workers = max(1, min(workers, sum(job.state != "finished" for job in jobs)))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    gpus, free = visible_gpus(), list(range(workers))
    console = make_console()
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    told, shown = 0, -60.0
    with live or nullcontext():
        while True:
            for job in jobs:
                before = job.state
                if job.process and job.process.poll() is not None:
                    job.end()
                    free.append(job.worker)
                elif job.state in TO_BE_RUN and free and not signals and time.monotonic() >= job.not_before:
                    job.worker = min(free)
                    job.start(share(cores, job.worker, workers), share(gpus, job.worker, workers))
                    if job.process:
                        free.remove(job.worker)
                if job.state != before:
                    say(f"{job}: {job.state}")
                    if job.state == "failed" and told < 2:
                        say(f"the last lines of {job.log}:\n{job.last_lines()}\n")
            running = [job for job in jobs if job.process]
            if len(signals) > told:
                told += 1
                if told == 1:
                    say(f"waiting for {len(running)} runs to save what they have; Ctrl-C again kills them")
                for job in running:
                    job.stop() if told == 1 else job.kill()
            if not running and (signals or not any(job.state in TO_BE_RUN for job in jobs)):
                break
            if time.monotonic() - shown > (1 if live else 60):
                shown = time.monotonic()
                if live:  # what does not fit is cut off below
                    live.update(table(sorted(jobs, key=lambda job: STATES.index(job.state))), refresh=True)
                else:
                    say(summary(jobs))
            time.sleep(0.2)
    console.print(table(jobs))
    left = sum(job.state != "finished" for job in jobs)
    if left:
        say(f"{left} of {len(jobs)} runs are not finished; the same command goes on with them")
    return 128 + signals[0] if signals else int(left > 0)


def git_tag() -> str | None:
    """What git calls this commit: by the tag behind it, or by its hash."""
    with suppress(OSError):
        described = subprocess.run(["git", "describe", "--tags", "--always"], capture_output=True, text=True)
        return described.stdout.strip() or None
    return None


def main() -> None:
    """The command line."""
    with one_line_errors():
        args = tyro.cli(Args, description=__doc__)
        jobs = make_jobs(args)
        if not args.workers and (args.workers == 0 or args.cluster == "local"):
            print("\n".join(shlex.join(job.command) for job in jobs))
            print("these are the commands; --workers 1, or more, runs them", file=sys.stderr)
            return
        try:
            LOGS.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{LOGS.absolute()} can't be made ({error.strerror}); start from another folder") from error
        if args.auto_tag and (tag := git_tag()):
            os.environ.setdefault("WANDB_TAGS", tag)
        if args.cluster == "local":
            sys.exit(run_here(jobs, args.workers))
        try:
            from cleanrl_utils.slurm import submit
        except ImportError as error:
            raise UserError(f"--cluster slurm needs submitit ({error}): pip install submitit") from error
        submit(jobs, args)


if __name__ == "__main__":
    # What is pickled for Slurm is found there under this name, not under __main__.
    from cleanrl_utils.benchmark import main

    main()
