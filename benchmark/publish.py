"""Add runs to the published results, and draw the figures of docs/results.md.

    python benchmark/publish.py         # draw the figures of benchmark/results.csv
    python benchmark/publish.py runs    # first add the runs of a directory; they replace those with the same seed
    python benchmark/publish.py runs --exp-name qdagger-2.5M    # under another name

A run may be added while it runs, and again later. It prints the table of all variants. In table and figures, a variant
has the label below instead of its `--exp-name`.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from cleanrl_utils.report import COLORS, COLUMNS, Run, draw_curves, grouped, read_runs, save_figure, table
from cleanrl_utils.report import write_data as write_results

BENCHMARK = Path(__file__).resolve().parent
ASSETS = BENCHMARK.parent / "docs/assets"
QDAGGER = "QDagger (50,000 steps)"
QDAGGER_LEGEND = "QDagger, 100,000 steps\n(BeamRider: 150,000)"
FROM_SCRATCH = "from scratch (58,000 steps)"
LONGER = {
    "BeamRider": "150,000 steps, final lr 1e-5",
    "Breakout": "100,000 steps, final lr 1e-5",
    "Pong": "100,000 steps, final lr 1e-5",
}
LONGEST = "1,000,000 steps, ended early"
FULL_SIZE = "2,500,000 steps"
LABELS = {
    "qdagger-2.5M": FULL_SIZE,
    "demo": "make demo (10,000 steps)",
    "qdagger_dqn_atari_impalacnn": QDAGGER,
    "qdagger_dqn_atari_impalacnn-1-step": "1-step returns",
    "qdagger_dqn_atari_impalacnn-100k": "100,000 steps",
    "qdagger_dqn_atari_impalacnn-100k-final-1e-5": "100,000 steps, final lr 1e-5",
    "qdagger_dqn_atari_impalacnn-150k-final-1e-5": "150,000 steps, final lr 1e-5",
    "qdagger_dqn_atari_impalacnn-1M-final-1e-5": LONGEST,
    "qdagger_dqn_atari_impalacnn-adam-1.5e-4": "Adam epsilon 1.5e-4",
    "qdagger_dqn_atari_impalacnn-buffer-10000": "replay buffer of 10,000",
    "qdagger_dqn_atari_impalacnn-demo": "16,000 steps, 1-step",
    "qdagger_dqn_atari_impalacnn-from-scratch": FROM_SCRATCH,
    "qdagger_dqn_atari_impalacnn-huber": "Huber loss",
    "qdagger_dqn_atari_impalacnn-kickstarting": "no offline phase",
    "qdagger_dqn_atari_impalacnn-latched": "λ never rises again",
    "qdagger_dqn_atari_impalacnn-learning-starts-5000": "updates from step 5,000",
    "qdagger_dqn_atari_impalacnn-offline-only": "no distillation loss",
    "qdagger_dqn_atari_impalacnn-offline-only-1e-4": "no distillation loss, lr 1e-4",
    "qdagger_dqn_atari_impalacnn-ppo": "PPO as teacher",
    "qdagger_dqn_atari_impalacnn-second-generation": "student as teacher",
    "qdagger_dqn_atari_impalacnn-target-100": "target net: 100 steps",
    "qdagger_dqn_atari_impalacnn-target-updates": "target net: 4,000 steps",
    "qdagger_dqn_atari_impalacnn-temperature-1": "temperature 1",
    "qdagger_dqn_atari_jax_impalacnn": "QDagger in JAX",
    "qdagger_dqn_atari_jax_impalacnn-ppo": "PPO as teacher, JAX",
}


@dataclass
class Args:
    paths: tyro.conf.Positional[list[Path]] = field(default_factory=list)
    """directories with runs to add"""
    exp_name: str | None = None
    """the name under which they are added, by default their own"""


def read_results() -> list[Run]:
    """Read the published runs."""
    curves = np.load(BENCHMARK / "curves.npz")
    runs = []
    with (BENCHMARK / "results.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cells = {column.name: column.type(row[column.name]) for column in COLUMNS}
            run = Run(**cells, curves=np.empty(0), flags={})
            runs.append(replace(run, curves=curves[run.key]))
    return runs


def labelled(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with labels as their names."""
    return [replace(run, exp_name=LABELS.get(run.exp_name, run.exp_name)) for run in runs]


def normalised_returns(runs: Sequence[Run]) -> np.ndarray:
    """Return the final returns of runs of a game, where 0 is the random policy and 1 the teacher.

    These are the means of the returns that the runs measured, because an evaluation of 30 episodes is noisy.
    """
    final = np.array([run.final_return for run in runs])
    random = np.mean([run.random_return for run in runs])
    teacher = np.mean([run.teacher_return for run in runs])
    return (final - random) / (teacher - random)


def draw_variants(figure: Any, runs: Sequence[Run]) -> None:
    """Draw the normalised return of each run as a dot: a panel per game, a row per variant, the best on top."""
    games = grouped(runs, "game")
    heights = [len(grouped(of_game, "exp_name")) for of_game in games.values()]
    figure.set_size_inches(7, 1.5 + 0.27 * sum(heights))
    axes = figure.subplots(len(games), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axis, (game, of_game) in zip(axes, games.items(), strict=True):
        variants = {name: normalised_returns(group) for name, group in grouped(of_game, "exp_name").items()}
        names = sorted(variants, key=lambda name: np.mean(variants[name]))
        for row, name in enumerate(names):
            axis.plot(variants[name], [row] * len(variants[name]), "o", color=COLORS[0], alpha=0.6)
        axis.set_title(game)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.grid(alpha=0.5)
        axis.vlines([0, 1], *axis.get_ylim(), colors="black", linewidth=1)
    axes[0].secondary_xaxis("top").set_xticks([0, 1], ["random policy", "teacher"])
    figure.supxlabel("return at the end, a dot per seed: 0 = random policy, 1 = teacher", fontsize="medium")


def figures(runs: Sequence[Run]) -> dict[str, tuple[Callable[[Any, Sequence[Run]], None], list[Run]]]:
    """Return function and runs of each figure in docs/assets."""
    longer = [replace(run, exp_name=QDAGGER_LEGEND) for run in runs if run.exp_name == LONGER.get(run.game)]
    scratch = [replace(run, exp_name="from scratch, 58,000 steps") for run in runs if run.exp_name == FROM_SCRATCH]
    full_size = [replace(run, exp_name="QDagger") for run in runs if run.exp_name == FULL_SIZE]
    return {
        "results": (draw_curves, sorted(longer + scratch)),
        "variants": (draw_variants, [run for run in runs if run.exp_name != FULL_SIZE]),
        "long": (draw_curves, full_size),
    }


def main(args: Args) -> None:
    runs = {run.key: run for run in read_results()}
    for run in read_runs(args.paths) if args.paths else []:
        added = replace(run, exp_name=args.exp_name or run.exp_name)
        runs[added.key] = added
    write_results(sorted(runs.values()), BENCHMARK)
    published = labelled(read_results())  # rounded, as in results.csv
    for name, (draw, shown) in figures(published).items():
        save_figure(ASSETS / f"{name}.png", draw, shown)
    print(table(published))
    for run in published:
        if run.exp_name == FULL_SIZE:
            print(*(f"| {steps:,} | {mean:,.1f} |" for steps, mean in run.evaluations.items()), sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
