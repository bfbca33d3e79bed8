"""Finds near-duplicates among tasks and drafts, and passages that tasks share with an evaluation's tasks.

Texts are compared as sets of runs of words (shingles). MinHash finds candidates; their Jaccard similarity is exact.
"""

import collections
import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Iterable, Mapping

import numpy as np

DUPLICATE_WORDS, MIN_JACCARD = 5, 0.5
CONTAMINATION_WORDS = 8
_HASHES, _ROWS = (
    128,
    4,
)  # 32 bands of 4: a pair at a similarity of 0.5 is missed with a probability of 0.13
_PRIME = (1 << 31) - 1
_TEXT_FILES = (".md", ".txt", ".yaml", ".yml", ".toml")
_MAX_TEXT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbour:
    """Most similar text.

    Attributes:
      name: its name.
      jaccard: similarity, from 0 to 1.
    """

    name: str
    jaccard: float


def words_of(text: str, *, keeps_names: bool = False) -> list[str]:
    """Returns the words in lower case. Paths, file names and numbers become "#" unless they are kept."""
    words = re.findall(r"[\w./@+-]+", text.lower())
    words = [word.strip("./-+") for word in words]
    if not keeps_names:
        words = ["#" if re.search(r"[\d/._@-]", word) else word for word in words]
    return [word for word in words if word]


def shingles(words: list[str], length: int) -> frozenset[tuple[str, ...]]:
    """Returns all runs of `length` words; a shorter text is one run."""
    count = max(1, len(words) - length + 1)
    return (
        frozenset(tuple(words[at : at + length]) for at in range(count)) if words else frozenset()
    )


class NearDuplicateIndex:
    """Index of texts by their shingles.

    Args:
      min_jaccard: similarity from which on a text is a duplicate.
    """

    def __init__(self, min_jaccard: float = MIN_JACCARD):
        if not 0 < min_jaccard <= 1:
            raise ValueError(f"min_jaccard is {min_jaccard}; use above 0 and at most 1")
        self._min_jaccard = min_jaccard
        self._sets: dict[str, frozenset] = {}
        self._bands: dict[tuple, list[str]] = collections.defaultdict(list)
        rng = np.random.default_rng(0)
        self._factors = rng.integers(1, 1 << 31, _HASHES, dtype=np.uint64)
        self._shifts = rng.integers(0, 1 << 31, _HASHES, dtype=np.uint64)

    def nearest(self, text: str) -> Neighbour | None:
        """Returns the most similar text among the candidates of MinHash, or None."""
        items = shingles(words_of(text), DUPLICATE_WORDS)
        names = dict.fromkeys(
            name for band in self._keys(items) for name in self._bands.get(band, ())
        )
        neighbours = [
            Neighbour(name=name, jaccard=_jaccard(items, self._sets[name])) for name in names
        ]
        return max(neighbours, key=lambda neighbour: neighbour.jaccard, default=None)

    def duplicate_of(self, text: str) -> Neighbour | None:
        """Returns the most similar text if it is a duplicate, or None."""
        neighbour = self.nearest(text)
        is_duplicate = neighbour is not None and neighbour.jaccard >= self._min_jaccard
        return neighbour if is_duplicate else None

    def add(self, name: str, text: str) -> None:
        """Adds a text. Raises ValueError if the name is taken."""
        if name in self._sets:
            raise ValueError(f"the index has a text {name!r} already; give another name")
        items = shingles(words_of(text), DUPLICATE_WORDS)
        self._sets[name] = items
        for band in self._keys(items):
            self._bands[band].append(name)

    def _keys(self, items: frozenset) -> list[tuple]:
        """Returns the bands of the signature of a set."""
        if not items:
            return []
        # Factors, shifts and hashes are below 2**31, so that nothing overflows.
        hashes = np.array([_hash(item) for item in items], dtype=np.uint64) % np.uint64(_PRIME)
        table = (hashes[:, None] * self._factors + self._shifts) % np.uint64(_PRIME)
        signature = table.min(axis=0).tolist()
        return [(at, *signature[at : at + _ROWS]) for at in range(0, _HASHES, _ROWS)]


def _hash(item: tuple[str, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(item).encode(), digest_size=8).digest(), "big")


def _jaccard(one: frozenset, other: frozenset) -> float:
    return len(one & other) / len(one | other) if one or other else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPassage:
    """Passage of a task that is also in a reference.

    Attributes:
      task: name of the task.
      reference: path of the reference's file.
      passage: first shared run of words.
      count: number of shared runs.
    """

    task: str
    reference: str
    passage: str
    count: int


def contamination(
    instructions: Mapping[str, str], references: str | pathlib.Path
) -> list[SharedPassage]:
    """Returns the passages of eight words that instructions share with texts of a folder.

    Lines with a canary are left out. Raises ValueError if the folder has no text.
    """
    folder = pathlib.Path(references)
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in _TEXT_FILES and path.is_file() and path.stat().st_size <= _MAX_TEXT_BYTES
    ]
    if not paths:
        raise ValueError(
            f"{folder} has no text ({', '.join(_TEXT_FILES)}); give the folder of an evaluation's tasks"
        )
    by_task = {name: _passages([text]) for name, text in instructions.items()}
    shared = []
    for path in paths:
        lines = path.read_text(errors="replace").splitlines()
        text = "\n".join(line for line in lines if "canary" not in line.lower())
        passages = _passages([text])
        for name, mine in by_task.items():
            if common := sorted(mine & passages):
                shared.append(
                    SharedPassage(
                        task=name,
                        reference=path.relative_to(folder).as_posix(),
                        passage=" ".join(common[0]),
                        count=len(common),
                    )
                )
    return shared


def _passages(texts: Iterable[str]) -> frozenset:
    runs = (shingles(words_of(text, keeps_names=True), CONTAMINATION_WORDS) for text in texts)
    return frozenset(run for part in runs for run in part if len(run) == CONTAMINATION_WORDS)
