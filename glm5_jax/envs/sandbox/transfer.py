"""Encodes files that are copied into a sandbox as records for `entry`.

A record consists of the length of its header (4 bytes, little-endian; 0 ends the stream), the header
(marshalled: path below the top as bytes, kind as in st_mode, permissions, size), and `size` bytes of
content.
"""

import marshal
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import IO

END = bytes(4)
_PIECE_BYTES = 1 << 20  # read from a file at once


def record(path: bytes, kind: int, mode: int, content: bytes) -> bytes:
    """Returns a record, in the form above."""
    return _header(path, kind, mode, len(content)) + content


def _header(path: bytes, kind: int, mode: int, size: int) -> bytes:
    header = marshal.dumps((path, kind, mode, size))
    return len(header).to_bytes(4, "little") + header


def write_path(source: pathlib.Path, mode: int | None, file: IO[bytes]) -> None:
    """Writes the records of a file, or of a folder with its contents, to a file. Links stay links.

    Content is never held in memory as a whole. Raises ValueError for anything else than files, folders and
    links.

    Args:
      source: file or folder.
      mode: permissions of the file or topmost folder; None keeps them.
      file: file to write to.
    """
    status = source.stat()
    top = stat.S_IMODE(status.st_mode) if mode is None else mode
    if source.is_dir():
        file.write(record(b"", stat.S_IFDIR, top, b""))
        for path in _below(source):
            _write_one(path, os.fsencode(path.relative_to(source)), file)
    elif source.is_file():
        _write_file(source, b"", top, file)
    else:
        raise ValueError(f"{source} is neither a file nor a folder")
    file.write(END)


def _below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the contents of a folder recursively, each folder before its contents."""
    for parent, folders, files in os.walk(folder):
        for name in sorted((*folders, *files)):
            yield pathlib.Path(parent, name)


def _write_one(path: pathlib.Path, name: bytes, file: IO[bytes]) -> None:
    mode = path.lstat().st_mode
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFREG:
        _write_file(path, name, stat.S_IMODE(mode), file)
    elif kind == stat.S_IFLNK:
        file.write(record(name, kind, stat.S_IMODE(mode), os.fsencode(os.readlink(path))))
    elif kind == stat.S_IFDIR:
        file.write(record(name, kind, stat.S_IMODE(mode), b""))
    else:
        raise ValueError(f"{path} is neither a file, a folder nor a link")


def _write_file(path: pathlib.Path, name: bytes, mode: int, file: IO[bytes]) -> None:
    with open(path, "rb") as source:
        size = os.fstat(source.fileno()).st_size
        file.write(_header(name, stat.S_IFREG, mode, size))
        while size and (data := source.read(min(size, _PIECE_BYTES))):
            size -= len(data)
            file.write(data)
    if size:
        raise ValueError(f"{path} became shorter while it was read")
