"""Tests of cleanrl_utils/report.py on runs with known values, written by the libraries that users have."""

import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image
from scipy.stats import bootstrap
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from benchmark import publish
from cleanrl_utils import report
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.report import EVALUATION, ONLINE, TRAINING, draw_run, read_runs
from cleanrl_utils.tracking import Writer

TEACHER = "charts/teacher/avg_episodic_return"
RANDOM = "charts/random/avg_episodic_return"
OFFLINE = "charts/offline/avg_episodic_return"
LAMBDA = "charts/distill_coeff"
PONG = "PongNoFrameskip-v4"
Points = dict[str, list[tuple[int, float]]]


def write_events(directory: Path, points: Points, flags: dict | None = None, first_step: int | None = None) -> Path:
    """Write scalars and flags to a new event file, of a run that starts at ``first_step``; return the directory."""
    writer = Writer(directory)
    if first_step is not None:
        # As the writer of PyTorch does for `purge_step`.
        writer._writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
    if flags is not None:
        writer.add_flags(flags)
    for tag, values in points.items():
        for step, value in values:
            writer.add_scalar(tag, value, step)
    writer.close()
    return directory


def write_run(root: Path, seed: int, points: Points, env_id: str = PONG, script: str = "qdagger", **flags) -> Path:
    """Write a run of 1,000 offline updates and 20,000 online steps, unless ``flags`` say otherwise."""
    flags = {"offline_steps": 1000, "total_timesteps": 20000} | flags
    flags |= {"env_id": env_id, "exp_name": script, "seed": seed}
    return write_events(root / f"{env_id}__{script}__{seed}__{1700000000 + seed}", points, flags, 0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str, int], Points]]:
    """Two games, two scripts and three seeds, the last of Pong unfinished, with the points written."""
    root = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    written = {}
    for game, script, seed in itertools.product(("Breakout", "Pong"), ("qdagger", "scratch"), (1, 2, 3)):
        level = {"qdagger": 17, "scratch": -12}[script] + seed
        last = 11000 if (game, seed) == ("Pong", 3) else 21000
        steps = np.sort(rng.choice(np.arange(1200, last, 8), 40, replace=False)).tolist()
        points: Points = {TEACHER: [(0, 19.5)], RANDOM: [(0, -20.5)], OFFLINE: [(500, level - 8), (1000, level - 4)]}
        points[TRAINING] = [(step, level + rng.normal(0, 3)) for step in steps]
        points[LAMBDA] = [(step, rng.random()) for step in steps]
        points["losses/loss"] = [(last, 0.0)]
        if last == 21000:
            points[EVALUATION] = [(i, level + rng.normal(0, 3)) for i in range(20)]
        written[game, script, seed] = points
        write_run(root, seed, points, f"{game}NoFrameskip-v4", script)
    return root, written


def drawn(*paths: Path) -> Figure:
    """Draw the curves of runs."""
    figure = Figure()
    report.draw_curves(figure, read_runs(paths))
    return figure


def test_runs_of_other_scripts_are_read(tmp_path: Path) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    flags = {"exp_name": "a__b", "env_id": "ALE/Pong-v5", "seed": 3, "offline_steps": 1000}
    flags |= {"versions": "gymnasium 1.4.0", "commit": "abc1234, files changed"}
    writer.add_text("hyperparameters", "|param|value|\n|-|-|\n" + "\n".join(f"|{x}|{y}|" for x, y in flags.items()))
    for tag, value, step in ((TEACHER, 19.5, 0), (OFFLINE, 12.25, 1000), (TRAINING, 3, 1500), (TRAINING, -4.5, 1800)):
        writer.add_scalar(tag, value, step)
    writer.close()
    (run,) = read_runs([tmp_path]).itertuples()
    assert (run.game, run.exp_name, run.seed) == ("ALE-Pong-v5", "a__b", 3)
    assert (run.versions, run.commit, run.command) == ("gymnasium 1.4.0", "abc1234, files changed", "")
    assert (run.offline_updates, run.online_steps) == (1000, 800)
    assert (run.teacher_return, run.offline_return, run.final_return) == (19.5, 12.25, -0.75)


def test_all_files_of_a_resumed_run_are_read(tmp_path: Path) -> None:
    """Points from the step on at which it was resumed count once. A killed run leaves half a record.

    The row has all commands, each once, and steps of the last one.
    """
    points: Points = {TRAINING: [(1500, 1.0), (1600, 6.0), (2600, 9.0), (2700, 9.0)]}
    run = write_run(tmp_path, 1, points, total_timesteps=5000, command="a", commit="f00")
    killed = next(run.iterdir()).rename(run / "events.out.tfevents.1700000000.host")
    killed.write_bytes(killed.read_bytes()[:-20])
    flags = {"env_id": PONG, "exp_name": "qdagger", "seed": 1, "offline_steps": 1000, "total_timesteps": 1600}
    for command in ("b", "b", "a"):
        write_events(run, {}, flags | {"command": command, "commit": "f00"})
    write_events(run, {TRAINING: [(2500, 2.0)], EVALUATION: [(0, 5.0), (1, 7.0)]}, first_step=2001)
    assert [*report.read_events(run)[0][TRAINING].items()] == [(1500, 1), (1600, 6), (2500, 2)]
    (result,) = read_runs([run]).itertuples()
    assert (*result.curves[0, [100, 200]], result.final_return, result.final_standard_error) == (3.5, 3, 6, 1)
    assert (result.command, result.commit, result.online_steps) == ("a; b", "f00", 1600)


def test_the_newest_run_of_a_seed_counts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its directory's name has the newest time, whatever the directory above."""
    for newest, root in ((1800000000, "a"), (1750000000, "b")):
        path = write_run(tmp_path / root, 12, {EVALUATION: [(1000, newest)]})
        path.rename(path.with_name(f"{path.name[:-10]}{newest}"))
    write_run(tmp_path, 13, {EVALUATION: [(1000, 5.0)]})
    assert read_runs([tmp_path]).final_return.tolist() == [1800000000, 5]
    left_out = "older runs with the same game, exp_name and seed are left out: Pong/qdagger/12"
    assert capsys.readouterr().err == f"WARNING: {left_out}\n"


def test_an_unfinished_run_has_the_results_of_its_newest_evaluation(tmp_path: Path) -> None:
    """Its evaluations during the online phase are in the file of results and in the figure, as those of a whole run."""
    points: Points = {OFFLINE: [(500, 3.0), (1000, 4.0)], ONLINE: [(6000, 5.5), (11000, 6.25)]}
    points[TRAINING] = [(1500, 1.0), (10500, 2.0), (12000, 9.0)]
    run_dir = write_run(tmp_path, 1, points, eval_episodes=7)
    runs = read_runs([tmp_path])
    expected = {"final_return": 6.25, "final_episodes": 7, "measured_by": "evaluation", "online_steps": 10000}
    assert runs.loc[0, [*expected]].to_dict() == expected
    assert np.isnan(runs.final_standard_error[0])
    assert runs.curves[0][0, -1] == 1.5
    assert report.evaluations(runs) == {0: [4.0], 5000: [5.5], 10000: [6.25]}
    write_events(run_dir, {EVALUATION: [(0, 7.0), (1, 9.0)], "losses/loss": [(21000, 0.0)]})
    lines = drawn(run_dir).axes[0].get_lines()
    dots = dict(line.get_xydata()[0] for line in lines if len(line.get_xydata()) == 1)
    assert dots == {0: 4.0, 5000: 5.5, 10000: 6.25, 20000: 8.0}


@pytest.mark.posix  # Windows allows links only to administrators
def test_a_run_in_its_offline_phase(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It has the updates so far. W&B's links to its files are no runs."""
    run_dir = write_run(tmp_path, 1, {"charts/offline/loss": [(700, 1.0)], OFFLINE: [(500, 3.0)]})
    (tmp_path / "events.out.tfevents.1").symlink_to(next(run_dir.iterdir()))
    (run,) = read_runs([tmp_path]).itertuples()
    assert (run.offline_updates, run.online_steps, run.offline_return) == (700, 0, 3.0)
    assert drawn(run_dir).axes[0].get_lines()[0].get_xydata().tolist() == [[0, 3]]
    assert not capsys.readouterr().err


def test_runs_that_lack_something(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One without flags is left out; a seed without a return is not counted. Steps are those that the run has."""
    write_run(tmp_path, 1, {EVALUATION: [(21000, 2.0), (21001, 4.0)], TRAINING: [(20000, 1.0)]})
    write_run(tmp_path, 2, {"losses/loss": [(1200, 1.0)]})
    write_run(tmp_path, 3, {EVALUATION: [(26000, 3.0)], TRAINING: [(25000, 1.0)]})
    left_out = write_events(tmp_path / "unknown", {TRAINING: [(500, 1.0)]}, {"env_id": PONG, "exp_name": "qdagger"})
    runs = read_runs([tmp_path])
    assert capsys.readouterr().err.startswith(f"WARNING: {left_out} has no curves or no hyperparameters; ")
    assert runs.online_steps.tolist() == [20000, 200, 25000]
    line = report.table_of_games(runs).splitlines()[2]
    assert line.startswith("| Pong | qdagger | 2 of 3 | 20,000 or 25,000 | 3.0 ")


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
    """They are those of SciPy's bootstrap, which resamples each game separately."""

    def naive_iqm(*games: np.ndarray, axis: int = -1) -> np.ndarray:
        values = np.sort(np.concatenate(games, axis))
        quarter = values.shape[axis] // 4
        return values[..., quarter:-quarter].mean(axis)

    results = report.aggregates(publish.read_results()).values()
    several = [(games, found) for games, found in results if len(games) > 1 and min(map(len, games)) > 1]
    assert len(several) >= 7
    for games, found in several:
        result = bootstrap(games, naive_iqm, n_resamples=10_000, method="percentile", rng=np.random.default_rng(0))
        np.testing.assert_allclose(found, [naive_iqm(*games), *result.confidence_interval], rtol=1e-9)


def test_runs_without_a_teacher_are_normalised_by_that_of_the_game(tmp_path: Path) -> None:
    """DQN's runs have none. A single run has no interval. Without a better teacher, no return is normalised."""
    write_run(tmp_path, 1, {EVALUATION: [(0, 1.0)], TEACHER: [(0, 11.0)], RANDOM: [(0, 1.0)]})
    write_run(tmp_path, 1, {EVALUATION: [(0, 6.0)]}, script="dqn")
    write_run(tmp_path, 1, {EVALUATION: [(0, 6.0)]}, "BreakoutNoFrameskip-v4", "dqn")
    worse = {EVALUATION: [(0, 6.0)], TEACHER: [(0, 1.0)], RANDOM: [(0, 2.0)]}
    write_run(tmp_path, 1, worse, "BoxingNoFrameskip-v4", "qdagger")
    lines = report.table_of_variants(read_runs([tmp_path])).splitlines()[2:]
    assert lines == ["| dqn | 1 | 1 | 0.50 |", "| qdagger | 1 | 1 | 0.00 |"]


def test_the_curves_are_means_over_seeds(runs) -> None:
    """They end with the shortest run. The intervals of three seeds are their ranges."""
    root, written = runs
    figure = drawn(root)
    breakout, pong = np.reshape(figure.axes, (2, 2))
    assert [breakout[0].get_title(), pong[0].get_title()] == ["Breakout", "Pong"]
    for number, script in enumerate(("qdagger", "scratch")):
        for axis, tag, window in zip(breakout, (TRAINING, LAMBDA), (10, 1), strict=True):
            points = [written["Breakout", script, seed][tag] for seed in (1, 2, 3)]
            line = [line for line in axis.get_lines() if len(line.get_xdata()) == 201][number]
            assert line.get_color() == report.COLORS[number]
            steps, means = line.get_data()
            before = [[[y for at, y in of_seed if at - 1000 <= x][-window:] for of_seed in points] for x in steps]
            values = np.array([[np.mean(y) if y else np.nan for y in at_step] for at_step in before])
            np.testing.assert_allclose(means, values.mean(1), rtol=1e-5, atol=1e-5)
            band = axis.collections[number if tag == LAMBDA else 3 * number].get_datalim(axis.transData)
            known = values[np.isfinite(values).all(1)]
            np.testing.assert_allclose([band.y0, band.y1], [known.min(), known.max()], rtol=1e-5, atol=1e-5)
    for axis, end in ((breakout[0], 20000), (pong[0], 10000)):
        assert {line.get_xdata()[-1] for line in axis.get_lines() if len(line.get_xdata()) == 201} == {end}
        assert [set(line.get_ydata()) for line in axis.get_lines()[-2:]] == [{19.5}, {-20.5}]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["qdagger", "scratch", "teacher", "random policy"]
    assert [line.get_marker() for line in figure.legends[0].get_lines()[:2]] == ["o", "s"]


def test_variants_are_chosen_ordered_and_labelled(runs, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Files of data have the exp_names, as benchmark/results.csv, and all values."""
    args = [str(runs[0]), "--out", str(tmp_path), "--format", "pdf", "--variants", "scratch", "qdagger"]
    report.main(report.tyro.cli(report.Args, args=[*args, "--labels", "From scratch", "QDagger"]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| From scratch", "| QDagger"]
    assert [line.split(" | ")[1] for line in lines[7:11]] == ["From scratch", "QDagger"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "curves.npz", "curves.pdf", "iqm.pdf"}
    assert (tmp_path / "curves.pdf").read_bytes()[:4] == b"%PDF"
    written = pd.read_csv(tmp_path / "results.csv", keep_default_na=False, na_values="nan")
    assert [*written] == [*publish.read_results().drop(columns="curves")]
    assert written.exp_name.tolist() == [*["scratch"] * 3, *["qdagger"] * 3] * 2
    written["curves"] = [*np.load(tmp_path / "curves.npz").values()]
    pd.testing.assert_frame_equal(written.sort_values(report.KEY, ignore_index=True), read_runs([runs[0]]), atol=1e-4)


def test_a_run_draws_its_curves(tmp_path: Path) -> None:
    dqn = write_run(tmp_path, 1, {TRAINING: [(500, 1.0), (1500, 2.0)]}, script="dqn", offline_steps=0)
    draw_run(dqn)
    assert Image.open(dqn / "curves.png").format == "PNG"
    assert len(drawn(dqn).axes) == 1  # DQN has no λ


@pytest.mark.parametrize("module", ["pandas", "matplotlib.figure"])
def test_a_run_does_not_end_because_of_its_figure(tmp_path: Path, monkeypatch, capsys, module: str) -> None:
    dqn = write_run(tmp_path, 1, {TRAINING: [(500, 1.0), (1500, 2.0)]}, script="dqn")
    monkeypatch.setitem(sys.modules, module, None)
    draw_run(dqn)
    path = re.escape(str(dqn / "curves.png"))
    assert re.fullmatch(rf"WARNING: {path} can't be drawn \(.*{module}.*\); .*\n", capsys.readouterr().err)
    assert [path.name[:6] for path in dqn.iterdir()] == ["events"]
