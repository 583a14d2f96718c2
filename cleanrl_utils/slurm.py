"""Benchmark runs as a Slurm job array. On a node, ``python -m cleanrl_utils.slurm`` runs one job of the array."""

import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import UserError
from cleanrl_utils.jobs import LOGS, Job, run_locally


def queue() -> dict[str, str]:
    """Return the state of the user's queued and running jobs by their ids; UserError where squeue fails."""
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"squeue failed ({' '.join(result.stderr.split())}); try again when Slurm answers")
    return dict(line.split() for line in result.stdout.splitlines())


def submit(jobs: list[Job], args: Any) -> None:
    """Submit all runs that are neither finished nor queued; set the state of every job."""
    if not shutil.which("sbatch"):
        raise UserError("--cluster slurm: sbatch was not found; run this command on a machine that submits to Slurm")
    # Cancelled jobs may still save a checkpoint. Requeued jobs pass through this state as well.
    while "COMPLETING" in map((states := queue()).get, (job.slurm_id for job in jobs)):
        print("waiting for jobs that Slurm is completing", flush=True)
        time.sleep(5)
    for job in jobs:
        if job.state != "finished" and job.slurm_id in states:
            job.state = "running" if states[job.slurm_id] == "RUNNING" else "queued"
    left = [job for job in jobs if job.state in ("pending", "interrupted")]
    if not left:
        return
    cpus = args.slurm_total_cpus and math.ceil(args.slurm_total_cpus / args.slurm_ntasks)
    options = {
        "job-name": Path(left[0].script).stem,
        "output": LOGS / "slurm-%A_%a.out",
        "open-mode": "append",
        "array": f"0-{len(left) - 1}%{args.workers or len(left)}",
        "ntasks": 1,
        "partition": args.slurm_partition,
        "account": args.slurm_account,
        "time": args.slurm_time,
        "signal": f"USR2@{min(300, 15 * args.slurm_time)}",  # the seconds before the time limit
        "mem": args.slurm_mem_gb and f"{args.slurm_mem_gb}GB",
        "gpus-per-node": args.slurm_gpus_per_task,
        "cpus-per-task": cpus,
    }
    command = ["sbatch", "--parsable", "--requeue", *(f"--{name}={value}" for name, value in options.items() if value)]
    # Slurm sends its signals to the processes of srun, which does not inherit --cpus-per-task since Slurm 22.05.
    srun = ["srun", f"--cpus-per-task={cpus}"] if cpus else ["srun"]
    script = "#!/bin/sh\ncase $SLURM_ARRAY_TASK_ID in\n"
    for i, job in enumerate(left):
        main_command = [sys.executable, "-m", "cleanrl_utils.slurm", job.env_id, str(job.seed), job.script]
        script += f"{i}) {shlex.join([*srun, *main_command, *job.command])} ;;\n"
    result = subprocess.run(command, input=f"{script}esac\n", capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"Slurm rejects the jobs: {' '.join(result.stderr.split())}")
    for i, job in enumerate(left):
        job.note(f"submitted to Slurm as {result.stdout.strip().partition(';')[0]}_{i}")
        job.state = "queued"
    print(f"{len(left)} submitted")


def main(env_id: str, seed: str, script: str, *command: str) -> int:
    """Run one job of the array on a node. A time limit or preemption stops it; then it is queued again."""
    job = Job(env_id, int(seed), script, list(command))
    code = run_locally([job], 1)
    slurm_id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if code > 128 and queue().get(slurm_id) == "RUNNING":  # After scancel, it is not.
        job.read_state()
        if code == 128 + signal.SIGUSR2 and job.state == "pending":
            # A script that cannot resume would start from the beginning after every time limit.
            job.note("failed: no checkpoint was saved within --slurm-time; increase it")
        else:
            subprocess.run(["scontrol", "requeue", slurm_id], check=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
