#!/usr/bin/env bash
# The path of a run on several machines, on this one: two torchrun "nodes" of one rank each, which
# meet at a port as two machines would, prove the invariance of the loss (`ds-moe-lb verify`).
#
#   bash launch/verify_two_nodes.sh                                  the recipe zero1_ep2_injected
#   bash launch/verify_two_nodes.sh --config my.json --ep-size 1     any arguments of verify
#
# On two machines: the torchrun line on each, with its own --node-rank and the first one's address.
set -euo pipefail
source "$(dirname "$0")/defaults.sh"

[[ $# -gt 0 ]] || set -- --config zero1_ep2_injected
meeting=(--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port "$(free_port)")

torchrun "${meeting[@]}" --node-rank 1 -m ds_moe_lb verify "$@" &
second=$!
trap 'kill "$second" 2>/dev/null || true' EXIT
status=0
torchrun "${meeting[@]}" --node-rank 0 -m ds_moe_lb verify "$@" || status=$?
# The other node fails by itself when this one has: torchrun sees that its store is gone.
wait "$second" || status=$?
trap - EXIT
exit "$status"
