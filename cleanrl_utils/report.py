"""Tables and curves from TensorBoard event files, ours or CleanRL's: ``python -m cleanrl_utils.report runs``"""

import functools
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from cleanrl_utils.checks import UserError, one_line_errors

TRAINING, EVALUATION, LAMBDA = "charts/episodic_return", "eval/episodic_return", "charts/distill_coeff"
OFFLINE, TEACHER, RANDOM = (f"charts/{name}/avg_episodic_return" for name in ("offline", "teacher", "random"))
TAGS = (TRAINING, EVALUATION, LAMBDA, OFFLINE, TEACHER, RANDOM)
EVENT_FILES = "events.out.tfevents*"
FRAMES_PER_STEP = 4
LAST_GAMES = 10  # training games in a mean, as many as λ reads
GRID = 201  # points of a curve
THINNED = 200  # points that --thin keeps of a tag that the report does not need
FADED = 0.1  # λ below it: the student hardly hears the teacher any more
GOOD = 0.9  # of the way from random to teacher: a game that got so far was not lost

# CleanRL's documentation, pages "QDagger" and "DQN": mean ± standard deviation over seeds after 10 million steps.
PUBLISHED_GAMES = ("PongNoFrameskip-v4", "BreakoutNoFrameskip-v4", "BeamRiderNoFrameskip-v4")
PUBLISHED = {
    "qdagger_dqn_atari_impalacnn": ("19.7 ± 0.2", "295.6 ± 12.3", "9,285.0 ± 242.3"),
    "qdagger_dqn_atari_jax_impalacnn": ("18.8 ± 0.2", "335.1 ± 19.1", "8,024.8 ± 579.0"),
    "dqn_atari": ("20.2 ± 0.4", "366.9 ± 39.9", "6,673.2 ± 1,434.4"),
    "dqn_atari_jax": ("20.4 ± 0.3", "377.8 ± 34.9", "5,938.1 ± 955.8"),
}
# Scores of random play and of a human tester, Wang et al. (2016), arXiv 1511.06581, with no-op starts.
RANDOM_AND_HUMAN = {
    "Pong": (-20.7, 14.6), "Breakout": (1.7, 30.5), "BeamRider": (363.9, 16926.5), "Enduro": (0.0, 860.5),
    "Freeway": (0.0, 29.6), "MsPacman": (307.3, 6951.6), "Qbert": (163.9, 13455.0), "Seaquest": (68.4, 42054.7),
    "SpaceInvaders": (148.0, 1668.7),
}  # fmt: skip


@dataclass
class Args:
    runs: tyro.conf.Positional[list[Path]] = field(default_factory=list)
    """directories of runs, or folders that hold some"""
    out: Path = Path("report")
    """folder for table.md, curves.png, curves.svg, overall.png and overall.svg"""
    watch: bool = False
    """make them again and again while runs are going on; Ctrl-C ends it"""
    every: float = 60
    """seconds between two reports with --watch"""
    thin: Path | None = None
    """make no report, but a copy of the runs' events in this folder, about 100 kB a run, with the same report"""


# ==================== reading ====================


@functools.cache
def warn(what: str, consequence: str) -> None:
    """A line on stderr, the first time that ``what`` is so."""
    print(f"warning: {what}; {consequence}", file=sys.stderr, flush=True)


def read_events(directory: Path) -> Iterator[tuple[bytes, Any]]:
    """A run's events as they lie in its files (a resumed run has several) and decoded, in the order of writing.

    Of a damaged file the part before the damage is read, with a warning.

    Raises:
        UserError: a file can't be opened.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for path in sorted(directory.glob(EVENT_FILES)):
        done = 0
        try:
            for record in RawEventFileLoader(str(path)).Load():
                done += len(record) + 16  # its length and two checksums
                yield record, Event.FromString(record)
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path} can't be read ({error.strerror or error}); make it readable") from error
        if done < size:
            warn(f"{path} is damaged or still being written", f"the first {done:,} of its {size:,} bytes are used")


def scalars_of(event: Any) -> dict[str, float]:
    """Scalars of an event by tag, in TensorBoard's old encoding or its new one."""
    values = event.summary.value
    new = {value.tag: value.tensor.float_val[0] for value in values if value.tensor.float_val}
    return new | {value.tag: value.simple_value for value in values if value.HasField("simple_value")}


def text_of(event: Any, tag: str) -> str:
    """The text that an event logs under a tag, empty where it is another."""
    values = (value for value in event.summary.value if value.tag.startswith(tag))
    return "\n".join(line.decode() for value in values for line in value.tensor.string_val)


@dataclass
class Run:
    """A game, a script (its ``exp_name``), a seed; and of each of ``TAGS`` steps and values, float64 (N, 2)."""

    path: Path
    env_id: str
    script: str
    seed: int
    offline_steps: int
    total_steps: int
    last_step: int
    points: dict[str, np.ndarray]
    warned: bool = False
    """whether it was warned of as collapsed"""

    @property
    def online_steps(self) -> int:
        """Environment steps of the online phase. ``global_step`` counts the offline updates first."""
        return max(self.last_step - self.offline_steps, 0)

    @property
    def unfinished(self) -> bool:
        """Whether it has yet to be evaluated, and is further from its end than the last thing logged would be."""
        return not len(self.points[EVALUATION]) and self.online_steps < self.total_steps - 200

    @property
    def final_games(self) -> tuple[np.ndarray, str]:
        """Returns, float64 (games,), of the last evaluation, else of the last training games; and which they are."""
        games, returns = self.points[EVALUATION].T
        if len(games):
            start = np.max(np.flatnonzero(np.diff(games) <= 0) + 1, initial=0)  # each evaluation counts its games anew
            return returns[start:], f"evaluation, {len(returns[start:])} games"
        returns = self.points[TRAINING][-LAST_GAMES:, 1]
        return returns, f"last {len(returns)} training games" if len(returns) else "no game is over"

    @property
    def score(self) -> float:
        """Mean of the final games; NaN where no game is over."""
        return mean(self.final_games[0])

    @property
    def untaught(self) -> float:
        """Share of the online steps in which λ, as last logged, was below ``FADED``; NaN without teaching."""
        steps, values = self.points[LAMBDA].T
        if not self.online_steps or values.max(initial=0) < FADED:
            return np.nan
        lengths = np.diff(steps, append=self.last_step)
        return float(lengths[values < FADED].sum() / self.online_steps)

    def last(self, tag: str) -> float:
        """The last value of a tag; NaN where there is none."""
        return mean(self.points[tag][-1:, 1])

    def curve(self, tag: str, frames: np.ndarray) -> np.ndarray:
        """A tag's last value at each of so many online frames, of training games the mean of the last ten.

        Returns:
            float64 (len(frames),), NaN before the first point and beyond the end of the run.
        """
        steps, values = self.points[tag].T
        count = np.searchsorted(FRAMES_PER_STEP * (steps - self.offline_steps), frames, side="right")
        first = np.maximum(count - (LAST_GAMES if tag == TRAINING else 1), 0)
        sums = np.concatenate([[0], np.cumsum(values)])
        means = (sums[count] - sums[first]) / np.maximum(count - first, 1)
        return np.where((count == 0) | (frames > FRAMES_PER_STEP * self.online_steps), np.nan, means)


def read_run(directory: Path) -> Run | None:
    """Reads a run. Its hyperparameters say what was run, else its name; None, with a warning, where neither does."""
    named = re.fullmatch(r"(?P<env_id>.+?)__(?P<exp_name>.+)__(?P<seed>\d+)__\d+", directory.resolve().name)
    flags = named.groupdict() if named else {}
    points, last_step, warned = defaultdict(list), 0, False
    for _, event in read_events(directory):
        flags |= dict(re.findall(r"^\|(\w+)\|(.*)\|$", text_of(event, "hyperparameters"), re.MULTILINE))
        warned = warned or bool(text_of(event, "warning"))
        last_step = max(last_step, event.step)
        for tag, value in scalars_of(event).items():
            points[tag].append((event.step, value))
    if not points:
        return warn(f"no scalars in {directory}", "it is left out")
    if missing := {"env_id", "exp_name", "seed"} - flags.keys():
        what = (
            f"{directory} is not named {{env_id}}__{{exp_name}}__{{seed}}__{{unix time}}, nor do hyperparameters in it"
        )
        return warn(f"{what} say its {' and '.join(sorted(missing))}", "it is left out")
    offline_steps = flags.get("offline_steps", max((step for step, _ in points[OFFLINE]), default=0))
    steps = int(offline_steps), int(flags.get("total_timesteps", 0)), last_step
    arrays = {tag: np.array(points[tag], dtype=float).reshape(-1, 2) for tag in TAGS}
    return Run(
        directory, flags["env_id"].replace("/", "-"), flags["exp_name"], int(flags["seed"]), *steps, arrays, warned
    )


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Directories with event files: those given and those in folders given; UserError where there are none."""
    if not paths:
        raise UserError("no run was given; give directories of runs or a folder that holds some, such as runs")
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is no directory; give directories of runs or a folder that holds some")
        directories = sorted({file.parent for file in path.rglob(EVENT_FILES)})
        if not directories:
            raise UserError(f"no event files ({EVENT_FILES}) in {path}; give directories of runs that have some")
        for directory in directories:
            found.setdefault(directory.resolve(), directory)
    return list(found.values())


Groups = dict[str, dict[str, list[Run]]]
"""Runs by game, script and seed, each in alphabetical order."""


def read_groups(paths: Sequence[Path], cache: dict) -> Groups:
    """Reads all runs, but not again what ``cache`` remembers from the last call; UserError where there are none."""
    runs: dict[tuple, Run] = {}
    for directory in find_runs(paths):
        key = directory, *((file.name, file.stat().st_size) for file in sorted(directory.glob(EVENT_FILES)))
        if key not in cache:
            cache[key] = read_run(directory)
        if (run := cache[key]) is None:
            continue
        identity = run.env_id, run.script, run.seed
        if identity in runs:
            warn(f"{runs[identity].path} and {run.path} are the same game, script and seed", "the latter is used")
        runs[identity] = run
    if not runs:
        raise UserError(f"no run with scalars in {', '.join(map(str, paths))}; give directories of runs that have some")
    groups: Groups = {}
    for run in sorted(runs.values(), key=lambda run: (run.env_id, run.script, run.seed)):
        groups.setdefault(run.env_id, {}).setdefault(run.script, []).append(run)
    return groups


def scripts_of(groups: Groups) -> list[str]:
    """All scripts, in the order in which the games have them."""
    return list(dict.fromkeys(script for scripts in groups.values() for script in scripts))


# ==================== statistics ====================


def mean(values: Sequence[float]) -> float:
    """Mean of what is not NaN; NaN where nothing is."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else np.nan


def mean_and_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over seeds and the ends of its 95 % interval by Student's t, of the seeds that are not NaN.

    Args:
        values: float64 (seeds, …).

    Returns:
        Three arrays (…): the mean, NaN where there is no seed; its ends, NaN where there are fewer than two.
    """
    from scipy.stats import t

    count = np.sum(~np.isnan(values), axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        middle = np.nansum(values, axis=0) / count
        variance = np.nansum((values - middle) ** 2, axis=0) / (count - 1)
        half = t.ppf(0.975, count - 1) * np.sqrt(variance / count)
    return middle, middle - half, middle + half


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean of the middle half of all runs, Agarwal et al. (2021), arXiv 2108.13264."""
    from scipy.stats import trim_mean

    return trim_mean(values, 0.25, axis=axis)


def stratified(games: Sequence[np.ndarray], statistic: Callable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A statistic of all runs of all games, with its 95 % interval by stratified bootstrap, Agarwal et al. (2021).

    Seeds are drawn with replacement within each game, which is what SciPy's bootstrap does with several unpaired
    samples; the ends are percentiles of 2,000 draws.

    Args:
        games: for each game float64 (…, seeds).
        statistic: takes (…, runs) and ``axis``.

    Returns:
        Three arrays (…): the statistic, and its ends, NaN where a game has a single seed.
    """
    from scipy.stats import bootstrap

    def of_all(*games: np.ndarray, axis: int = -1) -> np.ndarray:
        return statistic(np.concatenate(games, axis=axis), axis=axis)

    point = of_all(*games)
    if min(game.shape[-1] for game in games) < 2:
        return point, np.full_like(point, np.nan), np.full_like(point, np.nan)
    options = {"n_resamples": 2000, "axis": -1, "vectorized": True, "method": "percentile"}
    return point, *bootstrap(games, of_all, rng=np.random.default_rng(0), **options).confidence_interval


def scale(env_id: str, scripts: dict[str, list[Run]], top: str) -> tuple[float, float] | None:
    """Scores that count 0 (random) and 1 (``top``, "teacher" or "human") in a game; None where they aren't known.

    Teacher and random are means over all of the game's runs. Random is Wang et al.'s where no run has measured it, as
    CleanRL's don't, and for the human scale.
    """
    random, human = RANDOM_AND_HUMAN.get(re.sub(r"^ALE-|NoFrameskip|-v\d+$", "", env_id), (np.nan, np.nan))
    if top == "teacher":
        runs = [run for runs in scripts.values() for run in runs]
        measured, teacher = (mean([run.last(tag) for run in runs]) for tag in (RANDOM, TEACHER))
        random, human = random if np.isnan(measured) else measured, teacher
    return (random, human) if human > random else None


def normalised(groups: Groups, script: str, top: str, value_of: Callable = lambda run: run.score) -> list[np.ndarray]:
    """What ``value_of`` says of a script's runs, 0 at random and 1 at ``top``: for each game (…, seeds).

    Games without a scale, and runs in which no game is over, are left out.
    """
    games = []
    for env_id, scripts in groups.items():
        runs = [run for run in scripts.get(script, []) if not np.isnan(run.score)]
        if runs and (ends := scale(env_id, scripts, top)):
            values = np.stack([value_of(run) for run in runs], axis=-1)
            games.append((values - ends[0]) / (ends[1] - ends[0]))
    return games


# ==================== tables ====================


def spread(values: Sequence[float]) -> str:
    """``mean ± standard deviation`` of what is not NaN, without ± of a single value, nothing of none."""
    known = [value for value in values if not np.isnan(value)]
    deviation = f" ± {np.std(known, ddof=1):,.1f}" if len(known) > 1 else ""
    return f"{np.mean(known):,.1f}{deviation}" if known else ""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, less the columns in which nothing stands."""
    keep = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
    return "".join(f"| {' | '.join(line[i] for i in keep)} |\n" for line in (header, ["---"] * len(header), *rows))


def table(groups: Groups) -> str:
    """The report in Markdown: game × script, then over games, each with what its columns mean."""
    rows = []
    for env_id, scripts in groups.items():
        ends = scale(env_id, scripts, "teacher")
        for script, runs in scripts.items():
            seeds = [str(len(runs))]
            for run in runs:
                if run.unfinished:
                    seeds.append(f"seed {run.seed} at {100 * run.online_steps / run.total_steps:.0f} %")
                if run.warned:
                    seeds.append(f"seed {run.seed} warned")
            how = Counter(run.final_games[1] for run in runs)
            games = np.concatenate([run.final_games[0] for run in runs])
            untaught = mean([run.untaught for run in runs])
            rows.append([
                env_id, script, ", ".join(seeds), spread([run.score for run in runs]),
                f"{np.median(games):,.1f}" if len(games) else "",
                f"{100 * np.mean(games >= ends[0] + GOOD * (ends[1] - ends[0])):.0f} %" if ends and len(games) else "",
                "" if np.isnan(untaught) else f"{100 * untaught:.0f} %",
                "; ".join(f"{count} × {text}" if len(how) > 1 else text for text, count in how.items()),
                *(spread([run.last(tag) for run in runs]) for tag in (OFFLINE, TEACHER, RANDOM)),
                dict(zip(PUBLISHED_GAMES, PUBLISHED.get(script, ()), strict=False)).get(env_id, ""),
            ])  # fmt: skip
    header = ["game", "script", "seeds", "return", "median game", "good games", f"λ < {FADED}", "measured by"]
    text = markdown([*header, "after the offline phase", "teacher", "random", "published"], rows) + (
        "\nWarned: of Q-values that hardly varied, as a collapsed network's do; the run's texts say when. "
        "Return: mean ± sample standard deviation over seeds of each seed's mean; the median is that of all their "
        f"games; good games: the share of them that came {100 * GOOD:.0f} % of the way from random to the teacher. "
        f"λ < {FADED}: the share of the online steps in which it was so small, the teaching all but over. "
        "Published: CleanRL's documentation, after 10 million online steps.\n"
    )
    rows = []
    for script in scripts_of(groups):
        row = [script]
        for top in ("teacher", "human"):
            cells = ["", ""]
            if games := normalised(groups, script, top):
                point, low, high = stratified(games, interquartile_mean)
                cells = [str(len(games)), f"{point:.2f}" + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")]
            row += cells
        rows += [row] if any(row[1:]) else []
    if rows:
        text += "\n" + markdown(["script", "games", "IQM, teacher = 1", "games", "IQM, human = 1"], rows) + (
            "\nIQM: interquartile mean of the normalised returns of all runs of all games, random = 0; in brackets, "
            "where each game has two seeds or more, its 95 % interval by stratified bootstrap over seeds (Agarwal et "
            "al., 2021). Random and teacher as the game's runs measured them; human (and random, where no run did): "
            "Wang et al. (2016).\n"
        )  # fmt: skip
    return text


# ==================== figures ====================

# Okabe and Ito's colours, which the colour-blind tell apart; lines and markers tell the scripts apart in grey.
LOOKS = {
    "color": ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"),
    "linestyle": ("-", "--", "-.", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (9, 3))),
    "marker": ("o", "s", "^", "D", "v", "P"),
}
TEACHER_LINE = {"color": "black", "linestyle": (0, (4, 2)), "linewidth": 0.9}
RANDOM_LINE = {"color": "black", "linestyle": (0, (1, 3)), "linewidth": 0.9}


def looks_of(groups: Groups) -> dict[str, dict]:
    """For each script the colour, line and marker that it has in every panel; used up, they come in other pairs."""
    looks, number = {}, len(LOOKS["color"])
    for i, script in enumerate(scripts_of(groups)):
        places = {"color": i, "linestyle": i + i // number, "marker": i + i // number}
        looks[script] = {name: LOOKS[name][place % number] for name, place in places.items()}
    return looks


def draw(axes, x: np.ndarray, middle: np.ndarray, low: np.ndarray, high: np.ndarray, look: dict, label: str) -> None:
    """A line with its interval, and a few markers, at other places for each script."""
    markers = {"markersize": 4, "markevery": (LOOKS["marker"].index(look["marker"]) / 50, 0.14)}
    axes.plot(x, middle, **look, **markers, label=label, linewidth=1.4)
    axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)


def unit(largest: float) -> tuple[float, str]:
    """What to divide the numbers of an axis by, and the word for it."""
    return (1e6, "million ") if largest >= 2e6 else (1e3, "thousand ") if largest >= 2e3 else (1, "")


def draw_game(figure, env_id: str, scripts: dict[str, list[Run]], looks: dict[str, dict]) -> None:
    """A game's panel: evaluations over offline updates on grey, returns over online frames, λ below."""
    runs = [run for runs in scripts.values() for run in runs]
    offline, strip = (any(len(run.points[tag]) for run in runs) for tag in (OFFLINE, LAMBDA))
    axes = figure.subplots(
        1 + strip, 1 + offline, sharex="col", sharey="row", squeeze=False,
        height_ratios=[4, 1][: 1 + strip], width_ratios=[1, 4][1 - offline :],
    )  # fmt: skip
    figure.suptitle(env_id, fontsize=9)
    frames = np.linspace(0, FRAMES_PER_STEP * max(1, *(run.online_steps for run in runs)), GRID)
    updates = max(1, *(run.offline_steps for run in runs))
    (per_frame, frames_word), (per_update, updates_word) = unit(frames[-1]), unit(updates)
    levels = mean([run.last(TEACHER) for run in runs]), mean([run.last(RANDOM) for run in runs])
    shown = [*levels]
    for i, (script, group) in enumerate(scripts.items()):
        for tag, axis in zip((TRAINING, LAMBDA), axes[:, -1], strict=False):
            curves = np.stack([run.curve(tag, frames) for run in group])
            if not np.isnan(curves).all():
                draw(axis, frames / per_frame, *mean_and_interval(curves), looks[script], script)
            shown.extend(curves.ravel() if tag == TRAINING else [])
        steps, values = np.concatenate([run.points[OFFLINE] for run in group]).T
        if len(values):
            beside = 0.04 * updates * (i - (len(scripts) - 1) / 2)  # scripts evaluate after the same updates
            look = looks[script] | {"linestyle": "none", "markersize": 3.5, "alpha": 0.8}
            axes[0, 0].plot((steps + beside) / per_update, values, **look)
            shown.extend(values)
    # The interval of two seeds can be wider than the game's whole range: lines and points decide what is shown.
    if known := [value for value in shown if not np.isnan(value)]:
        margin = 0.05 * (max(known) - min(known)) or 1.0
        axes[0, 0].set_ylim(min(known) - margin, max(known) + margin)
    for axis in axes[0]:
        axis.axhline(levels[0], **TEACHER_LINE, label="" if np.isnan(levels[0]) else "teacher")
        axis.axhline(levels[1], **RANDOM_LINE, label="" if np.isnan(levels[1]) else "random")
    axes[0, 0].set_ylabel("return")
    if strip:
        largest = max(run.points[LAMBDA][:, 1].max(initial=1) for run in runs)
        axes[1, 0].set(ylabel="λ", ylim=(-0.05 * largest, 1.05 * largest))
    axes[-1, -1].set(xlabel=f"online: {frames_word}frames (4 a step)", xlim=(0, frames[-1] / per_frame))
    if offline:
        end = updates / per_update
        axes[-1, 0].set(xlabel=f"offline:\n{updates_word}updates", xlim=(-0.2 * end, 1.2 * end))
        axes[-1, 0].set_xticks([0, end], ["0", f"{end:g}"])
        for axis in axes[:, 0]:
            axis.set_facecolor("0.92")
    for axis in axes.ravel():
        axis.grid(alpha=0.3, linewidth=0.5)


def add_legend(figure, columns: int, title: str) -> None:
    """One legend for all panels, below them, that says each thing once."""
    entries = {}
    for axis in figure.axes:
        entries |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    look = {"fontsize": 8, "title_fontsize": 8, "frameon": False, "handlelength": 4}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, title=title, **look)


def draw_curves(figure, groups: Groups) -> None:
    """A panel for each game, three in a row."""
    columns, rows = min(3, len(groups)), -(-len(groups) // 3)
    figure.set_size_inches(1.2 + 3.5 * columns, 1.2 + 3 * rows)
    panels, looks = figure.subfigures(rows, columns, squeeze=False), looks_of(groups)
    for panel, (env_id, scripts) in zip(panels.ravel(), groups.items(), strict=False):
        draw_game(panel, env_id, scripts, looks)
    says = [f"line: mean over seeds of the last {LAST_GAMES} training games", "shaded: its 95 % interval, Student's t"]
    says += ["point: a seed's evaluation, by offline updates (no frames)"]
    add_legend(figure, max(2, columns), ("; " if columns > 1 else "\n").join(says))


def draw_overall(figure, groups: Groups) -> None:
    """Over games: interquartile means, performance profiles, sample efficiency; random = 0, teacher = 1."""
    figure.set_size_inches(11.7, 3.8)
    means, profiles, efficiency = figure.subplots(1, 3, width_ratios=[1, 1.3, 1.3])
    looks = looks_of(groups)
    scores = {script: games for script in looks if (games := normalised(groups, script, "teacher"))}
    everything = np.concatenate([game for games in scores.values() for game in games])
    longest = max(run.online_steps for scripts in groups.values() for runs in scripts.values() for run in runs)
    per_frame, word = unit(FRAMES_PER_STEP * longest)
    thresholds = np.linspace(min(0, everything.min()), max(1.2, 1.05 * everything.max()), GRID)
    for row, (script, games) in enumerate(scores.items()):
        look, label = looks[script], f"{script} ({len(games)} game{'s' if len(games) > 1 else ''})"
        point, low, high = stratified(games, interquartile_mean)
        means.plot([low, high], [row, row], color=look["color"], linewidth=6, alpha=0.4, solid_capstyle="butt")
        means.plot(point, row, color=look["color"], marker=look["marker"])
        above = [(game > thresholds[:, None]).astype(float) for game in games]
        draw(profiles, thresholds, *stratified(above, np.mean), look, label)
        # Sample efficiency: from where each run has a game behind it to where the first one ends.
        runs = [run for scripts in groups.values() for run in scripts.get(script, []) if not np.isnan(run.score)]
        starts = [
            run.points[TRAINING][0, 0] - run.offline_steps if len(run.points[TRAINING]) else np.inf for run in runs
        ]
        start, end = max(starts), min(run.online_steps for run in runs)
        if start < end:
            frames = FRAMES_PER_STEP * np.linspace(start, end, GRID)
            curves = normalised(groups, script, "teacher", lambda run, frames=frames: run.curve(TRAINING, frames))
            draw(efficiency, frames / per_frame, *stratified(curves, interquartile_mean), look, label)
    means.set_yticks(range(len(scores)), list(scores), fontsize=7)
    means.set(ylim=(len(scores) - 0.5, -0.5), xlabel="interquartile mean (IQM) of final returns")
    means.axvline(1, **TEACHER_LINE)
    profiles.set(xlabel="normalised return τ", ylabel="fraction of runs above τ", ylim=(-0.03, 1.03))
    efficiency.set(xlabel=f"online: {word}frames (4 a step)", ylabel=f"IQM of means of {LAST_GAMES} games")
    efficiency.axhline(1, **TEACHER_LINE)
    for axis in (means, profiles, efficiency):
        axis.grid(alpha=0.3, linewidth=0.5)
    add_legend(figure, 3, "random = 0, teacher = 1; shaded: 95 % intervals, stratified bootstrap over seeds")


def save_figures(groups: Groups, out: Path) -> None:
    """Writes ``curves`` and, if a teacher is known, ``overall``, as PNG and SVG; the same runs make the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawings = {"curves": draw_curves}
    if any(normalised(groups, script, "teacher") for script in scripts_of(groups)):
        drawings["overall"] = draw_overall
    for name, draw_it in drawings.items():
        with plt.rc_context({"svg.hashsalt": "report", "font.size": 8}):
            figure = plt.figure(layout="constrained")
            draw_it(figure, groups)
            figure.savefig(out / f"{name}.png", dpi=130)
            figure.savefig(out / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


# ==================== commands ====================


def thin(directory: Path, folder: Path) -> Path:
    """Copies what a report needs of a run's events, and a few of the others, to one file in ``folder``/run's name.

    All returns and texts stay, each change of λ, and 200 points of any other tag; events stay as they were written.

    Returns:
        The file.

    Raises:
        UserError: the run itself would be written to.
    """
    from tensorboardX.record_writer import RecordWriter

    target = folder / directory.resolve().name
    if target.resolve() == directory.resolve():
        raise UserError(f"--thin {folder} would write into the run {directory}; give another folder")
    events = list(read_events(directory))
    keep = {i for i, (_, event) in enumerate(events) if not scalars_of(event)}
    points = defaultdict(list)
    for i, (_, event) in enumerate(events):
        for tag, value in scalars_of(event).items():
            points[tag].append((i, value))
    for tag, tagged in points.items():
        indices, values = zip(*tagged, strict=True)
        chosen = np.linspace(0, len(indices) - 1, min(len(indices), THINNED)).round().astype(int)
        if tag.endswith("episodic_return"):
            chosen = range(len(indices))
        elif tag == LAMBDA:
            changes = np.flatnonzero(np.diff(values))
            chosen = {0, *changes, *(changes + 1), len(indices) - 1}
        keep.update(indices[i] for i in chosen)
    target.mkdir(parents=True, exist_ok=True)
    started = int(events[0][1].wall_time) if events else 0
    path = target / f"events.out.tfevents.{started:010d}.thinned"
    writer = RecordWriter(str(path))
    for i in sorted(keep):
        writer.write(events[i][0])
    writer.close()
    return path


def report(groups: Groups, out: Path) -> str:
    """Writes table.md and the figures to ``out``, and returns the table; UserError if it can't be written to."""
    text = table(groups)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "table.md").write_text(text, encoding="utf-8")
        save_figures(groups, out)
    except OSError as error:
        raise UserError(
            f"{out} can't be written to ({error.strerror or error}); give another folder as --out"
        ) from error
    return text


def main(args: Args) -> None:
    try:
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise UserError(f"a report needs matplotlib, scipy and tensorboard ({error}): pip install '.[plot]'") from error
    if args.thin:
        for directory in find_runs(args.runs):
            try:
                path = thin(directory, args.thin)
            except OSError as error:
                raise UserError(f"--thin {args.thin} can't be written to ({error.strerror}); give a folder") from error
            print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
        return
    if args.every <= 0:
        raise UserError(f"--every is {args.every}; it must be above 0")
    cache: dict = {}
    print(report(read_groups(args.runs, cache), args.out), flush=True)
    print(f"written to {args.out}, with the figures", flush=True)
    while args.watch:
        time.sleep(args.every)
        try:
            print(f"{time.strftime('%H:%M:%S')}\n\n{report(read_groups(args.runs, cache), args.out)}", flush=True)
        except (UserError, OSError) as error:  # a resumed run cuts its files back, and may take one away
            print(f"no report: {error}; looking again in {args.every:g} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with one_line_errors():
        try:
            main(tyro.cli(Args))
        except KeyboardInterrupt:
            sys.exit(130)
