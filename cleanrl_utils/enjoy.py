"""Play episodes with a saved model, with CleanRL's flags: ``python -m cleanrl_utils.enjoy --exp-name … --env-id …``"""

import functools
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import tyro

import cleanrl
from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.errors import UserError, one_line_errors
from cleanrl_utils.evaluation import play_episodes
from cleanrl_utils.hub import repository_name
from cleanrl_utils.models import find_model
from cleanrl_utils.tracking import VIDEOS

SCRIPTS = Path(cleanrl.__file__).parent


@dataclass
class Args:
    exp_name: str = "dqn_atari"
    """the name of the model's file without .cleanrl_model or .zip"""
    seed: int = 1
    """seed of the environments and actions, and the one in the repository's name"""
    hf_entity: str = "cleanrl"
    """the user or organisation on the Hugging Face Hub"""
    hf_repository: str = ""
    """hub repository, directory or file of the model; by default {hf_entity}/{env_id}-{exp_name}-seed{seed}"""
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or, with sticky actions of probability 0.25, ALE/{Game}-v5"""
    eval_episodes: int = 10
    """episodes to play"""
    capture_video: bool = False
    """whether to film one more episode (check out the `videos` folder)"""
    script: Path | None = None
    """QDagger script that loads the model; by default PyTorch's, or JAX's if PyTorch is not installed"""
    epsilon: float = 0.01
    """probability of a random action"""


def import_script(path: Path) -> ModuleType:
    """Import a QDagger script, from which a model is loaded; an error in an edited copy shows its traceback.

    Raises:
        UserError: there is no such file, or it has no class ``Teacher``.
    """
    if not path.is_file():
        raise UserError(f"--script {path} is not a file; leave it out, or give a QDagger script")
    spec = importlib.util.spec_from_file_location("qdagger_script", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules["qdagger_script"] = script  # where dataclasses look up annotations that are strings
    spec.loader.exec_module(script)
    if not hasattr(script, "Teacher"):
        raise UserError(f"--script {path} has no class Teacher, which loads a model; give a QDagger script")
    return script


def main(args: Args) -> np.ndarray:
    """Play the episodes, print statistics of their returns, and return them, (episodes,)."""
    if args.eval_episodes < 1 or not 0 <= args.epsilon <= 1 or not 0 <= args.seed < 2**32:
        raise UserError("--eval-episodes must be at least 1, --epsilon from 0 to 1, --seed from 0 to 2^32 - 1")
    make_envs = functools.partial(AtariEnvs, args.env_id)
    envs = make_envs(num_envs=1)
    envs.close()
    repo = args.hf_repository or repository_name(args)
    path = find_model(repo, args.exp_name)
    library = "" if importlib.util.find_spec("torch") else "_jax"
    script = import_script(args.script or SCRIPTS / f"qdagger_dqn_atari{library}_impalacnn.py")
    hardware = script.Hardware.choose(script.Args())
    policy = script.Teacher(path, envs.num_actions, 1.0, hardware)
    print(f"playing {args.eval_episodes} episodes of {args.env_id} with {path}", flush=True)

    def act(observation: np.ndarray, action_rng: np.random.Generator) -> np.ndarray:
        return script.epsilon_greedy(policy.q_values(observation), args.epsilon, action_rng, policy.action_temperature)

    video_dir = VIDEOS / re.sub(r"[^\w.-]+", "-", f"{repo}-{path.stem}") if args.capture_video else None
    returns = np.array(play_episodes("enjoy", act, args.eval_episodes, make_envs, args.seed, video_dir))
    error = returns.std(ddof=min(1, len(returns) - 1)) / len(returns) ** 0.5
    print(f"standard error {error:.2f}, quartiles {np.quantile(returns, (0.25, 0.5, 0.75)).tolist()}")
    return returns


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
