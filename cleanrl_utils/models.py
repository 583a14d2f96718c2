"""Read, write and convert model files: ``python -m cleanrl_utils.models SOURCE TARGET``.

PyTorch scripts save a state dict, JAX scripts save flax msgpack. Both hold the same layers in the same order. The names
follow from each other and the shapes come from the file, so that no network is written down here.
Files are untrusted: reading one runs no code from it and takes a few times its size in memory.
"""

import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import tyro

from cleanrl_utils.errors import UserError, one_line, one_line_errors, require_packages
from cleanrl_utils.tracking import atomic_write

Weights = dict[str, np.ndarray]  # float32 arrays under the names and in the layout of a PyTorch state dict
Params = dict[str, Any]  # arrays in nested dictionaries, as flax has them: params → Conv_0 → kernel
TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02")  # a zip archive; before PyTorch 1.6, pickles of protocol 2
FLAX_ARRAY = 1  # flax's msgpack extension code of an array


def read_weights(path: Path) -> Weights:
    """Read the weights from a model file of any format; a damaged file can raise almost anything."""
    if not path.is_file():
        raise ValueError("there is no such file")
    weights = read_torch(path) if is_torch_file(path) else flax_to_torch(read_flax(path))
    if not weights:
        raise ValueError("it has no weights")
    return {str(key): as_float32(key, value) for key, value in weights.items()}


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins as PyTorch's do."""
    with path.open("rb") as file:
        return file.read(4).startswith(TORCH_MAGIC)


@contextmanager
def open_model(path: Path) -> Iterator[Weights]:
    """Read the weights from a model file of any format, for a ``with`` block.

    Raises:
        UserError: the file is not a model, or the block raises, as it does where the layers do not fit a network.
    """
    try:
        yield read_weights(path)
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise almost anything
        reason = one_line(error)
        if isinstance(error, pickle.UnpicklingError):  # PyTorch's message advises to load it with weights_only=False
            unsafe = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"its pickle refers to {unsafe[1]!r}, which could run code" if unsafe else "its pickle is damaged"
        advice = "give a model of CleanRL's or QDagger's scripts for this environment"
        raise UserError(f"{path} is not a usable model: {reason}; {advice}") from error


def read_torch(path: Path) -> dict[str, Any]:
    """Read a PyTorch state dict. PyTorch is imported only here, because the JAX scripts do not need it otherwise."""
    require_packages(f"{path} is a PyTorch file: converting it (python -m cleanrl_utils.models)", "torch")
    import torch

    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > size:  # PyTorch stores them uncompressed
                raise ValueError("it is a compressed zip archive")
    state_dict = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state_dict, dict):
        raise ValueError(f"it holds a {type(state_dict).__name__}, not a state dict")
    if sum(value.numel() for value in state_dict.values() if isinstance(value, torch.Tensor)) > size:
        raise ValueError("its tensors have more elements than the file has bytes")  # strides of 0 repeat elements
    return state_dict


def read_flax(path: Path) -> Params:
    """Read flax msgpack. Some JAX scripts of CleanRL save [flags, params]: return the latter."""

    def unpack_array(_: int, data: bytes) -> np.ndarray:
        shape, dtype, data = msgpack.unpackb(data)
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)

    try:
        tree = msgpack.unpackb(path.read_bytes(), ext_hook=unpack_array)
        return dict(tree["1"] if tree.keys() == {"0", "1"} else tree)
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
    """Copy a NumPy array or PyTorch tensor of finite floating-point numbers to a float32 array."""
    dtype = str(getattr(value, "dtype", type(value).__name__))
    if "float" not in dtype:
        raise ValueError(f"{key!r:.60} is {dtype}, not floating-point numbers")
    with np.errstate(over="ignore"):
        array = np.array(value.detach().float().numpy() if hasattr(value, "detach") else value, np.float32, order="C")
    if not np.isfinite(array).all():
        raise ValueError(f"{key!r:.60} holds NaN or infinite values")
    return array


# network.0.res_block1.conv0 is ConvSequence_0/ResidualBlock_1/Conv_0. Layers directly in PyTorch's `Sequential` are
# Conv_0, Conv_1, … and Dense_0, Dense_1, … in flax. A ReLU follows each of them; a Flatten follows the last
# convolution, and a Flatten and a ReLU follow the last sequence.
#
# Kernels of convolutions are OIHW in PyTorch and HWIO in flax; those of dense layers are (out, in) and (in, out). The
# first dense layer reads a flattened image: its inputs are ordered CHW in PyTorch and HWC in flax.

TORCH_LAYER = r"network\.(?:(\d+)\.(?:conv|res_block(\d+)\.conv(\d+))|\d+)"
FLAX_LAYER = r"params/(?:ConvSequence_(\d+)/(?:Conv_0|ResidualBlock_(\d+)/Conv_(\d+))|(?:Conv|Dense)_\d+)"


def flax_to_torch(params: Params) -> Weights:
    """Convert flax parameters to weights in PyTorch's layout; ValueError if a layer belongs to another network."""
    weights, channels, place = {}, 0, 0
    for (sequence, block, conv), kernel, bias in layers(flatten(params), FLAX_LAYER, "/", "kernel"):
        if sequence:
            name, place = f"{sequence}.res_block{block}.conv{conv}" if block else f"{sequence}.conv", int(sequence) + 2
        else:
            place += kernel.ndim == 2 and channels > 0  # a Flatten
            name, place = f"{place}", place + 2
        if kernel.ndim == 2 and channels:
            side = math.isqrt(len(kernel) // channels)
            kernel = kernel.reshape(side, side, channels, kernel.shape[1]).transpose(2, 0, 1, 3).reshape(kernel.shape)
        channels = kernel.shape[3] if kernel.ndim == 4 else 0
        weight = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        weights |= {f"network.{name}.weight": np.ascontiguousarray(weight), f"network.{name}.bias": bias}
    return weights


def torch_to_flax(weights: Mapping[str, np.ndarray]) -> Params:
    """Convert weights in PyTorch's layout to flax parameters: the inverse of :func:`flax_to_torch`."""
    params, channels, count = {}, 0, {"Conv": 0, "Dense": 0}
    for (sequence, block, conv), weight, bias in layers(weights, TORCH_LAYER, ".", "weight"):
        if sequence:
            name = f"ConvSequence_{sequence}/" + (f"ResidualBlock_{block}/Conv_{conv}" if block else "Conv_0")
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


def convert(source: tyro.conf.Positional[Path], target: tyro.conf.Positional[Path]) -> str:
    """Convert a model to the other format, and return its name: flax for a PyTorch file, torch for a flax file.

    Args:
        source: the .cleanrl_model file to read
        target: the file to write
    """
    require_packages("converting a model", "torch")
    import torch

    with open_model(source) as weights:
        params = torch_to_flax(weights)
    if target.exists():
        raise UserError(f"{target} exists; give another file or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_torch_file(source):
            write_flax(target, params)
            return "flax"
        with atomic_write(target) as file:
            torch.save({key: torch.from_numpy(value) for key, value in weights.items()}, file)
        return "torch"
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror or error}); give another file") from error


if __name__ == "__main__":
    with one_line_errors():
        print(f"written in the {tyro.cli(convert)} format")
