"""Evaluation: play whole episodes, film one, print the table at the end of a run."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cleanrl_utils.atari import STREAMS, AtariEnvs
from cleanrl_utils.errors import one_line, shell_command, warn
from cleanrl_utils.report import draw_run
from cleanrl_utils.tracking import VIDEOS, script_of

# From observations, uint8 (B, 4, 84, 84), and random numbers to actions, int64 (B,).
Act = Callable[[np.ndarray, np.random.Generator], np.ndarray]
MAX_PARALLEL_EPISODES = 64


@dataclass
class Episode:
    """An episode of an evaluation while it is played."""

    number: int
    envs: AtariEnvs  # one environment, which this episode has for itself
    observation: np.ndarray  # uint8 (1, 4, 84, 84)


def play_episodes(
    name: str, act: Act, episodes: int, make_envs: Callable[..., AtariEnvs], seed: int, video_dir: Path | None = None
) -> list[float]:
    """Play whole episodes, print statistics of their unclipped returns, and return these returns in order.

    Every episode that starts is played to its end and counts: counting the first ``episodes`` to end would
    over-represent short ones. Each has a seed of its own, so the same ``seed`` gives the same episodes,
    and the same random numbers to ``act``.

    Args:
        name: the evaluation's name in the output.
        act: the policy.
        episodes: the number of episodes.
        make_envs: the class :class:`AtariEnvs` with the flags of the game.
        seed: the seed of the run.
        video_dir: a directory into which one more episode is filmed.
    """
    action_rng = np.random.default_rng((seed, STREAMS["evaluation actions"]))
    returns = [0.0] * episodes
    unplayed = deque(range(episodes))

    def start(envs: AtariEnvs) -> Episode:
        number = unplayed.popleft()
        return Episode(number, envs, envs.reset(seed, "evaluation", number))

    with tqdm(total=episodes, desc=name, unit="episode", leave=False, disable=None) as bar:  # only on a terminal
        # A vector environment steps all of its environments, those of ended episodes too. So each one is its own.
        playing = [start(make_envs(num_envs=1)) for _ in range(min(MAX_PARALLEL_EPISODES, episodes))]
        while playing:
            observation = np.concatenate([episode.observation for episode in playing])
            n = len(playing)  # padded to a power of two or a multiple of 8, since JAX compiles for each batch size
            rows = np.resize(np.arange(n), min(1 << (n - 1).bit_length(), -(-n // 8) * 8))  # repeats the first ones
            for episode, action in zip(playing, act(observation[rows], action_rng), strict=False):
                episode.envs.send(np.array([action]))
            still_playing = []
            for episode in playing:
                result = episode.envs.recv()
                episode.observation = result.observation
                if not result.episodes:
                    still_playing.append(episode)
                    continue
                returns[episode.number] = float(result.episodes[0][1])
                bar.update()
                if unplayed:
                    still_playing.append(start(episode.envs))
                else:
                    episode.envs.close()
            playing = still_playing
    tqdm.write(f"{name}: return {np.mean(returns):.1f} ± {np.std(returns):.1f} over {episodes} episodes")
    if video_dir is not None:
        film_episode(act, video_dir / f"{name.replace(' ', '-')}.mp4", make_envs, seed, action_rng)
    return returns


def film_episode(
    act: Act, path: Path, make_envs: Callable[..., AtariEnvs], seed: int, action_rng: np.random.Generator
) -> None:
    """Play one episode and film it to the mp4 file ``path``; warn if it can't be written."""
    envs = make_envs(num_envs=1)
    # The same episode in colour.
    camera = make_envs(num_envs=1, grayscale=False, img_height=210, img_width=160, stack_num=1)
    observation = envs.reset(seed, "video")
    image = camera.reset(seed, "video")
    ended = False
    try:
        from imageio import get_writer

        path.parent.mkdir(parents=True, exist_ok=True)
        with get_writer(path, fps=15, macro_block_size=2) as writer:  # 15 steps are a second of the game
            while not ended:
                writer.append_data(image[0, 0])
                action = act(observation, action_rng)
                image = camera.step(action).observation
                result = envs.step(action)
                observation = result.observation
                ended = bool(result.episodes)
        tqdm.write(f"video: {path}")
    except (ImportError, OSError, IndexError, RuntimeError) as error:  # a broken or missing ffmpeg raises these
        warn(f"the video {path} can't be written ({one_line(error)})")


def exceeds(higher: Sequence[float], lower: Sequence[float]) -> bool:
    """Return whether the difference of two mean returns is larger than its standard error."""
    variances = [np.var(values, ddof=min(1, len(values) - 1)) / len(values) for values in (higher, lower)]
    return bool(np.mean(higher) - np.mean(lower) > np.sqrt(sum(variances)))


def warn_of_weak_teacher(returns: Mapping[str, Sequence[float]]) -> None:
    """Warn if the teacher is not better than the random policy; ``returns`` are episodic returns by evaluation."""
    if not exceeds(returns["teacher"], returns["random"]):
        means = f"{np.mean(returns['teacher']):.1f} against {np.mean(returns['random']):.1f}"
        warn(f"the teacher is not clearly better than the random policy ({means}): λ can drop to 0 at once")


def summarise(args: Any, run_dir: Path, returns: Mapping[str, Sequence[float]]) -> None:
    """Draw ``curves.png``; print a table of all evaluations and the commands that show the results.

    ``returns`` are the episodic returns by the name of the evaluation. The table has mean ± standard deviation and, if
    the teacher is clearly better than the random policy, means normalised to random policy = 0 % and teacher = 100 %.
    """
    has_scale = "teacher" in returns and exceeds(returns["teacher"], returns["random"])
    of_qdagger = " (random: 1), after offline updates or online steps" if "teacher" in returns else ""
    print(f"\n{args.env_id}, episodes at epsilon {args.end_e}{of_qdagger}")
    print(f"{'':<28}{'return':>8}" + f"{'':>8}random = 0 %, teacher = 100 %" * has_scale)
    for name, values in returns.items():
        share = ""
        if has_scale:
            low = np.mean(returns["random"])
            share = f"{(np.mean(values) - low) / (np.mean(returns['teacher']) - low):10.0%}"
        print(f"  {name:<26}{np.mean(values):8.1f} ± {np.std(values):5.1f}{share}")
    print()
    draw_run(run_dir)  # only a warning if it fails
    if (run_dir / "curves.png").exists():
        print(f"picture:             {run_dir / 'curves.png'}")
    print(f"curves:              {shell_command(['tensorboard', '--logdir', str(run_dir.parent)])}")
    models = sorted(run_dir.glob("*.cleanrl_model"), key=lambda path: path.stat().st_mtime)
    if args.capture_video:
        print(f"videos:              {VIDEOS / run_dir.name}")
    elif models:
        watch = ["python", "-m", "cleanrl_utils.enjoy", "--hf-repository", str(models[-1])]
        if "teacher" in returns:  # a DQN script's network is that of a teacher, which the scripts of QDagger read
            watch += ["--script", str(script_of(args))]
        watch += ["--env-id", args.env_id, "--epsilon", str(args.end_e)]
        print(f"watch the agent:     {shell_command([*watch, '--capture-video'])}")
