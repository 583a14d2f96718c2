"""Benchmark runs as a Slurm job array, submitted with submitit."""

import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import submitit

from cleanrl_utils.errors import UserError
from cleanrl_utils.jobs import LOGS, Job


class Task(submitit.helpers.Checkpointable):
    """Run one job of the array.

    Slurm sends SIGUSR2 `notice` seconds before the time limit. submitit then calls `checkpoint` and requeues the job.
    """

    def __init__(self, job: Job, notice: int):
        self.job, self.notice, self.started = job, notice, 0.0

    def __call__(self) -> str:
        """Run the job until its script exits and return its state."""
        job, self.started = self.job, time.monotonic()
        job.start()
        while job.state == "elsewhere":
            time.sleep(5)
            job.start()
        if job.process:
            # Popen.wait would hold a lock that checkpoint needs, which interrupts this line.
            os.waitid(os.P_PID, job.process.pid, os.WEXITED | os.WNOWAIT)
            job.finish()
        if job.state == "failed":
            raise RuntimeError(f"{job} failed; {job.log} ends with:\n{job.last_lines()}")
        # Some clusters announce a preemption with SIGTERM alone. scancel sends it too, but then the job is not running.
        if job.state == "stopped" and queue().get(job.slurm_id) == "RUNNING":
            subprocess.run(["scontrol", "requeue", job.slurm_id], check=True)
        return job.state

    def checkpoint(self) -> submitit.helpers.DelayedSubmission | None:
        """Stop the run, which saves a checkpoint, and return this task for the queue."""
        job = self.job
        if job.process:
            job.stop()
            try:
                job.process.wait(0.8 * self.notice)
            except subprocess.TimeoutExpired:
                job.kill()
            job.finish()
            job.read_state()
            # A script that cannot resume would start from the beginning after every time limit.
            if job.state == "pending" and time.monotonic() - self.started > self.notice:
                job.note("failed: no checkpoint was saved within --slurm-time; increase it")
                return None
        return submitit.helpers.DelayedSubmission(self)


def queue() -> dict[str, str]:
    """Return the state of the user's queued and running jobs by their ids; UserError where squeue fails."""
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"squeue failed ({' '.join(result.stderr.split())}); try again when Slurm answers")
    return dict(line.split() for line in result.stdout.splitlines())


def submit(jobs: list[Job], args: Any) -> int:
    """Submit all runs that are neither finished nor queued, set the state of every job, return how many it were."""
    if not shutil.which("sbatch"):
        raise UserError("--cluster slurm: sbatch was not found; run this command on a machine that submits to Slurm")
    for job in jobs:
        job.read_state()
    # Cancelled jobs may still save a checkpoint. Requeued jobs pass through this state as well.
    while "COMPLETING" in map((states := queue()).get, (job.slurm_id for job in jobs)):
        print("waiting for jobs that Slurm is completing", flush=True)
        time.sleep(5)
    for job in jobs:
        if job.state != "finished" and job.slurm_id in states:
            job.state = "running" if states[job.slurm_id] == "RUNNING" else "queued"
    left = [job for job in jobs if job.state in ("pending", "interrupted")]
    if not left:
        return 0
    cpus = args.slurm_total_cpus and math.ceil(args.slurm_total_cpus / args.slurm_ntasks)
    notice = min(300, 15 * args.slurm_time)
    executor = submitit.SlurmExecutor(LOGS / "slurm", max_num_timeout=sys.maxsize)  # The default queues a job 3 times.
    executor.update_parameters(
        job_name=Path(left[0].script[-1]).stem,
        partition=args.slurm_partition,
        account=args.slurm_account,
        time=args.slurm_time,
        mem=args.slurm_mem_gb and f"{args.slurm_mem_gb}GB",
        gpus_per_node=args.slurm_gpus_per_task or None,
        cpus_per_task=cpus,
        srun_args=cpus and [f"--cpus-per-task={cpus}"],  # srun has not inherited it since Slurm 22.05.
        array_parallelism=args.workers or len(left),
        signal_delay_s=notice,
        additional_parameters={"requeue": True},
    )
    try:
        with redirect_stderr(StringIO()):  # submitit prints the error that it raises.
            submitted = executor.submit_array([Task(job, notice) for job in left])
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"Slurm rejects the jobs: {' '.join(str(error).split())}") from error
    for job, slurm_job in zip(left, submitted, strict=True):
        job.note(f"submitted to Slurm as {slurm_job.job_id}")
        job.state = "queued"
    return len(left)
