"""Packaging: the files that pip, uv and Poetry install, and what the Makefile needs."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from poetry.core.factory import Factory
from poetry.core.masonry.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("cleanrl", "cleanrl_utils")


def test_packages_of_poetry_and_setuptools() -> None:
    """Both install every module of both packages, which `poetry install` refuses to do if it finds none."""
    files = WheelBuilder(Factory().create_poetry(ROOT)).find_files_to_add()
    found = {str(file.relative_to_source_root()) for file in files if file.path.suffix == ".py"}
    modules = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert found == modules
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted({str(Path(name).parent) for name in modules})


def test_extras_of_cleanrl() -> None:
    """`pip install '.[atari,video,track]'` and CleanRL's `poetry install -E "atari jax"` find their extras."""
    extras = {name: " ".join(needs) for name, needs in PROJECT["project"]["optional-dependencies"].items()}
    assert {"atari", "jax", "video", "track", "plot", "docs", "test"} == extras.keys()
    assert all(name in extras[extra] for extra in ("atari", "jax") for name in ("wandb", "imageio[ffmpeg]"))
    assert "torch" not in extras["jax"]


@pytest.mark.parametrize(
    ("statuses", "chosen"), [((127, 0, 0, 0), "python3.12"), ((127, 127, 127, 0), "python3"), ((127, 127, 1, 1), None)]
)
def test_python_of_the_makefile(statuses: tuple, chosen: str | None, tmp_path: Path) -> None:
    """The newest Python that runs and is supported makes the environment; without one, one line says what is needed."""
    for name, status in zip(("python3.13", "python3.12", "python3.11", "python3"), statuses, strict=True):
        (tmp_path / name).write_text(
            f'#!/bin/sh\n[ $1 = -c ] && exit {status}\necho {name} $3 $4 > "{tmp_path}/made"\n'
        )
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["make", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/bin/python"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if chosen:
        assert (tmp_path / "made").read_text() == f"{chosen} --clear {tmp_path}/venv\n"
    else:
        assert run.returncode == 2
        assert run.stderr.splitlines()[0].startswith("error: Python 3.11, 3.12 or 3.13 is needed")
