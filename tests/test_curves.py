"""Curves as TensorBoard shows them, which keeps one point of a curve per step."""

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from helpers import GAME, NETWORKS, only, tiny, twin
from tensorboard import program


@pytest.mark.parametrize("script", list(NETWORKS), ids=lambda script: script.__name__)
@pytest.mark.usefixtures("small_networks", "no_evaluations")
def test_every_training_episode_is_shown(
    script: Any, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The episodes of all eight environments end in the same vector steps."""
    monkeypatch.setattr("cleanrl_utils.atari.MAX_FRAMES", 40)
    monkeypatch.chdir(tmp_path)
    args = tiny(teacher, num_envs=8, offline_steps=0, total_timesteps=400, learning_starts=320, env_id=GAME)
    script.main(twin(args, script))
    run_dir = only(Path("runs").iterdir())
    for tag in ("charts/episodic_return", "charts/episodic_length"):
        assert len(shown_by_tensorboard(run_dir, tag)) == 32


def shown_by_tensorboard(run_dir: Path, tag: str) -> list[list[float]]:
    """Return the points (wall time, step, value) of a curve that TensorBoard's server returns."""
    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", str(run_dir.parent), "--port", "0", "--bind_all=false"])
    url = server.launch()
    query = urlencode({"run": run_dir.name, "tag": tag})
    deadline = time.monotonic() + 60
    points: list[list[float]] = []
    while not points and time.monotonic() < deadline:
        try:
            points = json.load(urlopen(f"{url}data/plugin/scalars/scalars?{query}"))
        except OSError:  # not loaded yet
            time.sleep(0.2)
    return points
