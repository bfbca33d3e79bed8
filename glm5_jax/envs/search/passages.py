"""Passages that are searched, and whether they say something."""

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from glm5_jax.data.conversation import read_json
from glm5_jax.envs.search.bm25 import Bm25, Bm25Config, words


class Passage(NamedTuple):
    """What a search finds. Its number in its corpus is its id."""

    title: str
    text: str


class Corpus:
    """Passages under an index of their titles and texts."""

    def __init__(self, passages: Sequence[Passage], config: Bm25Config = Bm25Config()):
        self.passages, self._config = tuple(passages), config

    @classmethod
    def read(cls, path: str | os.PathLike, config: Bm25Config = Bm25Config()) -> "Corpus":
        """From lines of JSON with title and text; ValueError names one that is none."""
        found = []
        for number, line in lines(path):
            if not all(isinstance(line.get(name), str) for name in ("title", "text")):
                raise ValueError(f"{path}, line {number}: give a title and a text")
            found.append(Passage(line["title"], line["text"]))
        return cls(found, config)

    @functools.cached_property
    def index(self) -> Bm25:
        """Of titles and texts."""
        return Bm25([f"{p.title}\n{p.text}" for p in self.passages], self._config)

    @functools.cached_property
    def said(self) -> tuple[str, ...]:
        """What each passage says, as `plain` words."""
        return tuple(plain(f"{p.title}\n{p.text}") for p in self.passages)


def plain(text: str) -> str:
    """The words of a text between blanks, as `says` looks for them."""
    return f" {' '.join(words(text))} "


def says(text: str, phrase: str) -> bool:
    """Whether the words of a phrase, which has some, stand in a row in `plain` text."""
    looked_for = plain(phrase)
    return bool(looked_for.strip()) and looked_for in text


def lines(path: str | os.PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, with their numbers from 1; ValueError for what is none."""
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            value = read_json(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: it is no object")
        yield number, value
