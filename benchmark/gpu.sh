#!/usr/bin/env bash
# Everything that is to be known of a GPU, in under nine minutes, as a Markdown file: the tests that need one, then the
# speed of both backends, as they are and without what is to make them fast. "gpu.sh FILE": gpu.md by default.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu.md}
python=${PYTHON:-python}
teacher=teachers/PongNoFrameskip-v4-dqn_atari-seed1
nvidia-smi >/dev/null 2>&1 || { echo "error: there is no NVIDIA GPU here (nvidia-smi finds none)" >&2; exit 2; }
{
    echo "# On a GPU"
    echo
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    echo
    echo "## Tests"
    echo
    echo '```text'
    QDAGGER_TEST_GPU=1 timeout 180 "$python" -m pytest -m gpu tests/test_gpu.py --tb=line || true
    echo '```'
    echo
    echo "## Speed"
    # The difference between a graph and eager execution is what launching costs.
    for flags in "" "--no-cuda-graph" "--compile" "--no-torch-deterministic" "--no-bf16" "--backend jax" "--backend jax --no-bf16"; do
        echo
        limit=35
        case $flags in *jax*) limit=90 ;; esac # XLA compiles
        # shellcheck disable=SC2086
        timeout $limit "$python" benchmark/throughput.py --teacher "$teacher" --seconds 2 --rounds 1 $flags ||
            echo "throughput.py $flags failed"
    done
} | tee "$out"
