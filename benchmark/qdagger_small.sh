#!/usr/bin/env bash
# What this repository measured on two CPU cores: Pong from the embedded teachers, three seeds, at the default
# temperature and at CleanRL's. On one core each, a run takes about 25 minutes in PyTorch and 55 in JAX.
# Flags for the runner may follow.
set -euo pipefail
cd "$(dirname "$0")/.."
for jax in "" _jax; do
    for temperature in 0.1 1; do
        # Ten times the default learning rate: 4,000 updates are few. Half the games: in so few steps, more would not end.
        python -m cleanrl_utils.benchmark --env-ids PongNoFrameskip-v4 --num-seeds 3 --workers 2 --command \
            "python cleanrl/qdagger_dqn_atari${jax}_impalacnn.py
            --teacher-policy-hf-repo teachers/PongNoFrameskip-v4-dqn_atari${jax}-seed1
            --exp-name qdagger_dqn_atari${jax}_impalacnn-tau$temperature --temperature $temperature
            --teacher-steps 20000 --offline-steps 4000 --offline-eval-frequency 4000
            --total-timesteps 20000 --learning-starts 1000 --buffer-size 20000 --learning-rate 1e-3 --num-envs 8
            --teacher-eval-episodes 30 --eval-episodes 30 --save-model" "$@" || [ $? = 1 ]
    done
done
