#!/usr/bin/env bash
# The small Pong experiment of README: three seeds at the default temperature, and the same at temperature 1.
# About 25 minutes a run on one CPU core (taskset): two such runs side by side beat two threads in each.
# "qdagger_pong.sh jax": the same in JAX, about 55 minutes a run. Flags for the script may follow, such as
# --warmup-updates 300.
set -euo pipefail
cd "$(dirname "$0")/.."
jax=
if [ "${1:-}" = jax ]; then jax=_jax && shift; fi
for temperature in 0.1 1; do
    for seed in 1 2 3; do
        # Ten times the default learning rate: 4,000 updates are few. Half the games: in so few steps, more would not end.
        python "cleanrl/qdagger_dqn_atari${jax}_impalacnn.py" --env-id PongNoFrameskip-v4 --seed "$seed" \
            --teacher-policy-hf-repo "teachers/PongNoFrameskip-v4-dqn_atari${jax}-seed1" --temperature "$temperature" \
            --exp-name "qdagger_dqn_atari${jax}_impalacnn-tau$temperature" --save-model --learning-rate 1e-3 --num-envs 8 \
            --teacher-steps 20000 --offline-steps 4000 --offline-eval-frequency 4000 \
            --total-timesteps 20000 --learning-starts 1000 --buffer-size 20000 \
            --teacher-eval-episodes 30 --eval-episodes 30 "$@"
    done
done
python benchmark/report.py runs/PongNoFrameskip-v4__qdagger_dqn_atari"${jax}"_impalacnn-tau*
