"""Ranks texts of a collection for a query by Okapi BM25."""

import collections
import dataclasses
import math
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

_WORD = re.compile(r"\w+")


@dataclasses.dataclass(kw_only=True, frozen=True)
class Bm25Config:
    """Parameters of BM25. Raises ValueError for values out of range. GLM-5 does not name its ranking.

    Attributes:
      k1: weight of repeated words; 0 ignores repetition.
      b: strength of the length normalisation, from 0 to 1.
    """

    k1: float = 1.2  # Robertson and Zaragoza 2009, 3.5: 1.2 to 2; Lucene's
    b: float = 0.75  # the same: 0.5 to 0.8; Lucene's

    def __post_init__(self):
        if not (0 <= self.k1 < math.inf and 0 <= self.b <= 1):
            raise ValueError(f"k1 is {self.k1} and b {self.b}; use at least 0, and from 0 to 1")


def words(text: str) -> list[str]:
    """Returns the runs of letters, digits and underscores of a text, without case and accents."""
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in parts if not unicodedata.combining(c))
    return _WORD.findall(text.casefold())


class Bm25:
    """Index of texts. The score of a text is the sum over the query's words, repeated ones included, of

      ln(1 + (N - n + 0.5) / (n + 0.5)) * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean))

    f: number of occurrences of the word in the text; n: number of the N texts that have it; lengths in
    words.
    """

    def __init__(self, texts: Sequence[str], config: Bm25Config = Bm25Config()):
        words_by_text = [words(text) for text in texts]
        lengths = np.array([len(text_words) for text_words in words_by_text], np.float64)
        mean = lengths.mean() if lengths.any() else 1.0
        self._config = config
        self._discount = config.k1 * (1 - config.b + config.b * lengths / mean)
        self._postings: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        for i, text_words in enumerate(words_by_text):
            for word, count in collections.Counter(text_words).items():
                self._postings[word].append((i, count))

    def scores(self, query: str) -> np.ndarray:
        """Returns the score of each text (float64)."""
        num, k1 = len(self._discount), self._config.k1
        total = np.zeros(num)
        for word in words(query):
            if word in self._postings:
                at, count = np.array(self._postings[word]).T
                weight = math.log1p((num - len(at) + 0.5) / (len(at) + 0.5))
                total[at] += weight * count * (k1 + 1) / (count + self._discount[at])
        return total

    def search(self, query: str, limit: int) -> list[int]:
        """Returns the numbers of the best `limit` texts that have a word of the query, best first, ties by number."""
        scores = self.scores(query)
        best = np.argsort(-scores, kind="stable")[:limit]
        return [int(i) for i in best if scores[i] > 0]
