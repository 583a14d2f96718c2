"""Tests of cleanrl_utils/report.py on runs with known values, written by the libraries that users have."""

import contextlib
import csv
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from benchmark import publish
from cleanrl_utils import report
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.report import EVALUATION, LAMBDA, OFFLINE, ONLINE, RANDOM, TEACHER, TRAINING, draw_run, read_runs
from cleanrl_utils.tracking import Writer

PONG = "PongNoFrameskip-v4"
Points = dict[str, list[tuple[int, float]]]


def write_events(directory: Path, points: Points, flags: dict | None = None, first_step: int | None = None) -> Path:
    """Write scalars and flags to a new event file, of a run that starts at ``first_step``; return the directory."""
    with contextlib.closing(Writer(directory)) as writer:
        if first_step is not None:
            writer.purge(first_step)
        if flags is not None:
            writer.add_flags(flags)
        for tag, values in points.items():
            for step, value in values:
                writer.add_scalar(tag, value, step)
    return directory


def write_run(root: Path, seed: int, points: Points, env_id: str = PONG, script: str = "qdagger", **flags) -> Path:
    """Write a run of 1,000 offline updates and 20,000 online steps, unless ``flags`` say otherwise."""
    flags = {"offline_steps": 1000, "total_timesteps": 20000} | flags
    flags |= {"env_id": env_id, "exp_name": script, "seed": seed}
    return write_events(root / f"{env_id}__{script}__{seed}__{1700000000 + seed}", points, flags, 0)


def random_points(rng: np.random.Generator, level: float, last: int = 21000) -> Points:
    """Make the points of a run that logs up to the step ``last``, with 20 evaluation episodes if it is finished."""
    steps = np.sort(rng.choice(np.arange(1200, last, 8), 40, replace=False))
    points: Points = {TEACHER: [(0, 19.5)], RANDOM: [(0, -20.5)], OFFLINE: [(500, level - 8), (1000, level - 4)]}
    points[TRAINING] = [(int(step), float(np.round(level + rng.normal(0, 3)))) for step in steps]
    points[LAMBDA] = [(i, (level > 0) / (1 + 4 * (int((steps <= i).sum()) // 10))) for i in range(1000, last, 96)]
    points["losses/loss"] = [(last, 0.0)]
    if last == 21000:
        points[EVALUATION] = [(i, float(np.round(level + rng.normal(0, 3)))) for i in range(20)]
    return points


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str, int], Points]]:
    """Two games, two scripts and three seeds, the last of Pong unfinished, with the points written."""
    root = tmp_path_factory.mktemp("runs")
    written = {}
    for key in itertools.product(("Breakout", "Pong"), ("qdagger", "scratch"), (1, 2, 3)):
        level = {"qdagger": 17, "scratch": -12}[key[1]] + key[2]
        last = 11000 if key[::2] == ("Pong", 3) else 21000
        written[key] = random_points(np.random.default_rng(len(written)), level, last)
        write_run(root, key[2], written[key], f"{key[0]}NoFrameskip-v4", key[1])
    return root, written


def test_runs_of_other_scripts_are_read(tmp_path: Path) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    flags = {"exp_name": "a__b", "env_id": "ALE/Pong-v5", "seed": 3, "offline_steps": 1000}
    flags |= {"versions": "gymnasium 1.4.0", "commit": "abc1234, files changed"}
    writer.add_text("hyperparameters", "|param|value|\n|-|-|\n" + "\n".join(f"|{x}|{y}|" for x, y in flags.items()))
    for tag, value, step in ((TEACHER, 19.5, 0), (OFFLINE, 12.25, 1000), (TRAINING, 3, 1500), (TRAINING, -4.5, 1800)):
        writer.add_scalar(tag, value, step)
    writer.close()
    (run,) = read_runs([tmp_path])
    assert (run.key, run.command) == ("ALE-Pong-v5/a__b/3", "")
    assert (run.versions, run.commit) == ("gymnasium 1.4.0", "abc1234, files changed")
    assert (run.offline_updates, run.online_steps) == (1000, 800)
    assert (run.teacher_return, run.offline_return, run.final_return) == (19.5, 12.25, -0.75)


@pytest.mark.parametrize("resumed_in", [1600000000, 1800000000])
def test_all_files_of_a_resumed_run_are_read(tmp_path: Path, resumed_in: int) -> None:
    """In the order of their first steps, also if the clock was behind when it was resumed."""
    run = write_run(tmp_path, 1, {TRAINING: [(1500, 1.0), (1600, 6.0), (2600, 9.0)]}, total_timesteps=1500)
    (first,) = run.iterdir()
    first.rename(run / "events.out.tfevents.1700000000.host")
    write_events(run, {TRAINING: [(2500, 2.0)], EVALUATION: [(0, 5.0), (1, 7.0)]}, first_step=2001)
    (second,) = set(run.iterdir()) - {run / "events.out.tfevents.1700000000.host"}
    second.rename(run / f"events.out.tfevents.{resumed_in}.host")
    (result,) = read_runs([run])
    assert (*result.curves[0, [100, 200]], result.final_return, result.final_standard_error) == (3.5, 3, 6, 1)


@pytest.mark.parametrize(
    ("first", "second", "used"),
    [((True, 900), (False, 20000), 1), ((False, 9000), (False, 2000), 1), ((False, 2000), (False, 2000), 2)],
)
def test_the_finished_the_longer_and_the_newer_run_of_a_seed_count(
    tmp_path: Path, capsys, first: tuple, second: tuple, used: int
) -> None:
    """In this order, since the time in the name of a directory is that of any clock."""
    paths = []
    for number, root, (finished, steps) in ((1, "b", first), (2, "a", second)):
        path = write_run(tmp_path / root, 12, {EVALUATION: [(0, number)], TRAINING: [(1000 + steps, 0.0)]})
        if finished:
            (path / "finished").touch()
        paths.append(path.rename(path.with_name(f"{path.name}{number}")))
    (run,) = read_runs([tmp_path])
    assert run.final_return == used
    found = f"{paths[used - 1]} has the same game, exp_name and seed, and is finished, longer or newer"
    assert capsys.readouterr().err == f"WARNING: {paths[2 - used]} is left out; {found}\n"


def test_an_unfinished_run_has_the_results_of_its_newest_evaluation(tmp_path: Path) -> None:
    """Its evaluations during the online phase are in the file of results and in the figure, as those of a whole run."""
    points: Points = {OFFLINE: [(500, 3.0), (1000, 4.0)], ONLINE: [(6000, 5.5), (11000, 6.25)]}
    points[TRAINING] = [(1500, 1.0), (10500, 2.0), (12000, 9.0)]
    run_dir = write_run(tmp_path, 1, points, eval_episodes=7)
    (run,) = read_runs([tmp_path])
    assert (run.final_return, run.final_episodes, run.measured_by) == (6.25, 7, "evaluation")
    assert np.isnan(run.final_standard_error)
    assert (run.online_steps, run.curves[0, -1]) == (10000, 1.5)
    assert run.evaluations == {0: 4.0, 5000: 5.5, 10000: 6.25}
    write_events(run_dir, {EVALUATION: [(0, 7.0), (1, 9.0)], "losses/loss": [(21000, 0.0)]})
    (run,) = read_runs([tmp_path])
    assert (run.final_return, run.online_steps, run.final_episodes) == (8, 20000, 2)
    assert run.evaluations == {0: 4.0, 5000: 5.5, 10000: 6.25, 20000: 8.0}
    lines = figure_of(lambda: draw_run(run_dir)).axes[0].get_lines()
    assert dict(line.get_xydata()[0] for line in lines if len(line.get_xydata()) == 1) == run.evaluations


@pytest.mark.posix  # Windows allows links only to administrators
def test_a_run_in_its_offline_phase(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It has the updates so far. Its directory may be a link to another disk. W&B's links to its files are no runs."""
    run_dir = write_run(tmp_path / "disk", 1, {"charts/offline/loss": [(700, 1.0)], OFFLINE: [(500, 3.0)]})
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / run_dir.name).symlink_to(run_dir, target_is_directory=True)
    (tmp_path / "runs" / "latest").symlink_to(run_dir, target_is_directory=True)
    (tmp_path / "runs" / "wandb").mkdir()
    (tmp_path / "runs" / "wandb" / "events.out.tfevents.1").symlink_to(next(run_dir.iterdir()))
    (run,) = read_runs([tmp_path / "runs"])
    assert not capsys.readouterr().err, "the run counts twice"
    assert (run.offline_updates, run.online_steps, run.offline_return) == (700, 0, 3.0)


def test_runs_of_one_name_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Not those of another game or name, nor flags as the seed; a flag that only some runs have differs too."""
    points: Points = {EVALUATION: [(0, 1.0)]}
    for seed, teacher in ((1, "good"), (2, "good"), (3, "bad")):
        flags = {"n_step": 3} if seed == 2 else {}
        write_run(tmp_path, seed, points, track=seed == 1, teacher_policy_hf_repo=teacher, **flags)
    write_run(tmp_path, 4, points, env_id="BreakoutNoFrameskip-v4", learning_rate=1)
    write_run(tmp_path, 5, points, script="other", learning_rate=2)
    read_runs([tmp_path])
    found = "the runs of qdagger in Pong differ in n_step, teacher_policy_hf_repo"
    assert capsys.readouterr().err == f"WARNING: {found}; give each variant its own --exp-name\n"


def test_runs_that_lack_something(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One without flags is left out; a seed without a return is not counted.

    Steps are those that the run has, also if it was resumed with another end than that of its flags.
    """
    write_run(tmp_path, 1, {EVALUATION: [(21000, 2.0), (21001, 4.0)], TRAINING: [(20000, 1.0)]})
    write_run(tmp_path, 2, {"losses/loss": [(1200, 1.0)]})
    write_run(tmp_path, 3, {EVALUATION: [(26000, 3.0)], TRAINING: [(25000, 1.0)]})
    incomplete = [None, {"env_id": PONG, "exp_name": "qdagger"}]
    left_out = [write_events(tmp_path / f"{i}", {TRAINING: [(500, 1.0)]}, flags) for i, flags in enumerate(incomplete)]
    runs = read_runs([tmp_path])
    for warning, path in zip(capsys.readouterr().err.splitlines(), left_out, strict=True):
        assert warning.startswith(f"WARNING: {path} has no curves or no hyperparameters; ")
    assert [run.online_steps for run in runs] == [20000, 200, 25000]
    line = report.table_of_games(runs).splitlines()[2]
    assert line.startswith("| Pong | qdagger | 2 of 3 | 20,000 or 25,000 | 3.0 ")


def test_a_file_is_read_up_to_an_incomplete_record(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A killed run leaves one, which is no damage."""
    run = write_events(tmp_path / "run", {TRAINING: [(1000 + i, float(i)) for i in range(100)]})
    (path,) = run.iterdir()
    path = path.rename(run / "events.out.tfevents.1700000000.host")
    path.write_bytes(path.read_bytes()[:-20])
    write_events(run, {TRAINING: [(9000, -1.0)]})
    curves, _ = report.read_events(run)
    assert [*curves[TRAINING][:, 1]] == [*range(99), -1]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "no runs in missing"),
        (["good", "--out", "file"], "can't write to file"),
        (["good", "--variants", "x", "y"], "no runs of y; give --variants of x"),
        (["good", "--labels", "a", "b"], "2 --labels for x"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    write_events(Path("good"), {TRAINING: [(1500, 1.0)]}, {"env_id": PONG, "exp_name": "x", "seed": 1})
    Path("file").touch()
    with pytest.raises(SystemExit) as stop, one_line_errors():
        report.main(report.tyro.cli(report.Args, args=arguments))
    assert stop.value.code == 2
    assert re.fullmatch(f"error: {message}.*\n", capsys.readouterr().err)


def test_the_table_has_the_values_of_the_runs(runs) -> None:
    """The interval of the mean of three seeds is their range: all seeds are the lowest in 1/27 > 2.5 % of resamples."""
    root, written = runs
    lines = report.table_of_games(read_runs([root])).splitlines()[2:]
    for (game, script), line in zip(sorted({key[:2] for key in written}), lines, strict=True):
        points = [written[game, script, seed] for seed in (1, 2, 3)]
        columns = [[np.mean([value for _, value in p.get(EVALUATION, p[TRAINING][-10:])]) for p in points]]
        columns += [[p[tag][-1][1] for p in points] for tag in (OFFLINE, TEACHER, RANDOM)]
        final, *others = (f"{np.mean(x):.1f} [{min(x):.1f}, {max(x):.1f}]" for x in columns)
        steps = "20,000" + " or 10,000" * (game == "Pong")
        measured = "20 evaluation episodes" + " or 10 training episodes" * (game == "Pong")
        assert line == f"| {' | '.join([game, script, '3', steps, final, measured, *others])} |"


def test_iqm_and_interval_of_the_published_results() -> None:
    """They are those of a computation without vectors and SciPy; the interval needs two runs of each game."""

    def naive_iqm(values: list[float]) -> float:
        k = len(values) // 4
        return sum(sorted(values)[k : len(values) - k]) / (len(values) - 2 * k)

    compared = 0
    for games, found in report.aggregates(publish.read_results()).values():
        if len(games) > 1 and min(map(len, games)) > 1:
            rng = np.random.default_rng(0)
            drawn = [game[rng.integers(len(game), size=(10_000, len(game)))] for game in games]
            iqms = [naive_iqm([*itertools.chain(*rows)]) for rows in zip(*drawn, strict=True)]
            expected = [naive_iqm([*itertools.chain(*games)]), *np.quantile(iqms, [0.025, 0.975])]
            np.testing.assert_allclose(found, expected, rtol=1e-9)
            compared += 1
    assert compared >= 7


def test_runs_without_a_teacher_are_normalised_by_that_of_the_game(tmp_path: Path) -> None:
    """DQN's runs have none. A single run has no interval; and without any teacher, there is no normalised return."""
    write_run(tmp_path, 1, {EVALUATION: [(0, 1.0)], TEACHER: [(0, 11.0)], RANDOM: [(0, 1.0)]})
    write_run(tmp_path, 1, {EVALUATION: [(0, 6.0)]}, script="dqn")
    write_run(tmp_path, 1, {EVALUATION: [(0, 6.0)]}, "BreakoutNoFrameskip-v4", "dqn")
    lines = report.table_of_variants(read_runs([tmp_path])).splitlines()[2:]
    assert lines == ["| dqn | 1 | 1 | 0.50 |", "| qdagger | 1 | 1 | 0.00 |"]


def figure_of(draw: Callable[[], object]) -> Figure:
    """Return the first figure that is saved."""
    figures: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
        draw()
    return figures[0]


def test_the_curves_are_means_over_seeds(runs, tmp_path: Path) -> None:
    """They end with the shortest run. The intervals of three seeds are their ranges."""
    root, written = runs
    figure = figure_of(lambda: report.main(report.Args([root], tmp_path)))
    breakout, pong = np.reshape(figure.axes, (2, 2)).T
    assert [breakout[0].get_title(), pong[0].get_title()] == ["Breakout", "Pong"]
    for number, script in enumerate(("qdagger", "scratch")):
        of_seeds = [written["Breakout", script, seed] for seed in (1, 2, 3)]
        for axis, tag, window in zip(breakout, (TRAINING, LAMBDA), (10, 1), strict=True):
            line = [line for line in axis.get_lines() if len(line.get_xdata()) == 201][number]
            assert line.get_color() == report.COLORS[number]
            steps, means = line.get_data()
            before = [[[y for at, y in p[tag] if at - 1000 <= x][-window:] for p in of_seeds] for x in steps]
            values = np.array([[np.mean(y) if y else np.nan for y in at_step] for at_step in before])
            np.testing.assert_allclose(means, values.mean(1), rtol=1e-5, atol=1e-5)
            band = axis.collections[number if tag == LAMBDA else 3 * number].get_datalim(axis.transData)
            known = values[np.isfinite(values).all(1)]
            np.testing.assert_allclose([band.y0, band.y1], [known.min(), known.max()], rtol=1e-5, atol=1e-5)
        returns = {0: np.mean([p[OFFLINE][-1][1] for p in of_seeds])}
        returns[20000] = np.mean([[y for _, y in p[EVALUATION]] for p in of_seeds])
        dots = [line.get_xydata()[0] for line in breakout[0].get_lines() if len(line.get_xdata()) == 1]
        np.testing.assert_allclose(dots[2 * number : 2 * number + 2], [*returns.items()], atol=1e-4)
    for axis, end in ((breakout[0], 20000), (pong[0], 10000)):
        assert {line.get_xdata()[-1] for line in axis.get_lines() if len(line.get_xdata()) == 201} == {end}
        assert [set(line.get_ydata()) for line in axis.get_lines()[-2:]] == [{19.5}, {-20.5}]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["qdagger", "scratch", "teacher", "random policy"]


def test_variants_look_different_in_a_figure() -> None:
    """A label may begin with an underscore."""
    (run,) = (run for run in publish.read_results() if run.exp_name == "qdagger-2.5M")
    figure = Figure()
    report.draw_curves(figure, [report.replace(run, exp_name=f"_{i}") for i in range(24)])
    lines = figure.legends[0].get_lines()[:24]
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 24
    assert [text.get_text() for text in figure.legends[0].get_texts()][:24] == [f"_{i}" for i in range(24)]
    with pytest.raises(report.UserError, match="25 variants are too many"):
        report.draw_curves(Figure(), [report.replace(run, exp_name=f"_{i}") for i in range(25)])


def test_variants_are_chosen_ordered_and_labelled(runs, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    args = [str(runs[0]), "--out", str(tmp_path), "--format", "pdf", "--variants", "scratch", "qdagger"]
    report.main(report.tyro.cli(report.Args, args=[*args, "--labels", "From scratch", "_QDagger"]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| From scratch", "| _QDagger"]
    assert [line.split(" | ")[1] for line in lines[7:11]] == ["From scratch", "_QDagger"] * 2
    with (tmp_path / "results.csv").open(newline="") as file:
        assert [row["exp_name"] for row in csv.DictReader(file)] == [*["scratch"] * 3, *["qdagger"] * 3] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "curves.npz", "curves.pdf", "iqm.pdf"}
    assert (tmp_path / "curves.pdf").read_bytes()[:4] == b"%PDF"


def test_a_run_draws_its_curves(runs, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    dqn = write_run(Path("runs"), 1, {TRAINING: [(500, 1.0), (1500, 2.0)]}, script="dqn", offline_steps=0)
    draw_run(dqn)
    assert Image.open(dqn / "curves.png").format == "PNG"
    assert len(figure_of(lambda: draw_run(dqn)).axes) == 1  # DQN has no λ
    run = next(runs[0].glob("Pong*__qdagger__*"))
    assert [len(axis.get_lines()) for axis in figure_of(lambda: draw_run(run)).axes] == [5, 1]
    offline = write_run(Path("runs"), 2, {OFFLINE: [(1000, 1.0)]})
    assert figure_of(lambda: draw_run(offline)).axes[0].get_lines()[0].get_xydata().tolist() == [[0, 1]]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("problem", ["error", "no matplotlib"])
def test_a_run_does_not_end_because_of_its_figure(tmp_path: Path, monkeypatch, capsys, problem: str) -> None:
    dqn = write_run(tmp_path, 1, {TRAINING: [(500, 1.0), (1500, 2.0)]}, script="dqn")
    if problem == "error":
        monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: file.write(b"half") and 1 / 0)
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    draw_run(dqn)
    path = re.escape(str(dqn / "curves.png"))
    assert re.fullmatch(rf"WARNING: {path} can't be drawn \(.*\); .*\n", capsys.readouterr().err)
    assert [path.name[:6] for path in dqn.iterdir()] == ["events"]
