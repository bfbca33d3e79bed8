"""Finds mutations of sources in eight languages at their tokens."""

import re
from collections.abc import Iterator, Sequence

from glm5_jax.envs.swe.mutations.edits import Edit, Mutation
from glm5_jax.envs.swe.mutations.tokens import SourceToken, split_tokens

_COMPARISONS = {
    b"<": b"<=",
    b"<=": b"<",
    b">": b">=",
    b">=": b">",
    b"==": b"!=",
    b"!=": b"==",
    b"===": b"!==",
    b"!==": b"===",
}
_BOOLEANS = {b"true": b"false", b"false": b"true"}
_CLOSING = {b"(": b")", b"[": b"]", b"{": b"}"}
_OPENING = {closing: opening for opening, closing in _CLOSING.items()}
# Where an operand of a condition ends at the latest.
_BOUNDARIES = {
    *(b",", b";", b"=", b"?", b":", b"=>", b"->", b"&&", b"||", b"+=", b":=", b"??"),
    *(b"return", b"if", b"elsif", b"elseif", b"unless", b"while", b"until", b"and", b"or", b"not"),
    *(b"then", b"do", b"case", b"when", b"in", b"assert"),
}
_DEFINITIONS = {b"def", b"function", b"func", b"fn", b"template", b"catch", b"operator"}
_JOINTS = {b".", b"->", b"::", b"?."}
_LEAVES = {b"return", b"throw", b"continue", b"break", b"panic"}
_RUBY_GUARD = re.compile(rb"^[ \t]*(?:return|raise|next|break)\b[^\n#]*?\s(?:if|unless)\s[^\n#]*$", re.M)  # fmt: skip


def find_token_mutations(source: bytes, language: str) -> list[Mutation]:
    """Returns all mutations of a source in its order."""
    tokens = split_tokens(source, language)
    mutations = [
        *_comparisons(source, tokens),
        *_constants(tokens),
        *_conditions(source, tokens, language),
        *_arguments(tokens),
        *(_ruby_guards(source) if language == "ruby" else _guards(source, tokens, language)),
    ]
    return sorted(set(mutations), key=lambda mutation: (mutation.edits, mutation.operator))


def _replace(token: SourceToken, text: bytes) -> tuple[Edit, ...]:
    return (Edit(token.start, token.end, text),)


def _is_spaced(source: bytes, token: SourceToken) -> bool:
    """Returns whether there is space around an operator; type parameters and references have none."""
    around = source[token.start - 1 : token.start] + source[token.end : token.end + 1]
    return len(around) == 2 and around.isspace()


def _is_value(token: SourceToken) -> bool:
    return token.kind != "op" or token.text in (b")", b"]")


def _comparisons(source: bytes, tokens: Sequence[SourceToken]) -> Iterator[Mutation]:
    for before, token in zip(tokens, tokens[1:]):
        if token.text in _COMPARISONS and _is_spaced(source, token) and _is_value(before):
            line = source[source.rfind(b"\n", 0, token.start) + 1 : token.start]
            is_declaration = re.match(rb"\s*(?:class|template|module)\b", line)
            if before.text not in _DEFINITIONS and not is_declaration:
                yield Mutation("comparison", _replace(token, _COMPARISONS[token.text]))


def _constants(tokens: Sequence[SourceToken]) -> Iterator[Mutation]:
    for number, token in enumerate(tokens):
        if token.kind == "word" and token.text in _BOOLEANS:
            yield Mutation("wrong_constant", _replace(token, _BOOLEANS[token.text]))
        if token.kind != "number" or not token.text.isdigit():
            continue
        before = tokens[number - 1] if number else None
        is_plain = token.text == b"0" or not token.text.startswith(b"0")
        if is_plain:  # others are octal
            yield Mutation("wrong_constant", _replace(token, b"%d" % (int(token.text) + 1)))
        is_sum = before is not None and before.text in (b"+", b"-") and number > 1
        if is_sum and token.text == b"1" and _is_value(tokens[number - 2]):
            yield Mutation("off_by_one", (Edit(tokens[number - 2].end, token.end, b""),))


def _conditions(source: bytes, tokens: Sequence[SourceToken], language: str) -> Iterator[Mutation]:
    for number, token in enumerate(tokens):
        if token.text in (b"&&", b"||") and token.kind == "op" and _is_spaced(source, token):
            left, right = _operand(tokens, number, -1, language), _operand(tokens, number, 1, language)  # fmt: skip
            if left is not None and right is not None:
                # With the space next to it, which would show the place.
                yield Mutation("dropped_condition", (Edit(tokens[number - 1].end, right.end, b""),))
                after = tokens[number + 1].start
                yield Mutation("dropped_condition", (Edit(left.start, after, b""),))


def _operand(
    tokens: Sequence[SourceToken], number: int, step: int, language: str
) -> SourceToken | None:
    """Returns the last token of the operand next to an operator, to one side; None if it has none."""
    opening, closing = (_CLOSING, _OPENING) if step > 0 else (_OPENING, _CLOSING)
    depth, last, position = 0, None, number + step
    while 0 <= position < len(tokens):
        token = tokens[position]
        is_brace = token.text == b"{" if step > 0 else token.text in (b"{", b"}")
        if depth == 0:
            starts_line = last is not None and token.line != last.line
            if (
                token.text in _BOUNDARIES
                or token.text in closing
                or is_brace
                and language != "ruby"
            ):
                break
            if starts_line and language == "ruby":
                break
        if token.kind == "op":
            depth += (token.text in opening) - (token.text in closing)
        last = token
        position += step
    return last


def _arguments(tokens: Sequence[SourceToken]) -> Iterator[Mutation]:
    for number in range(1, len(tokens) - 4):
        if tokens[number].text != b"(" or tokens[number - 1].kind != "word":
            continue
        if number > 1 and tokens[number - 2].text in _DEFINITIONS:
            continue
        one, after = _simple_argument(tokens, number + 1)
        if not one or tokens[after].text != b",":
            continue
        two, end = _simple_argument(tokens, after + 1)
        if not two or tokens[end].text not in (b",", b")") or one == two:
            continue
        close = next((n for n in range(end, len(tokens)) if tokens[n].text == b")"), None)
        if close is not None and close + 1 < len(tokens) and tokens[close + 1].text == b"{":
            continue  # parameters of a function
        first = Edit(tokens[number + 1].start, tokens[after - 1].end, two)
        second = Edit(tokens[after + 1].start, tokens[end - 1].end, one)
        yield Mutation("swapped_arguments", (first, second))


def _simple_argument(tokens: Sequence[SourceToken], number: int) -> tuple[bytes, int]:
    """Returns a name, number or text that is an argument, and the index after it; no text if it is none."""
    parts, expects_value = [], True
    while number < len(tokens) - 1:
        token = tokens[number]
        if expects_value != (token.kind != "op") or not expects_value and token.text not in _JOINTS:
            break
        parts.append(token.text)
        expects_value = not expects_value
        number += 1
    return (b"" if expects_value else b"".join(parts)), number


def _guards(source: bytes, tokens: Sequence[SourceToken], language: str) -> Iterator[Mutation]:
    for number, token in enumerate(tokens):
        if token.text != b"if" or not number or tokens[number - 1].text not in (b"{", b"}", b";"):
            if not (language == "go" and token.text == b"if" and number and tokens[number - 1].text != b"else"):  # fmt: skip
                continue
        body = _body_of(tokens, number, language)
        end = body and _leaf_end(tokens, body, language)
        if end and (end + 1 >= len(tokens) or tokens[end + 1].text not in (b"else", b"elseif")):
            yield Mutation("removed_guard", (_without_lines(source, token.start, tokens[end].end),))


def _body_of(tokens: Sequence[SourceToken], number: int, language: str) -> int | None:
    """Returns the index of the first token after a condition."""
    if language == "go":
        position = number + 1
        while position < len(tokens) and tokens[position].text != b"{":
            if tokens[position].text == b";":
                return None
            position += 1
        return position
    depth = 0
    for position in range(number + 1, len(tokens)):
        text = tokens[position].text if tokens[position].kind == "op" else b""
        depth += (text == b"(") - (text == b")")
        if depth == 0:
            return position + 1 if position > number + 1 else None
    return None


def _leaf_end(tokens: Sequence[SourceToken], body: int, language: str) -> int | None:
    """Returns the index of the last token of a body that only leaves the block; None for other bodies."""
    if body >= len(tokens) - 1:
        return None
    is_block = tokens[body].text == b"{"
    first = body + is_block
    if tokens[first].text not in _LEAVES:
        return None
    depth = 0
    for position in range(first, len(tokens)):
        text = tokens[position].text if tokens[position].kind == "op" else b""
        if language == "go" and tokens[position].line != tokens[first].line and text != b"}":
            return None
        if depth == 0 and text == b"}":
            return position if is_block else None
        depth += (text in _CLOSING) - (text in _OPENING)
        if depth == 0 and text == b";":
            if not is_block:
                return position
            is_last = position + 1 < len(tokens) and tokens[position + 1].text == b"}"
            return position + 1 if is_last else None
    return None


def _ruby_guards(source: bytes) -> Iterator[Mutation]:
    for match in _RUBY_GUARD.finditer(source):
        yield Mutation("removed_guard", (_without_lines(source, match.start(), match.end()),))


def _without_lines(source: bytes, start: int, end: int) -> Edit:
    """Returns the edit that removes a part, with its lines where they hold nothing else."""
    first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
    last = len(source) if last < 0 else last + 1
    if source[first:start].isspace() or first == start:
        if not source[end:last].strip():
            return Edit(first, last, b"")
    return Edit(start, end, b"")
