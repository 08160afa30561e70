#!/usr/bin/env bash
# Start one launcher on each node of a Slurm allocation. train.sbatch calls this script; so can you:
#
#   salloc --nodes=2 --gpus-per-node=8 cluster/slurm/srun.sh GEAR [RECIPE] [key.sub=value ...]
#
# If GEARBOX_IMAGE is a .sif file or a sandbox folder, Apptainer runs the launchers. Any other value goes to Pyxis.
set -euo pipefail

refuse() {
  echo "gearbox: $1" >&2
  exit 2
}

[[ -n ${SLURM_JOB_ID-} ]] ||
  refuse "not in a Slurm job; run salloc --nodes=2 ... $0, or sbatch ... cluster/slurm/train.sbatch"

# The launchers meet on the first node of the list, where SLURM_NODEID is 0. Each launcher reads its rank from it.
read -r PET_MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PET_MASTER_ADDR PET_NNODES=$SLURM_JOB_NUM_NODES
# Derive the port from the job id, so that jobs on one node differ. Linux assigns ports from 32768 itself; stay below.
export PET_MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))

# When one launcher exits, srun must not kill the others: they may still be saving, and they notice the exit themselves.
# Set every flag, because a site can change the defaults. With `sbatch --export=NONE` the launchers would also miss the
# variables above.
run=(
  srun "--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
  --kill-on-bad-exit=0 --wait=0 --export=ALL --label
)

if [[ -n ${GEARBOX_IMAGE-} ]]; then
  # The image provides Python and the libraries. Code, recipes and runs come from this folder. /cache keeps the caches.
  export GEARBOX_ENV=${GEARBOX_ENV:-/opt/venv}
  cache=${GEARBOX_CACHE:-$HOME/.cache/gearbox}
  mkdir -p "$cache"
  mounts=$PWD:$PWD,$cache:/cache${GEARBOX_MOUNTS:+,$GEARBOX_MOUNTS}
  if [[ $GEARBOX_IMAGE == *.sif || -d $GEARBOX_IMAGE ]]; then
    run+=(apptainer exec --nv "--bind=$mounts" "--pwd=$PWD" "$GEARBOX_IMAGE")
  else
    run+=(
      "--container-image=$GEARBOX_IMAGE" "--container-mounts=$mounts" "--container-workdir=$PWD"
      --no-container-entrypoint
    )
  fi
fi
exec "${run[@]}" cluster/slurm/node.sh "$@"
