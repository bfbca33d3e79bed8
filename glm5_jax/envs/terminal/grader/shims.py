"""Replaces the programs that start tests (shims); see the package."""

import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import stat
import sys
import types

from . import (
    FETCHERS,
    FOLDER,
    INTERPRETERS,
    LOADER,
    MISSING,
    PACKAGERS,
    PYTHONS,
    RENAMED,
    isolation,
    privileges,
    run_pytest,
    watched,
)

_NOT_FOUND = 127
_NO_NETWORK = 6  # curl's exit code for an unknown host
# Packages that are provided in another way than by installing them.
_PROVIDED = ("pytest", "pytest-json-ctrf", "uv", "pip", "setuptools", "wheel")
_LOCAL = re.compile(r"^(https?://)?(localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0)([:/]|$)")
_UV_VALUED = ("-p", "--python", "-w", "--with", "--from", "--project", "--directory")

_path_before = ""


def main():
    """Runs the program named by the first argument with the other arguments; does not return."""
    global _path_before
    name, *args = sys.argv[1:]
    _path_before = os.environ.pop("PATH_BEFORE", os.environ["PATH"])
    folders = _path_before.split(":")
    os.environ["PATH"] = ":".join(folder for folder in folders if folder != f"{FOLDER}/bin")
    for variable in [variable for variable in os.environ if variable.startswith(RENAMED)]:
        os.environ[LOADER + variable.removeprefix(RENAMED)] = os.environ.pop(variable)
    if os.getuid():
        _exec_program(name, args)
    try:
        code = _run(name, args)
    except run_pytest.Missing as missing:
        code = _note_missing(str(missing))
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.exit(code)


def _run(name, args):
    if name in PYTHONS:
        return _python(name, args)
    if name == "pytest":
        return _pytest(args, isolated=False, folder=False)
    if name in PACKAGERS:
        return _packager(name, args)
    if name in FETCHERS:
        return _fetch(name, args)
    if name in INTERPRETERS:
        return _interpreter(name, args)
    return _exec_program(name, args)  # its rights are decided when it is executed


def _exec_program(name, args):
    """Executes the real program; if it keeps rights, the programs that it starts are replaced by shims too."""
    if name == "python" and shutil.which(name) is None:
        name = "python3"
    program = shutil.which(name)
    if program is None:
        if os.getuid() == 0:
            _note_missing(f"program {name}")
        sys.exit(_NOT_FOUND)
    if os.getuid() == 0:
        os.environ["PATH"] = _path_before
    try:
        os.execv(program, [name, *args])
    except OSError as error:  # the arguments are too long
        sys.exit(f"{name}: {error.strerror}")


def _exec_unprivileged(name, args):
    privileges.leave_root()
    return _exec_program(name, args)


def _interpreter(name, args):
    """Runs an interpreter, which may read the tests if its script is one of them."""
    script = next((arg for arg in args if not arg.startswith("-")), None)
    if script is None or not os.path.isfile(script) or isolation.is_of_attempt(script):
        return _exec_unprivileged(name, args)
    privileges.keep_reading()
    return _exec_program(name, args)


def _note_missing(what):
    """Records a missing program or package for the grader, because the result then says nothing about the attempt."""
    print(f"{what} is not on this machine", file=sys.stderr)
    name = re.sub(r"[^\w .=:@()+-]", "_", what)[:100]
    with open(f"{MISSING}/{name}", "w"):
        pass
    return _NOT_FOUND


# -- Python -----------------------------------------------------------------------------------------


def _python(name, args):
    kind, what, rest, isolated = _parse_python(args)
    if kind == "script" and os.path.basename(what) in ("pytest", "py.test"):
        kind, what = "module", "pytest"
    if kind == "module" and what in ("pytest", "py.test"):
        return _pytest(rest, isolated, folder=True)
    if kind == "module" and what in PACKAGERS:
        return _packager(what, rest)
    if kind is None or (kind == "input" and sys.stdin.isatty()):
        return _exec_unprivileged(name, args)
    if kind == "script" and isolation.is_of_attempt(what):
        return _exec_unprivileged(name, args)
    sys.path.extend(_paths(isolated, folder=kind != "script"))
    if kind == "script" and not isolated:
        sys.path.insert(0, os.path.dirname(os.path.realpath(what)))
    if kind == "module" and _is_module_of_attempt(what):
        return _exec_unprivileged(name, args)
    text = _text_of(kind, what)
    if text is None:
        return _exec_unprivileged(name, args)
    is_own_judge = kind == "module" and _runs_tests_of_attempt(what, rest)
    sys.argv = [{"module": "-m", "code": "-c", "input": "-"}.get(kind, what), *rest]
    return watched.run(lambda send: _run_python(kind, what, text, is_own_judge))[0]


def _runs_tests_of_attempt(name, args):
    """Returns whether the arguments of unittest or doctest lead to tests in an attempt's files."""
    if name not in ("unittest", "doctest"):
        return False
    names = [arg for arg in args if not arg.startswith("-") and arg != "discover"]
    return any(isolation.is_of_attempt(n) or _is_module_of_attempt(n) for n in names or ["."])


def _is_module_of_attempt(name):
    if "/" in name or not name.partition(".")[0]:
        return False
    spec = importlib.util.find_spec(name.partition(".")[0])
    locations = [spec.origin, *(spec.submodule_search_locations or ())] if spec else ()
    return any(path and isolation.is_of_attempt(path) for path in locations)


def _text_of(kind, what):
    """Returns the program that Python is to run, or None if an attempt wrote it or it cannot be read."""
    if kind == "input":
        status = os.fstat(sys.stdin.fileno())
        # A here-document is a file of root without a name; a pipe's content may come from anybody.
        is_here_document = stat.S_ISREG(status.st_mode) and not (status.st_nlink or status.st_uid)
        is_trusted = stat.S_ISREG(status.st_mode) and not isolation.is_of_attempt("/proc/self/fd/0")
        if not is_here_document and not is_trusted:
            return None
        return sys.stdin.read()
    if kind != "script":
        return what
    try:
        with open(what, errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _run_python(kind, what, text, is_own_judge):
    """Runs tests in a child process; modules of an attempt run in another one.

    Args:
      is_own_judge: whether the tests are the attempt's files, and run in this process without rights.
    """
    if is_own_judge:
        privileges.leave_root()
    else:
        privileges.keep_rights_of_this_process()
        isolation.install()
    privileges.close_folders(writes_reward=kind != "module" and "/logs" in text)
    if kind == "module":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "script":
        runpy.run_path(what, run_name="__main__")
    else:
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(text, "<string>" if kind == "code" else "<stdin>", "exec"), module.__dict__)


def _parse_python(args):
    """Returns (kind, value, remaining arguments, is isolated); the kind is module, code, script, input or None."""
    isolated = False
    args = list(args)
    while args:
        arg = args.pop(0)
        if arg == "-":
            return "input", "", args, isolated
        if not arg.startswith("-"):
            return "script", arg, args, isolated
        if arg.startswith("--"):
            if arg in ("--version", "--help"):
                return None, "", args, isolated
            if arg == "--check-hash-based-pycs":
                args = args[1:]
            continue
        for i, letter in enumerate(arg[1:], 2):
            if letter in "Vh?":
                return None, "", args, isolated
            isolated |= letter in "IP"
            if letter in "cmWX":
                value = arg[i:] or (args.pop(0) if args else "")
                if letter in "cm":
                    return {"c": "code", "m": "module"}[letter], value, args, isolated
                break
    return "input", "", args, isolated


def _paths(isolated, folder):
    """Returns the folders that Python would put first on sys.path, which are put last here.

    So no file that an attempt left in its folder replaces a module of Python.
    """
    if isolated:
        return []
    pythonpath = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    return [*pythonpath, os.getcwd()] if folder else pythonpath


def _pytest(args, isolated, folder):
    run_pytest.available()
    return run_pytest.run(args, _paths(isolated, folder))


# -- downloads from a network -------------------------------------------------------------------------


def _packager(name, args):
    if name == "uvx":
        return _with_packages(args, is_tool=True)
    if name in ("pip", "pip3"):
        return _install(args[1:]) if args[:1] == ["install"] else 0
    command = next((arg for arg in args if not arg.startswith("-")), "")
    rest = args[args.index(command) + 1 :] if command else []
    if command == "run":
        return _with_packages(rest, is_tool=False)
    if command == "tool" and rest[:1] == ["run"]:
        return _with_packages(rest[1:], is_tool=True)
    if command == "add":
        return _install(rest)
    if command == "pip":
        return _install(rest[1:]) if rest[:1] == ["install"] else 0
    return 0  # there is one environment and one version


def _with_packages(args, is_tool):
    """Runs the program after the options of `uvx` or `uv run`."""
    args = list(args)
    while args and args[0].startswith("-"):
        option, _, value = args.pop(0).partition("=")
        if option == "--":
            break
        if option in _UV_VALUED and not value:
            value = args.pop(0) if args else ""
        if option in ("-w", "--with", "--from"):
            for package in value.split(","):
                _check_package(package)
    if not args:
        return 0
    name, rest = args[0], args[1:]
    if is_tool:
        name = re.split(r"[@=<>~!]", name)[0]
    if not is_tool and name.endswith(".py"):
        name, rest = "python3", args
    if name in (*PYTHONS, "pytest"):
        return _run(name, rest)
    if shutil.which(name) is None:
        raise run_pytest.Missing(f"program {name}")
    return _run(name, rest)


def _install(args):
    args = list(args)
    while args:
        arg = args.pop(0)
        if arg in ("-r", "--requirement", "--python", "-p", "--target", "-t"):
            args = args[1:]
        elif not arg.startswith("-") and "://" not in arg:
            _check_package(arg)
    return 0


def _check_package(requirement):
    name = re.split(r"[\[=<>~!@; ]", requirement.strip())[0].lower().replace("_", "-")
    if not name or name in _PROVIDED:
        return
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise run_pytest.Missing(f"Python package {name}") from None


def _fetch(name, args):
    addresses = [arg for arg in args if "://" in arg or _LOCAL.match(arg)]
    if addresses and all("astral.sh/uv" in address for address in addresses):
        print("true  # uv is here")
        return 0
    if addresses and not all(_LOCAL.match(address) for address in addresses):
        _note_missing(f"network ({addresses[0].partition('://')[2].partition('/')[0]})")
        return _NO_NETWORK
    return _exec_unprivileged(name, args)
