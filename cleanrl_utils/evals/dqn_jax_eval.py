"""Plays whole games with a saved model, in JAX: ``python -m cleanrl_utils.evals.dqn_jax_eval --model … --env-id …``"""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro

from cleanrl.qdagger_dqn_atari_jax_impalacnn import load_teacher
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evals import playing
from cleanrl_utils.evaluation import QFunction
from cleanrl_utils.jax_utils import make_q_function


@dataclass
class Args(playing.Args):
    exp_name: str = "dqn_atari_jax"
    """what made the model, when `model` is no file"""


def evaluate(args: Args) -> np.ndarray:
    """Scores of the games, float64 (episodes,).

    Raises:
        UserError: there is no such model, or it is one of another game.
    """

    def load(path: Path, num_actions: int, env_id: str) -> QFunction:
        network, params = load_teacher(path, num_actions, env_id)
        return make_q_function(jax.jit(network.apply), lambda: params)

    return playing.evaluate(args, load)


if __name__ == "__main__":
    with one_line_errors():
        cli = tyro.cli(Args)
        playing.print_scores(cli, evaluate(cli))
