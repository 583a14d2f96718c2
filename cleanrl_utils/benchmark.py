"""Run a script on several environments and seeds, on this machine or on Slurm.

    python -m cleanrl_utils.benchmark --env-ids PongNoFrameskip-v4 BreakoutNoFrameskip-v4 \\
        --command "python cleanrl/qdagger_dqn_atari_impalacnn.py --track" --num-seeds 3 --workers 2

The same command again skips finished runs and resumes the others. The output of each run is in ``logs/``.
"""

import shlex
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from cleanrl_utils.errors import UserError, one_line_errors
from cleanrl_utils.jobs import LOGS, Job, run_locally, search_path
from cleanrl_utils.slurm import submit

ROW = "{:30}  {:>4}  {:11}  {}"


@dataclass
class Args:
    env_ids: list[str]
    """the environment ids"""
    command: str
    """the command to run for each environment and seed, without --env-id and --seed: "python cleanrl/dqn_atari.py".
    {env_id} is replaced by the environment id, with a dash for a slash, as in teachers/{env_id}-dqn_atari-seed1"""
    num_seeds: int = 3
    """the number of seeds for each environment"""
    start_seed: int = 1
    """the first seed"""
    workers: int = 0
    """the number of runs at a time, which share CPU cores and GPUs; 0 prints the commands, or starts all on Slurm"""
    dry_run: bool = False
    """print the commands of all runs, or with --cluster slurm the jobs that would be submitted, and start nothing"""
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


def make_jobs(args: Args) -> list[Job]:
    """Return all runs in CleanRL's order: every environment with the first seed, then with the next."""
    words = shlex.split(args.command)
    script = next((word for word in words if word.endswith(".py")), "")
    if not Path(script).is_file():
        raise UserError(f'--command names no script in {Path.cwd()}; write "python cleanrl/dqn_atari.py"')
    if not shutil.which(words[0], path=search_path()):
        raise UserError(f'--command: {words[0]} is not a program; write "python {script}"')
    jobs = []
    for seed in range(args.start_seed, args.start_seed + args.num_seeds):
        for env_id in args.env_ids:
            command = [word.replace("{env_id}", env_id.replace("/", "-")) for word in words]
            jobs.append(Job(env_id, seed, script, [*command, "--env-id", env_id, "--seed", str(seed)]))
    return jobs


def print_table(jobs: list[Job]) -> None:
    """Print the state of each run, and the number of runs in each state."""
    print(ROW.format("environment", "seed", "state", "run directory"))
    for job in jobs:
        print(ROW.format(job.env_id, job.seed, job.state, job.run_dir or ""))
    print(", ".join(f"{count} {state}" for state, count in Counter(job.state for job in jobs).items()))


def main() -> None:
    """Run the command line."""
    with one_line_errors():
        args = tyro.cli(Args, description=__doc__)
        jobs = make_jobs(args)
        if args.cluster == "local" and (args.dry_run or args.workers < 1):
            print("\n".join(shlex.join(job.command) for job in jobs))
            print("these commands were not run; to run them, give --workers and no --dry-run", file=sys.stderr)
            return
        if not args.dry_run:
            LOGS.mkdir(exist_ok=True)
        if args.cluster == "local":
            code = run_locally(jobs, args.workers)
        else:
            submit(jobs, args)
            code = 0
        print_table(jobs)
        if args.dry_run:
            print("nothing was submitted; leave out --dry-run to submit", file=sys.stderr)
        elif any(job.state != "finished" for job in jobs):
            print("the same command again skips finished runs and resumes or submits the others")
        sys.exit(code)


if __name__ == "__main__":
    main()
