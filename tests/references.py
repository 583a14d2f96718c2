"""References in float64 NumPy, written without PyTorch and JAX: networks and the softmax."""

import numpy as np

Weights = dict[str, np.ndarray]
"""A state dict in float64"""


def conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int = 1, padding: int = 0) -> np.ndarray:
    """Cross-correlate (B, C, H, W) with (O, C, K, K): a product for each place in the kernel."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    size = weight.shape[2]
    height, width = ((n - size) // stride + 1 for n in x.shape[2:])
    total = np.zeros((len(x), len(weight), height, width)) + bias[:, None, None]
    for i in range(size):
        for j in range(size):
            shifted = x[:, :, i : i + stride * height : stride, j : j + stride * width : stride]
            product = weight[:, :, i, j] @ shifted.reshape(*x.shape[:2], -1)
            total += product.reshape(total.shape)
    return total


def max_pool(x: np.ndarray) -> np.ndarray:
    """Take the 3×3 maximum with stride 2 and padding 1 on every side."""
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    height, width = ((n - 3) // 2 + 1 for n in x.shape[2:])
    windows = [x[:, :, i : i + 2 * height : 2, j : j + 2 * width : 2] for i in range(3) for j in range(3)]
    return np.maximum.reduce(windows)


def relu(x: np.ndarray) -> np.ndarray:
    """Compute max(x, 0)."""
    return np.maximum(x, 0)


def impala(weights: Weights, observation: np.ndarray) -> np.ndarray:
    """Compute the Q-values of the ImpalaCNN, float64 (B, num_actions)."""

    def layer(x: np.ndarray, name: str) -> np.ndarray:
        return conv(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    x = observation.astype(np.float64) / 255
    for i in range(3):
        x = max_pool(layer(x, f"network.{i}.conv"))
        for j in range(2):
            block = f"network.{i}.res_block{j}"
            x = x + layer(relu(layer(relu(x), f"{block}.conv0")), f"{block}.conv1")
    x = relu(x.reshape(len(x), -1))
    x = relu(x @ weights["network.5.weight"].T + weights["network.5.bias"])
    return x @ weights["network.7.weight"].T + weights["network.7.bias"]


def nature(weights: Weights, observation: np.ndarray) -> np.ndarray:
    """Compute the Q-values of the network of Mnih et al. (2015), float64 (B, num_actions)."""
    x = observation.astype(np.float64) / 255
    for index, stride in ((0, 4), (2, 2), (4, 1)):
        x = relu(conv(x, weights[f"network.{index}.weight"], weights[f"network.{index}.bias"], stride))
    x = relu(x.reshape(len(x), -1) @ weights["network.7.weight"].T + weights["network.7.bias"])
    return x @ weights["network.9.weight"].T + weights["network.9.bias"]


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Compute the logarithm of the softmax along the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
