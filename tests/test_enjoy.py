"""The command that plays a saved model: which script and backend, the same episodes for all, bad input."""

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
from helpers import flax_params

from cleanrl_utils import enjoy
from cleanrl_utils.errors import UserError
from cleanrl_utils.models import read_model

ROOT = Path(__file__).parent.parent
GAME, NUM_ACTIONS = "AlienNoFrameskip-v4", 18


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
    network = qdagger.TeacherNetwork(NUM_ACTIONS)
    qdagger.save_model(network, folder / "dqn_atari.cleanrl_model")
    weights = {name: array.numpy() for name, array in network.state_dict().items()}
    (folder / "dqn_atari_jax.cleanrl_model").write_bytes(to_bytes(flax_params(weights)))
    return folder


def play(repository: Path | str, **flags: object) -> np.ndarray:
    flags = {"env_id": GAME, "eval_episodes": 2, "epsilon": 0.5, "seed": 5} | flags
    return enjoy.main(enjoy.Args(hf_repository=str(repository), **flags))


def test_all_play_the_same_episodes(directory: Path, capsys: pytest.CaptureFixture) -> None:
    """Both backends and formats, a file or its directory. Rounding does not decide between these actions."""
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
    """That of JAX if the name of the model, or of its file, directory or repository, has ``_jax``."""

    def refuse(path: Path) -> None:
        raise UserError(path.name)

    monkeypatch.setattr(enjoy, "import_script", refuse)
    for repository, exp_name, library in (
        ("lab_jax/a", "dqn_atari", ""),
        ("lab/a", "c51_atari_jax", "_jax"),
        ("lab/dqn_atari_jax.cleanrl_model", "dqn_atari", "_jax"),
    ):
        with pytest.raises(UserError, match=f"^qdagger_dqn_atari{library}_impalacnn.py$"):
            play(repository, exp_name=exp_name)


def test_one_episode_and_its_video(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A policy samples its actions in both."""
    temperatures, import_script = set(), enjoy.import_script

    def import_and_record(*args: object) -> ModuleType:
        script = import_script(*args)
        choose = script.epsilon_greedy
        script.epsilon_greedy = lambda *args: temperatures.add(args[3]) or choose(*args)
        return script

    monkeypatch.setattr(enjoy, "import_script", import_and_record)
    monkeypatch.chdir(tmp_path)
    weights = read_model(directory / "dqn_atari.cleanrl_model", "torch")
    policy = flax_params({key.replace("network.9", "actor"): array for key, array in weights.items()})
    (tmp_path / "ppo").write_bytes(to_bytes(policy))
    (episodic_return,) = play("ppo", eval_episodes=1, capture_video=True)
    assert f"return {episodic_return:.1f} ± 0.0" in capsys.readouterr().out
    (video,) = Path("videos").rglob("*.mp4")
    assert video.read_bytes()[4:8] == b"ftyp"
    assert temperatures == {1.0}


def test_flags_reach_the_episodes(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CleanRL's flags name the repository."""
    asked = []
    monkeypatch.setattr(enjoy, "play_episodes", lambda *args: asked.append(vars(args[3])) or np.zeros(3))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: 1 / 0)
    flags = {"env_id": "ALE/Alien-v5", "exp_name": "c51_atari", "hf_entity": "lab", "seed": 2}
    with pytest.raises(UserError, match="repository 'lab/ALE-Alien-v5-c51_atari-seed2': division by zero"):
        play("", **flags)
    play(directory, repeat_action_probability=0.1)
    expected = {"env_id": GAME, "seed": 5, "repeat_action_probability": 0.1}
    assert expected.items() <= asked[0].items()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"eval_episodes": 0}, "--eval-episodes must be at least 1"),
        ({"epsilon": float("nan")}, "--epsilon from 0 to 1"),
        ({"env_id": "PongNoFrameskip-v4"}, "for 6 actions"),
        ({"exp_name": "c51"}, "from dqn_atari.cleanrl_model, dqn_atari_jax.cleanrl_model"),
        ({"script": Path("nowhere.py")}, "'nowhere.py' cannot be imported:"),
        ({"script": ROOT / "README.md"}, "README.md' cannot be imported:"),
        ({"script": ROOT / "cleanrl" / "dqn_atari.py"}, "has no function load_model"),
    ],
)
def test_bad_input(flags: dict, message: str, directory: Path) -> None:
    with pytest.raises(UserError) as caught:
        play(directory, **flags)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_video_without_its_packages(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the first episode."""
    monkeypatch.setattr(enjoy, "play_episodes", lambda *_, **__: pytest.fail("an episode was played"))
    monkeypatch.setitem(sys.modules, "imageio", None)
    with pytest.raises(UserError, match=r"--capture-video needs the package imageio: .*pip install"):
        play(directory, capture_video=True)


def test_jax_model_plays_without_torch(directory: Path, tmp_path: Path) -> None:
    """A model of PyTorch is one line and exit code 2. Klax is over within a few hundred steps, and has 18 actions."""
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    command = [sys.executable, "-m", "cleanrl_utils.enjoy", "--hf-repository", str(directory), "--eval-episodes", "1"]
    command += ["--env-id", "KlaxNoFrameskip-v4", "--exp-name"]
    environment = {"PATH": "", "PYTHONPATH": f"{tmp_path}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    jax, torch = (
        subprocess.run([*command, name], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        for name in ("dqn_atari_jax", "dqn_atari")
    )
    assert jax.returncode == 0, jax.stderr
    assert "enjoy: return " in jax.stdout
    assert torch.returncode == 2
    assert len(torch.stderr.splitlines()) == 1
    assert "qdagger_dqn_atari_impalacnn.py' cannot be imported: No module named torch;" in torch.stderr
