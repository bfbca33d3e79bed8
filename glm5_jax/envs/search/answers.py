"""Compares short answers with known ones by SQuAD's rules (Rajpurkar et al. 2016).

Other than there, signs that make another answer stay: those of numbers, and those after a name, as in "C++".
"""

import collections
import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DECISIVE = r"(?<=\d)\.(?=\d)|(?<![\w)])-(?=\.?\d)|(?<![\w)-])\.(?=\d)|(?<=[a-z])[+#]+"
_SIGNS = re.compile(rf"({_DECISIVE})|[{re.escape(string.punctuation)}]")


# Quotation marks, apostrophes, dashes, minus and full stops of other scripts, as their signs of ASCII.
_ASCII = str.maketrans("‘’“”«»‐‑–—−。，", '\'\'""""-----.,')


def normalize(answer: str) -> str:
    """Returns an answer in lower case, without articles and ASCII punctuation that decides nothing, with single blanks
    between words.
    """
    plain = _SIGNS.sub(lambda match: match[1] or "", answer.lower().translate(_ASCII))
    return " ".join(_ARTICLES.sub(" ", plain).split())


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
