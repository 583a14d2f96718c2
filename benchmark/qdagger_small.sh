#!/usr/bin/env bash
# Small enough for two CPU cores: Pong from the embedded teachers and, with as many updates, from scratch; three seeds.
# On one core each, a run takes some 40 minutes in PyTorch and, by its slower updates, more than twice that in JAX.
# Flags for the runner may follow.
set -euo pipefail
cd "$(dirname "$0")/.."
small() { # script, what its name ends in, further flags
    # A larger learning rate while the teacher's data lasts: 2,000 updates are few. Four games: ten are to end soon.
    python -m cleanrl_utils.benchmark --env-ids PongNoFrameskip-v4 --num-seeds 3 --workers 2 --command "python
        cleanrl/$1.py --exp-name $1$2 --learning-rate 1e-3 --online-learning-rate 1e-4 --warmup-updates 300
        --n-step 3 --num-envs 4 --teacher-steps 20000 --offline-eval-frequency 2000 --learning-starts 1000
        --buffer-size 50000 --teacher-eval-episodes 30 --eval-episodes 30 --save-model $3" "${flags[@]}" || [ $? = 1 ]
}
flags=("$@")
torch=qdagger_dqn_atari_impalacnn jax=qdagger_dqn_atari_jax_impalacnn teacher=teachers/PongNoFrameskip-v4-dqn_atari
small $torch "" "--teacher-policy-hf-repo $teacher-seed1 --offline-steps 2000 --total-timesteps 50000"
small $torch -from-scratch "--teacher-policy-hf-repo $teacher-seed1 --offline-steps 0 --distill-coefficient 0
    --total-timesteps 58000"
small $jax "" "--teacher-policy-hf-repo ${teacher}_jax-seed1 --offline-steps 2000 --total-timesteps 50000"
