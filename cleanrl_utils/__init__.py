"""Helpers that the PyTorch and the JAX scripts in ``cleanrl/`` share."""

import importlib.util
import sys

if not importlib.util.find_spec("tyro"):
    activate = (
        "activate its environment, for example `source .venv/bin/activate`, or install it: pip install -e '.[atari]'"
    )
    print(f"error: {sys.executable} lacks the packages of this project; {activate}", file=sys.stderr)
    sys.exit(2)
