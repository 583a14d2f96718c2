"""Checks of flags and memory, made before any long phase starts."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cleanrl_utils.atari import parse_env_id
from cleanrl_utils.errors import UserError
from cleanrl_utils.evaluation import check_video_possible
from cleanrl_utils.replay import STACK, ring_length
from cleanrl_utils.runs import check_wandb_possible
from cleanrl_utils.schedules import times_due

AT_LEAST_ONE = (
    "total_timesteps",
    "num_envs",
    "buffer_size",
    "target_network_frequency",
    "batch_size",
    "train_frequency",
    "n_step",
    "eval_episodes",
    "teacher_eval_episodes",
    "teacher_steps",
    "offline_eval_frequency",
)
AT_LEAST_ZERO = (
    "learning_starts",
    "offline_steps",
    "distill_coefficient",
    "warmup_updates",
    "checkpoint_minutes",
    "max_minutes",
)
POSITIVE = ("learning_rate", "temperature")
FRACTIONS = ("gamma", "tau", "start_e", "end_e", "exploration_fraction")
GB = 1e9


def flag(name: str) -> str:
    """``total_timesteps`` → ``--total-timesteps``."""
    return "--" + name.replace("_", "-")


def check_args(args: Any) -> None:
    """Checks names, sizes and frequencies of any script's ``Args``; fields it does not have are skipped.

    Raises:
        UserError: names the flag, the value found and the values allowed.
    """
    for names, allowed, text in (
        (AT_LEAST_ONE, lambda x: x >= 1, "must be at least 1"),
        (AT_LEAST_ZERO, lambda x: x >= 0, "must not be negative"),
        (POSITIVE, lambda x: x > 0, "must be a finite number above 0"),
        (FRACTIONS, lambda x: 0 <= x <= 1, "must lie between 0 and 1"),
    ):
        for name in names:
            value = getattr(args, name, None)
            if value is not None and not (math.isfinite(value) and allowed(value)):
                raise UserError(f"{flag(name)} is {value}; it {text}")

    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed is {args.seed}; it must lie between 0 and 2^32 - 1")
    if not re.fullmatch(r"[\w.+-]+", args.exp_name):
        raise UserError(
            f"--exp-name is {args.exp_name!r}; it names files, so give letters, digits, dots and dashes only"
        )
    parse_env_id(args.env_id, args.repeat_action_probability)
    # A ring must keep a stack, an n-step return and something to choose from.
    rows, needed = ring_length(args.buffer_size, args.num_envs), STACK + args.n_step + 1
    if rows < needed:
        raise UserError(
            f"--buffer-size {args.buffer_size} leaves {rows} steps for each of {args.num_envs} environments; "
            f"it must be at least {needed * args.num_envs} with --num-envs {args.num_envs} and --n-step {args.n_step}"
        )
    if args.learning_starts > rows * args.num_envs:
        raise UserError(
            f"--learning-starts {args.learning_starts} is more than the {rows * args.num_envs} steps that the replay "
            f"holds with --buffer-size {args.buffer_size} and --num-envs {args.num_envs}: no update would ever be "
            "made; lower the one or raise the other"
        )
    first_rows = (args.n_step + 2) * args.num_envs
    if args.learning_starts < first_rows:
        raise UserError(
            f"--learning-starts {args.learning_starts} leaves the first update nothing to sample from; it must be at "
            f"least {first_rows} with --num-envs {args.num_envs} and --n-step {args.n_step}"
        )
    first = math.ceil(args.learning_starts / args.num_envs) * args.num_envs
    last = math.ceil(args.total_timesteps / args.num_envs) * args.num_envs
    if times_due(first, max(first, last), args.train_frequency) == 0:
        raise UserError(
            f"--total-timesteps {args.total_timesteps} leaves no update to be made, with --learning-starts "
            f"{args.learning_starts}, --train-frequency {args.train_frequency} and --num-envs {args.num_envs}; raise it"
        )
    if getattr(args, "offline_steps", 0) > 0 and args.teacher_steps < needed * args.num_envs:
        raise UserError(
            f"--teacher-steps {args.teacher_steps} is too few to learn from with --num-envs {args.num_envs} and "
            f"--n-step {args.n_step}; it must be at least {needed * args.num_envs}"
        )
    if getattr(args, "max_minutes", 0) and not args.checkpoint_minutes:
        raise UserError("--max-minutes stops with a checkpoint, and --checkpoint-minutes 0 writes none; leave one out")
    if args.capture_video:
        check_video_possible()
    if args.track:
        check_wandb_possible()
    if args.upload_model and not args.save_model:
        raise UserError("--upload-model uploads what --save-model saves; give both")


def available_host_memory() -> int:
    """Bytes of memory that this process can still get, with the limit of its control group where there is one."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            available = min(available, int(limit) - int(usage))
    return available


def require_memory(needed: int, available: int, what: str, remedy: str) -> None:
    """Compares a planned allocation with what is left.

    Args:
        needed: bytes that will be allocated.
        available: bytes to be had, of the host or the device.
        what: names the allocation.
        remedy: names the flag to lower.

    Raises:
        UserError: it does not fit.
    """
    if needed > available:
        raise UserError(f"{what} needs {needed / GB:.2f} GB and {available / GB:.2f} GB is available; {remedy}")


def require_replay_memory(args: Any, num_bytes: Callable[[int], int], available: int) -> None:
    """Compares the replays of a QDagger run with the memory there is: each for itself, they never exist at once.

    Args:
        args: the script's flags.
        num_bytes: bytes that a replay of so many steps takes.
        available: bytes to be had, of the host or the device.

    Raises:
        UserError: one of them does not fit.
    """
    if args.offline_steps:
        what = f"the teacher's replay of {args.teacher_steps:,} steps"
        require_memory(num_bytes(args.teacher_steps), available, what, "lower --teacher-steps")
    what = f"the online replay of {args.buffer_size:,} steps"
    require_memory(num_bytes(args.buffer_size), available, what, "lower --buffer-size")
