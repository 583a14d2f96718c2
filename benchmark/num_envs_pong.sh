#!/usr/bin/env bash
# QDagger on Pong with one game at a time and with the default of 16, two seeds each: the curves of "Parallel games" in
# the docs. Half an hour to 45 minutes a run on one CPU core.
set -euo pipefail
cd "$(dirname "$0")/.."
for num_envs in 16 1; do
    for seed in 1 2; do
        # Few offline updates leave something to learn online; each of 16 games gets time for one and a half or two.
        python cleanrl/qdagger_dqn_atari_impalacnn.py --env-id PongNoFrameskip-v4 --seed "$seed" --num-envs "$num_envs" \
            --teacher-policy-hf-repo teachers/PongNoFrameskip-v4-dqn_atari-seed1 --exp-name "games-$num_envs" \
            --save-model --learning-rate 1e-3 --warmup-updates 300 \
            --teacher-steps 40000 --offline-steps 2000 --offline-eval-frequency 2000 \
            --total-timesteps 60000 --learning-starts 1000 --buffer-size 60000 \
            --teacher-eval-episodes 30 --eval-episodes 30 "$@"
    done
done
python benchmark/report.py runs/PongNoFrameskip-v4__games-* --curve num_envs.png
