"""Does for the benchmark runner what the real scripts do, in a fraction of a second and without torch.

Its steps go into ``steps.txt`` in the run's directory, one a line, as points of a curve would; a resumed run cuts the
file back to what its checkpoint knows.
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
for name, default in (
    ("env-id", "Pong"),
    ("seed", 1),
    ("steps", 20),
    ("seconds", 0.02),
    ("fail-at", -1),
    ("save-every", 5),
):
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--stop-at", type=int, default=-1)
parser.add_argument("--save-seconds", type=float, default=0.0)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()


def refuse(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


done, signals = 0, []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: signals.append(number))
if args.resume:
    run_dir = args.resume
    if (run_dir / "finished").exists():
        refuse(f"--resume {run_dir}: this run is finished; start a new one without --resume")
    if not (run_dir / "checkpoint" / "1.state").exists():
        refuse(f"there is no checkpoint in {run_dir}")
else:
    run_dir = Path("runs") / f"{args.env_id.replace('/', '-')}__fake_run__{args.seed}__{int(time.time())}"
    run_dir.mkdir(parents=True)
lock = os.open(run_dir, os.O_RDONLY)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    refuse(f"--resume {run_dir}: this run is still running in another process; stop that one first")
if args.resume:
    state = json.loads((run_dir / "checkpoint" / "1.state").read_text())
    args, done = argparse.Namespace(**state["args"]), state["done"]
    kept = (run_dir / "steps.txt").read_text().splitlines()[:done]
    (run_dir / "steps.txt").write_text("".join(f"{line}\n" for line in kept))
print(f"resuming {run_dir} after {done} steps" if done else f"run directory: {run_dir}", flush=True)
print("cores", sorted(os.sched_getaffinity(0)), "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
print("tags", os.environ.get("WANDB_TAGS"), flush=True)


def write(path: Path, content: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(content))
    path.with_suffix(".tmp").replace(path)


def report(finished: bool = False) -> None:
    progress = {"script": "fake_run.py", "phase": "online", "done": done, "total": args.steps, "unit": "step"}
    progress |= {"return": 12.34, "seconds_left": 90.0, "finished": finished, "time": time.time()}
    write(run_dir / "progress.json", progress)


def save() -> None:
    time.sleep(args.save_seconds if signals else 0)
    write(run_dir / "checkpoint" / "1.state", {"done": done, "args": vars(args) | {"resume": None}})


while done < args.steps:
    time.sleep(args.seconds)
    with (run_dir / "steps.txt").open("a") as steps:
        steps.write(f"{done}\n")
    if args.env_id == "Broken" and done == 7:
        raise RuntimeError("the emulator broke at step 7")
    done += 1
    if args.env_id != "Early":  # as before the end of the first evaluation
        report()
    stopping = bool(signals) or done == args.stop_at
    if stopping or (args.save_every and done % args.save_every == 0):
        save()
    if stopping:
        print("stopped", flush=True)
        sys.exit(128 + signals[0] if signals else 0)
(run_dir / "finished").touch()
report(finished=True)
