"""Find a model on the disk or the Hugging Face Hub, and read its weights from a file of any format.

Arrays have the names of a network's layers, ``network.0.weight`` in PyTorch and ``params/Conv_0/kernel`` in flax.
Models of other libraries get the names of CleanRL's scripts. Files are untrusted: reading one runs no code from it.
"""

import io
import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import huggingface_hub as hf
import msgpack
import numpy as np
from huggingface_hub import errors, utils

from cleanrl_utils.errors import one_line, user_errors, warn

Arrays = dict[str, np.ndarray]  # by name
# The models in a repository, as arguments of the hub's functions. rl-baselines3-zoo uploads its logs as a zip file.
MODEL_FILES = {
    "allow_patterns": ["*.cleanrl_model", "*.zip"],
    "ignore_patterns": ["*/*", "train_eval_metrics.zip"],
}
ZIP = b"PK\x03\x04"  # the first bytes of a zip archive, as PyTorch's and stable-baselines3's files are
STORAGES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "DoubleStorage": "<f8"}  # of PyTorch
STORAGES |= {"IntStorage": "<i4", "LongStorage": "<i8"}
WRAPPERS = {"_orig_mod", "module"}  # modules of torch.compile and DataParallel that hold the actual one
SB3_NAMES = {  # layers of stable-baselines3 and sb3-contrib, and their names here
    "features_extractor.cnn.": "network.",
    "features_extractor.linear.0.": "network.7.",
    "action_net.": "actor.",
    "quantile_net.0.": "network.9.",
    "q_net.0.": "network.9.",
}
SB3_NOT_ACTING = ("q_net_target.", "quantile_net_target.", "vf_features_extractor.", "value_net.")
ACTOR = {"actor.weight": "network.9.weight", "actor.bias": "network.9.bias"}  # the last layer of a policy
ACTOR |= {"params/actor/kernel": "params/Dense_1/kernel", "params/actor/bias": "params/Dense_1/bias"}


def find_model(repo: str, exp_name: str) -> Path:
    """Find a model; download it if ``repo`` is a hub repository, or find it in the hub's cache without a network.

    Args:
        repo: the file, its directory or, if nothing has this path, the name of a hub repository. ``name@revision``
            is a branch, tag or commit of it.
        exp_name: the name of the file, without .cleanrl_model or .zip. With a script's default, the only model of a
            directory or repository may have any name.

    Raises:
        UserError: there is no such model, or the hub can't be reached.
    """
    path = Path(os.path.expanduser(repo))
    is_local = path.exists()
    problem = f"no model can be loaded from {repo!r}"
    remedy = "give another file, directory or hub repository (`hf auth login` for a private one; see docs/teachers.md)"
    embedded = Path("teachers", path.name)
    if not is_local:
        missing = path.resolve().as_posix()
        problem = f"there is no {missing!r}, and no model can be loaded from the hub repository {repo!r}"
    if not is_local and embedded.exists():
        remedy = f"give {embedded}, a teacher of this project"
    with user_errors(problem, remedy, Exception):
        if not is_local:
            path = download_models(repo)
        if not path.is_file():
            path = path / choose_model(path, exp_name)
    if not is_local:
        print(f"model: {path.name} of {repo} at commit {path.parent.name}")
    return path


def download_models(repo: str) -> Path:
    """Download the models of a hub repository, and no other files; return their directory in the hub's cache."""
    name, _, revision = repo.partition("@")
    try:
        return Path(hf.snapshot_download(name, revision=revision or None, **MODEL_FILES))
    except errors.IncompleteSnapshotError as error:  # for example after `hf download --include`
        warn(f"the hub can't be reached, and not all models of {repo} are cached")
        return Path(error.snapshot_path)
    except errors.LocalEntryNotFoundError as error:  # the hub can't be reached
        raise (error.__cause__ or error) from None  # its cause is one line


def choose_model(directory: Path, exp_name: str) -> str:
    """Return the name of the model in a directory; FileNotFoundError if there is none with this ``exp_name``."""
    files = [file.name for file in directory.glob("*") if file.is_file()]
    models = sorted(utils.filter_repo_objects(files, **MODEL_FILES))
    for name in (exp_name, f"{exp_name}.cleanrl_model", f"{exp_name}.zip"):
        if name in models:
            return name
    if exp_name in ("dqn_atari", "dqn_atari_jax") and len(models) == 1:
        return models[0]
    has = f"; choose with --teacher-model-exp-name (enjoy: --exp-name) from {', '.join(models)}" if models else ""
    raise FileNotFoundError(f"it has no file {exp_name}.cleanrl_model or {exp_name}.zip{has}")


def read_model(
    path: Path, library: Literal["torch", "flax"], networks: Mapping[str, Mapping[str, Any]]
) -> tuple[str, Arrays, bool]:
    """Read the weights of one of ``networks`` from a model file of any format.

    ``networks`` are those of ``library``, as arrays with the names and shapes of their weights.

    Returns:
        The name of the network, its weights, and whether its outputs are the logits of a policy instead of Q-values.

    Raises:
        UserError: the file is damaged or has the weights of another network.
    """
    remedy = "docs/teachers.md lists the agents that can teach"
    if path.suffix != ".zip":
        remedy += "; a network of your own is read by the script that saved it"
    with user_errors(
        f"{path.as_posix()!r} is not a usable model", remedy, Exception
    ):  # a damaged file can raise almost any
        arrays = read_arrays(path)
        is_policy = False
        if shapes(arrays) not in [shapes(network) for network in networks.values()]:
            arrays, is_policy = convert(arrays, library)
        return matching_network(arrays, networks), arrays, is_policy


def read_arrays(path: Path) -> Arrays:
    """Read the arrays of a model file, with the names of the library that wrote it."""
    data = path.read_bytes()
    arrays = read_torch(data) if data.startswith(ZIP) else flatten(read_flax(data))
    return {name: as_float32(name, array) for name, array in arrays.items()}


def shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array."""
    return {name: tuple(np.shape(array)) for name, array in arrays.items()}


def matching_network(arrays: Arrays, networks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the network with these names and shapes; ValueError if there is none."""
    found = shapes(arrays)
    in_common = {name: found.items() & shapes(network).items() for name, network in networks.items()}
    closest = max(in_common, key=lambda name: len(in_common[name]))
    needed = shapes(networks[closest])
    if found == needed:
        return closest
    has = [layer for layer in found.items() if layer not in in_common[closest]]
    lacks = [layer for layer in needed.items() if layer not in in_common[closest]]
    raise ValueError(f"its layers are not those of {closest} for this game: it lacks {lacks[:2]} and has {has[:2]}")


def read_torch(data: bytes) -> dict[str, Any]:
    """Read a state dict from a file of PyTorch, from one of CleanRL's C51, or from stable-baselines3's zip."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    is_sb3 = {"data", "policy.pth"} <= set(archive.namelist())
    if is_sb3:
        sb3_settings = json.loads(archive.read("data"))  # pickles in it are text
        check_sb3(sb3_settings)
        archive = zipfile.ZipFile(io.BytesIO(archive.read("policy.pth")))
    state_dict = TorchUnpickler(archive).load()
    if isinstance(state_dict, dict) and state_dict.keys() == {"model_weights", "args"}:  # C51
        state_dict = state_dict["model_weights"]
    if not isinstance(state_dict, dict):
        raise ValueError(f"it holds a {type(state_dict).__name__}, not a state dict")
    state_dict = {str(name): array for name, array in state_dict.items()}
    return rename_sb3(state_dict, int(sb3_settings["action_space"]["n"])) if is_sb3 else state_dict


def check_sb3(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError if a model of stable-baselines3 was trained with other observations."""
    space = settings["observation_space"]
    shape = space.get("_shape", space.get("shape"))
    if shape not in ([4, 84, 84], [84, 84, 4]):
        remedy = "train it with make_atari_env and VecFrameStack(env, n_stack=4)"
        raise ValueError(f"its observations have the shape {shape!r:.40} instead of four frames of 84×84; {remedy}")
    if not settings["policy_kwargs"].get("normalize_images", True):
        raise ValueError("it was trained with normalize_images=False; train it with the default, True")


def rename_sb3(state_dict: Mapping[str, Any], num_actions: int) -> dict[str, Any]:
    """Give the layers of stable-baselines3 their names here, without those that do not act."""
    weights = {}
    for key, array in state_dict.items():
        name = re.sub(r"^(q_net\.|quantile_net\.|pi_)", "", unwrapped(key))
        if name.startswith(SB3_NOT_ACTING):
            continue
        if name.startswith("quantile_net.0."):  # output i·A + a is quantile i of action a; their mean is linear too
            array = array.reshape(-1, num_actions, *array.shape[1:]).mean(axis=0)
        for sb3_name, our_name in SB3_NAMES.items():
            name = name.replace(sb3_name, our_name)
        weights[name] = array
    return weights


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
            return {"params": tree["model_weights"]["params"] | {"atoms": atoms}}
        return dict(tree)
    except Exception as error:  # msgpack and NumPy raise many kinds
        raise ValueError(f"it is neither a PyTorch nor a flax model, or damaged ({one_line(error)})") from error


def as_float32(name: str, array: Any) -> np.ndarray:
    """Copy an array of finite floating-point numbers to float32, or of integers, such as the counters of layers."""
    dtype = str(getattr(array, "dtype", type(array).__name__))
    if dtype in ("int32", "int64"):
        return np.array(array)
    if "float" not in dtype:
        raise ValueError(f"{name!r:.60} is {dtype}, not floating-point numbers")
    copy = np.array(array, np.float32)
    if not np.isfinite(copy).all():
        raise ValueError(f"{name!r:.60} holds NaN or infinite values")
    return copy


def convert(arrays: Arrays, library: Literal["torch", "flax"]) -> tuple[Arrays, bool]:
    """Convert arrays to the names and layouts of a library; return them, and whether they are those of a policy."""
    arrays = {unwrapped(name): array for name, array in arrays.items()}
    is_policy = not ACTOR.keys().isdisjoint(arrays)
    arrays = {ACTOR.get(name, name): array for name, array in arrays.items()}
    is_flax = any(name.startswith("params/") for name in arrays)
    if is_flax and library == "torch":
        arrays = flax_to_torch(arrays)
    if not is_flax and library == "flax":
        arrays = torch_to_flax(arrays)
    return arrays, is_policy


TEACHER_LAYERS = {"network.0": "Conv_0", "network.2": "Conv_1", "network.4": "Conv_2"}
TEACHER_LAYERS |= {"network.7": "Dense_0", "network.9": "Dense_1"}
STUDENT_LAYERS = {"network.5": "Dense_0", "network.7": "Dense_1"}
STUDENT_LAYERS |= {f"network.{i}.conv": f"ConvSequence_{i}/Conv_0" for i in range(3)}
STUDENT_LAYERS |= {
    f"network.{i}.res_block{j}.conv{k}": f"ConvSequence_{i}/ResidualBlock_{j}/Conv_{k}"
    for i in range(3)
    for j in range(2)
    for k in range(2)
}


def flax_names(layers: Mapping[str, str]) -> dict[str, str]:
    """Return the names of arrays in flax, by their names in PyTorch."""
    kernels = {f"{torch}.weight": f"params/{flax}/kernel" for torch, flax in layers.items()}
    biases = {f"{torch}.bias": f"params/{flax}/bias" for torch, flax in layers.items()}
    return kernels | biases | {"atoms": "params/atoms"}


# The names of arrays, and the width of the image that the first dense layer reads.
TEACHER = flax_names(TEACHER_LAYERS), 7
STUDENT = flax_names(STUDENT_LAYERS), 11
FIRST_DENSE = "params/Dense_0/kernel"

# Kernels of convolutions are OIHW in PyTorch and HWIO in flax; those of dense layers are OI and IO. The first dense
# layer reads an image, which PyTorch flattens in the order CHW and flax in the order HWC.


def torch_to_flax(weights: Arrays) -> Arrays:
    """Convert the arrays of a teacher or student to flax's names and layouts, and no others."""
    names, width = STUDENT if "network.0.conv.weight" in weights else TEACHER
    params = {}
    for torch_name, array in weights.items():
        name = names.get(torch_name, torch_name)
        if name == FIRST_DENSE:
            array = array.reshape(len(array), -1, width, width)
        array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
        params[name] = array.reshape(-1, array.shape[-1]) if name == FIRST_DENSE else array
    return params


def flax_to_torch(params: Arrays) -> Arrays:
    """Convert arrays to PyTorch's names and layouts: the inverse of :func:`torch_to_flax`."""
    names, width = STUDENT if "params/ConvSequence_0/Conv_0/kernel" in params else TEACHER
    torch_names = {name: torch_name for torch_name, name in names.items()}
    weights = {}
    for name, array in params.items():
        if name == FIRST_DENSE:
            array = array.reshape(width, width, -1, array.shape[-1])
        array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
        weights[torch_names.get(name, name)] = array.reshape(len(array), -1) if name == FIRST_DENSE else array
    return weights


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries, with their keys joined by "/"."""
    flat = {}
    for name, node in tree.items():
        flat |= flatten(node, f"{prefix}{name}/") if isinstance(node, dict) else {f"{prefix}{name}": node}
    return flat
