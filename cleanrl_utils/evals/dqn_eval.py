"""Plays whole games with a saved model: ``python -m cleanrl_utils.evals.dqn_eval --model FILE_OR_DIR --env-id …``"""

from dataclasses import dataclass

import numpy as np
import torch
import tyro

from cleanrl_utils.checks import one_line_errors
from cleanrl_utils.device import pick_torch_device
from cleanrl_utils.evals import playing


@dataclass
class Args(playing.Args):
    cuda: bool = True
    """if toggled, a GPU is used when there is one"""


def evaluate(args: Args) -> np.ndarray:
    """Scores of the games, float64 (episodes,), played as the script's own evaluations are."""
    device, autocast = pick_torch_device(args.cuda, args.bf16)
    network = playing.load(args, "torch")[1].to(device, memory_format=torch.channels_last)

    @torch.inference_mode()
    def q_function(observation: np.ndarray) -> np.ndarray:
        with autocast:
            return network(torch.as_tensor(observation, device=device)).cpu().numpy()

    return playing.play(args, q_function)


if __name__ == "__main__":
    with one_line_errors():
        cli = tyro.cli(Args)
        playing.print_scores(cli, evaluate(cli))
