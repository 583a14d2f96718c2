"""Checkpoint files: a small state, and a replay in segments to which each checkpoint adds the steps that are new.

    checkpoint/
      000012.state                     everything but the replay, and the names of the segments that belong to it
      online-800-1300-5f3a90c1.replay  steps 800 to 1299 of the online replay

Both are zip files, which keep a checksum of each member: a state holds JSON and what each library makes of its own
(`torch.save`, flax's msgpack), a segment NumPy arrays (`numpy.savez`). Nothing in them is unpickled but plain tensors,
so that loading runs no code. Files appear under their names whole and on the disk (`atomic_write`), a state after its
segments; what no kept state refers to is deleted after that. A kill at any instant therefore leaves the checkpoint
before, or the new one.
"""

import contextlib
import io
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import numpy as np

from cleanrl_utils.checks import UserError
from cleanrl_utils.tracking import atomic_write, sync_directory

Json = Any

SEGMENT_BYTES = 2**27  # what a segment is split at: reading takes two of them in memory beside the replay


class DamagedFile(UserError):
    """A checkpoint's file is missing, or not what was written."""


class NotFinite(Exception):
    """Something that was learned is NaN or infinite; the message names it."""


class Replay(Protocol):
    """What a checkpoint needs of a script's replay, of either backend."""

    ring: Any
    """NamedTuple of arrays (length, num_envs, …) on the device; JAX's is replaced, PyTorch's is written to"""
    length: int
    """steps that the ring holds of each environment"""
    steps_added: int
    """steps added since the replay was made, also those overwritten"""
    age: np.ndarray
    """int (num_envs,), steps since each game's reset"""


# ==================== parts: what else a checkpoint holds ====================
# A part is a PyTorch module or optimizer, a generator of NumPy or PyTorch, or a function that returns a tree of JAX's.


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Names and values of what nested dicts and lists hold."""
    if isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{name} {key}")
    else:
        yield name, tree


def as_array(value: Any) -> np.ndarray:
    """An array of NumPy, JAX or PyTorch as one of NumPy."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def dump(part: Any, name: str) -> bytes:
    """The state of a part; NotFinite where it holds NaN or infinity."""
    if isinstance(part, np.random.Generator):
        return json.dumps(part.bit_generator.state).encode()
    if callable(part) and not hasattr(part, "state_dict"):
        from flax.serialization import msgpack_serialize, to_state_dict

        state = to_state_dict(part())
        data = msgpack_serialize(state)
    else:
        import torch

        state = part.get_state() if hasattr(part, "get_state") else part.state_dict()
        torch.save(state, file := io.BytesIO())
        data = file.getvalue()
    for leaf, value in leaves(state, name):
        if hasattr(value, "dtype") and not np.isfinite(as_array(value)).all():
            raise NotFinite(leaf)
    return data


def load(part: Any, data: bytes) -> Any:
    """Gives a part the state that :func:`dump` returned, or returns it, as JAX's trees are never changed."""
    if isinstance(part, np.random.Generator):
        part.bit_generator.state = json.loads(data)
    elif callable(part) and not hasattr(part, "state_dict"):
        from flax.serialization import from_state_dict, msgpack_restore

        return from_state_dict(part(), msgpack_restore(data))
    else:
        import torch

        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if isinstance(part, torch.optim.Optimizer):  # its settings come from flags and device
            state["param_groups"] = part.state_dict()["param_groups"]
        if not isinstance(part, torch.Generator):
            part.load_state_dict(state)
        elif state.shape == part.get_state().shape:  # else it is one of another kind of device
            part.set_state(state)
    return None


# ==================== files ====================


class Segment(NamedTuple):
    """Steps ``[low, high)`` of a replay, in one file, whose name no other segment ever gets."""

    file: str
    low: int
    high: int


def read_zip(path: Path, members: Iterable[str]) -> dict[str, bytes]:
    """Members of a zip file by name; DamagedFile where it, or one of them, is missing or not what was written."""
    try:
        with zipfile.ZipFile(path) as file:
            return {name: file.read(name) for name in members}  # which compares their checksums
    except Exception as error:  # of the system, BadZipFile, and whatever else a damaged directory of it leads to
        raise DamagedFile(f"{path.name} can't be read: {error}") from error


def read_ring(array: Any, low: int, high: int) -> np.ndarray:
    """Slots ``[low, high)`` of an array of PyTorch or JAX."""
    if hasattr(array, "cpu"):
        return array[low:high].cpu().numpy()
    from jax.lax import dynamic_slice_in_dim  # compiled once for each number of slots, indexing for every place

    return np.asarray(dynamic_slice_in_dim(array, low, high - low))


def write_ring(replay: Replay, low: int, values: Any) -> None:
    """Puts arrays (steps, num_envs, …), in a NamedTuple like the ring's, into its slots from ``low`` on."""
    if hasattr(replay.ring[0], "copy_"):
        import torch

        for array, value in zip(replay.ring, values, strict=True):
            array[low : low + len(value)].copy_(torch.from_numpy(value))
    else:
        import jax

        # Donated: no array is to exist twice. Of a function that stays the same, jit compiles once for all segments.
        write = jax.jit(jax.lax.dynamic_update_slice_in_dim, donate_argnums=0, static_argnums=3)
        pairs = zip(replay.ring, values, strict=True)
        replay.ring = type(replay.ring)(*(write(array, value, low, 0) for array, value in pairs))


class CheckpointStore:
    """The checkpoints in a directory: the newest and the one before."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._number = 0
        self._kept: list[set[str]] = []  # the files of the newest checkpoint and of the one before
        self._replay_name = ""
        self._segments: list[Segment] = []

    def save(self, state: Json, parts: dict[str, bytes], replay: Replay | None = None, replay_name: str = "") -> None:
        """Writes a checkpoint: ``state``, ``parts``, and the steps of ``replay`` that the one before does not have.

        OSError where it can't be written: those that there were are as they were, and saving can be tried again.
        """
        segments = []
        try:
            if not self.directory.is_dir():
                self.directory.mkdir()
                sync_directory(self.directory.parent)
            if replay is not None:
                oldest = replay.steps_added - replay.length
                if replay_name == self._replay_name:
                    segments = [segment for segment in self._segments if segment.high > oldest]
                step = max(segments[-1].high if segments else 0, oldest, 0)
                while step < replay.steps_added:
                    segments.append(self._write_segment(replay, replay_name, step))
                    step = segments[-1].high
            state = {"run": state, "parts": list(parts), "replay": None, "segments": segments}
            if replay is not None:
                state["replay"] = {"name": replay_name, "steps_added": replay.steps_added, "age": replay.age.tolist()}
                state["replay"]["members"] = [f"{name}.npy" for name in replay.ring._fields]
            name = f"{self._number + 1:06d}.state"
            with atomic_write(self.directory / name) as file, zipfile.ZipFile(file, "w") as archive:
                archive.writestr("state.json", json.dumps(state))
                for part, data in parts.items():
                    archive.writestr(part, data)
            self._number, self._replay_name, self._segments = self._number + 1, replay_name, segments
            self._kept = [{name, *(segment.file for segment in segments)}, *self._kept[:1]]
        finally:
            self._collect()

    def _write_segment(self, replay: Replay, name: str, step: int) -> Segment:
        """Writes the steps from ``step`` on: as many as one file may have, none beyond the end of the ring."""
        slot = step % replay.length
        step_bytes = sum(array.nbytes // replay.length for array in replay.ring)
        steps = min(replay.steps_added - step, replay.length - slot, max(1, SEGMENT_BYTES // step_bytes))
        segment = Segment(f"{name}-{step}-{step + steps}-{uuid4().hex[:8]}.replay", step, step + steps)
        arrays = {key: read_ring(array, slot, slot + steps) for key, array in replay.ring._asdict().items()}
        with atomic_write(self.directory / segment.file) as file:
            np.savez(file, allow_pickle=False, **arrays)
        return segment

    def _collect(self) -> None:
        """Deletes what belongs to no checkpoint that is kept."""
        with contextlib.suppress(OSError):  # tried again after the next checkpoint
            for name in {path.name for path in self.directory.iterdir()}.difference(*self._kept):
                (self.directory / name).unlink()

    @property
    def newest(self) -> Path | None:
        """The state of the newest checkpoint."""
        return self.directory / f"{self._number:06d}.state" if self._kept else None

    def load(self, with_replay: bool = True) -> tuple[Json, dict[str, bytes]]:
        """State and parts of the newest checkpoint that is whole; UserError where there is none.

        ``with_replay`` it also reads the replay to its end, and says so when the newest one is damaged.
        """
        found = sorted((path.name for path in self.directory.glob("*.state")), reverse=True)
        problems = []
        for name in found:
            try:
                state = json.loads(read_zip(self.directory / name, ["state.json"])["state.json"])
                parts = read_zip(self.directory / name, state["parts"])
                segments = [Segment(*segment) for segment in state["segments"]]
                for segment in segments if with_replay else []:
                    read_zip(self.directory / segment.file, state["replay"]["members"])
            except DamagedFile as error:
                problems.append(str(error))
                if with_replay:
                    print(f"WARNING: {error}; trying the checkpoint before", file=sys.stderr)
                continue
            self._number, self._segments, self._replay_state = int(name[:6]), segments, state["replay"]
            self._replay_name = state["replay"]["name"] if state["replay"] else ""
            others = {path.name for path in self.directory.iterdir()}  # they stay until there is a newer one
            self._kept = [{name, *(segment.file for segment in segments)}, others]
            return state["run"], parts
        if problems:
            raise UserError(
                f"no checkpoint in {self.directory} is whole ({'; '.join(problems)}); restore the directory from a "
                "backup, or start the run anew"
            )
        raise UserError(f"there is no checkpoint in {self.directory}: this run is finished, or has written none yet")

    def load_replay(self, replay: Replay, name: str) -> None:
        """Fills ``replay`` with what the loaded checkpoint has of the replay ``name``, if anything.

        DamagedFile where a segment has changed since :meth:`load`.
        """
        if name != self._replay_name:
            return
        for segment in self._segments:  # in order: later steps take the slots of earlier ones
            members = read_zip(self.directory / segment.file, [f"{name}.npy" for name in replay.ring._fields])
            arrays = [np.load(io.BytesIO(data), allow_pickle=False) for data in members.values()]
            write_ring(replay, segment.low % replay.length, type(replay.ring)(*arrays))
        # The newest step may still change (`Replay.end_games`), so the segment that it lies in is to be written again.
        self._segments = self._segments[:-1]
        replay.steps_added = self._replay_state["steps_added"]
        replay.age = np.array(self._replay_state["age"], np.int32)
