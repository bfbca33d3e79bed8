"""Starts a sandbox: builds its file system and users, then executes bubblewrap, which closes it."""

import _signal as signal  # pyright: ignore[reportMissingImports]: typeshed lacks it
import ctypes
import os

from .system import NEWNS, NEWUSER, SET_PDEATHSIG, Failed, become, call

MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x4000, 0x40000, 2, 4


def launch(task):
    """Builds the file system in new namespaces, then executes bubblewrap."""
    die_with_caller(task)
    if task["owner"]:
        # Mounted with root's rights, because overlay then stores its metadata in trusted attributes. Every tmpfs has
        # those (user attributes only since Linux 6.6), and the sandbox's users cannot change them.
        call("unshare", NEWNS)
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        build_root(task)
    enter_user_namespace(task["owner"])
    if not task["owner"]:
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        build_root(task)
    write("/proc/sys/user/max_user_namespaces", "0")
    die_with_caller(task)  # again, because changing the user resets it
    for descriptor in task["keep"]:
        os.set_inheritable(descriptor, True)
    os.execv(task["command"][0], task["command"])


def die_with_caller(task):
    """Makes the kernel kill this process when its parent ends. Raises Failed if the parent has already ended."""
    call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != task["caller"]:
        raise Failed("its caller is gone")


def enter_user_namespace(owner):
    """Enters a user namespace in which users 0..65535 are `owner`.. outside; without an owner, 0 is the caller
    and the only user.
    """
    user, group = os.getuid(), os.getgid()
    if not owner:
        call("unshare", NEWUSER | NEWNS)
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"0 {user} 1")
        write("/proc/self/gid_map", f"0 {group} 1")
    else:
        # Only a process that stayed outside may map a range of users.
        parent, (waiting, ready) = os.getpid(), os.pipe()
        child = os.fork()
        if not child:
            os.close(ready)
            os.read(waiting, 1)
            write(f"/proc/{parent}/uid_map", f"0 {owner} 65536")
            write(f"/proc/{parent}/gid_map", f"0 {owner} 65536")
            os._exit(0)
        os.close(waiting)
        call("unshare", NEWUSER | NEWNS)
        os.close(ready)
        if os.waitpid(child, 0)[1]:
            raise Failed(
                f"users {owner}..{owner + 65535} could not be mapped into a user namespace"
            )
    become(0, owner)


def mount(source, target, kind, flags, options=None):
    """Calls mount(2); texts may be None."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call("mount", *arguments, ctypes.c_ulong(flags), options and options.encode())


def write(path, text):
    """Writes a file of the system or of the skeleton."""
    with open(path, "w") as file:
        file.write(text)


def build_root(task):
    """Mounts /tmp/root, an overlay of the layers over a skeleton; written files are stored in a tmpfs."""
    owner = task["owner"]
    # Opened in the namespace of the mount, and before a mount covers /tmp, which may hold them.
    layers = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in task["layers"]]
    size = f"size={task['disk_bytes']},nr_inodes={task['max_files']},mode=755"
    mount("sandbox", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    for name in ("upper", "work", "root", "skeleton"):
        os.mkdir(f"/tmp/{name}", 0o755)
        os.chown(f"/tmp/{name}", owner or -1, owner or -1)
    for path, kind, mode, user, content in task["skeleton"]:
        path = "/tmp/skeleton" + path
        if kind == "folder":
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode)
        elif kind == "link":
            os.symlink(content, path)
        else:
            write(path, content)
        # Without an owner there is only one user, who already owns them.
        if owner:
            os.chown(path, owner + user, owner + user, follow_symlinks=False)
    lower = ":".join([f"/proc/self/fd/{descriptor}" for descriptor in layers] + ["/tmp/skeleton"])
    options = f"lowerdir={lower},upperdir=/tmp/upper,workdir=/tmp/work"
    # An overlay that is mounted in a user namespace needs "userxattr".
    options += ",redirect_dir=nofollow,metacopy=off" if owner else ",userxattr"
    mount("sandbox", "/tmp/root", "overlay", MS_NOSUID | MS_NODEV, options)
