"""Packaging: the files that pip, uv and Poetry install, and the Python that they use."""

import re
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
    for name in ("wandb", "imageio[ffmpeg]", "matplotlib", "pandas"):  # every run draws its curves
        assert all(name in extras[extra] for extra in ("atari", "jax")), name
    assert "torch" not in extras["jax"]


@pytest.mark.parametrize("extra", ["atari", "jax", "test", "docs"])
def test_pinned_versions(extra: str) -> None:
    """They include the packages of the extra, and the project itself, so that the scripts find the helpers."""
    text = (ROOT / f"requirements/requirements-{extra}.txt").read_text()
    assert text.splitlines()[-1] == "-e ."
    pinned = re.findall(r"^[\w-]+(?===)", text, re.MULTILINE)
    for needed in PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"][extra]:
        assert re.match(r"[\w-]+", needed)[0].replace("_", "-") in pinned, needed
