#!/usr/bin/env bash
# Measure the speed of both scripts on an NVIDIA GPU, run the tests that need one, or profile an update:
#
#     [PYTHON=python] benchmark/gpu.sh speed|tests|profile [FILE]
#
# Each ends within 5 minutes. Every line is also written to FILE, gpu-speed.md for example, as soon as it is printed.
# PYTHON has PyTorch or JAX with CUDA and the other packages that the scripts or tests import. Nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
task=${1:-}
python=${PYTHON:-python}
out=${2:-gpu-$task.md}
export PYTHONUNBUFFERED=1

# Print the seconds that are left of the task.
left() {
    echo $((SECONDS < 285 ? 290 - SECONDS : 5))
}

# The most important comes first, as the limit may cut off the last.
speed() {
    for flags in "--backend torch" "--backend jax" "--no-torch-deterministic --compile" "--no-torch-deterministic" "--compile"; do
        library=torch
        [[ $flags != *jax* ]] || library=jax
        [[ $libraries == *$library* ]] || continue
        # shellcheck disable=SC2086
        timeout "$(left)" "$python" benchmark/throughput.py --offline-steps 2000 --online-steps 6000 $flags ||
            echo "throughput.py $flags failed, or the time was up"
        echo
    done
}

tests() {
    # After SIGINT, pytest still reports the failures so far, unless a script's `main` in its process takes the signal.
    QDAGGER_TEST_GPU=1 timeout --signal INT --kill-after 5 "$(left)" \
        "$python" -m pytest -m gpu tests/test_gpu.py -vv --tb=short
}

profile() {
    for flags in "" "--no-torch-deterministic" "--no-torch-deterministic --compile"; do
        printf '\n## %s\n\n' "${flags:-default flags}"
        # shellcheck disable=SC2086
        timeout "$(left)" "$python" benchmark/profile_update.py $flags || echo "it failed, or the time was up"
    done
}

if [[ ! $task =~ ^(speed|tests|profile)$ ]]; then
    echo "error: the task is \"$task\"; it must be speed, tests or profile" >&2
    exit 2
fi
libraries=""
missing=""
for test in 'import torch; torch.zeros(1, device="cuda").item()' 'import jax; jax.devices("cuda")'; do
    library=${test%%;*}
    library=${library#import }
    if "$python" -c "$test" >/dev/null 2>&1; then libraries+=" $library"; else missing+=" $library"; fi
done
if [[ ! $libraries ]]; then
    echo "error: neither PyTorch nor JAX of $python can use a GPU; set PYTHON to a Python with builds for CUDA" >&2
    exit 2
fi
echo "writing $out"
{
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    echo "can use it:$libraries; can't use it:${missing:- none}"
    echo
    "$task"
} 2>&1 | tee "$out"
