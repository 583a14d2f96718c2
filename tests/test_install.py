"""Packaging: the files that pip, uv and Poetry install, and what the Makefile needs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from poetry.core.factory import Factory
from poetry.core.masonry.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
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
    for name in ("wandb", "imageio[ffmpeg]", "matplotlib"):  # every run draws its curves
        assert all(name in extras[extra] for extra in ("atari", "jax")), name
    assert "torch" not in extras["jax"]


@pytest.mark.posix
@pytest.mark.parametrize(
    ("statuses", "chosen", "venv_status"),
    [
        ((127, 127, 0, 0, 0), "python3.12", 0),
        ((127, 127, 127, 127, 0), "python3", 0),
        ((127, 127, 127, 1, 1), None, 0),
        ((0, 0, 0, 0, 0), "python3.14", 1),
    ],
)
def test_python_of_the_makefile(statuses: tuple, chosen: str | None, venv_status: int, tmp_path: Path) -> None:
    """The newest Python that runs and has venv makes the environment; without one, one line says what is needed.

    An incomplete environment is made again. If `venv` fails, nothing stays.
    """
    names = ("python3.14", "python3.13", "python3.12", "python3.11", "python3")
    for name, status in zip(names, statuses, strict=True):
        (tmp_path / name).write_text(
            f'#!/bin/sh\n[ $1 = -c ] && exit {status}\necho {name} $3 $4 > "{tmp_path}/made"\nexit {venv_status}\n'
        )
        (tmp_path / name).chmod(0o755)
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)  # Debian's Python without python3-venv leaves this behind
    # `make test PYTHON=python` hands PYTHON on in both of these variables.
    environ = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "PYTHON")}
    environ["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    command = ["make", f"VENV={venv}", f"{venv}/bin/python"]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert run.returncode == (0 if chosen and venv_status == 0 else 2)
    assert venv.exists() == (venv_status == 0)
    if chosen:
        assert (tmp_path / "made").read_text() == f"{chosen} --clear {venv}\n"
    else:
        (error,) = [line for line in run.stderr.splitlines() if not line.startswith("make")]
        assert error.startswith("error: ")
        assert "python3-venv" in error


@pytest.mark.parametrize("extra", ["atari", "jax", "test", "docs"])
def test_pinned_versions(extra: str) -> None:
    """They include the packages of the extra, and the project itself, so that the scripts find the helpers."""
    text = (ROOT / f"requirements/requirements-{extra}.txt").read_text()
    assert text.splitlines()[-1] == "-e ."
    pinned = re.findall(r"^[\w-]+(?===)", text, re.MULTILINE)
    for needed in PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"][extra]:
        assert re.match(r"[\w-]+", needed)[0].replace("_", "-") in pinned, needed
