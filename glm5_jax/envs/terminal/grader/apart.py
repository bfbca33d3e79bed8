"""Modules of an attempt, run in a process of their own when tests import them.

What decides on an attempt never shares a process with it: there it could end the tests, write their report, or change
what passes for a test. `install` has the loaders of Python run files that came from an attempt in a `worker`; what
tests get of them are values and proxies (`wire`). Code of an attempt that comes into this process by another way, and
can be told by its file's name, is refused.
"""

import builtins
import functools
import importlib
import importlib.machinery
import os
import runpy
import subprocess
import sys
import types

from . import FOLDER, guard
from .wire import Peer

# Written just before the tests start: what is newer came from them. A search path, and inodes of the tests.
MARKER = f"{FOLDER}/path"
_WORKER = f"import sys; sys.path.append('{FOLDER}/code'); import grader.worker as w; w.main()"
_client = None


def is_of_attempt(path):
    """Whether a file is an attempt's, or was made while tests ran; False if there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError, TypeError):
        return False
    if found.st_uid == guard.USER:
        return True
    # Of tests permissions may change.
    changed = found.st_mtime_ns if found.st_ino in _tests() else found.st_ctime_ns
    return changed >= os.stat(MARKER).st_ctime_ns


@functools.cache
def _tests():
    """Numbers of the files and folders that were in /tests when the tests started."""
    with open(MARKER) as file:
        return {int(number) for number in file.read().split("\n")[1].split()}


def install():
    """From here on files of an attempt run in a process of their own, and take the place of no module of the image's."""
    machinery = importlib.machinery
    sys.meta_path.insert(0, _Trusted([path for path in sys.path if not is_of_attempt(path)]))
    for kind in (
        machinery.SourceFileLoader,
        machinery.SourcelessFileLoader,
        machinery.ExtensionFileLoader,
    ):
        kind.exec_module = _executing(kind.exec_module)
    creating = machinery.ExtensionFileLoader.create_module
    machinery.ExtensionFileLoader.create_module = lambda self, spec: (
        None if is_of_attempt(self.path) else creating(self, spec)
    )
    run_path = runpy.run_path
    runpy.run_path = lambda path, init_globals=None, run_name=None: (
        _connected().request("run", os.path.abspath(path), run_name or "<run_path>")
        if is_of_attempt(path)
        else run_path(path, init_globals, run_name)
    )
    sys.addaudithook(_refuse)


class _Trusted:
    """Finds modules in the folders of the image and of the tests first, whatever tests put on sys.path later."""

    def __init__(self, folders):
        self._folders = folders

    def find_spec(self, name, path=None, target=None):
        """The module of the image's of that name, if there is one."""
        if path is None:
            return importlib.machinery.PathFinder.find_spec(name, self._folders)
        return None


def install_in_pytest():
    """The same for what pytest loads by itself: attempts' files that are named like tests."""
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


def _refuse(event, arguments):
    if event == "exec" and arguments and isinstance(arguments[0], types.CodeType):
        path = arguments[0].co_filename
    elif event == "ctypes.dlopen" and arguments and isinstance(arguments[0], str | bytes):
        path = arguments[0]
    else:
        return
    if is_of_attempt(path):
        raise PermissionError(
            f"{os.fsdecode(path)} came from the attempt, whose code does not run in the process of its tests"
        )


class _Module(types.ModuleType):
    """A module that another process runs."""

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
    try:
        remote, names, text = _connected().request(
            "load", module.__name__, os.path.abspath(path), folders and list(folders)
        )
    except SystemExit as error:
        raise ImportError(f"{module.__name__} ended itself with {error.code!r}") from None
    # `import *` must not bring what pytest calls, nor another `len`.
    names = [
        name for name in names if not name.startswith("pytest_") and not hasattr(builtins, name)
    ]
    module.__all__, module.__doc__ = names, text
    vars(module)["_remote"] = remote
    module.__class__ = _Module


class _Around:
    """What of this process the other one takes over, and what comes back."""

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
            [sys.executable, "-I", "-B", "-c", _WORKER, *numbers, ":".join(sys.path)],
            pass_fds=[requests, answers],
            stdin=subprocess.DEVNULL,
        )
        for descriptor in (requests, answers):
            os.close(descriptor)
        reader, writer = open(reading, "rb"), open(writing, "wb")
        _client = Peer(reader, writer, is_open=False, around=_Around())
    return _client
