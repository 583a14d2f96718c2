"""Finds model files, in a directory or on the Hugging Face Hub, and reads both encodings with NumPy alone.

PyTorch scripts save a state dict, JAX scripts flax msgpack. A teacher of either kind is returned in the torch layout.
"""

import io
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np
from huggingface_hub import HfApi, constants, hf_hub_download, logging
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from cleanrl_utils.errors import UserError
from cleanrl_utils.hub import limit_waiting
from cleanrl_utils.runs import atomic_write

Architecture = Literal["nature", "impala"]
Layout = Literal["torch", "flax"]

SUFFIX = ".cleanrl_model"
TRAIN_ONE = (
    "or train a teacher with `python cleanrl/dqn_atari.py --env-id … --save-model` and point "
    "--teacher-policy-hf-repo at the directory that it is saved in"
)
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02")  # a zip archive; before PyTorch 1.6, pickles of protocol 2
FLAX_NDARRAY = 1  # flax's msgpack extension code of an array
FLAX_DTYPES = ("float16", "float32", "float64")


class Layer(NamedTuple):
    """A convolution or a dense layer of a network."""

    torch: str
    """what its torch keys, .weight and .bias, begin with"""
    flax: str
    """what its flax keys, /kernel and /bias, begin with"""
    shape: tuple[int, ...]
    """the torch weight's: (out, in, height, width) or (out, in); out is 0 where it is the number of actions"""
    feature_map: tuple[int, int, int] | None = None
    """(channels, rows, columns) of what the layer reads flattened: in this order in torch, channels last in flax"""

    def shapes(self, layout: Layout, num_actions: int) -> dict[str, tuple[int, ...]]:
        """The shapes of weight and bias under their keys in ``layout``."""
        outputs, (inputs, *kernel) = self.shape[0] or num_actions, self.shape[1:]
        if layout == "torch":
            return {f"{self.torch}.weight": (outputs, inputs, *kernel), f"{self.torch}.bias": (outputs,)}
        return {f"{self.flax}/kernel": (*kernel, inputs, outputs), f"{self.flax}/bias": (outputs,)}


def conv_sequence(i: int, inputs: int, outputs: int) -> Iterable[Layer]:
    """The layers of the ``i``-th sequence of an ImpalaCNN, in the order of its state dict."""
    torch, flax = f"network.{i}", f"params/ConvSequence_{i}"
    yield Layer(f"{torch}.conv", f"{flax}/Conv_0", (outputs, inputs, 3, 3))
    for block in range(2):
        for conv in range(2):
            yield Layer(
                f"{torch}.res_block{block}.conv{conv}",
                f"{flax}/ResidualBlock_{block}/Conv_{conv}",
                (outputs, outputs, 3, 3),
            )


# Both read (4, 84, 84): the DQN of Mnih et al. (2015), and the ImpalaCNN of Espeholt et al. (2018).
LAYERS: dict[Architecture, tuple[Layer, ...]] = {
    "nature": (
        Layer("network.0", "params/Conv_0", (32, 4, 8, 8)),
        Layer("network.2", "params/Conv_1", (64, 32, 4, 4)),
        Layer("network.4", "params/Conv_2", (64, 64, 3, 3)),
        Layer("network.7", "params/Dense_0", (512, 3136), (64, 7, 7)),
        Layer("network.9", "params/Dense_1", (0, 512)),
    ),
    "impala": (
        *conv_sequence(0, 4, 16),
        *conv_sequence(1, 16, 32),
        *conv_sequence(2, 32, 32),
        Layer("network.5", "params/Dense_0", (256, 3872), (32, 11, 11)),
        Layer("network.7", "params/Dense_1", (0, 256)),
    ),
}


# ==================== finding ====================


def teacher_repo(args: Any) -> str:
    """Where the teacher is: what the flags say, or by default cleanrl/{env_id}-{teacher_model_exp_name}-seed1."""
    game = args.env_id.replace("/", "-")  # a slash separates owner and name of a hub repository
    return args.teacher_policy_hf_repo or f"cleanrl/{game}-{args.teacher_model_exp_name}-seed1"


def find_teacher(repo_or_dir: str, exp_name: str) -> Path:
    """The file ``{exp_name}.cleanrl_model`` of a local directory or, where there is none, of a hub repository.

    A file of a repository that was downloaded before is found without the hub being reachable.

    Raises:
        UserError: there is no such file, or it can't be had; says why, and what to do.
    """
    filename = exp_name + SUFFIX
    directory = Path(repo_or_dir).expanduser()
    if directory.is_dir():
        if not (directory / filename).is_file():
            raise UserError(
                no_such_file(f"directory {directory}", filename, (file.name for file in directory.iterdir()))
            )
        return directory / filename
    if directory.is_file():
        raise UserError(
            f"--teacher-policy-hf-repo {repo_or_dir} is a file; give its directory, {directory.parent}, and "
            f"--teacher-model-exp-name {directory.name.removesuffix(SUFFIX)}"
        )
    try:
        limit_waiting()
        logging.set_verbosity_error()  # its retries would take ten lines before ours
        return Path(hf_hub_download(repo_or_dir, filename))
    except Exception as error:  # the client raises its own, its HTTP library's, OSError and ValueError
        raise UserError(hub_problem(repo_or_dir, filename, error)) from error


def no_such_file(place: str, filename: str, names: Iterable[str]) -> str:
    """What to say when ``place``, which holds the files ``names``, lacks ``filename``."""
    stems = sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    if not stems:
        return f"the {place} has no {filename}, nor any other {SUFFIX} file; give another, {TRAIN_ONE}"
    return (
        f"the {place} has no {filename}; it has {', '.join(stem + SUFFIX for stem in stems)}: "
        f"give --teacher-model-exp-name {' or '.join(stems)}"
    )


def hub_problem(repo: str, filename: str, error: Exception) -> str:
    """What to say of an exception that :func:`huggingface_hub.hf_hub_download` raised."""
    # "Not in the cache" is what the client raises whenever a request failed; the request's own error is behind it.
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = " ".join((getattr(error, "server_message", None) or str(error) or type(error).__name__).split())

    if isinstance(error, HFValidationError):
        return (
            f"there is no directory {repo}, nor is that a valid name of a hub repository (owner/name); "
            f"check --teacher-policy-hf-repo, {TRAIN_ONE}"
        )
    if isinstance(error, RemoteEntryNotFoundError | RevisionNotFoundError):
        try:
            names = HfApi().list_repo_files(repo)
        except Exception:  # the list is only there to help
            names = []
        return no_such_file(f"hub repository {repo}", filename, names)
    if status == 401:  # for a repository that does not exist too, unless one is logged in
        return (
            f"there is no directory {repo}, and the hub repository of that name does not exist or is private "
            f"(401, {reason}); check the name, {LOG_IN}, {TRAIN_ONE}"
        )
    if isinstance(error, GatedRepoError) or status == 403:
        return (
            f"the hub refuses access to the repository {repo} (403, {reason}); ask for access at "
            f"{constants.ENDPOINT}/{repo} and {LOG_IN}, {TRAIN_ONE}"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is neither a directory nor a hub repository {repo} (404); check the name or, if it is private, "
            f"{LOG_IN}, {TRAIN_ONE}"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"there is no directory {repo}, HF_HUB_OFFLINE is set and the cache {constants.HF_HUB_CACHE} has no "
            f"{filename} of the hub repository {repo}; unset it, {TRAIN_ONE}"
        )
    return (
        f"there is no directory {repo}, and {filename} of the hub repository {repo} can't be downloaded from "
        f"{constants.ENDPOINT} ({reason}); check the connection and try again, {TRAIN_ONE}"
    )


# ==================== reading and writing ====================


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Reads a model of either encoding, which its content tells, and runs no code from it.

    Returns:
        float32 arrays with the keys, shapes and order of the torch state dict (:data:`LAYERS`).

    Raises:
        UserError: the file can't be read, is damaged or foreign, or holds something other than such a network.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"the model {path} can't be read ({error.strerror or error})") from error
    try:
        if not data:
            raise ValueError("the file is empty")
        if data.startswith(TORCH_MAGIC):
            arrays = read_torch(data)
            architecture_of(arrays)
        else:
            arrays = flax_to_torch(read_flax(data))
        with np.errstate(over="ignore"):  # the check below says it
            weights = {key: np.array(value, np.float32, order="C") for key, value in arrays.items()}
        for key, value in weights.items():
            if not np.isfinite(value).all():
                raise ValueError(f"{key} holds NaN or infinite values")
    except ValueError as error:
        raise UserError(f"{path} is no usable model: {error}; give another file or download it again") from error
    return weights


def read_teacher(path: Path, num_actions: int, env_id: str) -> dict[str, np.ndarray]:
    """As :func:`read_weights`, of a network that has ``num_actions``, those of ``env_id``.

    Raises:
        UserError: as there, or it has another number of actions.
    """
    weights = read_weights(path)
    if num_actions_of(weights) != num_actions:
        raise UserError(
            f"the teacher {path} has {num_actions_of(weights)} actions and {env_id} has {num_actions}; "
            "give a teacher of the same game"
        )
    return weights


def read_torch(data: bytes) -> dict[str, np.ndarray]:
    """The floating-point arrays of a PyTorch state dict, whatever their keys; ValueError where it holds anything else.

    Raises:
        UserError: PyTorch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"the teacher is a PyTorch file and PyTorch can't be imported ({error}); pip install torch, convert the "
            "file with `python -m cleanrl_utils.convert` where PyTorch is, or give a teacher of dqn_atari_jax"
        ) from error
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Not PyTorch's own words, which advise to load the file with weights_only=False.
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"refers to {name[1]}, which might run code, and was not loaded" if name else "is damaged"
        raise ValueError(f"it is no plain state dict: its pickle {what}") from error
    except Exception as error:  # RuntimeError, EOFError, KeyError, AssertionError, … according to where it is damaged
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise ValueError(f"PyTorch finds it damaged ({reason})") from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not a state dict")
    for key, value in state.items():
        if not (isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"):
            raise ValueError(f"{key!r:.60} is {type(value).__name__}, not a dense tensor")
        if not value.is_floating_point():
            raise ValueError(f"{key!r:.60} is {value.dtype}, not floating point")
    return {str(key): value.detach().float().numpy() for key, value in state.items()}


def read_flax(data: bytes) -> dict[str, np.ndarray]:
    """The floating-point arrays of flax msgpack with their keys joined by "/"; ValueError where there is anything else.

    Some JAX scripts of CleanRL save [flags, params], which flax turns into {"0": flags, "1": params}.
    """
    try:
        tree = msgpack.unpackb(data)
    except Exception:  # ValueError, and msgpack's own that are none; what they say of bytes and keys helps nobody
        tree = None
    if not isinstance(tree, dict):
        raise ValueError("it is neither a PyTorch nor a flax model, or a damaged one")
    arrays = {}
    pending = [("", tree["1"] if tree.keys() == {"0", "1"} else tree)]
    while pending:
        key, node = pending.pop()
        if isinstance(node, dict):
            pending.extend((f"{key}/{name}" if key else str(name), child) for name, child in node.items())
        elif not isinstance(node, msgpack.ExtType) or node.code != FLAX_NDARRAY:
            raise ValueError(f"{key!r:.60} is {type(node).__name__}, not an array")
        else:
            try:
                shape, dtype, buffer = msgpack.unpackb(node.data)
                arrays[key] = np.frombuffer(buffer, np.dtype(dtype)).reshape(shape)
            except Exception as error:  # as above, and np.dtype's and reshape's TypeError
                raise ValueError(f"the array {key!r:.60} is damaged ({error})") from error
            if dtype not in FLAX_DTYPES:
                raise ValueError(f"{key!r:.60} is {dtype}, not one of {', '.join(FLAX_DTYPES)}")
    return arrays


def write_flax(path: Path, params: Mapping[str, np.ndarray]) -> None:
    """Writes a flat dict with keys joined by "/" as the nested msgpack that ``flax.serialization.from_bytes`` reads."""
    tree: dict = {}
    for key, value in params.items():
        *parents, name = key.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        array = msgpack.packb((value.shape, value.dtype.name, value.tobytes()))
        node[name] = msgpack.ExtType(FLAX_NDARRAY, array)
    with atomic_write(path) as file:
        file.write(msgpack.packb(tree))


# ==================== both layouts ====================


def identify(arrays: Mapping[str, np.ndarray], layout: Layout) -> Architecture:
    """The architecture that all of these keys and shapes, in ``layout``, are those of.

    Raises:
        ValueError: there is none; says in what it differs from the nearest.
    """
    # The bias of the last layer tells the number of actions; without it, the keys differ anyway.
    biases = {name: list(layers[-1].shapes(layout, 0))[1] for name, layers in LAYERS.items()}
    expected = {
        name: {
            key: shape
            for layer in layers
            for key, shape in layer.shapes(layout, np.size(arrays.get(biases[name], ()))).items()
        }
        for name, layers in LAYERS.items()
    }
    architecture = max(expected, key=lambda name: len(expected[name].keys() & arrays.keys()))
    shapes = expected[architecture]
    if missing := [key for key in shapes if key not in arrays]:
        found = f"; it has {some(arrays)}" if arrays else ""
        raise ValueError(f"it lacks {some(missing)} of the {architecture} network's{found}")
    if unknown := [key for key in arrays if key not in shapes]:
        raise ValueError(f"it has {some(unknown)}, which the {architecture} network has not")
    for key, shape in shapes.items():
        if arrays[key].shape != shape:
            raise ValueError(f"{key} has shape {arrays[key].shape} where the {architecture} network has {shape}")
    if arrays[biases[architecture]].size == 0:
        raise ValueError("it has no actions")
    return architecture


def some(names: Iterable[str]) -> str:
    """The first three names, in quotes."""
    names = list(names)
    return ", ".join(f"{name!r:.60}" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def architecture_of(weights: Mapping[str, np.ndarray]) -> Architecture:
    """ "nature" or "impala", for arrays in the torch layout; ValueError where they are neither's."""
    return identify(weights, "torch")


def num_actions_of(weights: Mapping[str, np.ndarray]) -> int:
    """The rows of the last layer, for arrays in the torch layout; ValueError where they are no network's."""
    return len(weights[f"{LAYERS[architecture_of(weights)][-1].torch}.bias"])


def flax_to_torch(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Turns flax's arrays (keys joined by "/", kernels HWIO and (in, out)) into torch's (OIHW and (out, in)).

    Raises:
        ValueError: the keys or shapes are no network's.
    """
    weights = {}
    for layer in LAYERS[identify(params, "flax")]:
        kernel = params[f"{layer.flax}/kernel"]
        if layer.feature_map:
            channels, rows, columns = layer.feature_map
            kernel = kernel.reshape(rows, columns, channels, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
        weights[f"{layer.torch}.weight"] = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        weights[f"{layer.torch}.bias"] = params[f"{layer.flax}/bias"]
    return weights


def torch_to_flax(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of :func:`flax_to_torch`.

    Raises:
        ValueError: the keys or shapes are no network's.
    """
    params = {}
    for layer in LAYERS[architecture_of(weights)]:
        weight = weights[f"{layer.torch}.weight"]
        if layer.feature_map:
            weight = weight.reshape(-1, *layer.feature_map).transpose(0, 2, 3, 1).reshape(weight.shape)
        params[f"{layer.flax}/kernel"] = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
        params[f"{layer.flax}/bias"] = weights[f"{layer.torch}.bias"]
    return params
