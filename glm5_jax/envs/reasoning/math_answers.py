"""Compares formulas in a child process: `python -m glm5_jax.envs.reasoning.math_answers` serves calls of `equal`.

math-verify turns both sides into SymPy expressions, and SymPy can take unlimited time or memory on a
policy's text. The caller enforces the time limit; the memory limit is set here. Nothing here evaluates text
as Python beyond digits and arithmetic signs.
"""

import logging
import re
import resource
import signal

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from glm5_jax.runtime.process import serve

MEMORY_BYTES = 2 * 2**30
_FORMS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_WORD = re.compile(r"(?:\\(?:text|mathrm)\{)?\s*([A-Za-z]{2,}(?:\s+[A-Za-z]+)*)\s*\}?")

_NAMED = re.compile(r"[^=≈,;<>!]*(?:=|≈)")  # left side of an equation
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
# Numbers (#), and the characters that may surround and separate them.
_SIDE_BY_SIDE = re.compile(
    r"(?:#(?!\s*[#(\[{])|[)\]}](?!\s*[#(\[])|[(\[{,;&\s]|\\[{}]|[-+]?\\infty|\\(?:pm|cup)\b"
    r"|\\(?:begin|end)\{[pb]matrix\})+"
)


def equal(answer: str, truth: str, seconds: int) -> bool:
    """Returns whether two formulas, in LaTeX or plain, mean the same.

    Words are compared as words, because SymPy would read a product of letters and accept "sey" for "yes".
    If the truth consists only of numbers, the answer must too: "27 + 58" is no answer to the question what
    27 + 58 is. The process ends if it takes longer than `seconds`.
    """
    # The caller kills the process earlier, unless the caller is stopped.
    signal.alarm(seconds)
    try:
        word, right = (_WORD.fullmatch(text.strip()) for text in (answer, truth))
        if word is not None and right is not None:
            return word[1].lower().split() == right[1].lower().split()
        if word is not None or right is not None:
            return False
        may_divide = re.search(r"[./]|frac", truth) is not None
        if is_computed(truth) and not is_computed(answer, may_divide):
            return False
        return verify(_parsed(truth), _parsed(answer), timeout_seconds=None)
    finally:
        signal.alarm(0)


def is_computed(text: str, fractions: bool = True) -> bool:
    """Returns whether nothing in a text is left to compute.

    It may hold numbers, single, side by side or in brackets, with their units and the left side of an
    equation: of "27 + 58 = 85" only the right side counts.

    Args:
      text: formula, in LaTeX or plain.
      fractions: whether numbers may be fractions; otherwise 36/2 is a division that is left to compute.
    """
    for sign, plain in (("#", "?"), ("\\\\", ";"), ("\\approx", "≈"), ("\\$", " ")):
        text = text.replace(sign, plain)
    text = _NAMED.sub(" ", text)
    text = _SPACES.sub(" ", text)
    text = _WRAPPER.sub("", _UNIT.sub(" ", _JOINT.sub(",", text)))
    if fractions:
        text = _MIXED.sub(_join_mixed, text)

    def number(match):
        return match[0] if match["fraction"] and not fractions else "#"

    return _SIDE_BY_SIDE.fullmatch(_NUMBER.sub(number, text)) is not None


def _join_mixed(match) -> str:
    """Returns a mixed number such as 3 1/2 as one number, and 27 58/1, a sum in disguise, unchanged."""
    over, under = (int(a or b) for a, b in ((match[2], match[4]), (match[3], match[5])))
    return match[1] if over < under else match[0]


def ready() -> bool:
    """Returns after the libraries are loaded and have parsed a formula."""
    return equal(r"\frac{1}{2}", "0.5", 60)


def _parsed(text: str) -> list:
    # math-verify's time limits are off, because they use the alarm and raise where SymPy catches exceptions.
    return parse(
        rf"\boxed{{{text}}}",
        _FORMS,
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]: the library accepts None, but is typed as int
    )


def main() -> None:
    """Serves calls of `equal` and `ready` on standard input, with a memory limit."""
    logging.disable(logging.WARNING)  # math-verify warns that it has no time limits
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # The parent may have ignored or blocked the alarm, and a child inherits that.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    serve(equal, ready)


if __name__ == "__main__":
    main()
