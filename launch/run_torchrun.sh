#!/usr/bin/env bash
# A training run by torchrun on this machine.
#
#   bash launch/run_torchrun.sh                                   2 ranks, 20 steps, built-in corpus
#   NUM_RANKS=4 bash launch/run_torchrun.sh --config zero1_ep2_boundary
#
# Every argument goes to `ds-moe-lb train`.
set -euo pipefail
source "$(dirname "$0")/defaults.sh"

# --standalone takes a free port.
exec torchrun --standalone --nproc-per-node "$NUM_RANKS" -m ds_moe_lb train \
    "${TRAIN_ARGUMENTS[@]}" "$@"
