#!/usr/bin/env bash
# The demo: one small MoE language model trained twice on two CPU ranks, with the micro-batch and with
# the global-batch load-balancing loss, and the difference shown. About 6 minutes on two cores.
#
#   bash launch/demo.sh
#
# Arguments go to `ds-moe-lb compare`; results are in runs/demo-DATE-TIME.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

# Small packages whose translation catalogues are the corpus's domain "languages".
python -c "import humanize, wtforms" 2>/dev/null ||
    python -m pip install --quiet --constraint launch/constraints.txt humanize WTForms

exec ds-moe-lb compare --output "runs/demo-$(date +%Y%m%d-%H%M%S)" "$@"
