"""The process in which an attempt's modules run when tests import them; an ordinary user's, without rights."""

import asyncio
import contextlib
import importlib
import importlib.util
import io
import os
import runpy
import sys

from .wire import Peer


class _Around:
    """Takes over folder, variables and arguments of the tests, and gives back what was printed."""

    def before(self, extra):
        self.streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        if extra:
            with contextlib.suppress(OSError):  # a folder of the tests, closed to this user
                os.chdir(extra["cwd"])
            os.environ.clear()
            os.environ.update(extra["environ"])
            sys.argv[:] = extra["argv"]

    def after(self):
        said = [getattr(stream, "getvalue", str)() for stream in (sys.stdout, sys.stderr)]
        sys.stdout, sys.stderr = self.streams
        return {"printed": said}


def _load(name, path, folders):
    """The module of that name and file, imported if it was not."""
    found = sys.modules.get(name)
    if found is not None and getattr(found, "__file__", None) == path:
        return _names(found)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == path:
        return _names(importlib.import_module(name))
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return _names(module)


def _names(module):
    public = getattr(module, "__all__", None)
    if public is None:
        public = [name for name in vars(module) if not name.startswith("_")]
    return [_Reference(module), [str(name) for name in public], module.__doc__]


class _Reference:
    """A module on its way as an object."""

    def __init__(self, module):
        object.__setattr__(self, "module", module)

    def __getattr__(self, name):
        return getattr(self.module, name)

    def __setattr__(self, name, value):
        setattr(self.module, name, value)

    def __delattr__(self, name):
        delattr(self.module, name)

    def __dir__(self):
        return dir(self.module)


def main():
    """Answers requests; the arguments are descriptors for requests and answers, and sys.path."""
    reader, writer = open(int(sys.argv[1]), "rb"), open(int(sys.argv[2]), "wb")
    sys.path[:] = sys.argv[3].split(":")
    sys.argv[:] = [""]
    peer = Peer(reader, writer, is_open=True)

    def wait(number):
        return asyncio.run(peer.taken(number))

    peer.serve(
        {
            "load": _load,
            "await": wait,
            "run": lambda path, name: runpy.run_path(path, run_name=name),
        },
        _Around(),
    )
