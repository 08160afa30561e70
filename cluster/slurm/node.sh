#!/usr/bin/env bash
# The launcher of one machine of a Slurm job. srun.sh starts it on each, within the image if there is one.
set -euo pipefail

refuse() {
  echo "gearbox: $(uname -n): $1" >&2
  exit 2
}

(($#)) || refuse "usage: cluster/slurm/train.sbatch GEAR [RECIPE] [key.sub=value ...]"
python=${GEARBOX_ENV:-.venv}/bin/python
[[ -x $python ]] || refuse "$python: is not there; make setup builds it, GEARBOX_ENV=FOLDER names another environment"

# Ranks of this machine: its GPUs, as Slurm gives them to this job.
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
[[ -n $PET_NPROC_PER_NODE ]] ||
  refuse "Slurm gives this job no GPUs: sbatch --gpus-per-node=N; without Slurm's GPUs, export PET_NPROC_PER_NODE=N"

# What the ranks say is shown with their number, and kept for each of them.
logs=runs/slurm/$SLURM_JOB_ID/$SLURMD_NODENAME
mkdir -p "$logs"
export PYTHONUNBUFFERED=1
# shellcheck disable=SC2016 # torch fills it in
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '

exec "$python" src/launch.py "$1" --doctor "--log_dir=$logs" --tee=3 "${@:2}"
