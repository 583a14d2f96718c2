#!/bin/sh
# DQN teachers for the games of qdagger.sh: three seeds, both libraries, full size. Use a GPU.
# Arguments are passed to the runner, such as --workers 4.
set -eu
cd "$(dirname "$0")/.."
for script in dqn_atari dqn_atari_jax; do
    # A failed run (exit code 1) does not stop the other library's.
    python -m cleanrl_utils.benchmark --env-ids PongNoFrameskip-v4 BreakoutNoFrameskip-v4 BeamRiderNoFrameskip-v4 \
        --command "python cleanrl/$script.py" \
        --num-seeds 3 --workers 1 "$@" || [ $? = 1 ]
done
