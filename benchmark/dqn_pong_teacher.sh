#!/usr/bin/env bash
# The training of teachers/PongNoFrameskip-v4-dqn_atari-seed1, whose card tells how it went: about 90 minutes on one core.
set -euo pipefail
cd "$(dirname "$0")/.."
python cleanrl/dqn_atari.py --env-id PongNoFrameskip-v4 --seed 2 --num-envs 8 --total-timesteps 829024 --n-step 3 \
    --learning-starts 10000 --exploration-fraction 0.0603 --buffer-size 300000 --eval-episodes 30 --save-model \
    --capture-video "$@"
