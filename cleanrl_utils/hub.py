"""Find a model on the disk or the Hugging Face Hub; upload a trained model."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub as hf
import numpy as np
from huggingface_hub import constants, errors, utils

from cleanrl_utils.errors import UserError, one_line, user_errors
from cleanrl_utils.files import atomic_write
from cleanrl_utils.tracking import VIDEOS, changed_flags, game_flags, script_of

CONTINUE = "check the name, `hf auth login`, or use teachers/BreakoutNoFrameskip-v4-dqn_atari-seed1 (Pong, BeamRider)"
REQUEST_TIMEOUT = 30.0  # seconds without progress


def limit_requests() -> None:
    """Set a time limit for the client's requests that have none."""
    session = hf.get_session()
    # A factory, because the client makes a new session after a failed connection.
    options = {"event_hooks": session.event_hooks, "follow_redirects": True, "timeout": REQUEST_TIMEOUT}
    hf.set_client_factory(lambda: type(session)(**options))
    os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", "120s")  # six tries; the default is 300 s each


def find_model(repo: str, exp_name: str, download: Callable[[str], str]) -> Path:
    """Return the model in a file, a local directory or a hub repository, which ``download`` copies to a directory.

    It is ``{exp_name}.cleanrl_model`` or ``{exp_name}.zip``. With a script's default ``exp_name``, it may
    also be the zip file with the repository's name, or the only model. Any error becomes a UserError.
    """
    with user_errors(f"cannot load a model from the file, directory or hub repository {repo!r}", CONTINUE):
        path = Path(repo).expanduser()
        if not path.exists():
            limit_requests()
            hf.logging.set_verbosity_error()  # the client prints ten lines about its retries
            try:
                path = Path(download(repo))
            except errors.LocalEntryNotFoundError as error:
                raise (error.__cause__ or error) from None  # the cause is the failed request
        if path.is_file():
            return path
        models = [file.name for file in path.glob("*") if file.suffix in (".cleanrl_model", ".zip") and file.is_file()]
        models = sorted(set(models) - {"train_eval_metrics.zip"})  # the logs in a repository of rl-baselines3-zoo
        names = [exp_name, f"{exp_name}.cleanrl_model", f"{exp_name}.zip"]
        if exp_name in ("dqn_atari", "dqn_atari_jax"):
            names += [f"{Path(repo).name}.zip", *(models if len(models) == 1 else ())]
        for name in filter(models.__contains__, names):
            return path / name
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
            file.write(model_card(args, repo, returns).encode())
        events = [path for path in run_dir.glob("events.out.tfevents.*") if not path.is_symlink()]
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
    script, backend = script_of(args).name, "" if hasattr(args, "cuda") else "_jax"
    result = f"{np.mean(returns):.2f} +/- {np.std(returns):.2f}"  # "+/-" as in CleanRL's model cards
    task, metric = "reinforcement-learning", "mean_reward"
    metadata = hf.ModelCardData(
        library_name="cleanrl",
        tags=[args.env_id, "deep-reinforcement-learning", task, "custom-implementation"],
        model_name=args.exp_name,
        eval_results=[hf.EvalResult(task, args.env_id, args.env_id, metric, result, task, metric_name=metric)],
    )
    qdagger = script if hasattr(args, "teacher_policy_hf_repo") else f"qdagger_dqn_atari{backend}_impalacnn.py"
    network = "" if script == f"{args.exp_name}.py" else f" --script cleanrl/{qdagger}"
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
