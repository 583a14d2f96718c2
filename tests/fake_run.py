"""Stand in for a training script in tests of the benchmark runner, in a fraction of a second and without PyTorch.

The steps are logged to ``steps.txt`` in the run directory, one in a line. A resumed run truncates it to its checkpoint.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--env-id", default="Pong")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints; 0: only when stopped")
parser.add_argument("--save-seconds", type=float, default=0.0, help="duration of saving when stopped")
parser.add_argument("--resume", type=Path)
args = parser.parse_args()

done = 0
signals = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: signals.append(number))
run_dir = args.resume or Path("runs", f"{args.env_id.replace('/', '-')}__fake_run__{args.seed}__{time.time_ns()}")
run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
lock = os.open(run_dir, os.O_RDONLY)
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises an error where a run is started twice
if args.resume:
    state = json.loads((run_dir / "checkpoint" / "1.state").read_text())
    args = argparse.Namespace(**state["args"])
    done = state["done"]
    kept = (run_dir / "steps.txt").read_text().splitlines()[:done]
    (run_dir / "steps.txt").write_text("".join(f"{line}\n" for line in kept))
print(f"resuming {run_dir} at step {done}" if done else f"run directory: {run_dir}", flush=True)
print("python", sys.prefix)
for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
    print(name, os.environ.get(name), flush=True)

while done < args.steps:
    time.sleep(0.02)
    with (run_dir / "steps.txt").open("a") as steps:
        steps.write(f"{done}\n")
    if args.env_id == "Broken" and done == 7:
        raise RuntimeError("the emulator broke at step 7")
    done += 1
    if signals or (args.save_every and done % args.save_every == 0):
        time.sleep(args.save_seconds if signals else 0)
        (run_dir / "checkpoint").mkdir(exist_ok=True)
        temporary = run_dir / "checkpoint" / "1.tmp"
        temporary.write_text(json.dumps({"done": done, "args": vars(args) | {"resume": None}}))
        temporary.replace(run_dir / "checkpoint" / "1.state")
    if signals:
        sys.exit(128 + signals[0])
(run_dir / "finished").touch()
