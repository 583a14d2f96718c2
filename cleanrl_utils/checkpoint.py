"""Checkpoints: the files from which a run is resumed.

    checkpoint/000012.state              everything but the replay buffer, and the names of its segments
    checkpoint/800-1300-5f3a90c1.replay  a segment: steps 800 to 1299 of the replay buffer

Both are zip files, which have a checksum for each member. A state holds JSON and the libraries' own formats
(`torch.save`, flax's msgpack); a segment holds NumPy arrays. Loading runs no code.

A file gets its name when all of it is on the disk, and a state is written after its segments. Then the files of the
previous checkpoint that the new one does not need are deleted. So a kill at any instant leaves the previous checkpoint
or the new one; so does a loss of power, on a file system with a journal. Only the newest checkpoint is kept: a file
that the disk damages later ends `--resume` with an error.
"""

import json
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from cleanrl_utils.errors import UserError, user_errors
from cleanrl_utils.files import atomic_write

RESTORE = "restore it from a backup, or start a new run"
SEGMENT_BYTES = 2**27  # the most that a segment holds; reading one takes twice as much memory


class Segment(NamedTuple):
    """Steps [low, high) of a replay buffer in a file, whose name is unique."""

    file: str
    low: int
    high: int


class Checkpoints:
    """The checkpoints of a run directory.

    A replay buffer has ``length`` and ``steps_added`` of each environment, ``read(low, high)`` and
    ``write(low, arrays)`` for its slots, and ``truncate_episodes()``, as in the scripts.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.directory = run_dir / "checkpoint"
        self._number = 0
        self._segments: list[Segment] = []  # of the replay buffer that was saved last
        self._replay: dict[str, int] | None = None  # sizes of the replay buffer in the checkpoint that was loaded

    def load(self, script: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Read the newest checkpoint.

        Args:
            script: the stem of the script's name.

        Returns:
            What :meth:`save` got: the JSON values, and the serialised objects by name.

        Raises:
            UserError: there is none, it can't be read, or another script saved it.
        """
        paths = sorted(self.directory.glob("*.state"))
        if not paths:
            problem = f"--resume {self.run_dir}: there is no checkpoint in it"
            raise UserError(f"{problem}; the run is finished or has not saved one yet, or give the directory of a run")
        path = paths[-1]
        # A damaged file can raise almost anything.
        with user_errors(f"{path} can't be read", RESTORE, Exception), zipfile.ZipFile(path) as archive:
            state = json.loads(archive.read("state.json"))
            serialised = {name: archive.read(name) for name in state["members"]}
        if state["script"] != script:
            raise UserError(f"--resume {self.run_dir} is a run of {state['script']}.py; resume it with that script")
        self._number = int(path.stem)
        self._segments = [Segment(*segment) for segment in state["segments"]]
        self._replay = state["replay"]
        return state, serialised

    def load_replay(self, replay: Any) -> None:
        """Fill ``replay`` with the replay buffer of the checkpoint that was loaded, and truncate its episodes.

        Raises:
            UserError: the checkpoint has no replay buffer, one of another size, or a file of it can't be read.
        """
        problem = f"--resume {self.run_dir}: the replay buffer can't be restored"
        if self._replay is None:
            raise UserError(f"{problem}: it was deleted at the end of the training; leave --total-timesteps out")
        if self._replay["length"] != replay.length:
            sizes = f"it has {self._replay['length']} steps of each environment, and now would have {replay.length}"
            raise UserError(f"{problem}: {sizes}; leave --buffer-size out")
        for segment in self._segments:  # in this order: later steps take the slots of earlier ones
            path = self.directory / segment.file
            # np.load leaves a damaged file open, and Windows then does not delete it.
            with user_errors(f"{path} can't be read", RESTORE, Exception), path.open("rb") as file:
                replay.write(segment.low % replay.length, dict(np.load(file)))
        replay.steps_added = self._replay["steps_added"]
        replay.truncate_episodes()
        # That changed the newest step, so its segment is written again.
        self._segments = self._segments[:-1]

    def save(self, state: dict[str, Any], serialised: dict[str, bytes], replay: Any = None) -> None:
        """Write a checkpoint, then delete the files that are not needed any more.

        Of ``replay`` only the steps since the last checkpoint are written. A call without it forgets the segments of
        the last replay buffer, and comes before another one is saved.

        Args:
            state: values for JSON, with the name of the ``script``.
            serialised: other objects by name.
            replay: the replay buffer.
        """
        self.directory.mkdir(exist_ok=True)
        self._segments = [] if replay is None else self._write_replay(replay)
        sizes = None if replay is None else {"length": replay.length, "steps_added": replay.steps_added}
        state = {**state, "members": list(serialised), "segments": self._segments, "replay": sizes}
        self._number += 1
        path = self.directory / f"{self._number:06d}.state"
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("state.json", json.dumps(state))
            for name, data in serialised.items():
                archive.writestr(name, data)
        needed = {path.name, *(segment.file for segment in self._segments)}
        for other in self.directory.iterdir():
            if other.name not in needed:
                with suppress(OSError):  # open in another program on Windows, or a folder; tried again next time
                    other.unlink()

    def _write_replay(self, replay: Any) -> list[Segment]:
        """Write the steps of ``replay`` that are not yet in segments; return the segments of all of its steps."""
        oldest = max(replay.steps_added - replay.length, 0)
        segments = [segment for segment in self._segments if segment.high > oldest]
        step = segments[-1].high if segments else oldest
        while step < replay.steps_added:
            segment = self._write_segment(replay, step)
            segments.append(segment)
            step = segment.high
        return segments

    def _write_segment(self, replay: Any, step: int) -> Segment:
        """Write the steps from ``step`` on: as many as a segment may hold, none beyond the end of the buffer."""
        slot = step % replay.length
        step_bytes = sum(array.nbytes for array in replay.read(slot, slot + 1).values())
        steps = min(replay.steps_added - step, replay.length - slot, max(1, SEGMENT_BYTES // step_bytes))
        segment = Segment(f"{step}-{step + steps}-{uuid4().hex[:8]}.replay", step, step + steps)
        with atomic_write(self.directory / segment.file) as file:
            np.savez(file, **replay.read(slot, slot + steps))
        return segment
