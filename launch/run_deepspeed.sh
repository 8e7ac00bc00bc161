#!/usr/bin/env bash
# A training run by DeepSpeed's own launcher, on this machine or on those of a hostfile.
#
#   bash launch/run_deepspeed.sh                                  2 ranks, 20 steps, built-in corpus
#   bash launch/run_deepspeed.sh --config zero2_ep2_bf16 --steps 200 --data ~/my_texts
#   NUM_RANKS=4 bash launch/run_deepspeed.sh
#   HOSTFILE=launch/hostfile.example bash launch/run_deepspeed.sh
#
# Every argument goes to `ds-moe-lb train`.
set -euo pipefail
source "$(dirname "$0")/defaults.sh"

where=(--num_accelerators "$NUM_RANKS" --master_port "$(free_port)")
if [[ -n "${HOSTFILE:-}" ]]; then
    where=(--hostfile "$HOSTFILE" --master_port "${MASTER_PORT:-29500}")
fi
# --no_local_rank: the rank is in the environment; as an argument it would come before `train`.
exec deepspeed "${where[@]}" --no_local_rank --module ds_moe_lb train "${TRAIN_ARGUMENTS[@]}" "$@"
