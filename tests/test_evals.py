"""The commands that play with a saved model: which script, which file, which precision, and what they say."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import torch

from cleanrl_utils import enjoy
from cleanrl_utils.checks import UserError
from cleanrl_utils.convert import convert
from cleanrl_utils.evals import dqn_eval, dqn_jax_eval, playing

ROOT = Path(__file__).parent.parent
GAME, NUM_ACTIONS = "AlienNoFrameskip-v4", 18
EVALS = (dqn_eval, dqn_jax_eval)


@pytest.fixture(scope="module", autouse=True)
def short_games() -> Iterator[None]:
    """Games are cut off after 100 steps, in which one scores in Alien whatever one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cleanrl_utils.atari.MAX_FRAMES", 400)
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DQN with random weights, in both encodings."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    qdagger.save_model(qdagger.TeacherNetwork(NUM_ACTIONS), folder / "dqn_atari.cleanrl_model")
    convert(folder / "dqn_atari.cleanrl_model", folder / "dqn_atari_jax.cleanrl_model")
    return folder


# ==================== what is played ====================


def test_all_commands_play_the_same_games(directory: Path) -> None:
    """Both backends, a file or its directory, either encoding: one score. Rounding does not decide between actions."""
    flags = {"env_id": GAME, "episodes": 2, "epsilon": 0.5, "seed": 5}
    model = str(directory / "dqn_atari.cleanrl_model")
    expected = dqn_eval.evaluate(dqn_eval.Args(model, **flags))
    assert expected.shape == (2,)
    assert len({*expected}) > 1
    other = str(directory / "dqn_atari_jax.cleanrl_model")
    for evals, args in (
        (dqn_eval, dqn_eval.Args(str(directory), **flags)),
        (dqn_eval, dqn_eval.Args(other, **flags)),
        (dqn_jax_eval, dqn_jax_eval.Args(str(directory), **flags)),
        (dqn_jax_eval, dqn_jax_eval.Args(model, **flags)),
    ):
        np.testing.assert_array_equal(evals.evaluate(args), expected)
    flags["seed"] = 6
    assert (dqn_eval.evaluate(dqn_eval.Args(model, **flags)) != expected).any()


@pytest.mark.parametrize("bf16", [True, False])
def test_precision_is_that_of_a_run(bf16: bool, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden layers compute in bfloat16 where a run would."""
    seen = set()
    forward = torch.nn.Linear.forward

    def record(self: Any, x: torch.Tensor) -> torch.Tensor:
        result = forward(self, x)
        seen.add((self.out_features, result.dtype))
        return result

    monkeypatch.setattr(torch.nn.Linear, "forward", record)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    args = dqn_eval.Args(str(directory), GAME, episodes=1, cuda=False, bf16=bf16)
    monkeypatch.setattr(playing, "play_games", lambda q_function, *_: q_function(np.zeros((2, 4, 84, 84), np.uint8)))
    q_values = dqn_eval.evaluate(args)
    assert q_values.shape == (2, NUM_ACTIONS)
    assert q_values.dtype == np.float32
    assert seen == {(512, torch.bfloat16 if bf16 else torch.float32), (NUM_ACTIONS, torch.float32)}


def test_jax_precision_is_that_of_a_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pick_jax_device` says for the flag is what the network is made with."""
    asked = []
    for dtype in (np.float16, np.float32):
        pick = lambda bf16, dtype=dtype: asked.append(bf16) or dtype  # noqa: E731
        monkeypatch.setattr(dqn_jax_eval, "pick_jax_device", pick)
        monkeypatch.setattr(
            playing, "play_games", lambda q_function, *_: q_function(np.zeros((3, 4, 84, 84), np.uint8))
        )
        args = dqn_jax_eval.Args(str(directory), GAME, bf16=dtype == np.float16)
        q_values = dqn_jax_eval.evaluate(args)
        assert q_values.shape == (3, NUM_ACTIONS)
        assert q_values.dtype == np.float32
    assert asked == [True, False]


def test_wrapped_games_and_video(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One game for each seed, as the wrappers play it, and one that is filmed."""
    args = dqn_eval.Args(str(directory), GAME, episodes=2, epsilon=0.5, wrapped=True, video=tmp_path / "a" / "game.mp4")
    returns = dqn_eval.evaluate(args)
    assert (args.video.read_bytes()[4:8], returns.shape) == (b"ftyp", (2,))
    args = dqn_eval.Args(str(directory), GAME, episodes=1, epsilon=0.5, wrapped=True, seed=2)
    assert dqn_eval.evaluate(args).tolist() == [returns[1]]
    playing.print_scores(args, np.array([1.0, 3.0]))
    expected = (
        f"{GAME}: mean return 2.00 ± 1.00 (standard error 1.00; quartiles 1.5, 2, 2.5) over 2 games at epsilon 0.5\n"
    )
    assert capsys.readouterr().out == expected


def test_enjoy_has_cleanrls_flags(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's name, the backend and the video follow from them."""
    played = []
    for evals in EVALS:
        monkeypatch.setattr(evals, "evaluate", lambda args: played.append(args) or np.zeros(args.episodes))
    enjoy.main(enjoy.Args())
    enjoy.main(enjoy.Args("c51_atari_jax", 2, "lab", env_id="ALE/Pong-v5", eval_episodes=3, capture_video=True))
    enjoy.main(enjoy.Args("dqn_atari", hf_repository=str(directory), script=tmp_path))
    first, second, third = played
    assert first == dqn_eval.Args(
        "cleanrl/BreakoutNoFrameskip-v4-dqn_atari-seed1", "BreakoutNoFrameskip-v4", episodes=10
    )
    assert second == dqn_jax_eval.Args(
        "lab/ALE-Pong-v5-c51_atari_jax-seed2",
        "ALE/Pong-v5",
        "c51_atari_jax",
        episodes=3,
        seed=2,
        video=Path("videos/eval/ALE-Pong-v5-c51_atari_jax-seed2.mp4"),
    )
    assert (third.model, third.script) == (str(directory), tmp_path)


# ==================== which script ====================


@pytest.mark.parametrize(
    ("library", "model", "exp_name", "script"),
    [
        ("torch", "nowhere", "dqn_atari", "qdagger_dqn_atari_impalacnn"),
        ("jax", "nowhere", "dqn_atari_jax", "qdagger_dqn_atari_jax_impalacnn"),
        ("torch", "nowhere", "wide", "wide"),
        ("torch", "nowhere", "wide_jax", "qdagger_dqn_atari_impalacnn"),
        ("jax", "nowhere", "wide_jax", "wide_jax"),
        ("jax", "nowhere", "wide", "qdagger_dqn_atari_jax_impalacnn"),
        ("torch", "wide.cleanrl_model", "dqn_atari", "wide"),
        ("torch", "wide-offline-40.cleanrl_model", "dqn_atari", "wide"),
        ("torch", "wide-offline-x.cleanrl_model", "wide", "qdagger_dqn_atari_impalacnn"),
        ("torch", "wide", "dqn_atari", "qdagger_dqn_atari_impalacnn"),
        ("torch", "nowhere", "wide-offline-40", "wide"),
    ],
)
def test_script_of_a_model(
    library: str, model: str, exp_name: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its name, if it has networks written with the backend's library; if not, QDagger's."""
    load = "def load_model(path, num_actions, *dtype):\n    return __file__, path.name, num_actions\n"
    load += "def load_teacher(repo, exp_name, num_actions, *dtype):\n    return __file__, exp_name, num_actions\n"
    for name, text in {
        "qdagger_dqn_atari_impalacnn": f"import torch\n{load}",
        "qdagger_dqn_atari_jax_impalacnn": f"import jax\nimport jax.numpy\n{load}",
        "dqn_atari": "import torch\n",
        "dqn_atari_jax": "import jax\n",
        "wide": f"import torch\nimport torch.nn\n{load}",
        "wide_jax": f"import jax\n{load}",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(playing, "SCRIPTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide").mkdir()
    for name in ("wide", "wide-offline-40", "wide-offline-x"):
        (tmp_path / f"{name}.cleanrl_model").touch()
    module, (file, asked, num_actions) = playing.load(playing.Args(model, GAME, exp_name), library)
    assert module.__file__ == file == str(tmp_path / f"{script}.py")
    assert asked == (model if model.endswith("model") else exp_name)
    assert num_actions == NUM_ACTIONS


# ==================== bad input ====================


@pytest.mark.parametrize("evals", EVALS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": 0}, "0 games at epsilon 0.01 from seed 1 can't be played; give at least 1"),
        ({"epsilon": 1.5}, "30 games at epsilon 1.5 from seed 1 can't be played; give at least 1"),
        ({"epsilon": float("nan")}, "30 games at epsilon nan from seed 1"),
        ({"seed": -1}, "30 games at epsilon 0.01 from seed -1"),
        ({"video": Path("game")}, "--video game is no mp4 file; "),
        ({"env_id": "AliennNoFrameskip-v4"}, "Did you mean: `Alien`?"),
        ({"env_id": "PongNoFrameskip-v4"}, "it has 18 actions and the game has 6, so it is a model of another game"),
        (
            {"exp_name": "c51"},
            "has no c51.cleanrl_model; it has dqn_atari.cleanrl_model, dqn_atari_jax.cleanrl_model: ",
        ),
        ({"exp_name": "c51"}, "give --exp-name dqn_atari or dqn_atari_jax"),
        ({"model": "no/such/thing"}, "nor is that a valid name of a hub repository (owner/name); check --model, or"),
        ({"script": Path("nowhere.py")}, "--script nowhere.py does not import "),
        ({"script": ROOT / "cleanrl" / "dqn_atari.py"}, "or has no `load_model`; give another"),
        ({"repeat_action_probability": 1.0}, "--repeat-action-probability is 1.0"),
    ],
)
def test_bad_input(evals: Any, changes: dict, message: str, directory: Path) -> None:
    """One line, in words of these commands."""
    with pytest.raises(UserError) as caught:
        evals.evaluate(evals.Args(**({"model": str(directory), "env_id": GAME} | changes)))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert "--teacher" not in str(caught.value)


def test_video_without_its_packages(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is found out before a game is played."""
    monkeypatch.setitem(sys.modules, "imageio", None)
    with pytest.raises(UserError, match=r"--video needs imageio .*pip install"):
        dqn_eval.evaluate(dqn_eval.Args(str(directory), GAME, video=Path("game.mp4")))


@pytest.mark.parametrize("backend", ["", "_jax"])
def test_in_a_shell(backend: str, directory: Path, tmp_path: Path) -> None:
    """The JAX commands play where PyTorch can't be imported; errors are one line and exit code 2, that one too.

    Klax is over within a few hundred steps, whatever one does, and has as many actions.
    """
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "torch.py").write_text("raise ImportError('No module named torch')")

    def run(module: str, *flags: object, torch: bool = not backend) -> subprocess.CompletedProcess:
        path = str(ROOT) if torch else f"{tmp_path / 'no'}:{ROOT}"
        command = [sys.executable, "-m", f"cleanrl_utils.{module}", "--env-id", "KlaxNoFrameskip-v4", *map(str, flags)]
        environment = {"PATH": "", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    flags = ("--exp-name", f"dqn_atari{backend}", "--hf-repository", directory, "--eval-episodes", 1)
    result = run("enjoy", *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("KlaxNoFrameskip-v4: mean return ")
    assert len(result.stdout.splitlines()) == 1
    for module, flag, also in (("enjoy", "--hf-repository", flags[:2]), (f"evals.dqn{backend}_eval", "--model", ())):
        result = run(module, *also, flag, tmp_path)
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: the directory {tmp_path} has no dqn_atari{backend}.cleanrl_model, ")
        assert f"point {flag} at the directory" in line
    if not backend:
        result = run("enjoy", torch=False)
        assert result.returncode == 2
        assert result.stderr == "error: --exp-name dqn_atari needs torch (No module named torch): pip install torch\n"
