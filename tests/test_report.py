"""Tests of cleanrl_utils/report.py, over runs with known numbers that are written by the libraries that users have."""

import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cleanrl_utils import report
from cleanrl_utils.checks import UserError, one_line_errors
from cleanrl_utils.report import LAMBDA, OFFLINE, RANDOM, TEACHER, Run

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
PONG, BREAKOUT = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4"
RETURN, EVAL = "charts/episodic_return", "eval/episodic_return"
Points = dict[str, list[tuple[int, float]]]


def write_events(directory: Path, points: Points, flags: dict | None = None, writer: str = "tensorboardX") -> Path:
    """Writes scalars, and the table of flags, as the scripts do; returns the directory."""
    if writer == "tensorboardX":
        from tensorboardX import SummaryWriter
    else:
        from torch.utils.tensorboard import SummaryWriter
    events = SummaryWriter(str(directory))
    if flags is not None:
        events.add_text("hyperparameters", "|param|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in flags.items()))
    if flags and flags["exp_name"] == "scratch" and flags["seed"] == 2:
        events.add_text("warning", "of a collapse")
    new_style = {"new_style": True} if writer == "torch, new style" else {}
    for tag, values in points.items():
        for step, value in values:
            events.add_scalar(tag, value, step, **new_style)
    events.close()
    return directory


def write_run(
    root: Path,
    seed: int,
    points: Points,
    env_id: str = PONG,
    script: str = "qdagger",
    writer: str = "tensorboardX",
    **more,
) -> Path:
    """Writes a run of 1,000 offline updates and 20,000 online steps where ``more`` does not say otherwise."""
    flags = {"exp_name": script, "env_id": env_id, "seed": seed, "total_timesteps": 20000, "offline_steps": 1000} | more
    return write_events(root / f"{env_id}__{script}__{seed}__{1700000000 + seed}", points, flags, writer)


def read(*paths: Path) -> report.Groups:
    return report.read_groups(paths, {})


def cells(text: str) -> list[dict[str, str]]:
    """Rows of the first table in a Markdown text."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n\n")[0].splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def game_points(rng: np.random.Generator, level: float, last: int = 21000) -> Points:
    """What a run logs: offline evaluations, games and λ up to the step ``last``, losses, 20 games of evaluation."""
    steps = sorted(rng.choice(np.arange(1200, last, 8), 40, replace=False).tolist())
    points: Points = {
        TEACHER: [(0, 19.5)],
        RANDOM: [(0, -20.5)],
        OFFLINE: [(500, level - 8), (1000, level - 4)],
        "charts/offline/loss": [(step, 1 / step) for step in range(100, 1001, 100)],
        RETURN: [(step, float(np.round(level + rng.normal(0, 3)))) for step in steps],
        "charts/SPS": [(step, 80.0) for step in range(1000, last + 1, 40)],
        "losses/loss": [(step, float(rng.random())) for step in range(2000, last + 1, 40)],
    }
    over = np.array(steps)
    points[LAMBDA] = [(step, 1 / (1 + 4 * (int((over <= step).sum()) // 10))) for step in range(1000, last, 96)]
    if last == 21000:
        points[EVAL] = [(i, float(np.round(level + rng.normal(0, 3)))) for i in range(20)]
    return points


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str, int], Points]]:
    """Two games, two scripts, three seeds, of which one is unfinished; and what was written."""
    root, written = tmp_path_factory.mktemp("runs"), {}
    for env_id in (PONG, BREAKOUT):
        for script, level in (("qdagger", 17.0), ("scratch", -12.0)):
            for seed in (1, 2, 3):
                rng = np.random.default_rng([seed, len(script), len(env_id)])
                unfinished = (env_id, script, seed) == (PONG, "qdagger", 3)
                points = game_points(rng, level + seed, last=11000 if unfinished else 21000)
                write_run(root, seed, points, env_id, script)
                written[env_id, script, seed] = points
    return root, written


# ==================== reading ====================


@pytest.mark.parametrize("writer", ["tensorboardX", "torch", "torch, new style"])
def test_runs_of_every_writer_are_read(tmp_path: Path, writer: str) -> None:
    points = {TEACHER: [(0, 19.5)], OFFLINE: [(1000, 12.25)], RETURN: [(1500, 3.0), (1800, -4.5)], EVAL: [(0, 7.0)]}
    write_run(tmp_path, 3, points, script="qdagger_dqn_atari_impalacnn", writer=writer)
    (run,) = read(tmp_path)[PONG]["qdagger_dqn_atari_impalacnn"]
    assert (run.seed, run.offline_steps, run.total_steps, run.online_steps) == (3, 1000, 20000, 800)
    for tag, values in points.items():
        np.testing.assert_array_equal(run.points[tag], values)
    assert run.points[LAMBDA].shape == (0, 2)


def test_all_event_files_of_a_resumed_run_belong_to_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, 1, {RETURN: [(1500, 1.0)]})
    (first,) = run.iterdir()
    first.rename(run / "events.out.tfevents.1600000000.host")
    write_events(run, {RETURN: [(2500, 2.0)], EVAL: [(0, 5.0), (1, 7.0)]})
    (read_back,) = read(run)[PONG]["qdagger"]
    np.testing.assert_array_equal(read_back.points[RETURN], [(1500, 1.0), (2500, 2.0)])
    assert read_back.score == 6.0


def test_without_hyperparameters_the_name_says_what_was_run(tmp_path: Path) -> None:
    write_events(tmp_path / "ALE-Pong-v5__my__script__12__1700000000", {OFFLINE: [(300, 1.0)], RETURN: [(500, 1.0)]})
    ((env_id, scripts),) = read(tmp_path).items()
    ((script, (run,)),) = scripts.items()
    assert (env_id, script, run.seed, run.offline_steps) == ("ALE-Pong-v5", "my__script", 12, 300)


def test_hyperparameters_come_before_the_name(tmp_path: Path) -> None:
    flags = {"env_id": "ALE/Pong-v5", "exp_name": "dqn", "seed": 4}
    write_events(tmp_path / "Pong-v5__other__1__1700000000", {RETURN: [(500, 1.0)]}, flags)
    assert read(tmp_path)["ALE-Pong-v5"]["dqn"][0].seed == 4


def test_a_directory_that_does_not_say_what_was_run_is_left_out(tmp_path: Path, capsys) -> None:
    write_events(tmp_path / "notes", {RETURN: [(500, 1.0)]})
    write_run(tmp_path, 1, {RETURN: [(1500, 1.0)]})
    assert list(read(tmp_path)) == [PONG]
    assert re.search(r"^warning: .*notes is not named .*; it is left out$", capsys.readouterr().err)


def test_a_seed_that_was_run_twice_counts_once(tmp_path: Path, capsys) -> None:
    for name, score in (("1700000001", 1.0), ("1700000002", 2.0)):
        write_events(tmp_path / f"{PONG}__qdagger__1__{name}", {EVAL: [(0, score)]})
    (run,) = read(tmp_path)[PONG]["qdagger"]
    assert run.score == 2.0
    assert "1700000001 and " in capsys.readouterr().err
    assert len(read(run.path, tmp_path / "." / run.path.name)[PONG]["qdagger"]) == 1
    assert capsys.readouterr().err == ""  # the same directory is no second run


@pytest.mark.parametrize("damage", ["cut", "flipped bit"])
def test_of_a_damaged_file_the_part_before_is_used(tmp_path: Path, capsys, damage: str) -> None:
    run = write_run(tmp_path, 1, {RETURN: [(1000 + i, float(i)) for i in range(100)]})
    (path,) = run.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-20:]
    else:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)
    (read_back,) = read(tmp_path)[PONG]["qdagger"]
    returns = read_back.points[RETURN][:, 1]
    assert len(returns) == 99 if damage == "cut" else 30 < len(returns) < 70
    np.testing.assert_array_equal(returns, np.arange(len(returns)))
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {path} is damaged")
    assert warning.count("\n") == 1
    used = int(re.search(r"the first ([\d,]+) of", warning)[1].replace(",", ""))
    assert len(data) - 80 < used < len(data) if damage == "cut" else used <= len(data) // 2


def nothing(tmp_path: Path) -> list[str]:
    return []


def no_directory(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "none")]


def no_event_files(tmp_path: Path) -> list[str]:
    (tmp_path / "runs/a").mkdir(parents=True)
    return [str(tmp_path / "runs")]


def no_scalars(tmp_path: Path) -> list[str]:
    return [str(write_run(tmp_path, 1, {}))]


def not_an_event_file(tmp_path: Path) -> list[str]:
    (tmp_path / "events.out.tfevents.1").write_bytes(b"something else altogether" * 9)
    return [str(tmp_path)]


def unreadable(tmp_path: Path) -> list[str]:
    (tmp_path / "events.out.tfevents.1").mkdir()
    return [str(tmp_path)]


def out_is_a_file(tmp_path: Path) -> list[str]:
    (tmp_path / "file").touch()
    return [str(write_run(tmp_path, 1, {RETURN: [(1500, 1.0)]})), "--out", str(tmp_path / "file")]


def thin_into_a_file(tmp_path: Path) -> list[str]:
    write_run(tmp_path, 1, {RETURN: [(100, 1.0)]})
    (tmp_path / "file").touch()
    return [str(tmp_path), "--thin", str(tmp_path / "file")]


def thin_into_itself(tmp_path: Path) -> list[str]:
    write_run(tmp_path, 1, {RETURN: [(1500, 1.0)]})
    return [str(tmp_path), "--thin", str(tmp_path)]


BAD = {
    nothing: "no run was given",
    no_directory: "is no directory",
    no_event_files: "no event files",
    no_scalars: "no run with scalars",
    not_an_event_file: "no run with scalars",
    unreadable: "can't be read",
    out_is_a_file: "can't be written to",
    thin_into_a_file: "--thin .*file can't be written to",
    thin_into_itself: "would write into the run",
}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, capsys, bad) -> None:
    argv = [*bad(tmp_path)]
    with pytest.raises(SystemExit) as stop, one_line_errors():
        report.main(report.tyro.cli(report.Args, args=argv))
    assert stop.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1
    assert re.match(f"error: .*{BAD[bad]}.*; ", errors[0] + "; ")


def test_the_command_ends_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cleanrl_utils.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UserError, match=r"scipy.*pip install"):
        report.main(report.Args(runs=[tmp_path]))


# ==================== tables ====================


def test_the_table_says_what_the_runs_measured(runs) -> None:
    root, written = runs
    groups = read(root)
    rows = {(row["game"], row["script"]): row for row in cells(report.table(groups))}
    assert list(rows) == [(g, s) for g in (BREAKOUT, PONG) for s in ("qdagger", "scratch")]
    for (env_id, script), row in rows.items():
        games = []
        for seed in (1, 2, 3):
            points = written[env_id, script, seed]
            games.append([value for _, value in points.get(EVAL, points[RETURN][-10:])])
        means = [np.mean(scores) for scores in games]
        assert row["return"] == f"{np.mean(means):.1f} ± {np.std(means, ddof=1):.1f}"
        assert row["median game"] == f"{np.median(np.concatenate(games)):.1f}"
        good = [score >= 15.5 for score in np.concatenate(games)]  # −20.5 + 0.9 (19.5 + 20.5)
        assert row["good games"] == f"{100 * np.mean(good):.0f} %"
        untaught = np.mean([run.untaught for run in groups[env_id][script]])
        assert untaught > 0.05
        assert row["λ < 0.1"] == f"{100 * untaught:.0f} %"
        offline = [written[env_id, script, seed][OFFLINE][-1][1] for seed in (1, 2, 3)]
        assert row["after the offline phase"] == f"{np.mean(offline):.1f} ± {np.std(offline, ddof=1):.1f}"
        assert (row["teacher"], row["random"]) == ("19.5 ± 0.0", "-20.5 ± 0.0")
        assert "published" not in row  # there is nothing to say in this column
        unfinished = (env_id, script) == (PONG, "qdagger")
        warned = ", seed 2 warned" if script == "scratch" else ""
        assert row["seeds"] == ("3, seed 3 at 50 %" if unfinished else f"3{warned}")
        both = "2 × evaluation, 20 games; 1 × last 10 training games"
        assert row["measured by"] == (both if unfinished else "evaluation, 20 games")


def test_published_numbers_stand_beside_runs_of_the_same_name(tmp_path: Path) -> None:
    for seed, script in ((1, "qdagger_dqn_atari_impalacnn"), (1, "dqn_atari"), (1, "dqn_atari_x")):
        write_run(tmp_path, seed, {RETURN: [(1500, 1.0)]}, script=script)
    write_run(tmp_path, 1, {RETURN: [(1500, 1.0)]}, "QbertNoFrameskip-v4", "dqn_atari")
    rows = {(row["game"], row["script"]): row for row in cells(report.table(read(tmp_path)))}
    assert rows[PONG, "qdagger_dqn_atari_impalacnn"]["published"] == "19.7 ± 0.2"
    assert rows[PONG, "dqn_atari"]["published"] == "20.2 ± 0.4"
    assert "good games" not in rows[PONG, "dqn_atari"]  # no teacher says what is good
    assert rows[PONG, "dqn_atari_x"]["published"] == rows["QbertNoFrameskip-v4", "dqn_atari"]["published"] == ""


def test_a_run_in_which_no_game_is_over_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path, 1, {TEACHER: [(0, 19.5)], "charts/offline/loss": [(100, 0.5)]})
    (row,) = cells(report.table(read(tmp_path)))
    assert (row["seeds"], row["measured by"], row["teacher"]) == ("1, seed 1 at 0 %", "no game is over", "19.5")
    report.report(read(tmp_path), tmp_path / "report")


def test_the_share_of_the_steps_after_the_teaching() -> None:
    """Step by step: each has the λ that was last logged, and before the first one nothing has faded."""
    rng = np.random.default_rng(0)
    steps = np.sort(rng.choice(np.arange(1000, 3000), 40, replace=False))
    values = rng.choice([0.0, 0.05, 0.1, 0.5, 1.0], len(steps))
    points = {tag: np.zeros((0, 2)) for tag in report.TAGS}
    run = Run(Path(), PONG, "x", 1, 1000, 2000, 3000, points | {LAMBDA: np.stack([steps, values], axis=1)})
    held = [values[steps <= step][-1] if any(steps <= step) else 1.0 for step in range(1000, 3000)]
    assert run.untaught == pytest.approx(np.mean(np.array(held) < 0.1))
    for untaught in (np.zeros((0, 2)), np.array([[1000, 0.0], [2000, 0.0]])):  # a DQN; a student that nobody taught
        assert np.isnan(Run(Path(), PONG, "x", 1, 1000, 2000, 3000, points | {LAMBDA: untaught}).untaught)


def test_the_last_evaluation_counts() -> None:
    evaluations = [(0, 1.0), (1, 2.0), (2, 3.0), (0, 10.0), (1, 20.0)]
    points = {tag: np.zeros((0, 2)) for tag in report.TAGS} | {EVAL: np.array(evaluations)}
    run = Run(Path(), PONG, "x", 1, 0, 0, 0, points)
    assert run.score == 15.0
    assert not run.unfinished


# ==================== statistics ====================


@st.composite
def a_run(draw) -> Run:
    """A run with games and λ at any steps."""
    offline, steps = draw(st.integers(0, 50)), {}
    for tag in (RETURN, LAMBDA):
        times = sorted(draw(st.lists(st.integers(0, 200), max_size=30)))
        steps[tag] = np.array([(offline + t, draw(st.integers(-21, 21))) for t in times], float).reshape(-1, 2)
    return Run(Path(), PONG, "x", 1, offline, 0, offline + draw(st.integers(0, 250)), steps)


@given(a_run(), arrays(float, 7, elements=st.integers(0, 1000)))
def test_a_curve_is_the_mean_of_the_last_ten_games_or_the_last_value(run: Run, frames: np.ndarray) -> None:
    for tag, many in ((RETURN, 10), (LAMBDA, 1)):
        for x, found in zip(frames, run.curve(tag, frames), strict=True):
            before = [value for step, value in run.points[tag] if 4 * (step - run.offline_steps) <= x]
            expected = np.mean(before[-many:]) if before and x <= 4 * run.online_steps else np.nan
            np.testing.assert_allclose(found, expected, atol=1e-9)


scores = st.floats(-100, 100).map(lambda x: round(x, 3))


@given(arrays(float, st.tuples(st.integers(1, 6), st.integers(1, 4)), elements=scores | st.just(np.nan)))
def test_mean_and_interval_are_those_of_the_seeds_that_are_there(values: np.ndarray) -> None:
    for column, found in zip(values.T, np.transpose(report.mean_and_interval(values)), strict=True):
        known = column[~np.isnan(column)]
        expected = [known.mean() if len(known) else np.nan, np.nan, np.nan]
        if len(known) > 1:
            error = known.std(ddof=1) / np.sqrt(len(known))
            expected[1:] = expected[0] + error * np.array(scipy.stats.t.ppf([0.025, 0.975], len(known) - 1))
        np.testing.assert_allclose(found, expected, atol=1e-6)


@given(arrays(float, st.tuples(st.integers(1, 3), st.integers(1, 20)), elements=scores))
def test_interquartile_mean(values: np.ndarray) -> None:
    quarter = values.shape[1] // 4
    expected = np.sort(values, axis=1)[:, quarter : values.shape[1] - quarter].mean(axis=1)
    np.testing.assert_allclose(report.interquartile_mean(values), expected, atol=1e-9)


def games_of(seeds: st.SearchStrategy[int]) -> st.SearchStrategy[list[np.ndarray]]:
    return st.lists(seeds.flatmap(lambda n: arrays(float, n, elements=scores)), min_size=1, max_size=3)


@given(games_of(st.integers(2, 4)), st.floats(0.1, 10), scores)
def test_the_stratified_interval_holds_the_estimate_and_moves_with_the_scores(games, factor, shift) -> None:
    point, low, high = report.stratified(games, report.interquartile_mean)
    assert low - 1e-9 <= point <= high + 1e-9
    assert min(game.min() for game in games) - 1e-9 <= low
    assert high <= max(game.max() for game in games) + 1e-9
    moved = report.stratified([factor * game + shift for game in games], report.interquartile_mean)
    np.testing.assert_allclose(moved, factor * np.array([point, low, high]) + shift, atol=1e-6)


@given(scores, scores)
def test_the_interval_of_two_seeds_is_known_exactly(a: float, b: float) -> None:
    """Their mean is a, (a + b) / 2 or b, with probabilities 1/4, 1/2, 1/4: 2.5 and 97.5 % lie within the outer ones."""
    np.testing.assert_allclose(report.stratified([np.array([a, b])], np.mean), [(a + b) / 2, min(a, b), max(a, b)])


def test_seeds_are_drawn_within_their_game() -> None:
    games = [np.array([0.0, 0.0, 0.0]), np.array([10.0, 10.0, 10.0])]
    np.testing.assert_array_equal(report.stratified(games, np.mean), [5, 5, 5])


def test_a_single_seed_has_no_interval() -> None:
    point, low, high = report.stratified([np.array([1.0]), np.array([2.0, 3.0])], np.mean)
    assert point == 2
    assert np.isnan([low, high]).all()


@given(arrays(float, (5, 3), elements=scores))
def test_the_interval_of_a_curve_draws_the_same_seeds_at_all_its_points(curves: np.ndarray) -> None:
    together = report.stratified([curves], report.interquartile_mean)
    for i, curve in enumerate(curves):
        alone = report.stratified([curve], report.interquartile_mean)
        np.testing.assert_allclose([values[i] for values in together], alone, atol=1e-9)


def run_of(points: Points, env_id: str = PONG, script: str = "x", seed: int = 1) -> Run:
    arrays = {tag: np.array(points.get(tag, []), float).reshape(-1, 2) for tag in report.TAGS}
    return Run(Path(), env_id, script, seed, 0, 0, 1000, arrays)


@given(scores, scores.filter(lambda x: abs(x) > 1), st.floats(-2, 2))
def test_normalised_scores_are_0_at_random_and_1_at_the_teacher(random: float, above: float, share: float) -> None:
    points = {RANDOM: [(0, random)], TEACHER: [(0, random + above)], EVAL: [(0, random + share * above)]}
    games = report.normalised({PONG: {"x": [run_of(points)]}}, "x", "teacher")
    if above < 0:  # a teacher that is no better than random is no measure
        assert games == []
    else:
        np.testing.assert_allclose(games, [[share]], atol=1e-6)


def test_teacher_and_random_are_means_over_all_runs_of_the_game() -> None:
    one = run_of({RANDOM: [(0, -21.0)], TEACHER: [(0, 18.0)], EVAL: [(0, 0.0)]})
    other = run_of({RANDOM: [(0, -19.0)], TEACHER: [(0, 20.0)], EVAL: [(0, 0.0)]}, script="y")
    neither = run_of({EVAL: [(0, 19.0)]}, script="dqn")
    groups = {PONG: {"x": [one], "y": [other], "dqn": [neither]}}
    assert report.scale(PONG, groups[PONG], "teacher") == (-20.0, 19.0)
    assert report.normalised(groups, "dqn", "teacher")[0] == 1.0


@pytest.mark.parametrize("env_id", [PONG, "ALE-Pong-v5"])
def test_human_scores_and_what_stands_in_for_random(env_id: str) -> None:
    runs = {"x": [run_of({TEACHER: [(0, 14.6)], EVAL: [(0, -20.7)]})]}  # CleanRL's have no random player
    assert report.scale(env_id, runs, "human") == report.scale(env_id, runs, "teacher") == (-20.7, 14.6)
    assert report.scale("TennisNoFrameskip-v4", runs, "human") is None
    assert report.scale("TennisNoFrameskip-v4", runs, "teacher") is None


def test_the_table_over_games(runs) -> None:
    groups = read(runs[0])
    means = [run.score for env_id in groups for run in groups[env_id]["scratch"]]
    expected = scipy.stats.trim_mean((np.array(means) + 20.5) / 40, 0.25)
    row = cells(report.table(groups).split("\n\n", 2)[2])[1]
    point, low, high = (float(x) for x in re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", row["IQM, teacher = 1"]).groups())
    assert point == pytest.approx(expected, abs=0.005)
    assert low <= point <= high
    assert row["games"] == "2"


# ==================== figures ====================


def lines_of(axes) -> dict[str, np.ndarray]:
    return {line.get_label(): np.array(line.get_data()) for line in axes.get_lines()}


def test_the_curves_show_what_the_runs_measured(runs) -> None:
    root, written = runs
    groups = read(root)
    figure = plt.figure()
    report.draw_curves(figure, groups)
    panels = {panel.get_suptitle(): panel.axes for panel in figure.subfigs if panel.axes}
    assert list(panels) == [BREAKOUT, PONG]
    for env_id, (offline, online, _, strip) in panels.items():
        lines, below = lines_of(online), lines_of(strip)
        assert (lines["teacher"][1] == 19.5).all()
        assert (lines["random"][1] == -20.5).all()
        for script in ("qdagger", "scratch"):
            x, y = lines[script]  # thousands of frames
            assert x[-1] == pytest.approx(80)
            for at in (60, 100, 140):
                known = []
                for seed in (1, 2, 3):
                    games = [
                        v for step, v in written[env_id, script, seed][RETURN] if 4 * (step - 1000) <= 1000 * x[at]
                    ]
                    if seed < 3 or script == "scratch" or env_id == BREAKOUT or at < 101:  # one was stopped half-way
                        known.append(np.mean(games[-10:]))
                assert y[at] == pytest.approx(np.mean(known))
            assert below[script][1][0] == 1
            assert below[script][1][-1] < 0.5
        points = np.concatenate([line.get_xydata() for line in offline.get_lines() if len(line.get_xdata()) == 6])
        expected = [v for s in ("qdagger", "scratch") for i in (1, 2, 3) for _, v in written[env_id, s, i][OFFLINE]]
        np.testing.assert_allclose(points[:, 1], expected)
        assert "frames" in strip.get_xlabel()
        assert "updates" in figure.subfigs[0].axes[2].get_xlabel()
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"teacher", "random", "qdagger", "scratch"}
    looks = report.looks_of(groups)
    assert len({look["linestyle"] for look in looks.values()}) == len({look["marker"] for look in looks.values()}) == 2
    plt.close(figure)


def test_every_script_has_a_look_of_its_own() -> None:
    """More of them than there are colours."""
    looks = report.looks_of({"Pong": {f"script-{i}": [] for i in range(20)}})
    assert len({tuple(look.values()) for look in looks.values()}) == 20


def test_profile_and_sample_efficiency(runs) -> None:
    groups = read(runs[0])
    figure = plt.figure()
    report.draw_overall(figure, groups)
    _, profiles, efficiency = figure.axes
    for script in ("qdagger", "scratch"):
        group = [run for scripts in groups.values() for run in scripts[script]]
        scaled = (np.array([run.score for run in group]) + 20.5) / 40
        thresholds, fractions = lines_of(profiles)[f"{script} (2 games)"]
        np.testing.assert_allclose(fractions, [np.mean(scaled > threshold) for threshold in thresholds])
        x, y = lines_of(efficiency)[f"{script} (2 games)"]
        assert 1000 * x[-1] == 4 * min(run.online_steps for run in group)
        returns = [run.curve(RETURN, 1000 * x[[0, 50, -1]]) for run in group]
        expected = scipy.stats.trim_mean((np.array(returns) + 20.5) / 40, 0.25)
        np.testing.assert_allclose(y[[0, 50, -1]], expected, atol=1e-9)
    plt.close(figure)


# ==================== commands ====================


def test_thinned_runs_make_the_same_report(runs, tmp_path: Path, capsys) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root, written = runs
    report.main(report.Args(runs=[root], thin=tmp_path / "thin"))
    assert sum(path.stat().st_size for path in (tmp_path / "thin").rglob("events*")) < 0.7 * sum(
        path.stat().st_size for path in root.rglob("events*")
    )
    for kept, folder in ((False, root), (True, tmp_path / "thin")):
        report.main(report.Args(runs=[folder], out=tmp_path / str(kept)))
        assert (tmp_path / str(kept) / "table.md").read_text() in capsys.readouterr().out
    for name in ("table.md", "curves.png", "curves.svg", "overall.png", "overall.svg"):
        assert (tmp_path / "True" / name).read_bytes() == (tmp_path / "False" / name).read_bytes(), name
    image = plt.imread(tmp_path / "True/curves.png")
    assert image.std() > 0.05  # something is drawn

    name = f"{PONG}__scratch__2__1700000002"
    events = EventAccumulator(str(tmp_path / "thin" / name), size_guidance={"scalars": 0})  # TensorBoard's own reader
    events.Reload()
    points = written[PONG, "scratch", 2]
    assert set(events.Tags()["scalars"]) == set(points)
    assert events.Tags()["tensors"] == ["hyperparameters/text_summary", "warning/text_summary"]
    for tag in (RETURN, EVAL, OFFLINE, TEACHER, RANDOM):
        assert [(e.step, e.value) for e in events.Scalars(tag)] == points[tag]
    assert len(points["losses/loss"]) > len(events.Scalars("losses/loss")) == 200
    assert events.Scalars("charts/SPS")[-1].step == points["charts/SPS"][-1][0]

    (thinned,) = (tmp_path / "thin" / name).iterdir()
    again = report.thin(thinned.parent, tmp_path / "again")
    assert again.read_bytes() == thinned.read_bytes()


def test_watch_reports_again_what_has_changed(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = write_run(tmp_path / "runs", 1, {RETURN: [(1500, 1.0)], EVAL: [(0, 4.0)]})
    running = write_run(tmp_path / "runs", 2, {RETURN: [(1500, 2.0)]})
    was_read, tables, rounds = [], [], iter(range(9))
    read_run = report.read_run
    monkeypatch.setattr(report, "read_run", lambda path: was_read.append(path) or read_run(path))
    monkeypatch.setattr(report, "save_figures", lambda groups, out: None)

    def sleep(seconds: float) -> None:
        assert seconds == 7
        tables.append("".join(capsys.readouterr()))
        this = next(rounds)
        if this == 0:
            (path,) = running.iterdir()
            path.rename(running / "events.out.tfevents.1600000000.host")
            write_events(running, {RETURN: [(2500, 8.0)]})
        elif this == 1:
            running.rename(tmp_path / "away")
            finished.rename(tmp_path / "gone")
        elif this == 2:
            (tmp_path / "gone").rename(finished)
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(report.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        report.main(report.Args(runs=[tmp_path / "runs"], out=tmp_path / "report", watch=True, every=7))
    assert was_read == [finished, running, running]
    returns = [cells(text[text.index("| game") :])[0]["return"] for text in tables if "| game" in text]
    assert returns == ["3.0 ± 1.4", "4.5 ± 0.7", "4.0"]
    assert tables[2].startswith("no report: no event files")
    assert len(tables) == 4
