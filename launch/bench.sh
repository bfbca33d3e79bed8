#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
bash launch/bench.sh [ROW...]

Times glm5_jax against transformers on this machine's CPU, same weights, two threads each, and prints
their ratios; sets up an environment with torch for it. Without ROW all rows run (about 25 minutes):

  forward-512 forward-1024 forward-4096 forward-8192
  train-512 train-1024 train-4096
  prefill-512 prefill-4096
  decode-1 decode-8
TEXT
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

(set_up bench) || fail "If it is torch that pip did not find: its CPU wheels have an index of their own," \
  "see pytorch.org; name that in PIP_EXTRA_INDEX_URL and start again."
set_up bench
baseline=$PYTHON
set_up run
cd "$ROOT"
exec "$PYTHON" -m experiments.benchmarks.transformers_cpu "$baseline" "$@"
