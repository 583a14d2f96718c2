"""What is due when, and what falls with time."""

import math
from typing import Any


def linear_schedule(start_e: float, end_e: float, duration: float, step: int) -> float:
    """ε at ``step``: from ``start_e`` straight to ``end_e`` over ``duration`` steps, then constant."""
    return start_e + (end_e - start_e) * min(step / duration, 1.0) if duration > 0 else end_e


def times_due(start: int, end: int, every: int) -> int:
    """How many multiples of ``every`` lie in (start, end]."""
    return end // every - start // every


def offline_updates_per_call(args: Any) -> int:
    """How many offline updates a GPU is asked for at once: a divisor of 20 and of whatever else is done every so often.

    It is through with a single one before it is asked for the next.
    """
    return math.gcd(20, args.target_network_frequency, args.offline_eval_frequency, args.offline_steps)
