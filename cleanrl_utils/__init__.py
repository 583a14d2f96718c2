"""Helpers that the PyTorch and the JAX scripts in ``cleanrl/`` share."""
