"""Finds the files that hold tests, from the identifiers of the tests.

Identifiers of some runners name the file or the class. Others name only the test, which is then searched for in the files.
"""

import posixpath
import re
from collections.abc import Iterable, Sequence

from glm5_jax.envs.swe.file_tree import FileTree
from glm5_jax.envs.swe.paths import is_test_path, language_of

_TITLES = re.compile(r"""\b(?:it|test|specify)\s*\(\s*(['"`])((?:\\.|(?!\1).)+)\1""")
_MAX_TEST_BYTES = 1 << 20


def find_test_files(tree: FileTree, names: Iterable[str]) -> list[str]:
    """Returns the test files that hold these tests, sorted; tests whose file is not found are left out."""
    files = [
        path
        for path, file in tree.items()
        if is_test_path(path)
        and language_of(path)
        and not file.is_link
        and len(file.content) <= _MAX_TEST_BYTES
    ]
    return sorted({path for name in names for path in _files_of(tree, files, name)})


def _files_of(tree: FileTree, files: Sequence[str], name: str) -> list[str]:
    """Returns the files of one test by the strongest sign that some file shows."""
    signs = (_has_path, _has_stem, _has_definition, _has_title)
    for sign in signs:
        if matches := [path for path in files if sign(tree, path, name)]:
            return matches
    return []


def _has_path(tree: FileTree, path: str, name: str) -> bool:
    suite = name.partition("::")[0]
    module = path.rpartition(".")[0].replace("/", ".")
    # pytest names the module, and the class in it; RSpec and Vitest the file.
    return suite == path or suite == module or suite.startswith(f"{module}.")


def _has_stem(tree: FileTree, path: str, name: str) -> bool:
    suite = re.split(r"::|#", name)[0]
    return posixpath.basename(path).partition(".")[0] == re.split(r"[.\\/$]", suite)[-1]


def _has_definition(tree: FileTree, path: str, name: str) -> bool:
    last = re.split(r"::|#", name)[-1]
    # Without subtests and data sets.
    word = re.match(r"\w+", last)
    if word is None or word.end() < len(last) and last[word.end()] not in "/[( ":
        return False
    text = tree[path].content.decode("utf-8", "replace")
    definition = rf"\b(?:def|func|function|void|RUN_TEST\s*\(|TEST\w*\s*\(\s*\w+\s*,)\s*{word[0]}\b"
    return re.search(definition, text) is not None


def _has_title(tree: FileTree, path: str, name: str) -> bool:
    text = tree[path].content.decode("utf-8", "replace")
    return any(name.endswith(title) for _, title in _TITLES.findall(text))
