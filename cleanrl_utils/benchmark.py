"""Run a script on several environments and seeds, on this machine or on Slurm.

    python -m cleanrl_utils.benchmark --env-ids PongNoFrameskip-v4 BreakoutNoFrameskip-v4 \\
        --command "python cleanrl/qdagger_dqn_atari_impalacnn.py --track" --num-seeds 3 --workers 2

The same command again skips finished runs and resumes the others. Output and state of each run are in ``logs/``.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from cleanrl_utils.errors import UserError, one_line_errors, require_packages
from cleanrl_utils.jobs import LOGS, Job

STATES = ("running", "elsewhere", "failed", "stopped", "interrupted", "pending", "queued", "finished")
STARTABLE = ("interrupted", "pending", "elsewhere")


@dataclass
class Args:
    env_ids: list[str]
    """the environment ids"""
    command: str
    """the command to run for each environment and seed, without --env-id and --seed: "python cleanrl/dqn_atari.py\""""
    num_seeds: int = 3
    """the number of seeds for each environment"""
    start_seed: int = 1
    """the first seed"""
    workers: int | None = None
    """the number of runs at a time, with equal shares of the CPU cores and GPUs; 0 prints the commands"""
    auto_tag: bool = True
    """tag the runs in W&B with the output of `git describe`, unless WANDB_TAGS is set"""
    cluster: Literal["local", "slurm"] = "local"
    """where to run"""
    slurm_partition: str | None = None
    """the partition, as --partition of sbatch"""
    slurm_account: str | None = None
    """the account, as --account of sbatch"""
    slurm_time: int = 1440
    """the time limit of a job in minutes. A longer run saves a checkpoint before it, is queued again and resumes"""
    slurm_mem_gb: int | None = None
    """the memory of a run in GB"""
    slurm_gpus_per_task: int | None = None
    """the number of GPUs of a run"""
    slurm_total_cpus: int | None = None
    """the number of CPU cores of --slurm-ntasks runs"""
    slurm_ntasks: int = 1
    """the number of runs that share --slurm-total-cpus"""
    slurm_nodes: Literal[1] = 1
    """the number of nodes of a run"""
    slurm_template_path: str | None = None
    """not accepted; use --cluster slurm and the flags above"""


def make_jobs(args: Args) -> list[Job]:
    """Return all runs in CleanRL's order: every environment with the first seed, then with the next."""
    for name, minimum in (("workers", 0), ("num_seeds", 1), ("slurm_time", 1), ("slurm_ntasks", 1)):
        if (value := getattr(args, name)) is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {minimum}")
    if not args.env_ids:
        raise UserError("--env-ids is empty; give one environment id or more, such as PongNoFrameskip-v4")
    if args.slurm_template_path:
        raise UserError("--slurm-template-path is not supported; use --cluster slurm, --slurm-partition and the like")
    if args.cluster == "local" and (args.slurm_partition or args.slurm_account or args.slurm_mem_gb):
        raise UserError("--slurm-partition, --slurm-account and --slurm-mem-gb need --cluster slurm; add it")
    try:
        words = shlex.split(args.command)
    except ValueError as error:
        raise UserError(f"--command {args.command!r} cannot be parsed ({error}); close its quotes") from error
    end = next((i for i, word in enumerate(words, 1) if word.endswith(".py")), 0)
    if not end:
        raise UserError(f'--command {args.command!r} has no script; write it like "python cleanrl/dqn_atari.py"')
    script, flags = words[:end], words[end:]
    if not Path(script[-1]).is_file():
        raise UserError(f"--command: {script[-1]} was not found in {Path.cwd()}; give the script's path from there")
    if not shutil.which(script[0]):
        raise UserError(f'--command: {script[0]} is not a program; write "python {script[-1]}"')
    seeds = range(args.start_seed, args.start_seed + args.num_seeds)
    return [Job(env_id, seed, script, flags) for seed in seeds for env_id in dict.fromkeys(args.env_ids)]


def share(items: list, worker: int, workers: int) -> list:
    """Return one worker's part of the CPU cores or GPUs; workers share one item where there are fewer items."""
    begin, end = (len(items) * i // workers for i in (worker, worker + 1))
    return items[begin:end] or [items[worker % len(items)]] if items else []


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        output = subprocess.run(command, capture_output=True, text=True).stdout
        visible = ",".join(re.findall(r"^\d+$", output, re.MULTILINE))
    return visible.split(",") if visible else []


def make_table(jobs: list[Job], states: tuple[str, ...] = STATES) -> Table:
    """Return a table of the runs in these states, in that order; its title counts the runs in all states."""
    counts = Counter(job.state for job in jobs)
    table = Table(title=", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]))
    for name in ("environment", "seed", "state", "phase", "return", "time left", "run directory"):
        table.add_column(name, justify="right" if name in ("seed", "return", "time left") else "left")
    for job in sorted((job for job in jobs if job.state in states), key=lambda job: STATES.index(job.state)):
        progress = job.progress()
        done, total, latest_return, seconds = (progress.get(key) for key in ("done", "total", "return", "seconds_left"))
        phase = f"{progress.get('phase') or ''} {f'{done / total:.0%}' if total else ''}"
        time_left = "" if seconds is None or job.state != "running" else f"{seconds / 60:.0f} min"
        cells = phase, "" if latest_return is None else f"{latest_return:.1f}", time_left, str(job.run_dir or "")
        table.add_row(job.env_id, str(job.seed), job.state, *cells)
    return table


def run_locally(jobs: list[Job], workers: int, console: Console) -> int:
    """Run all unfinished jobs on this machine; print changes of state at once and a table every minute.

    Returns:
        Exit code: 0 if all runs are finished, 128 + the signal's number after a signal, 1 otherwise.
    """
    for job in jobs:
        job.read_state()
    workers = max(1, min(workers, sum(job.state != "finished" for job in jobs)))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    gpus, free_workers = visible_gpus(), list(range(workers))
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    handled_signals, last_shown = 0, -60.0
    while True:
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
                print(f"{job}: {job.state}", flush=True)
                if job.state == "failed" and handled_signals < 2:
                    print(f"the last lines of {job.log}:\n{job.last_lines()}\n", flush=True)
        running = [job for job in jobs if job.process]
        if len(signals) > handled_signals:
            handled_signals += 1
            print(f"stopping {len(running)} runs: they save a checkpoint; a second Ctrl-C kills them", flush=True)
            for job in running:
                job.stop() if handled_signals == 1 else job.kill()
        if not running and (signals or not any(job.state in STARTABLE for job in jobs)):
            break
        if time.monotonic() - last_shown > 60:
            last_shown = time.monotonic()
            console.print(make_table(jobs, ("running",)))
        time.sleep(0.2)
    console.print(make_table(jobs))
    if unfinished := sum(job.state != "finished" for job in jobs):
        print(f"{unfinished} of {len(jobs)} runs are not finished; run the same command again to resume them")
    return 128 + signals[0] if signals else int(unfinished > 0)


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        args = tyro.cli(Args, description=__doc__)
        # `python` is this Python where no environment is active.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        jobs = make_jobs(args)
        if not args.workers and (args.workers == 0 or args.cluster == "local"):
            print("\n".join(shlex.join(job.command) for job in jobs))
            print("these commands were not run; add --workers 1, or more, to run them", file=sys.stderr)
            return
        LOGS.mkdir(exist_ok=True)
        if args.auto_tag:
            with suppress(OSError):  # git is not installed
                command = ["git", "describe", "--tags", "--always"]
                if tag := subprocess.run(command, capture_output=True, text=True).stdout.strip():
                    os.environ.setdefault("WANDB_TAGS", tag)
        console = Console(width=None if sys.stdout.isatty() else 160)
        if args.cluster == "local":
            sys.exit(run_locally(jobs, args.workers, console))
        require_packages("--cluster slurm", "submitit")
        from cleanrl_utils.slurm import submit

        submitted = submit(jobs, args)
        console.print(make_table(jobs))
        print(f"{submitted} submitted; the same command again shows the progress and submits runs that have failed")


if __name__ == "__main__":
    main()
