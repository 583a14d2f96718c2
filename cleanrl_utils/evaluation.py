"""Play whole games: scores are unclipped, all lives, one game per environment."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cleanrl_utils.atari import AtariEnvs, emulator_errors, make_wrapped_env

QFunction = Callable[[np.ndarray], np.ndarray]
"""uint8 (B, 4, 84, 84) observations to float32 (B, A) Q-values"""

MAX_PARALLEL_GAMES = 64


def epsilon_greedy(q_values: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """The action of largest Q-value, or with probability ``epsilon`` any action; int64 (B,) from float (B, A)."""
    batch, num_actions = q_values.shape
    random = rng.integers(0, num_actions, batch)
    return np.where(rng.random(batch) < epsilon, random, q_values.argmax(axis=1))


def play_games(
    q_function: QFunction | None,
    env_id: str,
    episodes: int,
    epsilon: float,
    seed: int,
    repeat_action_probability: float | None = None,
    description: str = "evaluation",
    between: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Scores of ``episodes`` whole games played ε-greedily, float64 (episodes,).

    Every game has an environment of its own and counts whenever it ends. Were the first ``episodes`` games to finish
    counted instead, short games would be over-represented. The same seed gives the same games. EmulatorFailure where a
    game can't go on.

    Args:
        q_function: the player; None plays at random.
        env_id: see :func:`cleanrl_utils.atari.parse_env_id`, also for ``repeat_action_probability``.
        description: what the progress bar says.
        between: called before every step; may raise.
    """
    rng = np.random.default_rng(seed)
    scores: list[int] = []
    with tqdm(total=episodes, desc=description, unit="game", leave=False, disable=None) as bar:  # only on a terminal
        while len(scores) < episodes:
            num_envs = min(MAX_PARALLEL_GAMES, episodes - len(scores))
            envs = AtariEnvs(env_id, num_envs, seed + len(scores), repeat_action_probability)
            observation = envs.reset()
            playing = np.ones(num_envs, bool)
            wave = np.zeros(num_envs, np.int64)
            while playing.any():
                between()
                action = np.zeros(num_envs, np.int64)
                if q_function is None:
                    action[playing] = rng.integers(0, envs.num_actions, playing.sum())
                else:
                    action[playing] = epsilon_greedy(q_function(observation[playing]), epsilon, rng)
                step = envs.step(action)
                observation = step.observation
                for i, (score, _) in zip(np.flatnonzero(step.reset), step.games, strict=True):
                    if playing[i]:
                        wave[i], playing[i] = score, False
                        bar.update()
            envs.close()
            scores.extend(wave)
            bar.set_postfix_str(f"mean return {np.mean(scores):.1f}")
    return np.array(scores, np.float64)


def play_wrapped_game(
    q_function: QFunction,
    env_id: str,
    epsilon: float,
    seed: int,
    repeat_action_probability: float | None = None,
    video: Path | None = None,
    between: Callable[[], None] = lambda: None,
) -> float:
    """Score of one whole game in the stable-baselines3 wrappers; written as an mp4 file when ``video`` names one.

    The other arguments are those of :func:`play_games`, and so is what it raises.
    """
    rng = np.random.default_rng(seed)
    env = make_wrapped_env(env_id, repeat_action_probability, render_mode="rgb_array" if video else None)
    writer = None
    if video:
        from imageio import get_writer

        video.parent.mkdir(parents=True, exist_ok=True)
        # One picture per agent step, at the speed of the game. Frames go to the encoder one by one: a whole game of
        # them would take gigabytes.
        writer = get_writer(video, fps=15, macro_block_size=2)
    score = 0.0
    ale = env.unwrapped.ale
    with emulator_errors():
        observation, _ = env.reset(seed=seed)
    while True:
        between()
        action = epsilon_greedy(q_function(np.asarray(observation)[None]), epsilon, rng)
        with emulator_errors():
            observation, reward, terminated, _, _ = env.step(int(action[0]))
        score += float(reward)
        if writer:
            writer.append_data(env.render())
        if ale.game_over():  # or cut off
            break
        if terminated:  # a life, not the game
            frame = ale.getEpisodeFrameNumber()
            with emulator_errors():
                observation, _ = env.reset()
            if ale.getEpisodeFrameNumber() < frame:  # the wrappers play on a little, and that ended the game
                break
    if writer:
        writer.close()
    env.close()
    return score


def print_summary(results: dict[str, np.ndarray], env_id: str, epsilon: float) -> None:
    """Prints mean ± standard deviation of all evaluations, and the part of the way from random to teacher."""
    random, teacher = results["random"].mean(), results["teacher"].mean()
    print(f"\n{env_id}, games at epsilon {epsilon}")
    print(f"{'':<18}{'return':>8}{'':>12}of the way from random to teacher")
    for name, returns in results.items():
        way = f"{(returns.mean() - random) / (teacher - random):.0%}" if teacher != random else "-"
        print(f"  {name:<16}{returns.mean():8.1f} ± {returns.std():5.1f}{way:>10}")


def warn_of_weak_teacher(teacher_return: float, random_return: float, env_id: str) -> None:
    """Prints a warning if the teacher plays no better than random."""
    if teacher_return <= random_return:
        print(
            f"WARNING: the teacher ({teacher_return:.1f}) plays no better than random ({random_return:.1f}): is it a "
            f"teacher of {env_id}?"
        )
