"""Compares formulas in a child process: `python -m glm5_jax.envs.reasoning.math_answers` serves calls of `equal`.

math-verify turns both sides into SymPy expressions, and SymPy can take unlimited time or memory on a
policy's text. The caller enforces the time limit; the memory limit is set here. Nothing here evaluates text
as Python beyond digits and arithmetic signs.
"""

import fractions
import itertools
import logging
import re
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from glm5_jax.envs.reasoning.typesetting import as_interval, have_other_units, rewrite
from glm5_jax.runtime.process import serve

MEMORY_BYTES = 2 * 2**30
_FORMS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_WORD = re.compile(r"(?:\\(?:text|mathrm)\{)?\s*([A-Za-z]{2,}(?:\s+[A-Za-z]+)*)\s*\}?")
# Dates, and codes such as H2O, which SymPy would read as differences and products.
_DATE = r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d{1,2}\.\d{1,2}\.\d{4}"
_TIME = r"\d{1,2}:\d{2}\s*[AaPp]\.?[Mm]\.?"
_LITERAL = re.compile(rf"{_DATE}|{_TIME}|[A-Za-z]+\d+(?:[A-Za-z]\w*)?")
_INTERVAL = re.compile(r"\s*(?:\\left\s*)?[\[(].*,.*[\])]\s*", re.DOTALL)
_TYPESETTING = re.compile(r"\\[a-z]+\b|[{}_$\s\\]|(?<!\w)0+(?=\d)")
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
# Names of SymPy's classes: integrals, sums, products, limits and derivatives; and functions that have no other form.
_OPERATORS = {"ExprWithLimits", "Limit", "Derivative"}
_KEPT_FUNCTIONS = {"exp", "Abs"}
# Numbers (#), and the characters that may surround and separate them.
_SIDE_BY_SIDE = re.compile(
    r"(?:#(?!\s*[#(\[{])|[)\]}](?!\s*[#(\[])|[(\[{,;&\s]|\\[{}]|[-+]?\\infty|\\(?:pm|cup)\b"
    r"|\\(?:begin|end)\{[pb]matrix\})+"
)


def equal(answer: str, truth: str, seconds: int) -> bool:
    """Returns whether two formulas, in LaTeX or plain, mean the same.

    Words, dates and codes are compared as texts, because SymPy would read a product of letters and accept "sey" for
    "yes". If the truth consists only of numbers, the answer must too: "27 + 58" is no answer to the question what
    27 + 58 is. It must also have all numbers that the parser reads in it, because the parser takes texts such as
    "27\\{58\\}" for sums.
    If the truth is a formula without integrals, sums, products, limits and derivatives, the answer must be one too. If
    it is a constant without functions, such as \\pi/4, the answer has no functions of numbers. Of an equation the last
    side counts.
    The process ends if it takes longer than `seconds`.
    """
    # The caller kills the process earlier, unless the caller is stopped.
    signal.alarm(seconds)
    try:
        answer, truth = rewrite(answer), rewrite(truth)
        if _INTERVAL.fullmatch(truth):
            answer = as_interval(answer)
        if have_other_units(answer, truth):
            return False
        word, right = (_WORD.fullmatch(text.strip()) for text in (answer, truth))
        if word is not None and right is not None:
            return word[1].lower().split() == right[1].lower().split()
        if word is not None or right is not None:
            return False
        if _LITERAL.fullmatch(truth.strip()):
            return _without_typesetting(answer) == _without_typesetting(truth)
        may_divide = re.search(r"[./]|frac", truth) is not None
        has_only_numbers = is_computed(truth)
        if has_only_numbers and not is_computed(answer, may_divide):
            return False
        parsed = _parsed(answer)
        if has_only_numbers and not all(_is_written(value, answer) for value in parsed):
            return False
        parsed_truth = _parsed(truth)
        if _is_left_to_compute(_parsed(_last_side(answer)) or parsed, parsed_truth):
            return False
        return verify(parsed_truth, parsed, timeout_seconds=None)
    finally:
        signal.alarm(0)


def is_computed(text: str, may_divide: bool = True) -> bool:
    """Returns whether nothing in a text is left to compute.

    It may hold numbers, single, side by side or in brackets, with their units and the left side of an
    equation: of "27 + 58 = 85" only the right side counts.

    Args:
      text: formula, in LaTeX or plain.
      may_divide: whether numbers may be fractions; otherwise 36/2 is a division that is left to compute.
    """
    text = _with_plain_signs(_NAMED.sub(" ", _with_plain_relations(text)))
    if may_divide:
        text = _MIXED.sub(_join_mixed, text)

    def number(match):
        return match[0] if match["fraction"] and not may_divide else "#"

    return _SIDE_BY_SIDE.fullmatch(_NUMBER.sub(number, text)) is not None


def _without_typesetting(text: str) -> str:
    plain = _TYPESETTING.sub("", text).lower()
    return re.sub(r"(?<=\d[ap])\.?m\.?$", "m", plain)


def _with_plain_relations(text: str) -> str:
    """Returns a text with one sign for "approximately", and without a sign that is used for numbers here."""
    for sign, plain in (("#", "?"), ("\\\\", ";"), ("\\approx", "≈"), ("\\$", " ")):
        text = text.replace(sign, plain)
    return text


def _with_plain_signs(text: str) -> str:
    """Returns a text without spaces, units and fonts of LaTeX."""
    return _WRAPPER.sub("", _UNIT.sub(" ", _JOINT.sub(",", _SPACES.sub(" ", text))))


def _last_side(formula: str) -> str:
    """Returns what follows the last "=" of a formula that is not in brackets; without one, the formula."""
    depth, start = 0, 0
    for i, letter in enumerate(formula):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth = max(0, depth - 1)
        elif letter == "=" and not depth:
            start = i + 1
    return formula[start:]


def _is_left_to_compute(answer: list, truth: list) -> bool:
    """Returns whether an answer has parts that SymPy would compute, and the truth has none of their kind."""
    if _has_part(answer, _is_operator) and not _has_part(truth, _is_operator):
        return True
    if any(getattr(value, "free_symbols", None) for value in truth):
        return False  # e^{x \\ln 2} is 2^x
    return _has_part(answer, _is_function) and not _has_part(truth, _is_function)


def _has_part(parsed: Any, is_part: Callable[[Any], bool]) -> bool:
    """Returns whether a formula, a part of one, or one of a list has such a part."""
    if isinstance(parsed, str):
        return False
    if is_part(parsed):
        return True
    is_list = isinstance(parsed, list) or getattr(parsed, "is_Matrix", False)
    parts = parsed if is_list else getattr(parsed, "args", ())
    return any(_has_part(part, is_part) for part in parts)


def _class_names(part: Any) -> set[str]:
    return {kind.__name__ for kind in type(part).__mro__}


def _is_operator(part: Any) -> bool:
    return not _OPERATORS.isdisjoint(_class_names(part))


def _is_function(part: Any) -> bool:
    """Returns whether a part is a function of a number."""
    names = _class_names(part)
    return "Function" in names and _KEPT_FUNCTIONS.isdisjoint(names) and bool(part.is_number)


def _is_written(parsed: Any, text: str) -> bool:
    """Returns whether a text has all numbers that the parser read in it, except for their signs."""
    written = _written_numbers(_with_plain_signs(_with_plain_relations(text)))
    for number in _numbers_inside(parsed):
        value = abs(number.doit())
        if not value.is_finite:
            # The comparison takes "27\\infty 58" for a product.
            if any(abs(part) != 1 for part in number.atoms() if part.is_finite):
                return False
            continue
        value = fractions.Fraction(str(value if value.is_Rational else value.n(30)))
        if value not in written and not any(abs(value - one) * 10**9 <= one for one in written):
            return False
    return True


def _numbers_inside(parsed: Any) -> Iterator[Any]:
    """Yields the numbers of SymPy in what the parser read: in sets, tuples, intervals, matrices and equations."""
    if getattr(parsed, "is_number", False):
        yield parsed
    elif not isinstance(parsed, str):
        for part in parsed if getattr(parsed, "is_Matrix", False) else parsed.args:
            yield from _numbers_inside(part)


def _written_numbers(text: str) -> set[fractions.Fraction]:
    """Returns the absolute values of the numbers of a text, also as percentages, and a + b and a - b of a \\pm b."""
    parts = [_values(part) for part in text.split("\\pm")]
    values = {value for part in parts for value in part}
    for before, after in itertools.pairwise(parts):
        values |= {a + sign * b for a in before for b in after for sign in (1, -1)}
    return {abs(value) for value in values}


def _values(text: str) -> set[fractions.Fraction]:
    """Returns the numbers of a text in all ways to read them: "1,234" is 1234, or 1 and 234."""
    values = [_value(match[0]) for match in _NUMBER.finditer(text)]
    values += map(_value, re.findall(r"\d+(?:\.\d+)?", text))
    for integer, *parts in _MIXED.findall(text):
        over, under = (part for part in parts if part)
        values.append(_value(integer) + _value(f"{over}/{under}"))
    return {*values, *(value / 100 for value in values)}


def _value(number: str) -> fractions.Fraction:
    """Returns the value of a text that `_NUMBER` matches; 0 of a fraction with the denominator 0."""
    if power := re.search(r"10\^\{?([-+]?\d+)\}?$", number):
        rest = number[: power.start()]
        return fractions.Fraction(10) ** int(power[1]) * (_value(rest) if rest.strip("+-− ") else 1)
    is_compact = "frac" in number and "{" not in number  # \frac12
    parts = re.findall(r"\d" if is_compact else _PLAIN, number)
    over, under = (fractions.Fraction(part.replace(",", "")) for part in (*parts, "1")[:2])
    return over / under if under else under


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
