"""A copy of a script with another network: it trains, is stopped, resumes, saves, plays and teaches as the script does.

The copies lie outside of the repository. Episodes are truncated after 100 steps, in which any policy scores in Alien.
"""

import importlib.util
import io
import itertools
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
from helpers import cpu, only, read_scalars, write_teacher

from cleanrl_utils import enjoy
from cleanrl_utils.errors import UserError
from cleanrl_utils.run import parse_args

GAME = "AlienNoFrameskip-v4"
NUM_ACTIONS = 18
SIZES = "--num-envs 2 --teacher-steps 60 --offline-steps 3 --offline-eval-frequency 3 --total-timesteps 60 "
SIZES += "--buffer-size 60 --learning-starts 20 --train-frequency 8 --batch-size 2 "
SIZES += "--teacher-eval-episodes 1 --eval-episodes 2 --end-e 0.2 "
CHANGES = {  # the script, and lines of it with their replacements
    "PyTorch": (
        qdagger,
        {
            "ConvSequence(4, 16)": "ConvSequence(4, 8)",
            "ConvSequence(16, 32)": "ConvSequence(8, 16)",
            "ConvSequence(32, 32)": "ConvSequence(16, 24)",
            "nn.Linear(32 * 11 * 11, 256)": "nn.Linear(24 * 11 * 11, 512)",
            "nn.Linear(256, num_actions)": "nn.Linear(512, num_actions)",
        },
    ),
    "JAX": (qdagger_jax, {"for channels in (16, 32, 32):": "for channels in (8, 16, 24):", "Dense(256,": "Dense(512,"}),
}


class Student(NamedTuple):
    """A finished run of a copy."""

    script: ModuleType
    path: Path
    copy: ModuleType
    run_dir: Path
    model: Path


def import_copy(path: Path) -> ModuleType:
    """Import a script as Python does, which lets a run find its own file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def short_episodes() -> Iterator[None]:
    """Truncate episodes after 100 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cleanrl_utils.atari.MAX_FRAMES", 400)
        yield


@pytest.fixture(scope="module", params=CHANGES)
def student(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Student]:
    """Train a copy, stop it in the online phase, and resume it."""
    folder = tmp_path_factory.mktemp("copy")
    script, lines = CHANGES[request.param]
    text = Path(script.__file__).read_text(encoding="utf-8")
    for old, new in lines.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / ("wider_jax.py" if script is qdagger_jax else "wider.py")
    path.write_text(text, encoding="utf-8")
    copy = import_copy(path)
    flags = f"{SIZES} --env-id {GAME} --teacher-policy-hf-repo {write_teacher(folder / 'teacher')} "
    flags += "--teacher-model-exp-name dqn_atari"
    add = copy.Replay.add
    calls = itertools.count(1)

    def add_and_stop(*args: object) -> None:
        add(*args)
        if next(calls) == 30 + 20:  # 30 are of the teacher data, and 10 precede the first online update
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        with pytest.MonkeyPatch.context() as stop:
            stop.setattr(copy.Replay, "add", add_and_stop)
            with pytest.raises(SystemExit) as stopped:
                copy.main(parse_args(copy.Args, flags.split()))
        assert stopped.value.code == 128 + signal.SIGTERM
        run_dir = only(Path("runs").iterdir())
        assert f"resume with: python {path.name} --resume {run_dir}" in out.getvalue()
        copy.main(parse_args(copy.Args, ["--resume", str(run_dir), "--save-model"]))
    run_dir = folder / run_dir
    yield Student(script, path, copy, run_dir, run_dir / f"{path.stem}.cleanrl_model")
    del sys.modules[path.stem]


def test_enjoy_plays_the_model_with_the_copy(student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its episodes are those of the run's own evaluation. The script itself refuses the model in one line."""
    monkeypatch.chdir(tmp_path)
    flags = {"hf_repository": str(student.run_dir), "exp_name": student.path.stem, "env_id": GAME, "eval_episodes": 2}
    returns = enjoy.main(enjoy.Args(**flags, epsilon=0.2, script=student.path))
    assert returns.tolist() == [value for _, value in read_scalars(student.run_dir)["eval/episodic_return"]]
    assert returns.sum() > 0
    for model in (student.model, student.model.with_stem(f"{student.path.stem}-offline-3")):
        with pytest.raises(UserError, match=re.escape(model.as_posix())) as refused:
            student.script.Teacher(model, NUM_ACTIONS, 1.0, cpu(student.script))
        assert len(str(refused.value).splitlines()) == 1


def q_values_of(copy: ModuleType, path: Path) -> np.ndarray:
    """Compute the Q-values of a model for some observations, float32 (2, 18)."""
    observation = np.random.default_rng(5).integers(0, 256, (2, 4, 84, 84), np.uint8)
    return copy.Teacher(path, NUM_ACTIONS, 1.0, cpu(copy)).q_values(observation)


def test_the_student_is_the_next_teacher(student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the same copy, without an offline phase, learns from it."""
    monkeypatch.chdir(tmp_path)
    flags = f"{SIZES} --env-id {GAME} --exp-name next --teacher-policy-hf-repo {student.run_dir} --offline-steps 0 "
    flags += f"--teacher-model-exp-name {student.path.stem} --save-model --checkpoint-minutes 0"
    student.copy.main(parse_args(student.copy.Args, flags.split()))
    model = only(tmp_path.glob("runs/*/next.cleanrl_model"))
    assert not np.allclose(q_values_of(student.copy, model), q_values_of(student.copy, student.model))
