"""Layers that are fast on a CPU, what they compute in, and PyTorch's first weights."""

import contextlib
import functools
import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from cleanrl_utils.replay import STACK


def fast_dtype(bf16: bool, products: bool = False) -> jnp.dtype:
    """What hidden layers compute in: bfloat16 if ``bf16`` and it is faster where JAX computes, otherwise float32.

    On a GPU it is. On a CPU that has it in hardware, ``products`` of matrices are, but XLA has no fast convolutions.
    """
    in_hardware = jax.default_backend() != "cpu"
    if products and not in_hardware:
        with contextlib.suppress(OSError):  # not Linux
            in_hardware = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    return jnp.bfloat16 if bf16 and in_hardware else jnp.float32


def strongest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The maximum of each window, and its place in it, int8, 0 to 8 in reading order; the first where there are two."""
    rows, columns = (x.shape[1] + 1) // 2, (x.shape[2] + 1) // 2
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    windows = [x[:, i : i + 2 * rows - 1 : 2, j : j + 2 * columns - 1 : 2] for i in range(3) for j in range(3)]
    best, place = windows[0], jnp.zeros(windows[0].shape, jnp.int8)
    for k, candidate in enumerate(windows[1:], start=1):
        better = candidate > best
        best, place = jnp.where(better, candidate, best), jnp.where(better, jnp.int8(k), place)
    return best, place


@jax.custom_vjp
def max_pool(x: jax.Array) -> jax.Array:
    """3×3 maximum with stride 2 and a pixel of padding on every side: (B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, C).

    The same as ``flax.linen.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))``, also in that the first of several maxima
    gets the gradient. XLA's own gradient, a select-and-scatter, is many times slower on a CPU.
    """
    return strongest(x)[0]


def max_pool_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, np.ndarray]]:
    best, place = strongest(x)
    return best, (place, np.empty((0, *x.shape[1:3])))  # the gradient needs the size of x, not x


def max_pool_backward(residual: tuple[jax.Array, np.ndarray], gradient: jax.Array) -> tuple[jax.Array]:
    place, (_, height, width) = residual[0], residual[1].shape
    batch, rows, columns, channels = place.shape
    # Window (i, j) covers the rows 2i - 1 … 2i + 1. So an even row lies in the middle of one window, and an odd one at
    # the end of one and the beginning of the next: each of the four kinds of pixels gathers from its own few windows.
    place = jnp.pad(place, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=-1)
    gradient = jnp.pad(gradient, ((0, 0), (0, 1), (0, 1), (0, 0)))

    def given(k: int, i: int, j: int) -> jax.Array:
        """What the window i rows and j columns further gives to the pixel at its place k."""
        window = slice(None), slice(i, i + rows), slice(j, j + columns)
        return jnp.where(place[window] == k, gradient[window], 0)

    even = jnp.stack([given(4, 0, 0), given(5, 0, 0) + given(3, 0, 1)], axis=3)
    odd = jnp.stack(
        [given(7, 0, 0) + given(1, 1, 0), given(8, 0, 0) + given(6, 0, 1) + given(2, 1, 0) + given(0, 1, 1)], axis=3
    )
    pixels = jnp.stack([even, odd], axis=2).reshape(batch, 2 * rows, 2 * columns, channels)
    return (pixels[:, :height, :width],)


max_pool.defvjp(max_pool_forward, max_pool_backward)


class StridedConv(nn.Module):
    """``flax.linen.Conv`` without padding, and its parameters: (B, H, W, C) → (B, H', W', features).

    On a CPU it is a product of two matrices, and float32 whatever ``dtype`` they have: there XLA multiplies bfloat16
    faster than float32, but has no fast convolution of it.

    Args:
        features: channels of the result.
        size: of the kernel, a multiple of the stride; if the stride is more than 1, it divides H and W too.
        stride: pixels from one window to the next.
        dtype: what is multiplied; on a GPU also the result's.
    """

    features: int
    size: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stride, blocks, (batch, height, width, channels) = self.stride, self.size // self.stride, x.shape
        kernel_shape = (self.size, self.size, channels, self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), kernel_shape).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        x = x.astype(self.dtype)
        if jax.default_backend() != "cpu":
            layout = ("NHWC", "HWIO", "NHWC")
            result = jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=layout)
            return result + bias.astype(self.dtype)

        # Image and kernel as blocks of stride × stride pixels: a window is then blocks × blocks blocks of the image.
        rows, columns = height // stride, width // stride
        image = x.reshape(batch, rows, stride, columns, stride, channels).transpose(0, 1, 3, 2, 4, 5)
        kernel = kernel.reshape(blocks, stride, blocks, stride, channels, self.features).transpose(1, 3, 4, 0, 2, 5)
        size = stride * stride * channels
        products = jnp.matmul(
            image.reshape(-1, size), kernel.reshape(size, -1), preferred_element_type=jnp.float32
        ).reshape(batch, rows, columns, blocks, blocks, self.features)
        # Each block has been multiplied by all of the kernel's; a window sums what its own blocks give at their places.
        below, right = rows - blocks + 1, columns - blocks + 1
        return bias + sum(products[:, i : i + below, j : j + right, i, j] for i in range(blocks) for j in range(blocks))


DenseInFloat32 = functools.partial(
    nn.Dense, dot_general=functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
)
"""``flax.linen.Dense`` with sums, and so a result, in float32, whatever ``dtype`` is multiplied"""


def of_action(q_values: jax.Array, action: jax.Array) -> jax.Array:
    """The Q-values, (B,) of (B, A), of the actions, integer (B,).

    A sum over what is equal, and not an index: the gradient of one is a scatter, which XLA has no good kernel for on a
    GPU.
    """
    return jnp.sum(q_values, axis=1, where=jnp.arange(q_values.shape[1]) == action[:, None])


def first_params(network: nn.Module, key: jax.Array) -> dict[str, Any]:
    """A new network's variables, float32: kernels and biases uniform in ±1/√fan_in, as PyTorch's layers begin.

    flax's biases begin as zeros. An ImpalaCNN that does so too can lose all of its hidden units to ReLU's flat half in
    the first hundred updates of a large learning rate; it then returns the same Q-values for every observation.
    """
    shapes = jax.eval_shape(network.init, key, np.zeros((1, STACK, 84, 84), np.uint8))
    params = {}
    for layer, arrays in flatten_dict(shapes, is_leaf=lambda path, node: "kernel" in node).items():
        bound = math.prod(arrays["kernel"].shape[:-1]) ** -0.5
        for name, array in arrays.items():
            key, own_key = jax.random.split(key)
            params[(*layer, name)] = jax.random.uniform(own_key, array.shape, array.dtype, -bound, bound)
    return unflatten_dict(params)
