#!/usr/bin/env bash
# Pre-trains the `tiny` model on real text and prints the results; for a finished run it only prints them.
#
#   bash launch/quickstart.sh [FLAGS of launch/run.py, e.g. --experiment.train.steps=50]

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

set_up run
cd "$ROOT"
exec "$PYTHON" -m launch.run --experiment=experiments/pretrain.py:tiny --workdir=workdir/pretrain_tiny "$@"
