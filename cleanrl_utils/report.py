"""Make a table, a figure and CSV files from TensorBoard event files: ``python -m cleanrl_utils.report runs``"""

import csv
import importlib.util
import itertools
import math
import operator
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from cleanrl_utils.errors import UserError, one_line, one_line_errors, require_packages, user_errors
from cleanrl_utils.files import atomic_write

TRAINING = "charts/episodic_return"
EVALUATION = "eval/episodic_return"
LAMBDA = "charts/distill_coeff"
OFFLINE = "charts/offline/avg_episodic_return"
TEACHER = "charts/teacher/avg_episodic_return"
RANDOM = "charts/random/avg_episodic_return"
EVENT_FILES = "events.out.tfevents*"
LAST_EPISODES = 10  # training episodes in a mean, as many as the schedule of λ uses
GRID = 201  # points of a curve
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # of Okabe and Ito (2008), for all eyes


@dataclass
class Args:
    paths: tyro.conf.Positional[list[Path]] = field(default_factory=lambda: [Path("runs")])
    """run directories, or directories that contain some"""
    out: Path = Path("report")
    """output directory of results.csv, curves.npz, table.md and curves.png"""


@dataclass
class Run:
    """A row of results.csv, and the curves of the run. NaN is a value that is not known."""

    game: str
    exp_name: str
    seed: int
    offline_updates: int
    online_steps: int
    offline_return: float
    final_return: float
    final_episodes: int
    final_standard_error: float
    measured_by: str  # the final return: "evaluation", or "training" without one
    teacher_return: float
    random_return: float
    command: str
    curves: np.ndarray  # float32 (2, GRID), training return and λ, at GRID steps from 0 to online_steps

    @property
    def key(self) -> str:
        """The name of the run in curves.npz."""
        return f"{self.game}/{self.exp_name}/{self.seed}"


COLUMNS = [column for column in fields(Run) if column.name != "curves"]  # of results.csv


def warn(problem: str, consequence: str) -> None:
    """Print a warning to stderr."""
    print(f"warning: {problem}; {consequence}", file=sys.stderr, flush=True)


def read_events(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the curves of a run, float64 (N, 2) of steps and values by tag, and its flags."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()  # 0: all points
    curves = defaultdict(lambda: np.empty((0, 2)))
    for tag in events.Tags()["scalars"]:
        curves[tag] = np.array([(point.step, point.value) for point in events.Scalars(tag)], dtype=float)
    flags: dict[str, str] = {}
    for tag in events.Tags()["tensors"]:
        if tag.startswith("hyperparameters"):  # PyTorch's writer appends "/text_summary"
            (text,) = events.Tensors(tag)[0].tensor_proto.string_val  # a Markdown table
            flags = dict(re.findall(r"^\|(\w+)\|(.*)\|$", text.decode(), re.MULTILINE))
    return curves, flags


def means_of_last(points: np.ndarray, window: int, steps: np.ndarray) -> np.ndarray:
    """Return, for each of ``steps``, the mean of the last ``window`` of ``points`` (N, 2) up to it, else NaN."""
    last = np.searchsorted(points[:, 0], steps, side="right")
    first = np.maximum(last - window, 0)
    sums = np.cumsum([0, *points[:, 1]])
    means = (sums[last] - sums[first]) / np.maximum(last - first, 1)
    return np.where(last == 0, np.nan, means)


def last_value(points: np.ndarray) -> float:
    """Return the last value of a curve; NaN if it has none."""
    return float(points[-1, 1]) if len(points) else math.nan


def mean_and_std(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Compute mean and sample standard deviation of the known values; NaN where there are too few."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return float(np.nanmean(values)), float(np.nanstd(values, ddof=1))


def read_run(directory: Path) -> Run | None:
    """Read a run; return None, with a warning, if it has no flags or no curves."""
    curves, flags = read_events(directory)
    if not curves or not flags.keys() >= {"env_id", "exp_name", "seed"}:
        warn(f"{directory} has no curves or no hyperparameters", "it is left out")
        return None

    # ``global_step`` counts the offline updates first. A run logs its last point up to 200 steps before its end.
    offline_updates = int(flags.get("offline_steps", 0))
    online_steps = max(int(max(curve[-1, 0] for curve in curves.values())) - offline_updates, 0)
    total_timesteps = int(flags.get("total_timesteps", 0))
    if abs(total_timesteps - online_steps) < 200:
        online_steps = total_timesteps
    steps = offline_updates + np.linspace(0, online_steps, GRID)
    training_curve = means_of_last(curves[TRAINING], LAST_EPISODES, steps)
    lambda_curve = means_of_last(curves[LAMBDA], 1, steps)

    returns = curves[EVALUATION][:, 1]
    measured_by = "evaluation"
    if len(returns) == 0:
        returns = curves[TRAINING][-LAST_EPISODES:, 1]
        measured_by = "training"
    final_return, deviation = mean_and_std(returns)
    return Run(
        game=flags["env_id"].replace("/", "-").removesuffix("NoFrameskip-v4"),
        exp_name=flags["exp_name"],
        seed=int(flags["seed"]),
        offline_updates=offline_updates,
        online_steps=online_steps,
        offline_return=last_value(curves[OFFLINE]),
        final_return=final_return,
        final_episodes=len(returns),
        final_standard_error=deviation / math.sqrt(max(len(returns), 1)),
        measured_by=measured_by,
        teacher_return=last_value(curves[TEACHER]),
        random_return=last_value(curves[RANDOM]),
        command=flags.get("command", ""),
        curves=np.float32([training_curve, lambda_curve]),
    )


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read the runs at and below ``paths``; of runs with the same game, exp_name and seed only the newest."""
    files = {file for path in paths for file in path.rglob(EVENT_FILES) if not file.is_symlink()}  # W&B has links
    directories = {file.parent for file in files}
    runs: dict[str, Run] = {}
    for directory in sorted(directories, key=lambda path: path.name):  # a name ends with the time of its start
        run = read_run(directory)
        if run is None:
            continue
        if run.key in runs:
            warn(f"{directory} has the game, exp_name and seed of another run", "it replaces that run")
        runs[run.key] = run
    if not runs:
        raise UserError(f"no runs in {', '.join(map(str, paths))}; give run directories or one that contains some")
    return in_order(runs.values())


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Sort runs by game, exp_name and seed."""
    return sorted(runs, key=operator.attrgetter("game", "exp_name", "seed"))


def grouped(runs: Iterable[Run], *columns: str) -> dict[Any, list[Run]]:
    """Group runs by a column, or by a tuple of columns, in the order of their first runs."""
    groups = defaultdict(list)
    for run in runs:
        groups[operator.attrgetter(*columns)(run)].append(run)
    return groups


def spread(values: Sequence[float] | np.ndarray) -> str:
    """Format mean ± sample standard deviation, without the latter for one value; "" where no value is known."""
    mean, std = mean_and_std(values)
    if math.isnan(mean):
        return ""
    return f"{mean:,.1f}" if math.isnan(std) else f"{mean:,.1f} ± {std:,.1f}"


def table(runs: Iterable[Run]) -> str:
    """Format a Markdown table with a row per game and exp_name: mean ± sample standard deviation over seeds."""
    head = "game | exp_name | seeds | return | measured by | after the offline phase | teacher | random policy"
    lines = [head, " | ".join(["---"] * 8)]
    for (game, exp_name), group in grouped(runs, "game", "exp_name").items():
        measured_by = {f"{run.final_episodes} {run.measured_by} episodes": run for run in group}
        final = spread([run.final_return for run in group])
        offline = spread([run.offline_return for run in group])
        teacher = spread([run.teacher_return for run in group])
        random = spread([run.random_return for run in group])
        cells = [game, exp_name, str(len(group)), final, " or ".join(measured_by), offline, teacher, random]
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def draw_evaluations(axis: Any, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Draw the evaluations of runs of one game as dots, and the mean returns of teacher and random policy as lines."""
    for run in runs:
        axis.plot(0, run.offline_return, "D", color=colors[run.exp_name], markersize=4, clip_on=False)
        if run.measured_by == "evaluation":
            axis.plot(run.online_steps, run.final_return, "o", color=colors[run.exp_name], clip_on=False)
    teacher, _ = mean_and_std([run.teacher_return for run in runs])
    random, _ = mean_and_std([run.random_return for run in runs])
    for level, label, line in ((teacher, "teacher", "--"), (random, "random policy", ":")):
        if not math.isnan(level):
            axis.axhline(level, color="black", linestyle=line, linewidth=1, label=label)
    if not all(math.isnan(run.offline_return) for run in runs):
        axis.plot([], "D", color="gray", markersize=4, label="offline evaluation")
    if any(run.measured_by == "evaluation" for run in runs):
        axis.plot([], "o", color="gray", label="final evaluation")


def draw_curves(figure: Any, runs: Sequence[Run]) -> None:
    """Draw a column per game: the returns of its runs over online steps, and λ below if a run has it."""
    colors = dict(zip(grouped(runs, "exp_name"), itertools.cycle(COLORS), strict=False))
    games = grouped(runs, "game")
    heights = [3, 1] if any((run.curves[1] > 0).any() for run in runs) else [1]
    axes = figure.subplots(len(heights), len(games), squeeze=False, sharex="col", height_ratios=heights)
    for axis in axes[1:].flat:
        axis.update_datalim([(0, 0)])  # the axis of λ includes 0
    for column, (game, group) in zip(axes.T, games.items(), strict=True):
        column[0].set_title(game)
        for run in group:
            steps = np.linspace(0, run.online_steps, GRID)
            for axis, curve in zip(column, run.curves, strict=False):
                axis.plot(steps, curve, color=colors[run.exp_name], label=run.exp_name)
        draw_evaluations(column[0], group, colors)
        column[-1].xaxis.set_major_formatter(lambda steps, _: f"{steps / 1000:g}")
    for axis, label in zip(axes[:, 0], ("return, mean of\nten episodes", "weight λ"), strict=False):
        axis.set_ylabel(label)
    figure.supxlabel("environment steps, in thousands", fontsize="medium")

    entries: dict[str, Any] = {}  # a label of several games once
    for axis in figure.axes:
        lines, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, lines, strict=True))
    figure.set_size_inches(max(5, 2.3 * len(games)), 4.2 + 0.22 * len(entries) / len(games))
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=len(games), frameon=False)


def save_figure(path: Path, draw: Callable[[Any, Sequence[Run]], None], runs: Sequence[Run]) -> None:
    """Draw a figure and write it as PNG. Its description is the table of the runs."""
    require_packages("the figure", "matplotlib")
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # pyplot would start the user's backend

    with rc_context({"font.size": 12}), atomic_write(path) as file:
        figure = Figure(layout="constrained")
        draw(figure, runs)
        # A legend may be wider than the figure.
        figure.savefig(file, format="png", dpi=200, bbox_inches="tight", metadata={"Description": table(runs)})


def draw_run(run_dir: Path) -> None:
    """Draw the curves of a run as ``curves.png`` in its directory, if matplotlib is installed.

    A failure is only a warning, because the figure comes at the end of a run.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return
    path = run_dir / "curves.png"
    try:
        run = read_run(run_dir)
        if run is not None:
            save_figure(path, draw_curves, [run])
    except Exception as error:
        warn(f"{path} can't be drawn ({one_line(error)})", "the run is complete without it")


def write_data(runs: Sequence[Run], out: Path) -> None:
    """Write results.csv and curves.npz. The same runs give the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.name for column in COLUMNS)
        for run in runs:
            cells = [getattr(run, column.name) for column in COLUMNS]
            writer.writerow(round(cell, 4) if isinstance(cell, float) else cell for cell in cells)
    np.savez_compressed(out / "curves.npz", **{run.key: run.curves for run in runs})


def main(args: Args) -> None:
    runs = read_runs(args.paths)
    with user_errors(f"can't write to {args.out}", "give another directory", OSError):
        write_data(runs, args.out)
        (args.out / "table.md").write_text(table(runs), encoding="utf-8")
        save_figure(args.out / "curves.png", draw_curves, runs)
    print(f"{table(runs)}\nthe report is in {args.out}", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
