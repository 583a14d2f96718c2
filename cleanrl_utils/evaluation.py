"""Evaluation: play whole episodes, film one, print the table at the end of a run."""

import math
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.errors import one_line
from cleanrl_utils.tracking import VIDEOS, game_flags, script_of

Act = Callable[[np.ndarray], np.ndarray]  # from observations, uint8 (B, 4, 84, 84), to actions, int64 (B,)
MAX_PARALLEL_EPISODES = 64


def play_episodes(
    name: str, act: Act, episodes: int, args: Any, run_dir: Path, between: Callable[[], None] = lambda: None
) -> list[float]:
    """Play whole episodes, print statistics of their unclipped returns, and return these returns.

    Each episode has an environment of its own and counts whenever it ends. Counting the first ``episodes`` to end would
    over-represent short episodes. The same seed gives the same episodes.

    Args:
        name: the name of the evaluation, for the output and the video.
        act: the function that chooses the actions.
        episodes: the number of episodes.
        args: flags. With ``capture_video`` one more episode is filmed.
        run_dir: the directory of the run. Its videos go to `videos/{run_name}`.
        between: called before every step; may raise to stop.
    """
    first_seed = args.seed + 1000  # other episodes than those of the training
    returns: list[float] = []
    with tqdm(total=episodes, desc=name, unit="episode", leave=False, disable=None) as bar:  # only on a terminal
        while len(returns) < episodes:
            num_envs = min(MAX_PARALLEL_EPISODES, episodes - len(returns))
            envs = AtariEnvs(
                args.env_id, num_envs, first_seed + len(returns), args.repeat_action_probability, args.full_action_space
            )
            returns += play_one_episode_each(envs, act, between, bar)
            envs.close()
    tqdm.write(f"{name}: return {np.mean(returns):.1f} ± {np.std(returns):.1f} over {episodes} episodes")
    if args.capture_video:
        film_episode(act, VIDEOS / run_dir.name / f"{name.replace(' ', '-')}.mp4", args, between)
    return returns


def play_one_episode_each(envs: AtariEnvs, act: Act, between: Callable[[], None], bar: tqdm) -> list[float]:
    """Play one episode in each environment and return their returns."""
    returns = np.zeros(envs.num_envs)
    playing = np.ones(envs.num_envs, bool)
    observation = envs.reset()
    while playing.any():
        between()
        rows = np.flatnonzero(playing)
        padded_rows = np.resize(rows, padded_size(len(rows)))  # np.resize repeats rows at the end
        actions = act(observation[padded_rows])
        action = np.zeros(envs.num_envs, np.int64)  # ended episodes get any action
        action[rows] = actions[: len(rows)]
        result = envs.step(action)
        observation = result.observation
        for env, episodic_return, _ in result.episodes:
            if playing[env]:
                returns[env] = episodic_return
                playing[env] = False
                bar.update()
    return returns.tolist()


def padded_size(count: int) -> int:
    """Return the smallest of 1, 2, 4, 8, 16, 24, … that is at least ``count``: JAX compiles for each batch size."""
    for size in (1, 2, 4):
        if count <= size:
            return size
    return 8 * math.ceil(count / 8)


def film_episode(act: Act, path: Path, args: Any, between: Callable[[], None] = lambda: None) -> float:
    """Play one episode, film it to the mp4 file ``path`` and return its return; warn if it can't be written."""
    from imageio import get_writer

    seed = args.seed + 2000  # another episode than those of the training and the evaluation
    game = (args.env_id, 1, seed, args.repeat_action_probability, args.full_action_space)
    envs = AtariEnvs(*game)
    camera = AtariEnvs(*game, grayscale=False, img_height=210, img_width=160, stack_num=1)  # the same episode in colour
    observation = envs.reset()
    image = camera.reset()
    episodes: list[tuple[int, int, int]] = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with get_writer(path, fps=15, macro_block_size=2) as writer:  # 15 steps are a second of the game
            while not episodes:
                between()
                writer.append_data(image[0, 0])
                action = act(observation)
                image = camera.step(action).observation
                result = envs.step(action)
                observation = result.observation
                episodes = result.episodes
    except (OSError, IndexError, RuntimeError) as error:  # a broken or missing ffmpeg raises these
        tqdm.write(f"WARNING: the video {path} can't be written ({one_line(error)})")
    return episodes[0][1] if episodes else np.nan


def print_summary(
    args: Any, run_dir: Path, progress: Any, final_returns: Sequence[float], distill_coefficient: float
) -> None:
    """Print a table of all evaluations, λ at the end of the run, and the command that plays the student.

    Returns are mean ± standard deviation over episodes, and normalised to random policy = 0 % and teacher = 100 %.
    """
    rows = {"teacher": progress.teacher_returns, "random policy": progress.random_returns}
    for updates, returns in progress.offline_returns.items():
        rows[f"after {int(updates):,} offline updates"] = returns
    for steps, returns in progress.online_returns.items():
        rows[f"after {int(steps):,} online steps"] = returns
    if progress.online_step > 0 or not progress.offline_returns:
        rows[f"after {progress.online_step:,} online steps"] = final_returns
    teacher = np.mean(progress.teacher_returns)
    random = np.mean(progress.random_returns)
    print(f"\n{args.env_id}, episodes at epsilon {args.end_e}")
    print(f"{'':<28}{'return':>8}{'':>8}random = 0 %, teacher = 100 %")
    for label, returns in rows.items():
        share = f"{(np.mean(returns) - random) / (teacher - random):.0%}" if teacher > random else "-"
        print(f"  {label:<26}{np.mean(returns):8.1f} ± {np.std(returns):5.1f}{share:>10}")
    if progress.online_step > 0:
        print(f"  λ, the weight of the distillation loss: {args.distill_coefficient:g} to {distill_coefficient:.2f}")
    if np.mean(final_returns) > teacher > random:
        print(f"  The student's return is {np.mean(final_returns) - teacher:.1f} above its teacher's.")
    print()
    if (run_dir / "curves.png").exists():
        print(f"picture:             {run_dir / 'curves.png'}")
    print(f"curves:              tensorboard --logdir {shlex.quote(str(run_dir.parent))}")
    models = sorted(run_dir.glob("*.cleanrl_model"), key=lambda path: path.stat().st_mtime)
    if models:
        watch = ["python", "-m", "cleanrl_utils.enjoy", "--hf-repository", str(models[-1])]
        watch += ["--script", os.path.relpath(script_of(args)), *game_flags(args), "--epsilon", str(args.end_e)]
        print(f"watch the student:   {shlex.join([*watch, '--capture-video'])}")
