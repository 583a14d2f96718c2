"""Evaluation: play whole episodes, film one, print the table at the end of a run."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.errors import one_line
from cleanrl_utils.tracking import VIDEOS, game_flags, script_of

QFunction = Callable[[np.ndarray], np.ndarray]  # uint8 (B, 4, 84, 84) observations to float32 (B, A) Q-values
MAX_PARALLEL_EPISODES = 64


def epsilon_greedy(q_values: np.ndarray, epsilon: float, rng: np.random.Generator, temperature: float) -> np.ndarray:
    """Choose actions, int64 (B,), from Q-values (B, A) as the scripts do: random, greedy or sampled."""
    batch, num_actions = q_values.shape
    random, explore = rng.integers(0, num_actions, batch), rng.random(batch) < epsilon
    values = q_values + temperature * rng.gumbel(size=q_values.shape) if temperature > 0 else q_values
    return np.where(explore, random, values.argmax(axis=1))


def play_episodes(
    name: str, q_function: QFunction | None, episodes: int, args: Any, run_dir: Path,
    between: Callable[[], None] = lambda: None, temperature: float = 0.0,
) -> list[float]:  # fmt: skip
    """Play whole episodes ε-greedily, print the mean of their unclipped returns, and return them.

    Each episode has an environment of its own and counts whenever it ends. Counting the first ``episodes`` to end would
    over-represent short episodes. The same seed gives the same episodes.

    Args:
        name: the name of the evaluation, for the output and the video.
        q_function: the Q-function that acts; None is the random policy.
        args: flags; ε is ``end_e``. With ``capture_video`` one more episode is filmed.
        run_dir: its name is that of the videos' directory.
        between: called before every step; may raise to stop.
        temperature: actions are sampled from softmax(Q / temperature); 0 for the action of largest Q-value.
    """
    seed = args.seed + 1000  # other episodes than those of the training
    rng = np.random.default_rng(seed)
    returns: list[float] = []
    with tqdm(total=episodes, desc=name, unit="episode", leave=False, disable=None) as bar:  # only on a terminal
        while len(returns) < episodes:
            between()
            num_envs = min(MAX_PARALLEL_EPISODES, episodes - len(returns))
            game = args.repeat_action_probability, args.full_action_space
            envs = AtariEnvs(args.env_id, num_envs, seed + len(returns), *game)
            observation = envs.reset()
            playing, ended = np.ones(num_envs, bool), np.zeros(num_envs)
            while playing.any():
                between()
                action = np.zeros(num_envs, np.int64)
                if q_function is None:
                    action[playing] = rng.integers(0, envs.num_actions, playing.sum())
                else:
                    # JAX compiles for each batch size, so the batch is padded to 1, 2, 4, 8, 16, 24, … observations.
                    rows = np.flatnonzero(playing)
                    size = -(-len(rows) // 8) * 8 if len(rows) > 4 else 1 << (len(rows) - 1).bit_length()
                    q_values = np.asarray(q_function(observation[np.resize(rows, size)]))[: len(rows)]
                    action[playing] = epsilon_greedy(q_values, args.end_e, rng, temperature)
                observation, *_, reset, ended_episodes = envs.step(action)
                for i, (episodic_return, _) in zip(np.flatnonzero(reset), ended_episodes, strict=True):
                    if playing[i]:
                        ended[i], playing[i] = episodic_return, False
                        bar.update()
            envs.close()
            returns.extend(ended.tolist())
    tqdm.write(f"{name}: return {np.mean(returns):.1f} ± {np.std(returns):.1f} over {episodes} episodes")
    if args.capture_video and q_function is not None:
        film_episode(q_function, VIDEOS / run_dir.name / f"{name.replace(' ', '-')}.mp4", args, between, temperature)
    return returns


def film_episode(
    q_function: QFunction, path: Path, args: Any, between: Callable[[], None] = lambda: None, temperature: float = 0.0
) -> float:
    """Play one episode, film it to the mp4 file ``path`` and return its return; warn if it can't be written."""
    from imageio import get_writer

    rng = np.random.default_rng(args.seed)
    game = args.env_id, 1, args.seed, args.repeat_action_probability, args.full_action_space
    envs = AtariEnvs(*game)
    camera = AtariEnvs(*game, grayscale=False, img_height=210, img_width=160, stack_num=1)  # the same episode in colour
    observation, image, episodes = envs.reset(), camera.reset(), []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with get_writer(path, fps=15, macro_block_size=2) as writer:  # 15 steps are a second of the game
            while not episodes:
                between()
                writer.append_data(image[0, 0])
                action = epsilon_greedy(np.asarray(q_function(observation)), args.end_e, rng, temperature)
                image, (observation, *_, episodes) = camera.step(action).observation, envs.step(action)
    except (OSError, IndexError, RuntimeError) as error:  # a broken or missing ffmpeg raises these
        tqdm.write(f"WARNING: the video {path} can't be written ({one_line(error)}); training continues without it")
    return episodes[0][0] if episodes else np.nan


def print_summary(args: Any, run_dir: Path, evaluations: dict[str, list[float]], distill_coefficient: float) -> None:
    """Print a table of all evaluations, λ at the end of the run, and the next commands.

    Returns are mean ± standard deviation, and normalised to random policy = 0 % and teacher = 100 %.
    """
    random, teacher = np.mean(evaluations["random"]), np.mean(evaluations["teacher"])
    print(f"\n{args.env_id}, episodes at epsilon {args.end_e}")
    print(f"{'':<28}{'return':>8}{'':>8}random = 0 %, teacher = 100 %")
    labels = {"random": "random policy", "online": f"after {args.total_timesteps:,} online steps"}
    for name, returns in evaluations.items():
        label = labels.get(name) or re.sub(r"offline (\d+)", r"after \1 offline updates", name)
        share = f"{(np.mean(returns) - random) / (teacher - random):.0%}" if teacher > random else "-"
        print(f"  {label:<26}{np.mean(returns):8.1f} ± {np.std(returns):5.1f}{share:>10}")
    if "online" in evaluations:
        print(f"  λ, the weight of the distillation loss: {args.distill_coefficient:g} to {distill_coefficient:.2f}")
    print(f"\ncurves:              tensorboard --logdir {shlex.quote(str(run_dir.parent))}")
    script = os.path.relpath(script_of(args))
    game, epsilon = game_flags(args), ["--epsilon", str(args.end_e)]
    for model in sorted(run_dir.glob("*.cleanrl_model"), key=lambda path: path.stat().st_mtime)[-1:]:
        watch = ["-m", "cleanrl_utils.enjoy", "--hf-repository", str(model), "--script", script, *game]
        student = "student" if args.save_model or "online" not in evaluations else "offline student"
        print(f"{f'watch the {student}:':<20} {shlex.join(['python', *watch, *epsilon, '--capture-video'])}")
        print(f"use it as a teacher: {shlex.join(['python', script, '--teacher-policy-hf-repo', str(model), *game])}")
