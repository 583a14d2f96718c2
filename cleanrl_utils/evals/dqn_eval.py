"""Plays whole games with a saved model: ``python -m cleanrl_utils.evals.dqn_eval --model FILE_OR_DIR --env-id …``"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from cleanrl.qdagger_dqn_atari_impalacnn import load_teacher
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evals import playing
from cleanrl_utils.evaluation import QFunction
from cleanrl_utils.torch_utils import make_q_function, pick_device


@dataclass
class Args(playing.Args):
    cuda: bool = True
    """if toggled, a GPU is used when there is one"""


def evaluate(args: Args) -> np.ndarray:
    """Scores of the games, float64 (episodes,).

    Raises:
        UserError: there is no such model, or it is one of another game.
    """
    device, _ = pick_device(args.cuda, bf16=False)

    def load(path: Path, num_actions: int, env_id: str) -> QFunction:
        return make_q_function(load_teacher(path, num_actions, env_id).to(device), device)

    return playing.evaluate(args, load)


if __name__ == "__main__":
    with one_line_errors():
        cli = tyro.cli(Args)
        playing.print_scores(cli, evaluate(cli))
