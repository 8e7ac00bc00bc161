#!/usr/bin/env bash
# A training run by mpirun. DeepSpeed learns its ranks from mpi4py. `pip install 'ds_moe_lb[mpi]'`
# brings both Open MPI and mpi4py; no system package is needed.
#
#   bash launch/run_mpirun.sh                                     2 ranks, 20 steps, built-in corpus
#   NUM_RANKS=8 HOSTFILE=my_hosts bash launch/run_mpirun.sh --config zero2_ep2_global_batch
#
# Every argument goes to `ds-moe-lb train`. Open MPI writes a host as `name slots=N`, as DeepSpeed does.
set -euo pipefail
source "$(dirname "$0")/defaults.sh"

# Ranks may be more than cores, and containers run as root. Without --bind-to none Open MPI would
# pin each rank to one core, all its threads included.
arguments=(-n "$NUM_RANKS" --oversubscribe --bind-to none --allow-run-as-root)
if [[ -n "${HOSTFILE:-}" ]]; then
    arguments+=(--hostfile "$HOSTFILE" -x PATH -x OMP_NUM_THREADS -x MASTER_PORT)
    export MASTER_PORT="${MASTER_PORT:-29500}"
else
    MASTER_PORT="$(free_port)"
    export MASTER_PORT
fi
exec mpirun "${arguments[@]}" python -m ds_moe_lb train "${TRAIN_ARGUMENTS[@]}" "$@"
