"""Files on their way into a sandbox, out of it and into a layer. No link is ever followed."""

import errno
import marshal
import os
import stat

from .system import NEWNS, NEWUSER, Refused, become, call, report

DEEPEST = 200  # folders in folders; each level of a walk keeps a descriptor open
CHUNK = 1 << 20
ZEROS = bytes(CHUNK)
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_root(task):
    """A descriptor of the sandbox's root folder, with this process as its root user."""
    if task["sandbox"] is not None:
        call("setns", task["sandbox"], NEWUSER | NEWNS)
        become(0, task["owner"])
        return os.open("/", FOLDER)
    return os.open(task["root"], FOLDER)


def names_of(path):
    """The folders and the name that a path is made of."""
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
    """What a file is, in words."""
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
    """Writes all of it to standard output."""
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


class Records:
    """Sends files, folders and links to standard output, each with a header, up to so many bytes."""

    def __init__(self, path, max_bytes):
        self.path, self.max_bytes, self.left = path, max_bytes, max_bytes
        self.is_file = stat.S_ISREG(os.fstat(1).st_mode)

    def send(self, path, kind, mode, size, data=b""):
        """A header, and the data of a link."""
        self.left -= size + 512  # the header that it will have in a tar
        if self.left < 0:
            raise Refused(
                errno.EFBIG, f"{self.path}: more than the {self.max_bytes} bytes asked for"
            )
        header = marshal.dumps((os.fsencode(path), kind, stat.S_IMODE(mode), size))
        send(len(header).to_bytes(4, "little") + header + data)

    def send_file(self, descriptor, path):
        """A regular file, which is closed afterwards."""
        found = os.fstat(descriptor)
        size = found.st_size
        with open(descriptor, "rb", 0) as file:
            self.send(path, stat.S_IFREG, found.st_mode, size)
            while size and (data := file.read(min(size, CHUNK))):
                size -= len(data)
                self._send_content(data)
        while size:  # it shrank meanwhile
            data = ZEROS[:size]
            size -= len(data)
            self._send_content(data)

    def _send_content(self, data):
        # In a file zeros need no room.
        if self.is_file and data == ZEROS[: len(data)]:
            os.lseek(1, len(data), os.SEEK_CUR)
        else:
            send(data)

    def visit(self, folder, name, path, found):
        """Sends one of the things that a walk comes to."""
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFLNK:
            data = os.fsencode(os.readlink(name, dir_fd=folder))
            self.send(path, kind, found.st_mode, len(data), data)
        elif kind == stat.S_IFREG:
            self.send_file(open_file(folder, name, path)[0], path)
        elif kind == stat.S_IFDIR:
            self.send(path, kind, found.st_mode, 0)


def get_folder(task):
    """What lies below a folder, to standard output as records (`transfer`); links stay links."""
    records = Records(task["path"], task["max_bytes"])
    walk(open_folder(open_root(task), names_of(task["path"]), task["path"]), records.visit)
    report(task, "exit 0")


def save(task):
    """A regular file, or a folder with what lies below it, to a file outside, as records that `put` reads."""
    os.dup2(task["file"], 1)
    path, names = task["path"], names_of(task["path"])
    parent = open_folder(open_root(task), names[:-1], path)
    records = Records(path, task["max_bytes"])
    found = os.stat(names[-1], dir_fd=parent, follow_symlinks=False)
    if stat.S_ISDIR(found.st_mode):
        records.send("", stat.S_IFDIR, 0o755, 0)
        walk(open_folder(parent, names[-1:], path), records.visit)
    else:
        records.send_file(open_file(parent, names[-1], path)[0], "")
    send(bytes(4))
    report(task, "exit 0")


def read_exactly(size):
    """So many bytes of standard input."""
    data = b""
    while len(data) < size:
        more = os.read(0, min(size - len(data), CHUNK))
        if not more:
            raise OSError(errno.EPIPE, "standard input ended early")
        data += more
    return data


def put(task):
    """Files, folders and links from standard input, in the form of `get_folder`, to a path."""
    if task["file"] is not None:
        os.dup2(task["file"], 0)
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
    """One file, folder or link, with its content from standard input."""
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
        is_saved = stat.S_ISREG(os.fstat(0).st_mode)
        if is_saved:
            os.ftruncate(made, size)
        while size:
            data = read_exactly(min(size, CHUNK))
            size -= len(data)
            if is_saved and data == ZEROS[: len(data)]:  # which need no memory in a sparse file
                os.lseek(made, len(data), os.SEEK_CUR)
                continue
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
    """The content of a regular file, into a new one of the same name."""
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
    """Permissions, times, and whether a folder hides those of its name in lower layers."""
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
