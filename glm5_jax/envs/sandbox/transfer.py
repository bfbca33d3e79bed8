"""Files on their way into a sandbox and out: records for the gate, tar archives for callers.

A record is the length of its header (4 bytes, little-endian; 0 ends the stream), the header (marshalled:
path below the top as bytes, kind as in st_mode, permissions, size), then so many bytes of content.
"""

import io
import marshal
import os
import pathlib
import stat
import tarfile
from collections.abc import Iterator

_TYPES = {
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
}
END = bytes(4)


def record(path: bytes, kind: int, mode: int, content: bytes) -> bytes:
    """One record, as told above."""
    header = marshal.dumps((path, kind, mode, len(content)))
    return len(header).to_bytes(4, "little") + header + content


def pack_path(source: pathlib.Path, mode: int | None = None) -> bytes:
    """The records of a file, or of a folder with all below it; links are kept as links.

    mode: permissions of the file or topmost folder, in place of its own.
    """
    found = source.stat()
    top = stat.S_IMODE(found.st_mode) if mode is None else mode
    if not source.is_dir():
        if not source.is_file():
            raise ValueError(f"{source} is neither a file nor a folder")
        return record(b"", stat.S_IFREG, top, source.read_bytes()) + END
    parts = [record(b"", stat.S_IFDIR, top, b"")]
    for place, folders, files in os.walk(source):
        for name in sorted((*folders, *files)):
            path = pathlib.Path(place, name)
            found = path.lstat()
            kind, content = stat.S_IFMT(found.st_mode), b""
            if kind == stat.S_IFLNK:
                content = os.fsencode(os.readlink(path))
            elif kind == stat.S_IFREG:
                content = path.read_bytes()
            elif kind != stat.S_IFDIR:
                raise ValueError(f"{path} is neither a file, a folder nor a link")
            below = os.fsencode(path.relative_to(source))
            parts.append(record(below, kind, stat.S_IMODE(found.st_mode), content))
    return b"".join(parts) + END


def pack_tar(data: bytes) -> bytes:
    """The records of a tar archive, with the folder that they go into."""
    kinds = {letter: kind for kind, letter in _TYPES.items()}
    parts = [record(b"", stat.S_IFDIR, 0o755, b"")]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            kind = kinds.get(member.type)
            if kind is None:
                raise ValueError(f"{member.name} in the archive is neither a file, folder nor link")
            content = archive.extractfile(member).read() if kind == stat.S_IFREG else b""
            content = os.fsencode(member.linkname) if kind == stat.S_IFLNK else content
            parts.append(record(os.fsencode(member.name), kind, member.mode, content))
    return b"".join(parts) + END


def unpack(data: bytes) -> Iterator[tuple[bytes, int, int, bytes]]:
    """Path, kind, mode and content of each record; they need not end with an empty one."""
    at = 0
    while at < len(data) and (length := int.from_bytes(data[at : at + 4], "little")):
        path, kind, mode, size = marshal.loads(data[at + 4 : at + 4 + length])
        at += 4 + length + size
        yield path, kind, mode, data[at - size : at]


def to_tar(data: bytes) -> bytes:
    """A tar archive of the records."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path, kind, mode, content in unpack(data):
            member = tarfile.TarInfo(os.fsdecode(path))
            member.type, member.mode = _TYPES[kind], mode
            if kind == stat.S_IFLNK:
                member.linkname, content = os.fsdecode(content), b""
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def extract(data: bytes, folder: str | os.PathLike) -> None:
    """Unpacks what `get_folder` returned into a host folder that holds no links; those in it are left out.

    Of permissions only whether a file can be run is kept.
    """
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            path = pathlib.PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{member.name} in the archive leads out of the folder")
            target = pathlib.Path(folder, path)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
            elif member.isreg():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.extractfile(member).read())
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
