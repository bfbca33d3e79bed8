"""Starts a sandbox: its file system and users, then bubblewrap, which closes it."""

import _signal as signal
import ctypes
import os

from .system import NEWNS, NEWUSER, Failed, become, call

MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x4000, 0x40000, 2, 4
SET_PDEATHSIG = 1


def launch(task):
    """Builds the file system in namespaces of its own and turns into bubblewrap."""
    die_with_caller(task)
    if task["owner"]:
        # Mounted with the rights of root: overlay then keeps its notes in attributes that every
        # tmpfs has (user attributes came to it with Linux 6.6) and the sandbox's users lack.
        call("unshare", NEWNS)
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        build_root(task)
    enter_user_namespace(task["owner"])
    if not task["owner"]:
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        build_root(task)
    write("/proc/sys/user/max_user_namespaces", "0")
    die_with_caller(task)  # again: who becomes another user is released from it
    for descriptor in task["keep"]:
        os.set_inheritable(descriptor, True)
    os.execv(task["command"][0], task["command"])


def die_with_caller(task):
    """Whoever asked for the sandbox may be killed at any time; Failed if that was before now."""
    call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != task["caller"]:
        raise Failed("its caller is gone")


def enter_user_namespace(owner):
    """Users 0..65535 become owner.. outside; without an owner user 0 is the caller and no other is."""
    user, group = os.getuid(), os.getgid()
    if not owner:
        call("unshare", NEWUSER | NEWNS)
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"0 {user} 1")
        write("/proc/self/gid_map", f"0 {group} 1")
    else:
        # A range may be given only by one who stayed outside.
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
            raise Failed(f"users {owner}..{owner + 65535} could not be given to a user namespace")
    become(0, owner)


def mount(source, target, kind, flags, options=None):
    """mount(2); texts may be None."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call("mount", *arguments, ctypes.c_ulong(flags), options and options.encode())


def write(path, text):
    """Writes a file of the system or of the skeleton."""
    with open(path, "w") as file:
        file.write(text)


def build_root(task):
    """/tmp/root, an overlay of the layers over a skeleton; what is written stays in a tmpfs."""
    owner = task["owner"]
    # In the namespace they are mounted in, and before /tmp, where they may lie, is covered.
    layers = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in task["layers"]]
    size = f"size={task['disk_bytes']},nr_inodes={task['files']},mode=755"
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
        # Without an owner there is only one user, whose they are already.
        if owner:
            os.chown(path, owner + user, owner + user, follow_symlinks=False)
    lower = ":".join([f"/proc/self/fd/{descriptor}" for descriptor in layers] + ["/tmp/skeleton"])
    options = f"lowerdir={lower},upperdir=/tmp/upper,workdir=/tmp/work"
    # "userxattr" is what an overlay needs that is mounted in a user namespace.
    options += ",redirect_dir=nofollow,metacopy=off" if owner else ",userxattr"
    mount("sandbox", "/tmp/root", "overlay", MS_NOSUID | MS_NODEV, options)
