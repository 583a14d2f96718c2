#!/usr/bin/env bash
# Everything that is to be known of a GPU, in under 25 minutes, as a Markdown file: the tests that need one, then the
# speed of both backends, as they are and without what is to make them fast. "gpu.sh FILE": gpu.md by default. What is
# known is in the file at once, whatever stops the rest.
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
    # At the limit an interrupt, upon which pytest still says what failed.
    QDAGGER_TEST_GPU=1 timeout --signal INT --kill-after 10 400 "$python" -m pytest -m gpu tests/test_gpu.py -vv --tb=line ||
        true
    echo '```'
    echo
    echo "## Speed"
    # The difference between a graph and eager execution is what launching costs.
    for flags in "" "--no-cuda-graph" "--compile" "--no-torch-deterministic" "--no-bf16" "--backend jax" "--backend jax --no-bf16"; do
        echo
        limit=60
        case $flags in *jax* | *compile*) limit=240 ;; esac # XLA and Inductor compile
        # shellcheck disable=SC2086
        timeout $limit "$python" benchmark/throughput.py --teacher "$teacher" --seconds 2 --rounds 1 $flags ||
            echo "throughput.py $flags failed"
    done
} | tee "$out"
