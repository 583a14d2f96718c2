"""Benchmark runs as a Slurm job array. On a node, ``python -m cleanrl_utils.slurm`` runs one job of the array."""

import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import UserError, one_line_errors
from cleanrl_utils.jobs import LOGS, SUBMITTED, Job, run_locally

# If the runner runs in a job, SLURM_* and SRUN_* describe that job. New jobs would inherit its cores (SLURM_CPU_BIND)
# or end because of another kind of memory limit (SLURM_MEM_PER_CPU). SQUEUE_* can hide jobs.
NOT_INHERITED = ("SLURM_", "SRUN_", "SQUEUE_")
INHERITED = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")  # how to reach the cluster


def run_slurm(command: list[str], remedy: str, script: str | None = None) -> str:
    """Run a command of Slurm and return its output; raise a UserError with the ``remedy`` if it fails."""
    environment = {
        name: value for name, value in os.environ.items() if name in INHERITED or not name.startswith(NOT_INHERITED)
    }
    result = subprocess.run(command, input=script, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"{command[0]} failed ({' '.join(result.stderr.split())}); {remedy}")
    return result.stdout


def queue() -> dict[str, str]:
    """Return the state of the user's queued and running jobs by their ids; UserError where squeue fails."""
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T"]
    output = run_slurm(command, "try again when Slurm answers")
    return dict(line.split() for line in output.splitlines())


def submit(jobs: list[Job], args: Any) -> None:
    """Set the state of every job, and submit those that are neither finished nor in the queue.

    With ``args.dry_run``, print the submission instead.
    """
    if not shutil.which("sbatch"):
        raise UserError("--cluster slurm: sbatch was not found; run this command on a machine that submits to Slurm")
    states = queue()  # before the files, so that those of a job that has left the queue are complete
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
        job.note(f"{SUBMITTED}{array_id}_{i}")
        job.state = "queued"
    print(f"{len(left)} submitted; errors of Slurm are in {LOGS}/slurm-{array_id}_*.out")


def job_array(jobs: list[Job], args: Any) -> tuple[list[str], str]:
    """Return the command that submits the jobs as an array, and the script for its standard input."""
    cpus = math.ceil(args.slurm_total_cpus / args.slurm_ntasks) if args.slurm_total_cpus else None
    workers = args.workers if args.workers > 0 else len(jobs)
    options = {
        "job-name": Path(jobs[0].script).stem,
        "output": LOGS / "slurm-%A_%a.out",
        "open-mode": "append",
        "array": f"0-{len(jobs) - 1}%{workers}",
        "ntasks": 1,
        "partition": args.slurm_partition,
        "account": args.slurm_account,
        "time": args.slurm_time,
        "signal": f"USR2@{min(300, 15 * args.slurm_time)}",  # the seconds before the time limit
        "mem": f"{args.slurm_mem_gb}GB" if args.slurm_mem_gb else None,
        "gpus-per-node": args.slurm_gpus_per_task,
        "cpus-per-task": cpus,
    }
    command = ["sbatch", "--parsable", "--requeue"]
    command += [f"--{name}={value}" for name, value in options.items() if value]
    # Slurm sends its signals to the processes of srun, which does not inherit --cpus-per-task since Slurm 22.05.
    srun = ["srun", f"--cpus-per-task={cpus}"] if cpus else ["srun"]
    lines = ["#!/bin/sh", "case $SLURM_ARRAY_TASK_ID in"]
    for i, job in enumerate(jobs):
        main_command = [sys.executable, "-m", "cleanrl_utils.slurm", job.env_id, str(job.seed), job.script]
        lines.append(f"{i}) {shlex.join([*srun, *main_command, *job.command])} ;;")
    lines.append("esac\n")
    return command, "\n".join(lines)


def main(env_id: str, seed: str, script: str, *command: str) -> int:
    """Run one job of the array on a node. After a time limit or preemption, a run with a checkpoint is queued again."""
    job = Job(env_id, int(seed), script, list(command))
    code = run_locally([job], 1)
    slurm_id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    # A script that cannot resume would start from the beginning after every time limit.
    if code > 128 and job.state == "interrupted" and queue().get(slurm_id) == "RUNNING":  # After scancel, it is not.
        run_slurm(["scontrol", "requeue", slurm_id], "run the command of the benchmark again")
    return code


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(*sys.argv[1:]))
