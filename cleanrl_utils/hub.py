"""Models on the Hugging Face Hub: why a download failed, in one line, and the upload of a trained model."""

import contextlib
import os
import pprint
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub as hf
import numpy as np
from huggingface_hub import constants, errors, utils

from cleanrl_utils.errors import UserError, one_line
from cleanrl_utils.tracking import atomic_write, script_of, video_dir

CONTINUE = "check both names, `hf auth login`, train a teacher (dqn_atari.py --save-model) or use one from teachers/"
REQUEST_TIMEOUT = 30.0  # seconds without progress


def limit_requests() -> None:
    """Set a time limit for the client's requests that have none."""
    session = hf.get_session()
    # A factory, because the client makes a new session after a failed connection.
    options = {"event_hooks": session.event_hooks, "follow_redirects": True, "timeout": REQUEST_TIMEOUT}
    hf.set_client_factory(lambda: type(session)(**options))
    os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", "120s")  # six tries; the default is 300 s each


@contextlib.contextmanager
def download_errors(repo: str, filename: str) -> Iterator[None]:
    """Turn any error of finding ``filename`` in a local directory or hub repository into a :class:`UserError`."""
    try:
        directory = Path(repo).expanduser()
        if not directory.is_dir():
            limit_requests()
            hf.logging.set_verbosity_error()  # the client prints ten lines about its retries
        elif not (directory / filename).is_file():
            models = sorted(path.name for path in directory.glob("*.cleanrl_model") if path.is_file())
            raise FileNotFoundError(f"the directory has {models or 'no .cleanrl_model file'}")
        yield
    except Exception as error:  # the client raises its own errors, its HTTP library's, OSError and ValueError
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None  # the failed request
        what = f"cannot load {filename!r} from the directory or hub repository {repo!r}: {one_line(cause or error)}"
        raise UserError(f"{what}; {CONTINUE}") from error


def repository_name(args: Any) -> str:
    """Return the repository to upload to; without ``hf_entity`` it has no owner yet."""
    return f"{args.hf_entity}/{args.env_id.replace('/', '-')}-{args.exp_name}-seed{args.seed}".lstrip("/")


def check_upload_possible(args: Any) -> None:
    """Raise a :class:`UserError` if ``--upload-model`` cannot work: offline, without a token, or to an invalid name."""
    if not args.upload_model:
        return
    if constants.HF_HUB_OFFLINE or hf.get_token() is None:
        raise UserError("--upload-model needs a token with write access (`hf auth login`) and HF_HUB_OFFLINE unset")
    try:
        utils.validate_repo_id(repository_name(args))
    except errors.HFValidationError as error:
        raise UserError(f"--upload-model: {one_line(error)} Change --hf-entity or --exp-name") from error


def upload_model(args: Any, run_dir: Path, model_path: Path, returns: Sequence[float]) -> None:
    """Upload model, card, event files, videos and script in one commit; if that fails, print how to upload them.

    ``returns`` are the episodic returns of the evaluation. The hub shows the last video beside the card.
    """
    repo = repository_name(args)
    videos = sorted(video_dir(run_dir).glob("*.mp4"), key=lambda path: path.stat().st_mtime)
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
        retry = shlex.join(["hf", "upload", repo, str(run_dir), ".", "--exclude=checkpoint/*", "--exclude=*-offline-*"])
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
    train = ["python", f"cleanrl/{script}"]
    for name, value in vars(args).items():
        if value != getattr(type(args), name, None) and name != "resume":
            train += [f"--{'no-' if value is False else ''}{name}", *([] if isinstance(value, bool) else [str(value)])]
    return f"""---
{metadata.to_yaml()}
---
# {args.exp_name} on {args.env_id}
Mean return {result} over {len(returns)} episodes at epsilon {args.end_e} (whole episodes, unclipped rewards).
To watch it play, to use it as a teacher and to train it again:
```bash
python -m cleanrl_utils.enjoy --hf-repository {repo} --exp-name {args.exp_name} --env-id {args.env_id}{network}
python cleanrl/{qdagger} --teacher-policy-hf-repo {repo} --teacher-model-exp-name {args.exp_name} --env-id {args.env_id}
{shlex.join(train)}
```
## Hyperparameters
```python
{pprint.pformat(vars(args), sort_dicts=False)}
```
"""
