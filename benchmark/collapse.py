"""Whether a large learning rate leaves students blind after their first offline updates: Q-values that hardly vary.

    python benchmark/collapse.py --teacher teachers/PongNoFrameskip-v4-dqn_atari-seed1 --learning-rates 5e-4 1e-3

Until a student has found what the teacher looks at, its best answer is the same for every observation, and the gradient
is mostly noise. Adam makes full steps of it all the same. In PyTorch, on a CPU; half a minute per student and core.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import tyro

from cleanrl import qdagger_dqn_atari_impalacnn as script
from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.evaluation import epsilon_greedy
from cleanrl_utils.schedules import linear_schedule
from cleanrl_utils.teachers import find_teacher
from cleanrl_utils.torch_speed import WorkingCopy
from cleanrl_utils.torch_utils import make_q_function, pick_device


@dataclass
class Args:
    teacher: str
    """the teacher: a directory or hub repository with dqn_atari.cleanrl_model"""
    env_id: str = "PongNoFrameskip-v4"
    """its game"""
    learning_rates: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    """of Adam"""
    seeds: tuple[int, ...] = tuple(range(1, 11))
    """of the students' first weights and of the batches"""
    teacher_steps: int = 6000
    """environment steps of teacher data, the same for all students"""
    warmup_updates: int = 0
    """as in the script"""
    updates: int = 350
    """offline updates"""


def main(args: Args) -> None:
    device, bf16 = pick_device(cuda=False, bf16=True)
    envs, rng = AtariEnvs(args.env_id, 8, 7), np.random.default_rng(1)
    path = find_teacher(args.teacher, "dqn_atari")
    teacher = script.load_teacher(path, envs.num_actions, args.env_id, bf16).to(memory_format=torch.channels_last)
    q_function, script_args = make_q_function(teacher, device), script.Args(num_envs=envs.num_envs)
    replay = script.Replay(args.teacher_steps, envs.num_actions, script_args, device)
    observation = envs.reset()
    for row in range(args.teacher_steps // envs.num_envs):
        q_values = q_function(observation)
        epsilon = linear_schedule(1.0, 0.01, args.teacher_steps, row * envs.num_envs)
        action = envs.send(epsilon_greedy(q_values, epsilon, rng))
        step = envs.recv()
        replay.add(observation, action, step, q_values)
        observation = step.observation
    envs.close()

    print("| learning rate | seed | distillation loss, last 50 | deviation of Q over states |\n|---|---|---|---|")
    for learning_rate in args.learning_rates:
        for seed in args.seeds:
            torch.manual_seed(seed)
            replay.generator.manual_seed(seed)
            network = script.QNetwork(envs.num_actions).to(memory_format=torch.channels_last)
            optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, fused=True)
            student, target = WorkingCopy(network, bf16), WorkingCopy(copy.deepcopy(network), bf16)
            update = script.make_update(student, target, optimizer, replay, script_args)
            rates = (linear_schedule(0.0, learning_rate, args.warmup_updates, i + 1) for i in range(args.updates))
            losses = [update(*replay.window, 1.0, [rate])[0].distill_loss.item() for rate in rates]
            with torch.no_grad():
                deviation = student.network(replay.sample(256, *replay.window).observation).std(dim=0).mean().item()
            print(f"| {learning_rate:g} | {seed} | {np.mean(losses[-50:]):.4f} | {deviation:.1e} |", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
