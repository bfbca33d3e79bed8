"""Programs of a grading sandbox that run next to the task's own tests, and which rights each program has there.

A task's tests/test.sh runs as root, as its author expects. What it starts is decided by the file that is executed, from
outside of the sandbox (`sandbox.gate.supervise`, with `POLICY`):

- Shells keep root's rights for scripts that the attempt cannot have written; so do programs that take files for data.
- Python and pytest are replaced by stand-ins. They run tests, whose files are root's, as a user that is not root but
  keeps root's rights for itself only (guard.py): what it starts has none of them.
- Modules of an attempt that tests import run in another process (apart.py), and pytest is judged by what it reports of
  each test (run_pytest.py).
- Everything else is an ordinary user's: an attempt's files however they are started, their copies, what was compiled
  from them or while tests ran, and all programs that are not listed here.
- What would be fetched from a network is taken from here, or noted as missing.

What an attempt can still forge is listed in `terminal.forms`. These files are copied into the sandbox and import nothing but
Python's library.
"""

FOLDER = "/grader"
MISSING = (
    f"{FOLDER}/missing"  # a file in it for each thing that tests asked for and that is not here
)
PYTHONS = ("python", "python3")
PACKAGERS = ("pip", "pip3", "uv", "uvx")
FETCHERS = ("curl", "wget")
# They may read tests that are written for them, and write what an ordinary user may.
INTERPRETERS = ("perl", "ruby", "node", "php")
STANDINS = (*PYTHONS, "pytest", *PACKAGERS, *FETCHERS, *INTERPRETERS)

SHELLS = ("sh", "bash", "dash", "ash")
LAUNCHERS = (
    "env",
    "timeout",
    "nohup",
    "setsid",
    "nice",
    "ionice",
    "stdbuf",
    "time",
    "xargs",
    "find",
)
LAUNCHERS += ("su", "runuser", "setpriv", "flock", "sleep")
DATA_PROGRAMS = """[ base32 base64 basename cat chgrp chmod chown cksum cmp comm cp cut date dd df diff diff3 dirname du
echo egrep expand expr false fgrep file fmt fold getent getfacl grep groupadd groups gunzip gzip head hexdump hostname id
install jq join kill link ln ls lsof md5sum mkdir mkfifo mktemp mv nl nproc numfmt od paste pathchk pgrep pkill pr printenv
printf ps pwd readlink realpath rm rmdir rev seq sha1sum sha224sum sha256sum sha384sum sha512sum shuf sort split ss stat
strings stty sum sync tac tail tee test touch tr true truncate tsort tty uname unexpand uniq unlink useradd usermod uptime
wc which which.debianutils who whoami xxd yes""".split()

_HELPER = f'import sys; sys.path.append("{FOLDER}/code"); import grader.standin as s; s.main()'
# The image's Python, and of its path no folder that an attempt can write (`apart.MARKER` holds them).
STANDIN = f"""#!/bin/sh
PATH_BEFORE=$PATH; export PATH_BEFORE
read -r PATH < {FOLDER}/path; export PATH
command -v python3 >/dev/null || {{ : > "{MISSING}/program python3"; exit 127; }}
exec python3 -I -B -c '{_HELPER}' NAME "$@"
"""
# Fields of `sandbox.RightsPolicy`.
POLICY = {
    "data": tuple(DATA_PROGRAMS),
    "launchers": LAUNCHERS,
    "shells": SHELLS,
    "standins": {name: f"{FOLDER}/bin/{name}" for name in (*INTERPRETERS, "python3")}
    | {"python": f"{FOLDER}/bin/python3"},
    "helper": ("-I", "-B", "-c", _HELPER),
    "folders": ("/tests",),
}

# In place of apt-get: what is installed can be asked for.
INSTALLER = f"""#!/bin/sh
wanted=
for word; do
  case $word in
    update | upgrade | clean | autoclean | autoremove | dist-upgrade) exit 0 ;;
    install | -* | *=) ;;
    *) wanted="$wanted ${{word%%=*}}" ;;
  esac
done
for name in $wanted; do
  case $name in curl | wget | ca-certificates | python3 | python3-pip | python3-venv | python3-pytest | uv) continue ;; esac
  grep -qxF -- "$name" {FOLDER}/packages || command -v "$name" >/dev/null 2>&1 && continue
  echo "E: package $name is not on this machine, and there is no network" >&2
  [ "$(id -u)" = 0 ] && : > "{MISSING}/package $name"
  exit 100
done
exit 0
"""
