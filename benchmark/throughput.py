"""Measure the speed of the three phases of a QDagger script in small runs of Pong.

    python benchmark/throughput.py [--backend jax] [--against OTHER_CHECKOUT/cleanrl/qdagger_dqn_atari_impalacnn.py]

With ``--against``, two scripts run in turns, so that a machine that slows down slows both. With ``--busy 2``, two other
processes compute beside them. Flags of the scripts, such as ``--no-bf16``, are passed on. Speeds are measured between
two logged points, after compilation.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

from cleanrl_utils.device import available_cores  # noqa: E402
from cleanrl_utils.errors import UserError, one_line_errors  # noqa: E402

STEMS = {"torch": "qdagger_dqn_atari_impalacnn", "jax": "qdagger_dqn_atari_jax_impalacnn"}
PHASES = ("teacher data, steps/s", "offline, updates/s", "online, steps/s")
LEARNING_STARTS = 1000
BUSY_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100_000))"  # until the parent ends


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
    busy: int = 0
    """processes that compute beside the scripts, as on a machine that does other work"""


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
            raise UserError(f"{script} ended with exit code {run.returncode}; its output is above")
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    offline = events.Scalars("charts/offline/updates_per_second")
    first_update = args.offline_steps + LEARNING_STARTS
    online = [event for event in events.Scalars("charts/SPS") if event.step > first_update]
    speeds = [events.Scalars("charts/teacher/SPS")[0].value]
    for points in (offline, online):
        if len(points) < 2:
            raise UserError(f"{script} logged fewer than two points of a phase; raise --offline-steps, --online-steps")
        speeds.append((points[-1].step - points[0].step) / (points[-1].wall_time - points[0].wall_time))
    return speeds, next((line for line in run.stdout.splitlines() if line.startswith("device: ")), "device: unknown")


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Run ``number`` processes that compute until the block ends, or this process if it is killed."""
    with ExitStack() as stack:
        for _ in range(number):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY_LOOP, str(os.getpid())]))
            stack.callback(loop.kill)
        yield


def processor() -> str:
    """Return the name of the CPU and the number of cores that this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()  # ARM has no model name in cpuinfo
    return f"{available_cores()} cores of {name}"


def main(args: Args, flags: list[str]) -> None:
    flags = [str(Path(word).resolve()) if Path(word).exists() else word for word in flags]  # runs have another folder
    scripts = [args.script or ROOT / "cleanrl" / f"{STEMS[args.backend]}.py", *filter(None, [args.against])]
    for script in scripts:
        if not script.is_file():
            raise UserError(f"{script} is no file; give the path of a script")
    with busy_loops(args.busy):
        results = [[measure(script.resolve(), args, flags) for script in scripts] for _ in range(args.rounds)]
    beside = f"; beside {args.busy} busy processes" if args.busy else ""
    print(f"{processor()}; {results[0][0][1]}; {args.rounds} runs {' '.join(flags)}{beside}\n")
    print("|", " | ".join(["phase", *map(str, scripts), *["ratio"] * (len(scripts) - 1)]), "|")
    print("|---" * (2 * len(scripts)) + "|")
    for i, phase in enumerate(PHASES):
        medians = [statistics.median(column[0][i] for column in columns) for columns in zip(*results, strict=True)]
        ratio = [f"{medians[0] / medians[1]:.2f}"] if args.against else []
        print("|", " | ".join([phase, *(f"{median:.1f}" for median in medians), *ratio]), "|")


if __name__ == "__main__":
    with one_line_errors():
        main(*tyro.cli(Args, return_unknown_args=True))
