"""Copies files into a sandbox, out of it and into a layer. No link is ever followed."""

import errno
import marshal
import os
import stat

from .system import NEWNS, NEWUSER, Refused, become, call, report

MAX_DEPTH = 200  # nested folders; each level of a walk keeps a descriptor open
CHUNK_BYTES = 1 << 20
ZEROS = bytes(CHUNK_BYTES)
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_root(task):
    """Returns a descriptor of the sandbox's root folder, and makes this process its root user."""
    if task["sandbox"] is not None:
        call("setns", task["sandbox"], NEWUSER | NEWNS)
        become(0, task["owner"])
        return os.open("/", FOLDER)
    return os.open(task["root"], FOLDER)


def names_of(path):
    """Returns the folders and the name that a path consists of."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names:
        raise Refused(errno.EINVAL, f"{path}: a path with .. in it")
    return names


def open_folder(parent, names, path, user=None, replace=False):
    """Opens the folder below `parent`; missing folders are made if `user` is given, and owned by that user."""
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
            raise Refused(error.errno, f"{path}: {name}: {error.strerror}") from None
        finally:
            os.close(current)
        current = inner
    return current


def kind_of(mode):
    """Returns a description of the kind of a file."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a named pipe"}
    kinds |= {stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "a file")


def open_file(folder, name, path):
    """Opens a regular file for reading; never opens a link, pipe or device."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise Refused(errno.EINVAL, f"{path}: {kind_of(status.st_mode)}, not a regular file")
        # The file may have been replaced between the two calls.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        file = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        raise Refused(error.errno, f"{path}: {error.strerror}") from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise Refused(errno.EINVAL, f"{path}: {kind_of(status.st_mode)}, not a regular file")
    return file, status


def send(data):
    """Writes all data to standard output."""
    while data:
        data = data[os.write(1, data) :]


def get(task):
    """Writes a regular file to standard output."""
    path, left = task["path"], task["max_bytes"]
    names = names_of(path)
    if not names:
        raise Refused(errno.EISDIR, f"{path}: a folder, not a regular file")
    file, _ = open_file(open_folder(open_root(task), names[:-1], path), names[-1], path)
    while data := os.read(file, CHUNK_BYTES):
        left -= len(data)
        if left < 0:
            text = f"{path}: more than the maximum of {task['max_bytes']} bytes"
            raise Refused(errno.EFBIG, text)
        send(data)
    report(task, "exit 0")


def walk(folder, visit, path="", depth=0):
    """Calls visit(folder descriptor, name, path, stat) for all entries below, each folder before its contents."""
    if depth > MAX_DEPTH:
        raise Refused(errno.ELOOP, f"folders more than {MAX_DEPTH} deep, at {path[:100]}...")
    for name in sorted(os.listdir(folder)):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        below = path + "/" + name if path else name
        visit(folder, name, below, status)
        if stat.S_ISDIR(status.st_mode):
            inner = os.open(name, FOLDER, dir_fd=folder)
            try:
                walk(inner, visit, below, depth + 1)
            finally:
                os.close(inner)


class Records:
    """Writer of files, folders and links to standard output, which must be a file, each with a header.

    Raises Refused after more than `max_bytes`.
    """

    def __init__(self, path, max_bytes):
        self.path, self.max_bytes, self.left = path, max_bytes, max_bytes

    def send(self, path, kind, mode, size, data=b""):
        """Writes a header, and the data of a link."""
        self.left -= size + 512  # size of a header and a name
        if self.left < 0:
            raise Refused(
                errno.EFBIG, f"{self.path}: more than the maximum of {self.max_bytes} bytes"
            )
        header = marshal.dumps((os.fsencode(path), kind, stat.S_IMODE(mode), size))
        send(len(header).to_bytes(4, "little") + header + data)

    def send_file(self, descriptor, path):
        """Writes a regular file and closes it."""
        status = os.fstat(descriptor)
        size = status.st_size
        with open(descriptor, "rb", 0) as file:
            self.send(path, stat.S_IFREG, status.st_mode, size)
            while size and (data := file.read(min(size, CHUNK_BYTES))):
                size -= len(data)
                self._send_content(data)
        while size:  # the file became shorter
            data = ZEROS[:size]
            size -= len(data)
            self._send_content(data)

    def _send_content(self, data):
        # Zeros take no space in a sparse file.
        if data == ZEROS[: len(data)]:
            os.lseek(1, len(data), os.SEEK_CUR)
        else:
            send(data)

    def visit(self, folder, name, path, status):
        """Writes one entry of a walk."""
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFLNK:
            data = os.fsencode(os.readlink(name, dir_fd=folder))
            self.send(path, kind, status.st_mode, len(data), data)
        elif kind == stat.S_IFREG:
            self.send_file(open_file(folder, name, path)[0], path)
        elif kind == stat.S_IFDIR:
            self.send(path, kind, status.st_mode, 0)


def save(task):
    """Writes a regular file, or a folder with its contents, to a file outside, as records that `put` reads."""
    os.dup2(task["file"], 1)
    path, names = task["path"], names_of(task["path"])
    parent = open_folder(open_root(task), names[:-1], path)
    records = Records(path, task["max_bytes"])
    status = os.stat(names[-1], dir_fd=parent, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        records.send("", stat.S_IFDIR, 0o755, 0)
        walk(open_folder(parent, names[-1:], path), records.visit)
    else:
        records.send_file(open_file(parent, names[-1], path)[0], "")
    send(bytes(4))
    report(task, "exit 0")


def read_exactly(size):
    """Reads `size` bytes from standard input."""
    data = b""
    while len(data) < size:
        more = os.read(0, min(size - len(data), CHUNK_BYTES))
        if not more:
            raise OSError(errno.EPIPE, "standard input ended early")
        data += more
    return data


def put(task):
    """Reads files, folders and links from standard input, in the format of `save`, and writes them to a path."""
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
            text = f"{path}: {os.fsdecode(below)}: {os.strerror(error.errno or errno.EIO)}"
            raise Refused(error.errno, text) from None
        finally:
            os.close(folder)
    report(task, "exit 0")


def put_one(folder, name, kind, mode, size, user):
    """Writes one file, folder or link, with its content from standard input."""
    if kind == stat.S_IFDIR:
        try:
            os.mkdir(name, dir_fd=folder)
        except FileExistsError:
            pass
        descriptor = os.open(name, FOLDER, dir_fd=folder)
    else:
        # Remove the existing entry first, because writing through a link or pipe would lead elsewhere.
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        if kind == stat.S_IFLNK:
            os.symlink(read_exactly(size), name, dir_fd=folder)
            os.chown(name, user, user, dir_fd=folder, follow_symlinks=False)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        is_saved = stat.S_ISREG(os.fstat(0).st_mode)
        if is_saved:
            os.ftruncate(descriptor, size)
        while size:
            data = read_exactly(min(size, CHUNK_BYTES))
            size -= len(data)
            if is_saved and data == ZEROS[: len(data)]:  # zeros need no memory in a sparse file
                os.lseek(descriptor, len(data), os.SEEK_CUR)
                continue
            while data:
                data = data[os.write(descriptor, data) :]
    os.fchown(descriptor, user, user)
    os.fchmod(descriptor, mode)
    os.close(descriptor)


def snapshot(task):
    """Copies the files that were written in the sandbox into a folder outside, as a layer of an overlay."""
    # The target is opened outside; then enter the mounts that hold the upper layer.
    target = os.open(task["folder"], FOLDER)
    if task["owner"]:
        call("setns", task["monitor"], NEWNS)
        opaque = "trusted.overlay.opaque"
    else:
        call("setns", task["monitor"], NEWUSER | NEWNS)
        become(0, task["owner"])
        opaque = "user.overlay.opaque"
    left, linked = task["max_bytes"], {}

    def visit(folder, name, path, status):
        nonlocal left
        kind = stat.S_IFMT(status.st_mode)
        if kind in (stat.S_IFSOCK, stat.S_IFIFO):
            return
        # Make the entry; hard links and whiteouts need nothing else.
        to = open_folder(target, path.split("/")[:-1], path)
        try:
            if kind == stat.S_IFDIR:
                os.mkdir(name, dir_fd=to)
            elif kind == stat.S_IFLNK:
                os.symlink(os.readlink(name, dir_fd=folder), name, dir_fd=to)
            elif kind == stat.S_IFCHR:  # an overlay's whiteout: hides the entry of lower layers
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=to)
                return
            elif status.st_ino in linked:
                os.link(linked[status.st_ino], name, src_dir_fd=target, dst_dir_fd=to)
                return
            else:
                linked[status.st_ino] = path
                left -= status.st_size
                if left < 0:
                    raise Refused(errno.EFBIG, f"more than {task['max_bytes']} bytes of files")
                copy_file(folder, to, name, path)
            # Copy owner, permissions and times.
            os.chown(name, status.st_uid, status.st_gid, dir_fd=to, follow_symlinks=False)
            if kind != stat.S_IFLNK:
                copy_mode(folder, to, name, status, opaque)
        finally:
            os.close(to)

    top = os.open("/tmp/upper", FOLDER)
    walk(top, visit)
    report(task, "exit 0")


def copy_file(folder, to, name, path):
    """Copies the content of a regular file into a new file of the same name."""
    source, status = open_file(folder, name, path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        open(source, "rb", 0) as source,
        open(os.open(name, flags, 0o600, dir_fd=to), "wb", 0) as copy,
    ):
        left = status.st_size
        # The offset None means the position of the file.
        while left and (count := os.sendfile(copy.fileno(), source.fileno(), None, left)):  # pyright: ignore[reportArgumentType]: typeshed lacks None
            left -= count


def copy_mode(folder, to, name, status, opaque):
    """Copies permissions, times, and whether a folder hides those of its name in lower layers."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    copy = os.open(name, flags, dir_fd=to)
    if stat.S_ISDIR(status.st_mode):
        source = os.open(name, FOLDER, dir_fd=folder)
        if opaque in os.listxattr(source):
            os.setxattr(copy, opaque, os.getxattr(source, opaque))
        os.close(source)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.fchmod(copy, stat.S_IMODE(status.st_mode))
    os.close(copy)
