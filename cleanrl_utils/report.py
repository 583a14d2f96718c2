"""Make tables, figures and CSV files from TensorBoard event files: ``python -m cleanrl_utils.report runs``

Aggregates follow Agarwal et al. (2021), "Deep RL at the edge of the statistical precipice": the interquartile mean
(IQM) of normalised returns over games and seeds, with 95 % stratified bootstrap intervals.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from cleanrl_utils.errors import UserError, one_line, one_line_errors, user_errors, warn
from cleanrl_utils.files import atomic_write

Runs = Any  # a pandas.DataFrame with a row per run: the columns of results.csv, and "curves", float32 (2, GRID)

TRAINING = "charts/episodic_return"
EVALUATION = "eval/episodic_return"
ONLINE = "charts/online/avg_episodic_return"
ORIGIN = ("versions", "commit", "command")  # of a resumed run, all values
KEY = ["game", "exp_name", "seed"]  # columns of results.csv that identify a run
LAST_EPISODES = 10  # training episodes in a mean, as many as the schedule of λ uses
GRID = 201  # points of a curve
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # of Okabe and Ito (2008), for all eyes
LINES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1, 1, 1)))
MARKERS = "os^DvP*X<>pd"
STYLE = {"font.size": 12, "pdf.fonttype": 42}  # TrueType, because publishers refuse Type 3


@dataclass
class Args:
    paths: tyro.conf.Positional[list[Path]] = field(default_factory=lambda: [Path("runs")])
    """run directories, or directories that contain some"""
    out: Path = Path("report")
    """output directory of results.csv, curves.npz and the figures"""
    format: Literal["png", "pdf", "svg"] = "png"
    """format of the figures curves and iqm"""
    variants: list[str] = field(default_factory=list)
    """exp_names to report, in this order; all by default"""
    labels: list[str] = field(default_factory=list)
    """names of the variants in tables and figures, in the same order; exp_names by default"""


def read_events(directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the curves of a run by tag, with steps as their index, and its flags."""
    import pandas as pd  # here, because training scripts import this module
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(str(directory), event_accumulator.STORE_EVERYTHING_SIZE_GUIDANCE)
    tags = events.Reload().Tags()
    curves = defaultdict(lambda: pd.Series(dtype=float))
    for tag in tags["scalars"]:
        points = events.Scalars(tag)
        if points:  # a resumed run may have removed all
            curves[tag] = pd.Series([point.value for point in points], [point.step for point in points], dtype=float)
    tables: list[dict[str, str]] = [{}]
    for tag in tags["tensors"]:
        if tag.startswith("hyperparameters"):  # PyTorch's writer appends "/text_summary"
            # One table in Markdown of the start, and one of each time the run was resumed.
            texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
            tables = [dict(re.findall(r"^\|(\w+)\|(.*)\|$", text, re.MULTILINE)) for text in texts]
    flags = tables[-1]
    for name in ORIGIN:
        flags[name] = "; ".join(dict.fromkeys(table.get(name, "") for table in tables))
    return curves, flags


def read_run(directory: Path) -> dict[str, Any] | None:
    """Read a run as a row of Runs; return None, with a warning, if it has no flags or no curves."""
    curves, flags = read_events(directory)
    if not curves or not flags.keys() >= {"env_id", "exp_name", "seed"}:
        warn(f"{directory} has no curves or no hyperparameters; it is left out")
        return None

    # ``global_step`` counts the offline updates first. The final evaluation begins at the last step. Without it, the
    # last point is up to 200 steps before the end.
    last_step = max(curve.index[0 if tag == EVALUATION else -1] for tag, curve in curves.items())
    offline_updates = min(int(flags.get("offline_steps", 0)), last_step)
    online_steps = last_step - offline_updates
    total_timesteps = int(flags.get("total_timesteps", 0))
    if abs(total_timesteps - online_steps) < 200:
        online_steps = total_timesteps

    returns = curves[EVALUATION]
    final_episodes = len(returns)
    measured_by = "evaluation"
    if not final_episodes and len(curves[ONLINE]):  # not finished; the newest evaluation logged only the mean
        returns = curves[ONLINE].tail(1)
        final_episodes = int(flags.get("eval_episodes", 0))
        online_steps = returns.index[0] - offline_updates
    elif not final_episodes:
        returns = curves[TRAINING].tail(LAST_EPISODES)
        final_episodes = len(returns)
        measured_by = "training"

    evaluations = [f"{step - offline_updates}:{value:.4f}" for step, value in curves[ONLINE].items()]
    steps = offline_updates + np.linspace(0, online_steps, GRID)
    training_curve = curves[TRAINING].rolling(LAST_EPISODES, min_periods=1).mean().asof(steps)
    return {
        "game": flags["env_id"].replace("/", "-").removesuffix("NoFrameskip-v4"),
        "exp_name": flags["exp_name"],
        "seed": int(flags["seed"]),
        "offline_updates": offline_updates,
        "online_steps": online_steps,
        "offline_return": curves["charts/offline/avg_episodic_return"].tail(1).mean(),
        "final_return": returns.mean(),
        "final_episodes": final_episodes,
        "final_standard_error": returns.sem(),
        "measured_by": measured_by,
        "online_evaluations": " ".join(evaluations),
        "teacher_return": curves["charts/teacher/avg_episodic_return"].tail(1).mean(),
        "random_return": curves["charts/random/avg_episodic_return"].tail(1).mean(),
        **{column: flags[column] for column in ORIGIN},
        "curves": np.float32([training_curve, curves["charts/distill_coeff"].asof(steps)]),
    }


def read_runs(paths: Iterable[Path]) -> Runs:
    """Read the runs at and below ``paths``. Of runs with the same KEY, the one with the newest name counts."""
    import pandas as pd

    files = [file for path in paths for file in path.rglob("events.out.tfevents*")]
    directories = {file.parent.resolve() for file in files if not file.is_symlink()}  # W&B makes links to files
    found = map(read_run, sorted(directories, key=lambda directory: (directory.name, directory)))
    runs = pd.DataFrame(filter(None, found))
    if runs.empty:
        raise UserError(f"no runs in {', '.join(map(str, paths))}; give run directories or one that contains some")
    older = runs.duplicated(KEY, keep="last")
    if older.any():
        warn(f"older runs with the same game, exp_name and seed are left out: {', '.join(keys(runs[older]))}")
    return runs[~older].sort_values(KEY, ignore_index=True)


def keys(runs: Runs) -> Any:
    """Return the names of runs in curves.npz."""
    return runs.game + "/" + runs.exp_name + "/" + runs.seed.astype(str)


def evaluations(runs: Runs) -> dict[int, list[float]]:
    """Return the mean returns of evaluations of students by online steps, from the end of the offline phase on."""
    returns = defaultdict(list)
    for run in runs.itertuples():
        of_run = {} if math.isnan(run.offline_return) else {0: run.offline_return}
        of_run |= {int(steps): float(value) for steps, value in re.findall(r"(\d+):(\S+)", run.online_evaluations)}
        if run.measured_by == "evaluation":
            of_run[run.online_steps] = run.final_return
        for steps, value in of_run.items():
            returns[steps].append(value)
    return returns


def choose(runs: Runs, variants: Sequence[str], labels: Sequence[str]) -> tuple[Runs, Runs]:
    """Return the runs of ``variants``, by default all, in their order within each game; and the same with labels."""
    found = [*runs.exp_name.unique()]
    names = [*dict.fromkeys(variants or found)]
    if not set(names) <= set(found):
        raise UserError(f"no runs of {', '.join(set(names) - set(found))}; give --variants of {', '.join(found)}")
    if labels and not len(set(labels)) == len(labels) == len(names):
        raise UserError(f"{len(labels)} --labels for {', '.join(names)}; give each of them its own")
    runs = runs.set_index("exp_name", drop=False).loc[names].sort_values("game", kind="stable").reset_index(drop=True)
    return runs, runs.replace({"exp_name": dict(zip(names, labels or names, strict=True))})


def estimate(strata: Sequence[np.ndarray], statistic: Callable[..., Any] = np.mean, resamples: int = 2000) -> Any:
    """Compute a statistic and its 95 % stratified bootstrap interval, float (3, ...), of float (runs, ...) per game."""
    value = statistic(np.concatenate(strata), axis=0)
    if min(map(len, strata)) < 2:  # the spread of one run is unknown
        return np.stack([value, value * np.nan, value * np.nan])
    rng = np.random.default_rng(0)
    resampled = [runs[rng.integers(len(runs), size=(resamples, len(runs)))] for runs in strata]
    return np.stack([value, *np.percentile(statistic(np.concatenate(resampled, axis=1), axis=1), [2.5, 97.5], axis=0)])


def normalised_returns(runs: Runs) -> Any:
    """Return the final returns where 0 is the random policy and 1 the teacher; NaN without a better teacher.

    These two are means over the runs of a variant in a game, or over all runs of the game if it has none, as DQN.
    """
    levels = runs[["random_return", "teacher_return"]]
    of_variant = levels.groupby([runs.game, runs.exp_name]).transform("mean")
    levels = of_variant.fillna(levels.groupby(runs.game).transform("mean"))
    scale = levels.teacher_return - levels.random_return
    return (runs.final_return - levels.random_return) / scale.where(scale > 0)


def aggregates(runs: Runs) -> dict[str, tuple[list[np.ndarray], np.ndarray]]:
    """Return the normalised returns per game, and their IQM with its interval, of each exp_name that has some."""
    from scipy.stats import trim_mean

    strata = defaultdict(list)
    known = normalised_returns(runs).dropna()
    for (exp_name, _), returns in known.groupby([runs.exp_name, runs.game], sort=False):
        strata[exp_name].append(returns.to_numpy())
    iqm = partial(trim_mean, proportiontocut=0.25)
    return {exp_name: (returns, estimate(returns, iqm, 10_000)) for exp_name, returns in strata.items()}


def text_of(estimated: np.ndarray, decimals: int) -> str:
    """Format an estimate and its interval, if it has one: ``18.3 [17.1, 19.4]``."""
    value, low, high = (f"{x:,.{decimals}f}" for x in estimated)
    return value if low == "nan" else f"{value} [{low}, {high}]"


def mean_return(returns: Sequence[float]) -> str:
    """Format the mean of the known returns of seeds with its interval; "" without any."""
    known = np.array([x for x in returns if not math.isnan(x)])
    return text_of(estimate([known]), 1 if abs(known.mean()) < 1000 else 0) if len(known) else ""


def markdown(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [f"| {head} |", "|" + "---|" * len(head.split(" | ")), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def table_of_variants(runs: Runs) -> str:
    """Format a table with a row per exp_name: the IQM over games and seeds of normalised returns."""
    rows = []
    for exp_name, (returns, middle) in aggregates(runs).items():
        rows.append([exp_name, str(len(returns)), str(sum(map(len, returns))), text_of(middle, 2)])
    return markdown("variant | games | runs | IQM [95 % interval], random policy = 0, teacher = 1", rows)


def table_of_games(runs: Runs) -> str:
    """Format a table with a row per game and exp_name: means over seeds."""
    rows = []
    for (game, exp_name), group in runs.groupby(["game", "exp_name"], sort=False):
        measured = group.dropna(subset="final_return")
        seeds = f"{len(measured)} of {len(group)}" if len(measured) < len(group) else str(len(group))
        steps = " or ".join(f"{steps:,}" for steps in measured.online_steps.unique())
        episodes = (measured.final_episodes.astype(str) + " " + measured.measured_by + " episodes").unique()
        others = [mean_return(group[f"{name}_return"]) for name in ("offline", "teacher", "random")]
        rows.append([game, exp_name, seeds, steps, mean_return(group.final_return), " or ".join(episodes), *others])
    head = "game | variant | seeds | online steps | return [95 % interval] | measured by"
    return markdown(f"{head} | after the offline phase | teacher | random policy", rows)


def draw_variant(axes: Sequence[Any], runs: Runs, look: dict[str, Any]) -> None:
    """Draw the means over seeds of a variant in a game, with 95 % intervals: return and λ, and evaluations as dots.

    The lines end where the shortest run ends, so that every point is a mean over the same seeds.
    """
    trained = runs[[np.isfinite(curves[0]).any() for curves in runs.curves]]
    if len(trained):
        steps = np.linspace(0, trained.online_steps.min(), GRID)
        grids = [np.linspace(0, end, GRID) for end in trained.online_steps]
        curves = [[np.interp(steps, x, y) for y in of_run] for x, of_run in zip(grids, trained.curves, strict=True)]
        for axis, middle, low, high in zip(axes, *estimate([np.array(curves)]), strict=False):
            axis.plot(steps, middle, linestyle=look["linestyle"], color=look["color"])
            axis.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
    for step, values in evaluations(runs).items():
        middle, *bounds = estimate([np.array(values)])
        axes[0].vlines(step, *bounds, color=look["color"])
        axes[0].plot(step, middle, look["marker"], color=look["color"], markersize=5, clip_on=False)


def draw_curves(figure: Any, runs: Runs) -> None:
    """Draw a panel per game: return over online steps, the returns of teacher and random policy, and λ below."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    styles = zip(runs.exp_name.unique(), cycle(COLORS), cycle(LINES), cycle(MARKERS), strict=False)
    looks = {name: {"color": color, "linestyle": line, "marker": marker} for name, color, line, marker in styles}
    legend = {name: Line2D([], [], **look) for name, look in looks.items()}
    games = runs.groupby("game", sort=False)
    columns = min(len(games), 4)
    rows = math.ceil(len(games) / columns)
    heights = [3, 1] if any((curves[1] > 0).any() for curves in runs.curves) else [3]
    grid = figure.add_gridspec(rows * len(heights), columns, height_ratios=heights * rows)
    for i, (game, of_game) in enumerate(games):
        row, column = divmod(i, columns)
        panel = [figure.add_subplot(grid[row * len(heights) + j, column]) for j in range(len(heights))]
        panel[0].set_title(game)
        for axis, label in zip(panel, ("return", "weight λ"), strict=False):
            axis.sharex(panel[-1])
            axis.tick_params(labelbottom=axis is panel[-1])
            axis.set_ylabel(label if column == 0 else "")
        panel[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
        for name, of_variant in of_game.groupby("exp_name", sort=False):
            draw_variant(panel, of_variant, looks[name])
        for name, label, line in (("teacher_return", "teacher", "--"), ("random_return", "random policy", ":")):
            level = of_game[name].mean()
            if not math.isnan(level):
                legend[label] = panel[0].axhline(level, color="black", linestyle=line, linewidth=1)
    figure.supxlabel("environment steps", fontsize="medium")
    height = 0.7 + rows * (0.6 + 0.5 * sum(heights)) + 0.25 * math.ceil(len(legend) / 2)
    figure.set_size_inches(max(5, 2.35 * columns), height)
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=2, frameon=False)


def draw_iqm(figure: Any, runs: Runs) -> None:
    """Draw the IQM of each variant, with its interval, as a row."""
    results = aggregates(runs)
    figure.set_size_inches(7, 1.2 + 0.35 * len(results))
    figure.supxlabel("IQM of normalised returns: 0 = random policy, 1 = teacher", fontsize="medium")
    axis = figure.subplots()
    middle, low, high = np.transpose([estimated for _, estimated in results.values()])
    axis.hlines([*results], low, high, color=COLORS[0], linewidth=6, alpha=0.4)
    axis.plot(middle, [*results], "o", color=COLORS[0])
    axis.set_ylim(len(results) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.5)


def save_figure(path: Path, draw: Callable[[Any, Runs], None], runs: Runs) -> None:
    """Draw a figure and write it in the format of its suffix. The user's matplotlibrc has no effect on it."""
    from matplotlib import style
    from matplotlib.figure import Figure  # pyplot would start the user's backend

    with style.context(["default", STYLE]), atomic_write(path) as file:
        figure = Figure(layout="constrained")
        draw(figure, runs)
        figure.savefig(file, format=path.suffix[1:], dpi=200, bbox_inches="tight")  # a legend may be wider


def draw_run(run_dir: Path) -> None:
    """Draw the curves of a run as ``curves.png`` in its directory. A failure is only a warning."""
    path = run_dir / "curves.png"
    try:
        save_figure(path, draw_curves, read_runs([run_dir]))
    except Exception as error:
        warn(f"{path} can't be drawn ({one_line(error)}); all else is complete")


def write_data(runs: Runs, out: Path) -> None:
    """Write results.csv and curves.npz. The same runs give the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    runs.drop(columns="curves").round(4).to_csv(out / "results.csv", index=False, na_rep="nan", lineterminator="\n")
    np.savez_compressed(out / "curves.npz", **dict(zip(keys(runs), runs.curves, strict=True)))


def main(args: Args) -> None:
    runs, shown = choose(read_runs(args.paths), args.variants, args.labels)
    figures = {"curves": draw_curves}
    if aggregates(shown):
        print(table_of_variants(shown))
        figures["iqm"] = draw_iqm
    print(table_of_games(shown), flush=True)
    with user_errors(f"can't write to {args.out}", "give another directory", OSError):
        write_data(runs, args.out)
    for name, draw in figures.items():
        save_figure(args.out / f"{name}.{args.format}", draw, shown)
    print(f"the report is in {args.out}")


if __name__ == "__main__":
    with one_line_errors(), user_errors("a package is missing", "pip install '.[plot]'", ImportError):
        main(tyro.cli(Args))
