#!/bin/sh
# Run the tests that need an NVIDIA GPU, then measure the speed of both scripts on it: [PYTHON=python] benchmark/gpu.sh
# PYTHON has the packages of the extra `test`, and PyTorch or JAX with CUDA. Nothing is installed.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
torch=
jax=
if "$python" -c 'import torch; torch.zeros(1, device="cuda").item()' 2>/dev/null; then torch=1; fi
if "$python" -c 'import jax; jax.devices("cuda")' 2>/dev/null; then jax=1; fi
if [ ! "$torch$jax" ]; then
    echo "error: neither PyTorch nor JAX of $python can use a GPU; set PYTHON to a Python with builds for CUDA" >&2
    exit 2
fi
measure() { # flags of throughput.py
    "$python" benchmark/throughput.py --offline-steps 2000 --online-steps 6000 "$@"
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
QDAGGER_TEST_GPU=1 "$python" -m pytest -m gpu tests/test_gpu.py
if [ "$torch" ]; then
    measure
    measure --compile
    measure --no-torch-deterministic
    measure --no-torch-deterministic --compile
fi
if [ "$jax" ]; then
    measure --backend jax
fi
