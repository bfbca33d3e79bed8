"""The child process that compares formulas: `python -m glm5_jax.envs.math_answers` answers calls of `equal`.

math-verify turns both sides into SymPy expressions, and SymPy can take for ever, or all memory, on what a
policy writes: whoever calls keeps the time, and the memory has a limit here. Nothing here evaluates text as
Python beyond digits and arithmetic signs.
"""

import logging
import re
import resource
import signal

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from glm5_jax.core.process import serve

MEMORY = 2 * 2**30  # bytes
_FORMS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_WORD = re.compile(r"(?:\\(?:text|mathrm)\{)?\s*([A-Za-z]{2,}(?:\s+[A-Za-z]+)*)\s*\}?")

_NAMED = re.compile(r"[^=≈,;<>!]*(?:=|≈)")  # what a number is said to be
_SPACES = re.compile(r"\\(?:left|right|displaystyle|q?quad|[,;:! ])|[~$\s]")
_JOINT = re.compile(r"\\text\s*\{\s*(?:and|or)\s*\}")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}\d^]*\}(?:\^\{?-?\d\}?)?|\^\{?\\circ\}?|°|\\?%")
_WRAPPER = re.compile(r"\\(?:text|math)[a-z]*\b")
_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_FRACTION = rf"(?:\\[dt]?frac\s*(?:\d\s*\d|\{{[-+]?{_PLAIN}\}}\s*\{{{_PLAIN}\}})|{_PLAIN}/{_PLAIN})"
_POWER = r"10\^(?:\d|\{[-+]?\d{1,3}\})"
_NUMBER = re.compile(
    rf"(?:[-+−]\s*)?(?:(?P<fraction>{_FRACTION})|{_POWER}|{_PLAIN}(?:\s*(?:\\times|\\cdot)\s*{_POWER})?)"
)
_MIXED = re.compile(r"(\d+)\s*\\[dt]?frac\s*(?:(\d)\s*(\d)|\{(\d+)\}\s*\{(\d+)\})")
# Numbers (#), and what may stand around and between them.
_SIDE_BY_SIDE = re.compile(
    r"(?:#(?!\s*[#(\[{])|[)\]}](?!\s*[#(\[])|[(\[{,;&\s]|\\[{}]|[-+]?\\infty|\\(?:pm|cup)\b"
    r"|\\(?:begin|end)\{[pb]matrix\})+"
)


def equal(answer: str, truth: str, seconds: int) -> bool:
    """Whether two formulas, in LaTeX or plain, mean the same. Words are compared as words, where SymPy would see a
    product of letters and take "sey" for "yes". Where the truth is made of numbers alone the answer must be, too: it
    is no answer to 27 + 58 that the sum is 27 + 58. The process ends if it takes longer than `seconds`."""
    # Whoever waits kills it before; but they may be stopped.
    signal.alarm(seconds)
    try:
        word, right = (_WORD.fullmatch(text.strip()) for text in (answer, truth))
        if word or right:
            return bool(word and right) and word[1].lower().split() == right[1].lower().split()
        may_divide = re.search(r"[./]|frac", truth) is not None
        if is_computed(truth) and not is_computed(answer, may_divide):
            return False
        return verify(_parsed(truth), _parsed(answer), timeout_seconds=None)
    finally:
        signal.alarm(0)


def is_computed(text: str, fractions: bool = True) -> bool:
    """Whether nothing in a text is left to compute: numbers, alone, side by side or in brackets, with their units and
    what they are said to be, as of "27 + 58 = 85" the right side counts. fractions: whether they may be some; else 36/2
    is a division."""
    for sign, plain in (("#", "?"), ("\\\\", ";"), ("\\approx", "≈"), ("\\$", " ")):
        text = text.replace(sign, plain)
    text = _NAMED.sub(" ", text)
    text = _SPACES.sub(" ", text)
    text = _WRAPPER.sub("", _UNIT.sub(" ", _JOINT.sub(",", text)))
    if fractions:
        text = _MIXED.sub(_whole, text)

    def number(found):
        return found[0] if found["fraction"] and not fractions else "#"

    return _SIDE_BY_SIDE.fullmatch(_NUMBER.sub(number, text)) is not None


def _whole(found) -> str:
    """3 1/2 as one number; of a sum in disguise, 27 58/1, nothing."""
    over, under = (int(a or b) for a, b in ((found[2], found[4]), (found[3], found[5])))
    return found[1] if over < under else found[0]


def ready() -> bool:
    """Answers once the libraries are loaded and have parsed something."""
    return equal(r"\frac{1}{2}", "0.5", 60)


def _parsed(text: str) -> list:
    # Of its own limits there are none: they use the alarm, and raise where SymPy catches.
    return parse(rf"\boxed{{{text}}}", _FORMS, extraction_mode="first_match", parsing_timeout=None)


def main() -> None:
    logging.disable(logging.WARNING)  # that there are no limits
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Whoever started this may have let the alarm pass unheard.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    serve(equal, ready)


if __name__ == "__main__":
    main()
