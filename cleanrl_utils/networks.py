"""Networks: initialise those of flax, and write the model files of both libraries."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cleanrl_utils.checks import DIVERGED
from cleanrl_utils.errors import UserError
from cleanrl_utils.files import atomic_write


def init_like_pytorch(network: Any, key: Any, observation: Any) -> dict[str, Any]:
    """Initialise the variables of a flax network.

    Layers with a kernel are initialised as in PyTorch, uniformly in ±1/√fan_in, and others as in flax. With flax's
    biases of 0 an ImpalaCNN may collapse.
    """
    import jax
    from flax.traverse_util import flatten_dict, unflatten_dict

    variables = flatten_dict(jax.jit(network.init)(key, observation))
    for (*layer, name), array in variables.items():
        kernel = variables.get((*layer, "kernel"))
        if kernel is not None:
            key, own_key = jax.random.split(key)
            bound = math.prod(kernel.shape[:-1]) ** -0.5
            variables[(*layer, name)] = jax.random.uniform(own_key, array.shape, array.dtype, -bound, bound)
    return unflatten_dict(variables)


def save_torch(path: Path, state_dict: Mapping[str, Any]) -> None:
    """Save a state dict, on the CPU and contiguous; raise a UserError if it has NaN or infinite values."""
    import torch

    check_finite(state_dict.values())
    weights = {name: array.cpu().contiguous() for name, array in state_dict.items()}
    with atomic_write(path) as file:
        torch.save(weights, file)


def save_flax(path: Path, variables: dict[str, Any]) -> None:
    """Save variables as msgpack that ``flax.serialization.from_bytes`` reads; UserError for NaN or infinite values."""
    import jax
    from flax.serialization import to_bytes

    check_finite(jax.tree.leaves(variables))
    with atomic_write(path) as file:
        file.write(to_bytes(variables))


def check_finite(arrays: Iterable[Any]) -> None:
    """Raise a UserError if an array of PyTorch or JAX has a NaN or infinite value."""
    for array in arrays:
        if not abs(array).max() < math.inf:
            raise UserError(DIVERGED)
