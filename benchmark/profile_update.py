"""Profile one call of four updates by kernel.

    python benchmark/profile_update.py [--no-torch-deterministic] [other flags of the script]

PyTorch keeps cuDNN's choices as long as a process lives, so every set of flags needs a process of its own.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "cleanrl")]

import qdagger_dqn_atari_impalacnn as qdagger  # noqa: E402
import tyro  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from cleanrl_utils.device import CudaGraph  # noqa: E402

NUM_ACTIONS = 6
CALLS = 50  # timed ones
RATES = [1e-4] * qdagger.UPDATES_PER_CALL


def main(args: qdagger.Args) -> None:
    """Print the time of an update and the kernels of one call."""
    hardware = qdagger.choose_hardware(args)
    replay = qdagger.Replay(10000, args.num_envs, NUM_ACTIONS, args.n_step, hardware)
    for array in replay.ring:
        array.fill_(1)  # valid transitions
    replay.steps_added = replay.length
    student = qdagger.Student(args, NUM_ACTIONS, hardware)
    for _ in range(CudaGraph.EAGER_CALLS + 2):
        losses = student.update(replay, 1.0, RATES)
    losses.loss.item()  # synchronises with the GPU
    start = time.perf_counter()
    for _ in range(CALLS):
        losses = student.update(replay, 1.0, RATES)
    losses.loss.item()
    print(f"{(time.perf_counter() - start) / CALLS / len(RATES) * 1e6:.0f} µs an update\n")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        student.update(replay, 1.0, RATES).loss.item()
    sort_by = f"self_{'device' if hardware.device.type == 'cuda' else 'cpu'}_time_total"
    print(profiler.key_averages().table(sort_by=sort_by, row_limit=30, max_name_column_width=100))


if __name__ == "__main__":
    main(tyro.cli(qdagger.Args))
