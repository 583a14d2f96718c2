"""Make a table, figures and CSV files from TensorBoard event files: ``python -m cleanrl_utils.report runs``"""

import csv
import functools
import math
import operator
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from cleanrl_utils.errors import UserError, one_line_errors, require_packages, user_errors

TRAINING, EVALUATION, LAMBDA = "charts/episodic_return", "eval/episodic_return", "charts/distill_coeff"
OFFLINE, TEACHER, RANDOM = (f"charts/{name}/avg_episodic_return" for name in ("offline", "teacher", "random"))
TAGS = (TRAINING, EVALUATION, LAMBDA, OFFLINE, TEACHER, RANDOM)
EVENT_FILES, RESULTS, CURVES = "events.out.tfevents*", "results.csv", "curves.npz"
NUMBERS = ("offline_updates", "online_steps", "offline_return", "offline_episodes", "final_return", "final_episodes")
NUMBERS += ("final_standard_error", "teacher_return", "random_return", "low_lambda_share")
COLUMNS = ("game", "backend", "variant", "curve", "exp_name", "seed", *NUMBERS, "measured_by", "run", "command")
LAST_EPISODES = 10  # training episodes in a mean, as many as the schedule of λ uses
GRID = 201  # points of a curve
LOW_LAMBDA = 0.1
Run = dict[str, Any]  # a row of results.csv, numbers as float; "curves": (2, GRID) float32, training return and λ


@dataclass
class Args:
    paths: tyro.conf.Positional[list[Path]] = field(default_factory=lambda: [Path("runs")])
    """run directories, directories that contain some, or directories of earlier reports"""
    out: Path = Path("report")
    """output directory of results.csv, curves.npz, table.md, curves.png and variants.png"""


@functools.cache
def warn(problem: str, consequence: str) -> None:
    """Print a warning to stderr, once."""
    print(f"warning: {problem}; {consequence}", file=sys.stderr, flush=True)


def read_file(path: Path) -> Iterator[Any]:
    """Yield the events of a file up to the first damage, with a warning there."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    size, used, error = 0, 0, None
    try:
        size = path.stat().st_size
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            used += len(record) + 16  # a record is stored with its length and two checksums
            yield event
    except Exception as caught:  # OSError, protobuf's DecodeError, or TensorFlow's own where it is installed
        error = caught
    if used < size:
        problem = f"can't be read ({' '.join(str(error).split())})" if error else "is damaged or still being written"
        warn(f"{path} {problem}", f"using the first {used:,} of {size:,} bytes")


def read_events(directory: Path) -> Iterator[Any]:
    """Yield the events of all files of a run, in the order of their first events. A resumed run has several files."""
    files = [path for path in directory.glob(EVENT_FILES) if path.is_file()]
    for path in sorted(files, key=lambda path: next((event.wall_time for event in read_file(path)), 0.0)):
        yield from read_file(path)


def means_of_last(points: np.ndarray, window: int, steps: np.ndarray) -> np.ndarray:
    """Return, for each of ``steps``, the mean of the last ``window`` of ``points`` (N, 2) up to it, else NaN."""
    count = np.searchsorted(points[:, 0], steps, side="right")
    first, sums = np.maximum(count - window, 0), np.cumsum([0, *points[:, 1]])
    return np.where(count == 0, np.nan, (sums[count] - sums[first]) / np.maximum(count - first, 1))


def read_run(directory: Path) -> Run | None:
    """Read a run; return None, with a warning, if it cannot be identified or has no returns."""
    match = re.fullmatch(r"(?P<env_id>.+?)__(?P<exp_name>.+)__(?P<seed>\d+)__\d+", directory.name)
    logged, lists, last_step = {}, {tag: [] for tag in TAGS}, 0
    for event in read_events(directory):
        lines = b"\n".join(line for value in event.summary.value for line in value.tensor.string_val)
        text = "".join(char for char in lines.decode(errors="replace") if char.isprintable() or char == "\n")
        logged |= dict(re.findall(r"^\|(\w+)\|(.*)\|$", text, re.MULTILINE))
        last_step = max(last_step, event.step)
        for value in event.summary.value:
            if value.tag in lists and math.isfinite(value.simple_value):
                lists[value.tag].append((event.step, value.simple_value))
            elif value.tag in lists:
                warn(f"{directory} has NaN or infinity in {value.tag}", "these points are left out")
    if not any(lists.values()):
        return warn(f"{directory} has no returns", "it is left out")
    points = {tag: np.array(lists[tag], dtype=float).reshape(-1, 2) for tag in TAGS}
    for tag in set(TAGS) - {EVALUATION}:  # the steps of EVALUATION are episodes, and start again with each evaluation
        points[tag] = points[tag][np.argsort(points[tag][:, 0], kind="stable")]
    flags = {"offline_steps": points[OFFLINE][:, 0].max(initial=0)} | (match.groupdict() if match else {}) | logged
    try:
        game, exp_name = flags["env_id"].replace("/", "-").removesuffix("NoFrameskip-v4"), flags["exp_name"]
        seed, offline_updates = (int(np.int64(float(flags[name]))) for name in ("seed", "offline_steps"))
        total, episodes = (float(flags.get(name, "nan")) for name in ("total_timesteps", "eval_episodes"))
    except (KeyError, ValueError, OverflowError) as error:
        return warn(f"{directory} has no valid hyperparameters or name of a run ({error!r})", "it is left out")
    steps = max(last_step - offline_updates, 0)
    steps = total if abs(total - steps) < 200 else steps  # a run logs its last point up to 200 steps before its end
    grid = offline_updates + np.linspace(0, steps, GRID)  # ``global_step`` counts the offline updates first
    curves = means_of_last(points[TRAINING], LAST_EPISODES, grid), means_of_last(points[LAMBDA], 1, grid)
    low = np.diff(points[LAMBDA][:, 0], append=grid[-1])[points[LAMBDA][:, 1] < LOW_LAMBDA].sum() / max(steps, 1)
    first = np.flatnonzero(np.diff(points[EVALUATION][:, 0]) <= 0) + 1  # episodes with which later evaluations begin
    evaluated = points[EVALUATION][np.max(first, initial=0) :, 1]
    returns = evaluated if len(evaluated) else points[TRAINING][-LAST_EPISODES:, 1]
    final, deviation = mean_and_std(returns)
    offline, teacher, random = (mean_and_std(points[tag][-1:, 1])[0] for tag in (OFFLINE, TEACHER, RANDOM))
    numbers = [offline_updates, steps, offline, episodes if len(points[OFFLINE]) else np.nan, final, len(returns)]
    numbers += [deviation / max(len(returns), 1) ** 0.5, teacher, random, low if (curves[1] > 0).any() else np.nan]
    return dict(zip(NUMBERS, np.round(numbers, 4).tolist(), strict=True)) | {
        "run": f"{game}/{exp_name}/{seed}",  # the key in curves.npz
        "game": game, "exp_name": exp_name, "seed": str(seed), "command": flags.get("command", ""),
        "backend": "torch" if "cuda" in flags else "jax" if logged else "",
        "variant": exp_name,  # the label in the table and in variants.png
        "curve": exp_name,  # the label in curves.png, which leaves out runs without one
        "measured_by": "evaluation" if len(evaluated) else "training",
        "curves": np.float32(curves),
    }  # fmt: skip


def read_report(directory: Path) -> list[Run]:
    """Read the runs of an earlier report; raise a UserError if that is not possible."""
    with user_errors(f"{directory} has no valid {RESULTS} and {CURVES}", "give a whole report"):
        lines, curves = (directory / RESULTS).read_text(encoding="utf-8").splitlines(), np.load(directory / CURVES)
        rows = [{name: row[name] for name in COLUMNS} for row in csv.DictReader(lines)]
        numbers = [{name: float(row[name] or "nan") for name in NUMBERS} for row in rows]
        return [row | some | {"curves": curves[row["run"]]} for row, some in zip(rows, numbers, strict=True)]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read reports, and the runs at and below ``paths``, with the labels that their variants have in the reports."""
    runs, directories = {}, set()
    for path in [path.parent if path.name == RESULTS else path for path in paths]:
        found = {file.parent.resolve() for file in path.rglob(EVENT_FILES) if file.is_file() and not file.is_symlink()}
        if (path / RESULTS).is_file():
            runs |= {run["run"]: run for run in read_report(path)}
        elif not found:
            raise UserError(f"no {RESULTS} or event files in {path}; give run directories or one that contains some")
        directories |= found
    labels = {(run["game"], run["exp_name"]): (run["variant"], run["curve"]) for run in runs.values()}
    for directory in sorted(directories):
        if run := read_run(directory):
            run["variant"], run["curve"] = labels.get((run["game"], run["exp_name"]), (run["variant"], run["curve"]))
            if run["run"] in runs:
                warn(f"{directory} has the game, exp_name and seed of another run", "it replaces that run")
            runs[run["run"]] = run
    if not runs:
        raise UserError(f"no run to report in {', '.join(map(str, paths))}; give runs that have logged returns")
    return [runs[key] for key in sorted(runs)]


def grouped(runs: Iterable[Run], *columns: str) -> dict[Any, list[Run]]:
    """Group runs by a column, or by a tuple of columns, in the order of their first runs."""
    groups = defaultdict(list)
    for run in runs:
        groups[operator.itemgetter(*columns)(run)].append(run)
    return groups


def mean_and_std(values: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and sample standard deviation of (seeds, …) over seeds, without NaN; NaN with too few values."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.nanmean(values, axis=0), np.nanstd(values, axis=0, ddof=1)


def table(runs: Sequence[Run]) -> str:
    """Format a Markdown table with a row per game and variant: mean ± sample standard deviation over seeds."""
    header = "game | variant | seeds | return | measured by | after the offline phase | teacher | random policy"
    lines = [f"{header} | steps with λ < {LOW_LAMBDA}", " | ".join(["---"] * 9)]
    for (game, variant), group in grouped(runs, "game", "variant").items():
        columns = ("final_return", "offline_return", "teacher_return", "random_return")
        results = [mean_and_std([run[column] for run in group]) for column in columns]
        final, *others = (f"{m:,.1f} ± {s:,.1f}".replace(" ± nan", "").replace("nan", "") for m, s in results)
        measured = " or ".join({f"{run['final_episodes']:.0f} {run['measured_by']} episodes": 0 for run in group})
        share = f"{100 * mean_and_std([run['low_lambda_share'] for run in group])[0]:.0f} %".replace("nan %", "")
        lines.append(" | ".join([game, variant, str(len(group)), final, measured, *others, share]))
    return "".join(f"| {line} |\n" for line in lines)


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # of Okabe and Ito (2008), for all eyes


def draw_curves(figure: Any, runs: Sequence[Run]) -> None:
    """Draw a panel per game: training returns over online steps, a line per run, final evaluations, and λ below."""
    games, labels = grouped(runs, "game"), [*grouped(runs, "curve")]
    height_ratios = [3, 1][: 1 + any((run["curves"][1] > 0).any() for run in runs)]
    panels = figure.subplots(len(height_ratios), len(games), squeeze=False, sharex="col", height_ratios=height_ratios).T
    for panel, (game, group) in zip(panels, games.items(), strict=True):
        for run in group:
            i = labels.index(run["curve"])
            color, line = COLORS[i % 6], ("-", "--", ":", "-.")[i // 6 % 4]
            for axis, values in zip(panel, run["curves"], strict=False):
                if axis is panel[0] or (values > 0).any():
                    axis.plot(np.linspace(0, run["online_steps"], GRID), values, line, color=color, label=run["curve"])
            if run["measured_by"] == "evaluation":
                panel[0].plot(run["online_steps"], run["final_return"], "o", color=color, clip_on=False)
        for name, style in (("teacher", "--"), ("random policy", ":")):
            if not np.isnan(level := mean_and_std([run[f"{name.split()[0]}_return"] for run in group])[0]):
                panel[0].axhline(level, color="black", linestyle=style, linewidth=1, label=name)
        if any(run["measured_by"] == "evaluation" for run in group):
            panel[0].plot([], "o", color="gray", label="final evaluation")
        panel[0].set_title(game)
        panel[-1].xaxis.set_major_formatter(lambda steps, _: f"{steps / 1000:g}")
    for axis, label in zip(panels[0], ("return, mean of\nten episodes", "weight λ"), strict=False):
        axis.set_ylabel(label)
    entries = {k: line for axis in figure.axes for line, k in zip(*axis.get_legend_handles_labels(), strict=True)}
    width = max(5, 2.3 * len(games))
    ncols = int(np.clip(width / (0.6 + 0.09 * max(map(len, entries))), 1, 3))
    figure.set_size_inches(width, 4.2 + 0.22 * len(entries) / ncols)
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=ncols, frameon=False)
    figure.supxlabel("environment steps, in thousands", fontsize="medium")


def draw_variants(figure: Any, runs: Sequence[Run]) -> None:
    """Draw a dot per run: its return from random policy (0) to teacher (1), in a row per variant, sorted by means."""
    dots: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for (variant, game), group in grouped(runs, "variant", "game").items():
        final, teacher, random = ([run[f"{x}_return"] for run in group] for x in ("final", "teacher", "random"))
        dots[variant][game] = (final - np.mean(random)) / (np.mean(teacher) - np.mean(random))
    variants = sorted(dots, key=lambda variant: np.mean(np.concatenate([*dots[variant].values()])))
    figure.set_size_inches(7, 1.5 + 0.3 * len(variants))
    axis = figure.subplots()
    for i, game in enumerate(games := [*grouped(runs, "game")]):
        y = 0.6 * (i + 0.5) / len(games) - 0.3
        points = [(x, row + y) for row, variant in enumerate(variants) for x in dots[variant].get(game, [])]
        axis.plot(*np.transpose(points), "osD^v*"[i % 6], color=COLORS[i % 6], alpha=0.7, label=game)
    axis.set_yticks(range(len(variants)), variants)
    axis.set_ylim(-0.6, len(variants) - 0.4)
    axis.secondary_xaxis("top").set_xticks([0, 1], ["random policy", "teacher"])
    axis.grid(alpha=0.5)
    axis.plot([[0, 1]] * 2, axis.get_ylim(), "k", linewidth=1)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.supxlabel("return at the end, a dot per seed: 0 = random policy, 1 = teacher", fontsize="medium")


def write_report(runs: Sequence[Run], out: Path) -> str:
    """Write the files of the report to ``out``, and return the table. The same runs give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    with (out / RESULTS).open("w", encoding="utf-8", newline="") as file:
        rows = [[f"{run[c]:.15g}".replace("nan", "") if c in NUMBERS else run[c] for c in COLUMNS] for run in runs]
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    np.savez_compressed(out / CURVES, **{run["run"]: run["curves"] for run in runs})
    (out / "table.md").write_text(table(runs), encoding="utf-8")
    curves = [run for run in runs if run["curve"] and run["online_steps"]]
    variants = [run for run in runs if run["teacher_return"] > run["random_return"] and run["final_episodes"]]
    with rc_context({"font.size": 12, "text.parse_math": False}):
        for name, draw, shown in (("curves.png", draw_curves, curves), ("variants.png", draw_variants, variants)):
            (out / name).unlink(missing_ok=True)  # of an earlier report
            if shown:
                draw(figure := Figure(layout="constrained"), shown)
                figure.savefig(out / name, dpi=200, metadata={"Description": table(runs)})
    return table(runs)


def main(args: Args) -> None:
    require_packages("python -m cleanrl_utils.report", "matplotlib", "tensorboard")
    with user_errors(f"can't write to {args.out}", "give another directory", OSError):
        text = write_report(read_runs(args.paths), args.out)
    print(f"{text}\nthe report is in {args.out}", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
