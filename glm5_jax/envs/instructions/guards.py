"""Penalises faults of replies that reward models overlook: length, loops, and languages that the prompt did
not ask for.

Each guard is a function of a reply. It returns 1 without the fault and 0 at its worst, and falls in
between. General RL (GLM-5 3.4) names the faults; the formulas and their constants are not from the paper.
"""

import collections
import math
import re
import string
from collections.abc import Sequence

from glm5_jax.envs.instructions.languages import (
    NAMES,
    count_scripts,
    script,
    scripts_of_language,
    words_of,
)

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
# The beginning of the word for "English" in scripts other than Latin.
_ENGLISH = "англий англій 英文 英语 英語 영어 إنجليزي انجليزي انگلیسی انگریزی अंग्रे अङ्ग्रे इंग्रजी ইংরেজি אנגלית อังกฤษ ஆங்கில ఆంగ్ల ಇಂಗ್ಲಿಷ್".split()
_EDGES = string.punctuation + "“”‘’„«»…—–·•。，、！？：；（）「」《》।"


def length(text: str, budget: int, slack: float = 0.5) -> float:
    """Returns 1 up to `budget` characters, 0 from (1 + slack) budget, and half a cosine wave in between.

    The value in between is (1 + cos(pi x)) / 2 with x = (len(text) - budget) / (slack budget), which has no
    corner. Raises ValueError unless both are positive.
    """
    if budget < 1 or not slack > 0:
        raise ValueError(f"budget is {budget} and slack {slack}; make both positive")
    over = (len(text) - budget) / (slack * budget)
    return (1 + math.cos(math.pi * min(1.0, max(0.0, over)))) / 2


def repetition(
    text: str,
    scales: Sequence[tuple[int, int]] = ((12, 4), (80, 2)),
    free: float = 0.1,
    worst: float = 0.5,
) -> float:
    """Returns 1 - (repeated - free) / (worst - free), clipped to 0..1, for the share of repeated characters.

    For one of the `scales` (size, limit), a run of `size` pieces repeats if it occurs more than `limit`
    times. `repeated` is the share of the text's characters inside such runs, their first occurrence
    excluded. A piece is a word of prose, or a character of a script without spaces. In code (between
    fences) and in tables a piece is a full line, because their lines rightly share most words. Refrains
    occur up to `limit` times, the items of a list differ within a few words, and text shorter than a run is
    never a loop.
    """
    pieces = _pieces(text)
    repeated = [False] * len(pieces)
    for size, limit in scales:
        runs = list(zip(*(pieces[i:] for i in range(size))))
        counts, seen = collections.Counter(runs), set()
        for start, run in enumerate(runs):
            if counts[run] > limit:
                if run in seen:
                    repeated[start : start + size] = [True] * size
                seen.add(run)
    total = sum(map(len, pieces))
    num_repeated = sum(len(piece) for piece, is_again in zip(pieces, repeated) if is_again)
    return _falling(num_repeated / total if total else 0.0, free, worst)


def language_mixing(
    text: str,
    prompt: str,
    languages: Sequence[str] = (),
    free: float = 0.01,
    worst: float = 0.2,
    borrowed: float = 0.3,
) -> float:
    """Returns 1 - (foreign - free) / (worst - free), clipped to 0..1, for the share of foreign letters.

    `foreign` is the share of the reply's letters in scripts that the prompt does not allow, without code,
    addresses and formulas. Allowed are

    - scripts of a third or more of the prompt's letters;
    - scripts of languages that the prompt names in English (English itself also in other languages);
    - scripts of `languages`, by code;
    - words that occur in the prompt.

    Latin letters, which write names and terms everywhere, are foreign only beyond a share of `borrowed`. A
    prompt without letters allows all scripts.
    """
    counts_of_prompt = count_scripts(prompt)
    allowed = {
        name for name, count in counts_of_prompt.items() if 3 * count >= counts_of_prompt.total()
    }
    prompt_words = {word.lower() for word in words_of(prompt)}
    named = [code for code, name in NAMES.items() if name.lower() in prompt_words]
    for code in (*named, *languages):
        allowed |= scripts_of_language(code)
    if any(stem in prompt.lower() for stem in _ENGLISH):
        allowed.add("LATIN")
    for code in ("ja", "ko"):  # their texts mix scripts with Chinese characters
        if allowed & (scripts_of_language(code) - {"CJK"}):
            allowed |= scripts_of_language(code) | {"CJK"}
    counts = collections.Counter()
    for word in words_of(_prose(text)):
        if word.lower() in prompt_words:
            counts["known"] += len(word)
        elif len(word) > 1 or script(word) != "GREEK":  # a letter of a formula
            counts.update(count_scripts(word))
    total = counts.total()
    if not allowed or not total:
        return 1.0
    foreign = sum(n for name, n in counts.items() if name not in allowed | {"known", "LATIN"})
    if "LATIN" not in allowed:
        foreign += max(0.0, counts["LATIN"] - borrowed * total)
    return _falling(foreign / total, free, worst)


def _falling(share: float, free: float, worst: float) -> float:
    if not 0 <= free < worst <= 1:
        raise ValueError(f"free is {free} and worst {worst}; use 0 <= free < worst <= 1")
    return 1 - min(1.0, max(0.0, (share - free) / (worst - free)))


def _lines(text: str) -> list[tuple[str, bool]]:
    """Returns the lines of a text without fences, each with whether it is code between fences.

    A fence that is not closed does not count as one, because otherwise it could hide the rest of the reply.
    """
    lines = text.split("\n")
    fences = [match.group(1) if (match := _FENCE.match(line)) else "" for line in lines]
    opened, inside = None, [False] * len(lines)
    for number, fence in enumerate(fences):
        if opened is None and fence:
            opened = number
        elif opened is not None and fence.startswith(fences[opened]):
            inside[opened : number + 1] = [True] * (number + 1 - opened)
            opened = None
    return [
        (line, code) for line, fence, code in zip(lines, fences, inside) if not (code and fence)
    ]


def _prose(text: str) -> str:
    """Returns a text without code, addresses and formulas."""
    prose = "\n".join(line for line, code in _lines(text) if not code)
    return re.sub(r"`[^`\n]*`|https?://\S+|\$\$?[^$\n]*\$\$?", " ", prose)


_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_PIECE = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_LONG, _CUT = (
    200,
    8,
)  # longest piece, and length of the pieces that a longer one is cut into: "hahaha", "!!!!"


def _pieces(text: str) -> list[str]:
    pieces = []
    for line, code in _lines(text):
        is_line = code or line.lstrip().startswith("|")
        for piece in [line.strip()] if is_line and len(line) <= _LONG else _PIECE.findall(line):
            if len(piece) > _LONG:
                pieces += [piece[i : i + _CUT] for i in range(0, len(piece), _CUT)]
            elif is_line:
                pieces += [piece] * any(map(str.isalnum, piece))
            elif word := piece.strip(_EDGES).casefold():
                pieces.append(word)
    return pieces
