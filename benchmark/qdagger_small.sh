#!/usr/bin/env bash
# Small enough for two CPU cores, three seeds each: students of the embedded teachers, and what they are compared with.
# On one core each, a run takes some 30 minutes in PyTorch and, by its slower updates, more than twice that in JAX;
# 100,000 steps take an hour.
# Flags for the runner may follow.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=cleanrl
small() { # game, script, what its name ends in, teacher, further flags
    # A larger learning rate while the teacher's data lasts: 2,000 updates are few. Four games: ten are to end soon.
    python -m cleanrl_utils.benchmark --env-ids "$1NoFrameskip-v4" --num-seeds 3 --workers 2 --command "python
        $folder/$2.py --exp-name $2$3 --learning-rate 1e-3 --online-learning-rate 1e-4 --warmup-updates 300
        --n-step 3 --num-envs 4 --teacher-steps 20000 --offline-eval-frequency 2000 --learning-starts 1000
        --buffer-size 50000 --teacher-eval-episodes 30 --eval-episodes 30 --save-model
        --teacher-policy-hf-repo $4 $5" "${flags[@]}" || [ $? = 1 ]
}
flags=("$@")
torch=qdagger_dqn_atari_impalacnn jax=qdagger_dqn_atari_jax_impalacnn
pong=teachers/PongNoFrameskip-v4-dqn_atari-seed1 pong_jax=teachers/PongNoFrameskip-v4-dqn_atari_jax-seed1
breakout=teachers/BreakoutNoFrameskip-v4-dqn_atari-seed1 beam_rider=teachers/BeamRiderNoFrameskip-v4-dqn_atari-seed1
taught="--offline-steps 2000 --total-timesteps 50000"
longer="--offline-steps 2000 --total-timesteps 100000 --exploration-fraction 0.05" # epsilon falls as in the shorter ones
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
# Over 100 games: whether Pong's students keep what they were taught is a matter of single points.
small Pong $torch -100k-final-1e-5 $pong "$longer --final-learning-rate 1e-5 --eval-episodes 100"
small Breakout $torch -100k-final-1e-5 $breakout "$longer --final-learning-rate 1e-5"
small BeamRider $torch -100k-final-1e-5 $beam_rider "$longer --final-learning-rate 1e-5"
# Games of BeamRider are so long that λ has only begun to fade by then.
longest="--offline-steps 2000 --total-timesteps 150000 --exploration-fraction 0.0333"
small BeamRider $torch -150k-final-1e-5 $beam_rider "$longest --final-learning-rate 1e-5 --eval-episodes 100"
# What `make demo` runs, over games enough to tell 95 % of the way from random to teacher from 90 %.
small Pong $torch -demo $pong "--n-step 1 --offline-steps 2000 --total-timesteps 16000 --buffer-size 16000
    --eval-episodes 100"
# At 1e-3 Q-learning alone may collapse in the offline phase; at 1e-4 throughout, as from scratch, no run has stayed so.
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
# The second generation: the first one's second seed teaches, the best of ours.
first=(runs/PongNoFrameskip-v4__"$torch"__2__*)
small Pong $torch -second-generation "${first[-1]}" "--teacher-model-exp-name $torch $taught"
# What the authors do otherwise and no flag gives, by an edit of the script: Adam's epsilon; a λ that is never raised
# again once it was 0; the Huber loss; a target network whose period is counted in updates online too.
edited() { # game, what its name ends in, teacher, what sed does
    folder=build/edited$2
    mkdir -p "$folder"
    sed "$4" cleanrl/$torch.py >"$folder/$torch.py"
    if cmp --silent "$folder/$torch.py" cleanrl/$torch.py; then echo "$2: no line to edit" >&2 && exit 1; fi
    small "$1" $torch "$2" "$3" "$taught"
}
edited Pong -adam-1.5e-4 $pong 's/fused=True,/eps=1.5e-4, &/'
edited Breakout -latched $breakout 's/^\( *\)low, high = replay.window$/&\
\1if 0 in (distill_coefficient, run.state.get("latched")):\
\1    run.state["latched"] = distill_coefficient = 0/'
edited Pong -huber $pong 's/F.mse_loss/F.smooth_l1_loss/'
edited Pong -target-updates $pong 's/next_step, args.target_network_frequency/& * args.train_frequency/'
