"""Plays whole games with a saved model, in JAX: ``python -m cleanrl_utils.evals.dqn_jax_eval --model … --env-id …``"""

from dataclasses import dataclass

import jax
import numpy as np
import tyro

from cleanrl_utils.checks import one_line_errors
from cleanrl_utils.device import pick_jax_device
from cleanrl_utils.evals import playing


@dataclass
class Args(playing.Args):
    exp_name: str = "dqn_atari_jax"
    """what made the model, when `model` is no file"""


def evaluate(args: Args) -> np.ndarray:
    """Scores of the games, float64 (episodes,), played as the script's own evaluations are."""
    script, (network, params) = playing.load(args, "jax", pick_jax_device(args.bf16))
    return playing.play(args, script.player(jax.jit(network.apply), params))


if __name__ == "__main__":
    with one_line_errors():
        cli = tyro.cli(Args)
        playing.print_scores(cli, evaluate(cli))
