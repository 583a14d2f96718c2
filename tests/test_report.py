"""Tests of cleanrl_utils/report.py on runs with known values, written by the libraries that users have."""

import csv
import itertools
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from benchmark import publish
from cleanrl_utils import report
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.report import EVALUATION, LAMBDA, OFFLINE, ONLINE, RANDOM, TEACHER, TRAINING, draw_run, read_runs
from cleanrl_utils.tracking import Writer

PONG = "PongNoFrameskip-v4"
Points = dict[str, list[tuple[int, float]]]


def write_events(directory: Path, points: Points, flags: dict | None = None) -> Path:
    """Write scalars and flags to a new event file; return the directory."""
    with Writer(directory) as writer:
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
    return write_events(root / f"{env_id}__{script}__{seed}__{1700000000 + seed}", points, flags)


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
    flags = {"exp_name": "a__b", "env_id": "ALE/Pong-v5", "seed": 3, "offline_steps": 1000, "eval_episodes": 7}
    writer.add_text("hyperparameters", "|param|value|\n|-|-|\n" + "\n".join(f"|{x}|{y}|" for x, y in flags.items()))
    for tag, value, step in ((TEACHER, 19.5, 0), (OFFLINE, 12.25, 1000), (TRAINING, 3, 1500), (TRAINING, -4.5, 1800)):
        writer.add_scalar(tag, value, step)
    writer.close()
    (run,) = read_runs([tmp_path])
    assert (run.key, run.command) == ("ALE-Pong-v5/a__b/3", "")
    assert (run.offline_updates, run.online_steps) == (1000, 800)
    assert (run.teacher_return, run.offline_return, run.final_return) == (19.5, 12.25, -0.75)


def test_all_files_of_a_resumed_run_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path, 1, {TRAINING: [(1500, 1.0), (1600, 6.0)]}, total_timesteps=1500)
    (first,) = run.iterdir()
    first.rename(run / "events.out.tfevents.1700000000.host")
    write_events(run, {TRAINING: [(2500, 2.0)], EVALUATION: [(0, 5.0), (1, 7.0)]})
    (result,) = read_runs([run])
    assert (*result.curves[0, [100, 200]], result.final_return, result.final_standard_error) == (3.5, 3, 6, 1)


def test_the_newest_run_of_a_seed_counts(tmp_path: Path, capsys) -> None:
    """Also where it is in a directory that is read first."""
    for number, root in ((1, "b"), (2, "a")):
        path = write_run(tmp_path / root, 12, {EVALUATION: [(0, number)]})
        path = path.rename(path.with_name(f"{path.name}{number}"))
    (run,) = read_runs([tmp_path])
    assert run.final_return == 2
    assert f"warning: {path} replaces a run " in capsys.readouterr().err


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


def test_a_run_that_was_resumed_with_another_end(tmp_path: Path) -> None:
    """Its steps are those that it has, not those of its first flags."""
    for seed, last in ((1, 600), (2, 25000)):
        points: Points = {TRAINING: [(1000 + last // 2, 2.0)], EVALUATION: [(1000 + last + i, 5.0) for i in range(3)]}
        write_run(tmp_path, seed, points)
    assert [run.online_steps for run in read_runs([tmp_path])] == [600, 25000]


@pytest.mark.posix  # Windows allows links only to administrators
def test_a_run_in_its_offline_phase(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It has the updates so far. Its directory may be a link to another disk."""
    run_dir = write_run(tmp_path / "disk", 1, {"charts/offline/loss": [(700, 1.0)], OFFLINE: [(500, 3.0)]})
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / run_dir.name).symlink_to(run_dir, target_is_directory=True)
    (tmp_path / "runs" / "latest").symlink_to(run_dir, target_is_directory=True)
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
    assert capsys.readouterr().err == f"warning: {found}; give each variant its own --exp-name\n"


def test_seeds_without_a_return_are_not_counted(tmp_path: Path) -> None:
    write_run(tmp_path, 1, {EVALUATION: [(0, 2.0), (1, 4.0)], TRAINING: [(21000, 1.0)]})
    write_run(tmp_path, 2, {"losses/loss": [(1200, 1.0)]})
    line = report.table(read_runs([tmp_path])).splitlines()[2]
    assert line.startswith("| Pong | qdagger | 1 of 2 | 20,000 | 3.0 | 2 evaluation episodes |")


def test_results_name_the_versions_of_packages(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 1, {EVALUATION: [(0, 1.0)]}, versions="gymnasium 1.4.0")
    report.write_data(read_runs([tmp_path / "runs"]), tmp_path)
    with (tmp_path / "results.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["versions"] == "gymnasium 1.4.0"


def test_a_file_is_read_up_to_an_incomplete_record(tmp_path: Path) -> None:
    """A killed run leaves one."""
    run = write_events(tmp_path / "run", {TRAINING: [(1000 + i, float(i)) for i in range(100)]})
    (path,) = run.iterdir()
    path = path.rename(run / "events.out.tfevents.1700000000.host")
    path.write_bytes(path.read_bytes()[:-20])
    write_events(run, {TRAINING: [(9000, -1.0)]})
    curves, _ = report.read_events(run)
    assert [*curves[TRAINING][:, 1]] == [*range(99), -1]


@pytest.mark.parametrize("flags", [None, {"env_id": PONG, "exp_name": "qdagger"}])
def test_runs_without_flags_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture, flags: dict | None) -> None:
    write_run(tmp_path, 1, {TRAINING: [(1500, 2.0)]})
    other = write_events(tmp_path / "other", {TRAINING: [(500, 1.0)]}, flags)
    assert [(run.seed, run.final_return) for run in read_runs([tmp_path])] == [(1, 2.0)]
    assert capsys.readouterr().err.startswith(f"warning: {other} has no curves or no hyperparameters; ")


@pytest.mark.posix
def test_links_of_wandb_are_not_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """W&B links to the event files of a run, of a resumed run to the last one only."""
    run = write_run(tmp_path / "runs", 1, {TRAINING: [(1500, 1.0)]})
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/events.out.tfevents.1").symlink_to(next(run.iterdir()))
    assert len(read_runs([tmp_path])) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "no runs in missing"),
        (["good", "--out", "file"], "can't write to file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    write_events(Path("good"), {TRAINING: [(1500, 1.0)]}, {"env_id": PONG, "exp_name": "x", "seed": 1})
    Path("file").touch()
    with pytest.raises(SystemExit) as stop, one_line_errors():
        report.main(report.tyro.cli(report.Args, args=arguments))
    assert stop.value.code == 2
    assert re.fullmatch(f"error: {message}.*; give .*\n", capsys.readouterr().err)


def test_the_table_has_the_values_of_the_runs(runs) -> None:
    root, written = runs
    lines = report.table(read_runs([root])).splitlines()[2:]
    for (game, script), line in zip(sorted({key[:2] for key in written}), lines, strict=True):
        points = [written[game, script, seed] for seed in (1, 2, 3)]
        columns = [[np.mean([value for _, value in p.get(EVALUATION, p[TRAINING][-10:])]) for p in points]]
        columns += [[p[tag][-1][1] for p in points] for tag in (OFFLINE, TEACHER, RANDOM)]
        final, *others = (f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}" for values in columns)
        steps = "20,000" + " or 10,000" * (game == "Pong")
        measured = "20 evaluation episodes" + " or 10 training episodes" * (game == "Pong")
        assert line == f"| {' | '.join([game, script, '3', steps, final, measured, *others])} |"


def figure_of(draw: Callable[[], object]) -> Figure:
    """Return the figure that ``draw`` saves. Texts have 9 points or more on a page of 690 pixels, at 96 an inch."""
    figures: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
        draw()
    (figure,) = figures
    sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text()]
    assert min(sizes) * (690 / 96) / figure.get_figwidth() >= 9
    assert figure.get_facecolor() == (1, 1, 1, 1)
    return figure


def test_the_curves_are_those_of_the_runs(runs, tmp_path: Path) -> None:
    root, written = runs
    figure = figure_of(lambda: report.main(report.Args([root], tmp_path)))
    for game, panel in zip(("Breakout", "Pong"), np.reshape(figure.axes, (2, 2)).T, strict=True):
        assert panel[0].get_title() == game
        keys = [key for key in sorted(written) if key[0] == game]
        for axis, tag, window in zip(panel, (TRAINING, LAMBDA), (10, 1), strict=True):
            lines = [line for line in axis.get_lines() if line.get_label() in ("qdagger", "scratch")]
            for line, key in zip(lines, keys, strict=True):
                points = written[key]
                steps, means = line.get_data()
                assert (line.get_label(), steps[-1]) == (key[1], 20000 if EVALUATION in points else 10000)
                before = [[value for at, value in points[tag] if at - 1000 <= step][-window:] for step in steps]
                np.testing.assert_allclose(means, [np.mean(x) if x else np.nan for x in before], rtol=1e-6)
        levels = {line.get_label(): set(line.get_ydata()) for line in panel[0].get_lines()}
        assert (levels["teacher"], levels["random policy"]) == ({19.5}, {-20.5})
        dots = [line.get_xydata()[0] for line in panel[0].get_lines() if len(line.get_xydata()) == 1]
        expected = []
        for key in keys:
            expected.append((0, written[key][OFFLINE][-1][1]))
            if EVALUATION in written[key]:
                expected.append((20000, np.mean([y for _, y in written[key][EVALUATION]])))
        np.testing.assert_allclose(dots, expected, atol=1e-4)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["qdagger", "scratch", "teacher", "random policy", "evaluation"]


def test_a_report_has_the_same_bytes_again(runs, tmp_path: Path) -> None:
    for out in ("first", "second"):
        report.main(report.Args([runs[0]], tmp_path / out))
    for name in ("curves.npz", "curves.png", "results.csv"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_a_run_is_published_at_each_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces its own row only, although a published run has its game, exp_name and seed."""
    for name in ("results.csv", "curves.npz"):
        shutil.copy(publish.BENCHMARK / name, tmp_path)
    monkeypatch.setattr(publish, "BENCHMARK", tmp_path)
    monkeypatch.setattr(publish, "ASSETS", tmp_path)
    before = [run for run in publish.read_results() if run.exp_name != "qdagger-2.5M"]
    script = "qdagger_dqn_atari_impalacnn"
    points: Points = {OFFLINE: [(1000, 30.0)], TRAINING: [(1500, 20.0)]}
    run_dir = write_run(tmp_path / "runs", 1, points, "BreakoutNoFrameskip-v4", script, total_timesteps=2500000)
    for step, mean in ((251000, 60.5), (501000, 70.25)):
        write_events(run_dir, {ONLINE: [(step, mean)], LAMBDA: [(step - 500, 0.5)]})
        publish.main(publish.Args([tmp_path / "runs"], "qdagger-2.5M"))
    runs = publish.read_results()
    (run,) = [run for run in runs if run.exp_name == "qdagger-2.5M"]
    assert run.evaluations == {0: 30.0, 250000: 60.5, 500000: 70.25}
    assert [run.key for run in runs if run.exp_name != "qdagger-2.5M"] == [run.key for run in before]
    draw, shown = publish.figures(publish.labelled(runs))["long"]
    lines = figure_of(lambda: report.save_figure(tmp_path / "long.png", draw, shown)).axes[0].get_lines()
    assert (500000, 70.25) in [tuple(line.get_xydata()[0]) for line in lines if len(line.get_xydata())]


def test_a_run_draws_its_curves(runs, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    dqn = write_run(Path("runs"), 1, {TRAINING: [(500, 1.0), (1500, 2.0)]}, script="dqn", offline_steps=0)
    draw_run(dqn)
    assert Image.open(dqn / "curves.png").format == "PNG"
    assert len(figure_of(lambda: draw_run(dqn)).axes) == 1  # DQN has no λ
    run = next(runs[0].glob("Pong*__qdagger__*"))
    assert [len(axis.get_lines()) for axis in figure_of(lambda: draw_run(run)).axes] == [6, 1]
    offline = write_run(Path("runs"), 2, {OFFLINE: [(1000, 1.0)]})
    assert figure_of(lambda: draw_run(offline)).axes[0].get_lines()[1].get_xydata().tolist() == [[0, 1]]
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
    assert re.fullmatch(rf"warning: {path} can't be drawn \(.*\); .*\n", capsys.readouterr().err)
    assert [path.name[:6] for path in dqn.iterdir()] == ["events"]
