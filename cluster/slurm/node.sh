#!/usr/bin/env bash
# Start the launcher on one node of a Slurm job. srun.sh runs this script on each node, inside the image if one is set.
set -euo pipefail

refuse() {
  echo "gearbox: $(uname -n): $1" >&2
  exit 2
}

(($#)) || refuse "usage: cluster/slurm/train.sbatch GEAR [RECIPE] [key.sub=value ...]"
python=${GEARBOX_ENV:-.venv}/bin/python
[[ -x $python ]] || refuse "$python: not found; run make setup, or set GEARBOX_ENV=FOLDER to another environment"

# One rank for each GPU that Slurm allocated to this job on this node.
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
[[ -n $PET_NPROC_PER_NODE ]] ||
  refuse "Slurm allocated no GPUs; pass sbatch --gpus-per-node=N, or export PET_NPROC_PER_NODE=N to set the ranks"

# Prefix each line of output with its rank, and keep a log file for each rank.
logs=runs/slurm/$SLURM_JOB_ID/$SLURMD_NODENAME
mkdir -p "$logs"
export PYTHONUNBUFFERED=1
# shellcheck disable=SC2016 # torch expands it
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '

exec "$python" src/launch.py "$1" --doctor "--log_dir=$logs" --tee=3 "${@:2}"
