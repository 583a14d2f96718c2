"""The two encodings of a model file: ``python -m cleanrl_utils.convert FROM TO`` translates one into the other.

PyTorch scripts save a state dict, JAX scripts flax msgpack. Both hold the same layers in the same order under names
that follow from each other, so that no table of a network is needed here: shapes are whatever the file has. Reading
runs no code from a file, and says in one line what is wrong with it. The weights stay the same to the last bit.
"""

import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import tyro

from cleanrl_utils.checks import UserError, one_line_errors, require_packages
from cleanrl_utils.tracking import atomic_write

Weights = dict[str, np.ndarray]
"""float32 arrays by name: a state dict's keys, or those of flax joined by "/" (params/Conv_0/kernel)"""

TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02")  # a zip archive; before PyTorch 1.6, pickles of protocol 2
FLAX_ARRAY = 1  # flax's msgpack extension code of an array


# ==================== reading and writing ====================


@contextmanager
def model_errors(path: Path) -> Iterator[None]:
    """Turns whatever reading the model ``path`` raises into a :class:`UserError` of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of every kind, according to where it is damaged
        if isinstance(error, OSError) and error.filename:  # of no file it is PyTorch's, of wrong offsets in this one
            raise UserError(f"{path} can't be read ({error.strerror}); give another file") from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):
            # Not PyTorch's own words, which advise to load the file with weights_only=False.
            name = re.search(r"GLOBAL (\S+)", str(error))
            what = f"refers to {name[1]}, which might run code, and was not loaded" if name else "is damaged"
            reason = f"its pickle {what}"
        advice = "give another file, or use the script that made this one"
        raise UserError(f"{path} is no usable model: {reason}; {advice}") from error


def is_torch_file(path: Path) -> bool:
    """Whether a model file, by its first bytes, is one of PyTorch; if not, it should be flax msgpack."""
    with path.open("rb") as file:
        return file.read(4).startswith(TORCH_MAGIC)


def read_torch(path: Path) -> Weights:
    """The arrays of a PyTorch state dict, for scripts that otherwise need no PyTorch."""
    convert = "convert it with `python -m cleanrl_utils.convert` where PyTorch is, or give a model of a JAX script; it"
    require_packages(f"{path} is a PyTorch file: {convert}", "torch")
    import torch

    state_dict = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"it holds a {type(state_dict).__name__}, not a state dict")
    return {str(key): as_float32(key, value) for key, value in state_dict.items()}


def read_flax(path: Path) -> Weights:
    """The arrays of flax msgpack. Some JAX scripts of CleanRL save [flags, params]: the latter."""
    data = path.read_bytes()
    try:
        tree = msgpack.unpackb(data)
    except Exception:  # of every kind, as NumPy's below
        tree = None
    if not isinstance(tree, dict):
        raise ValueError("it is neither a PyTorch nor a flax model, or a damaged one" if data else "the file is empty")
    arrays, pending = {}, [("", tree["1"] if tree.keys() == {"0", "1"} else tree)]
    while pending:
        key, node = pending.pop()
        if isinstance(node, dict):
            pending.extend((f"{key}/{name}" if key else str(name), child) for name, child in node.items())
        elif isinstance(node, msgpack.ExtType) and node.code == FLAX_ARRAY:
            try:
                shape, dtype, data = msgpack.unpackb(node.data)
                array = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
            except Exception as error:
                raise ValueError(f"{key!r:.60} is damaged ({error})") from error
            arrays[key] = as_float32(key, array)
        else:
            raise ValueError(f"{key!r:.60} is {type(node).__name__}, not an array")
    return arrays


def as_float32(key: str, value: Any) -> np.ndarray:
    """A new array with the floating-point numbers of one of NumPy or PyTorch; ValueError if they are not all finite."""
    if "float" not in str(getattr(value, "dtype", "")):
        raise ValueError(f"{key!r:.60} is {getattr(value, 'dtype', type(value).__name__)}, not floating-point numbers")
    with np.errstate(over="ignore"):
        array = np.array(value.detach().float().numpy() if hasattr(value, "detach") else value, np.float32, order="C")
    if not np.isfinite(array).all():
        raise ValueError(f"{key!r:.60} holds NaN or infinite values")
    return array


def check_weights(found: Mapping[str, Any], expected: Mapping[str, Any], network: str) -> None:
    """ValueError where the arrays of a file are not what ``network`` needs: keys, shapes, finite numbers.

    Of ``expected`` only names and shapes matter; its last bias is that of the layer with a unit per action.
    """
    if missing := [key for key in expected if key not in found]:
        raise ValueError(f"it lacks {some(missing)} of {network}" + (f"; it has {some(found)}" if found else ""))
    if unknown := [key for key in found if key not in expected]:
        raise ValueError(f"it has {some(unknown)}, which {network} has not")
    shapes = {key: as_float32(key, found[key]).shape for key in expected}
    wrong = [key for key in expected if shapes[key] != tuple(expected[key].shape)]
    last_bias = [key for key in expected if key.endswith("bias")][-1]
    if len(wrong) == 2 and last_bias in wrong and all(key.startswith(last_bias[: -len("bias")]) for key in wrong):
        actions, needed = math.prod(shapes[last_bias]), math.prod(expected[last_bias].shape)
        raise ValueError(f"it has {actions} actions and the game has {needed}, so it is a model of another game")
    for key in wrong:
        raise ValueError(f"{key} has shape {shapes[key]} where {network} has {tuple(expected[key].shape)}")


def some(names: Iterable[str]) -> str:
    """The first three names, in quotes."""
    names = list(names)
    return ", ".join(f"{name!r:.60}" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def write_flax(path: Path, params: Mapping[str, np.ndarray]) -> None:
    """Writes arrays with keys joined by "/" as the nested msgpack that ``flax.serialization.from_bytes`` reads."""
    tree: dict = {}
    for key, value in params.items():
        *parents, name = key.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = msgpack.ExtType(FLAX_ARRAY, msgpack.packb((value.shape, value.dtype.name, value.tobytes())))
    with atomic_write(path) as file:
        file.write(msgpack.packb(tree))


# ==================== from one to the other ====================
#
# network.0.res_block1.conv0 is ConvSequence_0/ResidualBlock_1/Conv_0. Layers right in torch's `Sequential` are Conv_0,
# Conv_1, … and Dense_0, Dense_1, … in turn: there each of them is followed by a ReLU, and the last image, of a
# convolution or a sequence, by a Flatten, after a sequence by a ReLU too.
#
# Kernels of convolutions are OIHW in torch and HWIO in flax, those of dense layers (out, in) and (in, out). A dense
# layer behind an image reads it flattened: channels first in torch, last in flax.


def layers_of(
    arrays: Mapping[str, np.ndarray], separator: str, kernel: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Kernel and bias of each layer, in the order of the network: 2 before 10."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key in sorted(arrays, key=lambda key: re.sub(r"\d+", lambda number: number[0].zfill(9), key)):
        layer, _, name = key.rpartition(separator)
        found.setdefault(layer, {})[name] = arrays[key]
    for layer, parts in found.items():
        if parts.keys() != {kernel, "bias"} or parts[kernel].ndim not in (2, 4):
            raise ValueError(f"{layer!r:.60} is no layer of a network of this project")
    return {layer: (parts[kernel], parts["bias"]) for layer, parts in found.items()}


def image_shape(inputs: int, channels: int) -> tuple[int, int, int]:
    """Rows, columns and channels of the image that a dense layer of so many inputs reads."""
    side = math.isqrt(inputs // channels)
    if channels * side**2 != inputs:
        raise ValueError(f"a dense layer of {inputs} inputs can't follow a convolution of {channels} channels")
    return side, side, channels


def flax_to_torch(params: Mapping[str, np.ndarray]) -> Weights:
    """The arrays of a state dict from those of flax; ValueError if they are no layers of a network of this project."""
    weights, channels, place = {}, 0, 0
    for layer, (kernel, bias) in layers_of(params, "/", "kernel").items():
        nested = re.fullmatch(r"params/ConvSequence_(\d+)/(?:ResidualBlock_(\d+)/)?Conv_(\d+)", layer)
        if nested:
            name = f"network.{nested[1]}" + (f".res_block{nested[2]}.conv{nested[3]}" if nested[2] else ".conv")
            place = int(nested[1]) + 2  # of the next layer: behind a ReLU
        elif re.fullmatch(r"params/(Conv|Dense)_\d+", layer):
            place += kernel.ndim == 2 and channels > 0  # behind a Flatten
            name, place = f"network.{place}", place + 2
        else:
            raise ValueError(f"{layer!r:.60} is no layer of a network of this project")
        if kernel.ndim == 2 and channels:
            image = image_shape(len(kernel), channels)
            kernel = kernel.reshape(*image, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
        channels = kernel.shape[3] if kernel.ndim == 4 else 0
        weights[f"{name}.weight"] = np.ascontiguousarray(kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T)
        weights[f"{name}.bias"] = bias
    return weights


def torch_to_flax(weights: Mapping[str, np.ndarray]) -> Weights:
    """The inverse of :func:`flax_to_torch`."""
    params, channels, count = {}, 0, {"Conv": 0, "Dense": 0}
    for layer, (weight, bias) in layers_of(weights, ".", "weight").items():
        nested = re.fullmatch(r"network\.(\d+)\.(?:res_block(\d+)\.)?conv(\d*)", layer)
        if nested:
            block = f"ResidualBlock_{nested[2]}/" if nested[2] else ""
            name = f"params/ConvSequence_{nested[1]}/{block}Conv_{nested[3] or 0}"
        elif re.fullmatch(r"network\.\d+", layer):
            kind = "Conv" if weight.ndim == 4 else "Dense"
            name = f"params/{kind}_{count[kind]}"
            count[kind] += 1
        else:
            raise ValueError(f"{layer!r:.60} is no layer of a network of this project")
        if weight.ndim == 2 and channels:
            rows, columns, _ = image_shape(weight.shape[1], channels)
            weight = weight.reshape(-1, channels, rows, columns).transpose(0, 2, 3, 1).reshape(weight.shape)
        channels = len(weight) if weight.ndim == 4 else 0
        params[f"{name}/kernel"] = np.ascontiguousarray(weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T)
        params[f"{name}/bias"] = bias
    return params


def convert(source: tyro.conf.Positional[Path], target: tyro.conf.Positional[Path]) -> str:
    """Translates a model into the other encoding; returns that one's name, "torch" or "flax".

    Args:
        source: the .cleanrl_model file to read, of either encoding
        target: the file to write
    """
    require_packages("converting", "torch")
    import torch

    with model_errors(source):
        to = "flax" if is_torch_file(source) else "torch"
        weights = torch_to_flax(read_torch(source)) if to == "flax" else flax_to_torch(read_flax(source))
        if not weights:
            raise ValueError("it holds no arrays")
    if target.exists():
        raise UserError(f"{target} exists; give another file or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if to == "flax":
            write_flax(target, weights)
        else:
            with atomic_write(target) as file:
                torch.save({key: torch.from_numpy(value) for key, value in weights.items()}, file)
    except OSError as error:
        raise UserError(f"{target} can't be written ({error.strerror or error}); give another file") from error
    return to


if __name__ == "__main__":
    with one_line_errors():
        print(f"written in the {tyro.cli(convert)} encoding")
