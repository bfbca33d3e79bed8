"""What runs in a grading sandbox, beside the task's own tests: it decides who runs with which rights.

A task's tests/test.sh runs as root, as its author expects, and so would all that it starts: an attempt's program could
write the reward itself, or put an end to the tests before they have failed. So on root's path these stand in for the
programs that tests are started by (`main` is given their name):

- Python and pytest run the tests, whose files are root's, as a user that is not root but keeps root's rights for
  itself alone (guard.py): what it starts has none of them. Code that does not speak of /logs cannot write there.
- pytest is judged from outside, by what it reports of each test and not by its exit code alone (run_pytest.py).
- An attempt's own files, and programs that work on its folder (git, make), run without any rights.
- What would be fetched from a network is taken from here, or noted as missing.

These files are copied into the sandbox and import nothing but Python's library.
"""

FOLDER = "/grader"
MISSING = (
    f"{FOLDER}/missing"  # a file in it for each thing that tests asked for and that is not here
)
PYTHONS = ("python", "python3")
PACKAGERS = ("pip", "pip3", "uv", "uvx")
FETCHERS = ("curl", "wget")
# Of what may be an attempt's: scripts, and programs that something else starts.
INTERPRETERS = ("bash", "sh", "perl", "ruby", "node", "php", "java")
INTERPRETERS += ("env", "timeout", "nohup", "setsid", "nice", "stdbuf", "xargs")
WORKERS = ("git", "make", "cmake", "npm", "npx", "cargo", "go")  # they run what a folder tells them
STANDINS = (*PYTHONS, "pytest", *PACKAGERS, *FETCHERS, *INTERPRETERS, *WORKERS)

# Itself it must not find again on the path.
STANDIN = f"""#!/bin/sh
PATH_BEFORE=$PATH; PATH=${{PATH#*{FOLDER}/bin:}}; export PATH PATH_BEFORE
command -v python3 >/dev/null || {{ : > "{MISSING}/program python3"; exit 127; }}
exec python3 -I -B -c 'import sys; sys.path.append("{FOLDER}/code"); import grader.standin as s; s.main()' NAME "$@"
"""

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
