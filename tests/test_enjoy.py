"""The command that plays a saved model: which script and library, the same episodes for all, bad input."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import torch
from flax.serialization import to_bytes
from helpers import DQN, PYTHONPATH, flax_params

from cleanrl_utils import enjoy
from cleanrl_utils.errors import UserError
from cleanrl_utils.models import read_arrays

ROOT = Path(__file__).parent.parent
GAME = "AlienNoFrameskip-v4"
NUM_ACTIONS = 18
NO_TORCH = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "torch" else find(name, *args)
"""


@pytest.fixture(scope="module", autouse=True)
def short_episodes() -> Iterator[None]:
    """Truncate episodes after 100 steps, in which any policy gets rewards in Alien."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cleanrl_utils.atari.MAX_FRAMES", 400)
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DQN with random weights, in both formats."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    state_dict = qdagger.TeacherNetwork(NUM_ACTIONS).state_dict()
    torch.save(state_dict, folder / "dqn_atari.cleanrl_model")
    weights = {name: array.numpy() for name, array in state_dict.items()}
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


def test_which_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of JAX if the name of the model has ``_jax``; that of the other library if one is not installed."""
    for missing, names in (
        ("", {"lab_jax/dqn_atari": "", "c51_atari_jax.cleanrl_model": "_jax"}),
        ("torch", {"dqn_atari": "_jax", "c51_atari_jax": "_jax"}),
        ("flax", {"dqn_atari": "", "c51_atari_jax": ""}),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            for name, library in names.items():
                assert enjoy.choose_script(Path(name).name).name == f"qdagger_dqn_atari{library}_impalacnn.py"


def test_one_episode_and_its_video(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A policy samples its actions in both."""
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
    (tmp_path / "ppo").write_bytes(to_bytes(policy))
    (episodic_return,) = play("ppo", eval_episodes=1, capture_video=True)
    assert f"return {episodic_return:.1f} ± 0.0" in capsys.readouterr().out
    (video,) = Path("videos").rglob("*.mp4")
    assert video.read_bytes()[4:8] == b"ftyp"
    assert temperatures == {1.0}


def test_each_model_has_a_video_of_its_own(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Also the models of two runs, whose files have the same name; the path is printed."""
    monkeypatch.chdir(tmp_path)
    model = directory / "dqn_atari.cleanrl_model"
    for run in ("runs/a", "runs/b"):
        Path(run).mkdir(parents=True)
        shutil.copy(model, run)
        play(f"{run}/dqn_atari.cleanrl_model", capture_video=True, eval_episodes=1)
        (path,) = re.findall("^video: (.*)$", capsys.readouterr().out, re.MULTILINE)
        assert Path(path).is_file()
    assert len([*Path("videos").rglob("*.mp4")]) == 2


def test_greedy_episodes_repeat(directory: Path, capsys: pytest.CaptureFixture) -> None:
    """A warning says so where nothing but the no-ops is random."""
    returns = play(directory, epsilon=0, eval_episodes=3)
    warning = f"WARNING: 3 episodes have {len(set(returns))} different returns: "
    assert warning in capsys.readouterr().err
    for flags in ({"epsilon": 0.01}, {"env_id": "ALE/Alien-v5"}):
        play(directory, **{"epsilon": 0} | flags)
        assert "WARNING" not in capsys.readouterr().err


def test_flags_reach_the_episodes(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CleanRL's flags name the repository."""
    asked = []
    monkeypatch.setattr(enjoy, "play_episodes", lambda *args: asked.append(args) or np.zeros(3))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: 1 / 0)
    flags = {"env_id": "ALE/Alien-v5", "exp_name": "c51_atari", "hf_entity": "lab", "seed": 2}
    with pytest.raises(UserError, match=r"^'lab/ALE-Alien-v5-c51_atari-seed2' can't be loaded .*: division by zero; "):
        play("", **flags)
    play(directory)
    _, _, episodes, make_envs, seed, video_dir = asked[0]
    assert make_envs.args == (GAME,)
    assert (episodes, seed, video_dir) == (2, 5, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"eval_episodes": 0}, "--eval-episodes must be at least 1"),
        ({"epsilon": float("nan")}, "--epsilon from 0 to 1"),
        ({"seed": 2**32}, "--seed from 0 to 2^32 - 1"),
        ({"env_id": "PongNoFrameskip-v4"}, "is not a usable model: it has 18 actions"),
        ({"exp_name": "c51"}, "from dqn_atari.cleanrl_model, dqn_atari_jax.cleanrl_model"),
        ({"script": Path("nowhere.py")}, "there is no Python script 'nowhere.py'; give another --script, such as"),
        ({"script": ROOT / "cleanrl"}, "/cleanrl'; give another --script, such as"),
        ({"script": ROOT / "README.md"}, "/README.md'; give another --script, such as"),
        (
            {"script": ROOT / "cleanrl" / f"{DQN}.py"},
            f"/{DQN}.py' has no class Teacher, which loads a model; give another --script, such as",
        ),
    ],
)
def test_bad_input(flags: dict, message: str, directory: Path) -> None:
    with pytest.raises(UserError) as caught:
        play(directory, **flags)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def enjoy_command(directory: Path, *flags: object, path: str = PYTHONPATH) -> subprocess.CompletedProcess:
    """Run the command. Klax is over within a few hundred steps, and has 18 actions."""
    command = [sys.executable, "-m", "cleanrl_utils.enjoy", "--hf-repository", directory, "--eval-episodes", "1"]
    command += ["--env-id", "KlaxNoFrameskip-v4", "--exp-name", DQN, *flags]
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, encoding="utf-8", timeout=300)


def test_an_edited_copy_plays(directory: Path, tmp_path: Path) -> None:
    """Also with annotations that are strings, from a folder without the helpers."""
    copy = tmp_path / "my_qdagger.py"
    source = Path(qdagger.__file__).read_text(encoding="utf-8")
    copy.write_text(source.replace("\nimport os\n", "\nfrom __future__ import annotations\n\nimport os\n", 1), "utf-8")
    result = enjoy_command(directory, "--script", copy)
    assert "enjoy: return " in result.stdout, result.stderr
    assert "from __future__" in copy.read_text(encoding="utf-8")


@pytest.mark.parametrize("line", ["import no_such_package", "class Teacher(NoSuchName): pass", "def ("])
def test_an_error_in_an_edited_copy_has_its_traceback(line: str, directory: Path, tmp_path: Path) -> None:
    """It names the line of the copy; a message without it would be useless."""
    copy = tmp_path / "my_qdagger.py"
    copy.write_text(f"import os\n{line}\n")
    result = enjoy_command(directory, "--script", copy)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert f'File "{copy}", line 2' in result.stderr
    assert re.match("(ModuleNotFound|Name|Syntax)Error: ", result.stderr.splitlines()[-1])


def test_a_user_without_torch(directory: Path, tmp_path: Path) -> None:
    """JAX plays PyTorch's model. PyTorch's script fails with Python's own error, which names the missing package."""
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)
    path = os.pathsep.join([str(tmp_path), PYTHONPATH])
    result = enjoy_command(directory, path=path)
    assert "enjoy: return " in result.stdout, result.stderr
    result = enjoy_command(directory, "--script", qdagger.__file__, path=path)
    assert result.returncode == 1
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'torch'\n")
