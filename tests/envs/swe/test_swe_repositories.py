"""Repositories, folders and archives as sources, and manifests of pairs."""

import pathlib
import subprocess
import tarfile

import msgspec
import pytest

from glm5_jax.envs.swe.file_tree import tree_of_archive
from glm5_jax.envs.swe.instance import InstanceError
from glm5_jax.envs.swe.manifests import files_of, issue_of, pairs_of, read_manifest
from glm5_jax.envs.swe.registries import download
from glm5_jax.envs.swe.repositories import RepositoryError, archive_of, commit_pairs, project_name

WHO = ("-c", "user.name=a", "-c", "user.email=a@localhost")
CHANGES = (
    {"calc.py": "def add(a, b):\n    return a - b\n", ".gitattributes": "tests export-ignore\n"},
    {"README.md": "text\n"},
    {
        "calc.py": "def add(a, b):\n    return a + b\n",
        "tests/test_calc.py": "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    },
    {"tests/test_calc.py": "def test_nothing():\n    pass\n"},
)


@pytest.fixture
def repository(tmp_path) -> pathlib.Path:
    """Returns a repository of git whose third commit changes code and tests."""
    folder = tmp_path / "calc"
    folder.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    for number, files in enumerate(CHANGES):
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
        message = f"Change {number}\n\nIt was wrong."
        subprocess.run(["git", *WHO, "commit", "-qm", message], cwd=folder, check=True)
    return folder


def test_reads_commits_that_change_code_and_tests(repository, tmp_path):
    (pair,) = commit_pairs(repository, tmp_path / "packed", count=10, license="MIT")

    assert (pair.issue.title, pair.issue.body) == ("Change 2", "It was wrong.")
    assert pair.name.startswith("calc__") and pair.license == "MIT"
    assert set(tree_of_archive(pair.before.archive)) == {"calc.py", "README.md", ".gitattributes"}
    assert "+    return a + b" in pair.after.patches[0]


def test_packs_commit_with_files_that_attributes_leave_out(repository, tmp_path):
    archive = archive_of(repository, tmp_path / "packed")

    assert "tests/test_calc.py" in tree_of_archive(archive)


def test_packs_equal_folders_to_equal_bytes(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / name / "calc"
        folder.mkdir(parents=True)
        (folder / "run").write_text("#!/bin/sh\n")
        (folder / "run").chmod(0o755)
        (folder / "link").symlink_to("run")
    archives = [archive_of(tmp_path / n / "calc", tmp_path / f"{n}-packed") for n in ("one", "two")]

    assert archives[0].read_bytes() == archives[1].read_bytes()
    tree = tree_of_archive(archives[0])
    assert tree["run"].is_program and tree["link"].is_link


@pytest.mark.parametrize(
    ("name", "expected"),
    [("calc-1.2.3.tar.gz", "calc"), ("calc", "calc"), ("php-x_2.0+dfsg.tar.xz", "php-x")],
)
def test_names_project_without_version(tmp_path, name, expected):
    assert project_name(tmp_path / name) == expected


def test_rejects_sources_that_are_none(tmp_path):
    with pytest.raises(RepositoryError, match="is no folder and no archive"):
        archive_of(tmp_path / "missing", tmp_path)
    with pytest.raises(RepositoryError, match="is no repository of git"):
        list(commit_pairs(tmp_path, tmp_path, count=1))


SERIES = {
    "debian/patches/series": "0001-fix.patch\n",
    "debian/patches/0001-fix.patch": "Description: Add numbers\n They were subtracted.\nBug: https://example.org/1\n\n"
    "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n",
}


def manifest_row(**fields):
    file = {"url": "debian:calc=1-1/calc_1.orig.tar.gz", "sha256": "a" * 64}
    row = {"instance_id": "calc-1", "project": "calc", "version": "1-1", "language": "python"}
    row |= {"license": "MIT", "archive": file, "packaging": {**file, "sha256": "b" * 64}}
    return row | {"patch": "0001-fix.patch"} | fields


def write_manifest(path, *rows):
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


def test_reads_pairs_of_manifest_whose_files_are_there(tmp_path):
    entries = read_manifest(write_manifest(tmp_path / "m.jsonl", manifest_row()))
    assert pairs_of(entries, tmp_path) == []
    with tarfile.open(tmp_path / ("b" * 64), "w") as archive:
        for name, text in SERIES.items():
            (tmp_path / "file").write_text(text)
            archive.add(tmp_path / "file", name)
    (tmp_path / ("a" * 64)).write_bytes(b"")

    (pair,) = pairs_of(entries, tmp_path)

    assert pair.issue == issue_of(SERIES["debian/patches/0001-fix.patch"], "")
    assert (pair.issue.title, pair.issue.body) == ("Add numbers", "They were subtracted.")
    assert pair.issue.url == "https://example.org/1"
    assert (pair.before.patches, len(pair.after.patches)) == ((), 1)
    assert [file.sha256[0] for file in files_of(entries)] == ["a", "b"]


def test_rejects_wrong_rows_of_manifest(tmp_path):
    path = tmp_path / "m.jsonl"
    with pytest.raises(InstanceError, match="two pairs are named calc-1"):
        read_manifest(write_manifest(path, manifest_row(), manifest_row()))
    with pytest.raises(InstanceError, match="use 64 hexadecimal digits"):
        file = {"url": "x", "sha256": "1"}
        read_manifest(write_manifest(path, manifest_row(archive=file)))


def test_rejects_unknown_registry(tmp_path):
    with pytest.raises(OSError, match="registry 'ftp' is not known"):
        download("ftp:x", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
