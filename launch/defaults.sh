# Source this: what the run_*.sh scripts share. It installs nothing, because a cluster's environment
# is its owner's; launch/environment.sh makes one.

_launch="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" && -f "$_launch/../.venv/bin/activate" ]]; then
    # shellcheck disable=SC1091
    source "$_launch/../.venv/bin/activate"
fi

NUM_RANKS="${NUM_RANKS:-2}"
# CPU ranks share the cores; a user's own setting wins.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Defaults of `ds-moe-lb train`, which the arguments of the script override. A resumed run knows all
# of this itself. Every run gets a folder of its own.
TRAIN_ARGUMENTS=()
if [[ " $* " != *" --resume"* ]]; then
    TRAIN_ARGUMENTS=(
        --config zero1_ep2_global_batch --ep-size 2 --steps 20
        --output "runs/$(date +%Y-%m-%d_%H-%M-%S)"
    )
fi

free_port() {
    python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
