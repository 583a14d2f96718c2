"""Curves as TensorBoard shows them, which keeps one point of a curve per step."""

import contextlib
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
    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", "runs", "--port", "0"])
    url = server.launch()
    for tag in ("charts/episodic_return", "charts/episodic_length"):
        query = urlencode({"run": run_dir.name, "tag": tag})
        assert len(read_json(f"{url}data/plugin/scalars/scalars?{query}")) == 32


def read_json(url: str) -> Any:
    """Read from a server that may not have loaded its data yet."""
    for _ in range(300):
        with contextlib.suppress(OSError):
            return json.load(urlopen(url))
        time.sleep(0.2)
    raise TimeoutError(url)
