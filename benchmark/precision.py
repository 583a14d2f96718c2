"""What bfloat16 does to a teacher, on states that it plays through itself.

    python benchmark/precision.py --teacher teachers/PongNoFrameskip-v4-dqn_atari-seed1

In PyTorch, on a CPU.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import tyro

from cleanrl.qdagger_dqn_atari_impalacnn import load_teacher
from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import epsilon_greedy
from cleanrl_utils.teachers import find_teacher
from cleanrl_utils.torch_utils import make_q_function


@dataclass
class Args:
    teacher: str
    """the teacher: a directory or hub repository with dqn_atari.cleanrl_model"""
    env_id: str = "PongNoFrameskip-v4"
    """its game"""
    steps: int = 700
    """steps of each of 8 games"""
    epsilon: float = 0.1
    """probability of a random action"""
    temperature: float = 0.1
    """of the softmaxes that are compared"""


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Of the last axis."""
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


def main(args: Args) -> None:
    envs, rng = AtariEnvs(args.env_id, 8, 3), np.random.default_rng(0)
    path, cpu = find_teacher(args.teacher, "dqn_atari"), torch.device("cpu")
    exact, rounded = (
        make_q_function(load_teacher(path, envs.num_actions, args.env_id, bf16), cpu) for bf16 in (False, True)
    )
    observation, rows = envs.reset(), []
    for _ in range(args.steps):
        rows.append((exact(observation), rounded(observation)))
        observation = envs.step(epsilon_greedy(rows[-1][0], args.epsilon, rng)).observation
    envs.close()
    q, q_rounded = (np.concatenate(values).astype(np.float64) for values in zip(*rows, strict=True))
    best, second = np.sort(q)[:, -1], np.sort(q)[:, -2]
    moved = (q_rounded - q_rounded.mean(1, keepdims=True)) - (q - q.mean(1, keepdims=True))
    p, p_rounded = log_softmax(q / args.temperature), log_softmax(q_rounded / args.temperature)
    print(f"{len(q):,} states; the same best action in {np.mean(q.argmax(1) == q_rounded.argmax(1)):.1%}")
    shift, gap = np.median(np.abs(moved)), np.median(best - second)
    print(f"medians: advantages move by {shift:.1e}, the best two are {gap:.1e} apart")
    print(f"KL(float32 || bfloat16) of the softmaxes: {np.mean((np.exp(p) * (p - p_rounded)).sum(1)):.1e}")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
