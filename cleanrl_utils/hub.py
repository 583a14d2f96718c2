"""Upload a trained model to the Hugging Face Hub."""

import pprint
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub as hf
import numpy as np
from huggingface_hub import constants, errors, utils

from cleanrl_utils.errors import UserError, one_line, shell_command, user_errors, warn
from cleanrl_utils.files import atomic_write
from cleanrl_utils.tracking import VIDEOS, script_of, versions


def repository_name(args: Any) -> str:
    """Return the repository to upload to; without ``hf_entity`` it has no owner yet."""
    return f"{args.hf_entity}/{args.env_id.replace('/', '-')}-{args.exp_name}-seed{args.seed}".lstrip("/")


def check_upload_possible(args: Any) -> None:
    """Raise a :class:`UserError` if ``--upload-model`` can't work: no model, offline, no write access, a wrong name."""
    needs = "--upload-model needs a token with write access (`hf auth login`) and HF_HUB_OFFLINE unset"
    if not args.save_model:
        raise UserError("--upload-model uploads the saved model; leave out --no-save-model")
    if constants.HF_HUB_OFFLINE or hf.get_token() is None:
        raise UserError(needs)
    with user_errors("--upload-model has no valid repository", "change --hf-entity or --exp-name", ValueError):
        utils.validate_repo_id(repository_name(args))
    try:
        role = hf.whoami(cache=True)["auth"]["accessToken"]["role"]
    except errors.HfHubHTTPError as error:
        role = "invalid" if error.response.status_code == 401 else "unknown"
    except Exception:  # there is no network now, or the token is of another kind
        role = "unknown"
    if role in ("read", "invalid"):
        raise UserError(f"{needs}; the role of this token is {role!r}")


def upload_model(args: Any, run_dir: Path, model_path: Path, returns: Sequence[float]) -> None:
    """Upload model, card, event files, videos and script in one commit; if that fails, print how to upload them.

    The run directory gets all of them first. ``returns`` are the episodic returns of the evaluation. The hub shows the
    last video beside the card.
    """
    repo = repository_name(args)
    if not args.hf_entity:
        with suppress(Exception):  # without a network, card and command name no owner
            repo = f"{hf.whoami(cache=True)['name']}/{repo}"
    script = script_of(args)
    files = ["README.md", script.name, model_path.name, "events.out.tfevents.*", "videos/*", "replay.mp4"]
    try:
        with atomic_write(run_dir / "README.md") as file:
            file.write(model_card(args, repo, returns).encode(errors="backslashreplace"))
        shutil.copy(script, run_dir)
        videos = sorted((VIDEOS / run_dir.name).glob("*.mp4"), key=lambda path: path.stat().st_mtime)
        if videos:
            shutil.copytree(VIDEOS / run_dir.name, run_dir / "videos", dirs_exist_ok=True)
            shutil.copy(videos[-1], run_dir / "replay.mp4")
        api = hf.HfApi()
        url = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=run_dir, allow_patterns=files, commit_message=args.exp_name)
        print(f"model uploaded to {url}")
    except Exception as error:
        include = [f"--include={pattern}" for pattern in files]
        command = shell_command(["hf", "upload", repo, str(run_dir), ".", *include])
        saved = f"the upload failed ({one_line(error)}); the model is saved in {model_path}"
        warn(f"{saved}; upload it with: {command}")


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
    qdagger = script  # a QDagger script has DQN's network too
    if not hasattr(args, "teacher_policy_hf_repo"):
        qdagger = f"qdagger_dqn_atari{'_jax' if '_jax' in script else ''}_impalacnn.py"
    return f"""---
{metadata.to_yaml()}
---
# {args.exp_name} on {args.env_id}
Mean return {result} over {len(returns)} episodes at epsilon {args.end_e} (whole episodes, unclipped rewards),
with {versions()}.
To watch it play, and to use it as a teacher:
```bash
python -m cleanrl_utils.enjoy --hf-repository {repo} --exp-name {args.exp_name} \\
    --env-id {args.env_id} --epsilon {args.end_e} --script cleanrl/{qdagger}
python cleanrl/{qdagger} --env-id {args.env_id} \\
    --teacher-policy-hf-repo {repo} --teacher-model-exp-name {args.exp_name}
```
Hyperparameters of `cleanrl/{script}`:
```python
{pprint.pformat(vars(args), sort_dicts=False)}
```
"""
