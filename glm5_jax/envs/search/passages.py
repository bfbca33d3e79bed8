"""Provides passages to search, and tests whether they contain a phrase."""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from glm5_jax.data.conversation import read_json
from glm5_jax.envs.search.bm25 import Bm25, Bm25Config, words
from glm5_jax.runtime.files import read_lines


class Passage(NamedTuple):
    """Result of a search. Its number in its corpus is its id."""

    title: str
    text: str


class Corpus:
    """Passages with an index of their titles and texts."""

    def __init__(self, passages: Sequence[Passage], config: Bm25Config = Bm25Config()):
        self.passages, self._config = tuple(passages), config

    @classmethod
    def read(cls, path: str | os.PathLike, config: Bm25Config = Bm25Config()) -> "Corpus":
        """Reads passages from lines of JSON with title and text. Raises ValueError that names an invalid line."""
        passages = []
        for number, line in lines(path):
            if not all(isinstance(line.get(name), str) for name in ("title", "text")):
                raise ValueError(f"{path}, line {number}: give a title and a text")
            passages.append(Passage(line["title"], line["text"]))
        return cls(passages, config)

    @functools.cached_property
    def index(self) -> Bm25:
        """Returns the index of titles and texts."""
        return Bm25([f"{p.title}\n{p.text}" for p in self.passages], self._config)

    @functools.cached_property
    def plain_texts(self) -> tuple[str, ...]:
        """Returns the `plain` text of each passage, title included."""
        return tuple(plain(f"{p.title}\n{p.text}") for p in self.passages)


def plain(text: str) -> str:
    """Returns the words of a text between blanks, in the form that `says` searches."""
    return f" {' '.join(words(text))} "


def says(text: str, phrase: str) -> bool:
    """Returns whether the words of a phrase, at least one, occur in a row in `plain` text."""
    looked_for = plain(phrase)
    return bool(looked_for.strip()) and looked_for in text


def lines(path: str | os.PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the objects of a file of JSON lines, with line numbers from 1. Raises ValueError for an invalid line."""
    for line in read_lines(path):
        try:
            value = read_json(line.content)
        except ValueError as error:
            raise ValueError(f"{path}, line {line.number}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {line.number}: it is no object")
        yield line.number, value
