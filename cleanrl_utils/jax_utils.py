"""What the JAX scripts share: device, memory, weights and a network as a NumPy function, saving."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from cleanrl_utils.checks import available_host_memory
from cleanrl_utils.evaluation import QFunction, pad_to_power_of_two
from cleanrl_utils.memory import keep_freed_memory
from cleanrl_utils.teachers import torch_to_flax, write_flax

Params = dict[str, Any]
"""A Flax network's variables, {"params": {layer: {"kernel": …, "bias": …}}}"""

Apply = Callable[[Params, jax.Array], jax.Array]
"""Variables and uint8 (B, 4, 84, 84) observations to float32 (B, num_actions) Q-values"""


def pick_device() -> bool:
    """Whether JAX computes on a CPU. Sets up malloc and the compilation cache: call it before anything else of JAX."""
    keep_freed_memory()
    # A CPU computes on the same cores in any case: handing a call to another thread only takes time.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    on_cpu = jax.default_backend() == "cpu"
    # Compiling for a GPU takes minutes, for a CPU seconds, and code for one processor may fail on another.
    if not on_cpu and jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(cache / "qdagger-jax"))
    return on_cpu


def available_memory() -> int:
    """Bytes that can still be allocated where JAX computes."""
    stats = jax.devices()[0].memory_stats()  # None on a CPU
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else available_host_memory()


def make_q_function(apply: Apply, params: Callable[[], Params]) -> QFunction:
    """A network as a function from uint8 (B, 4, 84, 84) to float32 (B, num_actions) NumPy arrays.

    Args:
        apply: jitted; Q-values of observations.
        params: returns the weights to use now.
    """

    def q_function(observation: np.ndarray) -> np.ndarray:
        return np.asarray(apply(params(), pad_to_power_of_two(observation)))[: len(observation)]

    return q_function


def params_of(weights: Mapping[str, np.ndarray], hidden_dtype: jnp.dtype = jnp.float32) -> Params:
    """Flax variables from arrays in the torch layout, as :func:`cleanrl_utils.teachers.read_weights` returns them.

    Args:
        hidden_dtype: of all layers but the last, ``Dense_1``. Rounded here once, weights are not in every call.
    """
    arrays = torch_to_flax(weights)
    params = {key: jnp.asarray(arrays[key], jnp.float32 if "Dense_1" in key else hidden_dtype) for key in arrays}
    return unflatten_dict(params, sep="/")


def save_model(params: Params, path: Path) -> None:
    """Writes the variables as msgpack that ``flax.serialization.from_bytes`` reads."""
    write_flax(path, {key: np.asarray(value) for key, value in flatten_dict(params, sep="/").items()})
