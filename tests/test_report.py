"""Tests of cleanrl_utils/report.py on runs with known values, written by the libraries that users have."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.summary.writer.record_writer import RecordWriter

from cleanrl_utils import report
from cleanrl_utils.errors import one_line_errors
from cleanrl_utils.report import EVALUATION, LAMBDA, OFFLINE, RANDOM, TEACHER, TRAINING, Run

ROOT = Path(__file__).resolve().parent.parent
PONG, BREAKOUT = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4"
Points = dict[str, list[tuple[int, float]]]


def flag_table(flags: dict) -> str:
    return "|param|value|\n|-|-|\n" + "\n".join(f"|{name}|{value}|" for name, value in flags.items())


def write_events(directory: Path, points: Points, text: str | bytes | None = None) -> Path:
    """Write scalars and hyperparameters to a new event file; return the directory."""
    writer = EventFileWriter(str(directory))
    if text is not None:
        writer.add_event(Event(summary=text_pb("hyperparameters/text_summary", text)))
    for tag, values in points.items():
        for step, value in values:
            writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
    writer.close()
    return directory


def write_run(root: Path, seed: int, points: Points, env_id: str = PONG, script: str = "qdagger", **flags) -> Path:
    """Write a run of 1,000 offline updates and 20,000 online steps, unless ``flags`` say otherwise."""
    flags = {"offline_steps": 1000, "total_timesteps": 20000} | flags
    flags |= {"env_id": env_id, "exp_name": script, "seed": seed}
    return write_events(root / f"{env_id}__{script}__{seed}__{1700000000 + seed}", points, flag_table(flags))


def read(*paths: Path) -> report.Groups:
    return report.read_groups(paths)


def rows_of(text: str) -> list[dict[str, str]]:
    """Parse the table in a Markdown text."""
    names, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line)
    return [dict(zip(names, row, strict=True)) for row in rows]


def random_points(rng: np.random.Generator, level: float, last: int = 21000) -> Points:
    """Make the points of a run that logs up to the step ``last``, with 20 evaluation episodes if it is finished."""
    steps = np.sort(rng.choice(np.arange(1200, last, 8), 40, replace=False))
    points: Points = {
        TEACHER: [(0, 19.5)],
        RANDOM: [(0, -20.5)],
        OFFLINE: [(500, level - 8), (1000, level - 4)],
        TRAINING: [(int(step), float(np.round(level + rng.normal(0, 3)))) for step in steps],
        "losses/loss": [(step, float(rng.random())) for step in range(2000, last + 1, 40)],
        LAMBDA: [(step, 1 / (1 + 4 * (int((steps <= step).sum()) // 10))) for step in range(1000, last, 96)],
    }
    if last == 21000:
        points[EVALUATION] = [(i, float(np.round(level + rng.normal(0, 3)))) for i in range(20)]
    return points


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str, int], Points]]:
    """Two environments, two scripts and three seeds, one of them unfinished, with the points written."""
    root, written = tmp_path_factory.mktemp("runs"), {}
    for env_id in (PONG, BREAKOUT):
        for script, level in (("qdagger", 17.0), ("scratch", -12.0)):
            for seed in (1, 2, 3):
                rng = np.random.default_rng([seed, len(script), len(env_id)])
                unfinished = (env_id, script, seed) == (PONG, "qdagger", 3)
                points = random_points(rng, level + seed, last=11000 if unfinished else 21000)
                write_run(root, seed, points, env_id, script)
                written[env_id, script, seed] = points
    return root, written


@pytest.mark.parametrize("writer", ["tensorboard", "torch", "torch, new style"])
def test_runs_of_every_writer_are_read(tmp_path: Path, writer: str) -> None:
    points = {TEACHER: [(0, 19.5)], OFFLINE: [(1000, 12.25)], TRAINING: [(1500, 3.0), (1800, -4.5)]}
    flags = {"exp_name": "a__b", "env_id": "ALE/Pong-v5", "seed": 3, "total_timesteps": "1e7", "offline_steps": 1000}
    if writer == "tensorboard":
        write_events(tmp_path / "x__y__9__9", points, flag_table(flags))
    else:
        events = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path / "x__y__9__9"))
        events.add_text("hyperparameters", flag_table(flags))
        for tag, values in points.items():
            for step, value in values:
                events.add_scalar(tag, value, step, new_style=writer == "torch, new style")
        events.close()
    (run,) = read(tmp_path)["ALE-Pong-v5"]["a__b"]
    assert (run.seed, run.offline_steps, run.total_steps, run.online_steps) == (3, 1000, 10_000_000, 800)
    for tag, values in points.items():
        np.testing.assert_array_equal(run.points[tag], values)


def test_files_of_a_resumed_run_are_ordered_by_their_first_event(tmp_path: Path) -> None:
    run = write_run(tmp_path, 1, {TRAINING: [(1500, 1.0)], EVALUATION: [(0, 1.0), (1, 2.0)]})
    (first,) = run.iterdir()
    first.rename(run / "events.out.tfevents.9999999999.host")
    write_events(run, {TRAINING: [(2500, 2.0)], EVALUATION: [(0, 5.0), (1, 7.0)]})
    (result,) = read(run)[PONG]["qdagger"]
    np.testing.assert_array_equal(result.points[TRAINING], [(1500, 1.0), (2500, 2.0)])
    assert result.final_return == 6.0  # of the last evaluation


def test_runs_are_identified_by_their_names_and_the_same_seed_counts_once(tmp_path: Path, capsys) -> None:
    for number in (1, 2):
        points = {OFFLINE: [(300, 1.0)], EVALUATION: [(0, number)]}
        write_events(tmp_path / f"ALE-Pong-v5__my__script__12__{number}", points)
    (run,) = read(tmp_path)["ALE-Pong-v5"]["my__script"]
    assert (run.seed, run.offline_steps, run.final_return) == (12, 300, 2.0)
    assert "__1 and " in capsys.readouterr().err
    read(run.path, run.path / ".." / run.path.name)
    assert capsys.readouterr().err == ""  # the same directory given twice is not a second run


@pytest.mark.parametrize("damage", ["cut", "flipped bit", "no event"])
def test_a_damaged_file_is_used_up_to_the_damage(tmp_path: Path, capsys, damage: str) -> None:
    run = write_run(tmp_path, 1, {TRAINING: [(1000 + i, float(i)) for i in range(100)]})
    (path,) = run.iterdir()
    if damage == "no event":
        RecordWriter(path.open("ab")).write(b"\xff" * 9)  # with a correct checksum
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4 if damage == "flipped bit" else 0
        path.write_bytes(data[: -20 if damage == "cut" else None])
    write_events(run, {TRAINING: [(9000, -1.0)]})
    *returns, last = read(tmp_path)[PONG]["qdagger"][0].points[TRAINING][:, 1]
    assert returns == list(range({"cut": 99, "flipped bit": len(returns), "no event": 100}[damage]))
    assert len(returns) >= 99 or 30 < len(returns) < 70
    assert last == -1  # other files are read
    rest = rf"; using the first [\d,]+ of {path.stat().st_size:,} bytes\n"
    assert re.fullmatch(rf"warning: {path} (is damaged|can't be read) .*{rest}", capsys.readouterr().err)


def test_points_that_are_not_finite_are_left_out(tmp_path: Path, capsys) -> None:
    values = [1.0, float("nan"), 2.0, float("inf"), -float("inf"), 3.0]
    run = write_run(tmp_path, 1, {TRAINING: [(1500 + i, value) for i, value in enumerate(values)]})
    assert read(tmp_path)[PONG]["qdagger"][0].final_return == 2.0
    assert capsys.readouterr().err == f"warning: {run} has NaN or infinity in {TRAINING}; these points are left out\n"


@pytest.mark.parametrize("odd", [{"seed": "x"}, {"seed": "nan"}, {"offline_steps": "1e300"}, {}])
def test_a_run_that_is_not_understood_is_left_out(tmp_path: Path, capsys, odd: dict) -> None:
    write_run(tmp_path, 1, {TRAINING: [(1500, 1.0)]})
    flags = {"env_id": PONG, "exp_name": "qdagger", "seed": 2} | odd if odd else {}
    run = write_events(tmp_path / "odd", {TRAINING: [(500, 1.0)]}, flag_table(flags))
    assert [run.seed for run in read(tmp_path)[PONG]["qdagger"]] == [1]
    assert re.fullmatch(rf"warning: {run} has no valid .*; it is left out\n", capsys.readouterr().err)


def test_odd_files_and_text_do_not_end_the_report(tmp_path: Path) -> None:
    """Text that is not UTF-8, text that is not valid math, huge sizes, files without a record, a pipe, dead links."""
    write_events(tmp_path / f"{PONG}__qdagger__1__1", {TRAINING: [(5, 1.0)]}, b"|wandb_entity|\xff|\n|gamma|0.99|")
    write_run(tmp_path, 2, {TRAINING: [(1500, 1.0)], OFFLINE: [(10, 1.0)]}, script=r"$\frac$")
    write_run(tmp_path, 3, {TRAINING: [(2**62, 3e38)] * 2, OFFLINE: [(-5, 1.0)]}, offline_steps="1e18")
    run = write_run(tmp_path, 4, {TRAINING: [(1500, 1.0)]})
    (run / "events.out.tfevents.1").write_bytes(b"text" * 99)
    (run / "events.out.tfevents.2").mkdir()
    (run / "events.out.tfevents.3").symlink_to(tmp_path / "missing")
    (run / "events.out.tfevents.4").touch()
    os.mkfifo(run / "events.out.tfevents.5")
    report.main(report.Args(runs=[tmp_path], out=tmp_path / "report"))
    rows = {row["script"]: row["seeds"] for row in rows_of((tmp_path / "report/table.md").read_text())}
    assert rows.keys() == {"qdagger", r"$\frac$"}
    assert rows["qdagger"].startswith("3, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "no event files .* in missing"),
        (["losses"], "no run to report in losses"),
        (["good", "--out", "file"], "can't write to file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    write_events(Path("good"), {TRAINING: [(1500, 1.0)]}, flag_table({"env_id": PONG, "exp_name": "x", "seed": 1}))
    write_events(Path("losses"), {"losses/loss": [(1500, 1.0)]})
    Path("file").touch()
    with pytest.raises(SystemExit) as stop, one_line_errors():
        report.main(report.tyro.cli(report.Args, args=arguments))
    assert stop.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1
    assert re.match(f"error: {message}.*; give ", errors[0])


def test_the_table_has_the_values_of_the_runs(runs) -> None:
    root, written = runs
    groups = read(root)
    rows = {(row["environment"], row["script"]): row for row in rows_of(report.table(groups))}
    assert list(rows) == [(env_id, script) for env_id in (BREAKOUT, PONG) for script in ("qdagger", "scratch")]
    for (env_id, script), row in rows.items():
        points = [written[env_id, script, seed] for seed in (1, 2, 3)]
        returns = [np.mean([value for _, value in p.get(EVALUATION, p[TRAINING][-10:])]) for p in points]
        assert row["return"] == f"{np.mean(returns):.1f} ± {np.std(returns, ddof=1):.1f}"
        offline = [p[OFFLINE][-1][1] for p in points]
        assert row["after the offline phase"] == f"{np.mean(offline):.1f} ± {np.std(offline, ddof=1):.1f}"
        assert (row["teacher"], row["random policy"]) == ("19.5 ± 0.0", "-20.5 ± 0.0")
        share = np.mean([run.low_lambda_share for run in groups[env_id][script]])
        assert row["λ < 0.1"] == f"{100 * share:.0f} %"
        unfinished = (env_id, script) == (PONG, "qdagger")
        assert row["seeds"] == ("3, seed 3 at 50 %" if unfinished else "3")
        both = "2 × evaluation, 20 episodes; 1 × last 10 training episodes"
        assert row["measured by"] == (both if unfinished else "evaluation, 20 episodes")


def test_a_run_without_a_finished_episode_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path, 1, {TEACHER: [(0, 19.5)]})
    (row,) = rows_of(report.write_report(read(tmp_path), tmp_path / "report"))
    assert (row["seeds"], row["measured by"], row["teacher"]) == ("1, seed 1 at 0 %", "no finished episode", "19.5")
    assert "return" not in row  # an empty column is left out


def test_the_share_of_the_steps_with_low_lambda() -> None:
    """Each step has the λ logged last; before the first one λ is not low."""
    rng = np.random.default_rng(0)
    steps = np.sort(rng.choice(np.arange(1000, 3000), 40, replace=False))
    values = rng.choice([0.0, 0.05, 0.1, 0.5, 1.0], len(steps))
    nothing = {tag: np.zeros((0, 2)) for tag in report.TAGS}
    run = Run(Path(), PONG, "x", 1, 1000, 2000, 3000, nothing | {LAMBDA: np.stack([steps, values], axis=1)})
    each_step = [values[steps <= step][-1] if any(steps <= step) else 1.0 for step in range(1000, 3000)]
    assert run.low_lambda_share == pytest.approx(np.mean(np.array(each_step) < 0.1))
    for points in (np.zeros((0, 2)), np.array([[1000, 0.0], [2000, 0.0]])):  # DQN, and a student without distillation
        run.points[LAMBDA] = points
        assert np.isnan(run.low_lambda_share)


def naive_curve(points: list[tuple[int, float]], window: int, last_frame: int, frames: np.ndarray) -> list[float]:
    before = [[value for step, value in points if 4 * (step - 1000) <= frame][-window:] for frame in frames]
    return [np.mean(v) if v and frame <= last_frame else np.nan for v, frame in zip(before, frames, strict=True)]


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:Degrees of freedom")
def test_the_figure_shows_the_values_of_the_runs(runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root, written), figures = runs, []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    report.write_report(read(root), tmp_path)
    figure = figures[0]
    panels = {panel.get_suptitle(): panel.axes for panel in figure.subfigs if panel.axes}
    assert list(panels) == [BREAKOUT, PONG]
    for env_id, (online, strip) in panels.items():
        for axes, tag, window in ((online, TRAINING, 10), (strip, LAMBDA, 1)):
            lines = {line.get_label(): line.get_data() for line in axes.get_lines()}
            for script, band in zip(("qdagger", "scratch"), axes.collections, strict=True):
                frames, means = lines[script]
                points = [written[env_id, script, seed] for seed in (1, 2, 3)]
                curves = [naive_curve(p[tag], window, 80000 if EVALUATION in p else 40000, frames) for p in points]
                np.testing.assert_allclose(means, np.nanmean(curves, axis=0))
                top = np.nanmax(means + np.nanstd(curves, axis=0, ddof=1))
                assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(top)
        levels = {line.get_label(): set(line.get_ydata()) for line in online.get_lines()}
        assert (levels["teacher"], levels["random policy"]) == ({19.5}, {-20.5})
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"teacher", "random policy", "qdagger", "scratch"}
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 8


def test_every_script_has_its_own_look() -> None:
    looks = report.looks_of({"Pong": {f"script-{i}": [] for i in range(60)}})
    assert len({tuple(look.values()) for look in looks.values()}) == 60
