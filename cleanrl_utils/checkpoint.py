"""Checkpoints: save a run, resume it with ``--resume runs/{run_name}``, stop it by a signal.

    checkpoint/000012.state              everything but the replay buffer, and the names of its segments
    checkpoint/800-1300-5f3a90c1.replay  a segment: steps 800 to 1299 of the replay buffer

Both are zip files, which have a checksum for each member. A state holds JSON and the libraries' own formats
(`torch.save`, flax's msgpack); a segment holds NumPy arrays. Loading runs no code. A file gets its name when all of it
is on the disk, and a state is written after its segments. Then files that no kept state refers to are deleted. So a
kill at any instant leaves the previous checkpoint or the new one; so does a loss of power, on a file system with a
journal. The newest two are kept.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
import tyro
from tqdm import tqdm

from cleanrl_utils.errors import UserError, flag, one_line, shell_command, user_errors
from cleanrl_utils.files import atomic_write, read_zip, retry
from cleanrl_utils.tracking import Writer, script_of, versions

T = TypeVar("T")
MAY_CHANGE = (  # flags that may have another value in a resumed run
    "resume total_timesteps checkpoint_minutes eval_episodes online_eval_frequency eval_frequency "
    "cuda cuda_graph compile torch_deterministic track wandb_project_name wandb_entity capture_video save_model "
    "upload_model hf_entity teacher_policy_hf_repo"
)
# Windows lacks some of them, and has SIGBREAK for Ctrl-Break.
SIGNALS = ("SIGTERM", "SIGINT", "SIGBREAK", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
USE_THE_SAME = "resume it with the script and packages that started it"
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
    args = tyro.cli(args_class, default=args_class(**flags), args=argv)
    args.num_envs = min(args.num_envs, flags["num_envs"])  # it may have been reduced, see `fitting_num_envs`
    for name, was in flags.items():
        if getattr(args, name) != was and name not in MAY_CHANGE.split():
            found = f"{flag(name)} is {getattr(args, name)!r:.60} and {args.resume} was started with {was!r:.60}"
            raise UserError(f"{found}; leave out what changes it, or start a new run without --resume")
    return args


class Checkpoint:
    """The checkpoints of a run, and in a ``with`` block its handlers of signals. `checkpoint_minutes` 0 disables both.

    ``state`` is the state of the run by name: dataclasses of JSON values, PyTorch modules, optimizers and generators,
    NumPy generators and the TensorBoard :class:`Writer`, all restored in place. Of a ``Path``, a hash of the file is
    saved, and a resumed run needs the same file.

    JAX's arrays can't be restored in place. Its scripts pass a tree of them, ``train_state``, to the methods.
    A replay buffer has ``ring``, ``length``, ``steps_added`` and ``truncate_episodes`` as in the scripts.
    """

    def __init__(self, args: Any, run_dir: Path, **state: Any):
        self.args = args
        self.run_dir = run_dir
        self.directory = run_dir / "checkpoint"
        for name, part in state.items():
            if isinstance(part, Path):
                state[name] = hashlib.sha256(part.read_bytes()).digest()
        self.state = state
        self._number = 0
        self._kept: list[set[str]] = []  # files of the newest checkpoint and the one before; after `restore` all
        self._segments: list[Segment] = []  # of the replay buffer that was saved last
        self._steps_added: int | None = None  # of the replay buffer of the checkpoint that is resumed
        self._last_save = time.monotonic()
        self._signal: signal.Signals | None = None
        self._handlers: dict[int, Any] = {}

    def restore(self, train_state: Any = None) -> Any:
        """Restore the state of a resumed run; return the restored ``train_state``. Do nothing in a new run.

        Raises:
            UserError: no checkpoint can be read, or the newest does not fit.
        """
        if self.args.resume is None:
            return train_state
        self._number, loaded, serialised = load_checkpoint(self.run_dir, script_of(self.args).stem)
        newest = max(self.directory.glob("*.state"))
        if newest.stem != f"{self._number:06d}":
            print(f"WARNING: {newest} is damaged; resuming from the checkpoint before", file=sys.stderr)
        self._segments = [Segment(*segment) for segment in loaded["segments"]]
        self._steps_added = loaded["steps_added"]
        of_newest = {f"{self._number:06d}.state", *(segment.file for segment in self._segments)}
        self._kept = [of_newest, {path.name for path in self.directory.iterdir()}]
        if loaded["versions"] != versions(self.args):
            print(f"WARNING: the run used {loaded['versions']}, and now {versions(self.args)}: results can differ")
        with user_errors(f"--resume {self.run_dir}: the checkpoint does not fit this script", USE_THE_SAME):
            for name, part in self.state.items():
                load(part, serialised[name])
            if train_state is not None:
                train_state = load(train_state, serialised["train_state"])
        print(f"resuming {self.run_dir}", flush=True)
        return train_state

    def __enter__(self) -> "Checkpoint":
        """Note signals instead of ending at once, so that the run saves a checkpoint and exits."""
        in_main_thread = threading.current_thread() is threading.main_thread()  # Python has no handlers in others
        if self.args.checkpoint_minutes and in_main_thread:
            for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
                if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                    self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Handle signals as before."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def restore_replay(self, replay: Any) -> None:
        """Fill ``replay`` with the replay buffer of the checkpoint, and truncate its episodes.

        Raises:
            UserError: the checkpoint has no replay buffer that fits.
        """
        with user_errors(f"--resume {self.run_dir}: the replay buffer can't be restored", USE_THE_SAME):
            if self._steps_added is None:
                raise ValueError("it was deleted at the end of the training: leave --total-timesteps out")
            for segment in self._segments:  # in this order: later steps take the slots of earlier ones
                path = self.directory / segment.file
                remedy = "restore it from a backup, or delete the newest .state to resume from the checkpoint before"
                # Opened here, as np.load of a damaged file leaves it open, and Windows then does not delete it.
                with user_errors(f"{path} can't be read", remedy), retry(partial(path.open, "rb")) as file:
                    loaded = np.load(file)
                    arrays = [loaded[name] for name in replay.ring._fields]
                write_ring(replay, segment.low % replay.length, arrays)
            replay.steps_added = self._steps_added
            replay.truncate_episodes()
        # `truncate_episodes` changed the newest step, so its segment is written again.
        self._segments = self._segments[:-1]

    def save(self, train_state: Any = None, replay: Any = None) -> None:
        """Write a checkpoint, unless `checkpoint_minutes` is 0.

        Of ``replay`` only the steps since the last checkpoint are written. A call without it forgets the segments of
        the last replay buffer, and comes before another one is saved.

        Raises:
            UserError: the disk is full, or the directory can't be written.
        """
        if self.args.checkpoint_minutes:
            what = f"a checkpoint can't be written to {self.directory}"
            with user_errors(what, f"make room or allow it, then {self._how_to_resume()}", OSError):
                self._write(train_state, replay)
        self._last_save = time.monotonic()

    def save_if_due(self, train_state: Any = None, replay: Any = None) -> None:
        """Save, if `checkpoint_minutes` are over or a signal came; after a signal, exit with 128 + its number."""
        minutes = self.args.checkpoint_minutes
        if self._signal or (minutes and time.monotonic() - self._last_save >= 60 * minutes):
            self.save(train_state, replay)
            self.exit_if_signalled()

    def exit_if_signalled(self) -> None:
        """Exit with 128 + its number if a signal came: for work that a resumed run repeats, such as an evaluation."""
        if self._signal:
            tqdm.write(f"stopped by {self._signal.name}; {self._how_to_resume()}")
            sys.exit(128 + self._signal)

    def finish(self) -> None:
        """End the run: write an empty file ``finished``, and delete the checkpoints."""
        (self.run_dir / "finished").touch()  # the benchmark runner reads it
        shutil.rmtree(self.directory, ignore_errors=True)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._signal is None:  # further signals are ignored: one may arrive while a checkpoint is written
            self._signal = signal.Signals(number)
            # tqdm and print are not reentrant, and the signal may have interrupted one of them.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self._signal.name}: stopping\n".encode())

    def _how_to_resume(self) -> str:
        if not self._kept:
            return "start it again, as it has no checkpoint yet"
        words = ["python", str(script_of(self.args)), "--resume", str(self.run_dir)]
        return f"resume with: {shell_command(words)}"

    def _write(self, train_state: Any, replay: Any) -> None:
        """Write segments and state of the next checkpoint, and delete the files that are not needed any more."""
        serialised = {name: dump(part) for name, part in self.state.items()}
        if train_state is not None:
            serialised["train_state"] = dump(train_state)
        self.directory.mkdir(exist_ok=True)
        state_file = f"{self._number + 1:06d}.state"
        try:
            segments = [] if replay is None else self._write_replay(replay)
            state = {
                "script": script_of(self.args).stem,
                "flags": dataclasses.asdict(self.args),
                "versions": versions(self.args),
                "members": list(serialised),
                "segments": segments,
                "steps_added": None if replay is None else replay.steps_added,
            }
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
        """Delete the files of checkpoints that are not kept."""
        kept = set().union(*self._kept)
        for path in self.directory.iterdir():
            if path.name not in kept:
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


def load_checkpoint(run_dir: Path, script: str) -> tuple[int, dict[str, Any], dict[str, bytes]]:
    """Return number, state and serialised objects of the newest undamaged checkpoint; UserError if there is none."""
    if not run_dir.is_dir():
        raise UserError(f"--resume {run_dir}: there is no such directory; give that of a run, runs/{{run_name}}")
    problems = []
    for path in sorted((run_dir / "checkpoint").glob("*.state"), reverse=True):
        try:
            state = json.loads(read_zip(path, ["state.json"])["state.json"])
            serialised = read_zip(path, state.get("members", ()))
        except PermissionError as error:  # the file may be undamaged, and would be overwritten
            raise UserError(f"{one_line(error)}; allow it, or close the program that has it open") from error
        except Exception as error:  # a damaged file can raise almost anything
            problems.append(f"{path.name}: {one_line(error)}")
            continue
        if state["script"] != script:
            raise UserError(f"--resume {run_dir} is a run of {state['script']}.py; resume it with that script")
        if "steps_added" not in state:
            raise UserError(f"--resume {run_dir}: an earlier version of this script saved it; {USE_THE_SAME}")
        return int(path.stem), state, serialised
    if problems:
        what = f"no checkpoint in {run_dir} is undamaged ({'; '.join(problems)})"
        raise UserError(f"{what}; restore the directory from a backup, or start a new run")
    problem = f"--resume {run_dir}: there is no checkpoint in it"
    raise UserError(f"{problem}; the run is finished or has not saved one yet, or give the directory of a run")


def is_torch(value: Any) -> bool:
    """Return whether ``value`` is of PyTorch, which a script of JAX has not imported."""
    torch = sys.modules.get("torch")
    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, torch.Tensor) if torch else ()
    return isinstance(value, kinds)


def dump(part: Any) -> bytes:
    """Serialise the state of an object."""
    if isinstance(part, bytes):
        return part
    if dataclasses.is_dataclass(part):
        return json.dumps(dataclasses.asdict(part)).encode()
    if isinstance(part, np.random.Generator):
        return json.dumps(part.bit_generator.state).encode()
    if isinstance(part, Writer):
        return json.dumps(part.state_dict()).encode()
    if is_torch(part):
        import torch

        file = io.BytesIO()
        torch.save(part.get_state() if isinstance(part, torch.Generator) else part.state_dict(), file)
        return file.getvalue()
    from flax.serialization import msgpack_serialize, to_state_dict

    return msgpack_serialize(to_state_dict(part))


def load(part: Any, data: bytes) -> Any:
    """Restore the state that :func:`dump` serialised; return the object, for JAX a new tree of arrays."""
    if isinstance(part, bytes):
        if part != data:
            raise UserError("--resume: the teacher is another file than at the start; give that file or revision")
    elif dataclasses.is_dataclass(part):
        saved = json.loads(data)
        if saved.keys() != vars(part).keys():
            raise ValueError(f"its fields are {', '.join(saved)}")
        vars(part).update(saved)
    elif isinstance(part, np.random.Generator):
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
