"""Defines mutations: small edits of one source file that may make a bug of it."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Operator = Literal[
    "comparison",
    "off_by_one",
    "wrong_constant",
    "dropped_condition",
    "swapped_arguments",
    "removed_guard",
]


class Edit(NamedTuple):
    """Replacement of a part of a file.

    Attributes:
      start, end: offsets of the part, in bytes.
      text: new content.
    """

    start: int
    end: int
    text: bytes


class Mutation(NamedTuple):
    """Mutation of one source file.

    Attributes:
      operator: kind of the bug.
      edits: replacements that do not overlap.
    """

    operator: Operator
    edits: tuple[Edit, ...]


def apply_mutations(source: bytes, mutations: Iterable[Mutation]) -> bytes:
    """Returns a source after all edits. Raises ValueError if two of them overlap."""
    edits = sorted(edit for mutation in mutations for edit in mutation.edits)
    if has_overlap(edits):
        raise ValueError("two edits overlap; draw other mutations")
    for edit in reversed(edits):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


def has_overlap(edits: Sequence[Edit]) -> bool:
    """Returns whether two edits change the same bytes."""
    ordered = sorted(edits)
    return any(one.end > two.start or one == two for one, two in zip(ordered, ordered[1:]))


def mutation_digest(path: str, mutations: Iterable[Mutation]) -> str:
    """Returns a short digest that names a set of mutations of a file."""
    edits = sorted(edit for mutation in mutations for edit in mutation.edits)
    return hashlib.sha256(repr((path, edits)).encode()).hexdigest()[:10]
