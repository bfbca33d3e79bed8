# Creates the virtual environment of the scripts in this folder, which source this file.
#
#   set_up GROUP [PYTHON]     installs the locks of GROUP (run, or test, which includes run) into .venv; with
#                             a PYTHON into .venv-py312 or the like; GROUP bench, docs or clients into
#                             .venv-GROUP. Sets VENV and PYTHON. Does nothing if all is installed.
#                             .venv/bin/glm5 is the command of the project (launch/glm5.py).
#   add_packages              installs the Debian packages of the tests, bubblewrap (for sandboxes) and git, if
#                             the user is root and there is apt-get. Otherwise it prints what to install.
#   add_compilers             installs the offline TPU and GPU compilers of the aot tests into a folder that only
#                             the calling script imports from, because jax would start them anywhere else.
#   add_npm_packages          installs the clients that are on npm, after `set_up clients`. Without node it prints
#                             a message, and their tests are skipped.
#   add_ray                   installs Ray, which is an extra, into such a folder too. If that fails, it prints
#                             a message, and the tests of Ray fail.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Use huge pages for large arrays if the kernel has any: that saves a tenth of a train step on a CPU.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}

fail() {
  printf '%s\n' "$@" >&2
  exit 2
}

# Prints why an interpreter is unsuitable; nothing if it is suitable.
unsuitable_reason() {
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

# Prints the first suitable interpreter with one of the names. All matches on PATH are tried, because pyenv
# puts names there that start only some of its versions.
find_python() {
  local name candidate reason tried=()
  for name in "$@"; do
    while read -r candidate; do
      [[ -x $candidate ]] || continue
      reason=$(unsuitable_reason "$candidate")
      [[ $reason ]] || { echo "$candidate"; return; }
      tried+=("  $candidate $reason")
    done < <(type -aP "$name"; printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/"$name")
  done
  fail "No Python 3.11 or newer with its venv module was found under the names: $*" \
    "${tried[@]}" "On Debian: apt-get install python3 python3-venv"
}

# Prints the lock files of a group for an interpreter; fails if that does not start.
locks_of() {
  local python=$1 group=$2 tag
  tag=$("$python" -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")')
  echo "$ROOT/launch/requirements/$tag-$group.txt"
  if [[ $group == test ]]; then locks_of "$python" run; fi
}

set_up() {
  local group=$1 wanted=${2:-} base=
  VENV=$ROOT/.venv
  if [[ $group == bench || $group == docs || $group == clients ]]; then VENV=$ROOT/.venv-$group; fi
  if [[ $wanted ]]; then
    base=$(find_python "$wanted")
    VENV=$ROOT/.venv-$("$base" -c 'import sys; print("py%d%d" % sys.version_info[:2])')
  fi
  PYTHON=$VENV/bin/python
  if ! is_installed "$group"; then install_once "$group" "$base"; fi
  if [[ $group == run || $group == test ]]; then add_command; fi
}

# Of two concurrent scripts the second waits for the first.
install_once() {
  local group=$1 base=$2
  mkdir -p "$VENV"
  (
    flock 9
    if is_installed "$group"; then exit; fi
    [[ $base ]] || base=$(find_python python3 python3.{11..14})
    install "$group" "$base"
  ) 9>"$VENV/.lock"
}

# Writes the command glm5 into the environment; -P keeps the folder in which it is called off the import path.
add_command() {
  local file=$VENV/bin/glm5
  if [[ -x $file ]]; then return; fi
  printf '#!/bin/sh\nexec "%s" -P -m launch.glm5 "$@"\n' "$PYTHON" >"$file"
  chmod +x "$file"
}

# The environment has a copy of each installed lock, by which an edited lock is noticed.
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
  type -P ip >/dev/null || missing+=(iproute2)
  if ((${#missing[@]} == 0)); then return; fi
  if [[ $(id -u) == 0 ]] && type -P apt-get >/dev/null; then
    echo "Installing Debian packages: ${missing[*]}"
    # The package lists may be missing, or older than the packages on the mirror.
    apt-get install -qq -y "${missing[@]}" &>/dev/null ||
      { apt-get update -qq && apt-get install -qq -y "${missing[@]}"; } >/dev/null && return
  fi
  echo "not installed, so tests of sandboxes or rehearsals fail; on Debian: apt-get install ${missing[*]}" >&2
}

# Installs the lock of a group into a folder of the environment, and adds the folder to PYTHONPATH.
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

add_npm_packages() {
  local lock=$ROOT/launch/requirements/clients-npm.txt
  if cmp -s "$lock" "$VENV/${lock##*/}"; then return; fi
  if ! type -P npm >/dev/null; then
    echo "not installed, so tests of clients on npm are skipped; on Debian: apt-get install npm" >&2
    return
  fi
  echo "Installing $(grep -c @ "$lock") packages of npm into ${VENV#"$ROOT"/}"
  xargs npm install --prefix "$VENV" --no-save --no-audit --no-fund --loglevel=error <"$lock"
  cp "$lock" "$VENV"
}

add_ray() {
  add_group ray ray Ray ||
    echo "not installed, so tests of Ray fail: $(locks_of "$PYTHON" ray)" >&2
}

add_compilers() {
  add_group aot compilers "the offline TPU and GPU compilers" || exit
  export CUDA_HOME=$VENV/compilers/nvidia/cu13
  # Libtpu would query the cloud's metadata server, and refuse a second process.
  export TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5p-8 TPU_WORKER_HOSTNAMES=localhost
  export ALLOW_MULTIPLE_LIBTPU_LOAD=1
}
