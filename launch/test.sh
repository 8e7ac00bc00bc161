#!/usr/bin/env bash
# All checks: format, lint, types, then tests: fast unit tests, ranks, slow.
#
#   bash launch/test.sh            what CI runs
#   bash launch/test.sh --full     every cell of the reference grid instead of its pairwise cover
#
# Further arguments go to pytest: bash launch/test.sh -k gate
set -euo pipefail
cd "$(dirname "$0")/.."

pytest_arguments=()
for argument in "$@"; do
    if [[ "$argument" == "--full" ]]; then
        pytest_arguments+=(--full-grid)
    else
        pytest_arguments+=("$argument")
    fi
done

source launch/environment.sh
ruff format --check .
ruff check .
mypy
python -m pytest --durations=15 "${pytest_arguments[@]}"
