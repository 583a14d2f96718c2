"""Flags: the limits of their values, and checks of sizes and memory before a long phase starts.

A limit stands at its flag in the class ``Args`` of a script: ``gamma: Annotated[float, Range(0, 1)] = 0.99``. Tyro
passes over it.
"""

import math
import os
import re
import shutil
import sys
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, get_type_hints

from cleanrl_utils.device import available_memory
from cleanrl_utils.errors import UserError, flag
from cleanrl_utils.hub import check_upload_possible

T = TypeVar("T")
MAY_CHANGE = "may change"  # annotates a flag that may have another value in a resumed run
DIVERGED = "the training diverged to NaN or infinite values; start again, lower --learning-rate"
STACK = 4  # frames of an observation
# Sizes of replay buffers, and the length of the phase that needs it.
BUFFERS = {"buffer_size": "total_timesteps", "teacher_steps": "offline_steps"}


class Range(NamedTuple):
    """The values that a flag may have."""

    low: float
    high: float = 10**12


def annotations(args_class: type, kind: type[T]) -> dict[str, T]:
    """Return the annotations of this kind by the name of their flag."""
    hints = get_type_hints(args_class, include_extras=True)
    found = {}
    for name, hint in hints.items():
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, kind):
                found[name] = annotation
    return found


def check_args(args: T, device: Any, step_bytes: int) -> T:
    """Check the flags of a script, and the memory that the replay buffers need on ``device``, of PyTorch or JAX.

    Args:
        args: the flags.
        device: the device of the replay buffers.
        step_bytes: the bytes of an environment step in a replay buffer.

    Returns:
        The flags that the run uses: `num_envs` is halved until the sizes leave room for so many environments.

    Raises:
        UserError: a flag can't be used, or a buffer needs more memory than there is.
    """
    for name, limits in annotations(type(args), Range).items():
        value = getattr(args, name)
        if value is not None and not limits.low <= value <= limits.high:
            raise UserError(f"{flag(name)} is {value!s:.20}; it must be between {limits.low} and {limits.high}")
    if not re.fullmatch(r"[\w.+-]{1,60}", args.exp_name, re.ASCII):  # Windows allows 260 characters in a path
        raise UserError(f"--exp-name is {args.exp_name!r:.120}; use up to 60 letters, digits and characters of _.+-")
    if args.upload_model:
        check_upload_possible(args)
    compiler = os.environ.get("CXX", "cl" if sys.platform == "win32" else "g++")  # of PyTorch; on macOS, Xcode has both
    if getattr(args, "compile", False) and not shutil.which(compiler):
        raise UserError(f"--compile needs the C++ compiler {compiler}; install it, set CXX, or leave the flag out")
    num_envs = args.num_envs
    while args.resume is None and num_envs > 1 and size_problem(args, num_envs):  # a resumed run has its own number
        num_envs //= 2
    if problem := size_problem(args, num_envs):
        raise UserError(problem)
    check_memory(args, device, step_bytes)
    if num_envs < args.num_envs:
        print(f"--num-envs is {num_envs} instead of {args.num_envs}: a buffer or the run is too small for more")
    return replace(args, num_envs=num_envs)


def replay_buffers(args: Any) -> list[str]:
    """Return the flags with the sizes of the replay buffers that the run makes."""
    return [name for name, phase in BUFFERS.items() if getattr(args, phase, 0)]


def size_problem(args: Any, num_envs: int) -> str | None:
    """Return an error message if the sizes leave no transition to sample or no update, otherwise None."""
    needed = (STACK + args.n_step + 1) * num_envs  # a stack, an n-step return and one more step
    for name in replay_buffers(args):
        size = getattr(args, name)
        if size // num_envs * num_envs < needed:
            return f"{flag(name)} is {size}; --num-envs {num_envs} and --n-step {args.n_step} need at least {needed}"
    if args.total_timesteps == 0 or args.resume is not None:  # a smaller number ends the training of a resumed run
        return None
    # Updates start at the first multiple of num_envs that reaches learning_starts and n_step + 1 steps per environment.
    first = math.ceil(max(args.learning_starts, (args.n_step + 1) * num_envs) / num_envs) * num_envs
    last = math.ceil(args.total_timesteps / num_envs) * num_envs
    if last // args.train_frequency <= first // args.train_frequency:
        lower = "lower --learning-starts, --n-step or --train-frequency"
        return f"--total-timesteps {args.total_timesteps} ends before the first update; raise it, or {lower}"
    return None


def check_memory(args: Any, device: Any, step_bytes: int) -> None:
    """Raise a UserError that names the flag to lower if a replay buffer does not fit into memory."""
    available = available_memory(device)
    # The teacher's replay buffer and the student's never exist at once.
    for name in replay_buffers(args):
        size = getattr(args, name) * step_bytes
        if size > available and (args.resume is None or name != "teacher_steps"):  # it may be past that phase
            needs = f"{flag(name)} {getattr(args, name):,} needs {size / 1e9:.2f} GB of memory"
            raise UserError(f"{needs}, and {available / 1e9:.2f} GB is available; lower it")
