"""Converts a model between the two published layouts: ``python -m cleanrl_utils.convert FROM TO``

A PyTorch state dict becomes flax msgpack, and the other way round: teachers and students, all of this project's
networks. The weights are the same to the last bit. PyTorch is needed in both directions, JAX in neither.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from cleanrl_utils.errors import UserError, one_line_errors
from cleanrl_utils.runs import atomic_write
from cleanrl_utils.teachers import TORCH_MAGIC, read_weights, torch_to_flax, write_flax


@dataclass
class Args:
    source: tyro.conf.Positional[Path]
    """the .cleanrl_model file to read, of either encoding"""
    target: tyro.conf.Positional[Path]
    """the file to write, in the other encoding"""


def convert(source: Path, target: Path) -> str:
    """Writes the model ``source`` to ``target`` in the other encoding, and returns that one's name, "torch" or "flax".

    Raises:
        UserError: ``source`` is no model, ``target`` exists or can't be written, or PyTorch is not installed.
    """
    weights = read_weights(source)
    if target.exists():
        raise UserError(f"{target} exists; give another file or remove it")
    try:
        import torch
    except ImportError as error:
        raise UserError(f"converting needs PyTorch ({error}); pip install torch") from error
    with source.open("rb") as file:
        to = "flax" if file.read(4).startswith(TORCH_MAGIC) else "torch"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if to == "flax":
            write_flax(target, torch_to_flax(weights))
        else:
            with atomic_write(target) as file:
                torch.save({key: torch.from_numpy(value) for key, value in weights.items()}, file)
    except OSError as error:
        raise UserError(f"{target} can't be written ({error.strerror or error}); give another file") from error
    return to


if __name__ == "__main__":
    with one_line_errors():
        cli = tyro.cli(Args)
        print(f"{cli.target} written in the {convert(cli.source, cli.target)} encoding")
