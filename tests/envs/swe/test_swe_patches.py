"""Unified diffs: parsing without loss, parts, edits, and the digest of a tree."""

import subprocess

import pytest

from glm5_jax.envs.swe.patch_edits import drop_last_hunk, reverse_patch
from glm5_jax.envs.swe.patches import PatchError, parse_patch, render_patch, split_patch
from glm5_jax.envs.swe.paths import classify_path, is_runner_config, language_of
from glm5_jax.envs.swe.tree import tree_digest

LINES = "one two three four five six seven eight seven six five four three nine ten ".replace(
    " ", "\n"
)
OLD = {
    "src/a.py": LINES,
    "src/crlf.c": "a\r\nb\r\n",
    "src/no_end.py": "x\ny",
    "src/gone.py": "bye\n",
    "src/old name.py": "same\nsame\nsame\nline\n",
    "run.sh": "echo\n",
    "data.bin": "\0\1\2binary",
    "tests/test_a.py": "def test_a(): pass\n",
    "docs/a.rst": "text\n",
}
NEW = {
    "src/a.py": LINES.replace("two", "2").replace("nine", "9\n9b"),
    "src/crlf.c": "a\r\nc\r\n",
    "src/no_end.py": "x\nz\n",
    "src/new.py": "fresh\f\u2028page\n",
    "src/grün name.py": "same\nsame\nsame\nchanged\n",
    "run.sh": "echo\n",
    "data.bin": "\0\1\3binary changed",
    "tests/test_a.py": "def test_a(): pass\ndef test_b(): pass\n",
    "docs/a.rst": "more text\n",
}


def write(folder, files) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def git(folder, *arguments: str, **more) -> str:
    command = [
        "git",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "core.autocrlf=false",
        *arguments,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=True, **more)
    return done.stdout.decode()


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """Returns a folder of git with both trees, and the diff between them."""
    folder = tmp_path_factory.mktemp("trees")
    git(folder, "init", "-q")
    write(folder, OLD)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "old")
    for name in OLD.keys() - NEW.keys():
        (folder / name).unlink()
    write(folder, NEW)
    (folder / "run.sh").chmod(0o755)
    git(folder, "add", "-A")
    return folder, git(folder, "diff", "--cached", "--binary", "-M50%")


def test_parses_diff_of_git_without_loss(trees):
    _, diff = trees
    files = parse_patch(diff)
    assert render_patch(files) == diff
    by_path = {file.path: file for file in files}
    assert by_path.keys() == {*NEW, "src/gone.py"}
    assert by_path["src/grün name.py"].old_path == "src/old name.py"
    assert (by_path["src/new.py"].old_path, by_path["src/gone.py"].new_path) == (None, None)
    assert by_path["data.bin"].binary.startswith("GIT binary patch\n")
    assert (by_path["src/a.py"].count("+"), by_path["src/a.py"].count("-")) == (3, 2)


def test_drops_text_around_files(trees):
    _, diff = trees
    mail = f"From: a\nSubject: fix\n\nBug: #1\n---\n src/a.py | 2 +-\n\n{diff}-- \n2.39.0\n"
    assert render_patch(parse_patch(mail)) == diff


def test_parts_apply_one_after_the_other(trees, tmp_path):
    folder, diff = trees
    parts = split_patch(diff)
    assert [f.path for f in parse_patch(parts.test)] == ["tests/test_a.py"]
    assert {f.path for f in parse_patch(parts.aux)} == {"docs/a.rst", "data.bin", "run.sh"} - {
        "run.sh"
    }
    git(folder, "worktree", "add", "-q", "--detach", str(tmp_path / "w"), "HEAD")
    for part in (parts.code, parts.test, parts.aux):
        git(tmp_path / "w", "apply", "-", input=part.encode())
    for name, text in NEW.items():
        assert (tmp_path / "w" / name).read_bytes() == text.encode(), name


def test_reversed_patch_undoes_patch(trees, tmp_path):
    folder, diff = trees
    assert reverse_patch(reverse_patch(diff)) == diff
    git(folder, "worktree", "add", "-q", "--detach", str(tmp_path / "w"), "HEAD")
    before = tree_digest(tmp_path / "w")
    git(tmp_path / "w", "apply", "-", input=diff.encode())
    assert tree_digest(tmp_path / "w") != before
    git(tmp_path / "w", "apply", "-", input=reverse_patch(diff).encode())
    assert tree_digest(tmp_path / "w") == before


def test_drops_last_hunk(trees):
    _, diff = trees
    only = next(str(file) for file in parse_patch(diff) if file.path == "src/a.py")
    first = drop_last_hunk(only)
    assert len(parse_patch(first)[0].hunks) == 1
    assert only.startswith(first)
    assert drop_last_hunk(first) == ""
    with pytest.raises(PatchError, match="the patch is empty"):
        drop_last_hunk("")
    two = only + next(str(file) for file in parse_patch(diff) if file.path == "src/crlf.c")
    assert drop_last_hunk(two) == only


PLAIN = """Index: jinja2/src/x.py
--- jinja2.orig/src/x.py\t2024-01-01 00:00:00
+++ jinja2/src/x.py\t2024-01-02 00:00:00
@@ -1,3 +1,3 @@
 a
-b
+c

"""


def test_parses_diff_of_debian():
    [file] = parse_patch(PLAIN)
    assert (file.old_path, file.new_path) == ("src/x.py", "src/x.py")
    assert file.hunks[0].lines == (" a\n", "-b\n", "+c\n", " \n")


def test_keeps_lines_that_look_like_headers():
    diff = "--- a/x.sql\n+++ b/x.sql\n@@ -1,2 +1,2 @@\n--- old comment\n+++ new comment\n @@ -1 +1 @@\n"
    [file] = parse_patch(diff)
    assert (file.count("-"), file.count("+")) == (1, 1)
    assert str(file) == diff


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("hello", "no file of a diff begins"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n", "line 5: a hunk of x ends 2 lines early"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,1 @@\n-a\n+b\n+c\n-d\n", "more lines than its range"),
        ("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ what @@\n", "range of a hunk of x is malformed"),
    ],
)
def test_rejects_malformed_diff(diff, message):
    with pytest.raises(PatchError, match=message):
        parse_patch(diff)


def test_rejects_reversal_without_content():
    with pytest.raises(PatchError, match="a.png is binary"):
        reverse_patch("diff --git a/a.png b/a.png\nBinary files a/a.png and b/a.png differ\n")


KINDS = {
    "test": "tests/x.txt test/fixtures/a.json spec/a.rb src/test/java/A.java pkg/a_test.go testdata/x a/__tests__/x.js "
    "conftest.py test_a.py a/b_test.py src/FooTest.java FooIT.java web/a.test.tsx web/a.spec.mjs UriTest.php "
    "lib/a_spec.rb lib/test_a.rb Tests/A.php t/01.t e2e/a.ts tests/CMakeLists.txt",
    "code": "src/latest/x.py src/contest.py lib/a.rb a.go main.c include/gsl/pointers CMakeLists.txt package.json pom.xml "
    "pyproject.toml Makefile go.mod composer.json bin/tool src/templates/a.html attest.py lib/testimony.js "
    "src/protest/a.c README.py requirements.txt src/testA.cpp",
    "aux": "README.md CHANGELOG docs/a.rst docs/conf.py package-lock.json go.sum .github/workflows/test.yml .travis.yml "
    "NEWS LICENSE.txt debian/patches/x debian/tests/control Gemfile.lock changelog.d/1.bugfix logo.png",
}


@pytest.mark.parametrize("kind", KINDS)
def test_classifies_paths(kind):
    assert {p: classify_path(p) for p in KINDS[kind].split()} == dict.fromkeys(
        KINDS[kind].split(), kind
    )


def test_finds_languages_and_runner_configuration():
    paths = "a.py A.java a.go a.c a.cpp a.js a.ts a.php a.rb".split()
    assert [
        language_of(p) for p in paths
    ] == "python java go c cpp javascript typescript php ruby".split()
    assert language_of("a.txt") is None
    for path in (
        "conftest.py",
        "a/.rspec",
        "jest.config.js",
        "phpunit.xml.dist",
        ".mocharc.yml",
        "pytest.ini",
    ):
        assert is_runner_config(path), path
    for path in ("setup.cfg", "package.json", "src/config.py", "CMakeLists.txt"):
        assert not is_runner_config(path), path


def test_counts_rename_out_of_tests_as_test():
    diff = "diff --git a/tests/a.py b/src/a.py\nsimilarity index 100%\nrename from tests/a.py\nrename to src/a.py\n"
    assert split_patch(diff).test == diff


def test_digests_names_contents_and_rights(tmp_path):
    def digest(**files) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write(folder, files)
        return tree_digest(folder)

    first = digest(a="x", b="y")
    assert first.startswith("tree:")
    assert len(first) == 69
    assert digest(a="x", b="y") == first
    others = [digest(a="x", b="z"), digest(a="x", c="y"), digest(a="xy", b="")]
    assert len({first, *others}) == 4
    folder = tmp_path / "links"
    write(folder, {"a": "x"})
    (folder / "b").symlink_to("a")
    linked = tree_digest(folder)
    (folder / ".git").mkdir()
    write(folder / ".git", {"HEAD": "z"})
    (folder / "empty").mkdir()
    assert tree_digest(folder) == linked
    (folder / "a").chmod(0o755)
    assert tree_digest(folder) != linked
