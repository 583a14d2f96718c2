"""Checkpoint files: a small state, and a replay in segments to which each checkpoint adds the rows that are new.

    checkpoint/
      000012.state              everything but the replay, and the list of the segments that belong to it
      online-800-1300.rows      rows [800, 1300) of the online replay

A file is a JSON header and arrays, each in NumPy's npy format, one after the other, and at the end the CRC-32 of it
all. (Zip files, ``np.savez``, have a checksum of each array, but none of their headers.) Nothing is pickled, so that
loading runs no code. Files appear under their names whole and on the disk (`atomic_write`), a state after its segments;
what no kept state refers to is deleted after that. A kill at any instant therefore leaves the checkpoint before, or the
new one.
"""

import contextlib
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from cleanrl_utils.errors import UserError
from cleanrl_utils.runs import atomic_write, sync_directory

Tree = Any
"""Dicts with string keys and lists, nested, of what JSON can hold and of NumPy arrays"""

SEGMENT_BYTES = 2**27  # what a segment is split at: reading takes two of them in memory beside the replay


class DamagedFile(Exception):
    """A checkpoint's file is missing, or not what was written."""


class ReplayRows(Protocol):
    """What a checkpoint needs of a replay, of either backend (`cleanrl_utils.replay` says what a row is)."""

    @property
    def length(self) -> int:
        """Rows of the ring."""

    @property
    def rows_written(self) -> int:
        """Rows written since the replay was made, also those overwritten."""

    def read(self, low: int, high: int) -> dict[str, np.ndarray]:
        """The rows in slots ``[low, high)``, (high - low, num_envs, …) each; views where that is possible."""

    def write(self, low: int, rows: dict[str, np.ndarray]) -> None:
        """Puts rows into the slots from ``low`` on."""

    def cut_games(self, frame: np.ndarray) -> None:
        """Adds the row of :func:`final_row`; ``frame`` as there."""

    def save(self) -> Tree:
        """What there is beside the rows."""

    def load(self, state: Tree) -> None:
        """Takes over what :meth:`save` returned."""


class Segment(NamedTuple):
    """Rows ``[low, high)`` of a replay, in one file."""

    file: str
    low: int
    high: int
    crc: int
    """The file's checksum: one of the same name that another, lost future of the run has left is thus told apart"""


class _Summed:
    """A file written through to, with a checksum of what went by. NumPy streams to it what it would write to a file."""

    def __init__(self, file: BinaryIO):
        self.file, self.crc = file, 0

    def write(self, data: bytes) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self.file.write(data)


def write_file(path: Path, header: Tree, arrays: Sequence[np.ndarray]) -> int:
    """Writes a file (see above) and returns its checksum. Of the arrays, no copy is made."""
    with atomic_write(path) as file:
        summed = _Summed(file)
        for array in (np.frombuffer(json.dumps(header).encode(), np.uint8), *arrays):
            np.save(summed, array, allow_pickle=False)
        file.write(summed.crc.to_bytes(4, "little"))
    return summed.crc


def check_file(path: Path) -> int:
    """Reads a file to its end and returns its checksum.

    Raises:
        DamagedFile: it is missing, or its checksum is another than that of its content.
    """
    try:
        with path.open("rb") as file:
            crc, left = 0, path.stat().st_size - 4
            while left > 0:
                data = file.read(min(left, 2**22))
                crc, left = zlib.crc32(data, crc), left - (len(data) or left)
            if int.from_bytes(file.read(), "little") != crc:
                raise DamagedFile(f"{path.name} has another checksum than was written")
    except OSError as error:
        raise DamagedFile(f"{path.name} can't be read: {error.strerror or error}") from error
    return crc


def read_file(path: Path) -> tuple[Tree, list[np.ndarray]]:
    """Header and arrays of a file.

    Raises:
        DamagedFile: see :func:`check_file`.
    """
    check_file(path)
    arrays = []
    try:
        with path.open("rb") as file:
            header = json.loads(np.load(file, allow_pickle=False).tobytes())
            while file.tell() < path.stat().st_size - 4:
                arrays.append(np.load(file, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DamagedFile(f"{path.name} can't be read: {error}") from error
    return header, arrays


def pack(tree: Tree, arrays: list[np.ndarray]) -> Tree:
    """The tree as JSON, its arrays moved to ``arrays`` in exchange for their numbers there."""
    if isinstance(tree, dict):
        return {key: pack(value, arrays) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [pack(value, arrays) for value in tree]
    if isinstance(tree, np.ndarray):
        arrays.append(tree)
        return {"array": len(arrays) - 1}
    return tree


def unpack(tree: Tree, arrays: list[np.ndarray]) -> Tree:
    """The inverse of :func:`pack`, but for tuples, which are lists now."""
    if isinstance(tree, dict):
        if tree.keys() == {"array"}:
            return arrays[tree["array"]]
        return {key: unpack(value, arrays) for key, value in tree.items()}
    return [unpack(value, arrays) for value in tree] if isinstance(tree, list) else tree


class RandomState:
    """A NumPy generator as part of a checkpoint."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def save(self) -> Tree:
        """The generator's state."""
        return self.rng.bit_generator.state

    def load(self, state: Tree) -> None:
        """Takes over what :meth:`save` returned."""
        self.rng.bit_generator.state = state


def final_row(replay: ReplayRows, frame: np.ndarray, age: np.ndarray) -> dict[str, np.ndarray]:
    """The row that ends all games where they are, as a truncation: (1, num_envs, …) each.

    Args:
        frame: uint8 (num_envs, 84, 84), the newest of the observation that was not acted upon any more.
        age: int32 (num_envs,), steps since the games' resets.
    """
    row = {name: np.zeros_like(array) for name, array in replay.read(0, 1).items()}
    row["frame"][0], row["age"][0] = frame, age
    return row


class CheckpointStore:
    """The checkpoints in a directory: the newest and the one before."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._number = 0
        self._kept: list[set[str]] = []  # the files of the newest checkpoint and of the one before
        self._replay_name = ""
        self._segments: list[Segment] = []

    def save(self, state: Tree, replay: ReplayRows | None = None, replay_name: str = "") -> None:
        """Writes a checkpoint: ``state``, and the rows of ``replay`` that the one before does not have.

        Args:
            replay_name: tells the segments of one replay from those of another.

        Raises:
            OSError: it can't be written. Those that there were are as they were, and saving can be tried again.
        """
        segments, written = [], set()
        try:
            if not self.directory.is_dir():
                self.directory.mkdir()
                sync_directory(self.directory.parent)
            if replay is not None:
                oldest = replay.rows_written - replay.length
                if replay_name == self._replay_name:
                    segments = [segment for segment in self._segments if segment.high > oldest]
                row = max(segments[-1].high if segments else 0, oldest, 0)
                while row < replay.rows_written:
                    segment = self._write_segment(replay, replay_name, row)
                    segments.append(segment)
                    written.add(segment.file)
                    row = segment.high
            arrays: list[np.ndarray] = []
            content = {"state": state, "replay_name": replay_name, "replay": replay and replay.save()}
            header = pack(content | {"segments": segments}, arrays)
            name = f"{self._number + 1:06d}.state"
            written.add(name)
            write_file(self.directory / name, header, arrays)
        except BaseException:
            self._delete(written)
            raise
        self._number, self._replay_name, self._segments = self._number + 1, replay_name, segments
        self._kept = [{name, *(segment.file for segment in segments)}, *self._kept[:1]]
        self._collect()

    def _write_segment(self, replay: ReplayRows, name: str, row: int) -> Segment:
        """Writes the rows from ``row`` on: as many as one file may have, none beyond the end of the ring."""
        slot = row % replay.length
        row_bytes = sum(array.nbytes for array in replay.read(slot, slot + 1).values())
        rows = min(replay.rows_written - row, replay.length - slot, max(1, SEGMENT_BYTES // row_bytes))
        file, content = f"{name}-{row}-{row + rows}.rows", replay.read(slot, slot + rows)
        return Segment(file, row, row + rows, write_file(self.directory / file, list(content), list(content.values())))

    def _collect(self) -> None:
        self._delete({path.name for path in self.directory.iterdir()}.difference(*self._kept))

    def _delete(self, names: set[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):  # tried again after the next checkpoint
                (self.directory / name).unlink()

    @property
    def newest(self) -> Path | None:
        """The state of the newest checkpoint."""
        return self.directory / f"{self._number:06d}.state" if self._kept else None

    def forget(self) -> None:
        """Deletes all checkpoints but the newest."""
        self._kept = self._kept[:1]
        self._collect()

    def load(self, with_replay: bool = True) -> Tree:
        """The state of the newest checkpoint that is whole; says so when another one is newer.

        Args:
            with_replay: also reads the replay to its end to see that it is whole. Without it, nothing is said.

        Raises:
            UserError: there is none.
        """
        found = sorted((path.name for path in self.directory.glob("*.state")), reverse=True)
        problems = []
        for name in found:
            try:
                header, arrays = read_file(self.directory / name)
                segments = [Segment(*segment) for segment in header["segments"]]
                for segment in segments if with_replay else []:
                    if check_file(self.directory / segment.file) != segment.crc:
                        raise DamagedFile(f"{segment.file} belongs to another checkpoint")
            except DamagedFile as error:
                problems.append(str(error))
                continue
            if problems and with_replay:
                problem = "; ".join(problems)
                message = f"WARNING: the newest checkpoint is damaged ({problem}); going on from the one before, {name}"
                print(message, file=sys.stderr, flush=True)
            content = unpack(header, arrays)
            self._number, self._replay_name, self._segments = int(name[:6]), header["replay_name"], segments
            self._kept = [{name, *(segment.file for segment in segments)}]
            self._replay_state = content["replay"]
            return content["state"]
        if problems:
            raise UserError(
                f"no checkpoint in {self.directory} is whole ({'; '.join(problems)}); restore the directory from a "
                "backup, or start the run anew"
            )
        raise UserError(f"there is no checkpoint in {self.directory}; start the run anew, without --resume")

    def load_replay(self, replay: ReplayRows, name: str) -> None:
        """Fills ``replay`` with what the loaded checkpoint has of the replay ``name``, if anything.

        Raises:
            DamagedFile: a segment has changed since :meth:`load`.
        """
        if name != self._replay_name:
            return
        for segment in self._segments:  # in order: later rows take the slots of earlier ones
            names, arrays = read_file(self.directory / segment.file)
            replay.write(segment.low % replay.length, dict(zip(names, arrays, strict=True)))
        replay.load(self._replay_state)
