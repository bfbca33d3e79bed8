#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
bash launch/clients.sh [FLAGS of pytest, such as -k mini]

Installs programs of other projects that use a served model (lm-evaluation-harness, inspect-ai, mini-swe-agent,
opencode, Codex) into .venv-clients, and tests the server with them and with the SDKs of OpenAI and Anthropic, which
are in .venv (about five minutes). docs/clients.md has the commands. Programs on npm need node.
TEXT
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

set_up clients
add_npm_packages
set_up test
cd "$ROOT"
exec "$PYTHON" -m pytest tests/journeys/test_clients.py tests/inference/test_client_sdks.py -m "not aot and not device" "$@"
