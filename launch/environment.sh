# Source this: afterwards `python` runs in an environment that has ds_moe_lb with all its extras.
#
# Uses the active virtual environment, or else makes .venv in the checkout. The package is installed
# in editable mode with the exact versions of launch/constraints.txt. Nothing is done when that was
# done before and neither setup.py nor the constraints have changed since.

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]]; then
    if [[ ! -x "$checkout/.venv/bin/python" ]]; then
        echo "environment: creating $checkout/.venv"
        "${PYTHON:-python3}" -m venv "$checkout/.venv"
    fi
    # shellcheck disable=SC1091
    source "$checkout/.venv/bin/activate"
fi

_install() {
    local stamp wanted
    stamp="$(python -c 'import sys; print(sys.prefix)')/.ds_moe_lb_installed"
    wanted="$checkout $(cat "$checkout/setup.py" "$checkout/launch/constraints.txt" | sha256sum)"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
        return
    fi
    echo "environment: installing into $(python -c 'import sys; print(sys.prefix)')"
    # torch first and by itself: asked for by another package, a newer release could be taken.
    python -m pip install --quiet --constraint "$checkout/launch/constraints.txt" torch
    python -m pip install --quiet --constraint "$checkout/launch/constraints.txt" \
        --editable "$checkout[all]"
    echo "$wanted" >"$stamp"
}
_install
unset -f _install

# Ranks share the cores of this machine. Plain defaults, so that a user's own settings win.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
