#!/bin/bash
# The benchmark runner in an array of Slurm jobs, whose numbers are the seeds:
#     sbatch --array=1-3 --gpus=1 --cpus-per-task=8 --mem=32G benchmark/slurm.sh \
#         --env-ids PongNoFrameskip-v4 --command "python cleanrl/qdagger_dqn_atari_impalacnn.py --n-step 3"
# Submit it from the project's directory, with its Python environment activated. The same command again skips finished
# runs and resumes the others.
#SBATCH --ntasks=1 --time=24:00:00 --requeue --open-mode=append --output=slurm-%x-%A_%a.out
#SBATCH --signal=USR2@300

# Without this variable, srun gives the run one core.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
srun python -m cleanrl_utils.benchmark "$@" --num-seeds 1 --start-seed "$SLURM_ARRAY_TASK_ID" --workers 1
code=$?
# 140 is 128 + USR2, which Slurm sends 300 seconds before the time limit. The runs have saved checkpoints.
# With --checkpoint-minutes 0, a run would start again after every time limit.
if [ $code = 140 ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit $code
