#!/bin/sh
# Most runs of docs/results.md: students of the embedded teachers, ablations and training from scratch.
# On one core of an AMD EPYC with AVX512-BF16, 50,000 online steps take about 30 minutes in PyTorch and an hour in JAX.
# Arguments are passed to the runner. `only=REGEX benchmark/qdagger_small.sh` selects runs by "{game} {exp_name}".
set -eu
cd "$(dirname "$0")/.."

torch=qdagger_dqn_atari_impalacnn
jax=qdagger_dqn_atari_jax_impalacnn
pong=teachers/PongNoFrameskip-v4-dqn_atari-seed1
breakout=teachers/BreakoutNoFrameskip-v4-dqn_atari-seed1
beam_rider=teachers/BeamRiderNoFrameskip-v4-dqn_atari-seed1
# The training of this teacher was stopped after 1.1 million steps in the results.
ppo=runs/BreakoutNoFrameskip-v4__ppo_teacher__1
# The teacher of the second generation is a student of Pong.
student="runs/PongNoFrameskip-v4__${torch}__2__*"

taught="--offline-steps 2000 --total-timesteps 50000"
longer="--offline-steps 2000 --total-timesteps 100000 --exploration-fraction 0.05" # the same schedule of epsilon
longest="--offline-steps 2000 --total-timesteps 150000 --exploration-fraction 0.0333"
scratch="--offline-steps 0 --distill-coefficient 0 --total-timesteps 58000" # as many updates

run() { # arguments of the runner
    # A failed run (exit code 1) does not stop the others.
    python -m cleanrl_utils.benchmark --workers 2 "$@" </dev/null || [ $? = 1 ]
}

# A row of the table is a variant: game, seeds, name, teacher, further flags.
while read -r game seeds name teacher flags; do
    case $game in "#" | "") continue ;; esac
    echo "$game $name" | grep -Eq -- "${only:-.}" || continue
    case $name in "$jax"*) script=$jax ;; *) script=$torch ;; esac
    if [ "$teacher" = "$ppo" ]; then
        echo "$game $name: its teacher comes first, a PPO agent that trains for 1,100,000 steps" >&2
        run --env-ids BreakoutNoFrameskip-v4 --num-seeds 1 \
            --command "python benchmark/ppo_teacher.py --total-timesteps 1100000" "$@"
    fi
    for path in $teacher; do teacher=$path; done # the newest directory
    # 2,000 offline updates need a larger learning rate. With four environments, ten episodes end early in the run.
    run --env-ids "${game}NoFrameskip-v4" --num-seeds "$seeds" --command "python cleanrl/$script.py --exp-name $name
        --learning-rate 1e-3 --online-learning-rate 1e-4 --warmup-updates 300 --n-step 3 --num-envs 4
        --teacher-steps 20000 --offline-eval-frequency 2000 --learning-starts 1000 --buffer-size 50000
        --teacher-eval-episodes 30 --eval-episodes 30 --teacher-policy-hf-repo $teacher $flags" "$@"
done <<EOF
Pong      3 $torch                      $pong       $taught
Breakout  3 $torch                      $breakout   $taught
BeamRider 3 $torch                      $beam_rider $taught
Pong      3 $jax                        $pong       $taught
Pong      3 $torch-from-scratch         $pong       $scratch
Breakout  3 $torch-from-scratch         $breakout   $scratch
BeamRider 3 $torch-from-scratch         $beam_rider $scratch
Pong      3 $torch-100k                 $pong       $longer
BeamRider 3 $torch-100k                 $beam_rider $longer
# In Pong, differences of one point matter here, so the evaluation has 100 episodes.
Pong      3 $torch-100k-final-1e-5      $pong       $longer --final-learning-rate 1e-5 --eval-episodes 100
Breakout  3 $torch-100k-final-1e-5      $breakout   $longer --final-learning-rate 1e-5
BeamRider 3 $torch-100k-final-1e-5      $beam_rider $longer --final-learning-rate 1e-5
# λ reacts late in BeamRider, because its episodes are long.
BeamRider 3 $torch-150k-final-1e-5      $beam_rider $longest --final-learning-rate 1e-5 --eval-episodes 100
# A short run, with a precise evaluation.
Pong      3 $torch-demo                 $pong       --offline-steps 2000 --total-timesteps 16000 --n-step 1 \
    --buffer-size 16000 --eval-episodes 100
# The flags of make demo.
Breakout  5 demo teachers/BreakoutNoFrameskip-v4-ppo-seed1 --offline-steps 2000 --total-timesteps 10000 \
    --distill-coefficient 6 --start-e 0.1 --train-frequency 16 --buffer-size 10000 --final-learning-rate 1e-5 \
    --teacher-eval-episodes 20 --eval-episodes 20
# Q-learning alone can collapse in the offline phase at a learning rate of 1e-3.
Pong      3 $torch-offline-only         $pong       $taught --distill-coefficient 0
Breakout  3 $torch-offline-only         $breakout   $taught --distill-coefficient 0
Pong      3 $torch-offline-only-1e-4    $pong       $taught --distill-coefficient 0 --learning-rate 1e-4
Breakout  3 $torch-offline-only-1e-4    $breakout   $taught --distill-coefficient 0 --learning-rate 1e-4
BeamRider 3 $torch-offline-only-1e-4    $beam_rider $taught --distill-coefficient 0 --learning-rate 1e-4
Pong      3 $torch-kickstarting         $pong       --offline-steps 0 --total-timesteps 58000
Pong      3 $torch-temperature-1        $pong       $taught --temperature 1
Pong      3 $torch-1-step               $pong       $taught --n-step 1
Pong      3 $torch-learning-starts-5000 $pong       $taught --learning-starts 5000
Pong      3 $torch-buffer-10000         $pong       $taught --buffer-size 10000
Pong      3 $torch-target-100           $pong       $taught --target-network-frequency 100
Breakout  3 $torch-target-100           $breakout   $taught --target-network-frequency 100
Pong      3 $torch-second-generation    $student    $taught --teacher-model-exp-name $torch
Breakout  3 $torch-ppo                  $ppo        $taught
Breakout  3 $jax-ppo                    $ppo        $taught
# A longer run. In the results, two seeds were ended after 352,000 and 184,000 steps.
Breakout  3 $torch-1M-final-1e-5        $breakout   --offline-steps 2000 --total-timesteps 1000000 \
    --buffer-size 300000 --exploration-fraction 0.005 --final-learning-rate 1e-5 --eval-episodes 100
EOF
