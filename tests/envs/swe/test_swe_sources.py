import asyncio
import hashlib
import io
import tarfile

import pytest

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.swe.fetch import SourceFile, fetch_sources
from glm5_jax.envs.swe.file_tree import (
    TreeError,
    TreeFile,
    changed_files,
    digest_tree,
    put_tree,
    save_tree,
    text_file,
    tree_of_archive,
    with_changes,
    without_folders,
)
from glm5_jax.envs.swe.patches import PatchError
from glm5_jax.envs.swe.sources import (
    SourceTree,
    apply_patch,
    debian_pair,
    diff_trees,
    make_tree,
    read_series,
)
from glm5_jax.envs.swe.tree import tree_digest

LINK = TreeFile(0o120777, b"a.txt")
TREE = {
    "a.txt": text_file("one\ntwo\n"),
    "bin/run": text_file("#!/bin/sh\n", 0o755),
    "link": LINK,
    "zeros": TreeFile(0o100644, bytes(3_000_000)),
}


def _archive(path, files: dict[str, bytes], top: str = "project-1/"):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(top + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_reads_archive_without_topmost_folder(tmp_path):
    path = _archive(tmp_path / "x.tar.gz", {"a.txt": b"x", "b/c.txt": b"y"})

    assert {name: file.content for name, file in tree_of_archive(path).items()} == {
        "a.txt": b"x",
        "b/c.txt": b"y",
    }


def test_rejects_archive_that_is_cut_off(tmp_path):
    path = _archive(tmp_path / "x.tar.gz", {"a.txt": bytes(range(256)) * 500})
    path.write_bytes(path.read_bytes()[:200])

    with pytest.raises(TreeError, match="no complete archive"):
        tree_of_archive(path)


def test_rejects_archive_with_path_outside(tmp_path):
    path = _archive(tmp_path / "x.tar.gz", {"../../etc/passwd": b"x"}, top="")

    with pytest.raises(TreeError, match="outside"):
        tree_of_archive(path)


def test_keeps_tree_through_sandbox(isolation):
    async def run():
        async with Sandbox() as box:
            await put_tree(box, "/app/tree", TREE)
            return await save_tree(box, "/app/tree")

    assert asyncio.run(run()) == TREE


def test_digests_tree_as_folder(tmp_path):
    for name, file in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if file.is_link:
            path.symlink_to(file.content.decode())
        else:
            path.write_bytes(file.content)
            path.chmod(file.mode & 0o777)

    assert digest_tree(TREE) == tree_digest(tmp_path)


def test_finds_changed_files():
    new = {**TREE, "a.txt": text_file("one\n"), "new": LINK, "bin/run": text_file("#!/bin/sh\n")}
    del new["zeros"]

    changes = changed_files(TREE, new)

    assert changes == {name: new.get(name) for name in ("a.txt", "bin/run", "new", "zeros")}
    assert with_changes(TREE, changes) == new


def test_leaves_out_folders_at_top_or_anywhere():
    tree = {path: LINK for path in ("build/x", "src/build/y", "a/node_modules/z", "b.txt")}

    assert set(without_folders(tree, ["build/", "node_modules"])) == {"src/build/y", "b.txt"}


def test_applies_difference_of_trees(isolation):
    new = with_changes(
        TREE, {"a.txt": text_file("one\r\nthree"), "zeros": None, "b": TreeFile(0o100644, bytes(9))}
    )

    async def run():
        text = await diff_trees(TREE, new)
        async with Sandbox() as box:
            await put_tree(box, "/app/tree", TREE)
            first = await apply_patch(box, text, "/app/tree")
            tree = await save_tree(box, "/app/tree")
            return first, await apply_patch(box, text, "/app/tree"), tree

    first, again, tree = asyncio.run(run())
    assert (first, again) == (True, False)
    assert changed_files(new, tree) == {}


def test_makes_tree_of_series(isolation, tmp_path):
    archive = _archive(tmp_path / "x.tar.gz", {"a.txt": b"1\n", "debian/rules": b"x"})
    patches = [
        f"--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-{n}\n+{n + 1}\n".encode() for n in range(1, 4)
    ]
    files = {f"debian/patches/{n}.patch": patch for n, patch in enumerate(patches, 1)}
    files["debian/patches/series"] = b"1.patch\n# 9.patch\n2.patch -p1\n3.patch\n"
    series = read_series(_archive(tmp_path / "d.tar.gz", files, top=""))

    before, after = debian_pair(archive, series, "2.patch")

    assert asyncio.run(make_tree(before)) == {"a.txt": text_file("2\n")}
    assert asyncio.run(make_tree(after)) == {"a.txt": text_file("3\n")}
    with pytest.raises(PatchError, match="patch 1 of 1 does not apply"):
        asyncio.run(make_tree(SourceTree(archive=archive, patches=(series["3.patch"],))))
    with pytest.raises(TreeError, match="no patch 'x'"):
        debian_pair(archive, series, "x")


def test_fetches_available_archives(tmp_path):
    contents = {"https://x/a": b"a", "https://x/b": b"changed"}
    calls = []

    def download(url, path):
        calls.append(url)
        if url not in contents:
            path.write_bytes(b"half")
            raise OSError("HTTP error 404")
        path.write_bytes(contents[url])

    sources = [
        SourceFile(url=f"https://x/{name}", sha256=hashlib.sha256(name.encode()).hexdigest())
        for name in "abc"
    ]
    report = fetch_sources(sources, tmp_path, download)
    again = fetch_sources(sources[:1], tmp_path, download)

    a, b, c = (source.sha256 for source in sources)
    assert report.files == again.files == {a: tmp_path / a}
    assert "older version" in report.missing[b] and "404" in report.missing[c]
    assert calls == ["https://x/a", "https://x/b", "https://x/c"]
    assert [path.name for path in tmp_path.iterdir()] == [a]


def test_rejects_malformed_digest():
    with pytest.raises(ValueError, match="64 hexadecimal"):
        SourceFile(url="https://x/a", sha256="abc")
