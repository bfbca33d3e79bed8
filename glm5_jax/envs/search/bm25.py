"""Okapi BM25: how well each text of a collection answers a query, by the words that both have."""

import collections
import dataclasses
import math
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

_WORD = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True)
class Bm25Config:
    """k1: how much a word's repetition counts, 0: nothing. b: how much a long text is held against it, from 0 to 1.
    Construction refuses values out of range (ValueError). GLM-5 does not say by what it searches."""

    k1: float = 1.2  # Robertson and Zaragoza 2009, 3.5: 1.2 to 2; Lucene's
    b: float = 0.75  # the same: 0.5 to 0.8; Lucene's

    def __post_init__(self):
        if not (0 <= self.k1 < math.inf and 0 <= self.b <= 1):
            raise ValueError(f"k1 is {self.k1} and b {self.b}; use at least 0, and from 0 to 1")


def words(text: str) -> list[str]:
    """Letters, digits and underscores in a row, without case and accents."""
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in parts if not unicodedata.combining(c))
    return _WORD.findall(text.casefold())


class Bm25:
    """An index of texts. The score of a text is the sum over the query's words, those that come again too, of

        ln(1 + (N - n + 0.5) / (n + 0.5)) * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean))

    f: how often the text has the word; n: how many of the N texts do; lengths in words.
    """

    def __init__(self, texts: Sequence[str], config: Bm25Config = Bm25Config()):
        found = [words(text) for text in texts]
        lengths = np.array([len(own) for own in found], np.float64)
        mean = lengths.mean() if lengths.any() else 1.0
        self._config = config
        self._discount = config.k1 * (1 - config.b + config.b * lengths / mean)
        self._places: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        for i, own in enumerate(found):
            for word, count in collections.Counter(own).items():
                self._places[word].append((i, count))

    def scores(self, query: str) -> np.ndarray:
        """Of each text (float64)."""
        num, k1 = len(self._discount), self._config.k1
        total = np.zeros(num)
        for word in words(query):
            if word in self._places:
                at, count = np.array(self._places[word]).T
                weight = math.log1p((num - len(at) + 0.5) / (len(at) + 0.5))
                total[at] += weight * count * (k1 + 1) / (count + self._discount[at])
        return total

    def search(self, query: str, most: int) -> list[int]:
        """The numbers of the best texts that have any word of the query, the best first, ties by number."""
        scores = self.scores(query)
        best = np.argsort(-scores, kind="stable")[:most]
        return [int(i) for i in best if scores[i] > 0]
