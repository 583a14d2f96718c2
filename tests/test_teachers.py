"""Model files: both encodings, conversion between the layouts, and files that are damaged, foreign or hostile."""

import io
import os
import pickle
import struct
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest

from cleanrl_utils import teachers
from cleanrl_utils.errors import UserError
from cleanrl_utils.teachers import (
    LAYERS,
    architecture_of,
    find_teacher,
    flax_to_torch,
    num_actions_of,
    read_flax,
    read_weights,
    torch_to_flax,
    write_flax,
)

ROOT = Path(__file__).parent.parent
EMBEDDED = ROOT / "teachers" / "PongNoFrameskip-v4-dqn_atari-seed1" / "dqn_atari.cleanrl_model"
ARCHITECTURES = ("nature", "impala")


def random_weights(architecture, num_actions=6, seed=0):
    """float32 arrays in the torch layout, scaled so that activations neither vanish nor explode."""
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in LAYERS[architecture]:
        for key, shape in layer.shapes("torch", num_actions).items():
            scale = np.sqrt(1 / np.prod(shape[1:])) if len(shape) > 1 else 0.1
            weights[key] = rng.normal(0, scale, shape).astype(np.float32)
    return weights


def torch_bytes(state, **options):
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def torch_state(weights):
    torch = pytest.importorskip("torch")
    return {key: torch.from_numpy(value.copy()) for key, value in weights.items()}


def flax_bytes(params, tmp_path):
    write_flax(tmp_path / "flax", params)
    return (tmp_path / "flax").read_bytes()


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


# ==================== conversion ====================


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_layouts_compute_the_same_q_values(architecture):
    weights = random_weights(architecture)
    frames = np.random.default_rng(1).random((4, 84, 84), np.float32)
    expected = getattr(Chw(weights), architecture)(frames)
    assert np.ptp(expected) > 0.05  # it would be no test if all Q-values were alike
    np.testing.assert_allclose(getattr(Hwc(torch_to_flax(weights)), architecture)(frames), expected, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_conversion_there_and_back_changes_nothing(architecture):
    weights = random_weights(architecture)
    back = flax_to_torch(torch_to_flax(weights))
    assert list(back) == list(weights)
    for key, value in weights.items():
        np.testing.assert_array_equal(back[key], value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_oracle_and_torch_agree(architecture):
    torch = pytest.importorskip("torch")
    from cleanrl.dqn_atari import QNetwork as Nature
    from cleanrl.qdagger_dqn_atari_impalacnn import QNetwork as Impala

    network = {"nature": Nature, "impala": Impala}[architecture](6)
    weights = random_weights(architecture)
    assert list(network.state_dict()) == list(weights)
    network.load_state_dict(torch_state(weights))
    frames = np.random.default_rng(1).integers(0, 256, (4, 84, 84), np.uint8)
    with torch.inference_mode():
        actual = network(torch.from_numpy(frames)[None])[0].numpy()
    expected = getattr(Chw(weights), architecture)(frames.astype(np.float32) / 255)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def torch_teacher(path, bf16):
    torch = pytest.importorskip("torch")
    from cleanrl.qdagger_dqn_atari_impalacnn import load_teacher

    network = load_teacher(path, 6, "PongNoFrameskip-v4", bf16)
    return torch.inference_mode()(lambda frames: network(torch.from_numpy(frames)).numpy())


def jax_teacher(path, bf16):
    jax = pytest.importorskip("jax")
    from cleanrl import qdagger_dqn_atari_jax_impalacnn as qdagger_jax

    with pytest.MonkeyPatch.context() as patch:
        if bf16:  # also where the script would not
            patch.setattr(qdagger_jax, "fast_dtype", lambda *args, **kwargs: jax.numpy.bfloat16)
        network, params = qdagger_jax.load_teacher(path, 6, "PongNoFrameskip-v4")
    return lambda frames: np.asarray(jax.jit(network.apply)(params, frames))


@pytest.mark.parametrize("teacher", [torch_teacher, jax_teacher])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_oracle_and_loaded_teacher_agree(teacher, architecture, tmp_path):
    """Exactly in float32. In bfloat16 hidden layers are rounded to 8 bits, Q-values are not."""
    weights = random_weights(architecture)
    write_flax(tmp_path / "teacher", torch_to_flax(weights))
    frames = np.random.default_rng(1).integers(0, 256, (3, 4, 84, 84), np.uint8)
    expected = np.stack([getattr(Chw(weights), architecture)(stack.astype(np.float32) / 255) for stack in frames])
    np.testing.assert_allclose(teacher(tmp_path / "teacher", False)(frames), expected, atol=1e-4)
    q_values = teacher(tmp_path / "teacher", True)(frames)
    assert q_values.dtype == np.float32
    assert np.abs(q_values - expected).max() > 1e-4, "computed in float32"
    assert (q_values.view(np.uint32) & 0xFFFF).any(), "the last layer is rounded to bfloat16"
    np.testing.assert_allclose(q_values, expected, rtol=0, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_actions", [3, 18])
def test_architecture_and_actions(architecture, num_actions):
    weights = random_weights(architecture, num_actions)
    assert architecture_of(weights) == architecture
    assert num_actions_of(weights) == num_actions


@pytest.mark.parametrize("convert", [flax_to_torch, torch_to_flax, architecture_of, num_actions_of])
def test_conversion_rejects_foreign_keys(convert):
    with pytest.raises(ValueError, match=r"it lacks .* of the nature network's; it has 'foo'"):
        convert({"foo": np.zeros(3)})


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_encoding_is_read(architecture, tmp_path):
    weights = random_weights(architecture, num_actions=4)
    for name, data in encodings(weights, tmp_path).items():
        path = tmp_path / "any name"
        path.write_bytes(data)
        actual = read_weights(path)
        assert list(actual) == list(weights), name
        for key, value in actual.items():
            assert value.dtype == np.float32
            assert value.flags.c_contiguous
            assert value.flags.writeable
            np.testing.assert_array_equal(value, weights[key], err_msg=f"{name} {key}")


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_become_float32(dtype, tmp_path):
    weights = {key: value.astype(dtype) for key, value in random_weights("nature").items()}
    for data in (torch_bytes(torch_state(weights)), flax_bytes(torch_to_flax(weights), tmp_path)):
        (tmp_path / "model").write_bytes(data)
        for key, value in read_weights(tmp_path / "model").items():
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value, weights[key].astype(np.float32))


def test_flax_files_have_flaxs_structure(tmp_path):
    params = torch_to_flax(random_weights("impala"))
    tree = msgpack.unpackb(flax_bytes(params, tmp_path))
    assert list(tree) == ["params"]
    array = tree["params"]["ConvSequence_1"]["ResidualBlock_0"]["Conv_1"]["kernel"]
    assert array.code == 1
    shape, dtype, data = msgpack.unpackb(array.data)
    expected = params["params/ConvSequence_1/ResidualBlock_0/Conv_1/kernel"]
    assert (tuple(shape), dtype, data) == ((3, 3, 32, 32), "float32", expected.tobytes())


def test_flax_reads_what_is_written(tmp_path):
    serialization = pytest.importorskip("flax").serialization
    params = torch_to_flax(random_weights("nature"))
    restored = serialization.msgpack_restore(flax_bytes(params, tmp_path))
    np.testing.assert_array_equal(restored["params"]["Dense_0"]["kernel"], params["params/Dense_0/kernel"])
    ours = read_flax(serialization.msgpack_serialize(restored))
    assert ours.keys() == params.keys()
    for key, value in params.items():
        np.testing.assert_array_equal(ours[key], value)


def test_embedded_teacher_is_readable():
    if not EMBEDDED.is_file():
        pytest.skip("the repository holds no teacher yet")
    weights = read_weights(find_teacher(str(EMBEDDED.parent), "dqn_atari"))
    assert architecture_of(weights) == "nature"
    assert num_actions_of(weights) == 6


# ==================== files that can't be used ====================


class Hostile:
    """Makes a directory when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def changed(weights, key, value):
    return weights | {key: value}


def without(weights, key):
    return {name: value for name, value in weights.items() if name != key}


def ext_array(shape, dtype, data):
    return msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))


WEIGHTS = random_weights("nature")
BIAS = WEIGHTS["network.9.bias"]
FLAX_BIAS = "params/Dense_1/bias"
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(13)

TORCH_STATES = {
    "a missing key": (lambda: torch_state(without(WEIGHTS, "network.7.bias")), "it lacks 'network.7.bias'"),
    "a key too many": (
        lambda: torch_state(changed(WEIGHTS, "evil\nline", BIAS)),
        r"it has 'evil\\nline', which the nature network has not",
    ),
    "other keys": (lambda: torch_state({"actor.weight": BIAS}), "it lacks .* it has 'actor.weight'"),
    "no keys": (dict, "it lacks"),
    "one channel": (
        lambda: torch_state(changed(WEIGHTS, "network.0.weight", WEIGHTS["network.0.weight"][:, :1])),
        r"network\.0\.weight has shape \(32, 1, 8, 8\) where the nature network has \(32, 4, 8, 8\)",
    ),
    "one bias too few": (
        lambda: torch_state(changed(WEIGHTS, "network.9.bias", BIAS[:5])),
        r"network\.9\.weight has shape \(6, 512\)",
    ),
    "no actions": (
        lambda: torch_state(WEIGHTS | {"network.9.weight": np.zeros((0, 512), np.float32), "network.9.bias": BIAS[:0]}),
        "no actions",
    ),
    "integers": (
        lambda: torch_state(changed(WEIGHTS, "network.9.bias", np.zeros(6, np.int32))),
        "'network.9.bias' is torch.int32, not floating point",
    ),
    "NaN": (lambda: torch_state(changed(WEIGHTS, "network.9.bias", BIAS * np.nan)), "network.9.bias holds NaN"),
    "too large for float32": (
        lambda: torch_state(changed(WEIGHTS, "network.9.bias", np.full(6, 1e300))),
        "network.9.bias holds NaN or infinite",
    ),
    "a number": (lambda: {"global_step": 3}, "'global_step' is int"),
    "a list": (lambda: [1, 2], "holds a list, not a state dict"),
    "a sparse tensor": (
        lambda: {"network.9.bias": pytest.importorskip("torch").from_numpy(BIAS).to_sparse()},
        "not a dense tensor",
    ),
}


@pytest.mark.parametrize("case", TORCH_STATES)
def test_torch_file_that_is_no_network(case, tmp_path):
    state, message = TORCH_STATES[case]
    check_unusable(tmp_path, torch_bytes(state()), message)


FLAX_PARAMS = {
    "a missing key": (lambda params: without(params, FLAX_BIAS), f"it lacks '{FLAX_BIAS}'"),
    "integers": (lambda params: changed(params, FLAX_BIAS, np.zeros(6, np.int8)), "bias' is int8, not one of float16"),
    "infinity": (lambda params: changed(params, FLAX_BIAS, BIAS + np.inf), "network.9.bias holds NaN or infinite"),
    "one row too few": (
        lambda params: changed(params, "params/Dense_0/kernel", params["params/Dense_0/kernel"][:-1]),
        r"params/Dense_0/kernel has shape \(3135, 512\) where the nature network has \(3136, 512\)",
    ),
}


@pytest.mark.parametrize("case", FLAX_PARAMS)
def test_flax_file_that_is_no_network(case, tmp_path):
    change, message = FLAX_PARAMS[case]
    check_unusable(tmp_path, flax_bytes(change(torch_to_flax(WEIGHTS)), tmp_path), message)


NEITHER = "it is neither a PyTorch nor a flax model, or a damaged one; give"
FOREIGN = {
    "empty": (b"", "the file is empty"),
    "an image": (PNG, NEITHER),
    "text": (b"<!DOCTYPE html>\n<p>Not found</p>\n", NEITHER),
    "a pointer of git LFS": (b"version https://git-lfs.github.com/spec/v1\n", NEITHER),
    "a pickle": (pickle.dumps({"network.0.weight": 1}), NEITHER),
    "a zip archive": (b"PK\x03\x04" + bytes(50), "PyTorch finds it damaged"),
    "msgpack of a list": (msgpack.packb([1, 2]), NEITHER),
    "msgpack without arrays": (msgpack.packb({"params": {"a": 1}}), "'params/a' is int, not an array"),
    "deep msgpack": (b"\x81\xa1a" * 100_000, NEITHER),
    "an array of another size": (msgpack.packb({"a": ext_array((3,), "float32", b"1234")}), "'a' is damaged"),
    "an array of no dtype": (msgpack.packb({"a": ext_array((1,), "elephant", b"1234")}), "'a' is damaged"),
    "an array of bfloat16": (msgpack.packb({"a": ext_array((2,), "bfloat16", b"1234")}), "'a'.*bfloat16"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_file(case, tmp_path):
    data, message = FOREIGN[case]
    check_unusable(tmp_path, data, message)


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.0001])
def test_truncated_file(kept, tmp_path):
    for data in encodings(WEIGHTS, tmp_path).values():
        check_unusable(tmp_path, data[: int(kept * len(data))], "damaged")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_torch_file_does_not_run(zipped, tmp_path):
    marker = tmp_path / "code was run"
    data = torch_bytes({"network.0.weight": Hostile(marker)}, _use_new_zipfile_serialization=zipped)
    message = check_unusable(tmp_path, data, r"refers to \S*mkdir, which might run code, and was not loaded")
    assert "weights_only" not in message
    assert not marker.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_pickle_does_not_run(protocol, tmp_path):
    pytest.importorskip("torch")
    marker = tmp_path / "code was run"
    check_unusable(tmp_path, pickle.dumps(Hostile(marker), protocol), "no usable model")
    assert not marker.exists()


def check_unusable(tmp_path, data, message):
    path = tmp_path / "dqn_atari.cleanrl_model"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        read_weights(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("path", [Path("no such file"), ROOT])
def test_unreadable_path(path):
    with pytest.raises(UserError, match=f"{path} can't be read"):
        read_weights(path)


def test_torch_file_without_torch(tmp_path, monkeypatch):
    (tmp_path / "model").write_bytes(torch_bytes(torch_state(WEIGHTS)))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install torch, .* or give a teacher of dqn_atari_jax$"):
        read_weights(tmp_path / "model")


# ==================== directories ====================


@pytest.fixture
def no_hub(monkeypatch):
    """Fails a test that asks the hub."""

    def hf_hub_download(*_):
        pytest.fail("the hub was asked")

    monkeypatch.setattr(teachers, "hf_hub_download", hf_hub_download)


@pytest.mark.usefixtures("no_hub")
def test_a_directory_wins(tmp_path, monkeypatch):
    directory = tmp_path / "cleanrl" / "Pong"
    directory.mkdir(parents=True)
    (directory / "dqn_atari.cleanrl_model").touch()
    assert find_teacher(str(directory), "dqn_atari") == directory / "dqn_atari.cleanrl_model"
    monkeypatch.chdir(tmp_path)
    assert find_teacher("cleanrl/Pong", "dqn_atari") == Path("cleanrl/Pong/dqn_atari.cleanrl_model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_teacher("~/cleanrl/Pong", "dqn_atari") == directory / "dqn_atari.cleanrl_model"


@pytest.mark.usefixtures("no_hub")
def test_directory_with_other_models(tmp_path):
    for name in ("b.cleanrl_model", "a.cleanrl_model", "events.out.tfevents.1"):
        (tmp_path / name).touch()
    with pytest.raises(UserError) as caught:
        find_teacher(str(tmp_path), "dqn_atari")
    assert str(caught.value) == (
        f"the directory {tmp_path} has no dqn_atari.cleanrl_model; it has a.cleanrl_model, b.cleanrl_model: "
        "give --teacher-model-exp-name a or b"
    )


@pytest.mark.usefixtures("no_hub")
def test_directory_without_models(tmp_path):
    with pytest.raises(UserError, match=r"nor any other \.cleanrl_model file; .*python cleanrl/dqn_atari\.py"):
        find_teacher(str(tmp_path), "dqn_atari")


@pytest.mark.usefixtures("no_hub")
def test_file_instead_of_directory(tmp_path):
    path = tmp_path / "other.cleanrl_model"
    path.touch()
    with pytest.raises(UserError, match=f"give its directory, {tmp_path}, and --teacher-model-exp-name other$"):
        find_teacher(str(path), "dqn_atari")
