"""The way into a sandbox, in a process of its own that `child` starts and that imports nothing of ours.

`main` is given a descriptor of a marshalled dict: what to do and with what. One short process for each start, command and
file transfer: namespaces are per process, and the one that enters them must have a single thread.
Its outcome goes to the descriptor `status`: "exit N", "signal N", "refused ERRNO TEXT" (what was found
in the sandbox is not what was asked for) or "failed TEXT" (the sandbox does not work).

Inside the sandbox nothing may be imported or looked up by name: those files belong to the program
under test. All that is needed is imported here, before, and paths are walked without following links.
"""

import _signal as signal  # itself `signal` imports enum, which takes a third of this process's time
import ctypes
import errno
import marshal
import os
import resource
import stat
import sys

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x4000, 0x40000, 2, 4
SET_PDEATHSIG, SET_SECCOMP, CAPBSET_DROP, SET_NO_NEW_PRIVS = 1, 22, 24, 38
SECCOMP_MODE_FILTER = 2
DEEPEST = 200  # folders in folders; each level of a walk keeps a descriptor open
CHUNK = 1 << 20
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """What lies in the sandbox is not what was asked for: the program's doing, not the sandbox's."""


class Failed(Exception):
    """The system refused what a sandbox needs."""


def call(function, *arguments):
    """A function of libc; Failed if it fails."""
    if getattr(libc, function)(*arguments) == -1:
        raise Failed(f"{function}: {os.strerror(ctypes.get_errno())}")


def mount(source, target, kind, flags, options=None):
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call("mount", *arguments, ctypes.c_ulong(flags), options and options.encode())


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


# -- start ------------------------------------------------------------------------------------------


def launch(task):
    """Builds the file system in namespaces of its own and turns into bubblewrap, which closes it."""
    call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
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
    for descriptor in task["keep"]:
        os.set_inheritable(descriptor, True)
    os.execv(task["command"][0], task["command"])


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


def become(user, owner):
    if owner:  # who is the only user there is may not give up groups
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


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


# -- commands ---------------------------------------------------------------------------------------


def execute(task):
    """Runs a command in the sandbox and reports how it ended."""
    groups = [os.open(path, os.O_WRONLY) for path in task["groups"]]
    if task["sandbox"] is not None:
        call("setns", task["sandbox"], ALL_NAMESPACES)
    child = os.fork()
    if not child:
        start_program(task, groups)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # A child that failed before the program started has reported that itself.
    report(task, f"exit {code}" if code >= 0 else f"signal {-code}")


def start_program(task, groups):
    """Turns this process into the program; reports why if the sandbox could not be entered."""
    try:
        for descriptor in groups:
            os.write(descriptor, b"0")
        if task["sandbox"] is not None:
            os.setsid()
            restrict(task)
        for signal_ in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(signal_, signal.SIG_DFL)
        for name, value in task["rlimits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
    except BaseException as error:
        report(task, f"failed {error}")
        os._exit(1)
    code, text = 127, "not found"
    try:
        os.chdir(task["cwd"])
        if task["filter"]:
            install_filter(task["filter"])
        replace(task["command"], task["env"])
    except FileNotFoundError as error:
        text = f"{error.filename or task['command'][0]}: not found"
    except OSError as error:
        code, text = 126, f"{error.filename or task['command'][0]}: {error.strerror}"
    except ValueError as error:  # a null byte
        code, text = 126, str(error)
    os.write(2, f"sandbox: {text}\n".encode(errors="replace"))
    os._exit(code)


def restrict(task):
    """No capability but those of the task can be had from here on, nor privileges by set-user-id."""
    for capability in range(64):
        if capability not in task["capabilities"]:
            if libc.prctl(CAPBSET_DROP, capability, 0, 0, 0) == -1:
                if ctypes.get_errno() != errno.EINVAL:  # past the last there is
                    raise Failed("capabilities cannot be dropped")
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    become(task["user"], task["owner"])


def install_filter(program):
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    data = Program(len(program) // 8, program)
    call("prctl", SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(data), 0, 0)


def replace(command, env):
    """execve; the name is looked for on the path of `env`, as a shell does."""
    name = command[0]
    if "/" in name:
        os.execve(name, command, env)
    refusal = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    for folder in env.get("PATH", "/usr/bin:/bin").split(":"):
        try:
            os.execve(os.path.join(folder, name), command, env)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except PermissionError as error:
            refusal = error
    raise refusal


def kill_all(task):
    """Ends every process of the sandbox but its first."""
    call("setns", task["sandbox"], ALL_NAMESPACES)
    child = os.fork()
    if not child:
        become(0, task["owner"])
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os._exit(0)
    os.waitpid(child, 0)
    report(task, "exit 0")


# -- files ------------------------------------------------------------------------------------------


def open_root(task):
    """A descriptor of the sandbox's root folder, with this process as its root user."""
    if task["sandbox"] is not None:
        call("setns", task["sandbox"], NEWUSER | NEWNS)
        become(0, task["owner"])
        return os.open("/", FOLDER)
    return os.open(task["root"], FOLDER)


def names_of(path):
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names:
        raise Refused(errno.EINVAL, f"{path}: a path with .. in it")
    return names


def open_folder(parent, names, path, user=None, replace=False):
    """The folder below `parent`; missing ones are made for `user`, if one is given."""
    current = os.dup(parent)
    for name in names:
        try:
            if user is not None:
                try:
                    os.mkdir(name, 0o755, dir_fd=current)
                    os.chown(name, user, user, dir_fd=current, follow_symlinks=False)
                except FileExistsError:
                    pass
            inner = os.open(name, FOLDER, dir_fd=current)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                what = f"{name} is no folder, or a link, which is not followed"
                raise Refused(errno.ENOTDIR, f"{path}: {what}") from None
            raise Refused(error.errno, f"{path}: {name}: {os.strerror(error.errno)}") from None
        finally:
            os.close(current)
        current = inner
    return current


def kind_of(mode):
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a named pipe"}
    kinds |= {stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "a file")


def open_file(folder, name, path):
    """A regular file, opened for reading; neither a link nor a pipe or device is ever opened."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(errno.EINVAL, f"{path}: {kind_of(found.st_mode)}, not a regular file")
        # Between the two calls it may have become anything.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        file = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        raise Refused(error.errno, f"{path}: {os.strerror(error.errno)}") from None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise Refused(errno.EINVAL, f"{path}: {kind_of(found.st_mode)}, not a regular file")
    return file, found


def send(data):
    while data:
        data = data[os.write(1, data) :]


def get(task):
    """A regular file, to standard output."""
    path, left = task["path"], task["max_bytes"]
    names = names_of(path)
    if not names:
        raise Refused(errno.EISDIR, f"{path}: a folder, not a regular file")
    file, _ = open_file(open_folder(open_root(task), names[:-1], path), names[-1], path)
    while data := os.read(file, CHUNK):
        left -= len(data)
        if left < 0:
            text = f"{path}: more than the {task['max_bytes']} bytes asked for"
            raise Refused(errno.EFBIG, text)
        send(data)
    report(task, "exit 0")


def walk(folder, visit, path="", depth=0):
    """visit(folder descriptor, name, path, stat) of all below, each folder before what it holds."""
    if depth > DEEPEST:
        raise Refused(errno.ELOOP, f"folders more than {DEEPEST} deep, at {path[:100]}...")
    for name in sorted(os.listdir(folder)):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        below = path + "/" + name if path else name
        visit(folder, name, below, found)
        if stat.S_ISDIR(found.st_mode):
            inner = os.open(name, FOLDER, dir_fd=folder)
            try:
                walk(inner, visit, below, depth + 1)
            finally:
                os.close(inner)


def get_folder(task):
    """What lies below a folder, to standard output as `pack` reads it; links stay links."""
    left = task["max_bytes"]

    def visit(folder, name, path, found):
        nonlocal left
        kind, size, data = stat.S_IFMT(found.st_mode), 0, b""
        if kind == stat.S_IFLNK:
            data = os.fsencode(os.readlink(name, dir_fd=folder))
            size = len(data)
        elif kind == stat.S_IFREG:
            file, found = open_file(folder, name, path)
            size = found.st_size
        elif kind != stat.S_IFDIR:
            return
        left -= size + 512  # the header that it will have in a tar
        if left < 0:
            text = f"{task['path']}: more than the {task['max_bytes']} bytes asked for"
            raise Refused(errno.EFBIG, text)
        header = os.fsencode(path), kind, stat.S_IMODE(found.st_mode), size
        header = marshal.dumps(header)
        send(len(header).to_bytes(4, "little") + header + data)
        if kind == stat.S_IFREG:
            with open(file, "rb", 0) as file:
                while size and (data := file.read(min(size, CHUNK))):
                    size -= len(data)
                    send(data)
            send(bytes(size))  # it shrank meanwhile

    walk(open_folder(open_root(task), names_of(task["path"]), task["path"]), visit)
    report(task, "exit 0")


def read_exactly(size):
    data = b""
    while len(data) < size:
        more = os.read(0, min(size - len(data), CHUNK))
        if not more:
            raise OSError(errno.EPIPE, "standard input ended early")
        data += more
    return data


def put(task):
    """Files, folders and links from standard input, in the form of `get_folder`, to a path."""
    root, path, user = open_root(task), task["path"], task["user"]
    names = names_of(path)
    while length := int.from_bytes(read_exactly(4), "little"):
        below, kind, mode, size = marshal.loads(read_exactly(length))
        *parents, name = names + names_of(os.fsdecode(below))
        folder = open_folder(root, parents, path, user)
        try:
            put_one(folder, name, kind, mode, size, user)
        except OSError as error:
            text = f"{path}: {os.fsdecode(below)}: {os.strerror(error.errno)}"
            raise Refused(error.errno, text) from None
        finally:
            os.close(folder)
    report(task, "exit 0")


def put_one(folder, name, kind, mode, size, user):
    if kind == stat.S_IFDIR:
        try:
            os.mkdir(name, dir_fd=folder)
        except FileExistsError:
            pass
        made = os.open(name, FOLDER, dir_fd=folder)
    else:
        # What is there goes first: written through, a link or a pipe would lead elsewhere.
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        if kind == stat.S_IFLNK:
            os.symlink(read_exactly(size), name, dir_fd=folder)
            os.chown(name, user, user, dir_fd=folder, follow_symlinks=False)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        made = os.open(name, flags, 0o600, dir_fd=folder)
        while size:
            data = read_exactly(min(size, CHUNK))
            size -= len(data)
            while data:
                data = data[os.write(made, data) :]
    os.fchown(made, user, user)
    os.fchmod(made, mode)
    os.close(made)


def snapshot(task):
    """Copies what was written in the sandbox into a folder outside, as a layer of an overlay."""
    target = os.open(task["folder"], FOLDER)
    if task["owner"]:
        call("setns", task["monitor"], NEWNS)
        opaque = "trusted.overlay.opaque"
    else:
        call("setns", task["monitor"], NEWUSER | NEWNS)
        become(0, task["owner"])
        opaque = "user.overlay.opaque"
    left, linked = task["max_bytes"], {}

    def visit(folder, name, path, found):
        nonlocal left
        kind = stat.S_IFMT(found.st_mode)
        if kind in (stat.S_IFSOCK, stat.S_IFIFO):
            return
        to = open_folder(target, path.split("/")[:-1], path)
        try:
            if kind == stat.S_IFDIR:
                os.mkdir(name, dir_fd=to)
            elif kind == stat.S_IFLNK:
                os.symlink(os.readlink(name, dir_fd=folder), name, dir_fd=to)
            elif kind == stat.S_IFCHR:  # of an overlay: nothing is here, whatever lies below
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=to)
                return
            elif found.st_ino in linked:
                os.link(linked[found.st_ino], name, src_dir_fd=target, dst_dir_fd=to)
                return
            else:
                linked[found.st_ino] = path
                left -= found.st_size
                if left < 0:
                    raise Refused(errno.EFBIG, f"more than {task['max_bytes']} bytes of files")
                copy_file(folder, to, name, path)
            os.chown(name, found.st_uid, found.st_gid, dir_fd=to, follow_symlinks=False)
            if kind != stat.S_IFLNK:
                copy_mode(folder, to, name, found, opaque)
        finally:
            os.close(to)

    top = os.open("/tmp/upper", FOLDER)
    walk(top, visit)
    report(task, "exit 0")


def copy_file(folder, to, name, path):
    source, found = open_file(folder, name, path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        open(source, "rb", 0) as source,
        open(os.open(name, flags, 0o600, dir_fd=to), "wb", 0) as made,
    ):
        left = found.st_size
        while left and (count := os.sendfile(made.fileno(), source.fileno(), None, left)):
            left -= count


def copy_mode(folder, to, name, found, opaque):
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    made = os.open(name, flags, dir_fd=to)
    if stat.S_ISDIR(found.st_mode):
        source = os.open(name, FOLDER, dir_fd=folder)
        if opaque in os.listxattr(source):
            os.setxattr(made, opaque, os.getxattr(source, opaque))
        os.close(source)
    os.utime(made, ns=(found.st_atime_ns, found.st_mtime_ns))
    os.fchmod(made, stat.S_IMODE(found.st_mode))
    os.close(made)


def report(task, text):
    os.write(task["status"], text.encode(errors="replace")[:2000] + b"\n")


OPERATIONS = (launch, execute, kill_all, get, get_folder, put, snapshot)


def main(descriptor):
    with open(descriptor, "rb") as file:
        task = marshal.load(file)
    for descriptor in task["descriptors"]:
        os.set_inheritable(descriptor, False)
    operation = {function.__name__: function for function in OPERATIONS}[task["operation"]]
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
        outside = operation is snapshot and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        refused = operation in (get, get_folder, put, snapshot) and not outside
        report(task, f"refused {error.errno} {error}" if refused else f"failed {error}")
    except Exception as error:
        report(task, f"failed {error}")
