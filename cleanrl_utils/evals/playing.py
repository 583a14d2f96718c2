"""What dqn_eval and dqn_jax_eval share: flags, finding the model, playing, the line that says how it went."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.errors import UserError
from cleanrl_utils.evaluation import QFunction, check_video_possible, play_games, play_wrapped_game
from cleanrl_utils.teachers import find_teacher


@dataclass
class Args:
    model: str
    """a .cleanrl_model file of either encoding, or a directory or hub repository that holds {exp_name}.cleanrl_model"""
    env_id: str
    """the environment: {Game}NoFrameskip-v4 or ALE/{Game}-v5"""
    exp_name: str = "dqn_atari"
    """what made the model, when `model` is no file"""
    episodes: int = 30
    """whole games to play"""
    epsilon: float = 0.01
    """probability of a random action"""
    seed: int = 1
    """seed of games and actions"""
    repeat_action_probability: float | None = None
    """probability of a sticky action, per frame; by default what the id stands for: 0 for -v4, 0.25 for -v5"""
    wrapped: bool = False
    """play in stable-baselines3's wrappers, one game at a time, instead of the vector environment"""
    video: Path | None = None
    """write one game, played in the wrappers, to this mp4 file"""


def evaluate(args: Args, load: Callable[[Path, int, str], QFunction]) -> np.ndarray:
    """Scores of the games, float64 (episodes,).

    Args:
        args: the flags.
        load: the player saved in a file, given the game's number of actions and the environment's id.

    Raises:
        UserError: there is no such model, or it is one of another game.
    """
    if args.episodes < 1 or not 0 <= args.epsilon <= 1:
        raise UserError(
            f"--episodes is {args.episodes} and --epsilon is {args.epsilon}; the one must be at least 1, the other lie "
            "between 0 and 1"
        )
    try:
        path = Path(args.model) if Path(args.model).is_file() else find_teacher(args.model, args.exp_name)
    except UserError as error:  # it speaks of the training scripts' flags
        text = str(error).replace("--teacher-policy-hf-repo", "--model")
        raise UserError(text.replace("--teacher-model-exp-name", "--exp-name")) from error
    envs = AtariEnvs(args.env_id, 1, args.seed, args.repeat_action_probability)
    q_function = load(path, envs.num_actions, args.env_id)
    envs.close()
    game = (args.env_id, args.epsilon, args.seed, args.repeat_action_probability)
    if args.video:
        check_video_possible()
        play_wrapped_game(q_function, *game, video=args.video)
    if args.wrapped:
        return np.array(
            [
                play_wrapped_game(q_function, args.env_id, args.epsilon, args.seed + i, args.repeat_action_probability)
                for i in range(args.episodes)
            ]
        )
    return play_games(q_function, args.env_id, args.episodes, args.epsilon, args.seed, args.repeat_action_probability)


def print_scores(args: Args, returns: np.ndarray) -> None:
    """One line: mean, standard deviation and standard error."""
    error = returns.std(ddof=1) / np.sqrt(len(returns)) if len(returns) > 1 else float("nan")
    print(
        f"{args.env_id}: mean return {returns.mean():.2f} ± {returns.std():.2f} (standard error {error:.2f}) over "
        f"{len(returns)} games at epsilon {args.epsilon}"
    )
