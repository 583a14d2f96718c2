"""The command that plays a saved model: which script and library, the same episodes for all, bad input."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
from flax.serialization import to_bytes
from helpers import DQN, REPO, flax_params, write_teacher

from cleanrl_utils import enjoy
from cleanrl_utils.errors import UserError
from cleanrl_utils.models import read_arrays

GAME = "AlienNoFrameskip-v4"


@pytest.fixture(scope="module", autouse=True)
def short_episodes() -> Iterator[None]:
    """Truncate episodes after 100 steps, in which any policy gets rewards in Alien."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cleanrl_utils.atari.MAX_FRAMES", 400)
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DQN with random weights, in both formats."""
    folder = write_teacher(tmp_path_factory.mktemp("model"))
    weights = read_arrays(folder / "dqn_atari.cleanrl_model")
    (folder / "dqn_atari_jax.cleanrl_model").write_bytes(to_bytes(flax_params(weights)))
    return folder


def play(repository: Path | str, **flags: object) -> np.ndarray:
    """Play with the command's function, as a user would with these flags."""
    flags = {"env_id": GAME, "eval_episodes": 2, "epsilon": 0.5, "seed": 5} | flags
    return enjoy.main(enjoy.Args(hf_repository=str(repository), **flags))


def test_all_play_the_same_episodes(directory: Path, capsys: pytest.CaptureFixture) -> None:
    """Both libraries and formats, a file or its directory. Rounding does not decide between these actions."""
    expected = play(directory)
    assert expected.shape == (2,)
    assert len({*expected}) > 1
    for repository, flags in (
        (directory, {"exp_name": "dqn_atari_jax"}),
        (directory / "dqn_atari.cleanrl_model", {"exp_name": "c51"}),
        (directory / "dqn_atari_jax.cleanrl_model", {}),
        (directory / "dqn_atari_jax.cleanrl_model", {"script": Path(qdagger.__file__)}),
    ):
        np.testing.assert_array_equal(play(repository, **flags), expected)
    assert (play(directory, seed=6) != expected).any()
    a, b = sorted(expected)
    line = f"enjoy: return {(a + b) / 2:.1f} ± {(b - a) / 2:.1f} over 2 episodes\n"
    line += f"standard error {(b - a) / 2:.2f}, quartiles [{0.75 * a + 0.25 * b}, {(a + b) / 2}, "
    assert line in capsys.readouterr().out


def test_without_pytorch_jax_plays(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(enjoy, "import_script", lambda path: pytest.fail(path.name))
    with pytest.raises(pytest.fail.Exception, match="qdagger_dqn_atari_jax_"):
        play(directory)


def test_one_episode_and_its_video(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A policy samples its actions in both. The models of two runs have videos of their own; the path is printed."""
    temperatures = set()
    import_script = enjoy.import_script

    def import_and_record(*args: object) -> ModuleType:
        script = import_script(*args)
        choose = script.epsilon_greedy
        script.epsilon_greedy = lambda *args: temperatures.add(args[3]) or choose(*args)
        return script

    monkeypatch.setattr(enjoy, "import_script", import_and_record)
    monkeypatch.chdir(tmp_path)
    weights = read_arrays(directory / "dqn_atari.cleanrl_model")
    policy = flax_params({key.replace("network.9", "actor"): array for key, array in weights.items()})
    for run in ("a", "b"):
        Path(run).mkdir()
        Path(run, "ppo").write_bytes(to_bytes(policy))
        (episodic_return,) = play(f"{run}/ppo", eval_episodes=1, capture_video=True)
        out = capsys.readouterr().out
        assert f"return {episodic_return:.1f} ± 0.0" in out
        (path,) = re.findall("^video: (.*)$", out, re.MULTILINE)
        assert Path(path).read_bytes()[4:8] == b"ftyp"
    assert len([*Path("videos").rglob("*.mp4")]) == 2
    assert temperatures == {1.0}


def test_flags_of_cleanrl(monkeypatch: pytest.MonkeyPatch) -> None:
    """They name the repository."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: 1 / 0)
    flags = {"env_id": "ALE/Alien-v5", "exp_name": "c51_atari", "hf_entity": "lab", "seed": 2}
    with pytest.raises(UserError, match=r"'lab/ALE-Alien-v5-c51_atari-seed2' can't be loaded .*: division by zero; "):
        play("", **flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"eval_episodes": 0}, "--eval-episodes must be at least 1"),
        ({"epsilon": float("nan")}, "--epsilon from 0 to 1"),
        ({"seed": 2**32}, "--seed from 0 to 2^32 - 1"),
        ({"env_id": "PongNoFrameskip-v4"}, "is not a usable model: it has 18 actions"),
        ({"exp_name": "c51"}, "from dqn_atari.cleanrl_model, dqn_atari_jax.cleanrl_model"),
        ({"script": Path("nowhere.py")}, "--script nowhere.py is not a file; leave it out, or give"),
        ({"script": REPO / "cleanrl" / f"{DQN}.py"}, f"/{DQN}.py has no class Teacher, which loads a model; give"),
    ],
)
def test_bad_input(flags: dict, message: str, directory: Path) -> None:
    with pytest.raises(UserError) as caught:
        play(directory, **flags)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_error_in_an_edited_copy_has_its_traceback(directory: Path, tmp_path: Path) -> None:
    """It names the line of the copy; a message without it would be useless."""
    copy = tmp_path / "my_qdagger.py"
    copy.write_text("import os\nimport no_such_package\n")
    with pytest.raises(ModuleNotFoundError) as error:
        play(directory, script=copy)
    assert any(entry.path == copy and entry.lineno == 1 for entry in error.traceback)  # counted from 0
