#!/usr/bin/env bash
# Train on one machine of Hugging Face Jobs. The arguments are those of src/launch.py:
#
#   BUCKET=me/gearbox-runs cluster/hf-jobs/train.sh fsdp recipes/fsdp_2gpu.yaml run.name=mine
#
# DRY_RUN=1 shows the job without submitting it. docs/clouds.md lists the variables, and what was tested.
set -euo pipefail

refuse() {
  echo "gearbox: $1" >&2
  exit 2
}

(($#)) || refuse "usage: BUCKET=OWNER/NAME $0 GEAR [RECIPE] [key.sub=value ...]"
[[ ${BUCKET-} == */* ]] ||
  refuse "BUCKET: set OWNER/NAME of a bucket for runs and checkpoints; hf buckets create NAME --private makes one"

# Each argument of the command stays one word. The image's working directory is /gearbox, and runs/ is its run.dir.
exec hf jobs run ${DRY_RUN:+--dry-run} --detach \
  --flavor "${FLAVOR:-h200x2}" \
  --timeout "${TIMEOUT:-24h}" \
  --attempts "${ATTEMPTS:-3}" \
  --secrets HF_TOKEN \
  --volume "hf://buckets/$BUCKET:/gearbox/runs" \
  "${IMAGE:-registry.example.com/gearbox:0.1.0}" \
  python src/launch.py "$@"
