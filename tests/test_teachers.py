"""Model files: both encodings in both scripts, conversion between them, and files damaged, foreign or hostile."""

import io
import os
import pickle
import struct
import sys
from pathlib import Path

import dqn_atari
import dqn_atari_jax
import flax
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from flax.traverse_util import flatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_utils.checks import UserError
from cleanrl_utils.convert import (
    convert,
    flax_to_torch,
    is_torch_file,
    model_errors,
    read_flax,
    read_torch,
    torch_to_flax,
    write_flax,
)

ROOT = Path(__file__).parent.parent
TEACHERS = ROOT / "teachers"
SCRIPTS = (qdagger, qdagger_jax)
WIDTHS = {"nature": ((32, 64, 64), 512), "impala": ((16, 32, 32), 256)}


def shapes(architecture, channels, hidden, num_actions):
    """Keys and shapes of a state dict as published models have them, in order."""
    layers = {}
    if architecture == "nature":
        for i, (inputs, outputs, size) in enumerate(zip((4, *channels), channels, (8, 4, 3), strict=False)):
            layers[f"network.{2 * i}"] = (outputs, inputs, size, size)
        layers |= {"network.7": (hidden, channels[-1] * 7 * 7), "network.9": (num_actions, hidden)}
    else:
        for i, (inputs, outputs) in enumerate(zip((4, *channels), channels, strict=False)):
            layers[f"network.{i}.conv"] = (outputs, inputs, 3, 3)
            for name in ("res_block0.conv0", "res_block0.conv1", "res_block1.conv0", "res_block1.conv1"):
                layers[f"network.{i}.{name}"] = (outputs, outputs, 3, 3)
        layers |= {"network.5": (hidden, channels[-1] * 11 * 11), "network.7": (num_actions, hidden)}
    return {
        key: value
        for name, shape in layers.items()
        for key, value in ((f"{name}.weight", shape), (f"{name}.bias", shape[:1]))
    }


def random_weights(architecture, num_actions=6, seed=0, widths=None):
    """float32 arrays in the torch layout, scaled so that activations neither vanish nor explode."""
    rng = np.random.default_rng(seed)
    return {
        key: rng.normal(0, np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1, shape).astype(np.float32)
        for key, shape in shapes(architecture, *(widths or WIDTHS[architecture]), num_actions).items()
    }


def torch_bytes(state, **options):
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def torch_state(weights):
    return {key: torch.from_numpy(value.copy()) for key, value in weights.items()}


def flax_bytes(params, tmp_path):
    write_flax(tmp_path / "flax", params)
    return (tmp_path / "flax").read_bytes()


def read(path):
    """The weights of a file, in the torch layout."""
    with model_errors(path):
        return read_torch(path) if is_torch_file(path) else flax_to_torch(read_flax(path))


def player(script, path, bf16=False):
    """The Q-function of a file with 6 actions, as the script computes it."""
    if script is qdagger_jax:
        network, params = script.load_model(path, 6, jnp.bfloat16 if bf16 else jnp.float32)
        return lambda frames: np.asarray(jax.jit(network.apply)(params, frames))
    network = script.load_model(path, 6)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    return torch.inference_mode()(autocast(lambda frames: network(torch.from_numpy(frames)).numpy()))


# ==================== an oracle: both networks in both layouts, in NumPy ====================


def relu(x):
    return np.maximum(x, 0)


class Chw:
    """Arrays of one image as torch has them: (channels, rows, columns), keys network.*."""

    def __init__(self, weights):
        self.weights = weights

    def image(self, frames):
        return frames

    def conv(self, x, key, stride=1, pad=0):
        weight = self.weights[f"{key}.weight"]
        x = np.pad(x, ((0, 0), (pad, pad), (pad, pad)))
        windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], (1, 2))[:, ::stride, ::stride]
        out = np.tensordot(weight, windows, ((1, 2, 3), (0, 3, 4)))
        return out + self.weights[f"{key}.bias"][:, None, None]

    def pool(self, x):
        x = np.pad(x, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        return np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))[:, ::2, ::2].max((-1, -2))

    def dense(self, x, key):
        return self.weights[f"{key}.weight"] @ x + self.weights[f"{key}.bias"]

    def nature(self, frames):
        x = self.image(frames)
        for key, stride in (("network.0", 4), ("network.2", 2), ("network.4", 1)):
            x = relu(self.conv(x, key, stride))
        return self.dense(relu(self.dense(x.ravel(), "network.7")), "network.9")

    def impala(self, frames):
        x = self.image(frames)
        for i in range(3):
            x = self.pool(self.conv(x, f"network.{i}.conv", pad=1))
            for block in (f"network.{i}.res_block0", f"network.{i}.res_block1"):
                x = x + self.conv(relu(self.conv(relu(x), f"{block}.conv0", pad=1)), f"{block}.conv1", pad=1)
        return self.dense(relu(self.dense(relu(x.ravel()), "network.5")), "network.7")


class Hwc:
    """Arrays of one image as flax has them: (rows, columns, channels), keys params/*."""

    def __init__(self, params):
        self.params = params

    def image(self, frames):
        return frames.transpose(1, 2, 0)

    def conv(self, x, key, stride=1, pad=0):
        kernel = self.params[f"params/{key}/kernel"]
        x = np.pad(x, ((pad, pad), (pad, pad), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], (0, 1))[::stride, ::stride]
        return np.tensordot(windows, kernel, ((2, 3, 4), (2, 0, 1))) + self.params[f"params/{key}/bias"]

    def pool(self, x):
        x = np.pad(x, ((1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
        return np.lib.stride_tricks.sliding_window_view(x, (3, 3), (0, 1))[::2, ::2].max((-1, -2))

    def dense(self, x, key):
        return x @ self.params[f"params/{key}/kernel"] + self.params[f"params/{key}/bias"]

    def nature(self, frames):
        x = self.image(frames)
        for key, stride in (("Conv_0", 4), ("Conv_1", 2), ("Conv_2", 1)):
            x = relu(self.conv(x, key, stride))
        return self.dense(relu(self.dense(x.ravel(), "Dense_0")), "Dense_1")

    def impala(self, frames):
        x = self.image(frames)
        for i in range(3):
            x = self.pool(self.conv(x, f"ConvSequence_{i}/Conv_0", pad=1))
            for block in (f"ConvSequence_{i}/ResidualBlock_0", f"ConvSequence_{i}/ResidualBlock_1"):
                x = x + self.conv(relu(self.conv(relu(x), f"{block}/Conv_0", pad=1)), f"{block}/Conv_1", pad=1)
        return self.dense(relu(self.dense(relu(x.ravel()), "Dense_0")), "Dense_1")


# ==================== networks and conversion ====================

architectures = st.sampled_from(list(WIDTHS))
widths = st.tuples(st.tuples(*[st.integers(1, 6)] * 3), st.integers(1, 6))


@given(architectures, widths, st.integers(1, 18), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_both_layouts_compute_the_same_q_values(architecture, widths, num_actions, seed):
    """Of networks of any width; and the way back changes nothing, nor the order."""
    weights = random_weights(architecture, num_actions, seed, widths)
    params = torch_to_flax(weights)
    frames = np.random.default_rng(seed).random((4, 84, 84), np.float32)
    expected = getattr(Chw(weights), architecture)(frames)
    np.testing.assert_allclose(getattr(Hwc(params), architecture)(frames), expected, atol=1e-4)
    back = flax_to_torch(params)
    assert list(back) == list(weights)
    for key, value in weights.items():
        np.testing.assert_array_equal(back[key], value)
        assert back[key].flags.c_contiguous


@pytest.mark.parametrize("architecture", WIDTHS)
def test_networks_have_the_published_layers(architecture):
    """In all four scripts: names and shapes of what is on the hub."""
    name = {"nature": "TeacherNetwork", "impala": "QNetwork"}[architecture]
    weights = random_weights(architecture)
    params = {key: value.shape for key, value in torch_to_flax(weights).items()}
    torch_networks, jax_networks = [getattr(qdagger, name)(6)], [getattr(qdagger_jax, name)(6)]
    if architecture == "nature":
        torch_networks.append(dqn_atari.QNetwork(6))
        jax_networks.append(dqn_atari_jax.QNetwork(6))
    for network in torch_networks:
        assert [(key, tuple(value.shape)) for key, value in network.state_dict().items()] == [
            (key, value.shape) for key, value in weights.items()
        ]
    for network in jax_networks:
        variables = flatten_dict(qdagger_jax.shapes_of(network), sep="/")
        assert {key: value.shape for key, value in variables.items()} == params


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("architecture", WIDTHS)
def test_oracle_and_loaded_model_agree(script, architecture, tmp_path):
    """Exactly in float32. In bfloat16 hidden layers are rounded to 8 bits, Q-values are not."""
    weights = random_weights(architecture)
    write_flax(tmp_path / "model", torch_to_flax(weights))
    frames = np.random.default_rng(1).integers(0, 256, (3, 4, 84, 84), np.uint8)
    expected = np.stack([getattr(Chw(weights), architecture)(stack.astype(np.float32) / 255) for stack in frames])
    assert np.ptp(expected) > 0.05  # it would be no test if all Q-values were alike
    np.testing.assert_allclose(player(script, tmp_path / "model")(frames), expected, atol=1e-4)
    q_values = player(script, tmp_path / "model", bf16=True)(frames)
    assert q_values.dtype == np.float32
    assert np.abs(q_values - expected).max() > 1e-4, "computed in float32"
    assert (q_values.view(np.uint32) & 0xFFFF).any(), "the last layer is rounded to bfloat16"
    np.testing.assert_allclose(q_values, expected, rtol=0, atol=0.02 * np.abs(expected).max())


FOREIGN_LAYERS = {
    "another name": {"foo.weight": np.zeros((3, 3)), "foo.bias": np.zeros(3)},
    "no bias": {"network.0.weight": np.zeros((3, 3))},
    "a scale": {"network.0.weight": np.zeros((3, 3)), "network.0.bias": np.zeros(3), "network.0.scale": np.zeros(3)},
    "three dimensions": {"network.0.weight": np.zeros((3, 3, 3)), "network.0.bias": np.zeros(3)},
    "an odd image": {
        **{"network.0.weight": np.zeros((2, 4, 8, 8)), "network.0.bias": np.zeros(2)},
        **{"network.3.weight": np.zeros((5, 7)), "network.3.bias": np.zeros(5)},
    },
}


@pytest.mark.parametrize("case", FOREIGN_LAYERS)
def test_conversion_rejects_foreign_layers(case):
    message = "a dense layer of 7 inputs can't follow" if case == "an odd image" else "is no layer of a network"
    weights = FOREIGN_LAYERS[case]
    with pytest.raises(ValueError, match=message):
        torch_to_flax(weights)
    names = {"network.0": "params/Conv_0", "network.3": "params/Dense_0", "weight": "kernel"}
    params = {}
    for key, value in weights.items():
        layer, _, name = key.rpartition(".")
        params[f"{names.get(layer, layer)}/{names.get(name, name)}"] = value.transpose()
    with pytest.raises(ValueError, match=message):
        flax_to_torch(params)


# ==================== reading and writing ====================


def encodings(weights, tmp_path):
    """The same weights in every encoding that is read."""
    params = msgpack.unpackb(flax_bytes(torch_to_flax(weights), tmp_path))
    args = {"env_id": "PongNoFrameskip-v4", "seed": 1, "learning_rate": 1e-4, "track": False, "wandb_entity": None}
    return {
        "torch": torch_bytes(torch_state(weights)),
        "torch, before 1.6": torch_bytes(torch_state(weights), _use_new_zipfile_serialization=False),
        "flax": msgpack.packb(params),
        "flax, [args, params]": msgpack.packb({"0": args, "1": params}),
    }


@pytest.mark.parametrize("architecture", WIDTHS)
def test_every_encoding_is_read(architecture, tmp_path):
    """By both scripts, as the network that it is."""
    weights = random_weights(architecture)
    params, path = torch_to_flax(weights), tmp_path / "any name"
    for name, data in encodings(weights, tmp_path).items():
        path.write_bytes(data)
        network = qdagger.load_model(path, 6)
        assert type(network) is (qdagger.TeacherNetwork if architecture == "nature" else qdagger.QNetwork)
        for key, value in network.state_dict().items():
            assert value.dtype == torch.float32
            np.testing.assert_array_equal(value, weights[key], err_msg=f"{name} {key}")
        network, variables = qdagger_jax.load_model(path, 6)
        assert type(network) is (qdagger_jax.TeacherNetwork if architecture == "nature" else qdagger_jax.QNetwork)
        for key, value in flatten_dict(variables, sep="/").items():
            assert value.dtype == jnp.float32
            np.testing.assert_array_equal(value, params[key], err_msg=f"{name} {key}")


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_become_float32(dtype, tmp_path):
    weights = {key: value.astype(dtype) for key, value in random_weights("nature").items()}
    for data in (torch_bytes(torch_state(weights)), flax_bytes(torch_to_flax(weights), tmp_path)):
        (tmp_path / "model").write_bytes(data)
        for key, value in read(tmp_path / "model").items():
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value, weights[key].astype(np.float32))
        assert {value.dtype for value in qdagger.load_model(tmp_path / "model", 6).parameters()} == {torch.float32}


def test_flax_reads_what_is_written(tmp_path):
    params = torch_to_flax(random_weights("impala"))
    restored = flax.serialization.msgpack_restore(flax_bytes(params, tmp_path))
    flat = flatten_dict(restored, sep="/")
    assert flat.keys() == params.keys()
    (tmp_path / "flax's").write_bytes(flax.serialization.msgpack_serialize(restored))
    ours = read_flax(tmp_path / "flax's")
    assert ours.keys() == params.keys()
    for key, value in params.items():
        np.testing.assert_array_equal(flat[key], value)
        np.testing.assert_array_equal(ours[key], value)
        assert ours[key].flags.writeable


@pytest.mark.parametrize(("script", "name"), [(qdagger, "dqn_atari"), (qdagger_jax, "dqn_atari_jax")])
def test_embedded_teacher_is_readable(script, name):
    directory = TEACHERS / f"PongNoFrameskip-v4-{name}-seed1"
    loaded = script.load_teacher(str(directory), name, 6, *([jnp.float32] if script is qdagger_jax else []))
    network = loaded[0] if script is qdagger_jax else loaded
    assert type(network) is script.TeacherNetwork


# ==================== files that can't be used ====================


class Hostile:
    """Makes a directory when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def check_unusable(tmp_path, data, *messages):
    """Both scripts refuse the file in one line that has its path; PyTorch's with the first message, JAX's the last."""
    path = tmp_path / "dqn_atari.cleanrl_model"
    path.write_bytes(data)
    for script, message in zip(SCRIPTS, (messages[0], messages[-1]), strict=True):
        with pytest.raises(UserError) as caught:
            script.load_model(path, 6)
        assert str(caught.value).startswith(f"{path} is no usable model: ")
        assert message in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        assert "weights_only" not in str(caught.value)


def without(weights, key):
    return {name: value for name, value in weights.items() if name != key}


WEIGHTS = random_weights("nature")
BIAS = WEIGHTS["network.9.bias"]
FLAX_BIAS = "params/Dense_1/bias"
NO_LAYER = "is no layer of a network of this project"
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(13)

# What a state dict holds instead of a teacher, and what each script says to it: JAX's speaks of flax's layers.
TORCH_STATES = {
    "a missing key": (without(WEIGHTS, "network.7.bias"), "it lacks 'network.7.bias' of TeacherNetwork", NO_LAYER),
    "a key too many": (WEIGHTS | {"evil\nline": BIAS}, r"it has 'evil\nline', which TeacherNetwork has not", NO_LAYER),
    "other keys": ({"actor.weight": BIAS}, "and 7 more of TeacherNetwork; it has 'actor.weight'", NO_LAYER),
    "no keys": ({}, "it lacks 'network.0.weight', ", "it lacks 'params/Conv_0/bias', "),
    "one channel": (
        WEIGHTS | {"network.0.weight": WEIGHTS["network.0.weight"][:, :1]},
        "network.0.weight has shape (32, 1, 8, 8) where TeacherNetwork has (32, 4, 8, 8)",
        "params/Conv_0/kernel has shape (8, 8, 1, 32) where TeacherNetwork has (8, 8, 4, 32)",
    ),
    "one bias too few": (
        WEIGHTS | {"network.9.bias": BIAS[:5]},
        "network.9.bias has shape (5,) where TeacherNetwork has (6,)",
        "params/Dense_1/bias has shape (5,) where TeacherNetwork has (6,)",
    ),
    "a bias of no dimension": (
        WEIGHTS | {"network.9.bias": np.array(BIAS[0])},
        "network.9.bias has shape () where TeacherNetwork has (6,)",
        "params/Dense_1/bias has shape () where TeacherNetwork has (6,)",
    ),
    "another game": (
        random_weights("nature", num_actions=4),
        "it has 4 actions and the game has 6, so it is a model of another game",
    ),
    "another game's student": (
        random_weights("impala", num_actions=18),
        "it has 18 actions and the game has 6, so it is a model of another game",
    ),
    "a wider student": (
        random_weights("impala", widths=((16, 32, 32), 512)),
        "network.5.weight has shape (512, 3872) where QNetwork has (256, 3872)",
        "params/Dense_0/bias has shape (512,) where QNetwork has (256,)",
    ),
    "no actions": (random_weights("nature", num_actions=0), "it has 0 actions and the game has 6"),
    "integers": (WEIGHTS | {"network.9.bias": np.zeros(6, np.int32)}, "'network.9.bias' is torch.int32, not floating"),
    "NaN": (WEIGHTS | {"network.9.bias": BIAS * np.nan}, "'network.9.bias' holds NaN"),
    "too large": (WEIGHTS | {"network.9.bias": np.full(6, 1e300)}, "'network.9.bias' holds NaN or infinite values"),
    "a number": (WEIGHTS | {"network.9.bias": 3}, "'network.9.bias' is int, not floating-point numbers"),
    "a list": ([1, 2], "it lacks 'network.0.weight', ", "it holds a list, not a state dict"),
    "an optimizer too": (
        {"model": {}, "optimizer": {}},
        "it has 'model', 'optimizer'",
        "'model' is dict, not floating",
    ),
    "a sparse tensor": (WEIGHTS | {"network.9.bias": torch.from_numpy(BIAS).to_sparse()}, "Sparse layout"),
}


@pytest.mark.parametrize("case", TORCH_STATES)
def test_torch_file_that_is_no_network(case, tmp_path):
    state, *messages = TORCH_STATES[case]
    if isinstance(state, dict):
        state = {key: torch.tensor(x) if isinstance(x, np.ndarray) else x for key, x in state.items()}
    check_unusable(tmp_path, torch_bytes(state), *messages)


PARAMS = torch_to_flax(WEIGHTS)
FLAX_PARAMS = {
    "a missing key": (without(PARAMS, FLAX_BIAS), NO_LAYER, f"it lacks '{FLAX_BIAS}' of TeacherNetwork"),
    "integers": (PARAMS | {FLAX_BIAS: np.zeros(6, np.int8)}, f"'{FLAX_BIAS}' is int8, not floating-point numbers"),
    "infinity": (PARAMS | {FLAX_BIAS: BIAS + np.inf}, f"'{FLAX_BIAS}' holds NaN or infinite values"),
    "another game": (torch_to_flax(random_weights("nature", num_actions=18)), "it has 18 actions and the game has 6"),
    "one input too few": (
        PARAMS | {"params/Dense_0/kernel": PARAMS["params/Dense_0/kernel"][:-1]},
        "a dense layer of 3135 inputs can't follow a convolution of 64 channels",
        "params/Dense_0/kernel has shape (3135, 512) where TeacherNetwork has (3136, 512)",
    ),
}


@pytest.mark.parametrize("case", FLAX_PARAMS)
def test_flax_file_that_is_no_network(case, tmp_path):
    params, *messages = FLAX_PARAMS[case]
    check_unusable(tmp_path, flax_bytes(params, tmp_path), *messages)


def ext_array(shape, dtype, data):
    return msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))


NEITHER = "it is neither a PyTorch nor a flax model, or a damaged one; give"
FOREIGN = {
    "empty": (b"", "the file is empty"),
    "an image": (PNG, NEITHER),
    "text": (b"<!DOCTYPE html>\n<p>Not found</p>\n", NEITHER),
    "a pointer of git LFS": (b"version https://git-lfs.github.com/spec/v1\n", NEITHER),
    "a pickle": (pickle.dumps({"network.0.weight": 1}), NEITHER),
    "a zip archive": (b"PK\x03\x04" + bytes(50), "PytorchStreamReader failed"),
    "msgpack of a list": (msgpack.packb([1, 2]), NEITHER),
    "msgpack without arrays": (msgpack.packb({"params": {"a": 1}}), "'params/a' is int, not an array"),
    "another kind of msgpack": (msgpack.packb({"a": msgpack.ExtType(3, b"")}), "'a' is ExtType, not an array"),
    "deep msgpack": (b"\x81\xa1a" * 100_000, NEITHER),
    "an array of another size": (msgpack.packb({"a": ext_array((3,), "float32", b"1234")}), "'a' is damaged"),
    "an array of no dtype": (msgpack.packb({"a": ext_array((1,), "elephant", b"1234")}), "'a' is damaged"),
    "an array of objects": (msgpack.packb({"a": ext_array((1,), "O", b"12345678")}), "'a' is damaged"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_file(case, tmp_path):
    check_unusable(tmp_path, *FOREIGN[case])


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.0001])
def test_truncated_file(kept, tmp_path):
    for data in encodings(WEIGHTS, tmp_path).values():
        check_unusable(tmp_path, data[: int(kept * len(data))], "")


def test_zip_archive_with_a_gap(tmp_path):
    """Its index lies elsewhere than it says: PyTorch seeks to before the file's start, which is an OSError."""
    data = torch_bytes(torch_state(random_weights("nature", widths=((1, 2, 1), 1))))
    check_unusable(tmp_path, data[:-29] + data[-21:], "Invalid argument")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_torch_file_does_not_run(zipped, tmp_path):
    marker = tmp_path / "code was run"
    data = torch_bytes({"network.0.weight": Hostile(marker)}, _use_new_zipfile_serialization=zipped)
    check_unusable(tmp_path, data, "mkdir, which might run code, and was not loaded")
    assert not marker.exists()
    torch.load(io.BytesIO(data), weights_only=False)
    assert marker.exists(), "it would run nothing"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_pickle_does_not_run(protocol, tmp_path):
    marker = tmp_path / "code was run"
    check_unusable(tmp_path, pickle.dumps(Hostile(marker), protocol), "")
    assert not marker.exists()


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    """A network so small that most of its files is structure, in every encoding; and a folder."""
    folder = tmp_path_factory.mktemp("small")
    return [*encodings(random_weights("nature", widths=((1, 2, 1), 1)), folder).values()], folder


def attempt(function, *args):
    """What a function of this file returns, or None where it says in one line why it can't."""
    try:
        return function(*args)
    except UserError as error:
        message = str(error)
    assert message.startswith(f"{args[0]} is no usable model: ")
    assert len(message.splitlines()) == 1
    return None


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@given(st.data())
@settings(max_examples=200)
def test_damaged_files(small_files, data):
    """Whatever becomes of their bytes: what is read is finite float32, and all else is one line; so is converting."""
    files, folder = small_files
    content = bytearray(data.draw(st.sampled_from(files)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    path, target = folder / "damaged", folder / "converted"
    path.write_bytes(content)
    target.unlink(missing_ok=True)
    assert bool(attempt(convert, path, target)) == target.exists()
    for arrays in (attempt(read, path), attempt(read, target) if target.exists() else None):
        if arrays is not None:
            assert all(array.dtype == np.float32 and np.isfinite(array).all() for array in arrays.values())
    check_unusable(folder, bytes(content), "")


leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary()
arrays = st.builds(
    ext_array,
    st.lists(st.integers(-1, 3), max_size=4),
    st.sampled_from(["float32", "float16", "<f8", "int8", "O", "V4", "float32,float32", "S3", "datetime64[D]"])
    | leaves,
    st.binary(max_size=16),
)
names = st.sampled_from(["params", "Conv_0", "Dense_0", "ConvSequence_0", "kernel", "bias", "0", "1"]) | st.text()
trees = st.recursive(
    leaves | arrays, lambda tree: st.dictionaries(names, tree, max_size=4) | st.lists(tree), max_leaves=9
)


@given(st.dictionaries(names, trees, max_size=4))
@settings(max_examples=150)
def test_any_msgpack(small_files, tree):
    check_unusable(small_files[1], msgpack.packb(tree), "")


def test_convert_refuses(tmp_path):
    """What holds nothing, what exists and what can't be written; files are read by what the tests above read with."""
    model, exists = tmp_path / "model", tmp_path / "exists"
    exists.write_text("hello")
    model.write_bytes(torch_bytes(torch_state(WEIGHTS)))
    for target, message in ((exists, f"{exists} exists"), (exists / "new", f"{exists / 'new'} can't be written")):
        with pytest.raises(UserError, match=message):
            convert(model, target)
    assert exists.read_text() == "hello"
    for data in (torch_bytes({}), msgpack.packb({}), msgpack.packb({"params": {}})):
        model.write_bytes(data)
        with pytest.raises(UserError, match="it holds no arrays"):
            convert(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("path", [Path("no such file"), ROOT])
def test_unreadable_path(script, path):
    with pytest.raises(UserError, match=rf"{path} can't be read \(.*\); give another file"):
        script.load_model(path, 6)


def test_torch_file_without_torch(tmp_path, monkeypatch):
    (tmp_path / "model").write_bytes(torch_bytes(torch_state(WEIGHTS)))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"cleanrl_utils\.convert.*, or give a model of a JAX .*: pip install torch"):
        qdagger_jax.load_model(tmp_path / "model", 6)


# ==================== directories ====================


def load_teacher(script, repo):
    """``dqn_atari.cleanrl_model`` in the directory or hub repository ``repo``."""
    dtype = [jnp.float32] if script is qdagger_jax else []
    return script.load_teacher(repo, "dqn_atari", 6, *dtype)


@pytest.fixture
def no_hub(monkeypatch):
    """Fails a test that asks the hub."""
    for script in SCRIPTS:
        monkeypatch.setattr(script, "hf_hub_download", lambda *_: pytest.fail("the hub was asked"))


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_directory_wins(script, tmp_path, monkeypatch):
    directory = tmp_path / "cleanrl" / "Pong"
    directory.mkdir(parents=True)
    (directory / "dqn_atari.cleanrl_model").write_bytes(torch_bytes(torch_state(WEIGHTS)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for repo in (str(directory), "cleanrl/Pong", "~/cleanrl/Pong"):
        assert load_teacher(script, repo)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_repository_is_downloaded(script, tmp_path, monkeypatch):
    """The test of the hub knows what comes of errors."""
    (tmp_path / "cached").write_bytes(torch_bytes(torch_state(WEIGHTS)))
    asked = []
    monkeypatch.setattr(script, "hf_hub_download", lambda *args: asked.append(args) or str(tmp_path / "cached"))
    assert load_teacher(script, "someone/teacher")
    assert asked == [("someone/teacher", "dqn_atari.cleanrl_model")]
    monkeypatch.setattr(script, "hf_hub_download", lambda *_: 1 / 0)
    with pytest.raises(UserError, match=r"there is no directory someone/teacher, and .* \(division by zero\)"):
        load_teacher(script, "someone/teacher")


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("script", SCRIPTS)
def test_directory_with_other_models(script, tmp_path):
    for name in ("b.cleanrl_model", "a.cleanrl_model", "events.out.tfevents.1"):
        (tmp_path / name).touch()
    with pytest.raises(UserError) as caught:
        load_teacher(script, str(tmp_path))
    assert str(caught.value) == (
        f"the directory {tmp_path} has no dqn_atari.cleanrl_model; it has a.cleanrl_model, b.cleanrl_model: "
        "give --teacher-model-exp-name a or b"
    )


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("script", SCRIPTS)
def test_directory_without_models(script, tmp_path):
    with pytest.raises(UserError, match=r"nor any other \.cleanrl_model file; .*python cleanrl/dqn_atari\.py"):
        load_teacher(script, str(tmp_path))


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("script", SCRIPTS)
def test_file_instead_of_directory(script, tmp_path):
    path = tmp_path / "other.cleanrl_model"
    path.touch()
    with pytest.raises(UserError, match=f"give its directory, {tmp_path}, and --teacher-model-exp-name other$"):
        load_teacher(script, str(path))
