#!/usr/bin/env bash
# Builds the documentation site into build/site and fails on a broken link.
#
#   bash launch/docs.sh [FLAGS of mkdocs build, e.g. --site-dir=DIR]

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

set_up docs
export NO_MKDOCS_2_WARNING=1 # of the theme, about a version that the lock excludes
cd "$ROOT"
exec "$PYTHON" -m mkdocs --quiet build --strict "$@"
