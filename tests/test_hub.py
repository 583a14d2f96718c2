"""Downloads from the hub, by the real client from its cache on the disk, and uploads to it."""

import ast
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import dqn_atari
import huggingface_hub
import huggingface_hub.cli.hf
import pytest
import torch
import yaml
from huggingface_hub import constants, errors, utils

from cleanrl_utils.checks import check_args
from cleanrl_utils.errors import UserError
from cleanrl_utils.hub import model_card, upload_model
from cleanrl_utils.models import find_model
from cleanrl_utils.tracking import versions

COMMITS = {"main": "0123456789abcdef0123456789abcdef01234567", "v1": "fedcba9876543210fedcba9876543210fedcba98"}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client, which read its settings when it was imported, be offline and use an empty cache."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's tries
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.chdir(tmp_path)
    huggingface_hub.close_session()


def connect(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client use the hub at an address at which nothing answers."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.whoami.__self__, "endpoint", url)
    huggingface_hub.close_session()


# ==================== downloads ====================


def check_error(repo: str, reason: str = "") -> None:
    """The error is one line with the repository or path, what was wrong there, what to do, and the flag for it."""
    with pytest.raises(UserError) as caught:
        find_model(repo, "dqn_atari")
    line = str(caught.value)
    problem = f"there is no file or directory {os.path.abspath(repo)!r}, and {repo!r} can't be loaded from the hub: "
    assert line.startswith(problem)
    assert reason in line
    assert "; give another --teacher-policy-hf-repo (enjoy: --hf-repository), or `hf auth login` for a priv" in line
    assert line.isprintable()


@pytest.mark.parametrize("offline", [True, False])
def test_a_cached_model(offline: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A tag or commit pins a model, whose commit is printed. A file in the cache needs no hub."""
    for name, commit in COMMITS.items():
        for file, text in ((f"refs/{name}", commit), (f"snapshots/{commit}/dqn_atari.cleanrl_model", f"of {name}")):
            path = Path("cache/models--lab--good", file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if not offline:
        connect("http://127.0.0.1:9", monkeypatch)
    for revision, name in (("", "main"), ("@v1", "v1"), (f"@{COMMITS['v1']}", "v1")):
        assert find_model(f"lab/good{revision}", "dqn_atari").read_text() == f"of {name}"
        printed = f"model: dqn_atari.cleanrl_model of lab/good{revision} at commit {COMMITS[name]}\n"
        assert printed in capsys.readouterr().out


def test_failed_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one line with the reason of the client."""
    check_error("lab/good", "outgoing traffic has been disabled")
    connect("http://127.0.0.1:9", monkeypatch)
    check_error("lab/good", "Connection refused")
    denied = errors.HfHubHTTPError("401\nAccess to lab/gated is \x1b[31mrestricted", response=mock.Mock())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", mock.Mock(side_effect=denied))
    check_error("lab/gated", "401 Access to lab/gated is \\x1b[31mrestricted")


def test_repository_of_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody names the file in a repository as rl-baselines3-zoo uploads it. No other file is downloaded."""
    name = "dqn-BreakoutNoFrameskip-v4"
    files = [f"{name}.zip", f"{name}/policy.pth", f"{name}/a.zip", "train_eval_metrics.zip", "args.yml", "replay.mp4"]
    Path("snapshot").mkdir()

    def download(repo: str, revision: str | None, **patterns: list[str]) -> str:
        downloaded = [*utils.filter_repo_objects(files, **patterns)]
        assert (repo, revision, downloaded) == (f"sb3/{name}", None, [f"{name}.zip"])
        Path("snapshot", *downloaded).touch()
        return "snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for exp_name in ("dqn_atari", "dqn_atari_jax"):
        assert find_model(f"sb3/{name}", exp_name).name == f"{name}.zip"


def test_no_file_and_no_name_of_a_repository() -> None:
    for repo in ("/no/model", "./x", "~no-such-user/x", "a--b/c", "x" * 300, "two\nlines", "lab/\udcff"):
        check_error(repo, "repo_id" if "--" in repo else "Repo id must ")


# ==================== uploads ====================


@dataclass
class Args:
    script: ClassVar[str] = __file__

    exp_name: str = Path(__file__).stem
    seed: int = 3
    env_id: str = "ALE/Pong-v5"
    hf_entity: str = ""
    upload_model: bool = True
    capture_video: bool = False
    cuda: bool = True
    learning_rate: float = 1e-4
    end_e: float = 0.01


RUN_DIR = Path("runs/a run")
WRITTEN = {"test_hub.cleanrl_model": b"the model", "events.out.tfevents.1": b"events"}  # by the run
UPLOADED = WRITTEN | {"videos/teacher.mp4": b"a", "videos/eval.mp4": b"b", "replay.mp4": b"b"}
UPLOADED["test_hub.py"] = Path(__file__).read_bytes()


Upload = Callable[..., tuple[str, str]]
Commits = list[tuple[str, dict[str, bytes]]]  # repositories, and the files that they got


@pytest.fixture
def upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Upload:
    """Upload a run as a script does; a function of flags that returns standard output and standard error."""
    monkeypatch.setattr(huggingface_hub, "whoami", lambda cache: {"name": "alice"})
    for path, data in {
        **{RUN_DIR / name: data for name, data in WRITTEN.items()},
        RUN_DIR / "test_hub-offline-100.cleanrl_model": b"not for the hub",
        RUN_DIR / "test_hub-online-100.cleanrl_model": b"not for the hub",
        RUN_DIR / "checkpoint/state": b"not for the hub",
        "videos/a run/teacher.mp4": b"a",
        "videos/a run/eval.mp4": b"b",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    os.utime("videos/a run/teacher.mp4", (0, 0))

    def call(**flags: Any) -> tuple[str, str]:
        args = Args(**flags)
        upload_model(args, RUN_DIR, RUN_DIR / "test_hub.cleanrl_model", [20.0, 18.0])
        return capsys.readouterr()

    return call


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Commits:
    """Replace the client's requests that write; return the list of what they would have committed."""
    made: Commits = []

    def create_repo(api: Any, repo_id: str, *, exist_ok: bool, **_: Any) -> huggingface_hub.RepoUrl:
        assert exist_ok
        owned = repo_id if "/" in repo_id else f"alice/{repo_id}"
        return huggingface_hub.RepoUrl(f"https://hub/{owned}", "https://hub")

    def upload_folder(api: Any, *, repo_id: str, folder_path: str | Path, allow_patterns: list[str], **_: Any) -> str:
        paths = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        names = [path.relative_to(folder_path).as_posix() for path in paths]
        allowed = utils.filter_repo_objects(names, allow_patterns=allow_patterns)
        made.append((repo_id, {name: Path(folder_path, name).read_bytes() for name in allowed}))
        return "the address of the commit"

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    return made


@pytest.mark.parametrize(("entity", "owner"), [("", "alice"), ("lab", "lab")])
def test_upload_is_one_commit_of_everything(entity: str, owner: str, upload: Upload, commits: Commits) -> None:
    repo = f"{owner}/ALE-Pong-v5-test_hub-seed3"
    flags = {"cuda": False, "capture_video": True, "learning_rate": 0.5}
    out, err = upload(hf_entity=entity, **flags)
    assert (out, err) == (f"model uploaded to https://hub/{repo}\n", "")
    [(committed_to, files)] = commits
    assert committed_to == repo
    readme = files.pop("README.md").decode()
    assert files == UPLOADED
    _, metadata, text = readme.split("---\n", 2)
    metadata = yaml.safe_load(metadata)
    assert metadata["library_name"] == "cleanrl"
    assert {"ALE/Pong-v5", "reinforcement-learning"} <= set(metadata["tags"])
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["value"] == "19.00 +/- 1.00"
    assert "Mean return 19.00 +/- 1.00 over 2 episodes at epsilon 0.01" in text
    assert f"\nwith {versions()}.\n" in text
    play = f"\npython -m cleanrl_utils.enjoy --hf-repository {repo} --exp-name test_hub \\\n"
    assert f"{play}    --env-id ALE/Pong-v5 --epsilon 0.01 --script cleanrl/qdagger_dqn_atari_impalacnn.py\n" in text
    teach = "python cleanrl/qdagger_dqn_atari_impalacnn.py --env-id ALE/Pong-v5 \\\n"
    assert f"\n{teach}    --teacher-policy-hf-repo {repo} --teacher-model-exp-name test_hub\n" in text
    hyperparameters = text.partition("`cleanrl/test_hub.py`:\n```python\n")[2].removesuffix("```\n")
    assert ast.literal_eval(hyperparameters) == vars(Args(hf_entity=entity, **flags))


def test_model_card_of_a_changed_script() -> None:
    """A copy of a QDagger script plays and teaches its own students."""
    student = make_dataclass("Args", [("teacher_policy_hf_repo", str, "x")], bases=(Args,))
    student.__module__ = __name__
    card = model_card(student(), "lab/student", [1.0])
    assert " --script cleanrl/test_hub.py\n" in card
    assert "\npython cleanrl/test_hub.py --env-id ALE/Pong-v5 \\\n    --teacher-policy-hf-repo lab/student " in card


@pytest.mark.parametrize("failing", ["create_repo", "upload_folder"])
@pytest.mark.parametrize("entity", ["", "lab"])
def test_command_of_a_failed_upload_uploads(
    entity: str, failing: str, upload: Upload, commits: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that is full or down is one warning; its command uploads all that the run would have uploaded."""
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.HfApi, failing, lambda *_, **__: 1 / 0)
        out, err = upload(hf_entity=entity)
    assert (out, commits) == ("", [])
    saved, command = err.split("; upload it with: ")
    model = RUN_DIR / "test_hub.cleanrl_model"
    assert saved == f"WARNING: the upload failed (division by zero); the model is saved in {model}"
    hf, *arguments = shlex.split(command)
    assert hf == "hf"
    huggingface_hub.cli.hf.app(arguments, standalone_mode=False)
    [(repo, files)] = commits
    assert repo == f"{entity or 'alice'}/ALE-Pong-v5-test_hub-seed3"
    assert f" --hf-repository {repo} " in files.pop("README.md").decode()
    assert files == UPLOADED


def test_impossible_upload_is_refused_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a model, a token that can write, a network and a name. A hub that is down may be back at the end."""
    whoami = mock.Mock(return_value={"auth": {"accessToken": {"role": "write"}}})
    monkeypatch.setattr(huggingface_hub, "whoami", whoami)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_alice")

    def check(**flags: Any) -> None:
        args = dqn_atari.Args(upload_model=True, buffer_size=1000, **flags)
        assert check_args(args, torch.device("cpu"), step_bytes=7000).upload_model

    def refuse(message: str, **flags: Any) -> None:
        with pytest.raises(UserError, match=f"^--upload-model {message}"):
            check(**flags)

    check()
    refuse("uploads the saved model; leave out --no-save-model$", save_model=False)
    refuse("has no valid repository: Cannot have -- or .. in repo_id", hf_entity="a--b")
    needs = "needs a token with write access"
    whoami.return_value = {"auth": {"accessToken": {"role": "read"}}}
    refuse(f"{needs} .*; the role of this token is 'read'$")
    whoami.side_effect = errors.HfHubHTTPError("401", response=mock.Mock(status_code=401))
    refuse(f"{needs} .*; the role of this token is 'invalid'$")
    whoami.side_effect = ConnectionError("no network")
    check()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuse(f"{needs}[^;]*$")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "")
    refuse(f"{needs}[^;]*$")
