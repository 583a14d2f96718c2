"""Play episodes with a saved model, with CleanRL's flags: ``python -m cleanrl_utils.enjoy --exp-name … --env-id …``"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import tyro

import cleanrl
from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.checks import PACKAGES
from cleanrl_utils.device import set_up_jax, set_up_torch
from cleanrl_utils.errors import UserError, one_line_errors, require_packages, user_errors
from cleanrl_utils.evaluation import play_episodes
from cleanrl_utils.hub import repository_name

SCRIPTS = Path(cleanrl.__file__).parent


@dataclass
class Args:
    exp_name: str = "dqn_atari"
    """the name of the model's file without .cleanrl_model or .zip"""
    seed: int = 1
    """seed of the environments and actions, and the one in the repository's name"""
    hf_entity: str = "cleanrl"
    """the user or organisation on the Hugging Face Hub"""
    hf_repository: str = ""
    """hub repository, directory or file of the model; by default {hf_entity}/{env_id}-{exp_name}-seed{seed}"""
    env_id: str = "BreakoutNoFrameskip-v4"
    """the environment: {Game}NoFrameskip-v4 or ALE/{Game}-v5"""
    eval_episodes: int = 10
    """episodes to play"""
    capture_video: bool = False
    """whether to film one more episode (check out the `videos` folder)"""
    script: Path | None = None
    """QDagger script that loads the model; by default JAX's if `exp_name` or the end of `hf_repository` has `_jax`"""
    epsilon: float = 0.01
    """probability of a random action"""
    repeat_action_probability: float | None = None
    """probability of a sticky action, per frame; by default 0 for -v4 and 0.25 for -v5"""


def import_script(path: Path) -> ModuleType:
    """Import a script that loads models."""
    with user_errors(f"{str(path)!r} cannot be imported", "give another --script"):
        spec = importlib.util.spec_from_file_location("script", path)
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
    if not hasattr(script, "load_model"):
        raise UserError(f"--script {str(path)!r} has no function load_model; give a copy of a QDagger script")
    return script


def load_act(args: Args) -> Callable[[np.ndarray], np.ndarray]:
    """Load the model with the functions of its script.

    Returns:
        A function that chooses actions, int64 (B,), for observations, uint8 (B, 4, 84, 84).
    """
    envs = AtariEnvs(args.env_id, 1, args.seed, args.repeat_action_probability)
    envs.close()
    repo = args.hf_repository or repository_name(args)
    library = "_jax" if "_jax" in args.exp_name + Path(repo).name else ""
    script = import_script(args.script or SCRIPTS / f"qdagger_dqn_atari{library}_impalacnn.py")
    model = repo, args.exp_name, envs.num_actions, 1.0
    if hasattr(script, "jax"):
        network, params, temperature = script.load_model(*model, set_up_jax(bf16=True))
        apply = script.jax.jit(network.apply)

        def q_function(observation: np.ndarray) -> np.ndarray:
            return np.asarray(apply(params, observation))

    else:
        torch = script.torch
        device, bf16, memory_format = set_up_torch(cuda=True, bf16=True)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        network, temperature = script.load_model(*model)
        network.to(device, memory_format=memory_format)

        @torch.inference_mode()
        def q_function(observation: np.ndarray) -> np.ndarray:
            with autocast:
                return network(torch.as_tensor(observation, device=device)).cpu().numpy()

    rng = np.random.default_rng(args.seed + 1000)  # as in the scripts' evaluations

    def act(observation: np.ndarray) -> np.ndarray:
        return script.epsilon_greedy(q_function(observation), args.epsilon, rng, temperature)

    return act


def main(args: Args) -> np.ndarray:
    """Play the episodes, print statistics of their returns, and return them, (episodes,)."""
    if args.eval_episodes < 1 or not 0 <= args.epsilon <= 1 or not 0 <= args.seed < 2**32:
        raise UserError("--eval-episodes must be at least 1, --epsilon from 0 to 1, --seed from 0 to 2^32 - 1")
    if args.capture_video:
        require_packages("--capture-video", *PACKAGES["capture_video"])
    run_dir = Path(f"{args.env_id.replace('/', '-')}-{Path(args.hf_repository).stem or args.exp_name}")
    returns = np.array(play_episodes("enjoy", load_act(args), args.eval_episodes, args, run_dir))
    error = returns.std(ddof=min(1, len(returns) - 1)) / len(returns) ** 0.5
    print(f"standard error {error:.2f}, quartiles {np.quantile(returns, (0.25, 0.5, 0.75)).tolist()}")
    return returns


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args))
