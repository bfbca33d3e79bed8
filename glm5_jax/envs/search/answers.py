"""Short answers against known ones, as SQuAD compares them (Rajpurkar et al. 2016)."""

import collections
import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> str:
    """Without case, ASCII's punctuation, articles and blanks but one between words."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact(answer: str, known: Sequence[str]) -> bool:
    """Whether an answer is one of the known ones."""
    return normalized(answer) in {normalized(one) for one in known}


def f1(answer: str, known: Sequence[str]) -> float:
    """The best harmonic mean, over the known answers, of the shares of words that both have; each word counts as often
    as it comes."""
    return max(_f1(normalized(answer).split(), normalized(one).split()) for one in known)


def _f1(own: list[str], other: list[str]) -> float:
    common = sum((collections.Counter(own) & collections.Counter(other)).values())
    return 2 * common / (len(own) + len(other)) if common else 0.0
