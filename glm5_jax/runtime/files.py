"""Reads files from users: only regular files, of bounded size, and line by line. Replaces text files atomically.

A pipe or a device in place of a file would block a reader forever. A file or a line of gigabytes would use up the
memory before an error could name it.
"""

import os
import pathlib
import stat
from collections.abc import Iterator
from typing import IO, NamedTuple

MAX_TEXT_BYTES = (
    2**28
)  # of a file that is read in one piece, such as a config, an index or a tokenizer
# Of a line. A sample of 202,752 tokens has about 1 MB, and encoding a text takes 130 times its size in memory.
MAX_LINE_BYTES = 2**24
_PIECE_BYTES = 2**20  # read size while a line that is too long is skipped
_BOM = b"\xef\xbb\xbf"  # byte order mark that Windows editors put before UTF-8


class Line(NamedTuple):
    """A line of a file.

    Attributes:
      number: line number, from 1.
      offset: offset of its first byte in the file.
      size: number of its bytes, including the line end.
      content: its bytes, including the line end; of a line of more than `MAX_LINE_BYTES` the first
        `MAX_LINE_BYTES` + 1.
    """

    number: int
    offset: int
    size: int
    content: bytes


def open_file(path: str | os.PathLike) -> IO[bytes]:
    """Opens a regular file to read bytes. Raises ValueError for anything else, and OSError."""
    # A plain open would block on a pipe without a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file; give a file, or a link to one")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: str | os.PathLike, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns the text of a regular UTF-8 file, without a byte order mark.

    Raises ValueError if it is another kind of file, has more than max_bytes or is not UTF-8; OSError like `open`.
    """
    with open_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes:,} bytes; give the file that was meant")
    return content.removeprefix(_BOM).decode("utf-8")


def replace_text(path: str | os.PathLike, text: str) -> None:
    """Writes a UTF-8 file. A kill, a power failure or a full disk leaves the old file, and no process reads half a text.

    Raises OSError like `open`.
    """
    path = pathlib.Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(
                file.fileno()
            )  # some file systems would otherwise rename it before its contents are on disk
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def read_start(path: str | os.PathLike, max_bytes: int) -> bytes:
    """Returns the first max_bytes of a regular file. Raises ValueError and OSError as `open_file`."""
    with open_file(path) as file:
        return file.read(max_bytes)


def read_lines(path: str | os.PathLike) -> Iterator[Line]:
    """Yields the non-empty lines of a regular file, without a byte order mark before the first.

    A line that is too long is not held in memory; `check_line` rejects it. Raises ValueError for another kind of file.
    """
    with open_file(path) as file:
        offset = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(offset)
        number = 0
        while content := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            size = len(content)
            if size > MAX_LINE_BYTES:
                size += _skip_line(file, content)
            if content.strip() or size > MAX_LINE_BYTES:
                yield Line(number, offset, size, content)
            offset += size


def read_line(path: str | os.PathLike, offset: int, size: int) -> bytes:
    """Returns the bytes of a line whose offset and size `read_lines` reported."""
    with open_file(path) as file:
        file.seek(offset)
        return file.read(size)


def check_line(content: bytes | str) -> None:
    """Raises ValueError for a line of more than `MAX_LINE_BYTES`."""
    if len(content) > MAX_LINE_BYTES:
        raise ValueError(f"the line has more than {MAX_LINE_BYTES:,} bytes; cut or remove it")


def _skip_line(file: IO[bytes], content: bytes) -> int:
    """Reads the rest of a line and returns its number of bytes."""
    skipped = 0
    while not content.endswith(b"\n") and (content := file.readline(_PIECE_BYTES)):
        skipped += len(content)
    return skipped
