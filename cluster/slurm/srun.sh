#!/usr/bin/env bash
# One launcher on each machine of a Slurm allocation. train.sbatch calls it, and so can you:
#
#   salloc --nodes=2 --gpus-per-node=8 cluster/slurm/srun.sh GEAR [RECIPE] [key.sub=value ...]
#
# GEARBOX_IMAGE=FILE.sif or a sandbox's folder runs it in Apptainer, any other GEARBOX_IMAGE in Pyxis.
set -euo pipefail

refuse() {
  echo "gearbox: $1" >&2
  exit 2
}

[[ -n ${SLURM_JOB_ID-} ]] || refuse "this is no Slurm job: salloc --nodes=2 ... $0, or sbatch ... cluster/slurm/train.sbatch"

# Where the launchers meet. Each learns its own number from SLURM_NODEID, which is 0 on the first machine of the list.
read -r PET_MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PET_MASTER_ADDR PET_NNODES=$SLURM_JOB_NUM_NODES
# Jobs that share a machine have ports of their own, below those that Linux hands out by itself (32768 and above).
export PET_MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))

# One launcher's end is no reason to kill another: it may still be saving, and learns of the end by itself. Sites can
# set all of this otherwise, and `sbatch --export=NONE` would keep the variables above from the launchers.
run=(
  srun "--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
  --kill-on-bad-exit=0 --wait=0 --export=ALL --label
)

if [[ -n ${GEARBOX_IMAGE-} ]]; then
  # The image gives the environment; code, recipes and runs are those of this folder. Its caches are kept in /cache.
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
