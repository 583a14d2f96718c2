"""Downloads from and uploads to a hub: the real client, in processes of its own, against a server on this machine.

The client reads its settings (HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE) when it is imported, hence the processes.
"""

import base64
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).parent.parent
MODEL = b"the model's bytes" * 100
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_token_of_alice"

# What GET and HEAD of a repository's file answer: status and headers, as the hub's.
DOWNLOADS = {
    "lab/good": (200, {}),
    "lab/cut": (200, {}),  # the connection breaks halfway
    "lab/missing": (404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}),
    "lab/secret": (401, {"X-Error-Message": "Invalid username or password."}),
    "lab/badtoken": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "lab/gated": (403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to lab/gated is restricted"}),
    "lab/disabled": (403, {"X-Error-Message": "Access to this resource is disabled."}),
    "lab/otherfile": (404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}),
    "lab/nofile": (404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}),
    "lab/norevision": (404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id: main"}),
    "lab/down": (500, {}),
    "lab/foreign": (200, {}),  # a server that is no hub
}
FILES = {"lab/otherfile": ["README.md", "dqn_atari_jax.cleanrl_model", "c51_atari.cleanrl_model"], "lab/nofile": []}


class Hub(ThreadingHTTPServer):
    """Speaks as much of the hub's protocol as the client needs, and records the commits."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.files: dict[str, dict[str, bytes]] = {}  # what each repository holds after them
        self.created: list[dict] = []
        self.commit_status = 200
        self.hangs_at = "nowhere"  # takes requests for paths that contain it, and says nothing


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def parse_request(self):
        valid = super().parse_request()
        if valid and self.server.hangs_at in self.path:
            threading.Event().wait()
        return valid

    def answer(self, status, body=b"", headers=()):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = urlsplit(self.path).path
        if match := re.fullmatch(r"/(\w+/\w+)/resolve/main/dqn_atari\.cleanrl_model", path):
            repo = match[1]
            status, headers = DOWNLOADS[repo]
            if repo != "lab/foreign":
                headers = headers | {"X-Repo-Commit": COMMIT, "ETag": f'"{repo.replace("/", "")}"'}
            if repo == "lab/cut":
                headers["Content-Length"] = 2 * len(MODEL)
            self.answer(status, MODEL if status == 200 else b"", headers)
        elif (match := re.fullmatch(r"/(\w+/[\w-]+)/resolve/main/(.+)", path)) and match[1] in self.server.files:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{len(self.server.commits)}-{match[2]}"'}
            self.answer(200, self.server.files[match[1]][match[2]], headers)
        elif match := re.fullmatch(r"/api/models/(\w+/\w+)", path):
            if match[1] in FILES:
                self.answer(200, {"id": match[1], "siblings": [{"rfilename": name} for name in FILES[match[1]]]})
            else:
                self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        elif path == "/api/whoami-v2":
            valid = self.headers["Authorization"] == f"Bearer {TOKEN}"
            self.answer(200 if valid else 401, {"type": "user", "name": "alice"} if valid else {"error": "Who?"})
        else:
            self.answer(404)

    do_HEAD = do_GET

    def do_POST(self):
        hub, path = self.server, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        if path == "/api/repos/create":
            repo = json.loads(body)
            hub.created.append(repo)
            self.answer(200, {"url": f"{hub.url}/{repo['organization'] or 'alice'}/{repo['name']}"})
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in files]
            self.answer(200, {"files": modes})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            if hub.commit_status != 200:
                self.answer(hub.commit_status, {"error": "the disk\nis full"})
                return
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            files = {file["path"]: base64.b64decode(file["content"]) for file in files}
            hub.commits.append((match[1], files))
            hub.files.setdefault(match[1], {}).update(files)
            self.answer(200, {"commitUrl": f"{hub.url}/{match[1]}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.answer(404)


@contextmanager
def serve():
    """A hub that answers as long as the block lasts."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def hub():
    with serve() as server:
        yield server


def run(command, home, endpoint, cwd=None, **environment):
    """Runs a command with the client's files in ``home`` and nothing of this machine's own settings."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = own | {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",  # the storage beside the hub; without it, files go to the hub itself
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


# ==================== downloads ====================

FIND = """
import json, os, sys, time
time.sleep = lambda seconds: None  # the client waits for seconds before it tries again
sys.modules.update(torch=None, jax=None, flax=None)  # none of them is needed
from huggingface_hub import hf_hub_download
from cleanrl_utils import hub
from cleanrl_utils.checks import UserError
hub.PATIENCE = float(os.environ.get("PATIENCE", hub.PATIENCE))

answers = {}
for repo in sys.argv[1:]:
    try:
        with hub.download_errors(repo, "dqn_atari.cleanrl_model"):  # as the scripts' load_teacher does it
            answers[repo] = "found: " + open(hf_hub_download(repo, "dqn_atari.cleanrl_model")).read()
    except UserError as error:
        answers[repo] = str(error)
print(json.dumps(answers))
"""


def find(repos, home, endpoint, **environment):
    """What a download says, or the text of the file that it gets, for each repository."""
    process = run([sys.executable, "-c", FIND, *repos], home, endpoint, home, **environment)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


PATHS = ("no/such/directory", "../nothing", "./here", "a--b/c")
UNUSABLE = {"~no-such-user/there": "Could not determine home directory", "x" * 300: "File name too long"}


@pytest.fixture(scope="module")
def answers(hub, home):
    return find([*DOWNLOADS, *PATHS, *UNUSABLE], home, hub.url)


def test_download(answers):
    assert answers["lab/good"] == f"found: {MODEL.decode()}"


LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
PROBLEMS = {
    "lab/missing": ("there is no directory lab/missing, nor a hub repository of that name (404)", LOG_IN),
    "lab/secret": ("does not exist or is private (401, Invalid username or password.)", LOG_IN),
    "lab/badtoken": ("does not exist or is private (401, Invalid credentials in Authorization header)", LOG_IN),
    "lab/gated": ("the hub refuses access to the repository lab/gated (403", "/lab/gated and log in with"),
    "lab/disabled": ("the hub refuses access to the repository lab/disabled (403", "is disabled"),
    "lab/otherfile": (
        "the hub repository lab/otherfile has no dqn_atari.cleanrl_model",
        "it has c51_atari.cleanrl_model, dqn_atari_jax.cleanrl_model",
        "give --teacher-model-exp-name c51_atari or dqn_atari_jax",
    ),
    "lab/nofile": ("the hub repository lab/nofile has no dqn_atari.cleanrl_model, nor any other",),
    "lab/norevision": ("the hub repository lab/norevision has no dqn_atari.cleanrl_model, nor any other",),
    "lab/down": ("can't be downloaded from http://127.0.0.1:", "500 Internal Server Error", "check the connection"),
    "lab/cut": ("can't be downloaded from http://127.0.0.1:", "check the connection"),
    "lab/foreign": ("can't be downloaded from http://127.0.0.1:", "does not seem to be served by a Hugging Face Hub"),
    **{path: (f"there is no directory {path}, nor is that a valid name of a hub repository",) for path in PATHS},
    **{path: (f"there is no directory {path}, and", reason) for path, reason in UNUSABLE.items()},
}


@pytest.mark.parametrize("repo", PROBLEMS)
def test_problem_is_told_in_one_line(repo, answers):
    answer = answers[repo]
    for part in PROBLEMS[repo]:
        assert part in answer
    assert len(answer.splitlines()) == 1
    assert repo == "lab/otherfile" or "`python cleanrl/dqn_atari.py --env-id … --save-model`" in answer


@pytest.fixture(scope="module")
def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, and nobody listens


@pytest.mark.usefixtures("answers")  # puts lab/good into the cache
@pytest.mark.parametrize(
    ("environment", "reason"),
    [({}, "Connection refused"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set and the cache")],
)
def test_unreachable_hub(environment, reason, home, closed_port):
    answers = find(["lab/good", "lab/other"], home, closed_port, **environment)
    assert answers["lab/good"] == f"found: {MODEL.decode()}"
    assert answers["lab/other"].startswith("there is no directory lab/other")
    assert reason in answers["lab/other"]
    assert "`python cleanrl/dqn_atari.py --env-id … --save-model`" in answers["lab/other"]
    assert len(answers["lab/other"].splitlines()) == 1


def test_hub_that_hangs(hub, tmp_path, monkeypatch):
    """Where the client would wait for ever. A download has its own time limits."""
    monkeypatch.setattr(hub, "hangs_at", "/api/models/")
    answer = find(["lab/otherfile"], tmp_path, hub.url, PATIENCE="0.3")["lab/otherfile"]
    assert "has no dqn_atari.cleanrl_model, nor any" in answer
    assert len(answer.splitlines()) == 1


# ==================== uploads ====================

SCRIPT = """
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

time.sleep = lambda seconds: None

import numpy as np

from cleanrl_utils import hub
from cleanrl_utils.checks import one_line_errors
from cleanrl_utils.hub import check_upload_possible, upload_model

hub.PATIENCE = float(os.environ.get("PATIENCE", hub.PATIENCE))


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    seed: int = 3
    env_id: str = "ALE/Pong-v5"
    hf_entity: str = ""
    upload_model: bool = True
    capture_video: bool = False
    cuda: bool = True
    learning_rate: float = 1e-4
    end_e: float = 0.01


with one_line_errors():
    args = Args(hf_entity=sys.argv[1], capture_video=True, cuda=False, learning_rate=0.5)
    check_upload_possible(args)
    run_dir = Path("runs/a run")
    videos = sorted(Path("videos").rglob("*.mp4"))
    upload_model(args, run_dir, run_dir / "toy.cleanrl_model", np.array([20.0, 18.0]), videos)
    print("went on")
"""


@pytest.fixture
def upload(hub, tmp_path):
    """Runs the script above in a folder with a run; call it with the entity, and with settings."""
    for path, data in {
        "toy.py": SCRIPT.encode(),
        "runs/a run/toy.cleanrl_model": MODEL,
        "runs/a run/toy-offline-100.cleanrl_model": b"not for the hub",
        "runs/a run/checkpoint/state": b"not for the hub",
        "runs/a run/events.out.tfevents.1": b"events",
        "videos/a/eval.mp4": b"video a",
        "videos/b/eval.mp4": b"video b",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    hub.commits.clear()
    hub.created.clear()
    hub.commit_status = 200

    def call(entity="", **environment):
        return run([sys.executable, "toy.py", entity], tmp_path / "home", hub.url, tmp_path, **environment)

    return call


@pytest.mark.parametrize(("entity", "owner"), [("", "alice"), ("lab", "lab")])
def test_upload_is_one_commit_of_everything(entity, owner, upload, hub):
    process = upload(entity, HF_TOKEN=TOKEN)
    repo = f"{owner}/ALE-Pong-v5-toy-seed3"
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"model uploaded to {hub.url}/{repo}\nwent on\n"
    assert [(created["organization"], created["name"]) for created in hub.created] == [tuple(repo.split("/"))]
    [(committed_to, files)] = hub.commits
    assert committed_to == repo
    readme = files.pop("README.md").decode()
    assert files == {
        "toy.cleanrl_model": MODEL,
        "events.out.tfevents.1": b"events",
        "videos/a/eval.mp4": b"video a",
        "videos/b/eval.mp4": b"video b",
        "replay.mp4": b"video b",
        "toy.py": SCRIPT.encode(),
    }

    _, metadata, text = readme.split("---\n", 2)
    metadata = yaml.safe_load(metadata)
    assert metadata["library_name"] == "cleanrl"
    assert {"ALE/Pong-v5", "reinforcement-learning"} <= set(metadata["tags"])
    [result] = metadata["model-index"][0]["results"]
    assert result["dataset"]["name"] == "ALE/Pong-v5"
    assert result["metrics"][0]["type"] == "mean_reward"
    assert result["metrics"][0]["value"] == "19.00 +/- 1.00"
    assert f"python -m cleanrl_utils.evals.dqn_eval --model {repo} --exp-name toy --env-id ALE/Pong-v5" in text
    entity_flag = f" --hf-entity {entity}" if entity else ""
    assert f"python cleanrl/toy.py{entity_flag} --capture-video --no-cuda --learning-rate 0.5\n" in text
    assert "\nseed: 3\n" in text


def test_failed_upload_goes_on_and_its_command_uploads(upload, hub, tmp_path):
    hub.commit_status = 500
    process = upload("lab", HF_TOKEN=TOKEN)
    assert process.returncode == 0
    assert process.stdout == "went on\n"
    assert not hub.commits
    [line] = [line for line in process.stderr.splitlines() if "UPLOAD FAILED" in line]
    assert "500 Internal Server Error" in line
    assert "the disk is full" in line
    assert f"the model is still at {Path('runs/a run/toy.cleanrl_model')}" in line
    assert "Traceback" not in process.stderr

    hub.commit_status = 200
    command = shlex.split(line.split("upload it with: ")[1])
    assert command[0] == "hf"
    command[0] = str(Path(sys.executable).with_name("hf"))
    process = run(command, tmp_path / "home", hub.url, tmp_path, HF_TOKEN=TOKEN)
    assert process.returncode == 0, process.stderr
    [(repo, files)] = hub.commits
    assert repo == "lab/ALE-Pong-v5-toy-seed3"
    assert files.keys() == {"toy.cleanrl_model", "README.md", "events.out.tfevents.1"}
    assert files["toy.cleanrl_model"] == MODEL


@pytest.mark.parametrize("part", ["whoami", "/preupload/", "/commit/"])
def test_upload_to_a_hub_that_hangs(part, upload, hub, monkeypatch):
    monkeypatch.setattr(hub, "hangs_at", part)
    process = upload(HF_TOKEN=TOKEN, PATIENCE="0.3")
    assert process.returncode == 0
    assert process.stdout == "went on\n"
    [line] = [line for line in process.stderr.splitlines() if "UPLOAD FAILED" in line]
    assert "(timed out)" in line
    assert f"the model is still at {Path('runs/a run/toy.cleanrl_model')}" in line
    assert "upload it with: hf upload" in line


def test_upload_with_a_token_that_the_hub_refuses(upload):
    process = upload(HF_TOKEN="hf_another")
    assert process.returncode == 0
    assert process.stdout == "went on\n"
    [line] = process.stderr.splitlines()
    assert "UPLOAD FAILED (Invalid user token." in line
    assert "hf upload ALE-Pong-v5-toy-seed3 'runs/a run' ." in line


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "error: --upload-model needs a Hugging Face token"),
        ({"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}, "error: --upload-model can't upload while HF_HUB_OFFLINE is set"),
    ],
)
def test_upload_that_can_not_succeed_is_refused_before_the_training(environment, message, upload, hub):
    process = upload(**environment)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith(message)
    assert len(process.stderr.splitlines()) == 1
    assert not hub.created
