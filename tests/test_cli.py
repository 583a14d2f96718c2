"""The scripts as a user runs them: whole small runs, their logs and files, and wrong input."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import dqn_atari
import dqn_atari_jax
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
import tyro
from flax.serialization import to_bytes
from helpers import (
    DQN,
    DQN_JAX,
    GAME,
    NETWORKS,
    NUM_ACTIONS,
    PYTHONPATH,
    REPO,
    STUDENT,
    STUDENT_JAX,
    TIMED_TAGS,
    Scalars,
    flax_params,
    only,
    read_scalars,
    run_script,
    tiny,
    twin,
    without_torch,
    write_teacher,
)
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin

from cleanrl_utils import enjoy
from cleanrl_utils.checkpoint import Checkpoints
from cleanrl_utils.checks import Range, annotations, check_args, size_problem
from cleanrl_utils.errors import UserError, flag, warn
from cleanrl_utils.evaluation import summarise, warn_of_weak_teacher
from cleanrl_utils.models import convert, read_arrays
from cleanrl_utils.run import Run, parse_args

each_script = pytest.mark.parametrize("script", list(NETWORKS), ids=lambda script: script.__name__)
TEACHER_TAGS = {"charts/teacher/avg_episodic_return", "charts/random/avg_episodic_return"}
EVALUATION_TAGS = TEACHER_TAGS | {"charts/final/avg_episodic_return", "eval/episodic_return"}
OFFLINE_TAGS = {f"charts/offline/{tag}" for tag in ("loss", "q_loss", "distill_loss", "updates_per_second")}
EPISODE_TAGS = {"charts/episodic_return", "charts/episodic_length"}
ONLINE_TAGS = {f"charts/{tag}" for tag in ("epsilon", "distill_coeff", "SPS")}
LOSS_TAGS = {f"losses/{tag}" for tag in ("loss", "td_loss", "distill_loss", "q_values")}


# ==================== a whole run ====================


class FinishedRun(NamedTuple):
    """A run and its results."""

    script: str
    folder: Path
    run_dir: Path
    scalars: Scalars
    stdout: str


SHORT_EPISODES = """
import os, runpy, signal, sys
from cleanrl_utils import atari, run
atari.MAX_FRAMES = 240
save_if_due, stop_at = run.Run.save_if_due, int(sys.argv[1])

def interrupt(self, *args, **kwargs):
    if self._state["progress"].offline_update == stop_at:
        signal.raise_signal(signal.SIGTERM)  # os.kill would end the process on Windows
    save_if_due(self, *args, **kwargs)

run.Run.save_if_due = interrupt
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script with episodes of 60 steps; a signal stops it after some offline updates."""
FULL_GAME = "AlienNoFrameskip-v4"  # any policy has returns above 0 in Alien
FULL_STEPS = 1100
SWEEP_RUN = "run-of-a-sweep"


@pytest.fixture(scope="module", params=[STUDENT, STUDENT_JAX])
def full_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> FinishedRun:
    """Run each script once with as many features as possible, tracked by W&B; stop and resume that of PyTorch.

    That of PyTorch starts as W&B's agents start a run of a sweep, and is resumed without their variables. PyTorch can't
    be imported in the run of JAX, which therefore films no videos.
    """
    folder = tmp_path_factory.mktemp("full")
    script = request.param
    flags = "--seed 2 --num-envs 4 --teacher-eval-episodes 1 --eval-episodes 5 --teacher-steps 200 --offline-steps 100 "
    flags += f"--offline-eval-frequency 65 --total-timesteps {FULL_STEPS} --learning-starts 40 --buffer-size 200 "
    flags += "--batch_size 4 --train_frequency 32 --exploration-fraction 0.5 --end-e 0.8 --temperature 1 --save-model "
    flags += f"--n-step 3 --distill-coefficient 2 --env-id {FULL_GAME} --track "
    flags += "--online-eval-frequency 500 "
    environ = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    if script == STUDENT:
        flags += f"--teacher_policy_hf_repo {teacher} --teacher-model-exp-name {DQN} --capture-video"
    else:
        flags += f"--teacher_policy_hf_repo {folder}"
        params = flax_params(read_arrays(teacher / f"{DQN}.cleanrl_model"))
        (folder / f"{DQN_JAX}.cleanrl_model").write_bytes(to_bytes(params))
        environ["PYTHONPATH"] = f"{without_torch(folder / 'no')}{os.pathsep}{REPO}"
    command = [sys.executable, "-c", SHORT_EPISODES, "80" if script == STUDENT else "-1"]
    command += [str(REPO / "cleanrl" / f"{script}.py")]
    environ |= {"TQDM_DISABLE": "1", "TQDM_DESC": "x"}
    sweep = {"WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": SWEEP_RUN, "WANDB_PROJECT": "of-sweep"} if script == STUDENT else {}
    options = {"cwd": folder, "capture_output": True, "encoding": "utf-8", "timeout": 600}
    result = subprocess.run([*command, *flags.split()], env=environ | sweep, **options)
    assert result.returncode == (143 if script == STUDENT else 0), result.stderr
    run_dir = only((folder / "runs").iterdir())
    if script == STUDENT:
        command[3] = "-1"
        result = subprocess.run([*command, "--resume", str(run_dir.relative_to(folder))], env=environ, **options)
        assert result.returncode == 0, result.stderr
    return FinishedRun(script, folder, run_dir, read_scalars(run_dir), result.stdout)


def test_metrics(full_run: FinishedRun) -> None:
    """Every tag has its steps: 0…100 in the offline phase, from there on online, every 100 environment steps."""
    steps = {tag: [step for step, _ in points] for tag, points in full_run.scalars.items()}
    online = [100 + step for step in range(0, FULL_STEPS, 4) if step // 100 < (step + 4) // 100]
    assert len(online) == 11
    episodes = {tag: steps.pop(tag) for tag in EPISODE_TAGS}
    assert steps == {
        **{tag: [0, 100 + FULL_STEPS] for tag in TEACHER_TAGS},
        "charts/teacher/SPS": [0],
        **{tag: [100] for tag in OFFLINE_TAGS},
        "charts/offline/avg_episodic_return": [65, 100],
        "charts/online/avg_episodic_return": [600, 1100],
        **dict.fromkeys(ONLINE_TAGS | LOSS_TAGS, online),
        "charts/final/avg_episodic_return": [100 + FULL_STEPS],
        "eval/episodic_return": [100 + FULL_STEPS + i for i in range(5)],
    }
    for tag, found in episodes.items():
        assert found == sorted(found), tag
        assert 100 <= found[0] <= found[-1] < 100 + FULL_STEPS, tag
    assert all(np.isfinite(value) for points in full_run.scalars.values() for _, value in points)


def watch(printed: str) -> list[str]:
    """Run the command that watches the agent; return its words."""
    words = shlex.split(re.search("^watch the agent: +(.*)$", printed, re.MULTILINE)[1])
    assert words[:3] == ["python", "-m", "cleanrl_utils.enjoy"]
    enjoy.main(tyro.cli(enjoy.Args, args=[*words[3:], "--eval-episodes", "1"]))
    return words


def test_summary(full_run: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The last lines give the mean return of every evaluation, as TensorBoard does, and where the videos are.

    Where there are none, it is a command that films an episode.
    """
    _, heading, summary = full_run.stdout.rpartition(f"{FULL_GAME}, episodes at epsilon 0.8")
    assert heading
    means = {name.strip(): float(mean) for name, mean in re.findall(r"^  (.*?) +(-?[\d.]+) ±", summary, re.MULTILINE)}
    scalars = full_run.scalars
    offline = dict(scalars["charts/offline/avg_episodic_return"])
    online = dict(scalars["charts/online/avg_episodic_return"])
    assert means == {
        "teacher": pytest.approx(scalars["charts/teacher/avg_episodic_return"][0][1], abs=0.06),
        "random": pytest.approx(scalars["charts/random/avg_episodic_return"][0][1], abs=0.06),
        "offline 65": pytest.approx(offline[65], abs=0.06),
        "offline 100": pytest.approx(offline[100], abs=0.06),
        "online 500": pytest.approx(online[600], abs=0.06),
        "online 1000": pytest.approx(online[1100], abs=0.06),
        "final": pytest.approx(scalars["charts/final/avg_episodic_return"][0][1], abs=0.06),
    }
    for tag in TEACHER_TAGS:
        assert scalars[tag][0][1] == scalars[tag][1][1], tag
    if full_run.script == STUDENT:
        assert f"\nvideos:              videos/{full_run.run_dir.name}\n" in summary
        assert "enjoy" not in summary
        return
    assert "videos" not in summary
    assert f"\npicture:             runs/{full_run.run_dir.name}/curves.png\n" in summary
    monkeypatch.chdir(full_run.folder)
    monkeypatch.setattr("cleanrl_utils.atari.MAX_FRAMES", 240)
    words = watch(summary)
    assert words[-5:] == ["--env-id", FULL_GAME, "--epsilon", "0.8", "--capture-video"]
    model = Path("runs", full_run.run_dir.name, f"{full_run.script}.cleanrl_model")
    played, video = re.findall("(?:with|video:) (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert Path(played) == model
    assert Path(video).is_file()


def test_files(full_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directory has a model of each evaluation and nothing unfinished; the videos are where they should be."""
    script = full_run.script
    run_dir = full_run.run_dir
    assert re.fullmatch(rf"{FULL_GAME}__{script}__2__\d+", run_dir.name)
    evaluations = ("-offline-65", "-offline-100", "-online-500", "-online-1000", "")
    names = [f"{script}{evaluation}.cleanrl_model" for evaluation in evaluations]
    others = {path.name for path in run_dir.iterdir() if "tfevents" not in path.name}
    assert others == {*names, "curves.png", "finished", "wandb_id", ".lock"}
    weights = [convert(read_arrays(run_dir / name), "torch")[0] for name in names]
    assert all(w.keys() == qdagger.QNetwork(NUM_ACTIONS).state_dict().keys() for w in weights)
    for before, after in itertools.pairwise(weights):
        assert not np.array_equal(before["network.0.conv.weight"], after["network.0.conv.weight"])
    videos = {path.stem for path in (full_run.folder / "videos" / run_dir.name).glob("*.mp4")}
    expected = {"teacher", "random", "offline-65", "offline-100", "online-500", "online-1000", "final"}
    assert videos == (expected if script == STUDENT else set())


def test_charts(full_run: FinishedRun) -> None:
    """TensorBoard shows the returns of student and teacher in one chart and losses in another, in a resumed run too."""
    runs = str(full_run.run_dir.parent)
    server = EventMultiplexer().AddRunsFromDirectory(runs).Reload()
    context = TBContext(data_provider=MultiplexerDataProvider(server, runs), plugin_name_to_instance={})
    context.plugin_name_to_instance["scalars"] = ScalarsPlugin(context)
    plugin = CustomScalarsPlugin(context)
    (category,) = json.loads(plugin.layout_impl(RequestContext(), ""))["category"]
    shown = {}
    for chart in category["chart"]:
        for tag in chart["multiline"]["tag"]:
            answer = plugin.scalars_impl(RequestContext(), full_run.run_dir.name, tag, "")
            shown.setdefault(chart["title"], []).extend(answer["tag_to_events"])
    assert {title: sorted(tags) for title, tags in shown.items()} == {
        "Returns": sorted(tag for tag in full_run.scalars if re.match("charts/.*episodic_return$", tag)),
        "Losses": sorted(tag for tag in full_run.scalars if tag.endswith("loss")),
    }
    assert len(shown["Returns"]) == 6
    assert len(shown["Losses"]) == 6


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of W&B, which has blocks of 32 kB as the logs of LevelDB have."""
    data = path.read_bytes()
    position = 7
    record = b""
    while position < len(data):
        if (left := -position % 2**15) and left < 7:
            position += left
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_tracking(full_run: FinishedRun) -> None:
    """W&B gets every point of TensorBoard and the videos, in one W&B run, also when the run is resumed.

    A sweep reads its metric in the summary: the mean return of the final evaluation.
    """
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    wandb_id = (full_run.run_dir / "wandb_id").read_text()
    curves = full_run.scalars
    points = {}
    summary = {}
    files = sorted(full_run.folder.glob("wandb/offline-run-*/*.wandb"))
    assert [path.stem for path in files] == [f"run-{wandb_id}"] * (2 if full_run.script == STUDENT else 1)
    assert (wandb_id == SWEEP_RUN) == (full_run.script == STUDENT)
    for data in itertools.chain(*map(wandb_records, files)):
        record = proto.Record.FromString(data)
        if record.HasField("run"):
            assert record.run.project == ("of-sweep" if full_run.script == STUDENT else "cleanRL")
        items = record.history.item
        history = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for tag, value in history.items():
            points.setdefault(tag, set()).add((history.get("global_step"), np.float32(value) if tag in curves else 0))
        for item in record.summary.update:
            summary[item.key or "/".join(item.nested_key)] = item.value_json
    for tag, expected in curves.items():
        assert points[tag] <= {(step, np.float32(value)) for step, value in expected}, tag
        assert {step for step, _ in points[tag]} == {step for step, _ in expected}, tag
    final_returns = [value for _, value in curves["eval/episodic_return"]]
    assert json.loads(summary["charts/final/avg_episodic_return"]) == np.mean(final_returns)
    assert any(tag.startswith("videos/final") for tag in points) == (full_run.script == STUDENT)


# ==================== runs in this process ====================


@pytest.fixture
def run(small_networks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], Path]:
    """Return a function that runs a script with small networks in a folder of its own and returns its directory."""

    def main(script: Any, args: Any) -> Path:
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        script.main(args)
        return only((folder / "runs").iterdir())

    return main


def test_student_is_the_teacher(
    full_run: FinishedRun, run: Callable, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student of either library teaches the next one, here from the first online step on and in a -v5 game."""
    monkeypatch.setattr(qdagger, "QNetwork", NETWORKS[qdagger])
    flags = {"env_id": "ALE/Klax-v5", "offline_steps": 0, "distill_coefficient": 0.0, "total_timesteps": 110}
    flags |= {"save_model": False, "train_frequency": 50}
    run_dir = run(qdagger, tiny(full_run.run_dir, teacher_model_exp_name=full_run.script, **flags))
    assert run_dir.name.startswith("ALE-Klax-v5__")
    assert not list(run_dir.glob("*.cleanrl_model")), "a model was saved with --no-save-model"
    scalars = read_scalars(run_dir)
    assert scalars.keys() == (EVALUATION_TAGS | ONLINE_TAGS | LOSS_TAGS) | (scalars.keys() & EPISODE_TAGS)
    assert scalars["losses/loss"] == [(98, value) for _, value in scalars["losses/td_loss"]]
    assert scalars["charts/distill_coeff"] == [(98, 0.0)]
    assert not re.search(r"^  offline", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("script", [qdagger, qdagger_jax])
def test_pretraining_alone(
    script: Any, teacher: Path, run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """``--total-timesteps 0`` ends after the offline phase; a teacher as good as the random policy gets a warning.

    The teacher is a policy, and samples wherever it acts.
    """
    params = flax_params(read_arrays(teacher / f"{DQN}.cleanrl_model"))
    params["params"]["actor"] = params["params"].pop("Dense_1")
    path = tmp_path / "policy"
    path.write_bytes(to_bytes(params))
    evaluations = []
    temperatures = []
    choose = script.epsilon_greedy
    monkeypatch.setattr(script, "epsilon_greedy", lambda *args: temperatures.append(args[3]) or choose(*args))

    def play_episodes(name: str, act: Callable, *_: Any) -> list[float]:
        evaluations.append(name)
        act(np.zeros((2, 4, 84, 84), np.uint8), np.random.default_rng(1))
        return [7.0, 8.0]

    monkeypatch.setattr(script, "play_episodes", play_episodes)
    args = tiny(path, total_timesteps=0, save_model=True)
    run_dir = run(script, twin(args, script))
    assert evaluations == ["teacher", "random", "offline 4", "final"]
    # The evaluations of the teacher and the random policy, the teacher's data, two evaluations of the student.
    assert temperatures == [0.1] * 2 + [0.1] * 30 + [0.0] * 2
    scalars = read_scalars(run_dir)
    assert not scalars.keys() & (ONLINE_TAGS | LOSS_TAGS)
    assert scalars["eval/episodic_return"] == [(4, 7.0), (5, 8.0)]
    models = [run_dir / f"{script.__name__}{suffix}.cleanrl_model" for suffix in ("", "-offline-4")]
    assert models[0].read_bytes() == models[1].read_bytes()
    out, err = capsys.readouterr()
    assert err.count("WARNING: the teacher is not clearly better than the random policy (7.5 against 7.5)") == 1
    assert re.search(r"^  offline 4 +7.5 ± +0.5$", out, re.MULTILINE)


@pytest.mark.parametrize("script", [qdagger, qdagger_jax])
def test_same_seed_same_run(script: Any, teacher: Path, run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs with the same seed have the same curves and models; another seed has others."""
    monkeypatch.setattr("cleanrl_utils.atari.MAX_FRAMES", 200)
    flags = {"offline_steps": 100, "offline_eval_frequency": 100, "total_timesteps": 130}
    curves = []
    models = []
    for seed in (3, 3, 4):
        np.random.seed(len(curves))  # noqa: NPY002  the global generator must not matter
        run_dir = run(script, twin(tiny(teacher, seed=seed, train_frequency=10, **flags), script))
        scalars = read_scalars(run_dir)
        curves.append({tag: points for tag, points in scalars.items() if tag not in TIMED_TAGS})
        models.append((run_dir / f"{script.__name__}.cleanrl_model").read_bytes())
    assert curves[0].keys() >= (EVALUATION_TAGS | OFFLINE_TAGS | ONLINE_TAGS | LOSS_TAGS) - TIMED_TAGS
    assert (curves[0], models[0]) == (curves[1], models[1])
    assert curves[0]["losses/td_loss"] != curves[2]["losses/td_loss"]
    assert models[0] != models[2]


@pytest.mark.parametrize(("script", "library"), [(dqn_atari, qdagger), (dqn_atari_jax, qdagger_jax)])
def test_dqn_makes_a_teacher(
    script: Any, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """DQN logs its curves, and prints its results beside those of the random policy and how to watch it.

    QDagger loads its model as a teacher with the same Q-values.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cleanrl_utils.atari.MAX_FRAMES", 200)
    flags = {"num_envs": 1, "total_timesteps": 110, "learning_starts": 40, "buffer_size": 80, "batch_size": 4}
    flags |= {"train_frequency": 50, "n_step": 3, "eval_frequency": 60, "eval_episodes": 2, "end_e": 0.4}
    agents = []
    make_agent = script.Agent
    monkeypatch.setattr(script, "Agent", lambda *args: agents.append(make_agent(*args)) or agents[0])
    script.main(script.Args(env_id=FULL_GAME, **flags))
    run_dir = only(Path("runs").iterdir())
    scalars = read_scalars(run_dir)
    tags = {"charts/epsilon", "charts/SPS", "losses/td_loss", "losses/q_values"}
    assert {tag: [step for step, _ in scalars[tag]] for tag in tags} == {tag: [99] for tag in tags}
    means = {name: scalars[f"charts/{name}/avg_episodic_return"] for name in ("random", "online", "final")}
    assert {name: [step for step, _ in points] for name, points in means.items()} == {
        "random": [0], "online": [60], "final": [110]
    }  # fmt: skip
    assert [step for step, _ in scalars["eval/episodic_return"]] == [110, 111]

    path = run_dir / f"{script.__name__}.cleanrl_model"
    hardware = library.choose_hardware(library.Args())
    observation = np.random.default_rng(1).integers(0, 256, (2, 4, 84, 84), dtype=np.uint8)
    q_values = library.Teacher(path, NUM_ACTIONS, 1.0, hardware).q_values(observation)
    np.testing.assert_allclose(q_values, agents[0].q_values(observation), atol=1e-6)

    printed = capsys.readouterr().out
    table = printed[printed.index(f"\n{FULL_GAME}, episodes at epsilon 0.4 (random: 1), after environment steps\n") :]
    rows = re.findall(r"^  (\w+(?: \d+)?) +([\d.]+) ± +[\d.]+$", table, re.MULTILINE)
    assert [name for name, _ in rows] == ["random", "online 60", "final"]
    assert [float(mean) for _, mean in rows] == [pytest.approx(points[0][1], abs=0.06) for points in means.values()]
    assert watch(table)[-3:] == ["--epsilon", "0.4", "--capture-video"]
    assert f"playing 1 episodes of {FULL_GAME} with {path}\n" in capsys.readouterr().out


@each_script
def test_command_lines_of_cleanrl(
    script: Any, teacher: Path, run: Callable, no_evaluations: list, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests of CleanRL run its DQN like this, with a buffer of ten steps, which leaves room for one environment.

    Updates begin once something can be sampled, also where the buffer never holds `learning_starts` steps.
    """
    flags = f"--total-timesteps 16 --buffer-size 10 --batch-size 4 --env-id {GAME} --eval-episodes 1"
    if script in (qdagger, qdagger_jax):
        flags += " --teacher-steps 16 --offline-steps 3 --teacher-eval-episodes 1"
        flags += f" --teacher-policy-hf-repo {teacher} --teacher-model-exp-name {DQN}"
    due = []
    times_due = script.times_due
    monkeypatch.setattr(script, "times_due", lambda *args: due.append(args) or times_due(*args))
    # A transition can be sampled from step 2 on.
    for learning_starts, updates in ((10, [11, 15]), (0, [3, 7, 11, 15])):
        due.clear()
        run(script, parse_args(script.Args, [*flags.split(), "--learning-starts", str(learning_starts)]))
        assert [step for step, end, every in due if every == 4 and end % 4 == 0] == updates
        assert "--num-envs is 1 instead of 16" in capsys.readouterr().out


@pytest.mark.parametrize(("script", "name"), [(qdagger, "dqn_atari"), (qdagger_jax, "dqn_atari_jax")])
def test_default_teacher(script: Any, name: str, run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is CleanRL's agent of this library on the hub, with seed 1."""

    def find_model(*names: str) -> None:
        raise UserError(" ".join(names))

    monkeypatch.setattr(script, "find_model", find_model)
    with pytest.raises(UserError, match=f"^cleanrl/ALE-Pong-v5-{name}-seed1 {name}$"):
        run(script, script.Args(env_id="ALE/Pong-v5", num_envs=1, seed=3, buffer_size=1000, teacher_steps=1000))


# ==================== flags and results ====================


sizes = st.integers(1, 200)


@given(buffer_size=sizes, teacher_steps=sizes, total_timesteps=sizes, learning_starts=sizes, data=st.data())
def test_as_many_environments_as_fit(data: st.DataObject, **flags: int) -> None:
    """`num_envs` is halved until the sizes fit, which is printed."""
    args = qdagger.Args(num_envs=data.draw(st.sampled_from([3, 16, 32])), n_step=data.draw(st.integers(1, 5)), **flags)
    given_flags = dataclasses.asdict(args)
    candidates = [args.num_envs >> i for i in range(6) if args.num_envs >> i]
    if size_problem(args, 1):
        with pytest.raises(UserError, match=r"one environment|before the first update"):
            check_args(args, torch.device("cpu"), step_bytes=7000)
        return
    with contextlib.redirect_stdout(io.StringIO()) as out:
        used = check_args(args, torch.device("cpu"), step_bytes=7000)
    num_envs = next(n for n in candidates if not size_problem(args, n))
    assert dataclasses.asdict(used) == given_flags | {"num_envs": num_envs}
    assert dataclasses.asdict(args) == given_flags
    assert bool(out.getvalue()) == (num_envs != args.num_envs)


several_returns = st.lists(st.integers(0, 30), min_size=2, max_size=4)


@given(of_teacher=several_returns, of_random=several_returns)
def test_share_of_the_teacher(of_teacher: list[int], of_random: list[int]) -> None:
    """The table has it if the teacher's mean return exceeds the random policy's by more than the standard error.

    Otherwise there is a warning at the start, since the share would be noise, and λ too.
    """
    difference = statistics.mean(of_teacher) - statistics.mean(of_random)
    error = math.hypot(*(statistics.stdev(values) / len(values) ** 0.5 for values in (of_teacher, of_random)))
    if math.isclose(difference, error):
        return
    returns = {"teacher": of_teacher, "random": of_random, "final": [7]}
    with contextlib.redirect_stderr(io.StringIO()) as err:
        warn_of_weak_teacher(returns)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        summarise(qdagger.Args(), Path("no run"), returns)
    if difference > error:
        share = (7 - statistics.mean(of_random)) / difference
        ends = [" 100%", " 0%", f" {share:.0%}"]
        assert "random = 0 %, teacher = 100 %\n" in out.getvalue()
        assert err.getvalue() == ""
    else:
        ends = ["", "", ""]
        assert "100 %" not in out.getvalue()
        assert re.fullmatch(r"WARNING: the teacher is not clearly better .*\n", err.getvalue())
    rows = re.findall(r"^  (teacher|random|final) +[\d.]+ ± +[\d.]+(.*)$", out.getvalue(), re.MULTILINE)
    assert [name for name, _ in rows] == list(returns)
    for (_, rest), end in zip(rows, ends, strict=True):
        assert (rest.endswith(end) and rest.strip() == end.strip()) if end else rest == ""


# ==================== wrong input ====================


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


def refuse(script: Any, args: Any) -> str:
    """Check that the script refuses ``args`` in one line and makes no run directory; return the line."""
    with pytest.raises(UserError) as error:
        script.main(args)
    assert len(str(error.value).splitlines()) == 1
    assert not Path("runs").exists()
    return str(error.value)


def complaint(script: Any, args: Any) -> str:
    """Return the line with which the script refuses flags before it looks for game and teacher, or ""."""
    try:
        script.set_up(args)
    except UserError as error:
        return str(error)
    return ""


def assert_refused(args: qdagger.Args | dqn_atari.Args, *words: str) -> None:
    """Check that the scripts of both libraries refuse ``args`` in the same line, which has all ``words``."""
    script, other = (qdagger, qdagger_jax) if isinstance(args, qdagger.Args) else (dqn_atari, dqn_atari_jax)
    message = refuse(script, args)
    assert [word for word in words if word not in message] == [], message
    memory = r"[\d.]+ GB (is|and) .*?available"  # it changes from moment to moment
    assert re.sub(memory, "", refuse(other, twin(args, other))) == re.sub(memory, "", message)


FILE = f"{DQN}.cleanrl_model"
NONSENSE = {
    "gamma": 1.1, "tau": 1.1, "start_e": 1.1, "end_e": 1.1, "exploration_fraction": 1.1, "temperature": 0.0,
    "learning_rate": 0.0, "online_learning_rate": 0.0, "final_learning_rate": 0.0, "distill_coefficient": -0.1,
    "checkpoint_minutes": -0.1, "num_envs": 0, "batch_size": 0, "train_frequency": 0, "n_step": 0,
    "target_network_frequency": 0, "buffer_size": 0, "teacher_steps": 0, "eval_episodes": 0, "teacher_eval_episodes": 0,
    "eval_frequency": 0, "online_eval_frequency": 0, "offline_eval_frequency": 0, "total_timesteps": -1,
    "offline_steps": -1, "learning_starts": -1, "warmup_updates": -1, "seed": -1,
}  # fmt: skip
"""A value of each number that no limit may allow."""


@each_script
def test_value_out_of_range(script: Any) -> None:
    """Every number has limits, and what is beyond them is refused in one line with the flag, value and limits."""
    limits = annotations(script.Args, Range)
    numbers = {name for name, hint in get_type_hints(script.Args).items() if {int, float} & {hint, *get_args(hint)}}
    assert numbers == limits.keys()
    assert limits.keys() <= NONSENSE.keys()
    for name, (low, high) in limits.items():
        for value in (NONSENSE[name], low - 1, high + 1, -(10**400), 10**400, math.nan, math.inf, -math.inf):
            message = complaint(script, script.Args(**{name: value}))
            assert message == f"{flag(name)} is {value!s:.20}; it must be between {low} and {high}"
        for value in (low, high):
            assert "it must be between" not in complaint(script, script.Args(**{name: value}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_starts": 60}, ("--learning-starts", "--total-timesteps")),
        ({"train_frequency": 61}, ("--train-frequency", "--total-timesteps")),
        (
            {"learning_starts": 80_000},
            ("ends before the first update; raise it, or lower --learning-starts",),
        ),
        (
            {"n_step": 80, "buffer_size": 100, "teacher_steps": 100},
            ("raise it, or lower --learning-starts, --n-step",),
        ),
        ({"buffer_size": 5}, ("--buffer-size is 5; one environment and --n-step 1 need at least 6",)),
        ({"teacher_steps": 5}, ("--teacher-steps", "at least 6")),
        ({"upload_model": True, "save_model": False}, ("--upload-model", "--no-save-model")),
        ({"buffer_size": 10**10}, ("--buffer-size", "GB", "10,000,000,000")),
        ({"teacher_steps": 10**10}, ("--teacher-steps", "GB", "10,000,000,000")),
        ({"batch_size": 3_000_000}, ("--batch-size", "GB", "3,000,000")),
        ({"batch_size": 10**6, "num_envs": 6, "train_frequency": 1}, ("--batch-size", "of memory")),
        ({"exp_name": "a/b"}, ("--exp-name",)),
        ({"exp_name": "字" * 90}, ("--exp-name",)),
        ({"env_id": "KlaxxNoFrameskip-v4"}, ("--env-id 'KlaxxNoFrameskip-v4'", "Klax")),
        ({"total_timesteps": 0, "offline_steps": 0}, ("there is nothing to train; raise one",)),
    ],
)
def test_flags_that_cannot_work(changes: dict, words: tuple[str, ...], teacher: Path) -> None:
    """Contradictions, sizes that memory lacks and unknown games are found before a long phase starts."""
    assert_refused(tiny(teacher, **changes), *words)
    if not changes.keys() & {"teacher_steps", "offline_steps"}:
        assert_refused(twin(tiny(teacher, **changes), dqn_atari), *words)


def test_bad_teacher(tmp_path: Path) -> None:
    """A missing or a foreign teacher is refused with its path; test_teachers.py has more of them."""
    for content in (None, b"404: not found\n", (write_teacher(tmp_path / "six", 6) / FILE).read_bytes()):
        (directory := tmp_path / "teacher").mkdir(exist_ok=True)
        if content is not None:
            (directory / FILE).write_bytes(content)
        for script in (qdagger, qdagger_jax):
            assert str(directory) in refuse(script, twin(tiny(directory), script))


def test_missing_compiler(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "nowhere")
    assert "needs the C++ compiler nowhere" in refuse(qdagger, tiny(teacher, compile=True))


@pytest.mark.parametrize("error", ["UsageError", "AuthenticationError", "CommError"])
def test_failed_login_of_wandb(error: str, no_evaluations: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one line, and leaves no run directory that looks like a run."""
    wandb = pytest.importorskip("wandb")

    def fail(**_: Any) -> None:
        raise getattr(wandb.errors, error)("no API key\nconfigured")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError) as caught:
        dqn_atari.main(dqn_atari.Args(env_id=GAME, buffer_size=1000, track=True))
    remedy = "check --wandb-* and WANDB_*, run `wandb login`, or set WANDB_MODE=offline"
    assert str(caught.value) == f"W&B can't start: no API key configured; {remedy}"
    assert list(Path("runs").iterdir()) == []


def test_a_failed_start_keeps_the_files_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed, or whose directory holds more than its lock, is not removed."""
    monkeypatch.setattr("cleanrl_utils.run.start_wandb", lambda *_: 1 / 0)
    kept = Path("runs/kept")
    kept.mkdir(parents=True)
    with pytest.raises(UserError, match="there is no checkpoint"), Run(dqn_atari.Args(resume=str(kept), track=True)):
        pass
    assert kept.exists()

    def fail(args: Any, run_dir: Path) -> None:
        (run_dir / "wandb_id").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("cleanrl_utils.run.start_wandb", fail)
    with pytest.raises(KeyboardInterrupt), Run(dqn_atari.Args(track=True)):
        pass
    assert len(list(Path("runs").glob("*/wandb_id"))) == 1


def test_wrong_setting_of_wandb(tmp_path: Path) -> None:
    """The real W&B refuses it, here a mode that it lacks."""
    result = run_script(DQN, tmp_path, "--env-id", GAME, "--buffer-size", 1000, "--track", WANDB_MODE="ofline")
    assert result.returncode == 2, result.stderr
    assert re.fullmatch(r"error: W&B can't start: .*mode.*\n", result.stderr), result.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "flags", "word"),
    [
        (STUDENT, f"--env-id {GAME} --buffer-size 1000 --teacher-policy-hf-repo x/y --teacher-steps 1000", "x/y"),
        (DQN_JAX, f"--env-id {GAME}", "runs"),
    ],
)
def test_wrong_input_in_a_shell(script: str, flags: str, word: str, tmp_path: Path) -> None:
    """It ends in one line on stderr and exit code 2; here no teacher, and a file in place of the directory ``runs``."""
    (tmp_path / "runs").write_text("")
    result = run_script(script, tmp_path, *flags.split())
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert word in result.stderr


# ==================== how a script is started ====================


@each_script
def test_helpers_are_those_of_the_clone(script: Any, tmp_path: Path) -> None:
    """Of two clones, of which one is installed, each script finds the helpers beside it."""
    clone = tmp_path / "clone"
    for package in ("cleanrl", "cleanrl_utils"):
        shutil.copytree(REPO / package, clone / package, ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "cleanrl_utils" / "atari.py").write_text("raise SystemExit('the helpers of the clone')")
    # PYTHONPATH has the other clone, as an editable installation has it in sys.path.
    result = subprocess.run(
        [sys.executable, clone / "cleanrl" / f"{script.__name__}.py", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert result.stderr == "the helpers of the clone\n"


@pytest.mark.posix
def test_script_that_is_started_by_another_program(tmp_path: Path) -> None:
    """A run under a profiler is one of the script: its checkpoint and the command that resumes it name the script."""
    path = REPO / "cleanrl" / f"{DQN}.py"
    flags = f"--env-id {GAME} --num-envs 1 --buffer-size 100 --learning-starts 50 --batch-size 4 --eval-episodes 1"
    command = [sys.executable, "-m", "cProfile", "-o", tmp_path / "profile", path, *flags.split()]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, encoding="utf-8") as process:
        for line in process.stdout:
            if line.startswith("random: return"):
                process.send_signal(signal.SIGTERM)
                break
        printed = process.stdout.read()
    run_dir = only((tmp_path / "runs").iterdir())
    assert printed.splitlines()[-1] == (f"stopped by SIGTERM; resume with: python {path} --resume runs/{run_dir.name}")
    assert run_dir.name.startswith(f"{GAME}__{DQN}__1__")
    state, _ = Checkpoints(run_dir).load(DQN)
    assert state["script"] == DQN


def test_a_missing_package_is_named_by_python(tmp_path: Path) -> None:
    """Neither the search for it nor a message of the script's own hides which package is missing."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys; sys.modules['gymnasium'] = None")
    result = run_script(DQN, tmp_path, PYTHONPATH=os.pathsep.join([str(hidden), PYTHONPATH]))
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr.splitlines()[-1]
    assert "gymnasium" in result.stderr.splitlines()[-1]


def test_warnings_have_one_form(capsys: pytest.CaptureFixture) -> None:
    """All are made by one function."""
    warn("the disk is nearly full")
    assert capsys.readouterr() == ("", "WARNING: the disk is nearly full\n")
    for file in [*(REPO / "cleanrl").glob("*.py"), *(REPO / "cleanrl_utils").glob("*.py")]:
        own = re.findall(r"(?i)[\"']warning: .*", file.read_text(encoding="utf-8"))
        assert len(own) == (file.name == "errors.py"), own
