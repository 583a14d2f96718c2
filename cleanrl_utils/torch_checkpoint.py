"""PyTorch's state as part of a checkpoint: networks, optimizer, random numbers, a replay on the device."""

from typing import Any

import numpy as np
import torch
import torch.nn as nn

from cleanrl_utils.checkpoint import final_row


class ModuleState:
    """A network as part of a checkpoint (`cleanrl_utils.resume.Part`)."""

    def __init__(self, module: nn.Module):
        self.module = module

    def save(self) -> dict[str, np.ndarray]:
        """The state dict."""
        return {key: to_array(value) for key, value in self.module.state_dict().items()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Takes over what :meth:`save` returned."""
        self.module.load_state_dict({key: torch.from_numpy(value) for key, value in state.items()})


class OptimizerState:
    """What an optimizer keeps for each parameter; its settings come from the flags."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def save(self) -> list[dict[str, np.ndarray]]:
        """One dict per parameter; empty before the first update."""
        return [
            {name: to_array(value) for name, value in self.optimizer.state.get(parameter, {}).items()}
            for parameter in self._parameters
        ]

    def load(self, state: list[dict[str, np.ndarray]]) -> None:
        """Takes over what :meth:`save` returned."""
        for parameter, values in zip(self._parameters, state, strict=True):
            for name, value in values.items():
                tensor = torch.from_numpy(value).to(parameter.device)
                # A fused Adam pairs the elements as they lie in memory: averages need the layout of their parameter.
                same_shape = tensor.shape == parameter.shape
                tensor = torch.empty_like(parameter).copy_(tensor) if same_shape else tensor
                self.optimizer.state[parameter][name] = tensor.detach()


class GlobalRandomState:
    """PyTorch's own random generator on the CPU."""

    def save(self) -> np.ndarray:
        """uint8, as PyTorch has it."""
        return to_array(torch.get_rng_state())

    def load(self, state: np.ndarray) -> None:
        """Takes over what :meth:`save` returned."""
        torch.set_rng_state(torch.from_numpy(state))


class ReplayState:
    """A script's replay as part of a checkpoint (`cleanrl_utils.checkpoint.ReplayRows`)."""

    def __init__(self, replay: Any):
        self.replay = replay
        shape = (replay.length, replay.num_envs)
        self.arrays = {
            name: value
            for name, value in vars(replay).items()
            if isinstance(value, torch.Tensor) and value.shape[:2] == shape
        }

    @property
    def length(self) -> int:
        return self.replay.length

    @property
    def rows_written(self) -> int:
        return self.replay.rows_written

    def read(self, low: int, high: int) -> dict[str, np.ndarray]:
        """The rows in slots ``[low, high)``; views, if the replay is on the CPU."""
        return {name: to_array(value[low:high]) for name, value in self.arrays.items()}

    def write(self, low: int, rows: dict[str, np.ndarray]) -> None:
        """Puts rows into the slots from ``low`` on."""
        for name, value in rows.items():
            self.arrays[name][low : low + len(value)] = torch.from_numpy(value).to(self.replay.frame.device)

    def cut_games(self, frame: np.ndarray) -> None:
        """Adds the row that ends all games as a truncation; uint8 (num_envs, 84, 84)."""
        self.write(self.rows_written % self.length, final_row(self, frame, self.replay.env_age))
        self.replay.env_age = np.zeros_like(self.replay.env_age)
        self.replay.rows_written += 1

    def save(self) -> dict[str, Any]:
        """What there is beside the rows."""
        return {
            "rows_written": self.replay.rows_written,
            "env_age": self.replay.env_age,
            "generator": to_array(self.replay.generator.get_state()),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`save` returned. A generator of another device's kind is left as it was seeded."""
        self.replay.rows_written, self.replay.env_age = state["rows_written"], state["env_age"]
        if state["generator"].shape == tuple(self.replay.generator.get_state().shape):
            self.replay.generator.set_state(torch.from_numpy(state["generator"]))


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as a C-contiguous array; no copy if it is one on the CPU."""
    return np.asarray(tensor.detach().cpu().numpy(), order="C")
