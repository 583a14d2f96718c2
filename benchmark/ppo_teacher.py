"""Train a teacher with stable-baselines3's PPO and the Atari hyperparameters of rl-baselines3-zoo.

    python benchmark/ppo_teacher.py --env-id BreakoutNoFrameskip-v4

The directory runs/{env_id}__ppo_teacher__{seed} is the teacher. SIGTERM saves the model, and the same command resumes.
A finished model is saved without the state of the optimizer, as a file of 7 MB instead of 20. stable-baselines3 is in
the extra `test`.
"""

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecFrameStack

SAVE_SECONDS = 600.0


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment"""
    total_timesteps: int = 2000000
    """environment steps, over which learning rate and clip range are annealed to 0 (the zoo's: 10 million)"""
    seed: int = 1
    """seed of the experiment"""


class SaveAndStop(BaseCallback):
    """Save the model every ten minutes, and stop the training after SIGTERM."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.last_save = time.monotonic()
        self.told_to_stop = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.told_to_stop = True

    def _on_step(self) -> bool:
        if time.monotonic() - self.last_save > SAVE_SECONDS:
            self.save()
        return not self.told_to_stop

    def save(self) -> None:
        """Write the file under another name first, so that a kill leaves the one before."""
        temporary = self.path.with_name(f"{self.path.stem}.tmp.zip")
        self.model.save(temporary)
        temporary.replace(self.path)
        self.last_save = time.monotonic()


def main(args: Args) -> None:
    run_dir = Path("runs", f"{args.env_id.replace('/', '-')}__ppo_teacher__{args.seed}")
    run_dir.mkdir(parents=True, exist_ok=True)
    print(f"run directory: {run_dir}", flush=True)  # the benchmark runner reads it
    model_path = run_dir / "ppo_teacher.zip"
    gym.register_envs(ale_py)
    envs = VecFrameStack(make_atari_env(args.env_id, n_envs=8, seed=args.seed), n_stack=4)
    schedules = {"learning_rate": LinearSchedule(2.5e-4, 0.0, 1.0), "clip_range": LinearSchedule(0.1, 0.0, 1.0)}
    if model_path.exists():
        model = PPO.load(model_path, env=envs, **schedules)
    else:
        hyperparameters = {"n_steps": 128, "n_epochs": 4, "batch_size": 256, "vf_coef": 0.5, "ent_coef": 0.01}
        model = PPO("CnnPolicy", envs, seed=args.seed, verbose=1, **hyperparameters, **schedules)
    callback = SaveAndStop(model_path)
    # `learn` adds the steps that are done already, so that the schedules end at `total_timesteps`.
    steps_left = args.total_timesteps - model.num_timesteps
    model.learn(steps_left, callback, log_interval=20, reset_num_timesteps=False)
    finished = model.num_timesteps >= args.total_timesteps
    if finished:
        model.policy.optimizer.state.clear()  # two thirds of the file; only training needs it
    callback.save()
    print(f"saved {model_path} after {model.num_timesteps:,} steps")
    if finished:
        (run_dir / "finished").touch()


if __name__ == "__main__":
    main(tyro.cli(Args))
