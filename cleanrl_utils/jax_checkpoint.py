"""JAX's state as part of a checkpoint: trees of arrays, replaced at every update, and a replay on the device."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from cleanrl_utils.checkpoint import final_row

T = TypeVar("T")


class TreeState:
    """A tree of arrays (`cleanrl_utils.resume.Part`).

    Args:
        current: returns the tree as it is now.
    """

    def __init__(self, current: Callable[[], Any]):
        self.current = current
        self.loaded: list[np.ndarray] | None = None

    def save(self) -> list[np.ndarray]:
        """The leaves."""
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.current())]

    def load(self, state: list[np.ndarray]) -> None:
        """Keeps what :meth:`save` returned for :meth:`restored`."""
        self.loaded = state

    def restored(self, tree: T) -> T:
        """``tree`` with the leaves of the checkpoint, or as it is in a new run."""
        if self.loaded is None:
            return tree
        return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.map(jax.numpy.asarray, self.loaded))


class ReplayState:
    """A script's replay (`cleanrl_utils.checkpoint.ReplayRows`)."""

    def __init__(self, replay: Any):
        self.replay = replay

    @property
    def length(self) -> int:
        return self.replay.length

    @property
    def rows_written(self) -> int:
        return self.replay.rows_written

    def read(self, low: int, high: int) -> dict[str, np.ndarray]:
        """The rows in slots ``[low, high)``; views, to be gone before the next row is added, if they are on the CPU."""
        if jax.default_backend() == "cpu":
            return {name: np.asarray(value)[low:high] for name, value in self.replay.rows._asdict().items()}
        return {name: np.asarray(value[low:high]) for name, value in self.replay.rows._asdict().items()}

    def write(self, low: int, rows: dict[str, np.ndarray]) -> None:
        """Puts rows into the slots from ``low`` on."""
        self.replay.rows = write_rows(self.replay.rows, low, type(self.replay.rows)(**rows))

    def cut_games(self, frame: np.ndarray) -> None:
        """Adds the row that ends all games as a truncation; uint8 (num_envs, 84, 84)."""
        self.write(self.rows_written % self.length, final_row(self, frame, self.replay.env_age))
        self.replay.env_age = np.zeros_like(self.replay.env_age)
        self.replay.rows_written += 1

    def save(self) -> dict[str, Any]:
        """What there is beside the rows."""
        return {"rows_written": self.replay.rows_written, "env_age": self.replay.env_age}

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`save` returned."""
        self.replay.rows_written, self.replay.env_age = state["rows_written"], state["env_age"]


@functools.partial(jax.jit, donate_argnums=0)  # donated: the replay is not to exist twice
def write_rows(rows: T, low: int, new: T) -> T:
    """``rows`` with those from slot ``low`` on replaced by ``new``."""
    return jax.tree.map(lambda ring, value: jax.lax.dynamic_update_slice_in_dim(ring, value, low, 0), rows, new)
