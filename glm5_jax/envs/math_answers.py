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


def equal(answer: str, truth: str, seconds: int) -> bool:
    """Whether two formulas, in LaTeX or plain, mean the same. Words are compared as words, where SymPy would see a
    product of letters and take "sey" for "yes". The process ends if it takes longer than `seconds`."""
    # Whoever waits kills it before; but they may be gone.
    signal.alarm(seconds)
    try:
        word, right = (_WORD.fullmatch(text.strip()) for text in (answer, truth))
        if word or right:
            return bool(word and right) and word[1].lower().split() == right[1].lower().split()
        return verify(_parsed(truth), _parsed(answer), timeout_seconds=None)
    finally:
        signal.alarm(0)


def ready() -> bool:
    """Answers once the libraries are loaded and have parsed something."""
    return equal(r"\frac{1}{2}", "0.5", 60)


def _parsed(text: str) -> list:
    # Of its own limits there are none: they use the alarm, and raise where SymPy catches.
    return parse(rf"\boxed{{{text}}}", _FORMS, extraction_mode="first_match", parsing_timeout=None)


def main() -> None:
    logging.disable(logging.WARNING)  # that there are no limits
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    serve(equal, ready)


if __name__ == "__main__":
    main()
