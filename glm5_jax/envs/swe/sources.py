"""Makes trees of sources from archives and patches, and changes with tests from two trees.

A `SourceTree` is an archive and patches that apply to it, one after the other. Two of them are a pair: the base, and the
solved tree. `make_change` compares them, so fixes of Debian, releases and mutations are all handled alike.
"""

import dataclasses
import hashlib
import os
import pathlib
import posixpath
import re
import tarfile
from collections.abc import Mapping, Sequence

from glm5_jax.envs.sandbox import Sandbox, SandboxConfig
from glm5_jax.envs.swe.file_tree import (
    FileTree,
    TreeError,
    TreeFile,
    digest_tree,
    put_tree,
    save_tree,
    tree_of_archive,
    without_folders,
)
from glm5_jax.envs.swe.patches import PatchError, PatchParts, parse_patch, render_patch, split_patch

# Folders that tell the future, or how a distribution builds: they are no part of a task.
REMOVED_FOLDERS = ("debian", ".pc", ".git", ".hg", ".svn")
_WORK = "/tree"
_IDENTITY = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@localhost",
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
_PATCH = ["patch", "--batch", "--forward", "--fuzz=5", "-p1", "--no-backup-if-mismatch", "-s"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTree:
    """Sources of a project in one state.

    Attributes:
      archive: tar file.
      patches: diffs that apply to it, in order.
      removed: files that are left out, such as tests that a task hides.
    """

    archive: pathlib.Path
    patches: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Returns the sha256 of the archive, which identifies it wherever it lies."""
        return hashlib.sha256(self.archive.read_bytes()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """Change of a project with its tests.

    Attributes:
      base: tree without the change.
      base_commit: digest of that tree.
      parts: the change as patches of code, tests and other files.
    """

    base: FileTree
    base_commit: str
    parts: PatchParts


def read_series(path: str | os.PathLike) -> dict[str, str]:
    """Returns the patches of a Debian packaging archive by name, in the order of `debian/patches/series`; empty without one."""
    with tarfile.open(path) as archive:
        names = {posixpath.normpath(member.name): member for member in archive if member.isfile()}

        def text(name: str) -> str:
            if name not in names:
                raise TreeError(f"{path} has no {name}; fetch it again")
            file = archive.extractfile(names[name])
            return file.read().decode("utf-8", "surrogateescape") if file else ""

        if "debian/patches/series" not in names:
            return {}
        lines = [re.sub(r"(?:^|\s)#.*", "", line).split() for line in text("debian/patches/series").split("\n")]  # fmt: skip
        return {words[0]: text(f"debian/patches/{words[0]}") for words in lines if words}


def debian_pair(
    archive: pathlib.Path, series: Mapping[str, str], name: str
) -> tuple[SourceTree, SourceTree]:
    """Returns the trees before and after one patch of a series; the patches before it are in both."""
    if name not in series:
        raise TreeError(f"the series has no patch {name!r}; use one of {', '.join(series)}")
    names = list(series)
    before = tuple(series[other] for other in names[: names.index(name)])
    return (
        SourceTree(archive=archive, patches=before),
        SourceTree(archive=archive, patches=(*before, series[name])),
    )


async def make_tree(source: SourceTree) -> dict[str, TreeFile]:
    """Returns the files of a source. Raises PatchError for a patch that does not apply."""
    tree = without_folders(tree_of_archive(source.archive), REMOVED_FOLDERS)
    if source.patches:
        async with Sandbox(_work_config()) as box:
            await put_tree(box, _WORK, tree)
            for number, text in enumerate(source.patches, 1):
                text = render_patch(parse_patch(text))  # without the text around it
                if text and not await apply_patch(box, text, _WORK):
                    raise PatchError(
                        f"patch {number} of {len(source.patches)} does not apply to {source.archive.name}; "
                        "check the order of the series"
                    )
            tree = without_folders(await save_tree(box, _WORK), REMOVED_FOLDERS)
    missing = [path for path in source.removed if path not in tree]
    if missing:
        raise TreeError(f"{source.archive.name} has no {missing[0]}; it cannot be removed")
    return {path: file for path, file in tree.items() if path not in source.removed}


async def make_change(before: SourceTree, after: SourceTree, folders: Sequence[str] = ()) -> Change:
    """Returns the change from one source to another.

    folders: the only folders whose changes count, as of releases that hold build outputs; empty: all.
    """
    base, solved = await make_tree(before), await make_tree(after)
    if folders:
        prefixes = tuple(f"{folder}/" for folder in folders)
        inside = {path: file for path, file in solved.items() if path.startswith(prefixes)}
        outside = {path: file for path, file in base.items() if not path.startswith(prefixes)}
        solved = {**outside, **inside}
    text = await diff_trees(base, solved)
    return Change(base=base, base_commit=digest_tree(base), parts=split_patch(text))


async def diff_trees(old: FileTree, new: FileTree) -> str:
    """Returns the difference of two trees as a patch of git, binary files included."""
    async with Sandbox(_work_config()) as box:
        await put_tree(box, _WORK, old)
        await _git(box, "init", "-q")
        await _git(box, "add", "-A", "-f")
        await _git(box, "commit", "-q", "--allow-empty", "-m", "base")
        await box.exec(f"find {_WORK} -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {{}} +")
        await put_tree(box, _WORK, new)
        await _git(box, "add", "-A", "-f")
        done = await _git(box, "diff", "--cached", "--binary", "--no-renames", "HEAD")
    return done.decode("utf-8", "surrogateescape")


async def apply_patch(box: Sandbox, text: str, folder: str) -> bool:
    """Applies a patch in a folder of a sandbox; returns whether it applied. A patch that does not changes nothing."""
    data = text.encode("utf-8", "surrogateescape")
    check = [*_PATCH, "--dry-run"]
    for tries in (
        [["git", "apply", "--whitespace=nowarn", "-"]],
        [check, _PATCH],
    ):
        results = []
        for command in tries:
            done = await box.exec(command, stdin=data, cwd=folder, env=_IDENTITY)
            results.append(done.code == 0)
            if not results[-1]:
                break
        if all(results):
            return True
    return False


async def commit_once(box: Sandbox, folder: str) -> None:
    """Makes a git repository with one commit of fixed date in a folder of a sandbox, so that it has no history."""
    await box.exec(["rm", "-rf", ".git"], cwd=folder)
    for arguments in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "--allow-empty", "-m", "base"]):  # fmt: skip
        await _git(box, *arguments, cwd=folder)


async def _git(box: Sandbox, *arguments: str, cwd: str = _WORK) -> bytes:
    done = await box.exec(["git", *arguments], cwd=cwd, env=_IDENTITY)
    if done.code or done.truncated:
        raise PatchError(
            f"git {arguments[0]} failed: {done.stderr.decode(errors='replace')[:300] or 'its output is too long'}"
        )
    return done.stdout


def _work_config() -> SandboxConfig:
    return SandboxConfig(
        workdir=_WORK,
        timeout_s=120,
        output_bytes=64 << 20,
        memory_bytes=2 << 30,
        disk_bytes=1 << 30,
        max_files=400_000,
    )
