"""Model files: every format in both scripts, conversion between them, and files damaged, foreign or hostile."""

import contextlib
import io
import json
import os
import pickle
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import jax
import msgpack
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from flax.traverse_util import flatten_dict
from helpers import Hostile, SmallFlaxNetwork, cpu, flax_params, spread, torch_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from references import Weights

from cleanrl_utils import models
from cleanrl_utils.errors import UserError
from cleanrl_utils.models import choose_model, find_model, read_arrays, torch_to_flax

SCRIPTS = (qdagger, qdagger_jax)
OBSERVATIONS = np.random.default_rng(1).integers(0, 256, (3, 4, 84, 84), np.uint8)
flax_bytes = flax.serialization.msgpack_serialize


def random_weights(network: type[torch.nn.Module], num_actions: int = 6) -> Weights:
    """Return float32 weights of a network of the PyTorch script."""
    return {name: array.numpy() for name, array in spread(network(num_actions), seed=1).state_dict().items()}


WEIGHTS = random_weights(qdagger.TeacherNetwork)
BIAS = WEIGHTS["network.9.bias"]
SMALL = {name: array[(slice(1), slice(49), slice(1), slice(1))[: array.ndim]] for name, array in WEIGHTS.items()}
SB3_DQN = {f"network.{i}": f"q_net.features_extractor.cnn.{i}" for i in (0, 2, 4)}
SB3_DQN |= {"network.7": "q_net.features_extractor.linear.0", "network.9": "q_net.q_net.0"}


def zip_bytes(files: dict[str, bytes | str]) -> bytes:
    """Return a zip archive of files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def sb3_names(weights: dict[str, Any]) -> dict[str, Any]:
    """Give the layers of a teacher their names in the DQN of stable-baselines3."""
    return {SB3_DQN.get(key[:9], key[:9]) + key[9:]: array for key, array in weights.items()}


def sb3_zip(state: Any, num_actions: int = 6, shape: tuple = (4, 84, 84), **policy_kwargs: Any) -> bytes:
    """Return a file as stable-baselines3 writes it, of a state dict with names of a teacher, or of these bytes."""
    if isinstance(state, dict):
        state = torch_bytes(sb3_names(state))
    data = {"action_space": {":type:": "<class 'gym.spaces.Discrete'>", "n": str(num_actions)}}
    data |= {"observation_space": {"_shape": shape}, "policy_kwargs": policy_kwargs}
    return zip_bytes({"data": json.dumps(data), "policy.pth": state, "policy.optimizer.pth": b""})


def load(script: Any, path: Path, num_actions: int = 6, temperature: float = 1.0, bf16: bool = False) -> Any:
    """Load a model file as a teacher on the CPU."""
    return script.Teacher(path, num_actions, temperature, cpu(script, bf16))


# ==================== formats and conversion ====================


def formats(weights: Weights) -> list[bytes]:
    """Return the same weights in every format that is read."""
    params = flax_params(weights)
    float64 = {key: value.astype(np.float64) for key, value in weights.items()}
    files = [torch_bytes(weights), torch_bytes(float64), flax_bytes(params), flax_bytes(flax_params(float64))]
    files += [flax.serialization.to_bytes([{"seed": 1, "tag": None}, params])]
    if "network.9.bias" in weights:  # the layers of a CnnPolicy
        files += [sb3_zip(weights)]
    return files


@pytest.mark.parametrize("network", ["QNetwork", "TeacherNetwork"])
def test_every_format_is_read(network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both scripts have the same float32 weights; JAX's reads PyTorch's files without PyTorch."""
    weights = random_weights(getattr(qdagger, network))
    params = torch_to_flax(weights)
    for data in formats(weights):
        (tmp_path / "any name").write_bytes(data)
        teacher = load(qdagger, tmp_path / "any name", temperature=0.5)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch", None)
            jax_teacher = load(qdagger_jax, tmp_path / "any name", temperature=0.5)
        assert type(teacher.network).__name__ == type(jax_teacher.network).__name__ == network
        assert teacher.action_temperature == jax_teacher.action_temperature == 0
        assert {value.dtype for value in teacher.network.parameters()} == {torch.float32}
        assert all(np.array_equal(value, weights[key]) for key, value in teacher.network.state_dict().items())
        assert all(np.array_equal(x, params[key]) for key, x in flatten_dict(jax_teacher.params, sep="/").items())


def test_network_of_more_layers() -> None:
    """It does not replace the one that has exactly the layers of the file."""
    larger = WEIGHTS | {"value.bias": BIAS}
    assert models.matching_network(WEIGHTS, {"larger": larger, "equal": WEIGHTS}) == "equal"


# ==================== the network of a changed script ====================


class OwnNetwork(torch.nn.Module):
    """A network with normalisations and without some biases: uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(4, 4, 8, stride=8, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.LayerNorm(400), torch.nn.Linear(400, num_actions),
        )  # fmt: skip
        self.scale = torch.tensor(255.0)  # not in the state dict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x / self.scale).float()


class OwnFlaxNetwork(nn.Module):
    """The same in flax, without a running average."""

    num_actions: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(4, (8, 8), 8, padding="VALID", use_bias=False)(x.transpose(0, 2, 3, 1) / 255.0)
        x = nn.LayerNorm()(nn.relu(x).reshape(len(x), -1))
        return nn.Dense(self.num_actions, name="critic")(x)  # a name that is dropped from other models


def test_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is read as it is by the script, beside those of published agents, and refused by the other script."""
    for script, network in zip(SCRIPTS, (OwnNetwork, OwnFlaxNetwork), strict=True):
        monkeypatch.setattr(script, "QNetwork", network)
    (tmp_path / "published").write_bytes(torch_bytes(WEIGHTS))
    for script, other in (SCRIPTS, SCRIPTS[::-1]):
        student = script.Student(script.Args(), 6, cpu(script))
        student.save(tmp_path / "own")
        expected = student.q_values(OBSERVATIONS)
        assert np.ptp(expected) > 0.01
        teacher = load(script, tmp_path / "own", temperature=0.1)
        assert type(teacher.network) is script.QNetwork
        assert teacher.action_temperature == 0
        np.testing.assert_allclose(teacher.q_values(OBSERVATIONS), expected, atol=1e-5)
        rounded = load(script, tmp_path / "own", bf16=True).q_values(OBSERVATIONS)
        np.testing.assert_allclose(rounded, expected, rtol=0, atol=0.02 * np.abs(expected).max())
        with pytest.raises(UserError, match="its layers are not those of"):
            load(other, tmp_path / "own")
        assert type(load(script, tmp_path / "published").network) is script.TeacherNetwork


# ==================== files that cannot be used ====================


def check_unusable(folder: Path, data: bytes, *messages: str, name: str = "dqn_atari.cleanrl_model") -> str:
    """Check that both scripts refuse a file in one printable line: PyTorch's with the first message, JAX's the last.

    JAX has a small student, whose shapes it knows sooner. The line is returned.
    """
    path = folder / name
    path.write_bytes(data)
    for script, message in zip(SCRIPTS, (messages[0], messages[-1]), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(qdagger_jax, "QNetwork", SmallFlaxNetwork)
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # those of NumPy
                with pytest.raises(UserError) as caught:
                    load(script, path)
        text = str(caught.value)
        assert text.startswith(f"{path.as_posix()!r} is not a usable model: ")
        assert message in text
        assert text.isprintable()
        assert len(text) < 500 + len(str(path))
    return text


def changed(**arrays: Any) -> dict[str, Any]:
    """Return WEIGHTS with other arrays; a name is layer_weight or layer_bias, and None removes one."""
    arrays = {f"network.{name.strip('_').replace('_', '.')}": value for name, value in arrays.items()}
    return {key: value for key, value in (WEIGHTS | arrays).items() if value is not None}


# The contents of a state dict, and the message of each script: JAX's has the names of flax.
TORCH_STATES = {
    "a missing key": (changed(_7_bias=None), "lacks [('network.7.bias', (512,))] and has []", "'params/Dense_0/bias'"),
    "control codes": (WEIGHTS | {"evil\x1b[31m\nx.y": BIAS}, "and has [('evil\\x1b[31m\\nx.y', (6,))]"),
    "two frames": (changed(_7_weight=np.zeros((512, 1024))), "('network.7.weight', (512, 1024))]", "cannot reshape"),
    "weights of no dimension": (changed(_7_weight=np.array(0.5)), "has [('network.7.weight', ())]", "kernel', ())]"),
    "a student": (
        random_weights(qdagger.QNetwork, 18),
        "it has 18 actions, and this game has 6; ",
        "lacks [('params/Conv_0/",
    ),
    "a C51 of another game": (random_weights(qdagger.C51Network, 18), "it has 18 actions, and this game has 6; "),
    "one quantile": (changed(_9_weight=WEIGHTS["network.9.weight"][:1]), "Network: it lacks [('network.9.w", ""),
    "infinite weights": (changed(_9_bias=BIAS * np.inf), "holds NaN or infinite values"),
    "a sparse tensor": (changed(_9_bias=torch.from_numpy(BIAS).to_sparse()), "_sparse_tensor'; save"),
}


@pytest.mark.parametrize("case", TORCH_STATES)
def test_torch_file_of_another_network(case: str, tmp_path: Path) -> None:
    state, *messages = TORCH_STATES[case]
    check_unusable(tmp_path, torch_bytes(state), *messages)


def test_flax_file_of_another_network(tmp_path: Path) -> None:
    params = flax_params(WEIGHTS)["params"]
    for changes, *messages in (
        ({"kernel": np.zeros((3135, 512))}, "cannot reshape array", "has [('params/Dense_0/kernel', (3135, 512))]"),
        ({"scale": np.ones(512)}, "it lacks [] and has [('params/Dense_0/scale', (512,))]"),
        ({"bias": 1}, ".bias', ())]", "/bias', ())]"),
    ):
        check_unusable(tmp_path, flax_bytes({"params": params | {"Dense_0": params["Dense_0"] | changes}}), *messages)


def test_foreign_file(tmp_path: Path) -> None:
    files = [torch_bytes(WEIGHTS, _use_new_zipfile_serialization=False)]  # PyTorch's format before 1.6
    for array in (((3,), "float32", b"12345678"), ((1,), "O", b"12345678")):
        files.append(msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(array))}))
    for data in [*files, b"", b"<!DOCTYPE html>\n", b"\x81\xa1a" * 100_000]:
        check_unusable(tmp_path, data, "it is neither a PyTorch nor a flax model, or damaged (")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
    check_unusable(tmp_path, pointer, "it is a pointer of Git LFS; `git lfs pull` fetches the model; ")


@pytest.mark.parametrize("name", ["convert", "rename_sb3", "matching_network", "choose_model"])
def test_a_bug_keeps_its_traceback(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line is for what a user can put right."""
    monkeypatch.setattr(models, name, lambda: "a function of other arguments")
    (tmp_path / "dqn_atari.zip").write_bytes(sb3_zip(WEIGHTS | {"value_net.bias": BIAS}))
    with pytest.raises(TypeError):
        load(qdagger, find_model(str(tmp_path), "dqn_atari"))


def test_policies_of_another_network(tmp_path: Path) -> None:
    """The one requirement that an agent of stable-baselines3 does not meet is named, with the remedy."""
    recurrent = WEIGHTS | {"action_net.bias": BIAS, "lstm_actor.weight_ih_l0": BIAS}
    four_frames = "instead of four frames of 84×84; train it with make_atari_env and VecFrameStack(env, n_stack=4); "
    for data, message in (
        (sb3_zip(recurrent), "its layers are not those of TeacherNetwork: it lacks [] and has [('lstm_actor.weight_ih"),
        (sb3_zip(WEIGHTS, shape=(1, 84, 84)), f"its observations have the shape [1, 84, 84] {four_frames}"),
        (sb3_zip(WEIGHTS, normalize_images=False), "normalize_images=False; train it with the default, True; "),
        (sb3_zip({"quantile_net.quantile_net.0.bias": np.zeros(301)}), "cannot reshape array of size 301"),
    ):
        check_unusable(tmp_path, data, message, name="agent.zip")
    check_unusable(tmp_path, b"", "a network of your own is read by the script that saved it (enjoy: --script)")


def test_zip_archives(tmp_path: Path) -> None:
    """Damaged, nested and hostile ones are refused."""
    data = torch_bytes(SMALL)
    storage = torch.zeros(1000)._typed_storage()
    beyond = Hostile(torch._utils._rebuild_tensor_v2, storage, 0, (9,), (2**61,))
    for content, message in (
        (b"PK\x03\x04" + bytes(50), "File is not a zip file"),
        (zip_bytes({"data": b"{}"}), "neither stable-baselines3 nor a state dict"),
        (sb3_zip(sb3_zip(SMALL)), "neither stable-baselines3 nor a state dict"),
        (sb3_zip(data[:-9]), ""),
        (torch_bytes({"x": beyond}), "is out of bounds"),
    ):
        check_unusable(tmp_path, content, message)


def test_code_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "code was run"
    state = {"network.0.weight": Hostile(os.mkdir, str(marker))}
    for content in (torch_bytes(state), sb3_zip(state)):
        check_unusable(tmp_path, content, ".mkdir'; save a state_dict")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        check_unusable(tmp_path, pickle.dumps(state, protocol), "")
    assert not marker.exists()
    torch.load(io.BytesIO(torch_bytes(state)), weights_only=False)
    assert marker.exists(), "the file has no code"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@given(st.data())
@settings(max_examples=120)
def test_damaged_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever bytes change or are cut off, reading gives finite arrays or one line."""
    content = bytearray(data.draw(st.sampled_from(formats(SMALL))))
    del content[data.draw(st.integers(1, 2 * len(content))) :]
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.getbasetemp() / "file"
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        for array in read_arrays(path).values():
            assert array.dtype == np.float32
            assert np.isfinite(array).all()
    check_unusable(path.parent, bytes(content), "")


# ==================== directories and repositories ====================


def test_a_path_wins_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its name has an "@". test_hub.py has downloads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # on Windows
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    for name in ("local", "local@v1"):
        file = tmp_path / "lab" / name / "dqn_atari.cleanrl_model"
        file.parent.mkdir(parents=True)
        file.touch()
        for repo in (str(file.parent), f"lab/{name}", f"~/lab/{name}", f"lab/{name}/dqn_atari.cleanrl_model"):
            assert find_model(repo, "dqn_atari").samefile(file)


@pytest.mark.posix
@pytest.mark.parametrize(
    ("files", "exp_name", "found"),
    [
        ("dqn_atari.cleanrl_model dqn_atari.zip a.zip", "dqn_atari", "dqn_atari.cleanrl_model"),
        ("dqn_atari.zip a.zip", "dqn_atari", "dqn_atari.zip"),
        ("dqn_atari.cleanrl_model train_eval_metrics.zip args.yml", "dqn_atari_jax", "dqn_atari.cleanrl_model"),
        ("a.zip b.zip", "b", "b.zip"),
        ("a.zip", "b", "no file b.cleanrl_model or b.zip; choose with --teacher-model-exp-name .* from a.zip$"),
        ("b.cleanrl_model a.zip x.txt", "dqn_atari", "--exp-name. from a.zip, b.cleanrl_model$"),
        ("train_eval_metrics.zip x.txt", "dqn_atari", "or dqn_atari.zip$"),
    ],
)
def test_the_model_of_a_directory(files: str, exp_name: str, found: str, tmp_path: Path) -> None:
    """The default name need not exist; of several models one is named. A pipe is not a model."""
    os.mkfifo(tmp_path / "dqn_atari_jax.zip")
    for name in files.split():
        (tmp_path / name).touch()
    if found in files:
        assert choose_model(tmp_path, exp_name) == found
    else:
        with pytest.raises(UserError, match=found):
            choose_model(tmp_path, exp_name)
