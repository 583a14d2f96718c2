"""Make a table and learning curves from TensorBoard event files: ``python -m cleanrl_utils.report runs``"""

import functools
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from cleanrl_utils.errors import UserError, one_line_errors, require_packages

TRAINING, EVALUATION, LAMBDA = "charts/episodic_return", "eval/episodic_return", "charts/distill_coeff"
OFFLINE, TEACHER, RANDOM = (f"charts/{name}/avg_episodic_return" for name in ("offline", "teacher", "random"))
TAGS = (TRAINING, EVALUATION, LAMBDA, OFFLINE, TEACHER, RANDOM)
EVENT_FILES = "events.out.tfevents*"
FRAMES_PER_STEP = 4
LAST_EPISODES = 10  # training episodes in a mean, as many as the schedule of λ uses
GRID = 201  # points of a curve
LOW_LAMBDA = 0.1


@dataclass
class Args:
    runs: tyro.conf.Positional[list[Path]] = field(default_factory=lambda: [Path("runs")])
    """run directories, or directories that contain some"""
    out: Path = Path("report")
    """output directory of table.md, curves.png and curves.svg"""


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


def scalars_of(event: Any) -> dict[str, float]:
    """Return the scalars of an event by tag, in TensorBoard's old format or its new one."""
    values = event.summary.value
    new = {value.tag: value.tensor.float_val[0] for value in values if value.tensor.float_val}
    return new | {value.tag: value.simple_value for value in values if value.HasField("simple_value")}


@dataclass
class Run:
    """A run of a script (``exp_name``), with steps and values, (N, 2) float64, of each of ``TAGS``."""

    path: Path
    env_id: str
    script: str
    seed: int
    offline_steps: int
    total_steps: int
    last_step: int
    points: dict[str, np.ndarray]

    @property
    def online_steps(self) -> int:
        """Environment steps of the online phase. ``global_step`` counts the offline updates first."""
        return max(self.last_step - self.offline_steps, 0)

    @property
    def final_returns(self) -> tuple[np.ndarray, str]:
        """Returns (episodes,) float64 of the last evaluation, else of the last training episodes; and a description."""
        episodes, returns = self.points[EVALUATION].T
        if len(episodes):
            start = np.max(np.flatnonzero(np.diff(episodes) <= 0) + 1, initial=0)  # an evaluation counts from 0
            return returns[start:], f"evaluation, {len(returns[start:])} episodes"
        returns = self.points[TRAINING][-LAST_EPISODES:, 1]
        return returns, f"last {len(returns)} training episodes" if len(returns) else "no finished episode"

    @property
    def final_return(self) -> float:
        """Mean of the final returns, NaN without a finished episode."""
        return mean(self.final_returns[0])

    @property
    def low_lambda_share(self) -> float:
        """Share of the online steps with λ, as last logged, below ``LOW_LAMBDA``. NaN without distillation."""
        steps, values = self.points[LAMBDA].T
        if not self.online_steps or values.max(initial=0) < LOW_LAMBDA:
            return np.nan
        lengths = np.diff(steps, append=self.last_step)
        return float(lengths[values < LOW_LAMBDA].sum() / self.online_steps)

    def last(self, tag: str) -> float:
        """Return the last value of a tag, NaN if there is none."""
        return mean(self.points[tag][-1:, 1])

    def curve(self, tag: str, frames: np.ndarray) -> np.ndarray:
        """Return the last value of a tag, or the mean of 10 training episodes, at online ``frames``; NaN outside."""
        steps, values = self.points[tag].T
        count = np.searchsorted(FRAMES_PER_STEP * (steps - self.offline_steps), frames, side="right")
        first = np.maximum(count - (LAST_EPISODES if tag == TRAINING else 1), 0)
        sums = np.concatenate([[0], np.cumsum(values)])
        means = (sums[count] - sums[first]) / np.maximum(count - first, 1)
        return np.where((count == 0) | (frames > FRAMES_PER_STEP * self.online_steps), np.nan, means)


def read_run(directory: Path) -> Run | None:
    """Read a run; return None, with a warning, if it is unknown which run it is or it has nothing to report."""
    match = re.fullmatch(r"(?P<env_id>.+?)__(?P<exp_name>.+)__(?P<seed>\d+)__\d+", directory.resolve().name)
    flags = match.groupdict() if match else {}
    points, last_step = {tag: [] for tag in TAGS}, 0
    for event in read_events(directory):
        texts = [value.tensor.string_val for value in event.summary.value if value.tag.startswith("hyperparameters")]
        lines = b"\n".join(line for text in texts for line in text).decode(errors="replace")
        flags |= dict(re.findall(r"^\|(\w+)\|(.*)\|$", lines, re.MULTILINE))
        last_step = max(last_step, event.step)
        for tag, value in scalars_of(event).items():
            if tag in points and math.isfinite(value):
                points[tag].append((event.step, value))
            elif tag in points:
                warn(f"{directory} has NaN or infinity in {tag}", "these points are left out")
    if not any(points.values()):
        return warn(f"{directory} has no returns", "it is left out")
    arrays = {tag: np.array(points[tag], dtype=float).reshape(-1, 2) for tag in TAGS}
    for tag in set(TAGS) - {EVALUATION}:  # the steps of EVALUATION are episodes, and start again with each evaluation
        arrays[tag] = arrays[tag][np.argsort(arrays[tag][:, 0], kind="stable")]
    flags = {"offline_steps": arrays[OFFLINE][:, 0].max(initial=0), "total_timesteps": "0"} | flags
    try:
        env_id, script = flags["env_id"].replace("/", "-"), flags["exp_name"]
        seed, *steps = (int(np.int64(float(flags[flag]))) for flag in ("seed", "offline_steps", "total_timesteps"))
    except (KeyError, ValueError, OverflowError) as error:
        return warn(f"{directory} has no valid hyperparameters or name of a run ({error!r})", "it is left out")
    return Run(directory, env_id, script, seed, *steps, last_step, arrays)


Groups = dict[str, dict[str, list[Run]]]  # by environment and script, in order of seed


def read_groups(paths: Sequence[Path]) -> Groups:
    """Read all runs at and below ``paths``; raise a UserError if one of them has none."""
    directories: dict[Path, Path] = {}
    for path in paths:
        found = sorted({file.parent for file in path.rglob(EVENT_FILES) if file.is_file()})
        if not found:
            raise UserError(f"no event files ({EVENT_FILES}) in {path}; give run directories or one that contains some")
        directories |= {directory.resolve(): directory for directory in found}
    runs: dict[tuple, Run] = {}
    for run in filter(None, map(read_run, directories.values())):
        identity = run.env_id, run.script, run.seed
        if identity in runs:
            warn(f"{runs[identity].path} and {run.path} are the same environment, script and seed", "using the latter")
        runs[identity] = run
    if not runs:
        raise UserError(f"no run to report in {', '.join(map(str, paths))}; give runs that have logged returns")
    groups: Groups = {}
    for (env_id, script, _), run in sorted(runs.items()):
        groups.setdefault(env_id, {}).setdefault(script, []).append(run)
    return groups


def mean_and_std(values: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and sample standard deviation of (seeds, …) over seeds, without NaN; NaN with too few values."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.nanmean(values, axis=0), np.nanstd(values, axis=0, ddof=1)


def mean(values: Sequence[float]) -> float:
    """Compute the mean without NaN; NaN without a value."""
    return float(mean_and_std(values)[0])


def spread(values: Sequence[float]) -> str:
    """Format ``mean ± standard deviation``, just the mean of a single value, empty without a value."""
    middle, deviation = mean_and_std(values)
    return ("" if np.isnan(middle) else f"{middle:,.1f}") + ("" if np.isnan(deviation) else f" ± {deviation:,.1f}")


def table(groups: Groups) -> str:
    """Format the results as a Markdown table with a row per environment and script, without empty columns."""
    header = ["environment", "script", "seeds", "return", "measured by", "after the offline phase", "teacher"]
    rows = [[*header, "random policy", f"λ < {LOW_LAMBDA}"]]
    for env_id, scripts in groups.items():
        for script, runs in scripts.items():
            seeds = [str(len(runs))]
            for run in runs:
                # The last points of a run without an evaluation are logged up to 200 steps before its end.
                if not len(run.points[EVALUATION]) and run.online_steps < run.total_steps - 200:
                    seeds.append(f"seed {run.seed} at {100 * run.online_steps / run.total_steps:.0f} %")
            sources = Counter(run.final_returns[1] for run in runs)
            share = mean([run.low_lambda_share for run in runs])
            rows.append([
                env_id, script, ", ".join(seeds), spread([run.final_return for run in runs]),
                "; ".join(f"{count} × {text}" if len(sources) > 1 else text for text, count in sources.items()),
                *(spread([run.last(tag) for run in runs]) for tag in (OFFLINE, TEACHER, RANDOM)),
                "" if np.isnan(share) else f"{100 * share:.0f} %",
            ])  # fmt: skip
    keep = [i for i, column in enumerate(zip(*rows[1:], strict=True)) if any(column)]
    rows.insert(1, ["---"] * len(rows[0]))
    return "".join(f"| {' | '.join(row[i] for i in keep)} |\n" for row in rows) + (
        "\nReturn: mean ± sample standard deviation over seeds of each seed's mean episodic return. "
        f"λ < {LOW_LAMBDA}: share of the online steps with λ below {LOW_LAMBDA}.\n"
    )


# The colours of Okabe and Ito (2008) suit colour-blind readers. Looks repeat after 60 scripts.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
LOOKS = {"color": COLORS, "linestyle": ("-", "--", "-.", ":"), "marker": "os^Dv"}
LEGEND = f"line: mean over seeds of the last {LAST_EPISODES} training episodes; shaded: ± standard deviation"


def looks_of(groups: Groups) -> dict[str, dict]:
    """Choose colour, line style and marker for each script, the same in all panels."""
    scripts = dict.fromkeys(script for scripts in groups.values() for script in scripts)
    return {s: {name: some[i % len(some)] for name, some in LOOKS.items()} for i, s in enumerate(scripts)}


def draw_environment(figure: Any, env_id: str, scripts: dict[str, list[Run]], looks: dict[str, dict]) -> None:
    """Draw the panel of an environment: episodic returns over online frames, λ below."""
    from matplotlib.ticker import EngFormatter

    runs = [run for runs in scripts.values() for run in runs]
    rows = 1 + any(len(run.points[LAMBDA]) for run in runs)
    axes = figure.subplots(rows, sharex=True, squeeze=False, height_ratios=[4, 1][:rows])[:, 0]
    figure.suptitle(env_id)
    frames = np.linspace(0, FRAMES_PER_STEP * max(1, *(run.online_steps for run in runs)), GRID)
    for script, group in scripts.items():
        for axis, tag in zip(axes, (TRAINING, LAMBDA), strict=False):
            middle, deviation = mean_and_std([run.curve(tag, frames) for run in group])
            axis.plot(frames, middle, **looks[script], markersize=4, markevery=25, linewidth=1.4, label=script)
            color = looks[script]["color"]
            axis.fill_between(frames, middle - deviation, middle + deviation, color=color, alpha=0.18, linewidth=0)
    for tag, label, style in ((TEACHER, "teacher", "--"), (RANDOM, "random policy", ":")):
        if not np.isnan(level := mean([run.last(tag) for run in runs])):
            axes[0].axhline(level, color="black", linestyle=style, linewidth=0.9, label=label)
    for axis in axes:
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].set_ylabel("episodic return")
    if rows == 2:
        axes[1].set(ylabel="λ", ylim=(-0.05, None))
    axes[-1].set(xlabel=f"online frames ({FRAMES_PER_STEP} per step)", xlim=(0, frames[-1]))


def write_report(groups: Groups, out: Path) -> str:
    """Write table.md, curves.png and curves.svg to ``out``, and return the table. The same runs give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table(groups), encoding="utf-8")
    with matplotlib.rc_context({"svg.hashsalt": "report", "font.size": 9, "text.parse_math": False}):
        columns, rows = min(3, len(groups)), -(-len(groups) // 3)
        figure = Figure((max(7, 1.2 + 3.5 * columns), 1.5 + 3 * rows), layout="constrained")
        panels, looks = figure.subfigures(rows, columns, squeeze=False), looks_of(groups)
        for panel, (env_id, scripts) in zip(panels.ravel(), groups.items(), strict=False):
            draw_environment(panel, env_id, scripts, looks)
        entries = {}
        for axis in figure.axes:
            entries |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        look = {"loc": "outside lower center", "ncols": max(2, columns), "frameon": False, "handlelength": 4}
        figure.legend(entries.values(), entries.keys(), title=LEGEND, fontsize=9, title_fontsize=9, **look)
        figure.savefig(out / "curves.png", dpi=130)
        figure.savefig(out / "curves.svg", metadata={"Date": None})
    return table(groups)


def main(args: Args) -> None:
    require_packages("python -m cleanrl_utils.report", "matplotlib", "tensorboard")
    try:
        text = write_report(read_groups(args.runs), args.out)
    except OSError as error:
        raise UserError(f"can't write to {args.out} ({error}); give another directory") from error
    print(f"{text}\nwrote table.md, curves.png and curves.svg to {args.out}", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
