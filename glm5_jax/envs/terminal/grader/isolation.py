"""Runs modules of an attempt in a separate process when tests import them.

What decides on an attempt never shares a process with it, because the attempt could end the tests, write
their report, or change what counts as a passed test. After `install`, Python's loaders run files of an
attempt in a `worker`; tests get values and proxies (`wire`). Code of an attempt that reaches this process
in another way, and is recognised by its file name, raises an error.
"""

import builtins
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import runpy
import subprocess
import sys
import types
import zipimport

from . import FOLDER, POLICY, WORKER, privileges
from .wire import Peer

# Written just before the tests start; newer files were made during the tests. It holds a line with a search path, then
# "identity path" of each file of the tests, ended by a null byte.
MARKER = f"{FOLDER}/path"
# Audit events of loading a library, whose last argument is the path.
_LIBRARY_EVENTS = ("ctypes.dlopen", "sqlite3.load_extension")
_client = None


def is_of_attempt(path):
    """Returns whether a file is an attempt's, or was made while tests ran; False if there is none.

    A module in an archive, such as tool.zip/module.py, is a part of that file.
    """
    try:
        status = os.stat(path)
    except NotADirectoryError:
        return is_of_attempt(os.path.dirname(path))
    except (OSError, ValueError, TypeError):
        return False
    if status.st_uid == privileges.USER:
        return True
    # Permissions of test files may change.
    return (
        _identity(status) not in _tests().values()
        and status.st_ctime_ns >= os.stat(MARKER).st_ctime_ns
    )


def changed_test_files(top):
    """Returns the test files, at a path or below it, whose content changed since the tests started."""
    top = os.path.abspath(top)
    known = {p: i for p, i in _tests().items() if p == top or p.startswith(top + "/")}
    return [
        path
        for path, identity in known.items()
        if path.endswith(".py") and _identity_at(path) != identity
    ]


def _identity_at(path):
    try:
        return _identity(os.lstat(path))
    except OSError:
        return None


def _identity(status):
    """Returns the identity of a file and its content; a copy that preserves times has the times of another file."""
    seconds, rest = divmod(status.st_mtime_ns, 10**9)
    return f"{status.st_ino}:{seconds}.{rest:09}:{status.st_size}"


@functools.cache
def _tests():
    """Returns path -> identity of the files and folders in /tests when the tests started."""
    with open(MARKER, errors="surrogateescape") as file:
        lines = file.read().partition("\n")[2].split("\0")[:-1]
    return {path: identity for identity, _, path in (line.partition(" ") for line in lines)}


def install():
    """Makes files of an attempt run in a separate process, and keeps them from replacing modules of the image."""
    machinery = importlib.machinery
    sys.meta_path.insert(0, _Trusted([path for path in sys.path if not is_of_attempt(path)]))
    for kind in (
        machinery.SourceFileLoader,
        machinery.SourcelessFileLoader,
        machinery.ExtensionFileLoader,
        zipimport.zipimporter,
    ):
        _guard(kind)
    creating = machinery.ExtensionFileLoader.create_module
    machinery.ExtensionFileLoader.create_module = lambda self, spec: (  # pyright: ignore[reportAttributeAccessIssue]: importlib makes the module itself for None
        None if is_of_attempt(self.path) else creating(self, spec)
    )
    os.chdir = _staying_outside(os.chdir)
    run_path = runpy.run_path
    runpy.run_path = lambda path, init_globals=None, run_name=None: (
        _connected().request("run", os.path.abspath(path), run_name or "<run_path>")
        if is_of_attempt(path)
        else run_path(path, init_globals, run_name)
    )
    run_module = runpy.run_module
    runpy.run_module = lambda name, init_globals=None, run_name=None, alter_sys=False: (
        _connected().request("run", path, run_name or name)
        if is_of_attempt(path := _file_of(name))
        else run_module(name, init_globals, run_name, alter_sys)
    )
    sys.addaudithook(_refuse)


def _file_of(name):
    """Returns the file that `runpy.run_module` executes for a name, or None."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        return None
    return spec and spec.origin


class _Trusted:
    """Finder that looks up modules in folders of the image and the tests first, whatever tests add to sys.path
    later.
    """

    def __init__(self, folders):
        self._folders = folders

    def find_spec(self, name, path=None, target=None):
        """Returns the image's module of that name, if there is one."""
        if path is None:
            return importlib.machinery.PathFinder.find_spec(name, self._folders)
        return None


def install_in_pytest():
    """Does the same for the loader of pytest: attempts' files that are named like tests."""
    hook = importlib.import_module("_pytest.assertion.rewrite").AssertionRewritingHook
    hook.exec_module = _executing(hook.exec_module)


def _executing(execute):
    def exec_module(self, module):
        path = getattr(module.__spec__, "origin", None) or getattr(self, "path", None)
        if is_of_attempt(path):
            _fill(module, path)
        else:
            execute(self, module)

    return exec_module


def _staying_outside(change):
    """Wraps `os.chdir` so that no link leads into a folder of root, whose files would then be read for the attempt's."""

    def chdir(path):
        try:
            before = os.getcwd()
        except FileNotFoundError:  # it was deleted
            before = "/"
        change(path)
        where = os.getcwd()
        if not isinstance(path, int):
            requested = os.path.normpath(os.path.join(before, os.fsdecode(path)))
            for folder in POLICY["watched"]:
                if _is_below(where, folder) and not _is_below(requested, folder):
                    change(before)
                    raise PermissionError(f"{requested} is a link to {where}")

    return chdir


def _is_below(path, folder):
    return path == folder or path.startswith(folder + "/")


def _guard(loader):
    """Makes a class of importlib's loaders refuse the attempt's modules, or run them in a separate process."""
    loader.exec_module = _executing(loader.exec_module)
    loader.get_code = _compiling(loader.get_code)


def _compiling(compile_module):
    """Wraps `get_code`, because a compiled file states any file name as its own (`_refuse` reads that)."""

    def get_code(self, name):
        _check_is_not_of_attempt(self.get_filename(name))
        return compile_module(self, name)

    return get_code


def _refuse(event, arguments):
    if event == "exec" and arguments and isinstance(arguments[0], types.CodeType):
        _check_is_not_of_attempt(arguments[0].co_filename)
    elif event in _LIBRARY_EVENTS and isinstance(arguments[-1], str | bytes):
        _check_is_not_of_attempt(arguments[-1])
        _check_is_not_of_attempt(os.fsencode(arguments[-1]) + b".so")  # SQLite adds it


def _check_is_not_of_attempt(path):
    if is_of_attempt(path):
        raise PermissionError(
            f"{os.fsdecode(path)} came from the attempt, whose code does not run in the process of its tests"
        )


class _Module(types.ModuleType):
    """Module that runs in another process."""

    def __getattr__(self, name):
        if name.startswith("__") and name != "__version__" or name == "pytest_plugins":
            raise AttributeError(name)
        return getattr(vars(self)["_remote"], name)

    def __setattr__(self, name, value):
        if name.startswith("__") or isinstance(value, types.ModuleType):
            super().__setattr__(name, value)
        else:
            setattr(vars(self)["_remote"], name, value)

    def __delattr__(self, name):
        delattr(vars(self)["_remote"], name)

    def __dir__(self):
        return sorted({*vars(self), *vars(self)["__all__"]})


def _fill(module, path):
    folders = getattr(module, "__path__", None)
    path, source = os.path.abspath(path), None
    if path.startswith("/tests/"):  # a copy that the worker cannot read
        with open(path, "rb") as file:
            source = file.read()
    try:
        remote, names, text = _connected().request(
            "load", module.__name__, path, folders and list(folders), source
        )
    except SystemExit as error:
        raise ImportError(f"{module.__name__} ended itself with {error.code!r}") from None
    # `import *` must not import pytest hooks, nor replace builtins such as `len`.
    names = [
        name for name in names if not name.startswith("pytest_") and not hasattr(builtins, name)
    ]
    module.__all__, module.__doc__ = names, text
    vars(module)["_remote"] = remote
    module.__class__ = _Module


class _Around:
    """State of this process that is sent with each request, and printed text that comes back."""

    def before(self):
        return {"cwd": os.getcwd(), "environ": dict(os.environ), "argv": sys.argv}

    def after(self, extra):
        for stream, text in zip((sys.stdout, sys.stderr), (extra or {}).get("printed", ())):
            if text:
                stream.write(text)


def _connected():
    global _client
    if _client is None:
        (reading, answers), (requests, writing) = os.pipe(), os.pipe()
        numbers = [str(requests), str(answers)]
        subprocess.Popen(
            [sys.executable, *WORKER, *numbers, ":".join(sys.path)],
            pass_fds=[requests, answers],
            stdin=subprocess.DEVNULL,
        )
        for descriptor in (requests, answers):
            os.close(descriptor)
        reader, writer = open(reading, "rb"), open(writing, "wb")
        _client = Peer(reader, writer, is_open=False, around=_Around())
    return _client
