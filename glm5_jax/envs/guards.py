"""Guards against what reward models like and readers do not: length, loops, and languages that nobody asked for.

Each is a function of a reply that gives 1 where nothing is wrong, 0 where it is as bad as can be, and falls in between.
General RL (GLM-5 3.4) names the faults; the formulas and their constants are ours.
"""

import collections
import math
import re
import string
from collections.abc import Sequence

from glm5_jax.envs.languages import NAMES, script, scripts, scripts_of, words_of

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
# How "English" begins in scripts other than Latin.
_ENGLISH = "англий англій 英文 英语 英語 영어 إنجليزي انجليزي انگلیسی انگریزی अंग्रे अङ्ग्रे इंग्रजी ইংরেজি אנגלית อังกฤษ ஆங்கில ఆంగ్ల ಇಂಗ್ಲಿಷ್".split()
_EDGES = string.punctuation + "“”‘’„«»…—–·•。，、！？：；（）「」《》।"


def length(text: str, budget: int, slack: float = 0.5) -> float:
    """1 up to `budget` characters, 0 from (1 + slack) budget, between them half a wave without a corner:
    (1 + cos(pi x)) / 2 with x = (len(text) - budget) / (slack budget)."""
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
    """1 - (repeated - free) / (worst - free), within 0 and 1.

    repeated: the share of the text's characters that stand in a run of `size` pieces that comes more than `most`
    times, its first time left out, for one of the `scales` (size, most). A piece is a word of prose, or a character
    of a script without spaces; of code (between fences) and of tables it is a whole line, as theirs rightly
    share most words. Refrains come up to `most` times, the items of a list differ within a few words, and
    what is shorter than a run is never a loop.
    """
    pieces = _pieces(text)
    repeated = [False] * len(pieces)
    for size, most in scales:
        runs = list(zip(*(pieces[i:] for i in range(size))))
        counts, seen = collections.Counter(runs), set()
        for start, run in enumerate(runs):
            if counts[run] > most:
                if run in seen:
                    repeated[start : start + size] = [True] * size
                seen.add(run)
    total = sum(map(len, pieces))
    again = sum(len(piece) for piece, is_again in zip(pieces, repeated) if is_again)
    return _falling(again / total if total else 0.0, free, worst)


def language_mixing(
    text: str,
    prompt: str,
    languages: Sequence[str] = (),
    free: float = 0.01,
    worst: float = 0.2,
    borrowed: float = 0.3,
) -> float:
    """1 - (foreign - free) / (worst - free), within 0 and 1.

    foreign: the share of the reply's letters that are of no script of the prompt's, code, addresses and formulas left
    out. The prompt's are those of a third of its letters or more, and those of the languages that it names in
    English (of English itself, in others too) or that are given by their codes; words that stand in the prompt
    are not foreign either. Latin letters, in which names and terms are written everywhere, are foreign only
    beyond a share of `borrowed`. A prompt without letters allows all.
    """
    found = scripts(prompt)
    own = {name for name, count in found.items() if 3 * count >= found.total()}
    asked = {word.lower() for word in words_of(prompt)}
    named = [code for code, name in NAMES.items() if name.lower() in asked]
    for code in (*named, *languages):
        own |= scripts_of(code)
    if any(stem in prompt.lower() for stem in _ENGLISH):
        own.add("LATIN")
    for code in ("ja", "ko"):  # whose texts mix scripts with Chinese characters
        if own & (scripts_of(code) - {"CJK"}):
            own |= scripts_of(code) | {"CJK"}
    counts = collections.Counter()
    for word in words_of(_prose(text)):
        if word.lower() in asked:
            counts["known"] += len(word)
        elif len(word) > 1 or script(word) != "GREEK":  # a letter of a formula
            counts.update(scripts(word))
    total = counts.total()
    if not own or not total:
        return 1.0
    foreign = sum(n for name, n in counts.items() if name not in own | {"known", "LATIN"})
    if "LATIN" not in own:
        foreign += max(0.0, counts["LATIN"] - borrowed * total)
    return _falling(foreign / total, free, worst)


def _falling(share: float, free: float, worst: float) -> float:
    if not 0 <= free < worst <= 1:
        raise ValueError(f"free is {free} and worst {worst}; use 0 <= free < worst <= 1")
    return 1 - min(1.0, max(0.0, (share - free) / (worst - free)))


def _lines(text: str) -> list[tuple[str, bool]]:
    """The lines of a text, each with whether it stands between fences, the fences themselves left out. A fence that
    is not closed is none, so that nobody hides behind it."""
    lines = text.split("\n")
    fences = [found.group(1) if (found := _FENCE.match(line)) else "" for line in lines]
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
    """Without code, addresses and formulas."""
    prose = "\n".join(line for line, code in _lines(text) if not code)
    return re.sub(r"`[^`\n]*`|https?://\S+|\$\$?[^$\n]*\$\$?", " ", prose)


_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_PIECE = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_LONG, _CUT = 200, 8  # characters of a "word" that is cut, and of its pieces: "hahaha", "!!!!"


def _pieces(text: str) -> list[str]:
    pieces = []
    for line, code in _lines(text):
        whole = code or line.lstrip().startswith("|")
        for piece in [line.strip()] if whole and len(line) <= _LONG else _PIECE.findall(line):
            if len(piece) > _LONG:
                pieces += [piece[i : i + _CUT] for i in range(0, len(piece), _CUT)]
            elif whole:
                pieces += [piece] * any(map(str.isalnum, piece))
            elif said := piece.strip(_EDGES).casefold():
                pieces.append(said)
    return pieces
