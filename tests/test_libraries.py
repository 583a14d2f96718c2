"""Teachers that other libraries wrote: stable-baselines3, sb3-contrib, and CleanRL's C51 and PPO."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax
import gymnasium as gym
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from helpers import REPO, cpu, flax_params, random_batch, spread, torch_bytes
from references import log_softmax, nature
from sb3_contrib import QRDQN
from stable_baselines3 import A2C, DQN, PPO

from cleanrl_utils.atari import AtariEnvs
from cleanrl_utils.models import read_arrays

PONG = REPO / "teachers" / "PongNoFrameskip-v4-dqn_atari-seed1" / "dqn_atari.cleanrl_model"
SCRIPTS = [qdagger, qdagger_jax]
A = 6
ATOMS = 51
TEMPERATURE = 0.25
MODELS = {  # the class and its options
    "DQN": (DQN, {"buffer_size": 1}),
    "QR-DQN": (QRDQN, {"buffer_size": 1}),
    "QR-DQN of 100 quantiles": (QRDQN, {"buffer_size": 1, "policy_kwargs": {"n_quantiles": 100}}),
    "PPO": (PPO, {"n_steps": 2, "batch_size": 2}),
    "A2C of two extractors": (A2C, {"policy_kwargs": {"share_features_extractor": False}}),
}


class Spaces(gym.Env):
    """Has the spaces of stacked Pong."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(A)


@pytest.fixture(scope="module")
def observations() -> np.ndarray:
    """100 observations of Pong, uint8 (100, 4, 84, 84)."""
    envs = AtariEnvs("PongNoFrameskip-v4", 4)
    rng = np.random.default_rng(1)
    found = [envs.reset(1, "online"), *(envs.step(rng.integers(0, A, 4)).observation for _ in range(99))]
    envs.close()
    return np.concatenate(found[::4])


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model of a library with the layers of the embedded teacher, and the file that the library saves.

    Layers that do not act are random, as those of target networks and critics. A policy's logits are the Q-values
    times 500: they differ by hundredths.
    """
    name = request.param
    algorithm, options = MODELS[request.param]
    model = algorithm("CnnPolicy", Spaces(), device="cpu", seed=1, **options)
    net = model.policy
    if algorithm in (PPO, A2C):
        extractor = net.pi_features_extractor
        head = net.action_net
        sharpness = 500
    else:
        net = net.q_net if algorithm is DQN else net.quantile_net
        extractor = net.features_extractor
        head = (net.q_net if algorithm is DQN else net.quantile_net)[0]
        sharpness = 1
    layers = {0: extractor.cnn[0], 2: extractor.cnn[2], 4: extractor.cnn[4], 7: extractor.linear[0], 9: head}
    for key, array in read_arrays(PONG).items():
        _, index, part = key.split(".")
        value = torch.from_numpy(array) * (sharpness if index == "9" else 1)
        if index == "9" and algorithm is QRDQN:
            noise = torch.randn(net.n_quantiles, *value.shape) * value.std()
            value = (value + noise - noise.mean(dim=0)).flatten(0, 1)
        getattr(layers[int(index)], part).data.copy_(value)
    path = tmp_path_factory.mktemp("library") / "model.zip"
    model.save(path)
    return SimpleNamespace(name=name, model=model, net=net, path=path, is_policy=algorithm in (PPO, A2C))


@pytest.mark.parametrize("script", SCRIPTS)
def test_outputs(script: Any, saved: SimpleNamespace, observations: np.ndarray) -> None:
    """Q-values, or the policy at the temperature, are the library's, and so is each action of largest output."""
    tensor = torch.from_numpy(observations)
    with torch.inference_mode():
        expected = saved.net.get_distribution(tensor).distribution.probs if saved.is_policy else saved.net(tensor)
    expected = expected.mean(dim=1) if "QR" in saved.name else expected
    teacher = script.Teacher(saved.path, A, TEMPERATURE, cpu(script))
    assert teacher.action_temperature == (TEMPERATURE if saved.is_policy else 0)
    outputs = torch.tensor(teacher.q_values(observations))
    found = torch.softmax(outputs / TEMPERATURE, dim=1) if saved.is_policy else outputs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if saved.is_policy else 1e-5)
    actions, _ = saved.model.predict(observations, deterministic=True)
    assert len(np.unique(actions)) == A
    np.testing.assert_array_equal(outputs.argmax(dim=1), actions)


def cleanrl_file(kind: str, state: dict[str, torch.Tensor]) -> bytes:
    """Return a file as a script of CleanRL writes it, or the state of the agent of its PPO."""
    args = {"exp_name": kind, "track": False, "wandb_entity": None, "v_min": -5, "v_max": 2.5, "n_atoms": ATOMS}
    params = flax_params({key: value.numpy() for key, value in state.items()})
    if kind == "dqn_atari":
        return torch_bytes(state)
    if kind == "c51_atari":
        return torch_bytes({"model_weights": state | {"atoms": torch.linspace(-5, 2.5, ATOMS)}, "args": args})
    if kind == "c51_atari_jax":
        return flax.serialization.to_bytes({"model_weights": params, "args": args})
    if kind == "ppo_atari":
        agent = {key.replace("network.9", "actor"): value for key, value in state.items()}
        return torch_bytes(agent | {"critic.weight": torch.ones(1, 512), "critic.bias": torch.ones(1)})
    heads = (params["params"].pop("Dense_1"), {"kernel": np.ones((512, 1)), "bias": np.ones(1)})
    if kind == "ppo_atari in flax":
        actor, critic = heads
        return flax.serialization.to_bytes({"params": params["params"] | {"actor": actor, "critic": critic}})
    return flax.serialization.to_bytes([args, [params, *({"params": {"Dense_0": head}} for head in heads)]])


KINDS = ["dqn_atari", "c51_atari", "c51_atari_jax", "ppo_atari", "ppo_atari in flax", "ppo_atari_envpool_xla_jax_scan"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_cleanrl(kind: str, script: Any, tmp_path: Path) -> None:
    """They are those of a float64 reference: Q-values, or the logits of a policy times the temperature."""
    c51 = kind.startswith("c51")
    is_policy = kind.startswith("ppo")
    observation = random_batch(1, 4, A)["observation"]
    state = spread(qdagger.TeacherNetwork(A * ATOMS if c51 else A), seed=1).state_dict()
    path = tmp_path / f"{kind}.cleanrl_model"
    path.write_bytes(cleanrl_file(kind, state))
    expected = nature({key: value.double().numpy() for key, value in state.items()}, observation)
    if c51:
        expected = np.exp(log_softmax(expected.reshape(4, A, ATOMS))) @ np.linspace(-5, 2.5, ATOMS)
    expected *= TEMPERATURE if is_policy else 1.0
    for bf16, tolerance in ((False, 1e-5), (True, 0.02)):
        teacher = script.Teacher(path, A, TEMPERATURE, cpu(script, bf16))
        assert teacher.action_temperature == (TEMPERATURE if is_policy else 0)
        q_values = teacher.q_values(observation)
        assert q_values.dtype == np.float32
        np.testing.assert_allclose(q_values, expected, rtol=0, atol=tolerance)
