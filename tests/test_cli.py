"""The scripts as a user runs them: whole small runs, their logs and files, and wrong input."""

import contextlib
import dataclasses
import io
import math
import os
import re
import shlex
import subprocess
import sys
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
    REPO,
    STUDENT,
    STUDENT_JAX,
    Scalars,
    flax_params,
    only,
    read_scalars,
    run_script,
    tiny,
    twin,
    without,
)
from hypothesis import given
from hypothesis import strategies as st

from cleanrl_utils import enjoy
from cleanrl_utils.checks import Range, annotations, check_args, size_problem
from cleanrl_utils.errors import UserError, flag
from cleanrl_utils.evaluation import summarise, warn_of_weak_teacher
from cleanrl_utils.models import read_arrays

each_script = pytest.mark.parametrize("script", list(NETWORKS), ids=lambda script: script.__name__)
EVALUATIONS = ("teacher", "random", "offline", "online", "final")
OFFLINE_TAGS = {f"charts/offline/{tag}" for tag in ("loss", "q_loss", "distill_loss", "updates_per_second")}
ONLINE_TAGS = {f"charts/{tag}" for tag in ("epsilon", "distill_coeff", "SPS")}
LOSS_TAGS = {f"losses/{tag}" for tag in ("loss", "td_loss", "distill_loss", "q_values")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


# ==================== a whole run ====================


class FinishedRun(NamedTuple):
    """A run and its results."""

    script: str
    folder: Path
    run_dir: Path
    scalars: Scalars
    stdout: str


SHORT_EPISODES = """
import runpy, sys
from cleanrl_utils import atari
atari.MAX_FRAMES = 240
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script with episodes of 60 steps."""
FULL_GAME = "AlienNoFrameskip-v4"  # any policy has returns above 0 in Alien
SWEEP_RUN = "run-of-a-sweep"
WIDER = {  # edits of a copy of the JAX script
    "for channels in (16, 32, 32):": "for channels in (8, 16, 24):",
    "Dense(256,": "Dense(512,",
    "\nimport sys\n": "\nfrom __future__ import annotations\n\nimport sys\n",
}


@pytest.fixture(scope="module", params=[STUDENT, STUDENT_JAX])
def full_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> FinishedRun:
    """Run each script once with as many features as possible, tracked by W&B.

    That of PyTorch starts as W&B's agents start a run of a sweep. That of JAX is a copy with a wider network, and
    PyTorch can't be imported in its run, which films no videos.
    """
    folder = tmp_path_factory.mktemp("full")
    script = request.param
    path = REPO / "cleanrl" / f"{script}.py"
    flags = "--seed 2 --num-envs 4 --teacher-eval-episodes 1 --eval-episodes 2 --teacher-steps 200 --offline-steps 100 "
    flags += "--offline-eval-frequency 65 --total-timesteps 280 --learning-starts 40 --buffer-size 200 "
    flags += "--batch_size 4 --train_frequency 32 --exploration-fraction 0.5 --end-e 0.8 --temperature 1 --save-model "
    flags += f"--n-step 3 --distill-coefficient 2 --env-id {FULL_GAME} --track "
    flags += "--online-eval-frequency 120 "
    environ = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    environ |= {"TQDM_DISABLE": "1", "TQDM_DESC": "x"}
    if script == STUDENT:
        flags += f"--teacher_policy_hf_repo {teacher} --teacher-model-exp-name {DQN} --capture-video"
        environ |= {"WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": SWEEP_RUN, "WANDB_PROJECT": "of-sweep"}
    else:
        flags += f"--teacher_policy_hf_repo {folder}"
        params = flax_params(read_arrays(teacher / f"{DQN}.cleanrl_model"))
        (folder / f"{DQN_JAX}.cleanrl_model").write_bytes(to_bytes(params))
        environ["PYTHONPATH"] = f"{without(folder / 'no', 'torch')}{os.pathsep}{REPO}"
        text = path.read_text(encoding="utf-8")
        for old, new in WIDER.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        script = "wider_jax"
        path = folder / f"{script}.py"
        path.write_text(text, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-c", SHORT_EPISODES, path, *flags.split()],
        env=environ, cwd=folder, capture_output=True, encoding="utf-8", timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    run_dir = only((folder / "runs").iterdir())
    return FinishedRun(script, folder, run_dir, read_scalars(run_dir), result.stdout)


def watch(printed: str, *flags: str) -> tuple[list[str], np.ndarray]:
    """Run the command that watches the agent with more flags; return its words and the returns."""
    words = shlex.split(re.search("^watch the agent: +(.*)$", printed, re.MULTILINE)[1])
    assert words[:3] == ["python", "-m", "cleanrl_utils.enjoy"]
    return words, enjoy.main(tyro.cli(enjoy.Args, args=[*words[3:], *flags]))


def test_results(full_run: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The last lines give the mean return of every evaluation, as TensorBoard does, and where the videos are.

    Where there are none, it is a command that films an episode, and plays those of the final evaluation. The run
    directory has a model of each evaluation and nothing unfinished.
    """
    _, heading, summary = full_run.stdout.rpartition(f"{FULL_GAME}, episodes at epsilon 0.8")
    assert heading
    means = {name.strip(): float(mean) for name, mean in re.findall(r"^  (.*?) +(-?[\d.]+) ±", summary, re.MULTILINE)}
    curves = {name: full_run.scalars[f"charts/{name}/avg_episodic_return"] for name in EVALUATIONS}
    points = [("teacher", *curves["teacher"][:1]), ("random", *curves["random"][:1])]
    points += zip(("offline 65", "offline 100"), curves["offline"], strict=True)
    points += zip(("online 120", "online 240"), curves["online"], strict=True)
    points.append(("final", *curves["final"]))
    assert means == {name: pytest.approx(value, abs=0.06) for name, (_, value) in points}

    run_dir = full_run.run_dir
    assert re.fullmatch(rf"{FULL_GAME}__{full_run.script}__2__\d+", run_dir.name)
    suffixes = ("-offline-65", "-offline-100", "-online-120", "-online-240", "")
    models = {f"{full_run.script}{suffix}.cleanrl_model" for suffix in suffixes}
    others = {path.name for path in run_dir.iterdir() if "tfevents" not in path.name}
    assert others == models | {"curves.png", "finished", "wandb_id", ".lock"}
    videos = {path.stem for path in (full_run.folder / "videos" / run_dir.name).glob("*.mp4")}
    if full_run.script == STUDENT:
        assert videos == {name.replace(" ", "-") for name, _ in points}
        assert f"\nvideos:              videos/{run_dir.name}\n" in summary
        assert "enjoy" not in summary
        return
    assert "videos" not in summary
    assert f"\npicture:             runs/{run_dir.name}/curves.png\n" in summary
    monkeypatch.chdir(full_run.folder)
    monkeypatch.setattr("cleanrl_utils.atari.MAX_FRAMES", 240)
    words, returns = watch(summary, "--eval-episodes", "2", "--seed", "2")
    assert returns.tolist() == [value for _, value in full_run.scalars["eval/episodic_return"]]
    assert returns.sum() > 0
    assert words[5:7] == ["--script", "wider_jax.py"]
    assert words[-5:] == ["--env-id", FULL_GAME, "--epsilon", "0.8", "--capture-video"]
    played, video = re.findall("(?:with|video:) (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert Path(played) == Path("runs", run_dir.name, f"{full_run.script}.cleanrl_model")
    assert Path(video).is_file()


def test_tracking(full_run: FinishedRun) -> None:
    """W&B gets every point of TensorBoard and the videos, in one W&B run; that of a sweep if one started the script."""
    wandb_id = (full_run.run_dir / "wandb_id").read_text()
    path = only(full_run.folder.glob("wandb/offline-run-*/*.wandb"))
    assert path.stem == f"run-{wandb_id}"
    data = path.read_bytes()
    # The file has blocks of 32 kB, whose first 7 bytes may lie within a name.
    records = b"".join(data[i + 7 : i + 2**15] for i in range(0, len(data), 2**15))
    for tag, points in full_run.scalars.items():
        assert records.count(tag.encode()) >= 2 * len(points), tag  # in the history and in the summary
    is_of_sweep = full_run.script == STUDENT
    assert (wandb_id == SWEEP_RUN) == is_of_sweep
    assert (b"of-sweep" in records) == is_of_sweep
    assert (b"videos/final" in records) == is_of_sweep


# ==================== runs in this process ====================


def run(script: Any, args: Any) -> Path:
    """Run a script and return its run directory."""
    before = set(Path().glob("runs/*"))
    script.main(args)
    return only(set(Path().glob("runs/*")) - before)


@pytest.mark.usefixtures("small_networks")
def test_pretraining_alone(teacher: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--total-timesteps 0`` ends after the offline phase; a teacher as good as the random policy gets a warning."""
    monkeypatch.setattr(qdagger, "play_episodes", lambda *_: [7.0, 8.0])
    run_dir = run(qdagger, tiny(teacher, total_timesteps=0))
    scalars = read_scalars(run_dir)
    assert not scalars.keys() & (ONLINE_TAGS | LOSS_TAGS)
    assert scalars["eval/episodic_return"] == [(4, 7.0), (5, 8.0)]
    models = [run_dir / f"{STUDENT}{suffix}.cleanrl_model" for suffix in ("", "-offline-4")]
    assert models[0].read_bytes() == models[1].read_bytes()
    out, err = capsys.readouterr()
    assert err.count("WARNING: the teacher is not clearly better than the random policy (7.5 against 7.5)") == 1
    assert re.search(r"^  offline 4 +7.5 ± +0.5$", out, re.MULTILINE)


@pytest.mark.parametrize(("script", "library"), [(dqn_atari, qdagger), (dqn_atari_jax, qdagger_jax)])
def test_dqn_makes_a_teacher(
    script: Any, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """DQN prints its results and how to watch it. QDagger loads its model as a teacher with the same Q-values."""
    monkeypatch.setattr("cleanrl_utils.atari.MAX_FRAMES", 200)
    flags = {"num_envs": 1, "total_timesteps": 110, "learning_starts": 40, "buffer_size": 80, "batch_size": 4}
    flags |= {"train_frequency": 50, "n_step": 3, "eval_episodes": 2, "end_e": 0.4}
    agents = []
    make_agent = script.Agent
    monkeypatch.setattr(script, "Agent", lambda *args: agents.append(make_agent(*args)) or agents[0])
    script.main(script.Args(env_id=FULL_GAME, **flags))
    path = only(Path("runs").iterdir()) / f"{script.__name__}.cleanrl_model"
    hardware = library.Hardware.choose(library.Args())
    observation = np.random.default_rng(1).integers(0, 256, (2, 4, 84, 84), dtype=np.uint8)
    q_values = library.Teacher(path, NUM_ACTIONS, 1.0, hardware).q_values(observation)
    np.testing.assert_allclose(q_values, agents[0].q_values(observation), atol=1e-6)

    printed = capsys.readouterr().out
    table = printed[printed.index(f"\n{FULL_GAME}, episodes at epsilon 0.4\n") :]
    assert re.findall(r"^  (\w+) +[\d.]+ ± +[\d.]+$", table, re.MULTILINE) == ["final"]
    words, _ = watch(table, "--eval-episodes", "1")
    assert words[-3:] == ["--epsilon", "0.4", "--capture-video"]
    assert f"playing 1 episodes of {FULL_GAME} with {path}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("script", "name"), [(qdagger, "dqn_atari"), (qdagger_jax, "dqn_atari_jax")])
def test_default_teacher(script: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is CleanRL's agent of this library on the hub, with seed 1."""

    def find_model(*names: str) -> None:
        raise UserError(" ".join(names))

    monkeypatch.setattr(script, "find_model", find_model)
    with pytest.raises(UserError, match=f"^cleanrl/ALE-Pong-v5-{name}-seed1 {name}$"):
        script.main(script.Args(env_id="ALE/Pong-v5", num_envs=1, seed=3, buffer_size=1000, teacher_steps=1000))


# ==================== flags and results ====================


sizes = st.integers(1, 200)


@given(buffer_size=sizes, teacher_steps=sizes, total_timesteps=sizes, learning_starts=sizes, data=st.data())
def test_as_many_environments_as_fit(data: st.DataObject, **flags: int) -> None:
    """`num_envs` is halved until the sizes fit, which is printed."""
    args = qdagger.Args(num_envs=data.draw(st.sampled_from([3, 16, 32])), n_step=data.draw(st.integers(1, 5)), **flags)
    given_flags = dataclasses.asdict(args)
    candidates = [args.num_envs >> i for i in range(6) if args.num_envs >> i]
    if all(size_problem(args, n) for n in candidates):
        with pytest.raises(UserError, match=r"--num-envs 1 and|before the first update"):
            check_args(args, torch.device("cpu"), step_bytes=7000)
        return
    with contextlib.redirect_stdout(io.StringIO()) as out:
        used = check_args(args, torch.device("cpu"), step_bytes=7000)
    num_envs = next(n for n in candidates if not size_problem(args, n))
    assert dataclasses.asdict(used) == given_flags | {"num_envs": num_envs}
    assert dataclasses.asdict(args) == given_flags
    assert (f"--num-envs is {num_envs} instead of " in out.getvalue()) == (num_envs != args.num_envs)


@pytest.mark.parametrize(
    ("of_teacher", "of_random", "share"),
    [([1.5, 3.5], [0.0, 2.0], "400%"), ([1.4, 3.4], [0.0, 2.0], None), ([2.5], [1.0], "400%"), ([1.0], [1.0], None)],
)
def test_share_of_the_teacher(of_teacher: list[float], of_random: list[float], share: str | None, capsys: Any) -> None:
    """The table has it if the teacher's mean return exceeds the random policy's by more than the standard error.

    That is √2 in the first two cases. Otherwise there is a warning, since the share would be noise, and λ too.
    """
    returns = {"teacher": of_teacher, "random": of_random, "final": [7]}
    warn_of_weak_teacher(returns)
    assert capsys.readouterr().err.startswith("WARNING: the teacher is not clearly better ") == (share is None)
    summarise(qdagger.Args(), Path("no run"), returns)
    out = capsys.readouterr().out
    assert ("random = 0 %, teacher = 100 %\n" in out) == (share is not None)
    ends = re.findall(r"^  (?:teacher|random|final) +[\d.]+ ± +[\d.]+ *(.*)$", out, re.MULTILINE)
    assert ends == (["100%", "0%", share] if share else ["", "", ""])


# ==================== wrong input ====================


def refuse(script: Any, args: Any) -> str:
    """Check that the script refuses ``args`` in one line and makes no run directory; return the line."""
    with pytest.raises(UserError) as error:
        script.main(args)
    assert len(str(error.value).splitlines()) == 1
    assert not Path("runs").exists()
    return str(error.value)


NONSENSE = {
    "gamma": 1.1, "tau": 1.1, "start_e": 1.1, "end_e": 1.1, "exploration_fraction": 1.1, "temperature": 0.0,
    "learning_rate": 0.0, "online_learning_rate": 0.0, "final_learning_rate": 0.0, "distill_coefficient": -0.1,
    "checkpoint_minutes": -0.1, "num_envs": 0, "batch_size": 0, "train_frequency": 0, "n_step": 0,
    "target_network_frequency": 0, "buffer_size": 0, "teacher_steps": 0, "eval_episodes": 0, "teacher_eval_episodes": 0,
    "online_eval_frequency": 0, "offline_eval_frequency": 0, "total_timesteps": -1, "offline_steps": -1,
    "learning_starts": -1, "warmup_updates": -1, "seed": -1,
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
        for value in (NONSENSE[name], low - 1, high + 1, 10**400, math.nan, -math.inf):
            with pytest.raises(UserError) as error:
                script.set_up(script.Args(**{name: value}))
            assert str(error.value) == f"{flag(name)} is {value!s:.20}; it must be between {low} and {high}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_frequency": 61}, "--total-timesteps 60 ends before the first update; raise it, or lower --learning"),
        ({"buffer_size": 5}, "--buffer-size is 5; --num-envs 1 and --n-step 1 need at least 6"),
        ({"teacher_steps": 5}, "--teacher-steps is 5; --num-envs 1 and --n-step 1 need at least 6"),
        ({"upload_model": True, "save_model": False}, "leave out --no-save-model"),
        ({"buffer_size": 10**10}, "--buffer-size 10,000,000,000 needs "),
        ({"teacher_steps": 10**10}, "--teacher-steps 10,000,000,000 needs "),
        ({"exp_name": "a/b"}, "--exp-name is 'a/b'"),
        ({"exp_name": "x" * 61}, "use up to 60 letters"),
        ({"env_id": "KlaxxNoFrameskip-v4"}, "--env-id 'KlaxxNoFrameskip-v4'"),
        ({"compile": True}, "needs the C++ compiler nowhere"),
    ],
)
def test_flags_that_cannot_work(changes: dict, message: str, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contradictions, sizes that memory lacks and unknown games are found before a long phase starts."""
    monkeypatch.setenv("CXX", "nowhere")
    assert message in refuse(qdagger, tiny(teacher, **changes))
    if "teacher_steps" not in changes:
        assert message in refuse(dqn_atari, twin(tiny(teacher, **changes), dqn_atari))


def test_sizes_of_a_resumed_run() -> None:
    """It may be past the phase that needs the teacher's data. Its number of environments does not change."""
    args = qdagger.Args(resume="runs/x", teacher_steps=10**10, buffer_size=1000)
    assert qdagger.set_up(args)[0] == args
    with pytest.raises(UserError, match="--buffer-size is 40; --num-envs 16 "):
        qdagger.set_up(dataclasses.replace(args, buffer_size=40))


def test_wrong_setting_of_wandb(tmp_path: Path) -> None:
    """The real W&B refuses it, here a mode that it lacks."""
    result = run_script(DQN, tmp_path, "--env-id", GAME, "--buffer-size", 1000, "--track", WANDB_MODE="ofline")
    assert result.returncode == 2, result.stderr
    assert re.fullmatch(r"error: W&B can't start: .*mode.*\n", result.stderr), result.stderr


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
def test_start_beside_another_clone(script: Any, tmp_path: Path) -> None:
    """Each script finds the helpers beside it, also where another clone is installed. JAX's do without PyTorch."""
    other = without(tmp_path / "other", "cleanrl_utils", *["torch"] * (script in (qdagger_jax, dqn_atari_jax)))
    result = run_script(script.__name__, tmp_path, "--help", PYTHONPATH=str(other))
    assert result.returncode == 0, result.stderr
