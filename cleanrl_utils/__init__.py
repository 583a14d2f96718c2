"""Helpers that the PyTorch and the JAX scripts in ``cleanrl/`` share."""

import importlib.util
import sys

if not importlib.util.find_spec("tyro"):
    remedy = "`source .venv/bin/activate`, or `pip install -e '.[atari]'`"
    print(f"error: {sys.executable} lacks the packages of this project; {remedy}", file=sys.stderr)
    sys.exit(2)
