"""Rewrites formulas so that one value has one form: without fonts and colours, and intervals in brackets.

math-verify reads most forms of LaTeX. This handles those that it does not read, or that would look like a computation.
Nothing is computed here except the value of a repeating decimal.
"""

import re

_REPLACED = (
    (r"\\(?:bf|it|bm|boldmath|tiny|small|normalsize|large|Large|LARGE|huge|Huge)\b", " "),
    (r"\\(?:displaystyle|textstyle|scriptstyle)\b", " "),
    (r"\\(?:color|textcolor)\s*\{[^{}]*\}", ""),
    (r"\\underline\s*(?=\{)", ""),
    (r"\\(?:textbf|textit|textrm|textsf|texttt|emph)\s*(?=\{)", r"\\text"),
    (r"\\mathrm\s*\{\s*([ie])\s*\}", r"\1"),
    (r"\\varnothing\b", r"\\emptyset"),
    (r"\\(?:nicefrac|sfrac|cfrac)\b", r"\\frac"),
    (r"\{\s*([^{}\\]+?)\s*\\over\s*([^{}\\]+?)\s*\}", r"\\frac{\1}{\2}"),
    (r"(?<=\d)\s*/\s*(?=\d)", "/"),
    (r"^\\frac\s*\{(\d+)\}\s*\{-(\d+)\}$", r"-\\frac{\1}{\2}"),
)
_ENDS = re.compile(r"^(?:\\[ ,;:!]|~|\s)+|(?:\\[ ,;:!]|~|\s)+$|(?<!\\)\\$")
_APPROXIMATELY = re.compile(r"^(?:\\approx\b|≈)\s*")
_ELEMENT = re.compile(r"^[A-Za-z]\s*\\in\s*(?=[\[(]|\\left|\\\{)")
_NAME = r"[A-Za-z](?:_(?:\w|\{\w+\}))?"
_NAMED_TUPLE = re.compile(rf"^\(\s*({_NAME}(?:\s*,\s*{_NAME})+)\s*\)\s*=\s*(?=\(|\\left)")
_GROUPS = re.compile(r"[-+−]?\d{1,3}(?:(?:\\[ ,]|~| )+\d{3})+")
_LENGTH = r"(?:mm|cm|dm|km|m|in|ft|yd|mi|miles?|feet|inches)"
_OVER = rf"(?:{_LENGTH}|k?g|lbs?|k?J|k?W|N|mL|L|gal|mol|rad|rev|degrees)"
_RATE = rf"{_OVER}/(?:s|sec|min|h|hr|hour|day|year|{_LENGTH}|L|gal|kg|mol)"
_POWER = r"(?:\^(?:[23]|\{-?[23]\}))"
_WITH_UNIT = re.compile(rf"([-+−]?[\d.,]+)\s+(?:({_RATE})({_POWER}?)|(?!m\^)({_LENGTH})({_POWER}))")
_UNIT = re.compile(rf"\\(?:text|mathrm)\s*\{{\s*({_RATE}|{_LENGTH})\s*\}}({_POWER}?)$")
_REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_MAX_DIGITS = 50  # of a repeating decimal
_OR = re.compile(r"\s*\\(?:text|mathrm)\s*\{\s*or\s*\}\s*|\s*\\(?:lor|vee)\b\s*")
_RELATION = re.compile(r"\s*(\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt)(?![a-z])|[<>≤≥])\s*")
_BOUND = re.compile(r"[-+−]?\s*(?:\\(?:frac|sqrt|pi|infty)(?![a-z])|[\d.{}\s/])+")


def rewrite(formula: str) -> str:
    """Returns a formula in a plainer form of the same meaning."""
    for pattern, plain in _REPLACED:
        formula = re.sub(pattern, plain, formula)
    formula = _ENDS.sub("", formula)
    formula = _APPROXIMATELY.sub("", formula)
    formula = _ELEMENT.sub("", formula)
    named = _NAMED_TUPLE.match(formula)
    if named and _is_sorted(re.findall(_NAME, named[1])):
        formula = formula[named.end() :]
    if _GROUPS.fullmatch(formula):
        formula = re.sub(r"[\\ ,~]", "", formula)
    if number := _WITH_UNIT.fullmatch(formula):
        value, *unit = filter(None, number.groups())
        formula = rf"{value}\text{{ {unit[0]}}}{''.join(unit[1:])}"
    return _REPEATING.sub(_as_fraction, formula)


def have_other_units(one: str, other: str) -> bool:
    """Returns whether two formulas that are rewritten end with different units. Only rates and lengths are known."""
    units = [_UNIT.search(formula) for formula in (one, other)]
    texts = {unit[1] + re.sub(r"[{}]", "", unit[2]) for unit in units if unit}
    return all(units) and len(texts) > 1


def as_interval(formula: str) -> str:
    """Returns the intervals of inequalities such as 1 < x or 1 < x < 2, also of several with "or"; another formula as it is."""
    parts = [_interval(part) for part in _OR.split(formula)]
    if all(parts):
        return r"\cup".join(filter(None, parts))
    return formula


def _is_sorted(names: list[str]) -> bool:
    """Returns whether names are in the order in which a tuple without names has their values."""
    return names == sorted(names)


def _as_fraction(match: re.Match) -> str:
    integer, fixed, repeated = match.groups()
    if len(match[0]) > _MAX_DIGITS:
        return match[0]
    over = int(integer + fixed + repeated) - int(integer + fixed or "0")
    return rf"\frac{{{over}}}{{{(10 ** len(repeated) - 1) * 10 ** len(fixed)}}}"


def _interval(inequality: str) -> str | None:
    """Returns the interval of an inequality with one variable; None if the text is none."""
    first, *rest = _RELATION.split(inequality.strip())
    relations, sides = rest[::2], [first, *rest[1::2]]
    if len(relations) not in (1, 2):
        return None
    is_upward = [relation[:2] in ("<", "≤", "\\l") for relation in relations]
    if len(set(is_upward)) > 1:
        return None
    if not is_upward[0]:
        sides, relations = sides[::-1], relations[::-1]
    is_closed = ["e" in relation or relation in "≤≥" for relation in relations]
    if len(sides) == 2:
        if _is_variable(sides[0]):
            sides, is_closed = ["-\\infty", *sides], [False, *is_closed]
        else:
            sides, is_closed = [*sides, "\\infty"], [*is_closed, False]
    low, variable, high = sides
    if not _is_variable(variable) or not (_BOUND.fullmatch(low) and _BOUND.fullmatch(high)):
        return None
    return f"{'[' if is_closed[0] else '('}{low},{high}{']' if is_closed[1] else ')'}"


def _is_variable(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z]", text) is not None
