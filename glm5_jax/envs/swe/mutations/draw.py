"""Draws mutations of the sources of a project."""

import functools
import posixpath
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from glm5_jax.envs.swe.file_tree import FileTree, TreeFile
from glm5_jax.envs.swe.mutations.edits import (
    Mutation,
    apply_mutations,
    has_overlap,
    mutation_digest,
)
from glm5_jax.envs.swe.mutations.python_sites import find_python_mutations
from glm5_jax.envs.swe.mutations.token_sites import find_token_mutations
from glm5_jax.envs.swe.paths import is_test_path, language_of

_NUM_WEIGHTS = {1: 0.8, 2: 0.13, 3: 0.07}
_VENDORED = {"vendor", "third_party", "node_modules", "external", "examples", "benchmarks", "docs"}
_MAX_SOURCE_BYTES = 1 << 20
_MIN_STEM = 3


class DrawnMutation(NamedTuple):
    """Set of mutations of one file.

    Attributes:
      path: mutated file.
      operators: kinds of the bugs.
      content: source after the mutations.
      digest: name of the set.
    """

    path: str
    operators: tuple[str, ...]
    content: bytes
    digest: str


@functools.lru_cache(maxsize=512)
def find_mutations(source: bytes, language: str) -> tuple[Mutation, ...]:
    """Returns all mutations of a source."""
    if language == "python":
        return tuple(find_python_mutations(source))
    return tuple(find_token_mutations(source, language))


def mutable_files(tree: FileTree, language: str, tests: Sequence[str]) -> list[str]:
    """Returns the sources of a language that tests name, by the stem of their file; all sources if they name none.

    tests: test files that run.
    """
    languages = {"cpp": ("c", "cpp"), "typescript": ("typescript",)}.get(language, (language,))
    sources = [
        path
        for path, file in tree.items()
        if (language_of(path) in languages or language == "cpp" and _is_bare_header(path))
        and not is_test_path(path)
        and not path.endswith(".gemspec")
        and not file.is_link
        and len(file.content) <= _MAX_SOURCE_BYTES
        and not _VENDORED & set(path.split("/"))
    ]
    words: set[str] = set()
    for path in tests:
        words |= set(
            re.findall(r"[a-z0-9]+", _plain(tree[path].content.decode("utf-8", "replace")))
        )
    named = [path for path in sources if _stem(path) in words]
    return named or sources


def draw_mutation(
    tree: FileTree, paths: Sequence[str], language: str, seed: str
) -> DrawnMutation | None:
    """Returns one to three mutations of one file; None if the drawn file has none. Equal seeds give equal mutations.

    Files are drawn by their number of mutations, and kinds of bugs with equal weight.
    """
    rng = random.Random(seed)
    numbers = {path: len(find_mutations(tree[path].content, language)) for path in paths}
    if not any(numbers.values()):
        return None
    path = rng.choices(list(numbers), [n**0.5 for n in numbers.values()])[0]
    source = tree[path].content
    sites = find_mutations(source, language)
    (count,) = rng.choices(list(_NUM_WEIGHTS), list(_NUM_WEIGHTS.values()))
    drawn: list[Mutation] = []
    for _ in range(count):
        operator = rng.choice(sorted({site.operator for site in sites}))
        site = rng.choice([site for site in sites if site.operator == operator])
        if not has_overlap([edit for other in (*drawn, site) for edit in other.edits]):
            drawn.append(site)
    return DrawnMutation(
        path=path,
        operators=tuple(mutation.operator for mutation in drawn),
        content=apply_mutations(source, drawn),
        digest=mutation_digest(path, drawn),
    )


def mutated_file(tree: FileTree, drawn: DrawnMutation) -> TreeFile:
    """Returns the mutated file."""
    return TreeFile(tree[drawn.path].mode, drawn.content)


def _plain(text: str) -> str:
    # Names in capitals and with underscores are one word: DeepMerge is deepmerge, as is deep_merge.
    return text.replace("_", "").lower()


def _is_bare_header(path: str) -> bool:
    """Returns whether a file is a header of C++ without a suffix."""
    return "." not in posixpath.basename(path) and "include" in path.split("/")


def _stem(path: str) -> str:
    stem = _plain(posixpath.basename(path).partition(".")[0])
    return stem if len(stem) >= _MIN_STEM else ""
