#!/usr/bin/env bash
# The teacher that teachers/PongNoFrameskip-v4-dqn_atari-seed1 is kept for. Not run to its end yet: at 1,000,000 steps
# the same training (commit d8e3ed6, --total-timesteps 1000000 --exploration-fraction 0.05) scored 13.9 ± 4.8 over 30
# games. --learning-rate 2.5e-4 had learned nothing by 380,000 steps, where 1e-4 was at -15.
set -euo pipefail
cd "$(dirname "$0")/.."
python cleanrl/dqn_atari.py --env-id PongNoFrameskip-v4 --seed 2 --total-timesteps 1600000 --n-step 3 \
    --learning-starts 10000 --exploration-fraction 0.03125 --buffer-size 300000 --eval-episodes 30 --save-model \
    --capture-video "$@"
