#!/usr/bin/env bash
# An experiment of the paper on a toy model, on two CPU ranks: tables and figures with intervals.
#
#   bash launch/experiment.sh methods        # or weights, balance-batch, routing, switch, routers
#
# Arguments go to `ds-moe-lb experiment`; it goes on where it was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

# Small packages whose translation catalogues are the corpus's domain "languages".
python -c "import humanize, wtforms" 2>/dev/null ||
    python -m pip install --quiet --constraint launch/constraints.txt humanize WTForms

exec ds-moe-lb experiment "$@"
