"""Computes the digest of a tree of files, which stands for the commit of sources without git."""

import hashlib
import os
import pathlib
import stat
from collections.abc import Iterable, Sequence


def tree_digest(folder: str | os.PathLike, skip: Sequence[str] = (".git",)) -> str:
    """Returns `tree:` and the sha256 of the names, kinds and contents of all files in a folder, sorted by name.

    skip: names of folders that are left out. Times and owners do not count, nor do empty folders; the right to execute
    and the targets of links do.
    """
    root = pathlib.Path(folder)
    files: list[tuple[bytes, pathlib.Path]] = []
    for current, folders, names in os.walk(root):
        links = [name for name in folders if pathlib.Path(current, name).is_symlink()]
        folders[:] = [name for name in folders if name not in skip and name not in links]
        files += [
            (
                os.fsencode(pathlib.Path(current, name).relative_to(root)),
                pathlib.Path(current, name),
            )
            for name in [*names, *links]
        ]
    return digest_files((name, *_read_entry(path)) for name, path in sorted(files))


def digest_files(files: Iterable[tuple[bytes, bytes, bytes]]) -> str:
    """Returns `tree:` and the sha256 of sorted files, each a path, a kind (file, program or link) and a content."""
    digest = hashlib.sha256()
    for name, kind, content in files:
        content_digest = hashlib.sha256(content).hexdigest().encode()
        digest.update(b"\0".join((name, kind, content_digest)) + b"\n")
    return f"tree:{digest.hexdigest()}"


def _read_entry(path: pathlib.Path) -> tuple[bytes, bytes]:
    """Returns the kind and the content of a file."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return b"link", os.fsencode(os.readlink(path))
    if stat.S_ISREG(status.st_mode):
        return b"program" if status.st_mode & stat.S_IXUSR else b"file", path.read_bytes()
    raise ValueError(f"{path} is no file, folder or link; remove it from the tree")
