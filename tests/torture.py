"""Kills a run with SIGKILL at random moments, over and over, resumes it, and counts its steps in the end.

    python tests/torture.py --kills 25 --backend jax

Checkpoints are written at every iteration, so that most kills come in the middle of one. Children are forked from a
process that has the libraries loaded, which starting them anew each time would take most of the time for. JAX bears
that as long as the parent computes nothing with it: its threads begin with the first computation.
"""

import argparse
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
import qdagger_dqn_atari_impalacnn as qdagger  # noqa: E402
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax  # noqa: E402
from test_cli import only, read_scalars, tiny, twin, write_teacher  # noqa: E402

from cleanrl_utils import resume, torch_utils  # noqa: E402
from cleanrl_utils.checkpoint import CheckpointStore  # noqa: E402
from cleanrl_utils.errors import UserError  # noqa: E402
from cleanrl_utils.resume import parse_args  # noqa: E402

PHASES = {1: "teacher", 2: "teacher data", 3: "offline", 4: "online", 5: "evaluation", 6: "upload"}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    options = parser.parse_args()
    script = {"torch": qdagger, "jax": qdagger_jax}[options.backend]
    rng = random.Random(options.seed)
    torch_utils.available_cores = lambda: 1
    resume.WRITING = 1e9  # hardly a step is made between two checkpoints
    folder = Path(tempfile.mkdtemp(prefix="torture"))
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))  # the children compile the same
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    teacher = write_teacher(folder / "teacher")
    sizes = {"teacher_steps": 60, "offline_steps": 200, "offline_eval_frequency": 100, "total_timesteps": 400}
    args = tiny(teacher, checkpoint_minutes=1e-9, learning_starts=40, train_frequency=10, save_model=True, **sizes)
    args = twin(args, script)
    killed: Counter[str] = Counter()
    restarts, in_write = 0, 0
    checkpoints = 60 // 2 + 200 + 400 // 2  # one for each iteration
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
        # checkpoints that all kills together come to about the end of the run.
        began, seconds, goal, in_last_phase = time.monotonic(), 600.0, float("inf"), False
        if kills < 2:
            seconds = rng.uniform(0.1, 1.5)
        elif options.kills - 2 <= kills < options.kills:
            in_last_phase = True
        elif kills < options.kills and rng.random() < 0.25:
            seconds = rng.uniform(0.1, 3)
        elif kills < options.kills:
            goal = newest() + rng.uniform(0, 1.6 * checkpoints / (options.kills - 3))
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() - began < seconds:
            if newest() >= goal or (in_last_phase and list(Path().glob(f"runs/*/{args.exp_name}.cleanrl_model"))):
                break
            time.sleep(0.001)
        if kills < options.kills:
            time.sleep(rng.uniform(0, 0.1))
        if ended[0]:
            if ended[1] or kills < options.kills:
                sys.exit(f"it ended by itself after {kills} kills; see {os.getcwd()}/log")
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        found = list(Path().glob("runs/*"))
        in_write += bool(list(Path().glob("runs/*/checkpoint/*.tmp")))
        try:
            run_dir = only(found)
            state = CheckpointStore(run_dir / "checkpoint").load()
            killed[PHASES[state.get("phase", 6)]] += 1
        except (UserError, ValueError):  # nothing had been saved: a run starts anew that has nothing to lose
            killed[PHASES[1]] += 1
            run_dir, restarts = None, restarts + 1

    scalars = read_scalars(only(Path().glob("runs/*")))
    steps = {tag: [step for step, _ in events] for tag, events in scalars.items()}
    online = [200 + step - 2 for step in (100, 200, 300, 400)]  # the step in which a hundred is full, two games at once
    expected = {
        "charts/teacher/avg_episodic_return": [0],
        "charts/random/avg_episodic_return": [0],
        "charts/teacher/SPS": [0],
        "charts/offline/avg_episodic_return": [100, 200],
        "eval/episodic_return": [0],
        **dict.fromkeys(("charts/SPS", "charts/epsilon", "charts/distill_coeff"), online),
        **{f"charts/offline/{x}": [100, 200] for x in ("loss", "q_loss", "distill_loss", "updates_per_second")},
        # From 40 steps on, an update is due when a multiple of 10 is passed, and logged when 100 have gone by.
        **{f"losses/{x}": [248, 348, 448, 548] for x in ("loss", "td_loss", "distill_loss", "q_values")},
    }
    for tag, wanted in expected.items():
        if steps[tag] != wanted:
            sys.exit(f"{tag} has steps {steps[tag]} and not {wanted}; see {os.getcwd()}")
    print(f"{kills} kills, {in_write} of them while a checkpoint was being written; every step is in the logs once")
    print(", ".join(f"{phase}: {number}" for phase, number in killed.items()))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
