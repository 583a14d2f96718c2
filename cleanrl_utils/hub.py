"""Find a model on the disk or the Hugging Face Hub; upload a trained model."""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub as hf
import numpy as np
from huggingface_hub import constants, errors, utils

from cleanrl_utils.errors import UserError, one_line, user_errors
from cleanrl_utils.files import atomic_write
from cleanrl_utils.tracking import VIDEOS, changed_flags, game_flags, script_of

EMBEDDED = Path(__file__).resolve().parent.parent / "teachers"
REMEDY = "give another file, directory or hub repository (`hf auth login` for a private one)"
if EMBEDDED.is_dir():  # it is not installed with the package
    REMEDY += f"; the embedded teachers are in {str(EMBEDDED)!r}"
SUFFIXES = (".cleanrl_model", ".zip")  # of models
# The pages of a repository and of a file in it. Other branches than main are not read.
HUB_PAGE = r"https?://[^/]+/([^/]+/[^/?#]+)(?:/(?:tree|blob|resolve)/main(?:/([^?#]+))?)?/?(?:[?#].*)?"
REQUEST_TIMEOUT = 30.0  # seconds without progress


def limit_requests() -> None:
    """Set a time limit for the client's requests that have none."""
    session = hf.get_session()
    # A factory, because the client makes a new session after a failed connection.
    options = {"event_hooks": session.event_hooks, "follow_redirects": True, "timeout": REQUEST_TIMEOUT}
    hf.set_client_factory(lambda: type(session)(**options))
    os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", "120s")  # six tries; the default is 300 s each


def find_local_model(repo: str, exp_name: str) -> Path | None:
    """Find a model on the disk: ``repo`` is its file or its directory.

    Returns:
        The file; None if nothing has this path and it may be the name of a hub repository.

    Raises:
        UserError: nothing has this path and it can't be a hub repository, or the directory has no such model.
    """
    path = Path(os.path.expanduser(repo)).absolute()
    with user_errors(f"no model can be loaded from {str(path)!r}", REMEDY):
        if path.is_dir():
            files = [file.name for file in path.iterdir() if file.is_file()]
            return path / choose_model(files, exp_name, path.name)
        if path.exists():
            return path
        if hub_location(repo) is None:
            raise FileNotFoundError(f"there is no such file or directory, and {repo!r} can't be a hub repository")
    return None


def find_hub_model(repo: str, exp_name: str) -> tuple[str, str]:
    """Return the name of a hub repository and of the model in it; without a network, of a cached one."""
    limit_requests()
    hf.logging.set_verbosity_error()  # the client prints ten lines about its retries
    name, file = hub_location(repo)
    if file:
        return name, file
    try:
        files = hf.HfApi().list_repo_files(name)
    except Exception as error:  # of the network, its settings, the hub or its offline mode
        try:
            files = os.listdir(hf.snapshot_download(name, local_files_only=True, allow_patterns=[]))
        except errors.LocalEntryNotFoundError:
            raise error from None
    return name, choose_model(files, exp_name, name.rpartition("/")[2])


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turn any exception in a ``with`` block that downloads a model into a UserError of one line."""
    name, _ = hub_location(repo)
    what = f"no model can be loaded from the hub repository {name!r}"
    if name == repo:  # otherwise it is the address of a page
        what = f"there is no file or directory {os.path.abspath(repo)!r}, and {what}"
    with user_errors(what, REMEDY):
        try:
            yield
        except errors.LocalEntryNotFoundError as error:
            raise (error.__cause__ or error) from None  # the cause is the failed request


def hub_location(repo: str) -> tuple[str, str | None] | None:
    """Return the repository and, if it is given, the file that a name or an address of the hub stands for."""
    page = re.fullmatch(HUB_PAGE, repo)
    name, file = page.groups() if page else (repo, None)
    try:
        utils.validate_repo_id(name)
    except errors.HFValidationError:
        return None
    return None if name.endswith(SUFFIXES) else (name, file)


def choose_model(files: Iterable[str], exp_name: str, directory: str) -> str:
    """Choose the model among the files of a directory or repository; FileNotFoundError if there is none.

    It is ``{exp_name}.cleanrl_model`` or ``{exp_name}.zip``. With a script's default ``exp_name``, it may also be the
    zip file with the directory's name, or the only model.
    """
    models = sorted(file for file in files if file.endswith(SUFFIXES) and "/" not in file)
    if "train_eval_metrics.zip" in models:  # the logs in a repository of rl-baselines3-zoo
        models.remove("train_eval_metrics.zip")
    names = [exp_name, f"{exp_name}.cleanrl_model", f"{exp_name}.zip"]
    if exp_name in ("dqn_atari", "dqn_atari_jax"):
        names.append(f"{directory}.zip")
        if len(models) == 1:
            names += models
    for name in names:
        if name in models:
            return name
    has = f"; choose with --teacher-model-exp-name (enjoy: --exp-name) from {', '.join(models)}" if models else ""
    raise FileNotFoundError(f"it has no file {exp_name}.cleanrl_model or {exp_name}.zip{has}")


def repository_name(args: Any) -> str:
    """Return the repository to upload to; without ``hf_entity`` it has no owner yet."""
    return f"{args.hf_entity}/{args.env_id.replace('/', '-')}-{args.exp_name}-seed{args.seed}".lstrip("/")


def check_upload_possible(args: Any) -> None:
    """Raise a :class:`UserError` if ``--upload-model`` cannot work: offline, without a token, or to an invalid name."""
    if not args.upload_model:
        return
    if constants.HF_HUB_OFFLINE or hf.get_token() is None:
        raise UserError("--upload-model needs a token with write access (`hf auth login`) and HF_HUB_OFFLINE unset")
    with user_errors("--upload-model has no valid repository", "change --hf-entity or --exp-name"):
        utils.validate_repo_id(repository_name(args))


def upload_model(args: Any, run_dir: Path, model_path: Path, returns: Sequence[float]) -> None:
    """Upload model, card, event files, videos and script in one commit; if that fails, print how to upload them.

    ``returns`` are the episodic returns of the evaluation. The hub shows the last video beside the card.
    """
    repo = repository_name(args)
    videos = sorted((VIDEOS / run_dir.name).glob("*.mp4"), key=lambda path: path.stat().st_mtime)
    try:
        limit_requests()
        api = hf.HfApi()
        url = api.create_repo(repo, exist_ok=True)
        repo = url.repo_id  # with the owner
        with atomic_write(run_dir / "README.md") as file:
            file.write(model_card(args, repo, returns).encode(errors="backslashreplace"))
        events = run_dir.glob("events.out.tfevents.*")
        files = {path.name: path for path in (model_path, run_dir / "README.md", script_of(args), *events)}
        files |= {f"videos/{path.parent.name}/{path.name}": path for path in videos}
        files |= {"replay.mp4": videos[-1]} if videos else {}
        api.create_commit(repo, [hf.CommitOperationAdd(*file) for file in files.items()], commit_message=args.exp_name)
        print(f"model uploaded to {url}")
    except Exception as error:
        exclude = ["--exclude=checkpoint/*", f"--exclude={args.exp_name}-offline-*"]
        retry = shlex.join(["hf", "upload", repo, str(run_dir), ".", *exclude])
        print(f"UPLOAD FAILED ({one_line(error)}): {model_path} is saved; upload it with: {retry}", file=sys.stderr)


def model_card(args: Any, repo: str, returns: Sequence[float]) -> str:
    """Return the README.md of the hub repository ``repo``, with the metadata by which the hub lists models."""
    script = script_of(args).name
    result = f"{np.mean(returns):.2f} +/- {np.std(returns):.2f}"  # "+/-" as in CleanRL's model cards
    task = "reinforcement-learning"
    metric = "mean_reward"
    metadata = hf.ModelCardData(
        library_name="cleanrl",
        tags=[args.env_id, "deep-reinforcement-learning", task, "custom-implementation"],
        model_name=args.exp_name,
        eval_results=[hf.EvalResult(task, args.env_id, args.env_id, metric, result, task, metric_name=metric)],
    )
    backend = "" if hasattr(args, "cuda") else "_jax"
    default = f"qdagger_dqn_atari{backend}_impalacnn.py"  # it has DQN's network too
    qdagger = script if hasattr(args, "teacher_policy_hf_repo") else default
    network = "" if qdagger == default else f" --script cleanrl/{qdagger}"
    game = shlex.join(game_flags(args))
    train = ["python", f"cleanrl/{script}", *changed_flags(args)]
    return f"""---
{metadata.to_yaml()}
---
# {args.exp_name} on {args.env_id}
Mean return {result} over {len(returns)} episodes at epsilon {args.end_e} (whole episodes, unclipped rewards).
To watch it play, to use it as a teacher and to train it again:
```bash
python -m cleanrl_utils.enjoy --hf-repository {repo} --exp-name {args.exp_name} {game}{network} --epsilon {args.end_e}
python cleanrl/{qdagger} --teacher-policy-hf-repo {repo} --teacher-model-exp-name {args.exp_name} {game}
{shlex.join(train)}
```
"""
