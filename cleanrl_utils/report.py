"""Make tables, figures and CSV files from TensorBoard event files: ``python -m cleanrl_utils.report runs``

Aggregates follow Agarwal et al. (2021), "Deep RL at the edge of the statistical precipice": the interquartile mean
(IQM) of normalised returns over games and seeds, with 95 % stratified bootstrap intervals.
"""

import csv
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from cleanrl_utils.errors import UserError, one_line, one_line_errors, user_errors, warn
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
GAMES_PER_ROW = 4  # of a figure
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # of Okabe and Ito (2008), for all eyes
LINES = (("-", "o"), ((0, (5, 1.5)), "s"), ((0, (1, 1)), "^"), ((0, (6, 1, 1, 1)), "D"))  # with markers
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
    commit: str
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
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    def starts(event: Event) -> bool:
        return event.session_log.status == SessionLog.START

    # A resumed run starts a file at a later step. TensorBoard sorts by name only, so by a clock that may be behind.
    files = []
    for path in directory.glob(EVENT_FILES):
        events = [*LegacyEventFileLoader(str(path)).Load()]
        files.append((next((event.step for event in events if starts(event)), 0), path.name, events))
    points = defaultdict(list)
    flags: dict[str, str] = {}
    for event in itertools.chain.from_iterable(events for *_, events in sorted(files, key=operator.itemgetter(0, 1))):
        if starts(event):  # the points from this step on are repeated
            for tag, of_tag in points.items():
                points[tag] = [point for point in of_tag if point[0] < event.step]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                points[value.tag].append((event.step, value.simple_value))
            elif value.tag.startswith("hyperparameters") and not flags:  # PyTorch's writer appends "/text_summary"
                (text,) = value.tensor.string_val  # a Markdown table
                flags = dict(re.findall(r"^\|(\w+)\|(.*)\|$", text.decode(), re.MULTILINE))
    curves = defaultdict(lambda: np.empty((0, 2)))
    curves.update({tag: np.array(of_tag, dtype=float) for tag, of_tag in points.items() if of_tag})
    return curves, flags


def means_of_last(points: np.ndarray, window: int, steps: np.ndarray) -> np.ndarray:
    """Return, for each of ``steps``, the mean of the last ``window`` of ``points`` (N, 2) up to it, else NaN."""
    last = np.searchsorted(points[:, 0], steps, side="right")
    first = np.maximum(last - window, 0)
    sums = np.cumsum([0, *points[:, 1]])
    means = (sums[last] - sums[first]) / np.maximum(last - first, 1)
    return np.where(last == 0, np.nan, means)


def mean(values: np.ndarray) -> float:
    """Return the mean; NaN if there are no values."""
    return float(np.mean(values)) if len(values) else math.nan


def read_run(directory: Path) -> Run | None:
    """Read a run; return None, with a warning, if it has no flags or no curves."""
    curves, flags = read_events(directory)
    if not curves or not flags.keys() >= {"env_id", "exp_name", "seed"}:
        warn(f"{directory} has no curves or no hyperparameters; it is left out")
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
    final_standard_error = math.nan
    if len(returns) > 1:
        final_standard_error = float(np.std(returns, ddof=1)) / math.sqrt(final_episodes)

    steps = offline_updates + np.linspace(0, online_steps, GRID)
    training_curve = means_of_last(curves[TRAINING], LAST_EPISODES, steps)
    lambda_curve = means_of_last(curves[LAMBDA], 1, steps)
    return Run(
        game=flags["env_id"].replace("/", "-").removesuffix("NoFrameskip-v4"),
        exp_name=flags["exp_name"],
        seed=int(flags["seed"]),
        offline_updates=offline_updates,
        online_steps=online_steps,
        offline_return=mean(curves[OFFLINE][-1:, 1]),
        final_return=mean(returns),
        final_episodes=final_episodes,
        final_standard_error=final_standard_error,
        measured_by=measured_by,
        online_evaluations=" ".join(f"{step - offline_updates:.0f}:{mean:.4f}" for step, mean in curves[ONLINE]),
        teacher_return=mean(curves[TEACHER][-1:, 1]),
        random_return=mean(curves[RANDOM][-1:, 1]),
        versions=flags.get("versions", ""),
        commit=flags.get("commit", ""),
        command=flags.get("command", ""),
        curves=np.float32([training_curve, lambda_curve]),
        flags=flags,
    )


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read the runs at and below ``paths``.

    Of runs with the same game, exp_name and seed, only one counts: a finished one, else the one with the most steps,
    and the newest of those that are equal. The time in a directory's name is that of a clock that may be behind.
    """
    links = [link for path in paths for link in path.glob("*") if link.is_symlink()]  # rglob does not enter them
    files = {file for root in (*paths, *links) for file in root.rglob(EVENT_FILES) if not file.is_symlink()}  # of W&B
    ranked = []
    for directory in sorted({file.parent.resolve() for file in files}):
        run = read_run(directory)
        if run is not None:
            finished = (directory / "finished").exists()
            ranked.append((finished, run.offline_updates + run.online_steps, directory.name, directory, run))
    runs: dict[str, tuple[Path, Run]] = {}
    for *_, directory, run in sorted(ranked, reverse=True):
        if run.key in runs:
            found = f"{runs[run.key][0]} has the same game, exp_name and seed, and is finished, longer or newer"
            warn(f"{directory} is left out; {found}")
        else:
            runs[run.key] = (directory, run)
    if not runs:
        raise UserError(f"no runs in {', '.join(map(str, paths))}; give run directories or one that contains some")
    warn_of_differences(run for _, run in runs.values())
    return sorted(run for _, run in runs.values())


def warn_of_differences(runs: Iterable[Run]) -> None:
    """Warn if runs of one game and exp_name have different flags."""
    for (game, exp_name), group in grouped(runs, "game", "exp_name").items():
        flags = [set(run.flags.items()) for run in group]
        different = {name for name, _ in set.union(*flags) - set.intersection(*flags)} - {*PER_RUN.split()}
        if different:
            found = f"the runs of {exp_name} in {game} differ in {', '.join(sorted(different))}"
            warn(f"{found}; give each variant its own --exp-name")


def grouped(runs: Iterable[Run], *columns: str) -> dict[Any, list[Run]]:
    """Group runs by a column, or by a tuple of columns, in the order of their first runs."""
    groups = defaultdict(list)
    for run in runs:
        groups[operator.attrgetter(*columns)(run)].append(run)
    return groups


def choose(runs: Sequence[Run], variants: Sequence[str], labels: Sequence[str]) -> tuple[list[Run], list[Run]]:
    """Return the runs of ``variants``, all if it is empty, in their order within each game; and the same with labels.

    Raises:
        UserError: a variant has no run, or the labels do not tell the variants apart.
    """
    found = [*grouped(runs, "exp_name")]
    names = [*variants] or found
    if not set(names) <= set(found):
        raise UserError(f"no runs of {', '.join(set(names) - set(found))}; give --variants of {', '.join(found)}")
    if labels and not len(set(labels)) == len(labels) == len(names):
        raise UserError(f"{len(labels)} --labels for {', '.join(names)}; give each of them its own")
    runs = [run for run in runs if run.exp_name in names]
    runs = sorted(runs, key=lambda run: (run.game, names.index(run.exp_name), run.seed))
    label_of = dict(zip(names, labels or names, strict=True))
    return runs, [replace(run, exp_name=label_of[run.exp_name]) for run in runs]


def known(runs: Iterable[Run], column: str) -> np.ndarray:
    """Return the values of a column, without NaN."""
    values = np.array([getattr(run, column) for run in runs], dtype=float)
    return values[~np.isnan(values)]


def iqm(values: np.ndarray, axis: int) -> np.ndarray:
    """Compute the interquartile mean: without the lowest and the highest quarter."""
    with user_errors("scipy can't be imported", "pip install '.[plot]'", ImportError):
        from scipy.stats import trim_mean

    return trim_mean(values, 0.25, axis=axis)


def estimate(strata: Sequence[np.ndarray], statistic: Callable[..., Any] = np.mean, resamples: int = 2000) -> Any:
    """Compute a statistic of all runs and its 95 % stratified bootstrap interval.

    Args:
        strata: float (runs, ...) per game. Runs are resampled within each.
        statistic: a function of values and an axis.
        resamples: their number.

    Returns:
        float (3, ...): the statistic and the bounds. They are NaN if a game has only one run, whose spread is unknown.
    """
    value = statistic(np.concatenate(strata), axis=0)
    if min(map(len, strata)) < 2:
        return np.stack([value, value * np.nan, value * np.nan])
    rng = np.random.default_rng(0)
    resampled = [runs[rng.integers(len(runs), size=(resamples, len(runs)))] for runs in strata]
    return np.stack([value, *np.percentile(statistic(np.concatenate(resampled, axis=1), axis=1), [2.5, 97.5], axis=0)])


def normalised_returns(runs: Sequence[Run], of_game: Sequence[Run]) -> np.ndarray:
    """Return the final returns of runs of a variant in a game, where 0 is the random policy and 1 the teacher.

    These two are means over the runs, because an evaluation of 30 episodes is noisy. Runs without a teacher, as those
    of DQN, get the means over all runs of the game. The result is empty without a teacher better than random.
    """
    random, teacher = (
        mean(known(runs if len(known(runs, column)) else of_game, column))
        for column in ("random_return", "teacher_return")
    )
    return (known(runs, "final_return") - random) / (teacher - random) if teacher > random else np.empty(0)


def aggregates(runs: Sequence[Run]) -> dict[str, tuple[list[np.ndarray], np.ndarray]]:
    """Return the normalised returns per game, and their IQM with its interval, of each exp_name that has some."""
    games = grouped(runs, "game")
    results = {}
    for exp_name, group in grouped(runs, "exp_name").items():
        returns = [normalised_returns(of_game, games[game]) for game, of_game in grouped(group, "game").items()]
        returns = [values for values in returns if len(values)]
        if returns:
            results[exp_name] = (returns, estimate(returns, iqm, 10_000))
    return results


def text_of(estimated: np.ndarray, decimals: int) -> str:
    """Format an estimate and its interval, if it has one: ``18.3 [17.1, 19.4]``."""
    value, low, high = (f"{x:,.{decimals}f}" for x in estimated)
    return value if low == "nan" else f"{value} [{low}, {high}]"


def mean_return(returns: np.ndarray) -> str:
    """Format the mean of the returns of seeds with its interval; "" without returns."""
    return text_of(estimate([returns]), 1 if abs(mean(returns)) < 1000 else 0) if len(returns) else ""


def markdown(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [f"| {head} |", "|" + "---|" * len(head.split(" | ")), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def table_of_variants(runs: Sequence[Run]) -> str:
    """Format a table with a row per exp_name: the IQM over games and seeds of normalised returns."""
    rows = []
    for exp_name, (returns, middle) in aggregates(runs).items():
        rows.append([exp_name, str(len(returns)), str(sum(map(len, returns))), text_of(middle, 2)])
    return markdown("variant | games | runs | IQM [95 % interval], random policy = 0, teacher = 1", rows)


def table_of_games(runs: Iterable[Run]) -> str:
    """Format a table with a row per game and exp_name: means over seeds."""
    head = "game | variant | seeds | online steps | return [95 % interval] | measured by"
    rows = []
    for (game, exp_name), group in grouped(runs, "game", "exp_name").items():
        measured = [run for run in group if not math.isnan(run.final_return)]
        seeds = str(len(group)) if measured == group else f"{len(measured)} of {len(group)}"
        steps = dict.fromkeys(f"{run.online_steps:,}" for run in measured)
        measured_by = dict.fromkeys(f"{run.final_episodes} {run.measured_by} episodes" for run in measured)
        columns = ("final_return", "offline_return", "teacher_return", "random_return")
        final, *others = (mean_return(known(group, column)) for column in columns)
        rows.append([game, exp_name, seeds, " or ".join(steps), final, " or ".join(measured_by), *others])
    return markdown(f"{head} | after the offline phase | teacher | random policy", rows)


def looks(runs: Iterable[Run]) -> dict[str, dict[str, Any]]:
    """Return color, line and marker of each exp_name. No two are alike."""
    styles = [{"linestyle": line, "marker": marker, "color": color} for line, marker in LINES for color in COLORS]
    names = grouped(runs, "exp_name")
    if len(names) > len(styles):
        raise UserError(f"{len(names)} variants are too many for a figure; give at most {len(styles)} as --variants")
    return dict(zip(names, styles, strict=False))


def draw_variant(axes: Sequence[Any], runs: Sequence[Run], look: dict[str, Any]) -> None:
    """Draw the means over seeds of a variant in a game, with 95 % intervals: return and λ, and evaluations as dots.

    The lines end where the shortest run ends, so that every point is a mean over the same seeds.
    """
    line = {key: look[key] for key in ("linestyle", "color")}
    trained = [run for run in runs if np.isfinite(run.curves[0]).any()]
    if trained:
        steps = np.linspace(0, min(run.online_steps for run in trained), GRID)
        grids = [np.linspace(0, run.online_steps, GRID) for run in trained]
        curves = [[np.interp(steps, x, y) for y in run.curves] for x, run in zip(grids, trained, strict=True)]
        for axis, middle, low, high in zip(axes, *estimate([np.array(curves)]), strict=False):
            axis.plot(steps, middle, **line)
            axis.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
    evaluations = defaultdict(list)
    for step, value in itertools.chain.from_iterable(run.evaluations.items() for run in runs):
        evaluations[step].append(value)
    for step, values in evaluations.items():
        middle, *bounds = estimate([np.array(values)])
        axes[0].vlines(step, *bounds, color=look["color"])
        axes[0].plot(step, middle, look["marker"], color=look["color"], markersize=5, clip_on=False)


def draw_curves(figure: Any, runs: Sequence[Run]) -> None:
    """Draw a panel per game: return over online steps, the returns of teacher and random policy, and λ below."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    look = looks(runs)
    levels = {}
    games = grouped(runs, "game")
    columns = min(len(games), GAMES_PER_ROW)
    rows = math.ceil(len(games) / columns)
    heights = [3, 1] if any((run.curves[1] > 0).any() for run in runs) else [3]
    axes = figure.subplots(rows * len(heights), columns, squeeze=False, height_ratios=heights * rows)
    panels = axes.reshape(rows, len(heights), columns).swapaxes(1, 2).reshape(-1, len(heights))
    for panel in panels[len(games) :].flat:
        panel.remove()
    for i, (panel, (game, group)) in enumerate(zip(panels, games.items(), strict=False)):
        panel[0].set_title(game)
        for name, of_variant in grouped(group, "exp_name").items():
            draw_variant(panel, of_variant, look[name])
        for column, label, line in (("teacher_return", "teacher", "--"), ("random_return", "random policy", ":")):
            level = mean(known(group, column))
            if not math.isnan(level):
                levels[label] = panel[0].axhline(level, color="black", linestyle=line, linewidth=1)
        for axis, label in zip(panel, ("return", "weight λ"), strict=False):
            axis.sharex(panel[-1])
            axis.tick_params(labelbottom=axis is panel[-1])
            axis.set_ylabel(label if i % columns == 0 else "")
        panel[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel("environment steps", fontsize="medium")

    labels = [*look, *levels]
    lines = [*(Line2D([], [], **style) for style in look.values()), *levels.values()]
    width = max(5, 2.35 * columns)
    ncols = max(1, int(width / (0.7 + 0.09 * max(map(len, "\n".join(labels).split("\n"))))))
    figure.set_size_inches(width, 0.7 + rows * (0.6 + 0.5 * sum(heights)) + 0.25 * math.ceil(len(labels) / ncols))
    legend = figure.legend(lines, ["-"] * len(lines), loc="outside upper center", ncols=ncols, frameon=False)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)  # given to `legend`, matplotlib before 3.10 hides one that begins with an underscore


def draw_iqm(figure: Any, runs: Sequence[Run]) -> None:
    """Draw the IQM of each variant, with its interval, as a row."""
    results = aggregates(runs)
    figure.set_size_inches(7, 1.2 + 0.35 * len(results))
    figure.supxlabel("IQM of normalised returns: 0 = random policy, 1 = teacher", fontsize="medium")
    axis = figure.subplots()
    for row, (_, (middle, *bounds)) in enumerate(results.values()):
        axis.hlines(row, *bounds, color=COLORS[0], linewidth=6, alpha=0.4)
        axis.plot(middle, row, "o", color=COLORS[0])
    axis.set_yticks(range(len(results)), [*results])
    axis.set_ylim(len(results) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.5)


def save_figure(path: Path, draw: Callable[[Any, Sequence[Run]], None], runs: Sequence[Run]) -> None:
    """Draw a figure and write it in the format of its suffix. The user's matplotlibrc has no effect on it."""
    with user_errors("matplotlib can't be imported", "pip install '.[plot]'", ImportError):
        from matplotlib import rc_context, rcdefaults, rcParams
        from matplotlib.figure import Figure  # pyplot would start the user's backend

    with rc_context(), atomic_write(path) as file:
        rcdefaults()
        rcParams.update(STYLE)
        figure = Figure(layout="constrained")
        draw(figure, runs)
        # A legend may be wider than the figure.
        figure.savefig(file, format=path.suffix[1:], dpi=200, bbox_inches="tight")


@contextmanager
def warn_if_not_drawn(path: Path) -> Iterator[None]:
    """Turn a failure to draw into a warning, because tables and data are complete without the figure."""
    try:
        yield
    except Exception as error:
        warn(f"{path} can't be drawn ({one_line(error)}); all else is complete")


def draw_run(run_dir: Path) -> None:
    """Draw the curves of a run as ``curves.png`` in its directory. A failure is only a warning."""
    path = run_dir / "curves.png"
    with warn_if_not_drawn(path):
        run = read_run(run_dir)
        if run is not None:
            save_figure(path, draw_curves, [run])


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
    runs, shown = choose(read_runs(args.paths), args.variants, args.labels)
    figures = {"curves": draw_curves}
    if aggregates(shown):
        print(table_of_variants(shown))
        figures["iqm"] = draw_iqm
    print(table_of_games(shown), flush=True)
    with user_errors(f"can't write to {args.out}", "give another directory", OSError):
        write_data(runs, args.out)
    for name, draw in figures.items():
        path = args.out / f"{name}.{args.format}"
        with warn_if_not_drawn(path):
            save_figure(path, draw, shown)
    print(f"the report is in {args.out}")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
