#!/usr/bin/env bash
# The teacher that teachers/PongNoFrameskip-v4-dqn_atari-seed1 is kept for.
set -euo pipefail
cd "$(dirname "$0")/.."
python cleanrl/dqn_atari.py --env-id PongNoFrameskip-v4 --total-timesteps 1000000 --n-step 3 --learning-starts 10000 \
    --learning-rate 2.5e-4 --exploration-fraction 0.05 --buffer-size 300000 --eval-episodes 30 --save-model --capture-video
