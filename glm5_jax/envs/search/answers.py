"""Compares short answers with known ones by SQuAD's rules (Rajpurkar et al. 2016)."""

import collections
import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(answer: str) -> str:
    """Returns an answer in lower case, without ASCII punctuation and articles, with single blanks between words."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact(answer: str, known: Sequence[str]) -> bool:
    """Returns whether an answer is one of the known ones.

    An answer of only articles and signs must match literally.
    """
    if not normalize(answer):
        return answer.strip() != "" and answer.strip().lower() in {
            one.strip().lower() for one in known
        }
    return normalize(answer) in {normalize(one) for one in known}


def f1(answer: str, known: Sequence[str]) -> float:
    """Returns the best F1 of an answer's words over the known answers; each word counts as often as it occurs."""
    if exact(answer, known):
        return 1.0
    return max(_f1(normalize(answer).split(), normalize(one).split()) for one in known)


def _f1(words: list[str], known_words: list[str]) -> float:
    common = sum((collections.Counter(words) & collections.Counter(known_words)).values())
    return 2 * common / (len(words) + len(known_words)) if common else 0.0
