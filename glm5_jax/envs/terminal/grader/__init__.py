"""Defines the programs that support tests in a grading sandbox, and the rights of each program there.

A task's tests/test.sh runs as root, as its author expects. The rights of the programs that it starts are
decided by the executed file, from outside the sandbox (`sandbox.entry.supervise`, with `POLICY`):

- Shells keep root's rights for scripts that the attempt cannot have written; so do programs that only read
  files as data.
- Python and pytest are replaced by shims. They run tests, whose files are root's, as an unprivileged user
  that keeps root's rights only for itself (privileges.py): programs that it starts have none of them.
- Modules of an attempt that tests import run in another process (isolation.py), and the verdict of pytest
  is what it reported for each test (run_pytest.py). Objects of their classes are compared by the plain
  values that they are or convert to (plain.py), so no `__eq__` of theirs decides, and no `__exit__`
  swallows an assertion.
- Interpreters that run tests of other languages may read all files; what they start loses that right with
  the first program that is not the image's.
- Everything else runs as an ordinary user: an attempt's files however they are started, their copies, files
  compiled from them or during the tests, and all programs that are not listed here.
- Downloads from a network are replaced by local files, or recorded as missing.

A program of an attempt cannot signal those of tests (`sandbox.entry.signals`): a search that is killed finds nothing.

Nobody opens a file of the tests, or a reward, by a path that leads there through a link
(`sandbox.entry.watch`). Processes of tests are hidden from the attempt's, which could read expected results
in their arguments. Folders of the attempt are last on PATH, and are nobody's home. LD_LIBRARY_PATH and its like have
no effect on programs with rights. A reward from tests during which disk, memory or processes ran out does not count.

`terminal.forms` lists what an attempt can still forge. These files are copied into the sandbox and import
only Python's standard library.
"""

FOLDER = "/grader"
HOME = f"{FOLDER}/home"  # home of tests if the image's home is the work folder
MISSING = (
    f"{FOLDER}/missing"  # holds a file for each thing that tests needed and this machine lacks
)
# Beginning of the dynamic loader's variables, and what stands for it in a program with rights
# (`sandbox.entry.supervise`).
LOADER, RENAMED = "LD_", "Ld_"
PYTHONS = ("python", "python3")
PACKAGERS = ("pip", "pip3", "uv", "uvx")
FETCHERS = ("curl", "wget")
# They may read tests that are written for them, and write only what an ordinary user may.
INTERPRETERS = ("perl", "ruby", "node", "php")
SHIMS = (*PYTHONS, "pytest", *PACKAGERS, *FETCHERS, *INTERPRETERS)

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

# Arguments of the process that runs an attempt's modules, followed by two descriptors and a search path.
WORKER = (
    "-I",
    "-B",
    "-c",
    f"import sys; sys.path.append('{FOLDER}/code'); import grader.worker as w; w.main()",
)
_HELPER = f'import sys; sys.path.append("{FOLDER}/code"); import grader.shims as s; s.main()'
# Runs the image's Python, with a PATH without folders that an attempt can write (`isolation.MARKER` holds it).
SHIM = f"""#!/bin/sh
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
    "shims": {name: f"{FOLDER}/bin/{name}" for name in (*INTERPRETERS, "python3")}
    | {"python": f"{FOLDER}/bin/python3"},
    "helper": ("-I", "-B", "-c", _HELPER),
    "worker": WORKER,
    "folders": ("/tests",),
    "sealed": ("/logs/verifier/reward.txt", "/logs/verifier/reward.json"),
    "watched": ("/tests", "/logs/verifier"),
}

# Replaces apt-get: only packages that are installed can be requested.
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
