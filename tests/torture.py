"""Kill a run with SIGKILL at random moments, resume it each time, and check that its logs have every step once.

    python tests/torture.py --kills 100 --backend jax

A checkpoint is saved at every iteration, and every other kill comes while one is being written. The runs are forked
from a process that has imported the libraries, as an import takes longer than the rest. JAX allows that while the
parent computes nothing with it, since its threads start with the first computation.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "cleanrl"), str(ROOT / "tests")]

import helpers  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import qdagger_dqn_atari_impalacnn as qdagger  # noqa: E402
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax  # noqa: E402

from cleanrl_utils import atari, device  # noqa: E402
from cleanrl_utils.checkpoint import load_checkpoint, parse_args  # noqa: E402
from cleanrl_utils.errors import UserError  # noqa: E402


def start(function: Callable[[], None]) -> int:
    """Call ``function`` in a child process, whose output goes to the file ``log``; return its id."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def newest() -> int:
    """Return the number of the newest checkpoint."""
    return max((int(path.stem) for path in Path().glob("runs/*/checkpoint/*.state")), default=0)


def half_written() -> set[tuple[str, int]]:
    """Return the names and inodes of the unfinished files of a checkpoint."""
    found = set()
    for path in Path().glob("runs/*/checkpoint/*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def phase_of(progress: dict[str, Any], args: Any) -> str:
    """Return the phase of a checkpoint."""
    if not progress["random_returns"]:
        return "teacher"
    if progress["teacher_step"] < args.teacher_steps:
        return "teacher data"
    if str(args.offline_steps) not in progress["offline_returns"]:
        return "offline"
    return "online" if progress["online_step"] < args.total_timesteps else "evaluation"


def check_replay(directory: Path, segments: list[list]) -> None:
    """Check that in the replay buffer of a checkpoint no transition leads from one episode to another."""
    steps: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for file, low, _ in segments:
        with np.load(directory / file) as arrays:
            steps |= {low + i: row for i, row in enumerate(zip(arrays["age"], arrays["valid"], strict=True))}
    for step in steps.keys() & {step - 1 for step in steps}:
        if not np.array_equal(steps[step + 1][0] == 0, ~steps[step][1]):
            sys.exit(f"a transition leads from one episode to another at step {step}; see {os.getcwd()}")


def check_logs(run_dir: Path, args: Any) -> None:
    """Check that each curve of the finished run has each of its steps once."""
    offline = list(range(100, args.offline_steps + 1, 100))
    online = [args.offline_steps + step - args.num_envs for step in range(100, args.total_timesteps + 1, 100)]
    expected = {
        "charts/teacher/avg_episodic_return": [0], "charts/random/avg_episodic_return": [0], "charts/teacher/SPS": [0],
        "charts/offline/avg_episodic_return": offline, "eval/episodic_return": [0],
        **{f"charts/offline/{tag}": offline for tag in ("loss", "q_loss", "distill_loss", "updates_per_second")},
        **{f"charts/{tag}": online for tag in ("SPS", "epsilon", "distill_coeff")},
        **{f"losses/{tag}": online for tag in ("loss", "td_loss", "distill_loss", "q_values")},
    }  # fmt: skip
    scalars = helpers.read_scalars(run_dir)
    for tag, steps in expected.items():
        if (found := [step for step, _ in scalars[tag]]) != steps:
            sys.exit(f"{tag} has the steps {found} instead of {steps}; see {os.getcwd()}")
    if not json.loads((run_dir / "progress.json").read_text())["finished"] or list(run_dir.rglob("*.tmp")):
        sys.exit(f"the run is not finished or left an unfinished file; see {os.getcwd()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    parser.add_argument("--small", action="store_true", help="a small Q-network, which is fast to train and to save")
    options = parser.parse_args()
    script = {"torch": qdagger, "jax": qdagger_jax}[options.backend]
    if options.small:
        script.QNetwork = helpers.SMALL_NETWORKS[script]
    rng = random.Random(options.seed)
    atari.available_cores = device.available_cores = lambda: 1
    folder = Path(tempfile.mkdtemp(prefix="torture"))
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))  # the children compile the same
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    teacher = helpers.write_teacher(folder / "teacher")
    hundreds = 1 + options.kills // 100
    sizes = {"teacher_steps": 60, "offline_steps": 100 * hundreds, "total_timesteps": 200 * hundreds}
    sizes |= {"learning_starts": 40, "train_frequency": 10, "offline_eval_frequency": 100}
    args = helpers.twin(helpers.tiny(teacher, checkpoint_minutes=1e-9, save_model=True, **sizes), script)
    checkpoints = args.teacher_steps // 2 + args.offline_steps + args.total_timesteps // 2  # one for each iteration
    killed: Counter[str] = Counter()
    run_dir, kills, restarts, in_write = None, 0, 0, 0
    while True:
        if run_dir is None:
            attempt = folder / f"attempt{restarts}"
            attempt.mkdir()
            os.chdir(attempt)
            child = start(lambda: script.main(args))
        else:
            child = start(lambda: script.main(parse_args(script.Args, ["--resume", str(run_dir)])))  # noqa: B023
        # The first two kills come in the first phase and the last two when the model is saved. Of those between, some
        # come after a time, most after a number of checkpoints, so that they spread over the run.
        began, seconds, goal, at_the_end = time.monotonic(), 600.0, float("inf"), False
        left = half_written()  # by the kill before
        if kills < 2:
            seconds = rng.uniform(0.1, 1.5)
        elif options.kills - 2 <= kills < options.kills:
            at_the_end = True
        elif kills < options.kills and rng.random() < 0.25:
            seconds, goal = rng.uniform(0.1, 3), checkpoints - 50  # a fast run would come to its end
        elif kills < options.kills:
            so_far = newest()
            goal = so_far + rng.uniform(0, 2 * max(checkpoints - so_far, 0) / (options.kills - 2 - kills))
            goal = min(goal, checkpoints - 50)
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() - began < seconds:
            if newest() >= goal or (at_the_end and list(Path().glob(f"runs/*/{args.exp_name}.cleanrl_model"))):
                break
            time.sleep(0.001)
        if kills % 2 and goal < float("inf"):
            while not half_written() - left and time.monotonic() - began < seconds:
                time.sleep(0.0002)
        elif kills < options.kills:
            time.sleep(rng.uniform(0, 0.005 if at_the_end else 0.05))
        if ended[0]:
            if ended[1] or kills < options.kills:
                sys.exit(f"the run ended by itself after {kills} kills; see {os.getcwd()}/log")
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills, in_write = kills + 1, in_write + bool(half_written() - left)
        try:
            run_dir = helpers.only(Path().glob("runs/*"))
            _, state, _ = load_checkpoint(run_dir, script.__name__, check_replay=True)
            check_replay(run_dir / "checkpoint", state["segments"])
            killed[phase_of(state["progress"], args)] += 1
        except (UserError, ValueError):  # there was no checkpoint yet, or the run had just deleted its last one
            if run_dir and json.loads((run_dir / "progress.json").read_text())["finished"]:
                break
            killed["teacher"] += 1
            run_dir, restarts = None, restarts + 1

    check_logs(helpers.only(Path().glob("runs/*")), args)
    print(f"{kills} kills, {in_write} of them while a checkpoint was being written; every step is in the logs once")
    print(", ".join(f"{phase}: {number}" for phase, number in killed.items()))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
