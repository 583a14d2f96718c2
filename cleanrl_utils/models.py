"""Read model files of every format, and convert arrays between PyTorch's names and layouts and flax's.

Arrays have the names of a network's layers, ``network.0.weight`` in PyTorch and ``params/Conv_0/kernel`` in flax. A
script compares names and shapes with its own networks, so no network is defined here. Models of other libraries get the
names of CleanRL's scripts. Their last layer computes Q-values (``network.9``), the logits of a policy (``actor``), or
the logits of C51's return distributions (``network.9`` with ``atoms``).
Files are untrusted: reading one runs no code from it.
"""

import io
import json
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import msgpack
import numpy as np

from cleanrl_utils.errors import one_line, user_errors

Arrays = dict[str, np.ndarray]  # by name
ZIP = b"PK\x03\x04"  # the first bytes of a zip archive, as PyTorch's and stable-baselines3's files are
STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "DoubleStorage": "<f8"}  # of PyTorch
STORAGES |= {"IntStorage": "<i4", "LongStorage": "<i8"}
WRAPPERS = {"_orig_mod", "module"}  # modules of torch.compile and DataParallel that hold the actual one
SB3_LAYERS = (  # layers of stable-baselines3 and sb3-contrib, and their names here; None: a layer that does not act
    (r"(?:(?:q|quantile)_net\.|pi_)?features_extractor\.cnn\.([024])", r"network.\1"),
    (r"(?:(?:q|quantile)_net\.|pi_)?features_extractor\.linear\.0", "network.7"),
    (r"q_net\.q_net\.0", "network.9"),
    (r"quantile_net\.quantile_net\.0", "quantiles"),
    (r"action_net", "actor"),
    (r"(?:(?:q|quantile)_net_target|vf_features_extractor)\..*|value_net|critic", None),
)


def model_errors(path: Path) -> AbstractContextManager[None]:
    """Turn any exception in a ``with`` block into a UserError: the file is not a usable model."""
    remedy = "use a model of docs/teachers.md or, for a network of your own, the script that saved it"
    return user_errors(f"{str(path)!r} is not a usable model", remedy)


def read_model(path: Path, library: Literal["torch", "flax"], own: Mapping[str, Any] | None = None) -> Arrays:
    """Read a model file of any format; a damaged file can raise almost any exception.

    Args:
        path: the file.
        library: the library that names and layouts are for.
        own: arrays with the names and shapes of the script's own network.

    Returns:
        The arrays of the file in float32. If they have the names and shapes of ``own``, names stay the same and
        integers are allowed. Otherwise, wrappers such as that of torch.compile are removed from the names, and arrays
        of the other library are converted.
    """
    data = path.read_bytes()
    is_torch = data.startswith(ZIP)
    arrays = read_torch(data) if is_torch else flatten(read_flax(data))
    own_shapes = shapes(own or {})
    if shapes(arrays) != own_shapes:
        if is_torch:
            arrays = {unwrapped(name): array for name, array in arrays.items()}
        if is_torch and library == "flax":
            arrays = torch_to_flax(arrays)
        if not is_torch and library == "torch":
            arrays = flax_to_torch(arrays)
    is_own = shapes(arrays) == own_shapes
    return {name: as_float32(name, array, keep_integers=is_own) for name, array in arrays.items()}


def shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array."""
    return {name: tuple(np.shape(array)) for name, array in arrays.items()}


def check_layers(arrays: Mapping[str, Any], num_actions: int, **networks: Mapping[str, Any]) -> None:
    """Raise a ValueError unless names and shapes are those of one of the networks, which have ``num_actions``."""
    found = shapes(arrays)
    candidates = {name: shapes(network) for name, network in networks.items()}
    if found in candidates.values():
        return
    closest = max(candidates, key=lambda name: len(found.keys() & candidates[name].keys()))
    needed = candidates[closest]
    missing = [name for name in needed if name not in found]
    unknown = [name[:60] for name in found if name not in needed]
    if missing or unknown:
        raise ValueError(f"its layers are not those of {closest}: it lacks {missing[:2]} and has {unknown[:2]}")
    for name, shape in found.items():
        if shape != needed[name]:
            problem = f"{name!r} has the shape {shape} instead of {needed[name]} for {num_actions} actions"
            raise ValueError(f"its layers are not those of {closest}: {problem}")


def read_torch(data: bytes) -> dict[str, Any]:
    """Read a state dict from a file of PyTorch, from one of CleanRL's C51, or from stable-baselines3's zip."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    is_sb3 = {"data", "policy.pth"} <= set(archive.namelist())
    if is_sb3:
        num_actions = read_sb3_actions(archive.read("data"))
        archive = zipfile.ZipFile(io.BytesIO(archive.read("policy.pth")))
    state_dict = TorchUnpickler(archive).load()
    if isinstance(state_dict, dict) and state_dict.keys() == {"model_weights", "args"}:  # C51
        state_dict = state_dict["model_weights"]
    if not isinstance(state_dict, dict):
        raise ValueError(f"it holds a {type(state_dict).__name__}, not a state dict")
    state_dict = {str(name): array for name, array in state_dict.items()}
    return rename_sb3(state_dict, num_actions) if is_sb3 else state_dict


def read_sb3_actions(data: bytes) -> int:
    """Return the number of actions in the settings of stable-baselines3, JSON; ValueError if they can't be played."""
    settings = json.loads(data)  # pickles in it are text
    space = settings["action_space"]
    box = settings["observation_space"]
    shape = box.get("_shape", box.get("shape"))
    is_scaled = settings["policy_kwargs"].get("normalize_images", True)
    if ".Discrete" not in space[":type:"] or shape not in ([4, 84, 84], [84, 84, 4]) or not is_scaled:
        found = f"{space[':type:']!r:.60}, observations {shape!r:.40}, normalize_images={is_scaled!r:.5}"
        raise ValueError(f"it has {found}; needed are Discrete actions, four 84×84 frames, normalize_images=True")
    return int(space["n"])


def rename_sb3(state_dict: Mapping[str, Any], num_actions: int) -> dict[str, Any]:
    """Give the layers of stable-baselines3 their names here, without those that do not act."""
    weights = {}
    for key, array in state_dict.items():
        layer, _, part = unwrapped(key).rpartition(".")
        name = sb3_layer_name(layer)
        if name == "quantiles":  # output i·A + a is quantile i of action a; their mean is linear, as the layer is
            weights[f"network.9.{part}"] = array.reshape(-1, num_actions, *array.shape[1:]).mean(axis=0)
        elif name is not None:
            weights[f"{name}.{part}"] = array
    return weights


def sb3_layer_name(layer: str) -> str | None:
    """Return the name here of a layer of stable-baselines3; None if it does not act."""
    for pattern, name in SB3_LAYERS:
        match = re.fullmatch(pattern, layer)
        if match:
            return name and match.expand(name)
    raise ValueError(f"it has the layer {layer!r:.60}; needed is a CnnPolicy with default layers")


def unwrapped(name: str) -> str:
    """Remove the wrappers of modules from the name of an array: ``q_net._orig_mod.0.weight`` → ``q_net.0.weight``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


class TorchUnpickler(pickle.Unpickler):
    """Read the NumPy arrays of a PyTorch file (``torch.save``), without PyTorch and without running code from it.

    The file is a zip archive of a pickle and the elements of each storage.
    """

    def __init__(self, archive: zipfile.ZipFile):
        names = [name for name in archive.namelist() if re.fullmatch(r"[^/]*/data\.pkl", name)]
        if len(names) != 1:
            raise ValueError("it is a zip archive of neither stable-baselines3 nor a state dict of PyTorch")
        super().__init__(io.BytesIO(archive.read(names[0])))
        self.archive = archive
        self.folder = names[0].removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function of this name; only those of a state dict are allowed."""
        known = {"OrderedDict": OrderedDict, "_rebuild_tensor_v2": self.rebuild_tensor, **STORAGES}
        if module not in ("collections", "torch", "torch._utils") or name not in known:
            full_name = f"{module}.{name}"
            raise pickle.UnpicklingError(f"it has a {full_name!r:.60}; save a state_dict() of float32 tensors")
        return known[name]

    def persistent_load(self, storage: tuple) -> tuple[str, str]:
        """Return the dtype and member of a storage, described as ("storage", type, member, device, size)."""
        return storage[1:3]

    def rebuild_tensor(self, storage: tuple, offset: int, shape: tuple, strides: tuple, *_: Any) -> np.ndarray:
        """Return elements of a storage as an array; IndexError if the storage does not have them."""
        dtype, member = storage
        elements = np.frombuffer(self.archive.read(f"{self.folder}data/{member}"), dtype)
        index = np.array(offset)
        for size, stride in zip(shape, strides, strict=True):
            index = np.add.outer(index, stride * np.arange(size))
        return elements[index]


def read_flax(data: bytes) -> dict[str, Any]:
    """Read flax msgpack: parameters alone, CleanRL's [flags, parameters], and the files of its PPO and C51."""

    def unpack_array(_: int, data: bytes) -> np.ndarray:
        shape, dtype, data = msgpack.unpackb(data)
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)

    try:
        tree = msgpack.unpackb(data, ext_hook=unpack_array)
        if tree.keys() == {"0", "1"}:  # flags, parameters
            tree = tree["1"]
        if tree.keys() == {"0", "1", "2"}:  # PPO: network, actor, critic
            return {"params": tree["0"]["params"] | {"actor": tree["1"]["params"]["Dense_0"]}}
        if tree.keys() == {"model_weights", "args"}:  # C51
            flags = tree["args"]
            atoms = np.linspace(flags["v_min"], flags["v_max"], flags["n_atoms"], dtype=np.float32)
            return tree["model_weights"] | {"atoms": atoms}
        return dict(tree)
    except Exception as error:  # msgpack and NumPy raise many kinds
        raise ValueError(f"it is neither a PyTorch nor a flax model, or damaged ({one_line(error)})") from error


def as_float32(name: str, array: Any, keep_integers: bool) -> np.ndarray:
    """Copy an array of finite floating-point numbers to a float32 array."""
    dtype = str(getattr(array, "dtype", type(array).__name__))
    if keep_integers and dtype in ("int32", "int64"):  # such as the counters of normalisation layers
        return np.array(array, order="C")
    if "float" not in dtype:
        raise ValueError(f"{name!r:.60} is {dtype}, not floating-point numbers")
    copy = np.array(array, np.float32, order="C")
    if not np.isfinite(copy).all():
        raise ValueError(f"{name!r:.60} holds NaN or infinite values")
    return copy


# network.0.res_block1.conv0 is ConvSequence_0/ResidualBlock_1/Conv_0. Layers directly in PyTorch's `Sequential` are
# Conv_0, Conv_1, … and Dense_0, Dense_1, … in flax. A ReLU follows each of them; a Flatten follows the last
# convolution, and a Flatten and a ReLU follow the last sequence.
# Kernels of convolutions are OIHW in PyTorch and HWIO in flax; those of dense layers are (out, in) and (in, out). The
# first dense layer reads a flattened image: its inputs are ordered CHW in PyTorch and HWC in flax.
TORCH_LAYER = r"network\.(?:(\d+)\.(?:conv|res_block(\d+)\.conv(\d+))|\d+)|(actor)"
FLAX_LAYER = r"params/(?:ConvSequence_(\d+)/(?:Conv_0|ResidualBlock_(\d+)/Conv_(\d+))|(?:Conv|Dense)_\d+|(actor))"


def flax_to_torch(params: Mapping[str, Any]) -> Arrays:
    """Convert arrays to PyTorch's names and layouts; ValueError if a layer belongs to another network."""
    arrays = dict(params)
    weights = {"atoms": arrays.pop("atoms")} if "atoms" in arrays else {}
    channels = 0  # of the image that the previous layer returned; 0 after a dense layer
    place = 0  # of the next layer in `Sequential`
    for (sequence, block, conv, actor), kernel, bias in layers(arrays, FLAX_LAYER, "/", "kernel"):
        if sequence:
            name = f"network.{sequence}." + (f"res_block{block}.conv{conv}" if block else "conv")
            place = int(sequence) + 2
        elif actor:
            name = actor
        else:
            if kernel.ndim == 2 and channels:
                place += 1  # a Flatten
            name = f"network.{place}"
            place += 2
        if kernel.ndim == 2 and channels:
            side = math.isqrt(len(kernel) // channels)
            kernel = kernel.reshape(side, side, channels, kernel.shape[1]).transpose(2, 0, 1, 3).reshape(kernel.shape)
        channels = kernel.shape[3] if kernel.ndim == 4 else 0
        weights[f"{name}.weight"] = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        weights[f"{name}.bias"] = bias
    return weights


def torch_to_flax(weights: Mapping[str, Any]) -> Arrays:
    """Convert arrays to flax's names and layouts: the inverse of :func:`flax_to_torch`."""
    arrays = dict(weights)
    params = {"atoms": arrays.pop("atoms")} if "atoms" in arrays else {}
    channels = 0
    count = {"Conv": 0, "Dense": 0}
    for (sequence, block, conv, actor), weight, bias in layers(arrays, TORCH_LAYER, ".", "weight"):
        if sequence:
            name = f"params/ConvSequence_{sequence}/" + (f"ResidualBlock_{block}/Conv_{conv}" if block else "Conv_0")
        elif actor:
            name = "params/actor"
        else:
            kind = "Conv" if weight.ndim == 4 else "Dense"
            name = f"params/{kind}_{count[kind]}"
            count[kind] += 1
        if weight.ndim == 2 and channels:
            side = math.isqrt(weight.shape[1] // channels)
            weight = weight.reshape(len(weight), channels, side, side).transpose(0, 2, 3, 1).reshape(weight.shape)
        channels = len(weight) if weight.ndim == 4 else 0
        kernel = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
        params[f"{name}/kernel"] = kernel
        params[f"{name}/bias"] = bias
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
            raise ValueError(f"{layer!r:.60} can't be converted between PyTorch and flax")
        yield match.groups(), parts[kernel], parts["bias"]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries, with their keys joined by "/"."""
    flat = {}
    for name, node in tree.items():
        flat |= flatten(node, f"{prefix}{name}/") if isinstance(node, dict) else {f"{prefix}{name}": node}
    return flat
