"""Measure the speed of the three phases of a QDagger script in small runs of Pong.

    python benchmark/throughput.py [--backend jax] [--against OTHER_CHECKOUT/cleanrl/qdagger_dqn_atari_impalacnn.py]

With ``--against``, two scripts run in turns, so that a machine that slows down slows both. Flags of the scripts, such
as ``--no-bf16``, are passed on. Offline and online, speeds are measured between two logged points, after compilation.
"""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import tyro  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

from cleanrl_utils.device import available_cores  # noqa: E402
from cleanrl_utils.errors import UserError, one_line_errors  # noqa: E402

STEMS = {"torch": "qdagger_dqn_atari_impalacnn", "jax": "qdagger_dqn_atari_jax_impalacnn"}
# The phases, with their lengths by default: teacher_steps, offline_steps and total_timesteps.
PHASES = {"teacher data, steps/s": 500_000, "offline, updates/s": 500_000, "online, steps/s": 10_000_000}
LEARNING_STARTS = 1000


@dataclass
class Args:
    backend: Literal["torch", "jax"] = "torch"
    """the script of this checkout to measure"""
    script: Path | None = None
    """a script to measure instead"""
    against: Path | None = None
    """a script to compare it with"""
    rounds: int = 1
    """the runs of each script; medians are reported"""
    teacher_steps: int = 10000
    """environment steps of teacher data in each run"""
    offline_steps: int = 400
    """offline updates in each run, at least 200"""
    online_steps: int = 1600
    """environment steps of the online phase with updates in each run, at least 300"""


def measure(script: Path, args: Args, flags: list[str]) -> tuple[list[float], str]:
    """Run a script in a temporary directory.

    Returns:
        The speed of each phase, and the line in which the script describes its device.
    """
    sizes = {
        "teacher-steps": args.teacher_steps,
        "offline-steps": args.offline_steps,
        "learning-starts": LEARNING_STARTS,
        "total-timesteps": LEARNING_STARTS + args.online_steps,
        "buffer-size": args.teacher_steps,  # the same length, so that JAX compiles its update once
        "teacher-eval-episodes": 1,
        "eval-episodes": 1,
        "end-e": 1,  # random actions end an episode of Pong soon
        "checkpoint-minutes": 0,
        "env-id": "PongNoFrameskip-v4",
        "teacher-policy-hf-repo": ROOT / "teachers" / "PongNoFrameskip-v4-dqn_atari-seed1",
        "teacher-model-exp-name": "dqn_atari",
    }
    command = [sys.executable, str(script), *(f"--{name}={value}" for name, value in sizes.items()), *flags]
    # The helpers of the same checkout come first.
    path = os.pathsep.join([str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if run.returncode:
            print(run.stderr, file=sys.stderr)
            raise UserError(f"{script}: exit code {run.returncode}; its output is above")
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    offline = events.Scalars("charts/offline/updates_per_second")
    first_update = args.offline_steps + LEARNING_STARTS
    online = [event for event in events.Scalars("charts/SPS") if event.step > first_update]
    speeds = [events.Scalars("charts/teacher/SPS")[0].value]
    for points in (offline, online):
        speeds.append((points[-1].step - points[0].step) / (points[-1].wall_time - points[0].wall_time))
    return speeds, next((line for line in run.stdout.splitlines() if line.startswith("device: ")), "device: unknown")


def hours(speeds: Sequence[float]) -> float:
    """Return the hours of a run with default flags, without its evaluations, at these speeds of the phases."""
    return sum(length / speed for length, speed in zip(PHASES.values(), speeds, strict=True)) / 3600


def processor() -> str:
    """Return the name of the CPU and the number of cores that this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()  # ARM has no model name in cpuinfo
    return f"{available_cores()} cores of {name}"


def main(args: Args, flags: list[str]) -> None:
    if args.offline_steps < 200 or args.online_steps < 300:  # the scripts log a point every 100
        raise UserError("--offline-steps must be at least 200 and --online-steps at least 300")
    flags = [str(Path(word).resolve()) if Path(word).exists() else word for word in flags]  # runs have another folder
    scripts = [args.script or ROOT / "cleanrl" / f"{STEMS[args.backend]}.py", *filter(None, [args.against])]
    for script in scripts:
        if not script.is_file():
            raise UserError(f"{script} is no file; give the path of a script")
    results = [[measure(script.resolve(), args, flags) for script in scripts] for _ in range(args.rounds)]
    runs = "1 run" if args.rounds == 1 else f"{args.rounds} runs"
    print(f"{processor()}; {results[0][0][1]}; {runs} {' '.join(flags)}\n")
    print("|", " | ".join(["phase", *map(str, scripts), *["ratio"] * (len(scripts) - 1)]), "|")
    print("|---" * (2 * len(scripts)) + "|")
    medians = np.median([[speeds for speeds, _ in of_round] for of_round in results], axis=0)  # (scripts, phases)
    for phase, of_phase in zip(PHASES, medians.T, strict=True):
        ratio = [f"{of_phase[0] / of_phase[1]:.2f}"] if args.against else []
        print("|", " | ".join([phase, *(f"{speed:.1f}" for speed in of_phase), *ratio]), "|")
    print()
    for script, speeds in zip(scripts, medians, strict=True):
        print(f"the default run of {script} would take {hours(speeds):.1f} hours here, without evaluations")


if __name__ == "__main__":
    with one_line_errors():
        main(*tyro.cli(Args, return_unknown_args=True))
