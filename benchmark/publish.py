"""Add runs to the published results; write the tables of README and docs/results.md and draw the figures.

    python benchmark/publish.py         # write and draw what is in benchmark/results.csv
    python benchmark/publish.py runs    # first add the runs of a directory; they replace those with the same seed
    python benchmark/publish.py runs --exp-name qdagger-2.5M    # under another name

A run may be added while it runs, and again later. In tables and figures, a variant has the label below instead of its
`--exp-name`. The tables are between ``<!-- publish.py: NAME -->`` and ``<!-- end -->``; a NAME is a key of `tables`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from cleanrl_utils.errors import UserError, one_line_errors
from cleanrl_utils.report import (
    COLORS,
    KEY,
    aggregates,
    draw_curves,
    evaluations,
    keys,
    markdown,
    mean_return,
    normalised_returns,
    read_runs,
    save_figure,
    text_of,
)
from cleanrl_utils.report import write_data as write_results

BENCHMARK = Path(__file__).resolve().parent
ASSETS = BENCHMARK.parent / "docs/assets"
PAGES = (BENCHMARK.parent / "README.md", BENCHMARK.parent / "docs/results.md")
GAMES = ("BeamRider", "Breakout", "Pong")
QDAGGER = "QDagger (50,000 steps)"
QDAGGER_LEGEND = "QDagger, 100,000 steps\n(BeamRider: 150,000)"
FROM_SCRATCH = "from scratch (58,000 steps)"
LONGER = {
    "BeamRider": "150,000 steps, final lr 1e-5",
    "Breakout": "100,000 steps, final lr 1e-5",
    "Pong": "100,000 steps, final lr 1e-5",
}
ENDED_EARLY = "1,000,000 steps, ended early"
LONG_SCRATCH = "from scratch (320,000 steps)"
# https://docs.cleanrl.dev/rl-algorithms: DQN as teacher and QDagger in PyTorch and JAX, 10 million steps each; and the
# paper's students after 2.5 million steps.
OTHERS = {
    "BeamRider": ("6,673", "9,285", "8,025", "6,514"),
    "Breakout": ("366.9", "295.55", "335.08", "275.15"),
    "Pong": ("20.25", "19.72", "18.75", "not published"),
}
FULL_SIZE = "2,500,000 steps"
EMBEDDED = "embedded student"
JAX_SCRIPT = "qdagger_dqn_atari_jax_impalacnn.py"
STRONG_TEACHER = "teachers/BreakoutNoFrameskip-v4-qdagger_dqn_atari_impalacnn-seed3"
LABELS = {
    "qdagger-2.5M": FULL_SIZE,
    "embedded": EMBEDDED,
    "demo": "make demo (10,000 steps)",
    "qdagger_dqn_atari_impalacnn": QDAGGER,
    "qdagger_dqn_atari_impalacnn-1-step": "1-step returns",
    "qdagger_dqn_atari_impalacnn-100k": "100,000 steps",
    "qdagger_dqn_atari_impalacnn-100k-final-1e-5": "100,000 steps, final lr 1e-5",
    "qdagger_dqn_atari_impalacnn-150k-final-1e-5": "150,000 steps, final lr 1e-5",
    "qdagger_dqn_atari_impalacnn-1M-final-1e-5": ENDED_EARLY,
    "qdagger_dqn_atari_impalacnn-adam-1.5e-4": "Adam epsilon 1.5e-4",
    "qdagger_dqn_atari_impalacnn-buffer-10000": "replay buffer of 10,000",
    "qdagger_dqn_atari_impalacnn-demo": "16,000 steps, 1-step",
    "qdagger_dqn_atari_impalacnn-from-scratch": FROM_SCRATCH,
    "qdagger_dqn_atari_impalacnn-from-scratch-320k": LONG_SCRATCH,
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
# Neither in the table nor in the figure of variants: other sections, runs that ended at different steps, *longer*.
NOT_COMPARED = [FULL_SIZE, EMBEDDED, LONG_SCRATCH, ENDED_EARLY, *LONGER.values()]


@dataclass
class Args:
    paths: tyro.conf.Positional[list[Path]] = field(default_factory=list)
    """directories with runs to add"""
    exp_name: str | None = None
    """the name under which they are added, by default their own"""


def read_results() -> pd.DataFrame:
    """Read the published runs."""
    runs = pd.read_csv(BENCHMARK / "results.csv", keep_default_na=False, na_values="nan")
    curves = np.load(BENCHMARK / "curves.npz")
    return runs.assign(curves=[curves[key] for key in keys(runs)])


def labelled(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with labels as their names."""
    return runs.replace({"exp_name": LABELS})


def longer(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of the variants of LONGER as one variant."""
    return runs[runs.exp_name == runs.game.map(LONGER)].assign(exp_name="longer")


def variants(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that the table and the figure of variants compare."""
    return pd.concat([longer(runs), runs[~runs.exp_name.isin(NOT_COMPARED)]])


def row_of(runs: pd.DataFrame, column: str = "final_return") -> list[str]:
    """Format the mean of a column over the seeds of a variant in each game."""
    return [mean_return(runs[column][runs.game == game]) for game in GAMES]


def table_of_variants(runs: pd.DataFrame) -> str:
    """Format the table of variants: first those in all games, then by IQM."""
    after_offline = longer(runs).assign(
        exp_name="longer, after the offline phase", final_return=longer(runs).offline_return
    )
    runs = pd.concat([variants(runs), after_offline], ignore_index=True)
    results = aggregates(runs)
    rows = []
    for name in sorted(results, key=lambda name: (-len(results[name][0]), -results[name][1][0])):
        returns, middle = results[name]
        rows.append([name, *row_of(runs[runs.exp_name == name]), str(sum(map(len, returns))), text_of(middle, 2)])
    base = runs[runs.exp_name == QDAGGER]
    levels = [["teacher", *row_of(base, "teacher_return"), "", "1"]]
    levels.append(["random policy", *row_of(base, "random_return"), "", "0"])
    return markdown(f"Variant | {' | '.join(GAMES)} | Runs | IQM", levels + rows)


def table_of_readme(runs: pd.DataFrame) -> str:
    """Format the table of the README: a row per game."""
    base = runs[runs.exp_name == QDAGGER]
    columns = [row_of(base, "teacher_return"), row_of(runs[runs.exp_name == FROM_SCRATCH])]
    columns += [row_of(base), row_of(longer(runs))]
    head = "Game | Teacher | From scratch, 58,000 steps | QDagger, 50,000 steps | Longer"
    return markdown(head, zip(GAMES, *columns, strict=True))


def table_of_others(runs: pd.DataFrame) -> str:
    """Format a table with the best variant in each game, beside the published results of others."""
    rows = []
    for game in GAMES:
        of_game = runs[runs.game == game]
        best = of_game[of_game.exp_name == of_game.groupby("exp_name").final_return.mean().idxmax()]
        steps = " or ".join(f"{steps:,}" for steps in best.online_steps.unique())
        rows.append([game, mean_return(best.teacher_return), mean_return(best.final_return), steps, *OTHERS[game]])
    head = "Game | Embedded teacher | Best student | Its steps | CleanRL's teacher | CleanRL's student, PyTorch"
    return markdown(f"{head} | JAX | Paper's student", rows)


def table_of_full_size(runs: pd.DataFrame) -> str:
    """Format a table with the evaluations of the runs of 2,500,000 steps."""
    games = runs[runs.exp_name == FULL_SIZE].groupby("game")
    returns = {game: evaluations(of_game) for game, of_game in games}
    rows = []
    for step in sorted(set().union(*returns.values())):
        rows.append([f"{step:,}", *(mean_return(of_game.get(step, [])) for of_game in returns.values())])
    return markdown(f"Online steps | {' | '.join(returns)}", rows)


def table_of_embedded(runs: pd.DataFrame) -> str:
    """Format a table with the evaluations of the runs that made the students in ``teachers/``."""
    rows = []
    for run in runs[runs.exp_name == EMBEDDED].itertuples():
        returns = ", ".join(f"{step:,}: {value:,.1f}" for step, (value,) in evaluations(runs.loc[[run.Index]]).items())
        steps = [f"{run.offline_updates:,}", f"{run.online_steps:,}"]
        final = f"{run.final_return:,.1f} ± {run.final_standard_error:,.1f}"
        seed = f"{run.seed}, JAX" if JAX_SCRIPT in run.command else str(run.seed)
        rows.append([run.game, seed, f"{run.teacher_return:,.1f}", final, *steps, returns])
    head = "Game | Seed | Teacher | Student ± standard error | Offline updates | Online steps"
    return markdown(f"{head} | Student by online steps", rows)


def tables(runs: pd.DataFrame) -> dict[str, str]:
    """Return the text of each marked part of the pages."""
    older = (
        f"{sum(runs.versions == '')} of {len(runs)} rows have no `versions`, and {sum(runs.commit == '')} no `commit`"
    )
    return {
        "variants": table_of_variants(runs),
        "readme": table_of_readme(runs),
        "others": table_of_others(runs),
        "full size": table_of_full_size(runs),
        "embedded": table_of_embedded(runs),
        "older rows": f"{older}: their runs are older than these columns.\n",
    }


def write_tables(page: Path, runs: pd.DataFrame) -> None:
    """Replace the marked parts of a page."""
    text = page.read_text(encoding="utf-8")
    for name, content in tables(runs).items():
        part = re.compile(rf"(<!-- publish\.py: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = part.sub(lambda match, content=content: f"{match[1]}\n{content}\n{match[2]}", text)
    page.write_text(text, encoding="utf-8", newline="\n")


def draw_variants(figure: Any, runs: pd.DataFrame) -> None:
    """Draw the normalised return of each run as a dot: a panel per game, a row per variant, the best on top."""
    runs = runs.assign(normalised=normalised_returns(runs))
    games = runs.groupby("game")
    heights = games.exp_name.nunique()
    figure.set_size_inches(7, 1.5 + 0.27 * sum(heights))
    axes = figure.subplots(len(games), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axis, (game, of_game) in zip(axes, games, strict=True):
        means = of_game.groupby("exp_name").normalised.mean().sort_values()
        axis.plot(of_game.normalised, of_game.exp_name.map(means.index.get_loc), "o", color=COLORS[0], alpha=0.6)
        axis.set_title(game)
        axis.set_yticks(range(len(means)), means.index)
        axis.set_ylim(-0.6, len(means) - 0.4)
        axis.grid(alpha=0.5)
        axis.vlines([0, 1], *axis.get_ylim(), colors="black", linewidth=1)
    axes[0].secondary_xaxis("top").set_xticks([0, 1], ["random policy", "teacher"])
    figure.supxlabel("return at the end, a dot per seed: 0 = random policy, 1 = teacher", fontsize="medium")


def figures(runs: pd.DataFrame) -> dict[str, tuple[Callable[[Any, pd.DataFrame], None], pd.DataFrame]]:
    """Return function and runs of each figure in docs/assets."""
    qdagger = longer(runs).assign(exp_name=QDAGGER_LEGEND)
    scratch = runs[runs.exp_name == FROM_SCRATCH].assign(exp_name="from scratch, 58,000 steps")
    full_size = runs[runs.exp_name == FULL_SIZE].assign(exp_name="QDagger")
    strong = runs[runs.command.str.contains(STRONG_TEACHER) & (runs.exp_name == EMBEDDED)]
    library = np.where(strong.command.str.contains(JAX_SCRIPT, regex=False), "JAX", "PyTorch")
    strong = strong.assign(exp_name=[f"{name}, seed {seed}" for name, seed in zip(library, strong.seed, strict=True)])
    strong = pd.concat([strong, runs[runs.exp_name == LONG_SCRATCH]])
    return {
        "results": (draw_curves, pd.concat([qdagger, scratch]).sort_values(KEY)),
        "variants": (draw_variants, variants(runs)),
        "strong": (draw_curves, strong),
        "long": (draw_curves, full_size),
    }


def main(args: Args) -> None:
    runs = read_results()
    if args.paths:
        added = read_runs(args.paths)
        added["exp_name"] = args.exp_name or added.exp_name
        if added.duplicated(KEY).any():
            raise UserError(f"several runs of a game and seed would be {args.exp_name}; give the directory of one")
        runs = pd.concat([runs, added]).drop_duplicates(KEY, keep="last").sort_values(KEY)
    write_results(runs, BENCHMARK)
    published = labelled(read_results())  # rounded, as in results.csv
    for page in PAGES:
        write_tables(page, published)
    for name, (draw, shown) in figures(published).items():
        save_figure(ASSETS / f"{name}.png", draw, shown)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
