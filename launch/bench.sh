#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
bash launch/bench.sh [ROW...]

Times glm5_jax against transformers on this machine's CPU, with the same weights and two threads each, and
prints their ratios. Sets up an environment with torch first. Without ROW all rows run (about 25 minutes):

  forward-512 forward-1024 forward-4096 forward-8192
  train-512 train-1024 train-4096
  prefill-512 prefill-4096
  decode-1 decode-8
TEXT
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

(set_up bench) || fail "If pip did not find torch: its CPU wheels are in a separate index, see" \
  "pytorch.org; set PIP_EXTRA_INDEX_URL to it and repeat the command."
set_up bench
baseline=$PYTHON
set_up run
cd "$ROOT"
exec "$PYTHON" -m experiments.benchmarks.transformers_cpu "$baseline" "$@"
