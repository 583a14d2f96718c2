"""What `dqn_eval`, `dqn_jax_eval` and `enjoy` share: flags, the model and the script it is of, games, how they went."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import cleanrl
from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.checks import PACKAGES, UserError, require_packages
from cleanrl_utils.evaluation import QFunction, play_games, play_wrapped_game

SCRIPTS = Path(cleanrl.__file__).parent
QDAGGER = {"torch": "qdagger_dqn_atari_impalacnn", "jax": "qdagger_dqn_atari_jax_impalacnn"}


@dataclass
class Args:
    model: str
    """a .cleanrl_model file of either encoding, or a directory or hub repository that holds {exp_name}.cleanrl_model"""
    env_id: str
    """the environment: {Game}NoFrameskip-v4 or ALE/{Game}-v5"""
    exp_name: str = "dqn_atari"
    """what made the model, when `model` is no file"""
    script: Path | None = None
    """the script that has the model's network; by default cleanrl/{exp_name}.py, or QDagger's, which has DQN's too"""
    episodes: int = 30
    """whole games to play"""
    epsilon: float = 0.01
    """probability of a random action"""
    seed: int = 1
    """seed of games and actions"""
    repeat_action_probability: float | None = None
    """probability of a sticky action, per frame; by default what the id stands for: 0 for -v4, 0.25 for -v5"""
    bf16: bool = True
    """if toggled, hidden layers compute in bfloat16 where a training run would do so"""
    wrapped: bool = False
    """play in stable-baselines3's wrappers, one game at a time, instead of the vector environment"""
    video: Path | None = None
    """write one game more, played in the wrappers, to this mp4 file"""


def load(args: Args, library: str, *dtype: Any) -> tuple[ModuleType, Any]:
    """The script that ``args.model`` is of, and what its ``load_model`` returns (JAX's wants the ``dtype`` of layers).

    UserError where there is no such model or script, or the model is of another script or another game.
    """
    if args.episodes < 1 or not 0 <= args.epsilon <= 1 or args.seed < 0:
        numbers = f"{args.episodes} games at epsilon {args.epsilon} from seed {args.seed}"
        raise UserError(f"{numbers} can't be played; give at least 1, a number between 0 and 1, and one from 0 on")
    if args.video:
        if args.video.suffix != ".mp4":
            raise UserError(f"--video {args.video} is no mp4 file; give it a name that ends in .mp4")
        require_packages("--video", *PACKAGES["capture_video"])
    path = Path(args.model)
    script = import_script(args.script, path.stem if path.is_file() else args.exp_name, library)
    envs = AtariEnvs(args.env_id, 1, args.seed, args.repeat_action_probability)
    envs.close()
    try:
        if path.is_file():
            return script, script.load_model(path, envs.num_actions, *dtype)
        return script, script.load_teacher(args.model, args.exp_name, envs.num_actions, *dtype)
    except UserError as error:  # it speaks of the training scripts' flags
        text = str(error).replace("--teacher-policy-hf-repo", "--model")
        raise UserError(text.replace("--teacher-model-exp-name", "--exp-name")) from error


def import_script(given: Path | None, model_name: str, library: str) -> ModuleType:
    """The script ``given``, or the one that a model is called after, or QDagger's."""
    names = re.sub(r"-offline-[0-9]+$", "", model_name), QDAGGER[library]
    for path in [given] if given else [SCRIPTS / f"{name}.py" for name in names]:
        text = path.read_text() if path.is_file() else ""
        if f"import {library}\n" in text and "def load_model(" in text:
            spec = importlib.util.spec_from_file_location(path.stem, path)
            script = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(script)
            return script
    raise UserError(f"--script {given} does not import {library} or has no `load_model`; give another")


def play(args: Args, q_function: QFunction) -> np.ndarray:
    """Scores of the games, float64 (episodes,)."""
    sticky = args.repeat_action_probability
    if args.video:
        play_wrapped_game(q_function, args.env_id, args.epsilon, args.seed, sticky, args.video)
    if args.wrapped:
        seeds = range(args.seed, args.seed + args.episodes)
        return np.array([play_wrapped_game(q_function, args.env_id, args.epsilon, seed, sticky) for seed in seeds])
    return play_games(q_function, args.env_id, args.episodes, args.epsilon, args.seed, sticky)


def print_scores(args: Args, returns: np.ndarray) -> None:
    """One line: mean, standard deviation, standard error and quartiles."""
    error = returns.std(ddof=1) / np.sqrt(len(returns)) if len(returns) > 1 else float("nan")
    quartiles = ", ".join(f"{value:g}" for value in np.quantile(returns, (0.25, 0.5, 0.75)))
    print(
        f"{args.env_id}: mean return {returns.mean():.2f} ± {returns.std():.2f} (standard error {error:.2f}; quartiles "
        f"{quartiles}) over {len(returns)} games at epsilon {args.epsilon}"
    )
