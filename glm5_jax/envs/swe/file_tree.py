"""Represents trees of files in memory, and moves them between archives, sandboxes and patches.

A `FileTree` maps paths to files and links. It is read from an archive (`tree_of_archive`) or from a sandbox (`save_tree`),
compared by `changed_files`, and written into a sandbox by `put_tree`. No file of a tree is ever written on the host.
"""

import marshal
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Mapping
from typing import IO, NamedTuple

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.sandbox.transfer import END, record
from glm5_jax.envs.swe.tree import digest_files

MAX_TREE_BYTES = 1 << 29
MAX_TREE_FILES = 200_000
_HEADER_BYTES = 1 << 16


class TreeError(ValueError):
    """Raised for an archive or a folder that cannot be a tree of sources."""


class TreeFile(NamedTuple):
    """File or link of a tree.

    Attributes:
      mode: kind and permissions, as in `st_mode`.
      content: content of a file, or target of a link.
    """

    mode: int
    content: bytes

    @property
    def is_link(self) -> bool:
        """Returns whether it is a symbolic link."""
        return stat.S_ISLNK(self.mode)

    @property
    def is_program(self) -> bool:
        """Returns whether its owner may execute it."""
        return bool(self.mode & stat.S_IXUSR)


FileTree = Mapping[str, TreeFile]


def text_file(text: str, mode: int = 0o644) -> TreeFile:
    """Returns a regular file with a text."""
    return TreeFile(stat.S_IFREG | mode, text.encode())


def tree_of_archive(path: str | os.PathLike) -> dict[str, TreeFile]:
    """Returns the tree in a tar archive, without its topmost folder if there is one only.

    Raises TreeError for an archive that is cut off, too large, or has paths outside of itself.
    """
    tree: dict[str, TreeFile] = {}
    total = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = posixpath.normpath(member.name)
                if name.startswith(("/", "..")):
                    raise TreeError(f"{path}: {member.name!r:.100} lies outside of the archive")
                if not (member.isfile() or member.issym()):
                    continue
                total += member.size
                if total > MAX_TREE_BYTES or len(tree) >= MAX_TREE_FILES:
                    raise TreeError(f"{path} is too large; the limit is {MAX_TREE_BYTES:,} bytes")
                file = archive.extractfile(member) if member.isfile() else None
                content = file.read() if file else os.fsencode(member.linkname)
                kind = stat.S_IFREG if member.isfile() else stat.S_IFLNK
                mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
                tree[name] = TreeFile(kind | mode, content)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise TreeError(f"{path} is no complete archive: {error}; fetch it again") from None
    tops = {name.partition("/")[0] for name in tree}
    if len(tops) == 1 and all("/" in name for name in tree):
        tree = {name.partition("/")[2]: file for name, file in tree.items()}
    return dict(sorted(tree.items()))


def without_folders(tree: FileTree, folders: Collection[str]) -> dict[str, TreeFile]:
    """Returns the files that are not in these folders; a folder without `/` counts at any depth, others at the top."""
    nested = {folder for folder in folders if "/" not in folder}
    rooted = tuple(f"{folder.rstrip('/')}/" for folder in folders if "/" in folder)
    return {
        path: file
        for path, file in tree.items()
        if not nested & set(path.split("/")) and not path.startswith(rooted)
    }


def changed_files(old: FileTree, new: FileTree) -> dict[str, TreeFile | None]:
    """Returns what differs in the new tree, by path; None: the file is not in it.

    Contents, kinds, targets of links and the right to execute count.
    """

    def key(file: TreeFile | None):
        return file and (file.is_link, file.is_link or file.is_program, file.content)

    paths = sorted({*old, *new})
    return {path: new.get(path) for path in paths if key(old.get(path)) != key(new.get(path))}


def with_changes(tree: FileTree, changes: Mapping[str, TreeFile | None]) -> dict[str, TreeFile]:
    """Returns the tree after changes; None removes a file."""
    merged = {**tree, **changes}
    return {path: file for path, file in sorted(merged.items()) if file is not None}


def digest_tree(tree: FileTree) -> str:
    """Returns `tree:` and a sha256, the same as `tree.tree_digest` of a folder with these files."""
    entries = (
        (
            os.fsencode(path),
            b"link" if file.is_link else b"program" if file.is_program else b"file",
            file.content,
        )
        for path, file in sorted(tree.items(), key=lambda item: os.fsencode(item[0]))
    )
    return digest_files(entries)


async def put_tree(box: Sandbox, path: str, tree: FileTree, *, user: str = "agent") -> None:
    """Writes the files of a tree into a folder of a sandbox; other files in it stay."""
    with tempfile.TemporaryFile() as file:
        file.write(record(b"", stat.S_IFDIR, 0o755, b""))
        for name, entry in tree.items():
            kind, mode = stat.S_IFMT(entry.mode), stat.S_IMODE(entry.mode) & 0o777
            file.write(record(os.fsencode(name), kind, mode, entry.content))
        file.write(END)
        await box.put_saved(path, file, user=user)


async def save_tree(
    box: Sandbox, path: str, skip: Collection[str] = (), max_bytes: int = MAX_TREE_BYTES
) -> dict[str, TreeFile]:
    """Returns the tree in a folder of a sandbox, without the folders in `skip`.

    Raises SandboxFileError if it holds anything else than files, folders and links, or more than `max_bytes`.
    """
    with tempfile.TemporaryFile() as file:
        await box.save(path, file, max_bytes)
        file.seek(0)
        return without_folders(_read_records(file), skip)


async def remove_files(box: Sandbox, folder: str, paths: Iterable[str]) -> None:
    """Removes files of a folder in a sandbox, as root, and folders that are then empty."""
    listed = list(paths)
    names = "".join(f"{folder}/{path}\0" for path in listed)
    if names:
        await box.exec(
            ["xargs", "-0", "rm", "-f", "--"], stdin=os.fsencode(names), user="root", cwd="/"
        )
    parents = {posixpath.dirname(path) for path in listed} - {""}
    if parents:
        names = "".join(f"{path}\0" for path in sorted(parents, reverse=True))
        # A link or a file may take the place of such a folder.
        await box.exec(
            ["xargs", "-0", "rmdir", "-p", "--ignore-fail-on-non-empty", "--"],
            stdin=os.fsencode(names),
            user="root",
            cwd=folder,
        )


def _read_records(file: IO[bytes]) -> dict[str, TreeFile]:
    """Returns the files and links in what `Sandbox.save` wrote."""
    tree = {}
    while length := int.from_bytes(file.read(4), "little"):
        if length > _HEADER_BYTES:
            raise TreeError(f"a header of {length} bytes is too long")
        name, kind, mode, size = marshal.loads(file.read(length))
        content = file.read(size)
        if kind != stat.S_IFDIR:
            tree[os.fsdecode(name)] = TreeFile(kind | mode, content)
    return tree
