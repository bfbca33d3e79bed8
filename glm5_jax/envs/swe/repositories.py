"""Reads repositories of git, folders and archives as sources of instances.

Commits that change code and tests together are pairs, with the commit's message as the issue. Nothing of a repository is
executed here; git only reads its objects.
"""

import gzip
import io
import os
import pathlib
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator

from glm5_jax.envs.swe.filters import FilterConfig, patch_problem
from glm5_jax.envs.swe.instance import Issue
from glm5_jax.envs.swe.pairs import SourcePair
from glm5_jax.envs.swe.sources import SourceTree
from glm5_jax.runtime.process import ProgramError, run_program

_VERSION = re.compile(r"[-_]v?\d+(?:\.\d+)*.*$")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
_GIT_TIMEOUT_S = 120.0
# Hooks, filters and file watchers of a repository's own configuration are programs.
_SAFE = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
    *("-c", "core.attributesFile=/dev/null", "-c", "diff.external="),
)


class RepositoryError(ValueError):
    """Raised for a source that cannot be read; the text names it and the fix."""


def project_name(path: pathlib.Path) -> str:
    """Returns the name of a project from the name of its folder or archive, without a version."""
    name = path.resolve().name
    for suffix in sorted(_ARCHIVES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    name = re.sub(r"[^\w.+~-]", "-", _VERSION.sub("", name))
    return name.lstrip(".-_") or "project"


def archive_of(path: pathlib.Path, folder: pathlib.Path, commit: str = "HEAD") -> pathlib.Path:
    """Returns an archive of a source: itself, the files of a commit, or those of a folder, written into `folder`.

    Raises RepositoryError.
    """
    if path.is_file() and path.name.endswith(_ARCHIVES):
        return path
    if not path.is_dir():
        raise RepositoryError(
            f"{path} is no folder and no archive ({', '.join(_ARCHIVES)}); give one of them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if (path / ".git").exists():
        digest = _git(path, "rev-parse", f"{commit}^{{commit}}").decode().strip()
        place = folder / f"{project_name(path)}-{digest[:12]}.tar.gz"
        if not place.exists():
            _write(place, _pack(_commit_files(path, digest)))
        return place
    place = folder / f"{project_name(path)}.tar.gz"
    _write(place, _pack(_folder_files(path)))
    return place


def commit_pairs(
    path: pathlib.Path, folder: pathlib.Path, *, count: int, license: str = ""
) -> Iterator[SourcePair]:
    """Yields the changes of the last `count` commits that change code and tests, newest first. Raises RepositoryError."""
    if not (path / ".git").exists():
        raise RepositoryError(f"{path} is no repository of git; give a clone with its history")
    project = project_name(path)
    listed = _git(path, "rev-list", "--no-merges", f"--max-count={count}", "HEAD").decode().split()
    for commit in listed:
        parents = _git(path, "rev-list", "--parents", "-1", commit).decode().split()[1:]
        if len(parents) != 1:  # the first commit
            continue
        diff = _git(path, "diff", "--binary", "--no-renames", "--no-ext-diff", "--no-textconv", parents[0], commit)  # fmt: skip
        text = diff.decode("utf-8", "surrogateescape")
        if patch_problem(text, FilterConfig()) is not None:
            continue
        message = _git(path, "log", "-1", "--format=%B", commit).decode("utf-8", "replace")
        title, _, body = message.strip().partition("\n")
        archive = archive_of(path, folder, parents[0])
        yield SourcePair(
            name=f"{project}__{commit[:12]}",
            project=project,
            before=SourceTree(archive=archive),
            after=SourceTree(archive=archive, patches=(text,)),
            issue=Issue(kind="commit", title=title, body=body.strip()),
            license=license,
            version=commit,
        )


def _git(path: pathlib.Path, *arguments: str) -> bytes:
    safe = ("-c", f"safe.directory={path.resolve()}", *_SAFE)
    environment = ("GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1")
    command = ["env", *environment, "git", *safe, "-C", str(path), *arguments]
    try:
        return run_program(command, timeout_s=_GIT_TIMEOUT_S)
    except ProgramError as error:
        raise RepositoryError(f"git {arguments[0]} in {path}: {error}") from None


def _commit_files(path: pathlib.Path, commit: str) -> Iterator[tuple[str, int, bytes]]:
    """Yields the files of a commit, as `git archive` would without the attributes that leave files out."""
    entries = _git(path, "ls-tree", "-r", "-z", commit).decode("utf-8", "surrogateescape")
    for entry in entries.split("\0")[:-1]:
        meta, _, name = entry.partition("\t")
        mode, kind, digest = meta.split()
        if kind == "blob":
            yield name, int(mode, 8), _git(path, "cat-file", "blob", digest)


def _folder_files(path: pathlib.Path) -> Iterator[tuple[str, int, bytes]]:
    """Yields the files and links of a folder."""
    for file in sorted(path.rglob("*")):
        name, mode = str(file.relative_to(path)), file.lstat().st_mode
        if stat.S_ISLNK(mode):
            yield name, mode, os.fsencode(os.readlink(file))
        elif stat.S_ISREG(mode):
            yield name, mode, file.read_bytes()


def _pack(files: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Returns an archive of files, each a path, a mode and a content or target; equal files are equal bytes."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed:
        with tarfile.open(fileobj=compressed, mode="w") as archive:
            for name, mode, content in files:
                member = tarfile.TarInfo(name)
                member.mode = 0o755 if mode & stat.S_IXUSR else 0o644
                if stat.S_ISLNK(mode):
                    member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(content)
                    archive.addfile(member)
                else:
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def _write(place: pathlib.Path, data: bytes) -> None:
    unfinished = place.with_name(f".unfinished-{place.name}")
    unfinished.write_bytes(data)
    os.replace(unfinished, place)
