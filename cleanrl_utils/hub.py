"""Uploads a trained model to the Hugging Face Hub, laid out so that ``find_teacher`` finds it there."""

import dataclasses
import functools
import inspect
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import (
    CommitOperationAdd,
    EvalResult,
    HfApi,
    ModelCardData,
    get_session,
    get_token,
    is_offline_mode,
    set_client_factory,
)

from cleanrl_utils.errors import UserError

HOW_IT_WAS_RUN = ("resume", "checkpoint_minutes", "max_minutes")
"""Flags that make no difference to what is learned"""

PATIENCE = 30.0
"""seconds that the hub may take to answer, or to send or accept the next piece"""


@functools.cache
def limit_waiting() -> None:
    """Makes every request to the hub fail after :data:`PATIENCE` without progress; of itself the client may hang."""
    session = get_session()
    hooks = session.event_hooks
    settings = {"event_hooks": hooks, "follow_redirects": session.follow_redirects, "timeout": session.timeout}

    def limit(request: Any) -> None:
        timeouts = request.extensions["timeout"]
        request.extensions["timeout"] = {name: min(seconds or PATIENCE, PATIENCE) for name, seconds in timeouts.items()}

    hooks["request"].append(limit)
    # A factory, not this session's own timeout: the client makes a new session after a connection that failed.
    set_client_factory(lambda: type(session)(**settings))
    # Large files go to the storage beside the hub, whose client tries six times, 300 s each. Sending counts there, and
    # is slow for some.
    os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", "120s")


def check_upload_possible(args: Any) -> None:
    """With ``--upload-model``, sees before the training to what would make the upload after it fail.

    Raises:
        UserError: there is no token, or the hub's client is told to stay offline.
    """
    if not args.upload_model:
        return
    if is_offline_mode():
        raise UserError("--upload-model can't upload while HF_HUB_OFFLINE is set; unset it, or leave the flag out")
    if get_token() is None:
        raise UserError(
            "--upload-model needs a Hugging Face token that may write, and there is none; log in with `hf auth login` "
            "or set HF_TOKEN, or leave the flag out"
        )


def upload_model(args: Any, run_dir: Path, model_path: Path, returns: np.ndarray, videos: list[Path]) -> None:
    """Uploads model, model card, TensorBoard events, videos and the script that made it, in one commit.

    Hours of training lie behind a model: if anything fails, this says so and how to try again, and raises nothing.

    Args:
        args: the script's flags, a dataclass.
        run_dir: where the events are, whose writer must have been closed; the model card is written there too.
        model_path: the model's file, in ``run_dir``.
        returns: the scores of the evaluation's games, (N,).
        videos: mp4 files; the hub shows the last beside the model card.
    """
    name = f"{args.env_id.replace('/', '-')}-{args.exp_name}-seed{args.seed}"
    repo = f"{args.hf_entity}/{name}" if args.hf_entity else name  # the hub fills in the token's owner
    filename = f"{args.exp_name}.cleanrl_model"
    try:
        limit_waiting()
        api = HfApi()
        repo = f"{args.hf_entity or api.whoami()['name']}/{name}"
        card_path = run_dir / "README.md"
        card_path.write_text(model_card(args, repo, returns), encoding="utf-8")

        files = {filename: model_path, "README.md": card_path}
        files |= {path.name: path for path in run_dir.glob("events.out.tfevents.*")}
        files |= {f"videos/{path.parent.name}/{path.name}": path for path in videos}
        if videos:
            files["replay.mp4"] = videos[-1]
        script = script_of(args)
        files[script.name] = script

        url = api.create_repo(repo, exist_ok=True)
        # Not upload_folder, which splits a large upload into several commits.
        api.create_commit(
            repo,
            [CommitOperationAdd(path_in_repo, path) for path_in_repo, path in files.items()],
            commit_message=f"{args.exp_name} on {args.env_id}, seed {args.seed}",
        )
        print(f"model uploaded to {url}")
    except Exception as error:
        retry = ["hf", "upload", repo, str(run_dir), "."]
        for pattern in (model_path.name, "README.md", "events.out.tfevents.*"):
            retry += ["--include", pattern]
        reason = " ".join(str(error).split()) or type(error).__name__
        print(
            f"UPLOAD FAILED ({reason}); the model is still at {model_path}, upload it with: {shlex.join(retry)}",
            file=sys.stderr,
            flush=True,
        )


def model_card(args: Any, repo: str, returns: np.ndarray) -> str:
    """The README.md of hub repository ``repo``, with the metadata that the hub lists and searches models by."""
    score = f"{returns.mean():.2f} +/- {returns.std():.2f}"  # "+/-" as in all of CleanRL's model cards
    data = ModelCardData(
        library_name="cleanrl",
        tags=[args.env_id, "deep-reinforcement-learning", "reinforcement-learning", "custom-implementation"],
        model_name=args.exp_name,
        eval_results=[
            EvalResult(
                task_type="reinforcement-learning",
                task_name="reinforcement-learning",
                dataset_type=args.env_id,
                dataset_name=args.env_id,
                metric_type="mean_reward",
                metric_name="mean_reward",
                metric_value=score,
            )
        ],
    )
    jax = "_jax" if "_jax" in script_of(args).stem else ""
    flags = "\n".join(f"{field.name}: {getattr(args, field.name)!r}" for field in dataclasses.fields(args))
    return f"""---
{data.to_yaml()}
---

# {args.exp_name} on {args.env_id}

Mean return {score} over {len(returns)} games at epsilon {args.end_e} (whole games, unclipped scores).

Let it play, or teach a student with it:

```bash
python -m cleanrl_utils.evals.dqn{jax}_eval --model {repo} --exp-name {args.exp_name} --env-id {args.env_id}
python cleanrl/qdagger_dqn_atari{jax}_impalacnn.py --env-id {args.env_id} \\
    --teacher-policy-hf-repo {repo} --teacher-model-exp-name {args.exp_name}
```

Train it again:

```bash
{training_command(args)}
```

## Hyperparameters

```text
{flags}
```
"""


def script_of(args: Any) -> Path:
    """The script that was run: the file that these flags' class is defined in."""
    return Path(inspect.getfile(type(args)))


def training_command(args: Any) -> str:
    """The command line that gives these flags; those at their defaults are left out."""
    words = ["python", f"cleanrl/{script_of(args).name}"]
    for field in dataclasses.fields(args):
        value, name = getattr(args, field.name), field.name.replace("_", "-")
        if value == field.default or field.name in HOW_IT_WAS_RUN:
            continue
        words += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return shlex.join(words)
