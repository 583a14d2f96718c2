"""Kills a run with SIGKILL at random moments, over and over, resumes it, and counts its steps in the end.

    python tests/torture.py --kills 100 --backend jax

Checkpoints are written at every iteration, and every other kill waits for the middle of one. Children are forked from
a process that has the libraries loaded, which starting them anew each time would take most of the time for. JAX bears
that as long as the parent computes nothing with it: its threads begin with the first computation.
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "cleanrl"), str(ROOT / "tests")]

import jax  # noqa: E402
import numpy as np  # noqa: E402
import qdagger_dqn_atari_impalacnn as qdagger  # noqa: E402
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax  # noqa: E402
from test_cli import SmallFlaxNetwork, SmallNetwork, only, read_scalars, tiny, twin, write_teacher  # noqa: E402

from cleanrl_utils import device  # noqa: E402
from cleanrl_utils.checkpoint import CheckpointStore  # noqa: E402
from cleanrl_utils.checks import UserError  # noqa: E402
from cleanrl_utils.run import parse_args  # noqa: E402

PHASES = ("teacher", "teacher data", "offline", "online", "evaluation", "upload")


def start(function: Callable[[], None]) -> int:
    """A child process that calls ``function``; its output goes to the file ``log``."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        function()
        code = 0
    finally:
        if code:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def newest() -> int:
    """Number of the newest checkpoint."""
    return max((int(path.stem) for path in Path().glob("runs/*/checkpoint/*.state")), default=0)


def half_written() -> set[tuple[str, int]]:
    """Names and inodes of the files that a checkpoint is being written to."""
    found = set()
    for path in Path().glob("runs/*/checkpoint/*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def check_replay(store: CheckpointStore) -> None:
    """Sees that in the replay of the loaded checkpoint every step that a new game follows is a final frame."""
    steps: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for segment in store._segments:
        with np.load(store.directory / segment.file) as arrays:
            steps |= {segment.low + i: row for i, row in enumerate(zip(arrays["age"], arrays["valid"], strict=True))}
    for step in steps.keys() & {step - 1 for step in steps}:
        if not np.array_equal(steps[step + 1][0] == 0, ~steps[step][1]):
            sys.exit(f"a transition leads from one game to another at step {step}; see {os.getcwd()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    parser.add_argument("--small", action="store_true", help="networks that learn, and are saved, in hardly any time")
    options = parser.parse_args()
    script = {"torch": qdagger, "jax": qdagger_jax}[options.backend]
    if options.small:
        qdagger.QNetwork, qdagger_jax.QNetwork = SmallNetwork, SmallFlaxNetwork
    rng = random.Random(options.seed)
    device.available_cores = lambda: 1
    folder = Path(tempfile.mkdtemp(prefix="torture"))
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))  # the children compile the same
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    teacher = write_teacher(folder / "teacher")
    hundreds = 1 + options.kills // 100
    sizes = {"teacher_steps": 60, "offline_steps": 100 * hundreds, "total_timesteps": 200 * hundreds}
    sizes |= {"learning_starts": 40, "train_frequency": 10, "offline_eval_frequency": 100}
    args = twin(tiny(teacher, checkpoint_minutes=1e-9, save_model=True, **sizes), script)
    killed: Counter[str] = Counter()
    restarts, in_write = 0, 0
    checkpoints = args.teacher_steps // 2 + args.offline_steps + args.total_timesteps // 2  # one for each iteration
    run_dir, kills = None, 0
    while True:
        if run_dir is None:
            attempt = folder / f"attempt{restarts}"
            attempt.mkdir()
            os.chdir(attempt)
            child = start(lambda: script.main(args))
        else:
            child = start(lambda: script.main(parse_args(script.Args, ["--resume", str(run_dir)])))  # noqa: B023
        # Two kills in the first phase and two in the last. Between them some after a time, most after so many
        # checkpoints that with those that are left the run comes to about its end.
        began, seconds, goal, in_last_phase = time.monotonic(), 600.0, float("inf"), False
        left = half_written()  # by the kill before
        if kills < 2:
            seconds = rng.uniform(0.1, 1.5)
        elif options.kills - 2 <= kills < options.kills:
            in_last_phase = True
        elif kills < options.kills and rng.random() < 0.25:
            seconds = rng.uniform(0.1, 3)
        elif kills < options.kills:
            so_far = newest()
            goal = so_far + rng.uniform(0, 2 * max(checkpoints - so_far, 0) / (options.kills - 2 - kills))
            goal = min(goal, checkpoints - 20)  # not beyond the end
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() - began < seconds:
            if newest() >= goal or (in_last_phase and list(Path().glob(f"runs/*/{args.exp_name}.cleanrl_model"))):
                break
            time.sleep(0.001)
        if kills % 2 and goal < float("inf"):
            while not half_written() - left and time.monotonic() - began < seconds:
                time.sleep(0.0002)
        elif kills < options.kills:
            time.sleep(rng.uniform(0, 0.1))
        if ended[0]:
            if ended[1] or kills < options.kills:
                sys.exit(f"it ended by itself after {kills} kills; see {os.getcwd()}/log")
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        found = list(Path().glob("runs/*"))
        in_write += bool(half_written() - left)
        try:
            run_dir = only(found)
            store = CheckpointStore(run_dir / "checkpoint")
            state, _ = store.load()
            check_replay(store)
            killed[next(phase for phase in PHASES if phase not in state["over"])] += 1
        except (UserError, ValueError):  # nothing had been saved: a run starts anew that has nothing to lose
            killed["teacher"] += 1
            run_dir, restarts = None, restarts + 1

    run_dir = only(Path().glob("runs/*"))
    scalars = read_scalars(run_dir)
    steps = {tag: [step for step, _ in events] for tag, events in scalars.items()}
    offline = list(range(100, args.offline_steps + 1, 100))
    # the steps in which a hundred is full, two games at once
    online = [args.offline_steps + step - 2 for step in range(100, args.total_timesteps + 1, 100)]
    expected = {
        "charts/teacher/avg_episodic_return": [0],
        "charts/random/avg_episodic_return": [0],
        "charts/teacher/SPS": [0],
        "charts/offline/avg_episodic_return": offline,
        "eval/episodic_return": [0],
        **{f"charts/offline/{x}": offline for x in ("loss", "q_loss", "distill_loss", "updates_per_second")},
        **{f"charts/{x}": online for x in ("SPS", "epsilon", "distill_coeff")},
        **{f"losses/{x}": online for x in ("loss", "td_loss", "distill_loss", "q_values")},
    }
    for tag, wanted in expected.items():
        if steps[tag] != wanted:
            sys.exit(f"{tag} has steps {steps[tag]} and not {wanted}; see {os.getcwd()}")
    if not json.loads((run_dir / "progress.json").read_text())["finished"] or list(run_dir.rglob("*.tmp")):
        sys.exit(f"the run is not finished, or has left half a file; see {os.getcwd()}")
    print(f"{kills} kills, {in_write} of them while a checkpoint was being written; every step is in the logs once")
    print(", ".join(f"{phase}: {number}" for phase, number in killed.items()))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
