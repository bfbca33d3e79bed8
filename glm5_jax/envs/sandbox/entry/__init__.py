"""Enters a sandbox: a separate process that `entry_process` starts and that imports nothing else of the package.

`main` gets a descriptor of a marshalled dict, the task. One short process runs for each start, command and
file transfer, because namespaces are per process, and the process that enters them must have a single
thread. It reports to the descriptor `status` one of

- "exit N" or "signal N";
- "refused ERRNO TEXT": a file in the sandbox is not as requested;
- "failed TEXT": the sandbox does not work.

Inside the sandbox nothing may be imported or looked up by name, because those files belong to the program
under test. Everything is imported before. It uses `_signal` and no json, because imports take much of the
time of a short command, and `signal` would import enum.
"""

import errno
import marshal
import os
import sys

from .system import Refused, report

OUTSIDE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def main(descriptor):
    """Runs the task in the descriptor."""
    with open(descriptor, "rb") as file:
        task = marshal.load(file)
    for descriptor in task["descriptors"]:
        os.set_inheritable(descriptor, False)
    if task["operation"] == "launch":
        from . import launch as module
    elif task["operation"] in ("execute", "kill_all"):
        from . import execute as module
    elif task["operation"] in ("stop_links", "hide_processes"):
        from . import mounts as module
    elif task["operation"] == "changes":
        from . import changes as module
    else:
        from . import files as module
    operation = getattr(module, task["operation"])
    os.umask(0o022)
    # From here on a missing import is an error; it cannot load a file of the sandbox.
    sys.path.clear()
    sys.path_hooks.clear()
    sys.meta_path.clear()
    try:
        operation(task)
    except Refused as error:
        report(task, f"refused {error.args[0]} {error.args[1]}")
    except OSError as error:
        # A running program can remove files during a transfer, but a full disk outside is not its fault.
        inside = task["operation"] in ("get", "save", "put", "changes")
        inside |= task["operation"] == "snapshot" and error.errno not in OUTSIDE
        report(task, f"refused {error.errno} {error}" if inside else f"failed {error}")
    except Exception as error:
        report(task, f"failed {error}")
