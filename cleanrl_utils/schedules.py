"""What is due when, and what falls with time."""


def linear_schedule(start_e: float, end_e: float, duration: float, step: int) -> float:
    """ε at ``step``: from ``start_e`` straight to ``end_e`` over ``duration`` steps, then constant."""
    return start_e + (end_e - start_e) * min(step / duration, 1.0) if duration > 0 else end_e


def times_due(start: int, end: int, every: int) -> int:
    """How many multiples of ``every`` lie in (start, end]."""
    return end // every - start // every
