#!/usr/bin/env bash
# The runs of docs/results.md: students of the embedded teachers, ablations and training from scratch, three seeds each.
# On one core of an AMD EPYC with AVX512-BF16, 50,000 online steps take about 30 minutes in PyTorch and an hour in JAX.
# Arguments are passed to the runner. `only=REGEX benchmark/qdagger_small.sh` selects runs by "{game} {exp_name}".
set -euo pipefail
cd "$(dirname "$0")/.."
folder=cleanrl
selected() { [[ $1 =~ ${only:-.} ]]; }
small() { # game, script, suffix of the name, teacher, further flags
    selected "$1 ${name:-$2$3}" || return 0
    # 2,000 offline updates need a larger learning rate. With four environments, ten episodes end early in the run.
    python -m cleanrl_utils.benchmark --env-ids "$1NoFrameskip-v4" --num-seeds ${seeds:-3} --workers 2 --command "python
        $folder/$2.py --exp-name ${name:-$2$3} --learning-rate 1e-3 --online-learning-rate 1e-4 --warmup-updates 300
        --n-step 3 --num-envs 4 --teacher-steps 20000 --offline-eval-frequency 2000 --learning-starts 1000
        --buffer-size 50000 --teacher-eval-episodes 30 --eval-episodes 30
        --teacher-policy-hf-repo $4 $5" "${flags[@]}" || [ $? = 1 ]
}
flags=("$@")
torch=qdagger_dqn_atari_impalacnn jax=qdagger_dqn_atari_jax_impalacnn
pong=teachers/PongNoFrameskip-v4-dqn_atari-seed1 pong_jax=teachers/PongNoFrameskip-v4-dqn_atari_jax-seed1
breakout=teachers/BreakoutNoFrameskip-v4-dqn_atari-seed1 beam_rider=teachers/BeamRiderNoFrameskip-v4-dqn_atari-seed1
taught="--offline-steps 2000 --total-timesteps 50000"
longer="--offline-steps 2000 --total-timesteps 100000 --exploration-fraction 0.05" # the same schedule of epsilon
scratch="--offline-steps 0 --distill-coefficient 0 --total-timesteps 58000"       # as many updates
small Pong $torch "" $pong "$taught"
small Pong $torch -from-scratch $pong "$scratch"
small Pong $jax "" $pong_jax "$taught"
small Breakout $torch "" $breakout "$taught"
small Breakout $torch -from-scratch $breakout "$scratch"
small BeamRider $torch "" $beam_rider "$taught"
small BeamRider $torch -from-scratch $beam_rider "$scratch"
small Pong $torch -100k $pong "$longer"
small BeamRider $torch -100k $beam_rider "$longer"
# In Pong, differences of one point matter here, so the evaluation has 100 episodes.
small Pong $torch -100k-final-1e-5 $pong "$longer --final-learning-rate 1e-5 --eval-episodes 100"
small Breakout $torch -100k-final-1e-5 $breakout "$longer --final-learning-rate 1e-5"
small BeamRider $torch -100k-final-1e-5 $beam_rider "$longer --final-learning-rate 1e-5"
# λ reacts late in BeamRider, because its episodes are long.
longest="--offline-steps 2000 --total-timesteps 150000 --exploration-fraction 0.0333"
small BeamRider $torch -150k-final-1e-5 $beam_rider "$longest --final-learning-rate 1e-5 --eval-episodes 100"
# A short run, with a precise evaluation.
small Pong $torch -demo $pong "--n-step 1 --offline-steps 2000 --total-timesteps 16000 --buffer-size 16000
    --eval-episodes 100"
# The flags of `make demo`; the results have five seeds.
seeds=5 name=demo small Breakout $torch "" teachers/BreakoutNoFrameskip-v4-ppo-seed1 "--distill-coefficient 6 --start-e 0.1
    --offline-steps 2000 --total-timesteps 10000 --train-frequency 16 --buffer-size 10000 --final-learning-rate 1e-5
    --teacher-eval-episodes 20 --eval-episodes 20"
# Q-learning alone can collapse in the offline phase at a learning rate of 1e-3.
small Pong $torch -offline-only $pong "--distill-coefficient 0 $taught"
small Breakout $torch -offline-only $breakout "--distill-coefficient 0 $taught"
small Pong $torch -offline-only-1e-4 $pong "--distill-coefficient 0 --learning-rate 1e-4 $taught"
small Breakout $torch -offline-only-1e-4 $breakout "--distill-coefficient 0 --learning-rate 1e-4 $taught"
small BeamRider $torch -offline-only-1e-4 $beam_rider "--distill-coefficient 0 --learning-rate 1e-4 $taught"
small Pong $torch -kickstarting $pong "--offline-steps 0 --total-timesteps 58000"
small Pong $torch -temperature-1 $pong "--temperature 1 $taught"
small Pong $torch -1-step $pong "--n-step 1 $taught"
small Pong $torch -learning-starts-5000 $pong "--learning-starts 5000 $taught"
small Pong $torch -buffer-10000 $pong "--buffer-size 10000 $taught"
small Pong $torch -target-100 $pong "--target-network-frequency 100 $taught"
small Breakout $torch -target-100 $breakout "--target-network-frequency 100 $taught"
# Students of a policy of stable-baselines3. In the results, its training was stopped after 1.1 million steps, and the
# JAX script has one seed.
if selected "Breakout $torch-ppo" || selected "Breakout $jax-ppo"; then
    python benchmark/ppo_teacher.py --out ppo-BreakoutNoFrameskip-v4.zip
fi
small Breakout $torch -ppo ppo-BreakoutNoFrameskip-v4.zip "$taught"
small Breakout $jax -ppo ppo-BreakoutNoFrameskip-v4.zip "$taught"
# A longer run. In the results, two seeds were ended after 352,000 and 184,000 steps.
small Breakout $torch -1M-final-1e-5 $breakout "--offline-steps 2000 --total-timesteps 1000000 --buffer-size 300000
    --exploration-fraction 0.005 --final-learning-rate 1e-5 --eval-episodes 100"
# The second generation: the best student of Pong, seed 2, is the teacher.
first=(runs/PongNoFrameskip-v4__"$torch"__2__*)
small Pong $torch -second-generation "${first[-1]}" "--teacher-model-exp-name $torch $taught"
# Choices of the authors without a flag, by an edit of the script: Adam's epsilon; a λ that stays at 0; the Huber loss,
# which also halves the TD loss; a target network whose frequency counts updates online as well.
edited() { # game, suffix of the name, teacher, sed expression
    folder=build/edited$2
    mkdir -p "$folder"
    sed "$4" cleanrl/$torch.py >"$folder/$torch.py"
    if cmp --silent "$folder/$torch.py" cleanrl/$torch.py; then echo "$2: no line to edit" >&2 && exit 1; fi
    small "$1" $torch "$2" "$3" "$taught"
}
edited Pong -adam-1.5e-4 $pong 's/fused=True,/eps=1.5e-4, &/'
edited Breakout -latched $breakout 's/^\( *\)recent_returns: list.*/&\
\1latched: bool = False/
s/^\( *\)low, high = replay.window$/&\
\1progress.latched |= distill_coefficient == 0\
\1distill_coefficient *= not progress.latched/'
edited Pong -huber $pong 's/F.mse_loss(q_of_action, y)/F.smooth_l1_loss(q_of_action, y)/'
edited Pong -target-updates $pong 's/next_step, args.target_network_frequency/& * args.train_frequency/'
