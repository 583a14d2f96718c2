"""What a checkpoint costs: bytes, seconds and extra memory, of a full replay and of the ten minutes after it.

    python benchmark/checkpoint.py --buffer-size 1000000

The replay and the networks are those of the QDagger script, filled with what the size and speed of real ones is: bytes
that the disk can't compress. Memory is the peak of the process beyond what it had when the measurement began.
"""

import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "cleanrl")]

import qdagger_dqn_atari_impalacnn as qdagger  # noqa: E402

from cleanrl_utils.checkpoint import CheckpointStore, Tree  # noqa: E402
from cleanrl_utils.torch_checkpoint import ModuleState, OptimizerState, ReplayState  # noqa: E402

NUM_ACTIONS = 18


@dataclass
class Args:
    buffer_size: int = 1_000_000
    """environment steps that the replay holds"""
    new_steps: int = 42_000
    """environment steps between two checkpoints: ten minutes at 70 a second"""
    directory: Path | None = None
    """where to write; a temporary directory by default"""


class Measured:
    """Seconds and peak of resident memory of a block."""

    def __enter__(self) -> "Measured":
        self.before = self.peak = psutil.Process().memory_info().rss
        self.running = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self.start
        self.running = False
        self.thread.join()

    def watch(self) -> None:
        process = psutil.Process()
        while self.running:
            self.peak = max(self.peak, process.memory_info().rss)
            time.sleep(0.005)


def make(args: Args) -> tuple[qdagger.Replay, list[ModuleState | OptimizerState]]:
    """An empty replay, and networks and an optimizer after one update."""
    replay_args = SimpleNamespace(num_envs=8, n_step=1, gamma=0.99, seed=1)
    replay = qdagger.Replay(args.buffer_size, NUM_ACTIONS, replay_args, torch.device("cpu"))
    student, target = qdagger.QNetwork(NUM_ACTIONS), qdagger.QNetwork(NUM_ACTIONS)
    optimizer = torch.optim.Adam(student.parameters())
    student(torch.zeros(1, 4, 84, 84, dtype=torch.uint8)).sum().backward()
    optimizer.step()
    return replay, [ModuleState(student), ModuleState(target), OptimizerState(optimizer)]


def main(args: Args) -> None:
    replay, parts = make(args)
    for value in ReplayState(replay).arrays.values():
        noise = torch.empty(min(len(value), 1000), *value.shape[1:], dtype=torch.uint8)
        for low in range(0, len(value), 1000):
            value[low : low + 1000] = noise.random_(0, 2 if value.dtype == torch.bool else 256)[: len(value) - low]
    folder = Path(tempfile.mkdtemp(dir=args.directory))

    def measure(name: str, store: CheckpointStore, save: bool) -> None:
        def sizes() -> dict[str, int]:
            return {path.name: path.stat().st_size for path in store.directory.glob("*")}

        before = sizes()
        with Measured() as cost:
            if save:
                state: Tree = [part.save() for part in parts]
                store.save(state, ReplayState(replay), "online")
            else:
                store.load()
                store.load_replay(ReplayState(replay), "online")
        written = sum(size for file, size in sizes().items() if file not in before)
        memory = (cost.peak - cost.before) / 1e6
        print(f"{name:<12}{written / 1e9:9.3f} GB {cost.seconds:8.2f} s {memory:8.0f} MB of memory more")

    print(f"a replay of {args.buffer_size:,} steps; a checkpoint after {args.new_steps:,} more")
    store = CheckpointStore(folder / "checkpoint")
    replay.rows_written = replay.length
    measure("first", store, save=True)
    replay.rows_written += args.new_steps // replay.num_envs
    measure("following", store, save=True)
    measure("resume", CheckpointStore(folder / "checkpoint"), save=False)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(tyro.cli(Args))
