#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
bash launch/test.sh [--python=PYTHON] [--coverage] [slow] [aot] [device] [-- PYTEST ARGUMENTS]

Sets up a virtual environment and runs the tests; the last line has their number.

  (no tier)         default tier: all tests except slow, aot and device
  slow              learning runs, fault injection and full journeys, minutes each; installs Ray first
  aot               compilation for TPU and GPU topologies; installs their compilers first
  device            tests on the accelerator of this machine, for which jax must be installed
                    (python -m pip install 'jax[tpu]' or 'jax[cuda13]' in that environment)
  --python=PYTHON   another interpreter, such as python3.12, in a separate environment
  --coverage        fail if less than 75% of a module's lines are covered
  -- ARGUMENTS      arguments for pytest: bash launch/test.sh -- tests/model -k rope

A test of two tiers runs if both are named. Tests run in two processes; -- -n 8 uses eight.
The default tier fails if it takes longer than tests/budget.json allows. -- --share=0/7 runs a seventh of the tests.
TEXT
}

python= tiers=() options=()
while (($#)); do
  case $1 in
    -h | --help) usage; exit ;;
    --python=?*) python=${1#*=} ;;
    --coverage) options+=(-p tests.coverage_floor --cov --cov-report=) ;;
    slow | aot | device) tiers+=("$1") ;;
    --) shift; break ;;
    *) printf 'unknown argument: %s\n\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
set_up test "$python"
add_packages
cd "$ROOT"

has_tier() { [[ " ${tiers[*]} " == *" $1 "* ]]; }

# Selects the tests of the named tiers, without tests that are also of a tier that is not named.
marks=${tiers[*]}
marks=${marks:+(${marks// / or })}
for tier in slow aot device; do
  has_tier "$tier" || marks+="${marks:+ and }not $tier"
done

# Images of containers often set it. Every worker, and every program that a test starts, would compile the same modules.
unset PYTHONDONTWRITEBYTECODE

export JAX_PLATFORMS=cpu
if has_tier device; then
  JAX_PLATFORMS=
  export XLA_PYTHON_CLIENT_PREALLOCATE=false # two processes share the accelerator's memory
fi
if has_tier slow; then add_ray; fi
if has_tier aot; then add_compilers; fi

# Deletes compiled programs that no run has read for two weeks.
find "${XDG_CACHE_HOME:-$HOME/.cache}/glm5_jax" -type f -atime +14 -delete 2>/dev/null || true

echo "Running the tests marked: $marks"
exec "$PYTHON" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -p tests.budget -p tests.shares \
  -m "$marks" "${options[@]}" "$@"
