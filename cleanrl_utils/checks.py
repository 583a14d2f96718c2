"""What a user may get wrong, found before any long phase starts, and said in one line."""

import dataclasses
import errno
import importlib
import io
import math
import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

STACK = 4  # frames of an observation
CONTROL_GROUP = Path("/sys/fs/cgroup")
AT_LEAST_ONE = (
    *("total_timesteps", "num_envs", "buffer_size", "target_network_frequency", "batch_size", "train_frequency"),
    *("n_step", "eval_episodes", "teacher_eval_episodes", "teacher_steps", "offline_eval_frequency"),
)
AT_LEAST_ZERO = (
    *("learning_starts", "offline_steps", "distill_coefficient", "warmup_updates", "checkpoint_minutes", "max_minutes"),
)
POSITIVE = ("learning_rate", "online_learning_rate", "final_learning_rate", "temperature")
FRACTIONS = ("gamma", "tau", "start_e", "end_e", "exploration_fraction")
PACKAGES = {"capture_video": ("stable_baselines3", "imageio", "imageio_ffmpeg"), "track": ("wandb", "tensorboard")}
"""What a flag needs beyond the scripts' own packages, to be imported"""


class UserError(Exception):
    """Something the user can put right. The message says what is wrong, what was found and what to do, in one line."""


class TrainingFailure(Exception):
    """A run that can't go on. The message says what happened and what was saved, in one line."""

    def __init__(self, message: str, exit_code: int = 1):  # a default, or it could not be unpickled
        super().__init__(message)
        self.exit_code = exit_code


class EmulatorFailure(TrainingFailure):
    """A game can't go on. What the emulator raised is its ``__cause__``."""


def drop_dead_streams() -> bool:
    """Points standard output and error to /dev/null where nobody reads them any more; returns whether that was so.

    The Ctrl-C that stops a run ends a ``| tee`` behind it too, and a terminal that is closed takes both with it.
    """
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)  # asked for nothing, it tells of errors
    dead = poll.poll(0)
    for descriptor, _ in dead:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return bool(dead)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns these errors, and a full disk, into one line on stderr and an exit code, 2 for a :class:`UserError`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without "±" is no reason to end
    try:
        yield
    except (UserError, TrainingFailure) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code if isinstance(error, TrainingFailure) else 2)
    except BrokenPipeError:
        if not drop_dead_streams():
            raise
        sys.exit(141)  # as the shell calls what SIGPIPE ends, behind which there is a `| head`
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        what = "make room; a run goes on from its last checkpoint with --resume"
        print(f"error: {error.filename or 'a file'} could not be written ({error.strerror}); {what}", file=sys.stderr)
        sys.exit(1)


def flag(name: str) -> str:
    """``total_timesteps`` → ``--total-timesteps``."""
    return "--" + name.replace("_", "-")


def check_args(args: Any) -> None:
    """Checks names, sizes, frequencies and packages of any script's ``Args``; fields it does not have are skipped.

    UserError names the flag, the value found and the values allowed.
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
        raise UserError(f"--exp-name is {args.exp_name!r}; it names files: give letters, digits, dots and dashes only")
    check_sizes(args)
    if args.max_minutes and not args.checkpoint_minutes:
        raise UserError("--max-minutes stops with a checkpoint, and --checkpoint-minutes 0 writes none; leave one out")
    if getattr(args, "final_learning_rate", None) and not args.distill_coefficient:
        raise UserError(
            "--final-learning-rate is for when λ has fallen, and --distill-coefficient 0 leaves no λ; drop one"
        )
    if args.upload_model and not args.save_model:
        raise UserError("--upload-model uploads what --save-model saves; give both")
    for name, packages in PACKAGES.items():
        if getattr(args, name):
            require_packages(flag(name), *packages)


def check_sizes(args: Any) -> None:
    """UserError where a size is too small for so many games: replays must be sampled and an update be made."""
    # A ring must hold a stack, an n-step return, and something to choose from.
    needed = STACK + args.n_step + 1
    for name in ("buffer_size", "teacher_steps"):
        size = getattr(args, name, None)
        if size is None or (name == "teacher_steps" and args.offline_steps == 0):
            continue
        if size // args.num_envs < needed:
            raise UserError(
                f"{flag(name)} {size} leaves {size // args.num_envs} steps for each of {args.num_envs} games; it must "
                f"be at least {needed * args.num_envs} with --num-envs {args.num_envs} and --n-step {args.n_step}"
            )
    # Online updates are counted in multiples of train_frequency, from the first step of all games that may learn.
    first = math.ceil(max(args.learning_starts, (args.n_step + 1) * args.num_envs) / args.num_envs) * args.num_envs
    last = math.ceil(args.total_timesteps / args.num_envs) * args.num_envs
    if last // args.train_frequency <= first // args.train_frequency:
        raise UserError(
            f"--total-timesteps {args.total_timesteps} leaves no update to be made, with --learning-starts "
            f"{args.learning_starts}, --train-frequency {args.train_frequency} and --num-envs {args.num_envs}; raise it"
        )


def fit_num_envs(args: Any) -> Any:
    """``args`` with as many games, at most ``num_envs``, as its sizes have room for; says so if they are fewer."""
    for num_envs in (args.num_envs, 8, 4, 2, 1):
        fitting = dataclasses.replace(args, num_envs=num_envs)
        try:
            check_sizes(fitting)
        except (UserError, ZeroDivisionError):  # another flag is out of range: check_args will say so
            continue
        if num_envs != args.num_envs:
            print(f"games at a time: {num_envs}, as the run is too small for {args.num_envs} (--num-envs chooses)")
        return fitting
    return args


def require_packages(what: str, *modules: str) -> None:
    """Imports ``modules``; UserError where one is missing, which ``what`` needs."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"{what} needs {module} ({error}): pip install {' '.join(modules)}") from error


def available_host_memory() -> int:
    """Bytes of memory that this process can still get, with the limit of its control group where there is one."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such group, or "max"
        limit, usage = (int((CONTROL_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        # What was read or written lately, a checkpoint of 7 GB for one, counts as used, and makes room when asked to.
        cached = re.search(r"^inactive_file (\d+)$", (CONTROL_GROUP / "memory.stat").read_text(), re.MULTILINE)
        available = min(available, limit - usage + int(cached[1]))
    return available


def check_memory(args: Any, bytes_per_step: int, available: int) -> None:
    """UserError, which names the flag to lower, where a replay of a run, by its ``bytes_per_step`` for each environment
    step, does not fit into so many ``available`` bytes; the teacher's and the online one never exist at once.
    """
    for name in ("teacher_steps", "buffer_size"):
        steps = getattr(args, name, 0) if name == "buffer_size" or getattr(args, "offline_steps", 0) else 0
        if steps * bytes_per_step > available:
            raise UserError(
                f"a replay of {steps:,} steps needs {steps * bytes_per_step / 1e9:.2f} GB and {available / 1e9:.2f} GB "
                f"is available; lower {flag(name)}"
            )
