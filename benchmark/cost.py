"""How speed changes as the work grows: the replay, the number of parallel games, the batch; one figure.

    python benchmark/cost.py --teacher teachers/PongNoFrameskip-v4-dqn_atari-seed1 --figure cost.png [--backend jax]

Needs 8 GB for the largest replay, and matplotlib (extra `plot`).
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))

import matplotlib
import throughput
import tyro

from cleanrl_utils.errors import one_line_errors

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass
class Args:
    teacher: str
    """the teacher: a directory or hub repository with dqn_atari.cleanrl_model"""
    figure: Path
    """the PNG to write"""
    backend: Literal["torch", "jax"] = "torch"
    """the script under test"""
    seconds: float = 3.0
    """time for each point"""
    replay_steps: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """sizes of a full replay"""
    num_envs: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """numbers of parallel games"""
    batch_size: tuple[int, ...] = (32, 64, 128, 256, 512)
    """transitions per update"""


def rates(args: Args, phases: tuple[str, ...], **changes: Any) -> list[float]:
    """Units per second of the script's ``phases`` (`throughput.PHASES`) with these flags of `throughput.py`."""
    options = dataclasses.replace(throughput.Args(args.teacher, args.backend, seconds=args.seconds), **changes)
    script, what = (throughput.script_jax if args.backend == "jax" else throughput.script_torch)(options)
    throughput.fill(script)
    if "replay_steps" in changes:
        played = next(script.rollout)
        while script.replay.rows_written < script.replay.length:
            script.replay.add(*played)
    found = [throughput.rate(getattr(script, phase), args.seconds, script.wait) for phase in phases]
    script.envs.close()
    script.teacher_envs.close()
    units = ", ".join(f"{throughput.PHASES[phase][0]} {rate:.1f}" for phase, rate in zip(phases, found, strict=True))
    print(f"{what}; {changes}: {units}", flush=True)
    return found


def main(args: Args) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    axes[0].plot(args.replay_steps, [rates(args, ("offline_update",), replay_steps=n) for n in args.replay_steps], "o-")
    axes[0].set(xlabel="steps in the replay", ylabel="offline updates/s")
    played = [rates(args, ("teacher_step", "online_step"), num_envs=n) for n in args.num_envs]
    axes[1].plot(args.num_envs, played, "o-", label=("teacher data", "online"))
    axes[1].set(xlabel="parallel games", ylabel="environment steps/s", yscale="log")
    axes[1].legend()
    updates = [rates(args, ("offline_update",), batch_size=n)[0] for n in args.batch_size]
    axes[2].plot(args.batch_size, [n * rate for n, rate in zip(args.batch_size, updates, strict=True)], "o-")
    axes[2].set(xlabel="batch", ylabel="transitions learned from per second")
    for ax, sizes in zip(axes, (args.replay_steps, args.num_envs, args.batch_size), strict=True):
        ax.set_xscale("log")
        ax.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        if ax is not axes[1]:
            ax.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(args.figure, dpi=110)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
