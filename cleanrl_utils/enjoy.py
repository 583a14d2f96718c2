"""A published model plays, with CleanRL's flags: ``python -m cleanrl_utils.enjoy --exp-name … --env-id …``"""

import importlib
from dataclasses import dataclass
from pathlib import Path

import tyro

from cleanrl_utils.checks import UserError, one_line_errors, require_packages
from cleanrl_utils.evals.playing import print_scores


@dataclass
class Args:
    exp_name: str = "dqn_atari"
    """what made the model; its file is {exp_name}.cleanrl_model, and `_jax` in it says what computes"""
    seed: int = 1
    """the seed in the repository's name, and that of the games"""
    hf_entity: str = "cleanrl"
    """the user or organisation on the Hugging Face Hub"""
    hf_repository: str = ""
    """a hub repository or local directory; by default {hf_entity}/{env_id}-{exp_name}-seed{seed}"""
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or ALE/{Game}-v5"""
    eval_episodes: int = 10
    """whole games to play"""
    capture_video: bool = False
    """whether to write a video of one game more into the `videos/eval` folder"""
    script: Path | None = None
    """the script that has the model's network; by default cleanrl/{exp_name}.py, or QDagger's, which has DQN's too"""


def main(args: Args) -> None:
    name = f"{args.env_id.replace('/', '-')}-{args.exp_name}-seed{args.seed}"
    video = Path("videos") / "eval" / f"{name}.mp4" if args.capture_video else None
    jax = "_jax" if "_jax" in args.exp_name else ""
    require_packages(f"--exp-name {args.exp_name}", *(("jax", "flax", "optax") if jax else ("torch",)))
    evaluation = importlib.import_module(f"cleanrl_utils.evals.dqn{jax}_eval")
    flags = evaluation.Args(
        model=args.hf_repository or f"{args.hf_entity}/{name}",
        env_id=args.env_id,
        exp_name=args.exp_name,
        script=args.script,
        episodes=args.eval_episodes,
        seed=args.seed,
        video=video,
    )
    try:
        print_scores(flags, evaluation.evaluate(flags))
    except UserError as error:
        raise UserError(str(error).replace("--model", "--hf-repository")) from error
    if video:
        print(f"video: {video}")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
