"""Read, write and convert model files: ``python -m cleanrl_utils.models SOURCE TARGET``.

Every format is read into one form: arrays under the names of CleanRL's PyTorch scripts. The last layer computes
Q-values (``network.9``), the logits of a policy (``actor``), or the logits of C51's return distributions (``network.9``
with ``atoms``). Shapes come from the file, so no network is defined here.
Files are untrusted: reading one runs no code from it and takes at most about 13 times its size in memory.
"""

import functools
import io
import json
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgpack
import numpy as np
import tyro

from cleanrl_utils.errors import UserError, one_line, one_line_errors, require_packages, user_errors
from cleanrl_utils.files import atomic_write

Weights = dict[str, np.ndarray]  # float32 arrays under the names and in the layout of a PyTorch state dict
Params = dict[str, Any]  # arrays in nested dictionaries, as flax has them: params → Conv_0 → kernel
FLAX_ARRAY = 1  # flax's msgpack extension code of an array
ZIP = b"PK\x03\x04"  # the first bytes of a zip archive, as PyTorch's and stable-baselines3's files are
MAX_BYTES = 2**30  # of a file
STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "DoubleStorage": "<f8", "IntStorage": "<i4"}  # PyTorch's
SB3_LAYERS = (  # layers of stable-baselines3 and sb3-contrib, and their names here; None: a layer that does not act
    (r"(?:(?:q|quantile)_net\.|pi_)?features_extractor\.cnn\.([024])", r"network.\1"),
    (r"(?:(?:q|quantile)_net\.|pi_)?features_extractor\.linear\.0", "network.7"),
    (r"q_net\.q_net\.0", "network.9"),
    (r"quantile_net\.quantile_net\.0", "quantiles"),
    (r"action_net", "actor"),
    (r"(?:(?:q|quantile)_net_target|vf_features_extractor)\..*|value_net|critic", None),
)


@contextmanager
def open_model(path: Path, num_actions: int | None = None) -> Iterator[Weights]:
    """Read the weights from a model file of any format, for a ``with`` block.

    ``num_actions`` is the number of actions of the game, if it is known. Raise a UserError if the file is not a model
    for it, or if the block raises, for example because layers do not fit.
    """
    with user_errors(f"{path} is not a usable model", "docs/teachers.md lists the models that can be used"):
        yield read_weights(path, num_actions)


def read_weights(path: Path, num_actions: int | None) -> Weights:
    """Read the weights; a damaged file can raise almost anything."""
    if not path.is_file():
        raise ValueError("there is no such file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"it has {size:,} bytes, more than the {MAX_BYTES:,} that a model may have")
    data = path.read_bytes()
    weights = read_torch(data) if data.startswith(ZIP) else flax_to_torch(read_flax(data))
    weights = {str(key): as_float32(key, value) for key, value in weights.items()}
    heads = [key for key in weights if re.fullmatch(r"(?:network\.\d+|actor)\.bias", key)]
    if not heads:
        raise ValueError(f"it has no weights of a network, only {sorted(weights)[:3]}")
    last = max(heads, key=lambda key: (key == "actor.bias", len(key), key))
    found = weights[last].size // max(1, weights.get("atoms", np.zeros(1)).size)
    if num_actions not in (None, found):
        remedy = "; --full-action-space plays with all 18" if found == 18 else ""
        raise ValueError(f"its layer {last[:-5]} has {found} outputs and the game has {num_actions} actions{remedy}")
    if last == "actor.bias" and "network.0.conv.bias" in weights:
        raise ValueError("it is a policy with an ImpalaCNN; a policy needs the network of Mnih et al. (2015)")
    return weights


def read_torch(data: bytes) -> dict[str, Any]:
    """Read a state dict from a file of PyTorch, from one of CleanRL's C51, or from stable-baselines3's zip."""
    members, space = read_zip(data, limit := 4 * len(data)), {}
    if policy := "data" in members and members.get("policy.pth"):
        settings = json.loads(members["data"]())  # JSON, in which pickles are text
        space, box = settings["action_space"], settings["observation_space"]
        shape, scaled = box.get("_shape", box.get("shape")), settings["policy_kwargs"].get("normalize_images", True)
        if ".Discrete" not in space[":type:"] or shape not in ([4, 84, 84], [84, 84, 4]) or not scaled:
            found = f"{space[':type:']!r:.60}, observations {shape!r:.40}, normalize_images={scaled!r:.5}"
            raise ValueError(f"it has {found}; needed are Discrete actions, four 84×84 frames, normalize_images=True")
        members = read_zip(policy(), limit)
    state_dict = TorchUnpickler(members).load()
    if isinstance(state_dict, dict) and state_dict.keys() == {"model_weights", "args"}:  # C51
        state_dict = state_dict["model_weights"]
    if not isinstance(state_dict, dict):
        raise ValueError(f"it holds a {type(state_dict).__name__}, not a state dict")
    if sum(map(np.size, state_dict.values())) > limit // 4:  # one element or array can stand for many
        raise ValueError("its tensors have more elements than the file has bytes")
    weights = {}
    for key, value in state_dict.items():
        layer, _, part = re.sub(r"^(_orig_mod\.|module\.)*", "", str(key)).rpartition(".")  # of compile, DataParallel
        names = [name and match.expand(name) for pattern, name in SB3_LAYERS if (match := re.fullmatch(pattern, layer))]
        if bool(policy) != bool(names) and names != [None]:
            raise ValueError(f"it has {key!r:.60}; needed is the zip file of a CnnPolicy with default layers")
        name = names[0] if names else layer
        if name == "quantiles":  # output i·A + a is quantile i of action a; their mean is linear, as the layer is
            name, value = "network.9", value.reshape(-1, int(space["n"]), *value.shape[1:]).mean(axis=0)
        if name is not None:
            weights[f"{name}.{part}".lstrip(".")] = value
    return weights


def read_zip(data: bytes, limit: int) -> dict[str, Callable[[], bytes]]:
    """Return functions that read the members of a zip archive; ValueError if they have more than ``limit`` bytes.

    A member is read up to the size that the archive states. Compression methods other than deflate are rejected.
    """
    archive = zipfile.ZipFile(io.BytesIO(data))
    methods, files = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), archive.NameToInfo
    if sum(file.file_size if file.compress_type in methods else math.inf for file in files.values()) > limit:
        raise ValueError("its zip archive unpacks to many times its size")
    read = functools.cache(lambda file: archive.open(file).read(files[file].file_size))
    return {name: functools.partial(read, name) for name in files}


class Memo(dict):
    """Objects that a pickle refers to again, without containers: nested ones would hold 2^n references to one."""

    def __setitem__(self, key: int, value: Any) -> None:
        super().__setitem__(key, None if isinstance(value, (tuple, list, dict, set, frozenset)) else value)


# The base class is pickle's Python version. The C version allocates as much memory as a file states.
class TorchUnpickler(pickle._Unpickler):
    """Read the NumPy arrays of a PyTorch file (``torch.save``), without PyTorch and without running code from it.

    The file is a zip archive of a pickle and the elements of each storage. Tensors are views of them.
    """

    def __init__(self, members: dict[str, Callable[[], bytes]]):
        names = [name for name in members if re.fullmatch(r"[^/]*/data\.pkl", name)]
        if len(names) != 1:
            raise ValueError("it is a zip archive of neither stable-baselines3 nor a state dict of PyTorch")
        super().__init__(io.BytesIO(members[names[0]]()))
        self.memo, self.members, self.folder = Memo(), members, names[0].removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function of this name; only those of a state dict are allowed."""
        known = {"OrderedDict": OrderedDict, "_rebuild_tensor_v2": self.rebuild_tensor, **STORAGES}
        if module not in ("collections", "torch", "torch._utils") or name not in known:
            raise pickle.UnpicklingError(f"it has a {f'{module}.{name}'!r:.60}; save a state_dict() of float32 tensors")
        return known[name]

    def load_build(self) -> None:
        """Ignore the attributes of an object: PyTorch needs none of them."""
        self.stack.pop()

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}
    del dispatch[pickle.DUP[0]], dispatch[pickle.BYTEARRAY8[0]]  # they multiply containers and allocate any size

    def persistent_load(self, storage: tuple) -> tuple[str, str]:
        """Return the dtype and member of a storage, described as ("storage", type, member, device, size)."""
        return storage[1:3]

    def rebuild_tensor(self, storage: tuple, offset: int, shape: tuple, strides: tuple, *_: Any) -> np.ndarray:
        """Return a view of a storage's elements; ValueError if it has elements outside it."""
        dtype, member = storage
        storage = np.frombuffer(self.members[f"{self.folder}data/{member}"](), dtype)
        valid = all(type(number) is int and number >= 0 for number in (offset, *shape, *strides))  # NumPy's overflow
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if valid else math.inf
        if offset + last >= len(storage):
            raise ValueError("a tensor has elements that are not in the file")
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, [storage.itemsize * step for step in strides])


def read_flax(data: bytes) -> Params:
    """Read flax msgpack: parameters alone, CleanRL's [flags, parameters], and the files of its PPO and C51."""

    def unpack_array(_: int, data: bytes) -> np.ndarray:
        shape, dtype, data = msgpack.unpackb(data)
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)

    try:
        tree = msgpack.unpackb(data, ext_hook=unpack_array)
        tree = tree["1"] if tree.keys() == {"0", "1"} else tree
        if tree.keys() == {"0", "1", "2"}:  # PPO: network, actor, critic
            return {"params": tree["0"]["params"] | {"actor": tree["1"]["params"]["Dense_0"]}}
        if tree.keys() == {"model_weights", "args"}:  # C51
            v_min, v_max, n_atoms = (tree["args"][name] for name in ("v_min", "v_max", "n_atoms"))
            return tree["model_weights"] | {"atoms": np.linspace(v_min, v_max, min(n_atoms, 10**6), dtype=np.float32)}
        return dict(tree)
    except Exception as error:  # msgpack and NumPy raise many kinds
        raise ValueError(f"it is neither a PyTorch nor a flax model, or damaged ({one_line(error)})") from error


def write_flax(path: Path, params: Params) -> None:
    """Write flax parameters as msgpack that ``flax.serialization.from_bytes`` reads. flax need not be installed."""

    def pack_array(array: Any) -> msgpack.ExtType:
        array = np.asarray(array)
        return msgpack.ExtType(FLAX_ARRAY, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))

    with atomic_write(path) as file:
        file.write(msgpack.packb(params, default=pack_array))


def as_float32(key: str, value: Any) -> np.ndarray:
    """Copy an array of finite floating-point numbers to a float32 array."""
    dtype = str(getattr(value, "dtype", type(value).__name__))
    if "float" not in dtype:
        raise ValueError(f"{key!r:.60} is {dtype}, not floating-point numbers")
    with np.errstate(over="ignore"):
        array = np.array(value, np.float32, order="C")
    if not np.isfinite(array).all():
        raise ValueError(f"{key!r:.60} holds NaN or infinite values")
    return array


# network.0.res_block1.conv0 is ConvSequence_0/ResidualBlock_1/Conv_0. Layers directly in PyTorch's `Sequential` are
# Conv_0, Conv_1, … and Dense_0, Dense_1, … in flax. A ReLU follows each of them; a Flatten follows the last
# convolution, and a Flatten and a ReLU follow the last sequence.
# Kernels of convolutions are OIHW in PyTorch and HWIO in flax; those of dense layers are (out, in) and (in, out). The
# first dense layer reads a flattened image: its inputs are ordered CHW in PyTorch and HWC in flax.
TORCH_LAYER = r"network\.(?:(\d+)\.(?:conv|res_block(\d+)\.conv(\d+))|\d+)|(actor)"
FLAX_LAYER = r"params/(?:ConvSequence_(\d+)/(?:Conv_0|ResidualBlock_(\d+)/Conv_(\d+))|(?:Conv|Dense)_\d+|(actor))"


def flax_to_torch(params: Params) -> Weights:
    """Convert flax parameters to weights in PyTorch's layout; ValueError if a layer belongs to another network."""
    arrays, channels, place = flatten(params), 0, 0
    weights = {"atoms": arrays.pop("atoms")} if "atoms" in arrays else {}
    for (sequence, block, conv, actor), kernel, bias in layers(arrays, FLAX_LAYER, "/", "kernel"):
        if sequence:
            name = f"network.{sequence}." + (f"res_block{block}.conv{conv}" if block else "conv")
            place = int(sequence) + 2
        elif actor:
            name = actor
        else:
            place += kernel.ndim == 2 and channels > 0  # a Flatten
            name, place = f"network.{place}", place + 2
        if kernel.ndim == 2 and channels:
            side = math.isqrt(len(kernel) // channels)
            kernel = kernel.reshape(side, side, channels, kernel.shape[1]).transpose(2, 0, 1, 3).reshape(kernel.shape)
        channels = kernel.shape[3] if kernel.ndim == 4 else 0
        weight = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        weights |= {f"{name}.weight": np.ascontiguousarray(weight), f"{name}.bias": bias}
    return weights


def torch_to_flax(weights: Mapping[str, np.ndarray]) -> Params:
    """Convert weights in PyTorch's layout to flax parameters: the inverse of :func:`flax_to_torch`."""
    params, channels, count = {}, 0, {"Conv": 0, "Dense": 0}
    for (sequence, block, conv, actor), weight, bias in layers(weights, TORCH_LAYER, ".", "weight"):
        if sequence:
            name = f"ConvSequence_{sequence}/" + (f"ResidualBlock_{block}/Conv_{conv}" if block else "Conv_0")
        elif actor:
            name = actor
        else:
            kind = "Conv" if weight.ndim == 4 else "Dense"
            name = f"{kind}_{count[kind]}"
            count[kind] += 1
        if weight.ndim == 2 and channels:
            side = math.isqrt(weight.shape[1] // channels)
            weight = weight.reshape(len(weight), channels, side, side).transpose(0, 2, 3, 1).reshape(weight.shape)
        channels = len(weight) if weight.ndim == 4 else 0
        kernel = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
        node = params
        for part in f"params/{name}".split("/"):
            node = node.setdefault(part, {})
        node.update(kernel=np.ascontiguousarray(kernel), bias=bias)
    return params


def layers(arrays: Mapping[str, Any], pattern: str, separator: str, kernel: str) -> Iterator[tuple]:
    """Yield (groups of ``pattern`` in the layer's name, kernel, bias) of each layer, in the order of the network."""
    found: dict[str, dict[str, Any]] = {}
    for key in sorted(arrays, key=lambda key: re.sub(r"\d+", lambda number: number[0].zfill(9), key)):  # 2 before 10
        layer, _, name = key.rpartition(separator)
        found.setdefault(layer, {})[name] = arrays[key]
    for layer, parts in found.items():
        match = re.fullmatch(pattern, layer)
        if not match or parts.keys() != {kernel, "bias"} or np.ndim(parts[kernel]) not in (2, 4):
            raise ValueError(f"{layer!r:.60} is not a layer of a network of this project")
        yield match.groups(), parts[kernel], parts["bias"]


def flatten(tree: Params, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries, with their keys joined by "/"."""
    flat = {}
    for name, node in tree.items():
        flat |= flatten(node, f"{prefix}{name}/") if isinstance(node, dict) else {f"{prefix}{name}": node}
    return flat


def convert(
    source: tyro.conf.Positional[Path],
    target: tyro.conf.Positional[Path],
    format: Literal["torch", "flax"] | None = None,
) -> str:
    """Write a model with CleanRL's layer names, and return the format; the last layer of a policy is named actor.

    Args:
        source: the model to read, of any format
        target: the file to write
        format: the format to write; by default flax for a PyTorch file and torch for a flax file
    """
    with open_model(source) as weights:
        if "atoms" in weights:
            raise ValueError("C51 has return distributions, and a DQN's file has Q-values; both scripts read C51's own")
        params = torch_to_flax(weights)
    format = format or ("flax" if source.read_bytes().startswith(ZIP) else "torch")
    with user_errors(f"{target} cannot be written", "give another file", OSError):
        if target.exists():
            raise UserError(f"{target} exists; give another file or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        if format == "flax":
            write_flax(target, params)
        else:
            require_packages("writing the torch format", "torch")
            import torch

            with atomic_write(target) as file:
                torch.save({key: torch.from_numpy(value) for key, value in weights.items()}, file)
    return format


if __name__ == "__main__":
    with one_line_errors():
        print(f"written in the {tyro.cli(convert)} format")
