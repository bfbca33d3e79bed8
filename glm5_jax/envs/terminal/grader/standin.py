"""What is run in place of the programs that tests are started by; see the package."""

import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import sys
import types

from . import FETCHERS, INTERPRETERS, MISSING, PACKAGERS, PYTHONS, guard, run_pytest

_NOT_FOUND = 127
_NO_NETWORK = 6  # of curl: a host that cannot be found
# What is given here in another way than by a package of that name.
_PROVIDED = ("pytest", "pytest-json-ctrf", "uv", "pip", "setuptools", "wheel")
_LOCAL = re.compile(r"^(https?://)?(localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0)([:/]|$)")
_UV_VALUED = ("-p", "--python", "-w", "--with", "--from", "--project", "--directory")

_path_before = None


def main():
    """The program named by the first argument, with the others; does not return."""
    global _path_before
    name, *args = sys.argv[1:]
    _path_before = os.environ.pop("PATH_BEFORE", None)
    if os.getuid():
        _become(name, args)
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
    if name in INTERPRETERS and not any(_is_of_attempt(arg) for arg in args):
        _become(name, args, path=_path_before)  # what it starts is stood in for, too
    guard.leave_root()
    return _become(name, args)


def _become(name, args, path=None):
    if name == "python" and shutil.which(name) is None:
        name = "python3"
    program = shutil.which(name)
    if program is None:
        if os.getuid() == 0:
            _note_missing(f"program {name}")
        sys.exit(_NOT_FOUND)
    os.environ["PATH"] = path or os.environ["PATH"]
    try:
        os.execv(program, [name, *args])
    except OSError as error:  # the arguments are too long
        sys.exit(f"{name}: {error.strerror}")


def _note_missing(what):
    """For the one who grades: what comes of the tests says nothing of the attempt."""
    print(f"{what} is not on this machine", file=sys.stderr)
    name = re.sub(r"[^\w .=:@()+-]", "_", what)[:100]
    with open(f"{MISSING}/{name}", "w"):
        pass
    return _NOT_FOUND


def _is_of_attempt(path):
    """Whether there is a file of that path that the attempt left: all of them are this user's."""
    try:
        return os.stat(path).st_uid == guard.USER
    except (OSError, ValueError):
        return False


# -- Python -----------------------------------------------------------------------------------------


def _python(name, args):
    kind, what, rest, isolated = _parse_python(args)
    if kind == "module" and what in ("pytest", "py.test"):
        return _pytest(rest, isolated, folder=True)
    if kind == "module" and what in PACKAGERS:
        return _packager(what, rest)
    if kind is None or (kind == "input" and sys.stdin.isatty()):
        _become(name, args)
    folder = "" if kind != "script" else os.path.dirname(os.path.realpath(what))
    if kind == "script" and _is_of_attempt(what):
        guard.leave_root()
        _become(name, args)
    sys.path.extend(_paths(isolated, folder=kind != "script"))
    if kind == "script" and not isolated:
        sys.path.insert(0, folder)
    if kind == "module":
        found = importlib.util.find_spec(what.partition(".")[0])
        places = [found.origin, *(found.submodule_search_locations or ())] if found else ()
        if any(place and _is_of_attempt(place) for place in places):
            guard.leave_root()
            _become(name, args)
    text = what
    if kind == "input":
        text = sys.stdin.read()
    elif kind == "script":
        try:
            with open(what, errors="replace") as file:
                text = file.read()
        except OSError:
            _become(name, args)
    guard.keep_rights_here()
    if kind != "module" and "/logs" not in text:
        guard.close_folders()
    sys.argv = [{"module": "-m", "code": "-c", "input": "-"}.get(kind, what), *rest]
    if kind == "module":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "script":
        runpy.run_path(what, run_name="__main__")
    else:
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(text, "<string>" if kind == "code" else "<stdin>", "exec"), module.__dict__)
    return 0


def _parse_python(args):
    """(module, code, script, input or None, which, arguments behind it, whether it is isolated)."""
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
    """What Python would have put before everything else, and is put behind it here: nothing that an attempt
    left in its folder takes the place of a module of Python's."""
    if isolated:
        return []
    given = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    return [*given, os.getcwd()] if folder else given


def _pytest(args, isolated, folder):
    run_pytest.available()
    return run_pytest.run(args, _paths(isolated, folder))


# -- what would come from a network -------------------------------------------------------------------


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
    return 0  # environments and versions: there is one of each


def _with_packages(args, is_tool):
    """`uvx` and `uv run`: the program behind the options."""
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
    guard.leave_root()
    return _become(name, args)
