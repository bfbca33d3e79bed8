"""Files that grow line by line, of which a kill or a full disk costs at most what was being written."""

import logging
import os
import pathlib

_log = logging.getLogger(__name__)


def append(path: str | os.PathLike, lines: bytes) -> None:
    """Appends all of them. OSError leaves the file as it was."""
    # Without a buffer, whose rest would be written behind the cut when the file is closed.
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            while lines:
                lines = lines[file.write(lines) :]
        except OSError:
            file.truncate(size)
            raise


def read_whole(path: str | os.PathLike) -> list[bytes]:
    """The lines of a file, without their ends. A last one that was cut off leaves the file, with a warning."""
    *lines, torn = pathlib.Path(path).read_bytes().split(b"\n")
    if torn:
        _log.warning(
            "%s ends in a line that was cut off, of %d bytes; it is dropped", path, len(torn)
        )
        os.truncate(path, os.path.getsize(path) - len(torn))
    return lines
