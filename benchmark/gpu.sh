#!/usr/bin/env bash
# Run the tests that need an NVIDIA GPU, then measure the speed of both scripts with and without each optimisation.
# "gpu.sh FILE" names the Markdown file, gpu.md by default. Each result is written at once. It takes about 20 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu.md}
python=${PYTHON:-python}
sizes="--teacher-steps 50000 --offline-steps 3000 --online-steps 20000"
nvidia-smi >/dev/null 2>&1 || { echo "error: nvidia-smi finds no NVIDIA GPU; run this on a machine with one" >&2; exit 2; }
{
    echo "# On a GPU"
    echo
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    echo
    echo "## Tests"
    echo
    echo '```text'
    # On SIGINT, pytest still reports the failures so far.
    QDAGGER_TEST_GPU=1 timeout --signal INT --kill-after 10 400 "$python" -m pytest -m gpu tests/test_gpu.py -vv --tb=line ||
        true
    echo '```'
    echo
    echo "## Speed"
    # The difference between a graph and eager execution is the time to launch kernels.
    for flags in "" "--no-cuda-graph" "--no-torch-deterministic" "--no-torch-deterministic --compile" "--no-bf16" "--backend jax" "--backend jax --no-bf16"; do
        echo
        # shellcheck disable=SC2086
        timeout 300 "$python" benchmark/throughput.py $sizes $flags || echo "throughput.py $flags failed"
    done
} | tee "$out"
