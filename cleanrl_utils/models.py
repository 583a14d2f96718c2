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
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import huggingface_hub as hf
import msgpack
import numpy as np
from huggingface_hub import utils

from cleanrl_utils.errors import UserError, one_line, user_errors

Arrays = dict[str, np.ndarray]  # by name
N = TypeVar("N", bound=Hashable)  # a network of PyTorch or flax
# The models in a repository, as arguments of the hub's functions. rl-baselines3-zoo uploads its logs as a zip file.
MODEL_FILES = {"allow_patterns": ["*.cleanrl_model", "*.zip"], "ignore_patterns": ["*/*", "train_eval_metrics.zip"]}
ZIP = b"PK\x03\x04"  # the first bytes of a zip archive, as PyTorch's and stable-baselines3's files are
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
STORAGES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "LongStorage": "<i8"}  # of PyTorch
SB3_NAMES = {  # layers of stable-baselines3 and sb3-contrib, and their names here
    "features_extractor.cnn.": "network.",
    "features_extractor.linear.0.": "network.7.",
    "action_net.": "actor.",
    "quantile_net.0.": "network.9.",
    "q_net.0.": "network.9.",
}
ACTOR = {"actor.weight": "network.9.weight", "actor.bias": "network.9.bias"}  # the last layer of a policy
ACTOR |= {"params/actor/kernel": "params/Dense_1/kernel", "params/actor/bias": "params/Dense_1/bias"}
NOT_ACTING = ("critic.", "params/critic/", "value_net.", "vf_", "q_net_target.", "quantile_net_target.")  # layers


def find_model(repo: str, exp_name: str) -> Path:
    """Find a model; download it if ``repo`` is a hub repository, or find it in the hub's cache without a network.

    Args:
        repo: the file, its directory or, if nothing has this path, the name of a hub repository. ``name@revision`` is a
            branch, tag or commit of it.
        exp_name: the name of the file, without .cleanrl_model or .zip. With a script's default, the only model of a
            directory or repository may have any name.

    Raises:
        UserError: there is no such model, or the hub can't be reached.
    """
    path = Path(os.path.expanduser(repo))
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        return path / choose_model(path, exp_name)
    name, _, revision = repo.partition("@")
    problem = f"there is no file or directory {str(path.absolute())!r}, and {repo!r} can't be loaded from the hub"
    remedy = "give another --teacher-policy-hf-repo (enjoy: --hf-repository), or `hf auth login` for a private one"
    with user_errors(problem, f"{remedy}; see docs/teachers.md", Exception):  # many kinds, of several HTTP libraries
        snapshot = Path(hf.snapshot_download(name, revision=revision or None, **MODEL_FILES))
    path = snapshot / choose_model(snapshot, exp_name)
    print(f"model: {path.name} of {repo} at commit {snapshot.name}")
    return path


def choose_model(directory: Path, exp_name: str) -> str:
    """Return the name of a directory's model; UserError if it has none of this name."""
    files = [file.name for file in directory.glob("*") if file.is_file()]
    models = sorted(utils.filter_repo_objects(files, **MODEL_FILES))
    for name in (f"{exp_name}.cleanrl_model", f"{exp_name}.zip"):
        if name in models:
            return name
    if exp_name in ("dqn_atari", "dqn_atari_jax") and len(models) == 1:
        return models[0]
    has = f"; choose with --teacher-model-exp-name (enjoy: --exp-name) from {', '.join(models)}" if models else ""
    raise UserError(f"{str(directory)!r} has no file {exp_name}.cleanrl_model or {exp_name}.zip{has}")


def read_model(
    path: Path, library: Literal["torch", "flax"], networks: Mapping[N, Mapping[str, Any]]
) -> tuple[N, Arrays, bool]:
    """Read the weights of one of ``networks`` from a model file of any format.

    ``networks`` are those of ``library``, each with arrays of the names and shapes of its weights.

    Returns:
        The network, its weights, and whether its outputs are the logits of a policy instead of Q-values.

    Raises:
        UserError: the file is damaged or has the weights of another network.
    """
    problem = f"{path.as_posix()!r} is not a usable model"
    remedy = "docs/teachers.md lists the agents that can teach"
    remedy += "; a network of your own is read by the script that saved it (enjoy: --script)"
    with user_errors(problem, remedy, (OSError, ValueError)):
        arrays = read_arrays(path)
        is_policy = False
        if shapes(arrays) not in [shapes(network) for network in networks.values()]:
            arrays, is_policy = convert(arrays, library)
        return matching_network(arrays, networks), arrays, is_policy


def read_arrays(path: Path) -> Arrays:
    """Read the arrays of a model file, with the names of the library that wrote it; ValueError for a wrong file."""
    data = path.read_bytes()
    if data.startswith(LFS_POINTER):
        raise ValueError("it is a pointer of Git LFS; `git lfs pull` fetches the model")
    arrays = read_torch(data) if data.startswith(ZIP) else read_flax(data)
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name!r:.60} holds NaN or infinite values")
    return arrays


def shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array."""
    return {name: tuple(np.shape(array)) for name, array in arrays.items()}


def matching_network(arrays: Arrays, networks: Mapping[N, Mapping[str, Any]]) -> N:
    """Return the network with these names and shapes; ValueError if there is none."""
    found = shapes(arrays)
    closest = min(networks, key=lambda network: len(found.items() ^ shapes(networks[network]).items()))
    needed = shapes(networks[closest])
    if found == needed:
        return closest
    has = [layer for layer in found.items() if layer not in needed.items()]
    lacks = [layer for layer in needed.items() if layer not in found.items()]
    bias = next((name for name, shape in has if len(shape) == 1 and len(needed.get(name, ())) == 1), None)
    # Of all layers, only the last can have other outputs without another one that differs.
    if bias and len({re.sub(r"[./]\w+$", "", name) for name, _ in has + lacks}) == 1:
        atoms = next((len(array) for name, array in arrays.items() if name.endswith("atoms")), 1)  # of C51
        raise ValueError(f"it has {found[bias][0] // atoms} actions, and this game has {needed[bias][0] // atoms}")
    raise ValueError(f"its layers are not those of {type(closest).__name__}: it lacks {lacks[:2]} and has {has[:2]}")


def read_torch(data: bytes) -> Arrays:
    """Read a state dict from a file of PyTorch, from one of CleanRL's C51, or from stable-baselines3's zip."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        is_sb3 = {"data", "policy.pth"} <= set(archive.namelist())
        if is_sb3:
            num_actions = check_sb3(json.loads(archive.read("data")))  # pickles in it are text
            archive = zipfile.ZipFile(io.BytesIO(archive.read("policy.pth")))
        state_dict = TorchUnpickler(archive).load()
        if state_dict.keys() == {"model_weights", "args"}:  # C51
            state_dict = state_dict["model_weights"]
        arrays = {str(name): np.array(array, np.float32) for name, array in state_dict.items()}
    except Exception as error:  # damaged bytes can raise almost any
        raise ValueError(one_line(error)) from error
    return rename_sb3(arrays, num_actions) if is_sb3 else arrays


def check_sb3(settings: Mapping[str, Any]) -> int:
    """Return the number of actions; ValueError if a model of stable-baselines3 had another kind of observations."""
    space = settings["observation_space"]
    shape = space.get("_shape", space.get("shape"))
    if shape not in ([4, 84, 84], [84, 84, 4]):
        remedy = "train it with make_atari_env and VecFrameStack(env, n_stack=4)"
        raise ValueError(f"its observations have the shape {shape!r:.40} instead of four frames of 84×84; {remedy}")
    if not settings["policy_kwargs"].get("normalize_images", True):
        raise ValueError("it was trained with normalize_images=False; train it with the default, True")
    return int(settings["action_space"]["n"])


def rename_sb3(arrays: Arrays, num_actions: int) -> Arrays:
    """Give the layers of stable-baselines3 their names here."""
    weights = {}
    for key, array in arrays.items():
        name = re.sub(r"^(q_net\.|quantile_net\.|pi_)", "", key)
        if name.startswith("quantile_net.0."):  # output i·A + a is quantile i of action a; their mean is linear too
            array = array.reshape(-1, num_actions, *array.shape[1:]).mean(axis=0)
        for sb3_name, our_name in SB3_NAMES.items():
            name = name.replace(sb3_name, our_name)
        weights[name] = array
    return weights


class TorchUnpickler(pickle.Unpickler):
    """Read arrays from the zip archive that ``torch.save`` writes, without PyTorch and without running code from it."""

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
        full_name = f"{module}.{name}"
        if module not in ("collections", "torch", "torch._utils") or name not in known:
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


def read_flax(data: bytes) -> Arrays:
    """Read flax msgpack: parameters alone, CleanRL's [flags, parameters], and the files of its PPO and C51."""

    def unpack_array(_: int, data: bytes) -> np.ndarray:
        shape, dtype, data = msgpack.unpackb(data)
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)

    try:
        tree = msgpack.unpackb(data, ext_hook=unpack_array)
        if tree.keys() == {"0", "1"}:  # flags, parameters
            tree = tree["1"]
        if tree.keys() == {"0", "1", "2"}:  # PPO: network, actor, critic
            tree = {"params": tree["0"]["params"] | {"actor": tree["1"]["params"]["Dense_0"]}}
        if tree.keys() == {"model_weights", "args"}:  # C51
            atoms = np.linspace(*(tree["args"][name] for name in ("v_min", "v_max", "n_atoms")), dtype=np.float32)
            tree = {"params": tree["model_weights"]["params"] | {"atoms": atoms}}
        return {name: np.array(array, np.float32) for name, array in flatten(tree).items()}
    except Exception as error:  # damaged bytes can raise almost any
        raise ValueError(f"it is neither a PyTorch nor a flax model, or damaged ({one_line(error)})") from error


def convert(arrays: Arrays, library: Literal["torch", "flax"]) -> tuple[Arrays, bool]:
    """Convert arrays to the names and layouts of a library; return them, and whether they are those of a policy."""
    is_policy = not ACTOR.keys().isdisjoint(arrays)
    arrays = {ACTOR.get(name, name): array for name, array in arrays.items() if not name.startswith(NOT_ACTING)}
    is_flax = any(name.startswith("params/") for name in arrays)
    if is_flax != (library == "flax"):
        arrays = flax_to_torch(arrays) if is_flax else torch_to_flax(arrays)
    return arrays, is_policy


TEACHER_LAYERS = {"network.0": "Conv_0", "network.2": "Conv_1", "network.4": "Conv_2"}
TEACHER_LAYERS |= {"network.7": "Dense_0", "network.9": "Dense_1"}
STUDENT_LAYERS = {"network.5": "Dense_0", "network.7": "Dense_1"}
STUDENT_LAYERS |= {f"network.{i}.conv": f"ConvSequence_{i}/Conv_0" for i in range(3)}
STUDENT_LAYERS |= {
    f"network.{i}.res_block{j}.conv{k}": f"ConvSequence_{i}/ResidualBlock_{j}/Conv_{k}"
    for i, j, k in np.ndindex(3, 2, 2)
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
        if name == FIRST_DENSE and array.ndim == 2:
            array = array.reshape(len(array), -1, width, width).transpose(0, 2, 3, 1).reshape(len(array), -1)
        params[name] = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
    return params


def flax_to_torch(params: Arrays) -> Arrays:
    """Convert arrays to PyTorch's names and layouts: the inverse of :func:`torch_to_flax`."""
    names, width = STUDENT if "params/ConvSequence_0/Conv_0/kernel" in params else TEACHER
    torch_names = {name: torch_name for torch_name, name in names.items()}
    weights = {}
    for name, array in params.items():
        array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
        if name == FIRST_DENSE and array.ndim == 2:
            array = array.reshape(len(array), width, width, -1).transpose(0, 3, 1, 2).reshape(len(array), -1)
        weights[torch_names.get(name, name)] = array
    return weights


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries, with their keys joined by "/"."""
    flat = {}
    for name, node in tree.items():
        flat |= flatten(node, f"{prefix}{name}/") if isinstance(node, dict) else {f"{prefix}{name}": node}
    return flat
