"""Append-only files of lines: a kill or a full disk loses at most the lines of one write."""

import json
import logging
import os
import pathlib
from collections.abc import Iterator

_log = logging.getLogger(__name__)


def append_lines(path: str | os.PathLike, lines: bytes) -> None:
    """Appends lines, on a new line if the last one was cut off. If it raises OSError, the file is unchanged."""
    # Unbuffered, because closing the file would write the rest of a buffer after the truncation.
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            lines = b"\n" + lines
        try:
            while lines:
                lines = lines[file.write(lines) :]
        except OSError:
            file.truncate(size)
            raise


def read_complete_lines(path: str | os.PathLike) -> list[bytes]:
    """Returns the lines of a file without their line ends.

    Removes a last line that was cut off from the file, and logs a warning.
    """
    *lines, torn = pathlib.Path(path).read_bytes().split(b"\n")
    if torn:
        _log.warning("%s ends in an incomplete line of %d bytes; it is removed", path, len(torn))
        os.truncate(path, os.path.getsize(path) - len(torn))
    return lines


def read_objects(path: str | os.PathLike) -> Iterator[dict]:
    """Yields the JSON objects of the complete lines of a file.

    Lines that hold none, as after a power failure, are skipped with a warning.
    """
    for number, line in enumerate(pathlib.Path(path).read_bytes().split(b"\n")[:-1], 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield value
        elif line.strip():
            _log.warning("line %d of %s holds no JSON object and is skipped", number, path)
