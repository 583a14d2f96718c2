"""Find a model on the disk or the Hugging Face Hub; upload a trained model."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub as hf
import numpy as np
from huggingface_hub import constants, utils

from cleanrl_utils.errors import UserError, one_line, user_errors
from cleanrl_utils.files import atomic_write
from cleanrl_utils.tracking import VIDEOS, changed_flags, game_flags, script_of

# The models in a repository, as arguments of the hub's functions. rl-baselines3-zoo uploads its logs as a zip file.
MODEL_FILES = {
    "allow_patterns": ["*.cleanrl_model", "*.zip"],
    "ignore_patterns": ["*/*", "train_eval_metrics.zip"],
}


def find_model(repo: str, exp_name: str) -> Path:
    """Find a model; download it if ``repo`` is a hub repository, or find it in the hub's cache without a network.

    Args:
        repo: the file, its directory or, if nothing has this path, the name of a hub repository.
        exp_name: the name of the file, without .cleanrl_model or .zip. With a script's default, the only model of a
            directory or repository may have any name.

    Raises:
        UserError: there is no such model, or the hub can't be reached.
    """
    path = Path(os.path.expanduser(repo))
    if path.exists():
        what = f"no model can be loaded from {repo!r}"
    else:
        missing = f"there is no file or directory {str(path.resolve())!r}"
        what = f"{missing}, and no model can be loaded from the hub repository {repo!r}"
    remedy = "give another file, directory or hub repository (`hf auth login` for a private one; see docs/teachers.md)"
    with user_errors(what, remedy):
        if not path.exists():
            path = Path(hf.snapshot_download(repo, **MODEL_FILES))
        return path if path.is_file() else path / choose_model(path, exp_name)


def choose_model(directory: Path, exp_name: str) -> str:
    """Return the name of the model in a directory; FileNotFoundError if there is none with this ``exp_name``."""
    files = [file.name for file in directory.glob("*") if file.is_file()]
    models = sorted(utils.filter_repo_objects(files, **MODEL_FILES))
    for name in (exp_name, f"{exp_name}.cleanrl_model", f"{exp_name}.zip"):
        if name in models:
            return name
    if exp_name in ("dqn_atari", "dqn_atari_jax") and len(models) == 1:
        return models[0]
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
