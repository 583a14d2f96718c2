"""A researcher's copy of a script with one line changed: everything that works with the script works with the copy.

The copies lie outside of the repository. Each trains, is stopped, goes on, saves, uploads, plays, converts and teaches.
Games are cut off after 100 steps, in which one scores in Alien whatever one does.
"""

import importlib.util
import io
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import huggingface_hub
import jax
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from test_hub import TOKEN, Hub, serve

from cleanrl_utils.checks import UserError
from cleanrl_utils.convert import convert, flax_to_torch, is_torch_file, read_flax, read_torch
from cleanrl_utils.evals import dqn_eval, dqn_jax_eval
from cleanrl_utils.run import parse_args

GAME, NUM_ACTIONS = "AlienNoFrameskip-v4", 18
SIZES = (
    "--num-envs 2 --teacher-steps 60 --offline-steps 4 --offline-eval-frequency 4 --total-timesteps 60 --batch-size 4"
)
SIZES += " --buffer-size 60 --learning-starts 20 --teacher-eval-episodes 1 --eval-episodes 2 --end-e 0.2"


class Change(NamedTuple):
    """A line of a script, what a researcher makes of it, and what the script then says to a model of the copy."""

    script: ModuleType
    old: str
    new: str
    refusal: str


CHANGES = {
    "hidden layer": Change(
        qdagger,
        "c0, c1, c2, hidden = 16, 32, 32, 256",
        "c0, c1, c2, hidden = 16, 32, 32, 512",
        "network.5.weight has shape (512, 3872) where QNetwork has (256, 3872)",
    ),
    "channels": Change(
        qdagger,
        "c0, c1, c2, hidden = 16, 32, 32, 256",
        "c0, c1, c2, hidden = 32, 64, 64, 256",
        "network.0.conv.weight has shape (32, 4, 3, 3) where QNetwork has (16, 4, 3, 3)",
    ),
    "hidden layer, JAX": Change(
        qdagger_jax,
        "nn.Dense(256, dtype",
        "nn.Dense(512, dtype",
        "params/Dense_0/bias has shape (512,) where QNetwork has (256,)",
    ),
    "channels, JAX": Change(
        qdagger_jax,
        "for channels in (16, 32, 32):",
        "for channels in (32, 64, 64):",
        "params/ConvSequence_0/Conv_0/bias has shape (32,) where QNetwork has (16,)",
    ),
}


class Student(NamedTuple):
    """What the copy of a script has trained."""

    change: Change
    script: Path
    copy: ModuleType
    repo: str
    model: Path
    score: float
    """the mean return of the run's last evaluation"""


def import_copy(path: Path) -> ModuleType:
    """The script as Python runs it: a run finds its own file through ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stopping(add: Callable, steps: int) -> Callable:
    """`Replay.add` that sends the process SIGTERM after so many calls."""
    calls = itertools.count(1)

    def add_and_stop(*args: object) -> None:
        add(*args)
        if next(calls) == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    return add_and_stop


@pytest.fixture(scope="module", autouse=True)
def short_games() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cleanrl_utils.atari.MAX_FRAMES", 400)
        yield


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub that this process's client talks to: it has read its own settings when it was imported."""
    with serve() as server, pytest.MonkeyPatch.context() as patch:
        constants = huggingface_hub.constants
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("NO_PROXY", "127.0.0.1")
        huggingface_hub.close_session()
        yield server
    huggingface_hub.close_session()


@pytest.fixture(scope="module", params=CHANGES)
def student(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> Iterator[Student]:
    """A run of the copy that is stopped in the online phase, goes on, saves and uploads."""
    change, folder = CHANGES[request.param], tmp_path_factory.mktemp("copy")
    text = Path(change.script.__file__).read_text()
    assert text.count(change.old) == 1
    script = folder / ("wide_jax.py" if change.script is qdagger_jax else "wide.py")
    script.write_text(text.replace(change.old, change.new))
    copy = import_copy(script)
    torch.manual_seed(1)
    teacher = folder / "teacher"
    teacher.mkdir()
    qdagger.save_model(qdagger.TeacherNetwork(NUM_ACTIONS), teacher / "dqn_atari.cleanrl_model")
    flags = f"--env-id {GAME} --exp-name wider --teacher-policy-hf-repo {teacher} --teacher-model-exp-name dqn_atari"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        with pytest.MonkeyPatch.context() as stop:
            # 30 steps of two games are the teacher's; 10 more are there before the student's first update.
            stop.setattr(copy.Replay, "add", stopping(copy.Replay.add, 30 + 20))
            with pytest.raises(SystemExit) as stopped:
                copy.main(parse_args(copy.Args, f"{flags} {SIZES}".split()))
        assert stopped.value.code == 143
        (run_dir,) = Path("runs").iterdir()
        assert f"resume with: python {script.name} --resume {run_dir}" in out.getvalue()
        progress = json.loads((run_dir / "progress.json").read_text())
        assert not progress["finished"]
        copy.main(parse_args(copy.Args, ["--resume", str(run_dir), "--save-model", "--upload-model"]))
        run_dir = run_dir.resolve()
    progress = json.loads((run_dir / "progress.json").read_text())
    assert progress["finished"]
    assert "resuming" in out.getvalue()
    model, repo = run_dir / "wider.cleanrl_model", f"alice/{GAME}-wider-seed1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "cache"))
        yield Student(change, script, copy, repo, model, progress["return"])
    del sys.modules[script.stem]


def test_uploaded_model_plays(student: Student, hub: Hub) -> None:
    """By the commands that its model card gives, and as well as the run's own evaluation says."""
    files = hub.files[student.repo]
    assert files["wider.cleanrl_model"] == student.model.read_bytes()
    assert files[student.script.name] == student.script.read_bytes()
    evals = dqn_jax_eval if student.change.script is qdagger_jax else dqn_eval
    card = files["README.md"].decode()
    command = f"\npython -m {evals.__name__} --model {student.repo} --exp-name wider --env-id {GAME}"
    assert f"{command} --script cleanrl/{student.script.name}\n" in card
    assert (
        f"\npython cleanrl/{student.script.name} --env-id {GAME} \\\n    --teacher-policy-hf-repo {student.repo}"
        in card
    )
    assert f"\npython cleanrl/{student.script.name} --exp-name wider " in card

    flags = {"model": student.repo, "exp_name": "wider", "env_id": GAME, "episodes": 2, "epsilon": 0.2, "seed": 1001}
    assert evals.evaluate(evals.Args(**flags, script=student.script)).mean() == student.score
    with pytest.raises(UserError, match=re.escape(student.change.refusal)):
        evals.evaluate(evals.Args(**flags))


def test_the_unchanged_script_refuses_the_model(student: Student) -> None:
    """With the first array that differs, in one line; those of the offline phase too."""
    offline = student.model.with_stem("wider-offline-4")
    for path in (student.model, offline):
        with pytest.raises(UserError) as refused:
            student.change.script.load_model(path, NUM_ACTIONS)
        assert str(refused.value).startswith(f"{path} is no usable model: {student.change.refusal}; ")
        assert len(str(refused.value).splitlines()) == 1


def q_values(copy: ModuleType, path: Path) -> np.ndarray:
    """What the copy's network of a model makes of some observations, float32 (2, 18)."""
    observation = np.random.default_rng(5).integers(0, 256, (2, 4, 84, 84), np.uint8)
    loaded = copy.load_model(path, NUM_ACTIONS)
    if isinstance(loaded, torch.nn.Module):
        with torch.inference_mode():
            return loaded(torch.from_numpy(observation)).numpy()
    network, params = loaded
    return np.asarray(jax.jit(network.apply)(params, observation))


def test_conversion(student: Student, tmp_path: Path) -> None:
    """Into the other encoding, which the copy reads as well, and back to the same bits."""

    def arrays(path: Path) -> dict[str, np.ndarray]:
        return read_torch(path) if is_torch_file(path) else flax_to_torch(read_flax(path))

    other = convert(student.model, tmp_path / "other")
    assert other == ("torch" if student.change.script is qdagger_jax else "flax")
    assert is_torch_file(tmp_path / "other") == (other == "torch")
    convert(tmp_path / "other", tmp_path / "back")
    assert is_torch_file(tmp_path / "back") == is_torch_file(student.model)
    expected, back = arrays(student.model), arrays(tmp_path / "back")
    assert list(back) == list(expected)
    assert all(np.array_equal(back[key], expected[key]) for key in expected)
    expected = q_values(student.copy, student.model)
    assert np.ptp(expected) > 1e-3
    np.testing.assert_array_equal(q_values(student.copy, tmp_path / "other"), expected)


def test_teaches_the_next(student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the same copy learns from it while it plays: generation two."""
    monkeypatch.chdir(tmp_path)
    flags = f"--env-id {GAME} --exp-name next --teacher-policy-hf-repo {student.model.parent} --checkpoint-minutes 0"
    flags += f" --teacher-model-exp-name wider --save-model {SIZES} --offline-steps 0"
    student.copy.main(parse_args(student.copy.Args, flags.split()))
    (model,) = tmp_path.glob("runs/*/next.cleanrl_model")
    taught, teacher = q_values(student.copy, model), q_values(student.copy, student.model)
    assert taught.shape == teacher.shape
    assert not np.allclose(taught, teacher)
