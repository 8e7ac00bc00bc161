#!/usr/bin/env bash
# Continued pre-training of a converted model: a tiny Llama is trained on two CPU ranks, cut into
# experts (`ds-moe-lb convert`), and trained on with the micro-batch and with the global-batch
# load-balancing loss, beside the dense model trained on for as long.
#
#   bash launch/dense_to_moe.sh
#   bash launch/dense_to_moe.sh --fast          a few steps of everything, to see that it runs
#
# Arguments go to launch/dense_to_moe.py (--help); results are in runs/dense-to-moe-DATE-TIME.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

# Small packages whose translation catalogues are the corpus's domain "languages".
python -c "import humanize, wtforms" 2>/dev/null ||
    python -m pip install --quiet --constraint launch/constraints.txt humanize WTForms

exec python launch/dense_to_moe.py --output "runs/dense-to-moe-$(date +%Y%m%d-%H%M%S)" "$@"
