"""Make a table, a figure and CSV files from TensorBoard event files: ``python -m cleanrl_utils.report runs``"""

import csv
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

from cleanrl_utils.errors import UserError, one_line, one_line_errors, user_errors
from cleanrl_utils.files import atomic_write

TRAINING = "charts/episodic_return"
EVALUATION = "eval/episodic_return"
LAMBDA = "charts/distill_coeff"
OFFLINE = "charts/offline/avg_episodic_return"
ONLINE = "charts/online/avg_episodic_return"
TEACHER = "charts/teacher/avg_episodic_return"
RANDOM = "charts/random/avg_episodic_return"
EVENT_FILES = "events.out.tfevents*"
# Flags in which the runs of a variant may differ.
PER_RUN = (
    "seed resume command teacher_file track capture_video save_model upload_model hf_entity wandb_entity "
    "wandb_project_name"
)
LAST_EPISODES = 10  # training episodes in a mean, as many as the schedule of λ uses
GRID = 201  # points of a curve
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # of Okabe and Ito (2008), for all eyes


@dataclass
class Args:
    paths: tyro.conf.Positional[list[Path]] = field(default_factory=lambda: [Path("runs")])
    """run directories, or directories that contain some"""
    out: Path = Path("report")
    """output directory of results.csv, curves.npz and curves.png"""


@dataclass(order=True)
class Run:
    """A row of results.csv, the curves and the flags of a run. NaN is a value that is not known."""

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
    online_evaluations: str  # steps and mean return of each: "250000:61.5 500000:80.25"
    teacher_return: float
    random_return: float
    versions: str
    command: str
    # float32 (2, GRID): training return and λ, at GRID steps from 0 to online_steps
    curves: np.ndarray = field(compare=False)
    flags: dict[str, str] = field(compare=False)

    @property
    def key(self) -> str:
        """The name of the run in curves.npz."""
        return f"{self.game}/{self.exp_name}/{self.seed}"

    @property
    def evaluations(self) -> dict[int, float]:
        """Mean return by online steps of each evaluation of the student, from the end of the offline phase on."""
        means = {} if math.isnan(self.offline_return) else {0: self.offline_return}
        for evaluation in self.online_evaluations.split():
            steps, mean = evaluation.split(":")
            means[int(steps)] = float(mean)
        if self.measured_by == "evaluation":
            means[self.online_steps] = self.final_return
        return means


COLUMNS = [column for column in fields(Run) if column.compare]  # of results.csv


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
        print(f"warning: {directory} has no curves or no hyperparameters; it is left out", file=sys.stderr)
        return None

    # ``global_step`` counts the offline updates first. The final evaluation begins at the last step. Without it, the
    # last point is up to 200 steps before the end. `total_timesteps` may have been another when the run was resumed.
    last_step = int(max(curve[0 if tag == EVALUATION else -1, 0] for tag, curve in curves.items()))
    offline_updates = min(int(flags.get("offline_steps", 0)), last_step)
    online_steps = last_step - offline_updates
    total_timesteps = int(flags.get("total_timesteps", 0))
    if abs(total_timesteps - online_steps) < 200:
        online_steps = total_timesteps

    measured_by = "evaluation"
    if len(curves[EVALUATION]):
        returns = curves[EVALUATION][:, 1]
        final_episodes = len(returns)
    elif len(curves[ONLINE]):  # the run is not finished, and its newest evaluation logged only the mean
        returns = curves[ONLINE][-1:, 1]
        final_episodes = int(flags.get("eval_episodes", 0))
        online_steps = int(curves[ONLINE][-1, 0]) - offline_updates
    else:
        returns = curves[TRAINING][-LAST_EPISODES:, 1]
        final_episodes = len(returns)
        measured_by = "training"
    final_return, deviation = mean_and_std(returns)

    steps = offline_updates + np.linspace(0, online_steps, GRID)
    training_curve = means_of_last(curves[TRAINING], LAST_EPISODES, steps)
    lambda_curve = means_of_last(curves[LAMBDA], 1, steps)
    return Run(
        game=flags["env_id"].replace("/", "-").removesuffix("NoFrameskip-v4"),
        exp_name=flags["exp_name"],
        seed=int(flags["seed"]),
        offline_updates=offline_updates,
        online_steps=online_steps,
        offline_return=last_value(curves[OFFLINE]),
        final_return=final_return,
        final_episodes=final_episodes,
        final_standard_error=deviation / math.sqrt(max(final_episodes, 1)),
        measured_by=measured_by,
        online_evaluations=" ".join(f"{step - offline_updates:.0f}:{mean:.4f}" for step, mean in curves[ONLINE]),
        teacher_return=last_value(curves[TEACHER]),
        random_return=last_value(curves[RANDOM]),
        versions=flags.get("versions", ""),
        command=flags.get("command", ""),
        curves=np.float32([training_curve, lambda_curve]),
        flags=flags,
    )


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read the runs at and below ``paths``; of runs with the same game, exp_name and seed only the newest."""
    links = [link for path in paths for link in path.glob("*") if link.is_symlink()]  # rglob does not enter them
    files = {file for root in (*paths, *links) for file in root.rglob(EVENT_FILES) if not file.is_symlink()}  # of W&B
    directories = {file.parent.resolve() for file in files}
    runs: dict[str, Run] = {}
    for directory in sorted(directories, key=lambda path: path.name):  # a name ends with the time of its start
        run = read_run(directory)
        if run is None:
            continue
        if run.key in runs:
            print(f"warning: {directory} replaces a run of the same game, exp_name and seed", file=sys.stderr)
        runs[run.key] = run
    if not runs:
        raise UserError(f"no runs in {', '.join(map(str, paths))}; give run directories or one that contains some")
    warn_of_differences(runs.values())
    return sorted(runs.values())


def warn_of_differences(runs: Iterable[Run]) -> None:
    """Warn if runs of one game and exp_name have different flags."""
    for (game, exp_name), group in grouped(runs, "game", "exp_name").items():
        flags = [set(run.flags.items()) for run in group]
        different = {name for name, _ in set.union(*flags) - set.intersection(*flags)} - {*PER_RUN.split()}
        if different:
            found = f"the runs of {exp_name} in {game} differ in {', '.join(sorted(different))}"
            print(f"warning: {found}; give each variant its own --exp-name", file=sys.stderr)


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
    head = "game | exp_name | seeds | online steps | return | measured by | after the offline phase | teacher | random"
    lines = [head, " | ".join(["---"] * 9)]
    for (game, exp_name), group in grouped(runs, "game", "exp_name").items():
        known = [run for run in group if not math.isnan(run.final_return)]
        seeds = str(len(known)) if len(known) == len(group) else f"{len(known)} of {len(group)}"
        steps = dict.fromkeys(f"{run.online_steps:,}" for run in known)
        measured_by = dict.fromkeys(f"{run.final_episodes} {run.measured_by} episodes" for run in known)
        columns = ("final_return", "offline_return", "teacher_return", "random_return")
        final, *others = (spread([getattr(run, column) for run in group]) for column in columns)
        cells = [game, exp_name, seeds, " or ".join(steps), final, " or ".join(measured_by), *others]
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def draw_evaluations(axis: Any, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Draw the evaluations of runs of one game as dots, and the mean returns of teacher and random policy as lines."""
    for run in runs:
        for point in run.evaluations.items():
            axis.plot(*point, "o", color=colors[run.exp_name], clip_on=False)
    teacher, _ = mean_and_std([run.teacher_return for run in runs])
    random, _ = mean_and_std([run.random_return for run in runs])
    for level, label, line in ((teacher, "teacher", "--"), (random, "random policy", ":")):
        if not math.isnan(level):
            axis.axhline(level, color="black", linestyle=line, linewidth=1, label=label)
    if any(run.evaluations for run in runs):
        axis.plot([], "o", color="gray", label="evaluation")


def draw_curves(figure: Any, runs: Sequence[Run]) -> None:
    """Draw a column per game: the returns of its runs over online steps, and λ below if a run has it."""
    colors = dict(zip(grouped(runs, "exp_name"), itertools.cycle(COLORS), strict=False))
    games = grouped(runs, "game")
    heights = [3, 1] if any((run.curves[1] > 0).any() for run in runs) else [1]
    axes = figure.subplots(len(heights), len(games), squeeze=False, sharex="col", height_ratios=heights)
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
    ncols = max(2, len(games))
    figure.set_size_inches(max(5, 2.3 * len(games)), 4.2 + 0.22 * len(entries) / ncols)
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=ncols, frameon=False)


def save_figure(path: Path, draw: Callable[[Any, Sequence[Run]], None], runs: Sequence[Run]) -> None:
    """Draw a figure and write it as PNG."""
    with user_errors("matplotlib can't be imported", "pip install '.[plot]'", ImportError):
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # pyplot would start the user's backend

    with rc_context({"font.size": 12}), atomic_write(path) as file:
        figure = Figure(layout="constrained")
        draw(figure, runs)
        figure.savefig(file, format="png", dpi=200, bbox_inches="tight")  # a legend may be wider than the figure


def draw_run(run_dir: Path) -> None:
    """Draw the curves of a run as ``curves.png`` in its directory.

    A failure is only a warning, because the figure comes at the end of a run.
    """
    path = run_dir / "curves.png"
    try:
        run = read_run(run_dir)
        if run is not None:
            save_figure(path, draw_curves, [run])
    except Exception as error:
        print(f"warning: {path} can't be drawn ({one_line(error)}); the run is complete without it", file=sys.stderr)


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
        save_figure(args.out / "curves.png", draw_curves, runs)
    print(f"{table(runs)}\nthe report is in {args.out}", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
