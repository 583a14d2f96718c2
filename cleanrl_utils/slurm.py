"""The runs of a benchmark as a job array on Slurm, through submitit."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import submitit

from cleanrl_utils.benchmark import LOGS, SUBMITTED_AS, Job, make_console, table
from cleanrl_utils.checks import UserError


class Task(submitit.helpers.Checkpointable):
    """What one job of the array does: a run, from where it stands.

    Before its time is up, and where the cluster says so before it preempts, Slurm sends SIGUSR2; submitit then calls
    :meth:`checkpoint` and queues the job again.

    Args:
        job: the run.
        minutes: the job's time limit.
        notice: seconds before that at which the signal comes.
    """

    def __init__(self, job: Job, minutes: int, notice: int):
        self.job, self.minutes, self.notice, self.started = job, minutes, notice, time.monotonic()

    def __call__(self) -> str:
        job, self.started = self.job, time.monotonic()
        while True:
            job.start()
            if job.process:
                os.waitid(os.P_PID, job.process.pid, os.WEXITED | os.WNOWAIT)
                # Nothing is left to be saved: a signal from here on would only break off what follows.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
                code = job.end()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
            if job.state != "elsewhere":
                break
            time.sleep(5)
        # A preemption that is announced by SIGTERM alone goes to the script too. So does scancel, but it ends the job.
        if job.state == "stopped" and code and own_state() == "RUNNING":
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        elif job.state == "failed":
            raise RuntimeError(f"{job} failed; {job.log} ends with:\n{job.last_lines()}")
        return job.state

    def checkpoint(self) -> submitit.helpers.DelayedSubmission | None:
        """Stops the run, which saves; returns what to go on with, or None if it would begin anew for ever."""
        job = self.job
        if job.process:
            job.stop()
            deadline = time.monotonic() + 0.8 * self.notice
            while os.waitid(os.P_PID, job.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                if time.monotonic() > deadline:
                    job.kill()
                time.sleep(0.2)
            job.end()
            job.judge()
            if job.state == "to do" and time.monotonic() - self.started > 15 * self.minutes:
                job.note("failed: no checkpoint was written in all of --slurm-time, give it more")
                return None
        return submitit.helpers.DelayedSubmission(Task(replace(job, process=None), self.minutes, self.notice))


def own_state() -> str:
    """What Slurm calls the state of the job that this is."""
    return next(iter(slurm_states("--jobs", os.environ["SLURM_JOB_ID"]).values()), "GONE")


def slurm_states(*selection: str) -> dict[str, str]:
    """The states of jobs that are queued or running, by their ids; the jobs of an array have an id each.

    Raises:
        UserError: Slurm does not answer.
    """
    command = ["squeue", "--noheader", "--array", "--format=%i %T", *selection]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise UserError(f"Slurm does not answer ({' '.join(answer.stderr.split())}); try again when squeue works")
    return dict(line.split() for line in answer.stdout.splitlines())


def submit(jobs: list[Job], args: Any) -> None:
    """Submits what is neither finished nor queued already, as an array; says in `state` what each job then is.

    Raises:
        UserError: there is no Slurm, or it refuses.
    """
    if not shutil.which("sbatch"):
        raise UserError("--cluster slurm: there is no sbatch here; run this on a machine that submits to Slurm")
    for job in jobs:
        job.judge()
    # What was cancelled a moment ago may still be saving; what is queued again goes through this state as well.
    while "COMPLETING" in map((states := slurm_states("--me")).get, (job.slurm_id for job in jobs)):
        print("waiting for Slurm to end jobs that are completing", flush=True)
        time.sleep(5)
    for job in jobs:
        if job.state != "finished" and job.slurm_id in states:
            job.state = "running" if states[job.slurm_id] == "RUNNING" else "queued"
    left = [job for job in jobs if job.state in ("to do", "unfinished")]
    if left:
        parameters = {
            "job_name": Path(left[0].script[-1]).stem,
            "partition": args.slurm_partition,
            "account": args.slurm_account,
            "time": args.slurm_time,
            "mem": args.slurm_mem_gb and f"{args.slurm_mem_gb}GB",
            "gpus_per_node": args.slurm_gpus_per_task or None,
            "array_parallelism": args.workers or len(left),
            "signal_delay_s": min(300, 15 * args.slurm_time),
            "additional_parameters": {"requeue": True},
        }
        if args.slurm_total_cpus:
            parameters["cpus_per_task"] = cpus = math.ceil(args.slurm_total_cpus / args.slurm_ntasks)
            parameters["srun_args"] = [f"--cpus-per-task={cpus}"]  # of itself srun takes one since Slurm 22.05
        # As many time-outs as it takes: submitit would queue a job again three times.
        executor = submitit.SlurmExecutor(LOGS / "slurm", max_num_timeout=sys.maxsize)
        executor.update_parameters(**{name: value for name, value in parameters.items() if value is not None})
        tasks = [Task(job, args.slurm_time, parameters["signal_delay_s"]) for job in left]
        try:
            with redirect_stderr(StringIO()):  # where submitit writes what it then raises
                submitted = executor.submit_array(tasks)
        except submitit.core.utils.FailedJobError as error:
            raise UserError(f"Slurm refuses: {' '.join(str(error).split())}") from error
        for job, slurm_job in zip(left, submitted, strict=True):
            job.note(SUBMITTED_AS + slurm_job.job_id)
            job.state = "queued"
    make_console().print(table(jobs))
    print(f"{len(left)} submitted; the same command again says how far they are, and submits what has failed")
