"""What a reply claims: the final answer to a problem, a few words, the letter of a choice, the program it wrote.

A reply may work things out before it claims. What counts is, in this order,

  1. \\boxed{...}: for a final answer the last one;
  2. the last line "answer: ..." or "the answer is ...", or GSM8K's "#### ...", up to the end of the line;
  3. the reply itself if it is one word or formula, else the last formula between dollars (or \\( and \\[)
     or the last number, whichever ends last.

Of a choice, all that is claimed in the first of these forms that the reply has must be the same one letter.
"""

import re

LETTERS = "ABCDEFGHIJ"
MOST_CHARACTERS = 2000  # of a final answer
# What a policy writes may be long and odd: every pattern here takes time that grows with the length alone.
_BRACES = re.compile(r"\\(?:boxed|fbox)\{|\\.|[{}]", re.DOTALL)
_CLAIM = re.compile(r"(?im)(?:\banswer(?: is| ?[:=])(?: ?[:=])?|^####)(?P<claim>.*)")
_FORMULA = re.compile(
    r"\$\$([^$]{1,500})\$\$|\$([^$\n]{1,500})\$|\\\((.{1,500}?)\\\)|\\\[(.{1,500}?)\\\]", re.DOTALL
)
_NUMBER = re.compile(r"(?<![\w.])[-−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+|/\d+)?\s?%?")
_WITH_UNIT = re.compile(
    r"[$€£¥]?\s*(?P<number>[-−]?[$€£¥]?(?:\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+|\d+)?(?:\.\d+)?)"
    r"(?:[eE](?P<power>[-+]?\d+))?(?P<unit>(?:\s+[A-Za-z]{2,}){0,4})\s*"
)
_FACTORS = re.compile(
    r"(?i)\b(?:pi|percent|pct|dozens?|scores?|hundreds?|thousands?|(?:m|b|tr)illions?|halves|half|"
    r"thirds?|quarters?|squared|cubed|times|plus|minus|over|or|and|to|not|factorial|infinity|sqrt)\b"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_FENCE = re.compile(r"(?ms)^[ \t]*```[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^[ \t]*```")


def final_answer(reply: str) -> str:
    """The one expression that a reply claims, without what stands around it; "" if it claims none."""
    boxes = boxed(reply)
    if boxes:
        return _plain(boxes[-1])
    claims = [match["claim"] for match in _CLAIM.finditer(reply)]
    if claims:
        return _plain(claims[-1])
    if len(reply.split()) == 1:
        return _plain(reply)
    found = [*_FORMULA.finditer(reply), *_NUMBER.finditer(reply)]
    if not found:
        return ""
    # Of a formula and the number that it ends with, the formula.
    return _plain(max(found, key=lambda match: (match.end(), -match.start()))[0])


def short_answer(reply: str) -> str:
    """The few words that a reply claims: of the first of the forms that it has; without any, all of it."""
    claims = boxed(reply) or [match["claim"] for match in _CLAIM.finditer(reply)]
    claim = claims[-1] if claims else reply
    return (
        "" if len(claim) > MOST_CHARACTERS else _TEXT.sub(r"\1", claim).strip().strip("*`").strip()
    )


def choice(reply: str, num_choices: int = len(LETTERS)) -> str:
    """The letter that a reply claims, one of the first `num_choices`; "" if none, or several."""
    claims = boxed(reply) or [match["claim"] for match in _CLAIM.finditer(reply)]
    if not claims:
        letters = {
            letter for line in reply.splitlines() for letter in _letters(line, strictly=True)
        }
    else:
        letters = {letter for claim in claims for letter in _letters(claim) or {""}}
    [letter, *more] = letters or {""}
    return "" if more or letter not in LETTERS[:num_choices] else letter


def program(reply: str) -> str:
    """The last fenced block of Python in a reply (of any language if it names none); without fences, all of it."""
    blocks = [
        match["code"]
        for match in _FENCE.finditer(reply)
        if match["language"].lower() in ("", "python", "python3", "py")
    ]
    return blocks[-1] if blocks else reply if "```" not in reply else ""


def boxed(text: str) -> list[str]:
    """What stands in the outermost \\boxed{...} of a text, in order; a box that is not closed is none."""
    opened: list[int | None] = []  # where a box begins; None of other braces
    found: list[tuple[int, str]] = []
    for mark in _BRACES.finditer(text):
        if mark[0].endswith("{") and mark[0] != "\\{":
            opened.append(mark.end() if len(mark[0]) > 1 else None)
        elif mark[0] == "}" and opened:
            start = opened.pop()
            if start is not None:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, text[start : mark.start()]))
    return [inside for _, inside in found]


def _plain(claim: str) -> str:
    """Without emphasis, the dollars around a formula and the full stop; a number without currency, thousands' commas
    and unit, as math-verify would read letters as variables."""
    if len(claim) > MOST_CHARACTERS:
        return ""
    claim = claim.strip().strip("*`").strip().rstrip(".").strip("*` \t\n")
    formula = _FORMULA.fullmatch(claim)
    if formula:
        claim = next(part for part in formula.groups() if part is not None).strip()
    claim = claim.replace("\\$", "$")
    number = _WITH_UNIT.fullmatch(claim)
    if number and re.search(r"\d", number["number"]) and not _FACTORS.search(number["unit"]):
        digits = re.sub(r"[^\d.−-]", "", number["number"]).replace("−", "-")
        return f"{digits} \\times 10^{{{number['power']}}}" if number["power"] else digits
    return claim


def _letters(claim: str, strictly: bool = False) -> set[str]:
    """The letters that a claim names. strictly: where nothing says that it is one, only "B", "(B)" and "B) text"."""
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|rm|bf)\b|[{}$*`\"']", " ", claim).strip()
    # "A cell" and "I think" claim nothing.
    word = r"(?![\w'])(?!(?<=[AI])\s+(?!because|since|or\b|and\b|as\b|is\b)[a-z])"
    ends = r"\s*(?:[).:]|$)" if strictly else word
    named = r"(?:(?i:option|choice)\s)?\s*\(?"
    first = re.match(rf"{named}([A-J]){ends}|{named}([a-j])\)?\s*[.)]?$", text)
    if first is None:
        return set(re.findall(r"\(([A-J])\)", text))
    rest = text[first.end() :]
    more = re.findall(r"(?:[,;/&|(]|\bor\b|\band\b)\s*\(?([A-J])(?![\w'])", rest)
    return {(first[1] or first[2]).upper(), *more}
