"""Checks of flags, sizes and memory, which find a user's error before a long phase starts."""

import math
import os
import re
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from cleanrl_utils.device import available_memory
from cleanrl_utils.errors import UserError, flag
from cleanrl_utils.hub import check_upload_possible

STACK = 4  # frames of an observation
LIMITS = (  # flags, and the smallest and largest value that they may have
    ("num_envs n_step", 1, 1000),
    ("buffer_size target_network_frequency batch_size train_frequency eval_episodes eval_frequency", 1, 10**12),
    ("teacher_eval_episodes teacher_steps offline_eval_frequency online_eval_frequency", 1, 10**12),
    ("total_timesteps learning_starts offline_steps warmup_updates", 0, 10**12),
    ("checkpoint_minutes distill_coefficient", 0, 10**6),
    ("learning_rate online_learning_rate final_learning_rate temperature", 1e-12, 1000),
    ("gamma tau start_e end_e exploration_fraction", 0, 1),
    ("seed", 0, 2**32 - 1),
)
# Sizes of replay buffers, and the length of the phase that needs it.
BUFFERS = {"buffer_size": "total_timesteps", "teacher_steps": "offline_steps"}


def check_args(args: Any, device: Any, step_bytes: int, batches_per_call: int = 1) -> None:
    """Raise a UserError if the flags of a script can't be used, or need more memory than there is.

    The replay buffer is on ``device``, of PyTorch or JAX, and has ``step_bytes`` bytes per environment step. A call of
    an update samples ``batches_per_call`` batches at once.
    """
    for names, low, high in LIMITS:
        for name in names.split():
            value = getattr(args, name, None)
            if value is not None and not low <= value <= high:
                raise UserError(f"{flag(name)} is {value!s:.20}; it must be between {low} and {high}")
    # Windows allows 260 characters in a path, and the name is in that of the run and in that of the file. A file named
    # aux.cleanrl_model would be a device there.
    if not re.fullmatch(r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(\.|$))[\w.+-]{1,60}", args.exp_name, re.ASCII):
        found = f"--exp-name is {args.exp_name!r:.120}; it names files"
        raise UserError(f"{found}: use up to 60 letters, digits and characters of _.+-, but not aux, con or nul")
    if getattr(args, "final_learning_rate", None) and not args.distill_coefficient:
        raise UserError("--final-learning-rate is annealed with λ, which --distill-coefficient 0 disables; omit one")
    if args.upload_model and not args.save_model:
        raise UserError("--upload-model uploads the saved model; leave out --no-save-model")
    check_upload_possible(args)
    compiler = os.environ.get("CXX", "cl" if sys.platform == "win32" else "g++")  # PyTorch's choice
    if getattr(args, "compile", False) and not shutil.which(compiler):
        raise UserError(f"--compile needs the C++ compiler {compiler}; install it, set CXX, or leave the flag out")
    if args.resume is None and args.total_timesteps == 0 and not getattr(args, "offline_steps", 0):
        raise UserError("without --total-timesteps and --offline-steps there is nothing to train; raise one of them")
    problem = size_problem(args, 1)
    if problem:
        raise UserError(problem)
    check_memory(args, device, step_bytes, batches_per_call)


def check_finite(arrays: Iterable[Any]) -> None:
    """Raise a UserError if a weight or the loss, arrays of PyTorch or JAX, has a NaN or infinite value."""
    for array in arrays:
        if not abs(array).max() < math.inf:
            raise UserError("the training diverged to NaN or infinite values; start again, lower --learning-rate")


def fitting_num_envs(args: Any) -> int:
    """Return `num_envs`, halved until the sizes leave room for so many environments."""
    num_envs = args.num_envs
    while args.resume is None and num_envs > 1 and size_problem(args, num_envs):
        num_envs //= 2
    if num_envs < args.num_envs:
        print(f"--num-envs is {num_envs} instead of {args.num_envs}: a buffer or the run is too small for more")
    return num_envs


def replay_buffers(args: Any) -> list[str]:
    """Return the flags with the sizes of the replay buffers that the run makes."""
    return [name for name, phase in BUFFERS.items() if getattr(args, phase, 0)]


def size_problem(args: Any, num_envs: int) -> str | None:
    """Return an error message if the sizes leave no transition to sample or no update, otherwise None."""
    needed = (STACK + args.n_step + 1) * num_envs  # a stack, an n-step return and one more step
    for name in replay_buffers(args):
        size = getattr(args, name)
        if size // num_envs * num_envs < needed:
            return f"{flag(name)} is {size}; one environment and --n-step {args.n_step} need at least {needed}"
    if args.total_timesteps == 0 or args.resume is not None:  # a smaller number ends the training of a resumed run
        return None
    # Updates start at the first multiple of num_envs that reaches learning_starts and n_step + 1 steps per environment.
    first = math.ceil(max(args.learning_starts, (args.n_step + 1) * num_envs) / num_envs) * num_envs
    last = math.ceil(args.total_timesteps / num_envs) * num_envs
    if last // args.train_frequency <= first // args.train_frequency:
        lower = "lower --learning-starts, --n-step or --train-frequency"
        return f"--total-timesteps {args.total_timesteps} ends before the first update; raise it, or {lower}"
    return None


def check_memory(args: Any, device: Any, step_bytes: int, batches: int) -> None:
    """Raise a UserError that names the flag to lower if a replay buffer does not fit into memory beside its batches."""
    available = available_memory(device)
    # A transition has two observations, in uint8 and in the float32 that a network computes with. The outputs of its
    # layers come on top; they depend on the network.
    transition_bytes = 2 * STACK * 84 * 84 * (1 + 4)
    samples = batches * args.batch_size * transition_bytes
    sizes = {"batch_size": samples}
    # The teacher's replay buffer and the student's never exist at once.
    for name in replay_buffers(args):
        sizes[name] = samples + getattr(args, name) * step_bytes
    for name, size in sizes.items():
        if size > available:
            needs = f"{flag(name)} {getattr(args, name):,} needs {size / 1e9:.2f} GB of memory"
            raise UserError(f"{needs} and {available / 1e9:.2f} GB is available; lower it")
