"""Models on the Hugging Face Hub: what went wrong with a download, in one line, and the upload of a trained one."""

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub as hf
import numpy as np
from huggingface_hub import errors

from cleanrl_utils.checks import UserError
from cleanrl_utils.tracking import script_of

SUFFIX = ".cleanrl_model"
TRAIN_ONE = (
    "or train a teacher with `python cleanrl/dqn_atari.py --env-id … --save-model` and point "
    "--teacher-policy-hf-repo at the directory that it is saved in"
)
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"

HOW_IT_WAS_RUN = ("resume", "checkpoint_minutes", "max_minutes")
"""Flags that make no difference to what is learned"""

PATIENCE = 30.0
"""seconds that the hub may take to answer, or to send or accept the next piece"""


def limit_waiting() -> None:
    """Makes requests that have no time limit of the client's own fail after :data:`PATIENCE` without progress."""
    session = hf.get_session()
    # A factory, not this session's own timeout: the client makes a new session after a connection that failed.
    options = {"event_hooks": session.event_hooks, "follow_redirects": True, "timeout": PATIENCE}
    hf.set_client_factory(lambda: type(session)(**options))
    # Large files go to the storage beside the hub, whose client tries six times, 300 s each. Sending counts there, and
    # is slow for some.
    os.environ.setdefault("HF_XET_CLIENT_READ_TIMEOUT", "120s")


@contextlib.contextmanager
def download_errors(repo: str, filename: str) -> Iterator[None]:
    """Turns whatever `hf_hub_download` raises, and a local directory without the file, into a UserError: one line that
    says why ``filename`` of the directory or hub repository ``repo`` can't be had, and what to do.
    """
    limit_waiting()
    hf.logging.set_verbosity_error()  # the client's retries would take ten lines before ours
    try:
        place = Path(repo).expanduser()
        if place.is_dir() and not (place / filename).is_file():
            raise UserError(no_such_file(f"directory {place}", filename, [file.name for file in place.iterdir()]))
        if place.is_file():
            raise UserError(
                f"--teacher-policy-hf-repo {repo} is a file; give its directory, {place.parent}, and "
                f"--teacher-model-exp-name {place.name.removesuffix(SUFFIX)}"
            )
        yield
    except UserError:
        raise
    except Exception as error:  # the client raises its own, its HTTP library's, OSError and ValueError
        raise UserError(download_problem(repo, filename, error)) from error


def no_such_file(place: str, filename: str, names: list[str]) -> str:
    """What to say when ``place``, which holds the files ``names``, lacks ``filename``."""
    stems = sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    if not stems:
        return f"the {place} has no {filename}, nor any other {SUFFIX} file; give another, {TRAIN_ONE}"
    return (
        f"the {place} has no {filename}; it has {', '.join(stem + SUFFIX for stem in stems)}: "
        f"give --teacher-model-exp-name {' or '.join(stems)}"
    )


def download_problem(repo: str, filename: str, error: Exception) -> str:
    """What to say of an exception that `hf_hub_download` raised."""
    # "Not in the cache" is what the client raises whenever a request failed; the request's own error is behind it.
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = " ".join((getattr(error, "server_message", None) or str(error) or type(error).__name__).split())
    what = f"there is no directory {repo}, "
    if isinstance(error, errors.HFValidationError):
        what += "nor is that a valid name of a hub repository (owner/name); check --teacher-policy-hf-repo"
    elif isinstance(error, errors.RemoteEntryNotFoundError | errors.RevisionNotFoundError):
        names = []
        with contextlib.suppress(Exception):  # the list is only there to help
            names = [file.rfilename for file in hf.HfApi().model_info(repo, timeout=PATIENCE).siblings]
        return no_such_file(f"hub repository {repo}", filename, names)
    elif status == 401:  # for a repository that does not exist too, unless one is logged in
        what += f"and the hub repository of that name does not exist or is private (401, {reason}); check the name, "
        what += LOG_IN
    elif isinstance(error, errors.GatedRepoError) or status == 403:
        what = f"the hub refuses access to the repository {repo} (403, {reason}); ask for access at "
        what += f"{hf.constants.ENDPOINT}/{repo} and {LOG_IN}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what += f"nor a hub repository of that name (404); check the name or, if it is private, {LOG_IN}"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        what += f"HF_HUB_OFFLINE is set and the cache {hf.constants.HF_HUB_CACHE} has no {filename} of the hub "
        what += f"repository {repo}; unset it"
    else:
        what += f"and {filename} of the hub repository {repo} can't be downloaded from {hf.constants.ENDPOINT} "
        what += f"({reason}); check the connection and try again"
    return f"{what}, {TRAIN_ONE}"


def check_upload_possible(args: Any) -> None:
    """UserError where ``--upload-model`` can't work: no token, or a client that is told to stay offline."""
    if args.upload_model and hf.is_offline_mode():
        raise UserError("--upload-model can't upload while HF_HUB_OFFLINE is set; unset it, or leave the flag out")
    if args.upload_model and hf.get_token() is None:
        needs = "needs a Hugging Face token that may write, and there is none"
        raise UserError(f"--upload-model {needs}; {LOG_IN}, or leave the flag out")


def upload_model(args: Any, run_dir: Path, model_path: Path, returns: np.ndarray, videos: list[Path]) -> None:
    """Uploads model, model card, TensorBoard events, videos and the script that made it, in one commit.

    Hours of training lie behind a model: if anything fails, this says so and how to try again, and raises nothing. The
    writer of the events in ``run_dir`` must have been closed, and the model lie there too, where the card is written;
    ``returns`` are the scores of the evaluation's games, (N,); the hub shows the last of the videos beside the card.
    """
    name = f"{args.env_id.replace('/', '-')}-{args.exp_name}-seed{args.seed}"
    repo = f"{args.hf_entity}/{name}" if args.hf_entity else name  # the hub fills in the token's owner
    try:
        limit_waiting()
        api = hf.HfApi()
        repo = f"{args.hf_entity or api.whoami()['name']}/{name}"
        card_path = run_dir / "README.md"
        card_path.write_text(model_card(args, repo, returns), encoding="utf-8")

        files = {path.name: path for path in (model_path, card_path, script_of(args))}
        files |= {path.name: path for path in run_dir.glob("events.out.tfevents.*")}
        files |= {f"videos/{path.parent.name}/{path.name}": path for path in videos}
        if videos:
            files["replay.mp4"] = videos[-1]

        url = api.create_repo(repo, exist_ok=True)
        # Not upload_folder, which splits a large upload into several commits.
        api.create_commit(
            repo,
            [hf.CommitOperationAdd(path_in_repo, path) for path_in_repo, path in files.items()],
            commit_message=f"{args.exp_name} on {args.env_id}, seed {args.seed}",
        )
        print(f"model uploaded to {url}")
    except Exception as error:
        retry = ["hf", "upload", repo, str(run_dir), "."]
        for pattern in (model_path.name, "README.md", "events.out.tfevents.*"):
            retry += ["--include", pattern]
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"the model is still at {model_path}, upload it with: {shlex.join(retry)}"
        print(f"UPLOAD FAILED ({reason}); {what}", file=sys.stderr, flush=True)


def model_card(args: Any, repo: str, returns: np.ndarray) -> str:
    """The README.md of hub repository ``repo``, with the metadata that the hub lists and searches models by."""
    score = f"{returns.mean():.2f} +/- {returns.std():.2f}"  # "+/-" as in all of CleanRL's model cards
    task, metric = "reinforcement-learning", "mean_reward"
    data = hf.ModelCardData(
        library_name="cleanrl",
        tags=[args.env_id, "deep-reinforcement-learning", task, "custom-implementation"],
        model_name=args.exp_name,
        eval_results=[hf.EvalResult(task, args.env_id, args.env_id, metric, score, task, metric_name=metric)],
    )
    script, backend = script_of(args).name, "" if hasattr(args, "cuda") else "_jax"
    qdagger = f"qdagger_dqn_atari{backend}_impalacnn.py"
    student = script if hasattr(args, "teacher_policy_hf_repo") else qdagger  # a copy's network is in no other script
    own = f" --script cleanrl/{script}" if student not in (qdagger, f"{args.exp_name}.py") else ""
    flags = "\n".join(f"{field.name}: {getattr(args, field.name)!r}" for field in dataclasses.fields(args))
    return f"""---
{data.to_yaml()}
---

# {args.exp_name} on {args.env_id}

Mean return {score} over {len(returns)} games at epsilon {args.end_e} (whole games, unclipped scores).

Let it play, or teach a student with it:

```bash
python -m cleanrl_utils.evals.dqn{backend}_eval --model {repo} --exp-name {args.exp_name} --env-id {args.env_id}{own}
python cleanrl/{student} --env-id {args.env_id} \\
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


def training_command(args: Any) -> str:
    """The command line that gives these flags; those at their defaults are left out."""
    words = ["python", f"cleanrl/{script_of(args).name}"]
    for field in dataclasses.fields(args):
        value, name = getattr(args, field.name), field.name.replace("_", "-")
        if value == field.default or field.name in HOW_IT_WAS_RUN:
            continue
        words += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return shlex.join(words)
