#!/usr/bin/env bash
# Checks the types of the four packages with basedpyright, and fails on an error. It takes about four minutes.
#
#   bash launch/types.sh [FLAGS, FOLDERS and FILES of basedpyright, e.g. glm5_jax/rl]

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

set_up test # whose lock has basedpyright; it also reads the packages that the project imports
cd "$ROOT"
exec "$VENV/bin/basedpyright" --level error "$@"
