"""Checkpoints: save a run, resume it with ``--resume runs/{run_name}``, stop it by a signal.

    checkpoint/000012.state              everything but the replay buffer, and the names of its segments
    checkpoint/800-1300-5f3a90c1.replay  a segment: steps 800 to 1299 of the replay buffer

Both are zip files, which have a checksum for each member. A state holds JSON and the libraries' own formats
(`torch.save`, flax's msgpack); a segment holds NumPy arrays. Loading runs no code. A file gets its name when all of it
is on the disk, and a state is written after its segments. Then files that no kept state refers to are deleted. So a
kill at any instant leaves the previous checkpoint or the new one. The newest two are kept.
"""

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
import tyro
from tqdm import tqdm

from cleanrl_utils.checks import check_args
from cleanrl_utils.errors import UserError, flag, one_line, user_errors
from cleanrl_utils.files import atomic_write, read_zip, sync_directory
from cleanrl_utils.tracking import Writer, make_run_dir, script_of

T = TypeVar("T")
MAY_CHANGE = (  # flags that may have another value in a resumed run
    "resume total_timesteps checkpoint_minutes eval_episodes cuda cuda_graph compile torch_deterministic track "
    "wandb_project_name wandb_entity capture_video save_model upload_model hf_entity teacher_policy_hf_repo"
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
USE_THE_SAME = "resume it with the script and packages that started it"
LOCK = ".lock"  # in the run directory
CHECKPOINT_FILE = re.compile(r"(\d+\.state|\d+-\d+-[0-9a-f]{8}\.replay)(\.tmp)?")
SEGMENT_BYTES = 2**27  # the most that a segment holds; reading one takes twice as much memory


class Segment(NamedTuple):  # steps [low, high) of a replay buffer in a file, whose name is unique
    file: str
    low: int
    high: int


def parse_args(args_class: type[T], argv: Sequence[str] | None = None) -> T:
    """Parse the command line; with ``--resume``, return the flags of the run. Raise a UserError if flags differ."""
    argv = sys.argv[1:] if argv is None else argv
    args = tyro.cli(args_class, args=argv)
    if args.resume is None:
        return args
    state = load_checkpoint(Path(args.resume), script_of(args).stem)[1]
    flags = state["flags"] | {"resume": None}
    if flags.keys() != vars(args).keys():
        raise UserError(f"--resume {args.resume}: this script has other flags than the run; {USE_THE_SAME}")
    # Now every difference was given on the command line.
    args = check_args(tyro.cli(args_class, default=args_class(**flags), args=argv))
    for name, was in flags.items():
        if getattr(args, name) != was and name not in MAY_CHANGE.split():
            found = f"{flag(name)} is {getattr(args, name)!r:.60} and {args.resume} was started with {was!r:.60}"
            raise UserError(f"{found}; leave out what changes it, or start a new run without --resume")
    return args


class Checkpoint:
    """The checkpoints and signal handlers of a run. `checkpoint_minutes` 0 disables both.

    A checkpoint holds a dataclass of JSON values, *progress*; a dict of *parts*, which are PyTorch modules,
    optimizers and generators, NumPy generators, the TensorBoard :class:`Writer` and trees of JAX arrays; and a replay
    buffer with ``ring``, ``length``, ``steps_added`` and ``truncate_episodes`` as in the scripts.

    Raises:
        UserError: the directory can't be made; another process runs the run; or no checkpoint of it can be read.
    """

    def __init__(self, args: Any):
        self.args = args
        self.run_dir = make_run_dir(args) if args.resume is None else Path(args.resume)
        self.directory = self.run_dir / "checkpoint"
        self._lock: BinaryIO | None = lock_run(self.run_dir)
        self._number = 0
        self._kept: list[set[str]] = []  # files of the newest checkpoint and of the one before
        self._segments: list[Segment] = []  # of the replay buffer that was saved last
        self._loaded: dict[str, Any] | None = None
        if args.resume is not None:
            self._number, self._loaded, self._serialised = load_checkpoint(self.run_dir, script_of(args).stem, True)
            self._segments = [Segment(*segment) for segment in self._loaded["segments"]]
            of_newest = {f"{self._number:06d}.state", *(segment.file for segment in self._segments)}
            self._kept = [of_newest, {path.name for path in self.directory.iterdir()}]
            print(f"resuming {self.run_dir}", flush=True)
        self._last_save = time.monotonic()
        self._signal: signal.Signals | None = None
        self._handlers: dict[int, Any] = {}

    def restore(self, progress: T, parts: dict[str, Any]) -> T:
        """Restore the parts of a resumed run, JAX's as new trees in ``parts``, and return its progress."""
        if self._loaded is not None:
            with user_errors(f"--resume {self.run_dir}: the checkpoint does not fit this script", USE_THE_SAME):
                for name, part in parts.items():
                    parts[name] = load(part, self._serialised[name])
                progress = type(progress)(**self._loaded["progress"])
        return progress

    def handle_signals(self) -> None:
        """Note signals instead of ending at once, so that the run saves a checkpoint and exits."""
        in_main_thread = threading.current_thread() is threading.main_thread()  # Python has no handlers in others
        if self.args.checkpoint_minutes and in_main_thread:
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                    self._handlers[number] = signal.signal(number, self._on_signal)

    def restore_replay(self, replay: Any) -> None:
        """Fill ``replay`` with the replay buffer of the checkpoint, and truncate its episodes.

        Raises:
            UserError: the checkpoint has no replay buffer that fits.
        """
        with user_errors(f"--resume {self.run_dir}: the replay buffer can't be restored", USE_THE_SAME):
            if self._loaded["replay"] is None:
                raise ValueError("it was deleted at the end of the training: leave --total-timesteps out")
            for segment in self._segments:  # in this order: later steps take the slots of earlier ones
                members = read_zip(self.directory / segment.file, [f"{name}.npy" for name in replay.ring._fields])
                arrays = [np.load(io.BytesIO(data), allow_pickle=False) for data in members.values()]
                write_ring(replay, segment.low % replay.length, arrays)
            replay.steps_added = self._loaded["replay"]["steps_added"]
            replay.truncate_episodes()
        # This changed the newest step, so its segment is written again.
        self._segments = self._segments[:-1]

    def save(self, progress: Any, parts: dict[str, Any], replay: Any = None) -> None:
        """Check that all weights are finite, and write a checkpoint unless `checkpoint_minutes` is 0.

        Of ``replay`` only the steps since the last checkpoint are written. A call without it forgets the segments of
        the last replay buffer, and comes before another one is saved.

        Raises:
            UserError: a weight is NaN or infinite; or the disk is full.
        """
        resume = self._how_to_resume()
        unwritten = f"a checkpoint can't be written to {self.directory}"
        try:
            with user_errors(unwritten, f"make room or allow it, then {resume}", OSError):
                with user_errors("the training diverged", f"lower --learning-rate or {resume}", FloatingPointError):
                    serialised = {name: dump(part, name) for name, part in parts.items()}
                if self.args.checkpoint_minutes:
                    self._write(progress, parts, serialised, replay)
        except UserError:
            self.close()
            raise
        self._last_save = time.monotonic()

    def save_if_due(self, progress: Any, parts: dict[str, Any], replay: Any = None) -> None:
        """Save, if `checkpoint_minutes` are over or a signal came; after a signal, exit with 128 + its number."""
        minutes = self.args.checkpoint_minutes
        if self._signal or (minutes and time.monotonic() - self._last_save >= 60 * minutes):
            self.save(progress, parts, replay)
            self.exit_if_signalled()

    def exit_if_signalled(self) -> None:
        """Exit with 128 + its number if a signal came. A resumed run repeats unsaved work."""
        if self._signal:
            tqdm.write(f"stopped by {self._signal.name}; {self._how_to_resume()}")
            self.close()
            sys.exit(128 + self._signal)

    def finish(self) -> None:
        """End the run: write an empty file ``finished``, delete the checkpoints and close."""
        (self.run_dir / "finished").touch()  # the benchmark runner reads it
        self._kept = []
        self._delete_unneeded()
        with contextlib.suppress(OSError):  # the directory was never made, has other files, or is a link
            (self.run_dir / LOCK).unlink()
            self.directory.rmdir()
        self.close()

    def release_signals(self) -> None:
        """Handle signals as before :meth:`handle_signals`."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def close(self) -> None:
        """Release the signals and the run directory."""
        self.release_signals()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._signal is None:  # further signals are ignored: one may arrive while a checkpoint is written
            self._signal = signal.Signals(number)
            # tqdm and print are not reentrant, and the signal may have interrupted one of them.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self._signal.name}: saving\n".encode())

    def _how_to_resume(self) -> str:
        if not self._kept:
            return "start it again, as it has no checkpoint yet"
        script = os.path.relpath(script_of(self.args))
        return f"resume with: {shlex.join(['python', script, '--resume', str(self.run_dir)])}"

    def _write(self, progress: Any, parts: dict[str, Any], serialised: dict[str, bytes], replay: Any) -> None:
        """Write segments and state of the next checkpoint, and delete the files that are not needed any more."""
        if not self.directory.is_dir():
            self.directory.mkdir()
            sync_directory(self.run_dir)
        state_file = f"{self._number + 1:06d}.state"
        try:
            segments = [] if replay is None else self._write_replay(replay)
            state = {
                "script": script_of(self.args).stem,
                "flags": dataclasses.asdict(self.args),
                "progress": dataclasses.asdict(progress),
                "parts": list(parts),
                "segments": segments,
                "replay": None,
            }
            if replay is not None:
                members = [f"{array}.npy" for array in replay.ring._fields]
                state["replay"] = {"steps_added": replay.steps_added, "members": members}
            with atomic_write(self.directory / state_file) as file, zipfile.ZipFile(file, "w") as archive:
                archive.writestr("state.json", json.dumps(state))
                for name, data in serialised.items():
                    archive.writestr(name, data)
            self._number += 1
            self._segments = segments
            files = {state_file, *(segment.file for segment in segments)}
            self._kept = [files, *self._kept[:1]]
        finally:
            self._delete_unneeded()

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

    def _delete_unneeded(self) -> None:
        """Delete the files of checkpoints that are not kept, and no others: the directory may be a link."""
        kept = set().union(*self._kept)
        for path in self.directory.glob("*"):
            if CHECKPOINT_FILE.fullmatch(path.name) and path.name not in kept:
                with contextlib.suppress(OSError):  # tried again next time
                    path.unlink()

    def _write_segment(self, replay: Any, step: int) -> Segment:
        """Write the steps from ``step`` on: as many as a segment may hold, none beyond the end of the ring."""
        slot = step % replay.length
        step_bytes = sum(array.nbytes // replay.length for array in replay.ring)
        steps = min(replay.steps_added - step, replay.length - slot, max(1, SEGMENT_BYTES // step_bytes))
        segment = Segment(f"{step}-{step + steps}-{uuid4().hex[:8]}.replay", step, step + steps)
        arrays = {key: read_ring(array, slot, slot + steps) for key, array in replay.ring._asdict().items()}
        with atomic_write(self.directory / segment.file) as file:
            np.savez(file, **arrays)
        return segment


def load_checkpoint(run_dir: Path, script: str, check_replay: bool = False) -> tuple[int, dict[str, Any], dict]:
    """Return number, state and serialised parts of the newest undamaged checkpoint; UserError if there is none.

    With ``check_replay`` the replay buffer is read as well, and a damaged checkpoint gives a warning.
    """
    if not run_dir.is_dir():
        raise UserError(f"--resume {run_dir}: there is no such directory; give that of a run, runs/{{run_name}}")
    problems = []
    for path in sorted((run_dir / "checkpoint").glob("*.state"), reverse=True):
        try:
            number = int(path.stem)
            state = json.loads(read_zip(path, ["state.json"])["state.json"])
            parts = read_zip(path, state["parts"])
            if check_replay:
                for file, *_ in state["segments"]:
                    read_zip(path.parent / file, state["replay"]["members"])
        except Exception as error:  # a damaged file can raise almost anything
            problems.append(f"{path.name}: {one_line(error)}")
            if check_replay:
                print(f"WARNING: {path} is damaged ({one_line(error)}); trying the checkpoint before", file=sys.stderr)
            continue
        if state["script"] != script:
            raise UserError(f"--resume {run_dir} is a run of {state['script']}.py; resume it with that script")
        return number, state, parts
    if problems:
        what = f"no checkpoint in {run_dir} is undamaged ({'; '.join(problems)})"
        raise UserError(f"{what}; restore the directory from a backup, or start a new run")
    if not any(run_dir.glob("events.out.tfevents.*")):
        raise UserError(f"--resume {run_dir}: it is not the directory of a run; give runs/{{run_name}}")
    raise UserError(f"there is no checkpoint in {run_dir}: this run is finished, or has not saved one yet")


def lock_run(run_dir: Path) -> BinaryIO:
    """Lock a run directory; return the open file that holds the lock. UserError if another process holds it."""
    with user_errors(f"{run_dir} can't be written", "allow it, or copy it to another folder", OSError):
        file = (run_dir / LOCK).open("ab")  # NFS locks only files that are open for writing
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(f"--resume {run_dir}: this run is still running in another process; stop it first") from error
    except OSError as error:
        problem = f"{run_dir} can't be locked ({error.strerror})"
        print(f"WARNING: {problem}; resume it only while no other process runs it", file=sys.stderr)
    return file


def is_torch(value: Any) -> bool:
    """Return whether ``value`` is of PyTorch, which a script of JAX has not imported."""
    torch = sys.modules.get("torch")
    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, torch.Tensor) if torch else ()
    return isinstance(value, kinds)


def dump(part: Any, name: str) -> bytes:
    """Serialise the state of a part; raise FloatingPointError if it has a weight that is NaN or infinite."""
    if isinstance(part, np.random.Generator):
        return json.dumps(part.bit_generator.state).encode()
    if isinstance(part, Writer):
        return json.dumps(part.state_dict()).encode()
    if is_torch(part):
        import torch

        state = part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
        if isinstance(part, torch.nn.Module):
            for key, value in state.items():
                if not torch.isfinite(value).all():
                    raise FloatingPointError(f"{name} {key} is NaN or infinite")
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()
    import jax
    from flax.serialization import msgpack_serialize, to_state_dict

    for path, leaf in jax.tree.leaves_with_path(part):
        if not np.isfinite(leaf).all():
            raise FloatingPointError(f"{name}{jax.tree_util.keystr(path)} is NaN or infinite")
    return msgpack_serialize(to_state_dict(part))


def load(part: Any, data: bytes) -> Any:
    """Restore the state that :func:`dump` serialised; return the part, for JAX a new tree of arrays."""
    if isinstance(part, np.random.Generator):
        part.bit_generator.state = json.loads(data)
    elif isinstance(part, Writer):
        part.load_state_dict(json.loads(data))
    elif is_torch(part):
        import torch

        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if isinstance(part, torch.optim.Optimizer):  # its settings follow from flags and device
            state["param_groups"] = part.state_dict()["param_groups"]
        if not isinstance(part, torch.Generator):
            part.load_state_dict(state)
        elif state.shape == part.get_state().shape:  # otherwise it is of another kind of device
            part.set_state(state)
    else:
        import jax
        from flax.serialization import from_state_dict, msgpack_restore

        tree = from_state_dict(part, msgpack_restore(data))
        for old, new in zip(jax.tree.leaves(part), jax.tree.leaves(tree), strict=True):
            if old.shape != new.shape:
                raise ValueError(f"an array has shape {new.shape}, now it is {old.shape}")
        return jax.tree.map(jax.numpy.asarray, tree)  # NumPy's would be copied to the GPU at each use
    return part


def read_ring(array: Any, low: int, high: int) -> np.ndarray:
    """Return slots ``[low, high)`` of an array of PyTorch or JAX."""
    if is_torch(array):
        return array[low:high].cpu().numpy()
    from jax.lax import dynamic_slice_in_dim  # compiled once per number of slots; an index compiles for each slot

    return np.asarray(dynamic_slice_in_dim(array, low, high - low))


def write_ring(replay: Any, low: int, values: Sequence[np.ndarray]) -> None:
    """Write arrays (steps, num_envs, …), one for each of the ring, to its slots from ``low`` on."""
    if is_torch(replay.ring[0]):
        import torch

        for array, value in zip(replay.ring, values, strict=True):
            array[low : low + len(value)].copy_(torch.from_numpy(value))
    else:
        import jax

        # Donated, so that no array exists twice.
        write = jax.jit(jax.lax.dynamic_update_slice_in_dim, donate_argnums=0, static_argnums=3)
        arrays = [write(array, value, low, 0) for array, value in zip(replay.ring, values, strict=True)]
        replay.ring = type(replay.ring)(*arrays)
