"""The way into a sandbox: a process of its own that `child` starts and that imports nothing else of ours.

`main` is given a descriptor of a marshalled dict: what to do and with what. One short process for each
start, command and file transfer: namespaces are per process, and the one that enters them must have a
single thread. Its outcome goes to the descriptor `status`: "exit N", "signal N", "refused ERRNO TEXT"
(what was found in the sandbox is not what was asked for) or "failed TEXT" (the sandbox does not work).

Inside the sandbox nothing may be imported or looked up by name: those files belong to the program
under test. All that is needed is imported before. `_signal` and no json: of the time that a short
command takes much is imports, and `signal` would bring enum.
"""

import errno
import marshal
import os
import sys

from .system import Refused, report

OUTSIDE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def main(descriptor):
    """Does what the task in the descriptor asks for."""
    with open(descriptor, "rb") as file:
        task = marshal.load(file)
    for descriptor in task["descriptors"]:
        os.set_inheritable(descriptor, False)
    if task["operation"] == "launch":
        from . import launch as module
    elif task["operation"] in ("execute", "kill_all"):
        from . import execute as module
    elif task["operation"] == "stop_links":
        from . import mounts as module
    elif task["operation"] == "changes":
        from . import changes as module
    else:
        from . import files as module
    operation = getattr(module, task["operation"])
    os.umask(0o022)
    # From here on a forgotten import is an error instead of a file of the sandbox.
    sys.path.clear()
    sys.path_hooks.clear()
    sys.meta_path.clear()
    try:
        operation(task)
    except Refused as error:
        report(task, f"refused {error.args[0]} {error.args[1]}")
    except OSError as error:
        # A program that runs meanwhile can take away what is being read; a full disk outside is none
        # of its doing.
        inside = task["operation"] in ("get", "get_folder", "save", "put", "changes")
        inside |= task["operation"] == "snapshot" and error.errno not in OUTSIDE
        report(task, f"refused {error.errno} {error}" if inside else f"failed {error}")
    except Exception as error:
        report(task, f"failed {error}")
