"""The scripts as a user runs them: whole runs of minutes made small, what they leave behind, and bad input.

Klax is the game: whatever one does, tiles fall and it is over within a few hundred steps.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import dqn_atari
import dqn_atari_jax
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanrl_utils.checks import UserError, check_sizes, fit_num_envs
from cleanrl_utils.convert import convert, flax_to_torch, is_torch_file, read_flax, read_torch
from cleanrl_utils.run import Run, parse_args

REPO = Path(__file__).parent.parent
GAME, NUM_ACTIONS = "KlaxNoFrameskip-v4", 18
STUDENT, DQN = "qdagger_dqn_atari_impalacnn", "dqn_atari"
STUDENT_JAX, DQN_JAX = "qdagger_dqn_atari_jax_impalacnn", "dqn_atari_jax"
ONLINE_TAGS = {
    *(f"charts/{name}" for name in ("episodic_return", "episodic_length", "epsilon", "distill_coeff", "SPS")),
    *(f"losses/{name}" for name in ("loss", "td_loss", "distill_loss", "q_values")),
}
OFFLINE_TAGS = {
    f"charts/offline/{name}" for name in ("loss", "q_loss", "distill_loss", "avg_episodic_return", "updates_per_second")
}
TAGS = {
    "charts/teacher/avg_episodic_return",
    "charts/random/avg_episodic_return",
    "charts/teacher/SPS",
    "eval/episodic_return",
    *ONLINE_TAGS,
    *OFFLINE_TAGS,
}
TIMED_TAGS = {"charts/teacher/SPS", "charts/SPS", "charts/offline/updates_per_second"}

Scalars = dict[str, list[tuple[int, float]]]
"""(step, value) in the order of writing, of every tag"""


# ==================== running and reading ====================


SHORT_GAMES = """
import runpy, sys
from cleanrl_utils import atari
atari.MAX_FRAMES = 240
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(
    script: str, cwd: Path, *flags: object, short_games: bool = False, **environ: str
) -> subprocess.CompletedProcess:
    """``python cleanrl/{script}.py flags`` in the folder ``cwd``; with short games, they are cut off after 60 steps."""
    return subprocess.run(
        [sys.executable, *["-c", SHORT_GAMES] * short_games, REPO / "cleanrl" / f"{script}.py", *map(str, flags)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", **environ},
        capture_output=True,
        text=True,
        timeout=600,
    )


def without_torch(directory: Path) -> Path:
    """A directory that, first in PYTHONPATH, lets PyTorch not be imported."""
    directory.mkdir()
    (directory / "torch.py").write_text("raise ImportError('No module named torch')")
    return directory


def only(paths: Iterable[Path]) -> Path:
    """The one path that there is."""
    (path,) = paths
    return path


def read_scalars(run_dir: Path) -> Scalars:
    """What TensorBoard shows of a run."""
    accumulator = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def saved_weights(path: Path) -> dict[str, np.ndarray]:
    """The arrays in a model file of either encoding, as a PyTorch state dict has them."""
    return read_torch(path) if is_torch_file(path) else flax_to_torch(read_flax(path))


def write_teacher(directory: Path, num_actions: int = NUM_ACTIONS, **changes: torch.Tensor | None) -> Path:
    """A directory that holds a teacher with random weights; ``changes`` replace entries of its state dict."""
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        weights = {**qdagger.TeacherNetwork(num_actions).state_dict(), **changes}
    torch.save({key: value for key, value in weights.items() if value is not None}, directory / f"{DQN}.cleanrl_model")
    return directory


def tiny(teacher: Path | None = None, **changes: Any) -> qdagger.Args:
    """A run of seconds."""
    flags = {
        "env_id": GAME,
        "teacher_policy_hf_repo": teacher and str(teacher),
        "teacher_model_exp_name": DQN,
        "teacher_eval_episodes": 1,
        "eval_episodes": 1,
        "end_e": 0.8,  # a student that is hardly trained may do the same thing forever, which takes longer
        "teacher_steps": 60,
        "offline_steps": 4,
        "offline_eval_frequency": 4,
        "num_envs": 2,
        "total_timesteps": 60,
        "buffer_size": 1000,
        "learning_starts": 20,
        "batch_size": 4,
    }
    return qdagger.Args(**(flags | changes))


def twin(args: qdagger.Args | dqn_atari.Args, script: Any) -> Any:
    """The same flags for another script, as far as it has them; the teacher stays the same file."""
    names = script.Args.__dataclass_fields__.keys() - ({"exp_name"} if args.exp_name == type(args).exp_name else set())
    return script.Args(**{name: value for name, value in vars(args).items() if name in names})


class SmallNetwork(torch.nn.Module):
    """A student, or DQN's network, that hardly takes time."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Conv2d(4, 4, 8, stride=8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(400, num_actions)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x / 255.0).float()


class SmallFlaxNetwork(flax.linen.Module):
    """The same in flax."""

    num_actions: int
    dtype: jnp.dtype = jnp.float32

    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = flax.linen.relu(flax.linen.Conv(4, (8, 8), 8, padding="VALID")(x.transpose(0, 2, 3, 1) / 255.0))
        return flax.linen.Dense(self.num_actions)(x.reshape(x.shape[0], -1))


NETWORKS = {script: script.QNetwork for script in (qdagger, dqn_atari, qdagger_jax, dqn_atari_jax)}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs in this process: on a busy machine, threads spend more time waiting for each other than computing."""
    monkeypatch.setattr("cleanrl_utils.device.available_cores", lambda: 1)


@pytest.fixture
def no_games(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations take no time in this process."""
    monkeypatch.setattr("cleanrl_utils.run.play_games", lambda q_function, **game: np.zeros(1))


class FinishedRun(NamedTuple):
    """A run and what it left."""

    script: str
    folder: Path
    run_dir: Path
    scalars: Scalars
    stdout: str


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a teacher of the game."""
    return write_teacher(tmp_path_factory.mktemp("teacher"))


FULL_GAME, FULL_STEPS = "AlienNoFrameskip-v4", 1100
"""One scores in it whatever one does."""


@pytest.fixture(scope="module", params=[STUDENT, STUDENT_JAX])
def full_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> FinishedRun:
    """Everything that one run can do at once: the paper's protocol, saving, in PyTorch tracking and video too.

    JAX's has everything where PyTorch can't be imported: video needs it, and tracking takes seconds.
    """
    folder, script = tmp_path_factory.mktemp("full"), request.param
    flags = "--seed 2 --num-envs 4 --teacher-eval-episodes 1 --eval-episodes 1 --teacher-steps 200 --offline-steps 100 "
    flags += f"--offline-eval-frequency 60 --total-timesteps {FULL_STEPS} --learning-starts 40 --buffer-size 200 "
    flags += "--batch_size 4 --train_frequency 32 --exploration-fraction 0.5 --end-e 0.8 --temperature 1 --save-model "
    flags += f"--n-step 3 --repeat-action-probability 0.25 --distill-coefficient 2 --env-id {FULL_GAME}"
    environ = {"WANDB_MODE": "offline"}
    if script == STUDENT:
        flags += f" --teacher_policy_hf_repo {teacher} --teacher-model-exp-name {DQN} --capture-video"
        flags += " --track" * (importlib.util.find_spec("wandb") is not None)
    else:
        convert(teacher / f"{DQN}.cleanrl_model", folder / "flax" / f"{DQN_JAX}.cleanrl_model")
        flags += f" --teacher_policy_hf_repo {folder / 'flax'}"
        environ["PYTHONPATH"] = f"{without_torch(folder / 'no')}{os.pathsep}{REPO}"
    result = run_script(script, folder, *flags.split(), short_games=True, **environ)
    assert result.returncode == 0, result.stderr
    run_dir = only((folder / "runs").iterdir())
    return FinishedRun(script, folder, run_dir, read_scalars(run_dir), result.stdout)


# ==================== a whole run ====================


def test_metrics(full_run: FinishedRun) -> None:
    """Every tag that dashboards and plots read is there."""
    assert full_run.scalars.keys() >= TAGS
    assert all(np.isfinite(value) for events in full_run.scalars.values() for _, value in events)


def test_global_step(full_run: FinishedRun) -> None:
    """0…100 in the offline phase, from there on online, and losses whenever 4 games pass a multiple of 100 steps."""
    steps = {tag: [step for step, _ in events] for tag, events in full_run.scalars.items()}
    for tag in ("charts/teacher/avg_episodic_return", "charts/random/avg_episodic_return", "charts/teacher/SPS"):
        assert steps[tag] == [0], tag
    assert steps["charts/offline/avg_episodic_return"] == [60, 100]
    for tag in OFFLINE_TAGS - {"charts/offline/avg_episodic_return"}:
        assert steps[tag] == [100], tag
    for tag in ONLINE_TAGS:
        assert steps[tag][0] >= 100, tag
        assert steps[tag][-1] < 100 + FULL_STEPS, tag
        assert steps[tag] == sorted(steps[tag]), tag
    logged = [100 + step for step in range(0, FULL_STEPS, 4) if step // 100 < (step + 4) // 100]
    assert len(logged) == 11
    for tag in ONLINE_TAGS - {"charts/episodic_return", "charts/episodic_length"}:
        assert steps[tag] == logged, tag
    assert steps["eval/episodic_return"] == [0]


def test_metrics_fit_together(full_run: FinishedRun) -> None:
    """Logged values obey the formulas that they stand for: the sum of the loss, the fall of ε and λ."""
    values = {tag: np.array([value for _, value in events]) for tag, events in full_run.scalars.items()}
    games = full_run.scalars["charts/episodic_return"]
    assert len(games) == len(full_run.scalars["charts/episodic_length"])
    assert len(games) >= 11, "too few games to see λ fall"
    assert 0 < values["charts/episodic_length"].sum() <= FULL_STEPS
    best, worst = values["charts/teacher/avg_episodic_return"][0], values["charts/random/avg_episodic_return"][0]

    def coefficient_at(step: int) -> float:
        """λ of the updates in this step, before its games are counted."""
        recent = [score for game_step, score in games if game_step < step]
        return qdagger.distill_coefficient_now(recent, best, worst, 2.0)

    for step, coefficient in full_run.scalars["charts/distill_coeff"]:
        assert coefficient == pytest.approx(coefficient_at(step))
    assert coefficient_at(100 + FULL_STEPS) != 2, "λ has not moved"
    for step, epsilon in full_run.scalars["charts/epsilon"]:
        assert epsilon == pytest.approx(max(1 - 0.2 * step / (0.5 * FULL_STEPS), 0.8), abs=1e-6)
    # The losses logged are of the last update, one of which is made as each 32nd step since the phase began is passed.
    used = [coefficient_at(step - (step - 100 - 28) % 32) for step, _ in full_run.scalars["losses/loss"]]
    total = values["losses/td_loss"] + used * values["losses/distill_loss"]
    np.testing.assert_allclose(values["losses/loss"], total, rtol=1e-4)
    total = values["charts/offline/q_loss"] + 2 * values["charts/offline/distill_loss"]
    np.testing.assert_allclose(values["charts/offline/loss"], total, rtol=1e-4)


def test_summary(full_run: FinishedRun) -> None:
    """The last lines give every evaluation, and the numbers that TensorBoard has."""
    _, heading, summary = full_run.stdout.rpartition(f"{FULL_GAME}, games at epsilon 0.8")
    assert heading
    means = {name.strip(): float(mean) for name, mean in re.findall(r"^  (.*?) +(-?[\d.]+) ±", summary, re.MULTILINE)}
    scalars = full_run.scalars
    offline = dict(scalars["charts/offline/avg_episodic_return"])
    assert means == {
        "teacher": pytest.approx(scalars["charts/teacher/avg_episodic_return"][0][1], abs=0.06),
        "random": pytest.approx(scalars["charts/random/avg_episodic_return"][0][1], abs=0.06),
        "offline 60": pytest.approx(offline[60], abs=0.06),
        "offline 100": pytest.approx(offline[100], abs=0.06),
        "online": pytest.approx(np.mean([value for _, value in scalars["eval/episodic_return"]]), abs=0.06),
    }
    assert str(full_run.run_dir.relative_to(full_run.folder)) in full_run.stdout


def test_files(full_run: FinishedRun) -> None:
    """Models of three different moments, loadable as untrusted files; no half-written ones."""
    script = full_run.script
    assert re.fullmatch(rf"{FULL_GAME}__{script}__2__\d+", full_run.run_dir.name)
    names = {path.name for path in full_run.run_dir.iterdir() if not path.name.startswith("events.out")}
    models = [f"{script}-offline-60.cleanrl_model", f"{script}-offline-100.cleanrl_model", f"{script}.cleanrl_model"]
    assert names >= set(models)
    assert not list(full_run.folder.rglob("*.tmp"))
    network = qdagger.QNetwork(NUM_ACTIONS)
    first_layers = []
    for name in models:
        weights = saved_weights(full_run.run_dir / name)
        assert list(weights) == list(network.state_dict())
        if script == STUDENT:
            state_dict = torch.load(full_run.run_dir / name, weights_only=True)
            assert list(state_dict) == list(weights)
            assert all(value.is_contiguous() and value.dtype == torch.float32 for value in state_dict.values())
            network.load_state_dict(state_dict)
        first_layers.append(weights["network.0.conv.weight"])
    assert not np.array_equal(first_layers[0], first_layers[1]), "nothing was learned offline"
    assert not np.array_equal(first_layers[1], first_layers[2]), "nothing was learned online"


def test_videos(full_run: FinishedRun) -> None:
    """A game of the teacher and of the student at every evaluation."""
    if full_run.script != STUDENT:
        pytest.skip("none were asked for")
    videos = list((full_run.folder / "videos").glob(f"{full_run.run_dir.name}*/*.mp4"))
    assert {video.stem for video in videos} >= {"teacher", "online"}
    for video in videos:
        assert video.read_bytes()[4:8] == b"ftyp"  # what an mp4 file begins with


def test_tracking(full_run: FinishedRun) -> None:
    """W&B's offline mode leaves a folder to be synchronised later."""
    pytest.importorskip("wandb")
    if full_run.script != STUDENT:
        pytest.skip("it was not tracked")
    assert list((full_run.folder / "wandb").glob("offline-run-*/*.wandb"))


def test_student_teaches_the_next(
    full_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A student of either backend teaches a PyTorch one: kickstarting, with no distillation at all, of a -v5 game."""
    monkeypatch.chdir(tmp_path)
    args = tiny(
        full_run.run_dir,
        teacher_model_exp_name=full_run.script,
        env_id="ALE/Klax-v5",
        offline_steps=0,
        distill_coefficient=0.0,
        total_timesteps=130,
    )
    qdagger.main(args)
    run_dir = only((tmp_path / "runs").iterdir())
    assert run_dir.name.startswith("ALE-Klax-v5__")
    assert not list(run_dir.glob("*.cleanrl_model")), "saved without --save-model"
    scalars = read_scalars(run_dir)
    assert not OFFLINE_TAGS & scalars.keys()
    assert scalars["losses/loss"] == scalars["losses/td_loss"]
    assert scalars["losses/loss"][0][0] < 200, "global_step does not begin at 0"
    assert {value for _, value in scalars["charts/distill_coeff"]} == {0.0}
    _, heading, summary = capsys.readouterr().out.rpartition("games at epsilon")
    assert heading
    assert "offline" not in summary

    saved = saved_weights(full_run.run_dir / f"{full_run.script}.cleanrl_model")
    loaded = qdagger.load_teacher(str(full_run.run_dir), full_run.script, NUM_ACTIONS).state_dict()
    assert saved.keys() == loaded.keys()
    assert all(np.array_equal(saved[key], loaded[key].numpy()) for key in saved)


def test_same_seed_same_run(
    small_networks: None, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the same scalars, but for those that time something; another seed gives others."""
    monkeypatch.setattr("cleanrl_utils.atari.MAX_FRAMES", 200)
    runs = []
    for name, seed in (("first", 3), ("second", 3), ("other", 4)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        np.random.seed(len(runs))  # noqa: NPY002  the script must not depend on anybody's global state
        changes = {"offline_steps": 100, "offline_eval_frequency": 100, "total_timesteps": 130, "train_frequency": 10}
        qdagger.main(tiny(teacher, seed=seed, **changes))
        scalars = read_scalars(only(Path("runs").iterdir()))
        runs.append({tag: events for tag, events in scalars.items() if tag not in TIMED_TAGS})
    assert runs[0].keys() >= TAGS - TIMED_TAGS - {"charts/episodic_return", "charts/episodic_length"}
    assert runs[0] == runs[1]
    assert runs[0]["losses/td_loss"] != runs[2]["losses/td_loss"]


class Update(NamedTuple):
    """What one update was made from."""

    q_network: torch.nn.Module
    target_network: torch.nn.Module
    y: torch.Tensor
    batch: qdagger.Batch
    distill_coefficient: float
    temperature: float


@pytest.mark.parametrize(("num_envs", "final"), [(2, None), (6, None), (6, 5e-5)])
def test_loop(
    num_envs: int, final: float | None, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_games: None
) -> None:
    """Both phases make the updates that are due and no others, with Adam, and move the target network when due.

    Adam by the book (Kingma & Ba, 2015, algorithm 1) in float64, on gradients of the loss that test_update.py checks.
    """
    updates: list[Update] = []
    target_networks: list[torch.nn.Module] = []
    loss, td_target = qdagger.qdagger_loss, qdagger.td_target

    def record_target(target_network: torch.nn.Module, batch: qdagger.Batch) -> torch.Tensor:
        target_networks.append(copy.deepcopy(target_network))
        return td_target(target_network, batch)

    def record(q_network: torch.nn.Module, *rest: Any) -> qdagger.Losses:
        updates.append(Update(copy.deepcopy(q_network), target_networks[-1], *rest))
        return loss(q_network, *rest)

    monkeypatch.setattr(qdagger, "td_target", record_target)
    monkeypatch.setattr(qdagger, "qdagger_loss", record)
    monkeypatch.setattr(qdagger, "distill_coefficient_now", lambda *args: 0.15)  # a quarter of what it begins with
    monkeypatch.chdir(tmp_path)
    args = tiny(
        teacher,
        num_envs=num_envs,
        teacher_steps=60,
        offline_steps=7,
        target_network_frequency=3,
        total_timesteps=48,
        learning_starts=24,
        train_frequency=4,
        tau=0.3,
        learning_rate=1e-3,
        online_learning_rate=2e-4,
        final_learning_rate=final,
        warmup_updates=12,
        temperature=0.7,
        distill_coefficient=0.6,
        gamma=0.9,
        bf16=False,
    )
    qdagger.main(args)

    # What should have happened: updates (True) and moves of the target network (False), in order.
    expected = []
    for step in range(1, 8):
        expected += [True] + [False] * (step % 3 == 0)
    for start in range(24, 48, num_envs):
        due = range(start + 1, start + num_envs + 1)
        expected += [True] * sum(step % 4 == 0 for step in due) + [False] * sum(step % 3 == 0 for step in due)
    assert len(updates) == sum(expected) == 7 + 6

    first = updates[0]
    for online, target in zip(first.q_network.parameters(), first.target_network.parameters(), strict=True):
        assert torch.equal(online, target), "the target network does not begin as a copy"
    moments = [(np.zeros(p.shape), np.zeros(p.shape)) for p in first.q_network.parameters()]
    number = 0
    target_parameters = [p.detach().double().numpy() for p in first.target_network.parameters()]
    for is_update in expected:
        if not is_update:
            if number < len(updates):
                online_parameters = [p.detach().double().numpy() for p in updates[number].q_network.parameters()]
                pairs = zip(target_parameters, online_parameters, strict=True)
                target_parameters = [0.7 * target + 0.3 * online for target, online in pairs]
            continue
        update = updates[number]
        number += 1
        assert (update.temperature, update.distill_coefficient) == (0.7, 0.6 if number <= 7 else 0.15)
        assert len(update.batch.action) == args.batch_size
        for moved, target in zip(update.target_network.parameters(), target_parameters, strict=True):
            np.testing.assert_allclose(moved.detach().numpy(), target, rtol=0, atol=1e-6)
        np.testing.assert_allclose(update.y, td_target(update.target_network, update.batch), rtol=1e-5, atol=1e-6)
        if number == len(updates):
            break
        loss(update.q_network, *update[2:]).loss.backward()
        after = updates[number].q_network.parameters()
        for (m, v), parameter, new in zip(moments, update.q_network.parameters(), after, strict=True):
            gradient = parameter.grad.double().numpy()
            m += (1 - 0.9) * (gradient - m)
            v += (1 - 0.999) * (gradient**2 - v)
            learning_rate = 1e-3 - 8e-4 * (number - 1) / 7 if number <= 7 else 2e-4
            if number > 7 and final:
                learning_rate = final + (2e-4 - final) / 4
            learning_rate *= min(number / 12, 1)
            step = learning_rate * (m / (1 - 0.9**number)) / (np.sqrt(v / (1 - 0.999**number)) + 1e-8)
            change = new.detach().double().numpy() - parameter.detach().double().numpy()
            np.testing.assert_allclose(change, -step, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"offline_steps": 0, "num_envs": 1, "train_frequency": 70, "total_timesteps": 150, "learning_starts": 99},
        {"offline_steps": 0, "train_frequency": 100, "total_timesteps": 130},
        {"num_envs": 1, "learning_starts": 99, "total_timesteps": 130, "offline_steps": 1, "offline_eval_frequency": 1},
        {"teacher_steps": 61, "num_envs": 3, "total_timesteps": 100},
    ],
)
def test_odd_numbers(
    changes: dict, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_games: None
) -> None:
    """Sizes that don't divide each other, and nothing to log yet when logging is due."""
    monkeypatch.chdir(tmp_path)
    qdagger.main(tiny(teacher, **changes))


# ==================== DQN ====================


def test_dqn_makes_a_teacher(tmp_path: Path) -> None:
    """The script runs, logs, and what it saves is loaded as a teacher with the very weights."""
    flags = (
        "--num-envs 2 --total-timesteps 400 --learning-starts 40 --buffer-size 300 --batch-size 4 --eval-episodes 2 "
    )
    flags += "--target-network-frequency 50 --n-step 3 --exploration-fraction 1 --end-e 0.8 --save-model"
    result = run_script(DQN, tmp_path, "--env-id", GAME, *flags.split())
    assert result.returncode == 0, result.stderr
    run_dir = only((tmp_path / "runs").iterdir())
    scalars = read_scalars(run_dir)
    names = ("charts/episodic_return", "charts/episodic_length", "charts/epsilon", "charts/SPS", "losses/td_loss")
    assert scalars.keys() >= {*names, "losses/q_values", "eval/episodic_return"}
    assert len(scalars["eval/episodic_return"]) == 2
    saved = torch.load(run_dir / f"{DQN}.cleanrl_model", weights_only=True)
    loaded = qdagger.load_teacher(str(run_dir), DQN, NUM_ACTIONS).state_dict()
    assert list(saved) == list(loaded) == list(dqn_atari.QNetwork(NUM_ACTIONS).state_dict())
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)


def test_dqn_one_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_games: None) -> None:
    """CleanRL's `--num-envs 1`, where no update is due in the step that first may learn."""
    monkeypatch.chdir(tmp_path)
    args = dqn_atari.Args(env_id=GAME, num_envs=1, total_timesteps=60, learning_starts=40, buffer_size=200, end_e=0.8)
    args.eval_episodes, args.batch_size = 1, 4
    dqn_atari.main(args)


# ==================== sizes ====================


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Phase, and steps done in it, of every update that is made in this process."""
    made = []

    def note(run: Run, losses: Any) -> None:
        vars(run)["losses"] = losses
        if losses is not None:
            made.append((run.phase, run.done))

    monkeypatch.setattr(Run, "losses", property(lambda run: vars(run)["losses"], note), raising=False)
    return made


SHORT = "--total-timesteps 16 --buffer-size 10 --batch-size 4"
"""What CleanRL's own tests run its DQN with, beside ``--learning-starts 10``; QDagger's go on with:"""
SHORT_TEACHER = "--teacher-steps 16 --offline-steps 16 --teacher-eval-episodes 1"


@pytest.mark.parametrize("script", [qdagger, qdagger_jax, dqn_atari, dqn_atari_jax], ids=lambda script: script.__name__)
def test_cleanrl_command_lines(
    script: Any,
    teacher: Path,
    updates: list,
    small_networks: None,
    no_games: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """There is room for one game at a time, not for 16, so one is played, as a printed line says.

    Updates are made as soon as something can be sampled, also where the buffer never holds `learning_starts` steps.
    """
    monkeypatch.chdir(tmp_path)
    flags, has_teacher = f"{SHORT} --env-id {GAME} --eval-episodes 1", script in (qdagger, qdagger_jax)
    if has_teacher:
        flags += f" {SHORT_TEACHER} --teacher-policy-hf-repo {teacher} --teacher-model-exp-name {DQN}"
    # Without bootstrap state there is nothing to learn from, so not before 2 steps are in the replay.
    for learning_starts, online in ((10, [11, 15]), (11, [11, 15]), (12, [15]), (0, [3, 7, 11, 15])):
        updates.clear()
        script.main(parse_args(script.Args, [*flags.split(), "--learning-starts", str(learning_starts)]))
        assert re.search(r"^games at a time: 1\b.*16.*--num-envs", capsys.readouterr().out, re.MULTILINE)
        offline = [("offline", done) for done in range(16)] if has_teacher else []
        assert updates == offline + [("online" if has_teacher else "training", done) for done in online]
        run_dir = only(Path("runs").iterdir())
        assert json.loads((run_dir / "progress.json").read_text())["finished"]
        assert len(list(run_dir.glob("*-offline-16.cleanrl_model"))) == has_teacher
        shutil.rmtree("runs")


@pytest.mark.parametrize("given", ["--num-envs 8", "--num_envs=8"])
@pytest.mark.parametrize("script", [qdagger, qdagger_jax, dqn_atari, dqn_atari_jax], ids=lambda script: script.__name__)
def test_more_games_than_fit(script: Any, given: str, no_long_phase: Path, capsys: pytest.CaptureFixture) -> None:
    """Who says how many games is taken at his word."""
    flags = f"--learning-starts 10 {SHORT} {given} {SHORT_TEACHER if hasattr(script.Args, 'teacher_steps') else ''}"
    message = refuse(script, parse_args(script.Args, flags.split()))
    assert re.search(r"--buffer-size 10 .*--num-envs 8", message)
    assert not capsys.readouterr().out


sizes = st.integers(1, 200)


@given(
    buffer_size=sizes, teacher_steps=sizes, total_timesteps=sizes, learning_starts=st.integers(0, 200), data=st.data()
)
def test_as_many_games_as_fit(data: st.DataObject, **flags: int) -> None:
    """`num_envs` or the largest of 8, 4, 2, 1 that a user could have given, and no other flag changes."""
    num_envs, n_step = data.draw(st.sampled_from([3, 16, 32])), data.draw(st.integers(1, 5))
    args = qdagger.Args(num_envs=num_envs, n_step=n_step, **flags)

    def fits(candidate: int) -> bool:
        try:
            check_sizes(dataclasses.replace(args, num_envs=candidate))
        except UserError:
            return False
        return True

    largest = next((n for n in (num_envs, 8, 4, 2, 1) if n <= num_envs and fits(n)), num_envs)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert fit_num_envs(args) == dataclasses.replace(args, num_envs=largest)
    assert bool(out.getvalue()) == (largest != num_envs)


# ==================== bad input ====================


class ReachedLongPhase(Exception):
    """Raised in place of the first game."""


@pytest.fixture
def no_long_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, in which the scripts can't begin to play."""

    def play(*args: Any, **kwargs: Any) -> None:
        raise ReachedLongPhase

    monkeypatch.setattr("cleanrl_utils.run.play_games", play)
    monkeypatch.setattr("cleanrl_utils.tracking.progress_bar", play)
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refuse(script: Any, args: Any) -> str:
    """The line in which the script refuses ``args``; it leaves nothing behind."""
    with pytest.raises(UserError) as caught:
        script.main(args)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert not Path("runs").is_dir(), "a run directory was left behind"
    return message


def assert_refused(args: qdagger.Args | dqn_atari.Args, *words: str) -> str:
    """Both backends refuse ``args`` in the same line, which has all ``words``."""
    script, other = (qdagger, qdagger_jax) if isinstance(args, qdagger.Args) else (dqn_atari, dqn_atari_jax)
    message = refuse(script, args)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    other_message = refuse(other, twin(args, other))
    own = r"[\d.]+ GB is available|runs/\S+"  # changes from one moment, or script, to the next
    assert re.sub(own, "", other_message) == re.sub(own, "", message)
    return message


def test_good_input_is_not_refused(no_long_phase: Path, teacher: Path) -> None:
    """What the cases below change one flag of does get to the first game."""
    for script in (qdagger, qdagger_jax):
        with pytest.raises(ReachedLongPhase):
            script.main(twin(tiny(teacher), script))
    for script in (dqn_atari, dqn_atari_jax):
        with pytest.raises(ReachedLongPhase):
            script.main(script.Args(env_id=GAME, buffer_size=100, learning_starts=60))


NOT_ABOVE = [("num_envs", 0), ("num_envs", -2), ("batch_size", 0), ("train_frequency", 0), ("n_step", 0)]
NOT_ABOVE += [("target_network_frequency", 0), ("total_timesteps", 0), ("buffer_size", 0), ("eval_episodes", 0)]
OUT_OF_RANGE = [("gamma", 2.0), ("gamma", -0.1), ("tau", -1.0), ("tau", 1.5), ("start_e", 1.1), ("end_e", -0.1)]
OUT_OF_RANGE += [("exploration_fraction", 2.0), ("learning_rate", 0.0), ("learning_rate", -1e-4), ("seed", -1)]
OUT_OF_RANGE += [(name, float("nan")) for name in ("learning_rate", "gamma", "tau", "end_e", "exploration_fraction")]
OUT_OF_RANGE += [("learning_rate", float("inf")), ("learning_starts", -1)]
OUT_OF_RANGE += [("repeat_action_probability", x) for x in (-0.1, 1.0, 1.5, float("nan"))]
QDAGGER_ONLY = [("temperature", 0.0), ("temperature", -1.0), ("temperature", float("nan")), ("offline_steps", -1)]
QDAGGER_ONLY += [("temperature", float("inf")), ("distill_coefficient", -1.0), ("distill_coefficient", float("nan"))]
QDAGGER_ONLY += [(f"{name}_learning_rate", x) for name in ("online", "final") for x in (0.0, float("nan"))]
QDAGGER_ONLY += [("offline_eval_frequency", 0), ("teacher_eval_episodes", 0), ("teacher_steps", 0)]


@pytest.mark.parametrize(("name", "value"), NOT_ABOVE + OUT_OF_RANGE + QDAGGER_ONLY)
def test_number_out_of_range(name: str, value: float, no_long_phase: Path, teacher: Path) -> None:
    """The message names the flag and the value found."""
    words = ("--" + name.replace("_", "-"), str(value))
    assert_refused(tiny(teacher, **{name: value}), *words)
    if hasattr(dqn_atari.Args, name):
        assert_refused(
            dqn_atari.Args(**{"env_id": GAME, "buffer_size": 100, "learning_starts": 60, name: value}), *words
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_starts": 60}, ("--learning-starts", "--total-timesteps")),
        ({"learning_starts": 59, "num_envs": 4}, ("--learning-starts", "--total-timesteps")),
        ({"train_frequency": 61}, ("--train-frequency", "--total-timesteps")),
        ({"learning_starts": 0, "n_step": 30, "teacher_steps": 100}, ("--total-timesteps",)),
        ({"buffer_size": 11}, ("--buffer-size", "--num-envs", "at least 12")),
        ({"buffer_size": 15, "n_step": 3}, ("--buffer-size", "--n-step", "at least 16")),
        ({"teacher_steps": 11}, ("--teacher-steps", "--num-envs", "at least 12")),
        ({"upload_model": True}, ("--upload-model", "--save-model")),
        ({"final_learning_rate": 1e-5, "distill_coefficient": 0.0}, ("--final-learning-rate", "--distill-coefficient")),
        ({"buffer_size": 10**10}, ("--buffer-size", "GB", "10,000,000,000")),
        ({"teacher_steps": 10**10}, ("--teacher-steps", "GB", "10,000,000,000")),
        ({"exp_name": "a/b"}, ("--exp-name",)),
        ({"seed": 2**64}, ("--seed",)),
    ],
)
def test_flags_that_do_not_go_together(
    changes: dict, words: tuple[str, ...], no_long_phase: Path, teacher: Path
) -> None:
    """Found out at the start, not after hours: nothing would ever be learned, or there is no room for it."""
    assert_refused(tiny(teacher, **changes), *words)
    if changes.keys().isdisjoint({"teacher_steps", "final_learning_rate"}):
        dqn = {"env_id": GAME, "buffer_size": 100, "learning_starts": 40, "num_envs": 2, "total_timesteps": 60}
        assert_refused(dqn_atari.Args(**(dqn | changes)), *words)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("Klaxx", ("NoFrameskip-v4",)),
        ("KlaxxNoFrameskip-v4", ("Klax",)),
        ("ALE/Nonsense-v5", ("Nonsense",)),
        ("CartPole-v1", ("no Atari environment", "NoFrameskip-v4")),
        ("Pendulum-v1", ("no Atari environment", "NoFrameskip-v4")),
        ("", ("--env-id '' is no Atari environment", "NoFrameskip-v4")),
    ],
)
def test_unknown_game(env_id: str, words: tuple[str, ...], no_long_phase: Path, teacher: Path) -> None:
    """Says what ids look like or which game was perhaps meant."""
    assert_refused(tiny(teacher, env_id=env_id), "--env-id", env_id, *words)
    assert_refused(dqn_atari.Args(env_id=env_id, buffer_size=100, learning_starts=60), "--env-id", env_id, *words)


class Touch:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def bad_teachers(good: Path, trap: Path) -> dict[str, tuple[bytes | None, str]]:
    """Contents of a teacher's file, None for no file, and a pattern of what the message has to say beside the path."""
    data = (good / f"{DQN}.cleanrl_model").read_bytes()
    folder = trap.parent
    torch.save({"network.0.weight": Touch(trap)}, folder / "zip")
    six = (write_teacher(folder / "six", 6) / f"{DQN}.cleanrl_model").read_bytes()
    lacking = (write_teacher(folder / "lacking", **{"network.7.bias": None}) / f"{DQN}.cleanrl_model").read_bytes()
    hidden = {"network.7.weight": torch.zeros(256, 3136), "network.7.bias": torch.zeros(256)}
    narrow = write_teacher(folder / "narrow", **hidden, **{"network.9.weight": torch.zeros(NUM_ACTIONS, 256)})
    nan = write_teacher(folder / "nan", **{"network.9.bias": torch.full((NUM_ACTIONS,), np.nan)})
    return {
        "no file": (None, f"has no {DQN}.cleanrl_model"),
        "other game": (six, "has 6 actions and the game has 18"),
        "empty": (b"", ""),
        "truncated": (data[: len(data) // 2], ""),
        "end cut off": (data[:-100], ""),
        "PNG": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20, "neither a PyTorch nor a flax model"),
        "text": (b"404: not found\n", "neither a PyTorch nor a flax model"),
        "pickle": (pickle.dumps(Touch(trap), protocol=2), "might run code"),
        "pickle in a zip": ((folder / "zip").read_bytes(), "might run code"),
        "entry missing": (lacking, r"network\.7"),
        "narrower": ((narrow / f"{DQN}.cleanrl_model").read_bytes(), r"(network\.7|Dense_0).*\(256,.* has \(512,"),
        "NaN": ((nan / f"{DQN}.cleanrl_model").read_bytes(), r"network\.9\.bias|Dense_1/bias"),
    }


def test_bad_teacher(no_long_phase: Path, teacher: Path, tmp_path: Path) -> None:
    """No traceback from whatever lies where a teacher should, no code run from it, and its path in the message."""
    trap = tmp_path / "trap"
    for i, (name, (content, pattern)) in enumerate(bad_teachers(teacher, trap).items()):
        directory = tmp_path / f"teacher{i}"
        directory.mkdir()
        if content is not None:
            (directory / f"{DQN}.cleanrl_model").write_bytes(content)
        for script in (qdagger, qdagger_jax):  # which name layers each in its own way
            message = refuse(script, twin(tiny(directory), script))
            assert str(directory / f"{DQN}.cleanrl_model" if content is not None else directory) in message
            assert re.search(pattern, message), f"{name}: {message}"
            assert "weights_only" not in message, name
            assert not trap.exists(), f"{name}: code was run"


def test_run_directory_cannot_be_written(no_long_phase: Path, teacher: Path) -> None:
    """A plain file is in the way: permission bits mean nothing to root."""
    Path("runs").write_text("")
    assert_refused(tiny(teacher), "runs")
    assert_refused(dqn_atari.Args(env_id=GAME, buffer_size=100, learning_starts=60), "runs")


@pytest.mark.parametrize(
    ("module", "flag"),
    [("wandb", "track"), ("imageio_ffmpeg", "capture_video"), ("stable_baselines3", "capture_video")],
)
def test_missing_package(
    module: str, flag: str, no_long_phase: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optional package that a flag needs is missed at the start, not when it is first used, hours later."""
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert_refused(tiny(teacher, **{flag: True}), module.split("_")[0], "pip install")
    assert_refused(dqn_atari.Args(env_id=GAME, buffer_size=100, learning_starts=60, **{flag: True}), "pip install")


@pytest.mark.parametrize(
    ("script", "flags", "word"),
    [
        (STUDENT, f"--env-id {GAME} --buffer-size 1000 --teacher-policy-hf-repo trap --teacher-steps 1000", "trap"),
        (DQN, f"--env-id {GAME} --buffer-size {10**10}", "--buffer-size"),
        (STUDENT_JAX, f"--env-id {GAME} --buffer-size 1000 --teacher-policy-hf-repo x/y --teacher-steps 1000", "x/y"),
        (DQN_JAX, "--env-id CartPole-v1", "CartPole-v1"),
    ],
)
def test_bad_input_in_a_shell(script: str, flags: str, word: str, tmp_path: Path) -> None:
    """One line on stderr, exit code 2, nothing left behind."""
    (tmp_path / "trap").mkdir()
    torch.save({"network.0.weight": Touch(tmp_path / "run by pickle")}, tmp_path / "trap" / f"{DQN}.cleanrl_model")
    result = run_script(script, tmp_path, *flags.split())
    assert result.returncode == 2, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert word in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["trap"]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_throughput_still_runs(backend: str, tmp_path: Path) -> None:
    """It builds on what a script's main calls, and no other test does it its way."""
    flags = f"--backend {backend} --seconds 0.1 --rounds 1 --num-envs 2 --replay-steps 200 --batch-size 4 --no-bf16"
    teacher = REPO / "teachers" / "PongNoFrameskip-v4-dqn_atari-seed1"
    result = run_script("../benchmark/throughput", tmp_path, "--teacher", teacher, *flags.split())
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \|", result.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == [
        "teacher data, steps/s",
        "offline, updates/s",
        "online, steps/s",
        "run of full size, hours",
    ]
    assert all(float(plain) > 0 and float(script) > 0 for _, plain, script in rows)


PRINT_MUCH = """
from cleanrl_utils.checks import one_line_errors
with one_line_errors():
    for i in range(100_000):
        print("λ ±", i)
"""


def test_output_that_an_encoding_lacks_or_nobody_reads() -> None:
    """Neither ends in a traceback."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONIOENCODING": "ascii"}
    process = subprocess.Popen(
        [sys.executable, "-c", PRINT_MUCH], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "? ? 0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141
