"""Tests of cleanrl_utils/report.py on runs with known values, written by the libraries that users have."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from tensorboard.plugins.text.summary_v2 import text_pb

from cleanrl_utils import report
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.report import EVALUATION, LAMBDA, OFFLINE, RANDOM, TEACHER, TRAINING, draw_run, read_runs
from cleanrl_utils.tracking import Writer

PONG = "PongNoFrameskip-v4"
Points = dict[str, list[tuple[int, float]]]


def write_events(directory: Path, points: Points, flags: dict | None = None) -> Path:
    """Write scalars and flags to a new event file; return the directory."""
    writer = Writer(directory)
    if flags is not None:
        writer.add_flags(SimpleNamespace(**flags))
    for tag, values in points.items():
        for step, value in values:
            writer.add_scalar(tag, value, step)
    writer.close()
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
    root, written = tmp_path_factory.mktemp("runs"), {}
    for key in itertools.product(("Breakout", "Pong"), ("qdagger", "scratch"), (1, 2, 3)):
        level, last = {"qdagger": 17, "scratch": -12}[key[1]] + key[2], 11000 if key[::2] == ("Pong", 3) else 21000
        written[key] = random_points(np.random.default_rng(len(written)), level, last)
        write_run(root, key[2], written[key], f"{key[0]}NoFrameskip-v4", key[1])
    return root, written


def test_runs_of_other_scripts_are_read(tmp_path: Path) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    flags = {"exp_name": "a__b", "env_id": "ALE/Pong-v5", "seed": 3, "offline_steps": "1e3", "eval_episodes": 7}
    writer.add_text("hyperparameters", "|param|value|\n|-|-|\n" + "\n".join(f"|{x}|{y}|" for x, y in flags.items()))
    for tag, value, step in ((TEACHER, 19.5, 0), (OFFLINE, 12.25, 1000), (TRAINING, 3, 1500), (TRAINING, -4.5, 1800)):
        writer.add_scalar(tag, value, step)
    writer.close()
    (run,) = read_runs([tmp_path])
    assert (run.key, run.command) == ("ALE-Pong-v5/a__b/3", "")
    assert (run.offline_updates, run.online_steps) == (1000, 800)
    assert (run.teacher_return, run.offline_return, run.final_return) == (19.5, 12.25, -0.75)


def test_all_files_of_a_resumed_run_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path, 1, {TRAINING: [(1500, 1.0)], EVALUATION: [(0, 1.0), (1, 2.0)]})
    (first,) = run.iterdir()
    first.rename(run / "events.out.tfevents.1700000000.host")
    write_events(run, {TRAINING: [(2500, 2.0), (1600, 6.0)], EVALUATION: [(0, 5.0), (1, 7.0)]})
    (result,) = read_runs([run])
    assert (*result.curves[0, [100, 200]], result.final_return, result.final_standard_error) == (3.5, 3, 6, 1)


def test_the_newest_run_of_a_seed_counts(tmp_path: Path, capsys) -> None:
    """Also where it is in a directory that is read first."""
    for number, root in ((1, "b"), (2, "a")):
        path = write_run(tmp_path / root, 12, {EVALUATION: [(0, number)]})
        path = path.rename(path.with_name(f"{path.name}{number}"))
    (run,) = read_runs([tmp_path])
    assert run.final_return == 2
    assert f"warning: {path} has " in capsys.readouterr().err
    read_runs([path, path / ".." / path.name])
    assert capsys.readouterr().err == ""  # the same directory given twice is not a second run


@pytest.mark.parametrize("damage", ["cut", "flipped bit"])
def test_a_damaged_file_is_used_up_to_the_damage(tmp_path: Path, damage: str) -> None:
    run = write_events(tmp_path / "run", {TRAINING: [(1000 + i, float(i)) for i in range(100)]})
    (path,) = run.iterdir()
    path = path.rename(run / "events.out.tfevents.1700000000.host")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4 if damage == "flipped bit" else 0
    path.write_bytes(data[: -20 if damage == "cut" else None])
    write_events(run, {TRAINING: [(9000, -1.0)]})
    *returns, last = [value.simple_value for event in report.read_events(run) for value in event.summary.value]
    assert [*returns, last] == [*range(99 if damage == "cut" else len(returns)), -1]
    assert len(returns) == 99 or 30 < len(returns) < 70


@pytest.mark.parametrize("odd", [{"seed": "x"}, {"seed": "nan"}, {"offline_steps": "1e300"}, {}])
def test_what_is_not_understood_is_left_out(tmp_path: Path, capsys, odd: dict) -> None:
    values = [1.0, float("nan"), 2.0, float("inf"), -float("inf"), 3.0]
    good = write_run(tmp_path, 1, {TRAINING: [(1500 + i, value) for i, value in enumerate(values)]})
    flags = {"env_id": PONG, "exp_name": "qdagger", "seed": 2} | odd if odd else {}
    run = write_events(tmp_path / "odd", {TRAINING: [(500, 1.0)]}, flags)
    assert [(run.seed, run.final_return) for run in read_runs([tmp_path])] == [(1, 2.0)]
    first = f"warning: {good} has NaN or infinity in {TRAINING}; these points are left out\n"
    assert re.fullmatch(rf"{first}warning: {run} has no valid .*; it is left out\n", capsys.readouterr().err)


def test_odd_files_and_text_do_not_end_the_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Text that is not UTF-8, text that is not valid math, huge sizes, files without a record, a pipe, dead links."""
    text = text_pb("hyperparameters", b"|wandb_entity|\xff|\n|gamma|0.99|")
    Writer(write_run(tmp_path, 1, {TRAINING: [(5, 1.0)]}))._add(text, 0)
    second = write_run(tmp_path, 2, {TEACHER: [(0, 1.0)], OFFLINE: [(10, 1.0)]}, script="no, end")
    write_run(tmp_path, 3, {TRAINING: [(2**62, 3e38)] * 2, OFFLINE: [(-5, 1.0)]}, offline_steps="1e18")
    run = write_run(tmp_path, 4, {TRAINING: [(1500, 1.0)]}, script=r"$\frac$")
    (run / "events.out.tfevents.1").write_bytes(b"text" * 99)
    (run / "events.out.tfevents.2").mkdir()
    (run / "events.out.tfevents.3").symlink_to(tmp_path / "missing")
    (run / "events.out.tfevents.4").touch()
    os.mkfifo(run / "events.out.tfevents.5")
    (tmp_path / "wandb").mkdir()  # W&B has links to the files, of a resumed run to the last one only
    (tmp_path / "wandb/events.out.tfevents.1").symlink_to(next(second.iterdir()))
    report.main(report.Args(paths=[tmp_path], out=tmp_path / "report"))
    assert "another run" not in capsys.readouterr().err
    lines = [line.split(" | ")[1:3] for line in (tmp_path / "report/table.md").read_text().splitlines()[2:]]
    assert lines == [[r"$\frac$", "1"], ["no, end", "1"], ["qdagger", "2"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "no event files in missing"),
        (["losses"], "no run to report in losses"),
        (["good", "--out", "file"], "can't write to file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    write_events(Path("good"), {TRAINING: [(1500, 1.0)]}, {"env_id": PONG, "exp_name": "x", "seed": 1})
    write_events(Path("losses"), {"losses/loss": [(1500, 1.0)]})
    Path("file").touch()
    with pytest.raises(SystemExit) as stop, one_line_errors():
        report.main(report.tyro.cli(report.Args, args=arguments))
    assert stop.value.code == 2
    (error,) = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: "))
    assert re.match(f"error: {message}.*; give ", error)


def test_the_table_has_the_values_of_the_runs(runs) -> None:
    root, written = runs
    lines = report.table(read_runs([root])).splitlines()[2:]
    for (game, script), line in zip(sorted({key[:2] for key in written}), lines, strict=True):
        points = [written[game, script, seed] for seed in (1, 2, 3)]
        columns = [[np.mean([value for _, value in p.get(EVALUATION, p[TRAINING][-10:])]) for p in points]]
        columns += [[p[tag][-1][1] for p in points] for tag in (OFFLINE, TEACHER, RANDOM)]
        final, *others = (f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}" for values in columns)
        measured = "20 evaluation episodes" + " or 10 training episodes" * (game == "Pong")
        assert line.startswith(f"| {' | '.join([game, script, '3', final, measured, *others])} |")


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
                points, (steps, means) = written[key], line.get_data()
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
    assert labels == ["qdagger", "scratch", "teacher", "random policy", "offline evaluation", "final evaluation"]


def test_a_report_has_the_same_bytes_again(runs, tmp_path: Path, monkeypatch) -> None:
    """Also where the user has settings of matplotlib."""
    for out in ("first", "second"):
        report.main(report.Args([runs[0]], tmp_path / out))
        monkeypatch.setitem(matplotlib.rcParams, "lines.linewidth", 5.0)
    for name in ("curves.npz", "curves.png", "results.csv", "table.md"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_a_shell_in_jupyter(runs, tmp_path: Path) -> None:
    """It names a backend for matplotlib that is not installed here."""
    command = [sys.executable, "-m", "cleanrl_utils.report", runs[0], "--out", "out"]
    environment = os.environ | {"PYTHONPATH": str(Path(report.__file__).parents[1]), "MPLBACKEND": "module://nowhere"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/curves.png").exists()


def test_a_run_draws_its_curves(runs, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    dqn = write_run(Path("runs"), 1, {TRAINING: [(500, 1.0), (1500, 2.0)]}, script="dqn", offline_steps=0)
    draw_run(dqn)
    assert Image.open(dqn / "curves.png").text["Description"] == report.table(read_runs([dqn]))
    assert len(figure_of(lambda: draw_run(dqn)).axes) == 1  # DQN has no λ
    run = next(runs[0].glob("Pong*__qdagger__*"))
    assert [len(axis.get_lines()) for axis in figure_of(lambda: draw_run(run)).axes] == [7, 1]
    # There is nothing to draw, or no package to draw it.
    draw_run(offline := write_run(Path("runs"), 2, {OFFLINE: [(1000, 1.0)]}))
    (dqn / "curves.png").unlink()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        draw_run(dqn)
    assert not [*offline.glob("*.png"), *dqn.glob("*.png")]
    assert capsys.readouterr().err == ""


def test_a_run_does_not_end_because_of_its_figure(tmp_path: Path, monkeypatch, capsys) -> None:
    dqn = write_run(tmp_path, 1, {TRAINING: [(500, 1.0), (1500, 2.0)]}, script="dqn")
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: file.write(b"half") and 1 / 0)
    draw_run(dqn)
    assert re.fullmatch(rf"warning: {dqn}/curves.png can't be drawn \(.*\); .*\n", capsys.readouterr().err)
    assert [path.name[:6] for path in dqn.iterdir()] == ["events"]
