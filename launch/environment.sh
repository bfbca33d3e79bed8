# Sourced by the scripts of this folder: makes the virtual environment that they run in.
#
#   set_up GROUP [PYTHON]     installs the locks of GROUP (run, or test which holds run too) into
#                             .venv, or into .venv-py312 and the like for a PYTHON asked for by name;
#                             bench goes into .venv-bench. Sets VENV and PYTHON. Costs nothing when
#                             all is installed already.
#   add_packages              what Debian has to give for the tests: the sandbox's bubblewrap, git. Installed
#                             by root where there is apt-get; else a message says what to install.
#   add_compilers             the offline TPU and GPU compilers of the aot tests, in a folder that
#                             only the calling script sees: found anywhere else, jax would start them.
#   add_ray                   Ray, in such a folder too, as it is an extra; where it cannot be installed a
#                             message says so, and its tests fail.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Large arrays in huge pages, if the kernel has them to give: a tenth of a train step on a CPU.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}

fail() {
  printf '%s\n' "$@" >&2
  exit 2
}

# Says why an interpreter does not do; nothing if it does.
why_not() {
  "$1" - 2>/dev/null <<'CODE' || echo "does not start"
import sys

name = "python%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    print("is " + name)
else:
    try:
        import ensurepip, venv
    except ImportError:
        print("has no venv module; on Debian: apt-get install %s-venv" % name)
CODE
}

# The first interpreter that does, of those with the given names. Of one name several may be on PATH,
# and pyenv puts names there that start only some of its own versions.
find_python() {
  local name candidate reason tried=()
  for name in "$@"; do
    while read -r candidate; do
      [[ -x $candidate ]] || continue
      reason=$(why_not "$candidate")
      [[ $reason ]] || { echo "$candidate"; return; }
      tried+=("  $candidate $reason")
    done < <(type -aP "$name"; printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/"$name")
  done
  fail "No Python 3.11 or newer with its venv module was found under the names: $*" \
    "${tried[@]}" "On Debian: apt-get install python3 python3-venv"
}

# The lock files of a group, for an interpreter; fails if that does not start.
locks_of() {
  local python=$1 group=$2 tag
  tag=$("$python" -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")')
  echo "$ROOT/launch/requirements/$tag-$group.txt"
  if [[ $group == test ]]; then locks_of "$python" run; fi
}

set_up() {
  local group=$1 wish=${2:-} base=
  VENV=$ROOT/.venv
  if [[ $group == bench ]]; then VENV=$ROOT/.venv-bench; fi
  if [[ $wish ]]; then
    base=$(find_python "$wish")
    VENV=$ROOT/.venv-$("$base" -c 'import sys; print("py%d%d" % sys.version_info[:2])')
  fi
  PYTHON=$VENV/bin/python
  if is_installed "$group"; then return; fi
  mkdir -p "$VENV"
  (
    flock 9 # of two scripts started at once the second waits for the first
    if is_installed "$group"; then exit; fi
    [[ $base ]] || base=$(find_python python3 python3.{11..14})
    install "$group" "$base"
  ) 9>"$VENV/.lock"
}

# An installed lock leaves a copy of itself in the environment, so an edited lock is seen.
is_installed() {
  local lock locks
  locks=$(locks_of "$PYTHON" "$1" 2>/dev/null) || return 1
  while read -r lock; do
    cmp -s "$lock" "$VENV/${lock##*/}" || return 1
  done <<<"$locks"
}

install() {
  local group=$1 base=$2 locks
  if ! "$PYTHON" -m pip --version &>/dev/null; then
    echo "Creating ${VENV#"$ROOT"/} with $base"
    "$base" -m venv "$VENV" || fail "$base could not create $VENV"
  fi
  locks=$(locks_of "$PYTHON" "$group")
  mapfile -t locks <<<"$locks"
  echo "Installing $(cat "${locks[@]}" | grep -c ==) packages into ${VENV#"$ROOT"/}, which happens once"
  pip_install "${locks[@]/#/--requirement=}" || exit
  echo "$ROOT" >"$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/glm5_jax.pth"
  cp "${locks[@]}" "$VENV"
}

pip_install() {
  "$PYTHON" -m pip install --quiet --no-deps "$@" || {
    echo "pip could not install the packages, see above; the same command tries again" >&2
    return 2
  }
}

add_packages() {
  local missing=()
  type -P bwrap >/dev/null || missing+=(bubblewrap)
  type -P git >/dev/null || missing+=(git)
  if ((${#missing[@]} == 0)); then return; fi
  if [[ $(id -u) == 0 ]] && type -P apt-get >/dev/null; then
    echo "Installing Debian packages: ${missing[*]}"
    # The lists may be older than what the mirror still has, or not be there at all.
    apt-get install -qq -y "${missing[@]}" &>/dev/null ||
      { apt-get update -qq && apt-get install -qq -y "${missing[@]}"; } >/dev/null && return
  fi
  echo "not installed, so tests of sandboxes fail; on Debian: apt-get install ${missing[*]}" >&2
}

# What the lock of a group adds, in a folder of the environment that this process and those it starts import from.
add_group() {
  local group=$1 folder=$VENV/$2 what=$3 lock
  lock=$(locks_of "$PYTHON" "$group")
  if ! cmp -s "$lock" "$folder/${lock##*/}"; then
    echo "Installing $what into ${folder#"$ROOT"/}"
    rm -rf "$folder"
    pip_install --target="$folder" --requirement="$lock" || return
    cp "$lock" "$folder"
  fi
  export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
}

add_ray() {
  add_group ray ray Ray ||
    echo "not installed, so tests of Ray fail: $(locks_of "$PYTHON" ray)" >&2
}

add_compilers() {
  add_group aot compilers "the offline TPU and GPU compilers" || exit
  export CUDA_HOME=$VENV/compilers/nvidia/cu13
  # Libtpu would ask a cloud for its machine, and refuse a second process.
  export TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5p-8 TPU_WORKER_HOSTNAMES=localhost
  export ALLOW_MULTIPLE_LIBTPU_LOAD=1
}
