"""Changes mounts of a running sandbox: folders without links, and processes hidden from other users."""

import os
import stat

from .files import names_of, open_folder, open_root
from .launch import MS_NODEV, MS_NOSUID, mount
from .system import report

MS_REMOUNT, MS_BIND, MS_NOSYMFOLLOW, MS_NOEXEC = 32, 4096, 256, 8


def stop_links(task):
    """Remounts the folders so that no process of the sandbox follows a link in them or below."""
    root = open_root(task)
    for path in task["folders"]:
        *parents, name = names_of(path)
        parent = open_folder(root, parents, path)
        # Nothing untrusted runs yet; a link instead of a folder is left unchanged.
        if _is_folder(name, parent):
            os.fchdir(parent)
            mount(name, name, None, MS_BIND)
            mount(None, name, None, MS_REMOUNT | MS_BIND | MS_NOSYMFOLLOW | MS_NOSUID | MS_NODEV)
        os.close(parent)
    report(task, "exit 0")


def hide_processes(task):
    """Remounts /proc to show a process only to its user and to root's group, because others could read its
    arguments.
    """
    os.fchdir(open_folder(open_root(task), ["proc"], "/proc"))
    flags = MS_REMOUNT | MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount(None, ".", None, flags, "hidepid=2,gid=0")
    report(task, "exit 0")


def _is_folder(name, parent):
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
