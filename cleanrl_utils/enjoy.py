"""Play episodes with a saved model, with CleanRL's flags: ``python -m cleanrl_utils.enjoy --exp-name … --env-id …``"""

import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import tyro

import cleanrl
from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.checks import PACKAGES
from cleanrl_utils.device import pick_jax_device, pick_torch_device
from cleanrl_utils.errors import UserError, one_line, one_line_errors, require_packages
from cleanrl_utils.evaluation import QFunction, play_episodes

SCRIPTS = Path(cleanrl.__file__).parent


@dataclass
class Args:
    exp_name: str = "dqn_atari"
    """the name of the model's file, {exp_name}.cleanrl_model; with `_jax` in it, JAX plays, otherwise PyTorch"""
    seed: int = 1
    """seed of the environments and actions, and the one in the repository's name"""
    hf_entity: str = "cleanrl"
    """the user or organisation on the Hugging Face Hub"""
    hf_repository: str = ""
    """hub repository, local directory or .cleanrl_model file; by default {hf_entity}/{env_id}-{exp_name}-seed{seed}"""
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or ALE/{Game}-v5"""
    eval_episodes: int = 10
    """episodes to play"""
    capture_video: bool = False
    """whether to film one more episode (check out the `videos` folder)"""
    script: Path | None = None
    """script with the model's network; by default cleanrl/{exp_name}.py or QDagger's, which has DQN's network too"""
    epsilon: float = 0.01
    """probability of a random action"""
    repeat_action_probability: float | None = None
    """probability of a sticky action, per frame; by default 0 for -v4 and 0.25 for -v5"""


def import_script(given: Path | None, name: str) -> ModuleType:
    """Import a script that loads the model ``name``: the one given, or the one of that name, or QDagger's."""
    own = SCRIPTS / f"{re.sub(r'-offline-[0-9]+$', '', name)}.py"
    qdagger = SCRIPTS / f"qdagger_dqn_atari{'_jax' if '_jax' in name else ''}_impalacnn.py"
    for path in [given] if given else filter(Path.is_file, (own, qdagger)):
        try:
            spec = importlib.util.spec_from_file_location("script", path)
            script = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(script)
        except Exception as error:
            raise UserError(f"{path} cannot be imported ({one_line(error)}); give another --script") from error
        if hasattr(script, "load_model"):
            return script
    raise UserError(f"--script {given} has no function load_model; give a copy of a QDagger script")


def load_q_function(args: Args) -> QFunction:
    """Load the model with the functions of its script. It computes in bfloat16 where a training run does."""
    envs = AtariEnvs(args.env_id, 1, args.seed, args.repeat_action_probability)
    envs.close()
    repo = args.hf_repository or f"{args.hf_entity}/{args.env_id.replace('/', '-')}-{args.exp_name}-seed{args.seed}"
    path = Path(repo).expanduser()
    script = import_script(args.script, path.stem if path.is_file() else args.exp_name)
    load, model = (script.load_model, (path,)) if path.is_file() else (script.load_teacher, (repo, args.exp_name))
    if hasattr(script, "jax"):
        network, params = load(*model, envs.num_actions, pick_jax_device(bf16=True))
        return functools.partial(script.jax.jit(network.apply), params)
    torch = script.torch
    device, autocast = pick_torch_device(cuda=True, bf16=True)
    network = load(*model, envs.num_actions).to(device, memory_format=torch.channels_last)

    @torch.inference_mode()
    def q_function(observation: np.ndarray) -> np.ndarray:
        with autocast:
            return network(torch.as_tensor(observation, device=device)).cpu().numpy()

    return q_function


def main(args: Args) -> np.ndarray:
    """Play the episodes, print their returns in one line, and return them, (episodes,)."""
    if args.eval_episodes < 1 or not 0 <= args.epsilon <= 1 or not 0 <= args.seed < 2**32:
        raise UserError("--eval-episodes must be at least 1, --epsilon from 0 to 1, --seed from 0 to 2^32 - 1")
    if args.capture_video:
        require_packages("--capture-video", *PACKAGES["capture_video"])
    flags = SimpleNamespace(**vars(args), end_e=args.epsilon)
    run_dir = Path(f"{args.env_id.replace('/', '-')}-{args.exp_name}")  # it names the folder of the video
    returns = np.array(play_episodes("enjoy", load_q_function(args), args.eval_episodes, flags, run_dir))
    error = f"standard error {returns.std(ddof=1) / len(returns) ** 0.5:.2f}, " if len(returns) > 1 else ""
    quartiles = ", ".join(f"{value:g}" for value in np.quantile(returns, (0.25, 0.5, 0.75)))
    result = f"mean return {returns.mean():.2f} ± {returns.std():.2f} ({error}quartiles {quartiles})"
    print(f"{args.env_id}: {result} over {len(returns)} episode{'s' * (len(returns) > 1)} at epsilon {args.epsilon}")
    return returns


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
