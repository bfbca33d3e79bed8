"""Runs an attempt's modules that tests import, in a process of an ordinary user without rights."""

import asyncio
import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys

from .wire import Peer


class _Around:
    """Applies the folder, variables and arguments of the tests before a request, and returns printed text
    after it.
    """

    def before(self, extra):
        self.streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        if extra:
            with contextlib.suppress(OSError):  # a folder of the tests that this user cannot enter
                os.chdir(extra["cwd"])
            os.environ.clear()
            os.environ.update(extra["environ"])
            sys.argv[:] = extra["argv"]

    def after(self):
        texts = [getattr(stream, "getvalue", str)() for stream in (sys.stdout, sys.stderr)]
        sys.stdout, sys.stderr = self.streams
        return {"printed": texts}


def _load(name, path, folders, source):
    """Returns the module of a name and file, imported if needed.

    Args:
      source: text of a file that only tests can read; None to read it.
    """
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == path:
        return _names(loaded)
    try:
        spec = importlib.util.find_spec(name) if source is None else None
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == path:
        return _names(importlib.import_module(name))
    loader = None if source is None else _Text(name, path, source)
    spec = importlib.util.spec_from_file_location(
        name, path, loader=loader, submodule_search_locations=folders
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no file of a module", name=name, path=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return _names(module)


class _Text(importlib.machinery.SourceFileLoader):
    """Loader of a module from its text."""

    def __init__(self, name, path, source):
        super().__init__(name, path)
        self.source = source

    def get_data(self, path):
        return self.source

    def get_code(self, name):
        return self.source_to_code(self.source, self.path)


def _names(module):
    public = getattr(module, "__all__", None)
    if public is None:
        public = [name for name in vars(module) if not name.startswith("_")]
    return [_Reference(module), [str(name) for name in public], module.__doc__]


class _Reference:
    """Module that is sent as an object."""

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
    """Serves requests; the arguments are descriptors for requests and answers, and sys.path."""
    reader, writer = open(int(sys.argv[1]), "rb"), open(int(sys.argv[2]), "wb")
    sys.path[:] = sys.argv[3].split(":")
    sys.argv[:] = [""]
    peer = Peer(reader, writer, is_open=True)

    def wait(number):
        return asyncio.run(peer.object_of(number))

    peer.serve(
        {
            "load": _load,
            "await": wait,
            "run": lambda path, name: runpy.run_path(path, run_name=name),
        },
        _Around(),
    )
