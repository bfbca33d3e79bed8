"""Extracts the final answer of a reply: an expression, a few words, the letter of a choice, or a program.

A reply may reason before it answers. The answer is the first of these forms that it has:

  1. \\boxed{...}: for a final answer the last one;
  2. the last line "answer: ..." or "the answer is ...", also in Chinese, or GSM8K's "#### ...", up to the end of the
     line; if nothing follows there, the next line, or the formula that begins there;
  3. the reply itself if it is one word or formula, else the last formula between dollars (or \\( and \\[)
    or the last number, whichever ends last.

For a choice, all answers in the first form that the reply has must name the same letter.
"""

import re

LETTERS = "ABCDEFGHIJ"
MAX_CHARACTERS = 2000  # of a final answer
# A policy's text may be long and odd, so every pattern takes time proportional to its length.
_BRACES = re.compile(r"\\(?:boxed|fbox)\{|\\.|[{}]", re.DOTALL)
_CLAIM = re.compile(
    r"(?im)(?:\banswer[*_]*(?: is| ?[:=])(?: ?[:=])?|答案\s*[是为:：]+|^####)(?P<claim>.*)"
)
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
_EMPHASIS = " \t\r*_`:"  # what may surround the word "answer" if its answer is on another line
_FULL_WIDTH = {ord(letter) + 0xFEE0: letter for letter in f"{LETTERS}()"}
_NEXT_LINE = re.compile(r"\s*(.*)")
_FENCE = re.compile(r"(?ms)^[ \t]*```[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^[ \t]*```")


def final_answer(reply: str) -> str:
    """Returns the expression that a reply gives as its answer, without the text around it; "" if it gives none."""
    boxes = boxed_contents(reply)
    if boxes:
        return plain_answer(boxes[-1])
    claims = _claims(reply)
    if claims:
        return plain_answer(claims[-1])
    if len(reply.split()) == 1:
        return plain_answer(reply)
    matches = [*_FORMULA.finditer(reply), *_NUMBER.finditer(reply)]
    if not matches:
        return ""
    # If a formula ends with a number, take the formula.
    return plain_answer(max(matches, key=lambda match: (match.end(), -match.start()))[0])


def short_answer(reply: str) -> str:
    """Returns the short answer of a reply, in the first form that it has; without any, the full reply."""
    claims = boxed_contents(reply) or _claims(reply)
    claim = claims[-1] if claims else reply
    return (
        "" if len(claim) > MAX_CHARACTERS else _TEXT.sub(r"\1", claim).strip().strip("*`").strip()
    )


def chosen_letter(reply: str, num_choices: int = len(LETTERS)) -> str:
    """Returns the letter that a reply names, one of the first `num_choices`; "" if it names none or several."""
    claims = boxed_contents(reply) or _claims(reply)
    if not claims:
        letters = {
            letter for line in reply.splitlines() for letter in _letters(line, strictly=True)
        }
    else:
        letters = {letter for claim in claims for letter in _letters(claim) or {""}}
    [letter, *more] = letters or {""}
    return "" if more or letter not in LETTERS[:num_choices] else letter


def program(reply: str) -> str:
    """Returns the last fenced block of Python in a reply (or of no language); without fences, the full reply."""
    blocks = [
        match["code"]
        for match in _FENCE.finditer(reply)
        if match["language"].lower() in ("", "python", "python3", "py")
    ]
    return blocks[-1] if blocks else reply if "```" not in reply else ""


def boxed_contents(text: str) -> list[str]:
    """Returns the contents of the outermost \\boxed{...} of a text, in order; boxes that are not closed do not
    count.
    """
    opened: list[int | None] = []  # start of a box's content; None for other braces
    boxes: list[tuple[int, str]] = []
    for mark in _BRACES.finditer(text):
        if mark[0].endswith("{") and mark[0] != "\\{":
            opened.append(mark.end() if len(mark[0]) > 1 else None)
        elif mark[0] == "}" and opened:
            start = opened.pop()
            if start is not None:
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, text[start : mark.start()]))
    return [inside for _, inside in boxes]


def _claims(reply: str) -> list[str]:
    """Returns what follows "answer:" and the like, in order; "" if nothing does."""
    claims = []
    for match in _CLAIM.finditer(reply):
        claim = match["claim"]
        if not claim.strip(_EMPHASIS):
            if line := _NEXT_LINE.match(reply, match.end()):
                formula = _FORMULA.match(reply, line.start(1))
                claim = formula[0] if formula else line[1]
        claims.append(claim)
    return claims


def nesting_depth(formula: str) -> int:
    """Returns the depth of the nested brackets of a formula, closed or not."""
    level = deepest = 0
    for letter in formula:
        if letter in "([{":
            level += 1
            deepest = max(deepest, level)
        elif letter in ")]}" and level:
            level -= 1
    return deepest


def plain_answer(claim: str) -> str:
    """Returns an answer without emphasis, the dollars around a formula, and the full stop.

    A number also loses currency, thousands' commas and unit, because math-verify would read letters as
    variables.
    """
    if len(claim) > MAX_CHARACTERS:
        return ""
    claim = claim.strip().strip("*`").strip().rstrip(".。").strip("*` \t\n")
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
    """Returns the letters that an answer names.

    Args:
      claim: text of the answer.
      strictly: accept only "B", "(B)" and "B) text", because nothing marks the text as an answer.
    """
    text = claim.translate(_FULL_WIDTH)
    text = re.sub(
        r"\\(?:text|mathrm|mathbf|textbf|rm|bf)\b|[{}$*`\"'“”‘’<>\[\]]", " ", text
    ).strip()
    # "A cell" and "I think" name no letter.
    word = r"(?![\w'])(?!(?<=[AI])\s+(?!because|since|or\b|and\b|as\b|is\b)[a-z])"
    ends = r"\s*(?:[).:]|$)" if strictly else word
    named = r"(?:(?i:option|choice)\s)?\s*\(?"
    first = re.match(rf"{named}([A-J]){ends}|{named}([a-j])\)?\s*[.)]?$", text)
    if first is None:
        return set(re.findall(r"\(([A-J])\)", text))
    rest = text[first.end() :]
    more = re.findall(r"(?:[,;/&|(]|\bor\b|\band\b)\s*\(?([A-J])(?![\w'])", rest)
    return {(first[1] or first[2]).upper(), *more}
