"""Finds the values that tests in languages other than Python expect, so that variants of them can expect others (`planting`).

Suitable is a test with an assertion on its outermost level, so that a test that passes has made it. `python_variants` does the
same in Python.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from glm5_jax.envs.swe.file_tree import FileTree
from glm5_jax.envs.swe.mutations.tokens import SourceToken, split_tokens
from glm5_jax.envs.swe.paths import language_of
from glm5_jax.envs.swe.recipes.planting import (
    CanaryDraw,
    PlantedVariants,
    TestSite,
    ValueChange,
    can_vary,
    plant_variants,
)

_CLOSING = {b"(": b")", b"[": b"]", b"{": b"}"}
_OPENS, _CLOSES = set(_CLOSING), set(_CLOSING.values())
# Assertions that two values are equal, or that the value of an object made before is equal to one.
_EQUALITIES = re.compile(
    rb"assertEquals?|assertSame|(?:EXPECT|ASSERT)_(?:STR)?EQ|equal|strictEqual|deepEqual|deepStrictEqual"
    rb"|TEST_ASSERT_EQUAL\w*|ck_assert_(?:int|uint|str|float|double)_eq|assert_(?:int|string)_equal|CU_ASSERT_(?:STRING_)?EQUAL"
)
_EQUALITIES_OF_ONE = {b"toBe", b"toEqual", b"toStrictEqual", b"eq", b"equal", b"eql"}
# Assertions that a comparison holds.
_TRUTHS = re.compile(
    rb"assert|ok|assertTrue|(?:EXPECT|ASSERT)_TRUE|TEST_ASSERT(?:_TRUE)?|ck_assert|assert_true|CU_ASSERT(?:_TRUE)?|CHECK|REQUIRE"
)
_OPPOSITES = {
    b"assertTrue": b"assertFalse",
    b"assertFalse": b"assertTrue",
    b"assertNull": b"assertNotNull",
    b"assertNotNull": b"assertNull",
    b"EXPECT_TRUE": b"EXPECT_FALSE",
    b"EXPECT_FALSE": b"EXPECT_TRUE",
    b"ASSERT_TRUE": b"ASSERT_FALSE",
    b"ASSERT_FALSE": b"ASSERT_TRUE",
    b"toBeTruthy": b"toBeFalsy",
    b"toBeFalsy": b"toBeTruthy",
}
_OF_LITERALS = {b"[", b"]", b"{", b"}", b",", b"-", b":"}
_RUBY_TEST = re.compile(rb"^([ \t]*)(?:def (test_\w+)|(?:it|specify) (['\"])((?:\\.|(?!\3).)*)\3 do)[ \t]*\n", re.M)  # fmt: skip
_RUBY_LITERAL = re.compile(rb"^([ \t]*)(?:assert_equal[ (]|.*\.to eql?[ (])[ \t]*\[?[ \t]*(\d+|(['\"])(?:(?!\3)[^\\\n])*\3)", re.M)  # fmt: skip


class TestBlock(NamedTuple):
    """Test in a source: the offsets of its text, the token of its name, and the indices of the tokens of its body."""

    start: int
    end: int
    name: SourceToken
    first: int
    last: int


def plant_token_variants(
    tree: FileTree, focus: Sequence[str], language: str, draw: CanaryDraw
) -> PlantedVariants:
    """Returns the test files in focus with variants of their tests."""
    paths = [path for path in focus if language_of(path) == language]
    return plant_variants(tree, paths, draw, lambda source: find_token_sites(source, language))


def find_token_sites(source: bytes, language: str) -> list[TestSite]:
    """Returns the suitable tests of a source."""
    if language == "ruby":
        return _ruby_sites(source)
    tokens = split_tokens(source, language)
    sites = []
    for block in _BLOCKS[language](tokens):
        if changes := find_changes(tokens, block, language):
            quotes = int(block.name.kind == "text")
            start, end = block.name.start + quotes, block.name.end - quotes
            joiner = " " if quotes else "_" if b"_" in block.name.text else None
            sites.append(TestSite(block.start, block.end, start, end, joiner, tuple(changes)))
    return sites


def find_changes(
    tokens: Sequence[SourceToken], block: TestBlock, language: str
) -> list[ValueChange]:
    """Returns the values that the assertions on the outermost level of a test expect; their opposites if there are none."""
    depth, values, opposites = 0, [], []
    for index in range(block.first, block.last):
        token = tokens[index]
        is_call = depth == 0 and token.kind == "word" and tokens[index + 1].text == b"("
        if is_call:
            values += _expected_values(tokens, index)
        if is_call and token.text in _OPPOSITES:
            opposites.append(ValueChange(token.start, token.end, _OPPOSITES[token.text]))
        if depth == 0 and token.text == b"if" and language in ("go", "c", "cpp"):
            stops = (b"{",) if language == "go" else (b"{", b";")
            end = next((i for i in range(index, block.last) if tokens[i].text in stops), index)
            values += _compared(tokens[index + 1 : end + 1], (b"!=",), b"&&")
        if token.kind == "op":
            depth += (token.text in _OPENS) - (token.text in _CLOSES)
    changes = [ValueChange(value.start, value.end) for value in values if can_vary(value.text)]
    return changes or opposites


def _expected_values(tokens: Sequence[SourceToken], index: int) -> list[SourceToken]:
    """Returns the numbers and texts that a call compares for equality with something else."""
    name, arguments = tokens[index].text, _arguments(tokens, index + 1)
    if name in _EQUALITIES_OF_ONE and len(arguments) == 1:
        return _literals(arguments[0])
    if _EQUALITIES.fullmatch(name) and len(arguments) > 1:
        pair = [_literals(argument) for argument in arguments[:2]]
        # With three, JUnit 4 has its message first.
        if name.startswith(b"assert") and len(arguments) > 2 and pair[0] and arguments[0][0].kind == "text":  # fmt: skip
            return []
        return (pair[0] or pair[1]) if not all(pair) else []
    return _compared(arguments[0], (b"==", b"==="), b"||") if _TRUTHS.fullmatch(name) else []


def _arguments(tokens: Sequence[SourceToken], opening: int) -> list[Sequence[SourceToken]]:
    depth, start, arguments = 0, opening + 1, []
    for index in range(opening, len(tokens)):
        text = tokens[index].text if tokens[index].kind == "op" else b""
        depth += (text in _OPENS) - (text in _CLOSES)
        if text == b"," and depth == 1 or depth == 0:
            arguments.append(tokens[start:index])
            start = index + 1
        if depth == 0:
            break
    return arguments or [[]]


def _literals(argument: Sequence[SourceToken]) -> list[SourceToken]:
    """Returns the numbers and texts of an argument that consists of nothing else."""
    values = [token for token in argument if token.kind in ("number", "text")]
    signs = [token for token in argument if token.kind not in ("number", "text")]
    if len(argument) == 1 or all(sign.text in _OF_LITERALS for sign in signs):
        return values
    return []


def _compared(
    tokens: Sequence[SourceToken], operators: tuple[bytes, ...], other: bytes
) -> list[SourceToken]:
    """Returns the number or text that a condition compares with; none if it has another part that can decide."""
    if any(token.text in (other, b"?") for token in tokens):
        return []
    for index, token in enumerate(tokens):
        if token.kind == "op" and token.text in operators:
            before, after = tokens[:index], tokens[index + 1 :]
            if before and before[-1].kind in ("number", "text") and _ends(before[-2:-1]):
                return [before[-1]]
            if after and after[0].kind in ("number", "text") and _ends(after[1:2]):
                return [after[0]]
    return []


def _ends(tokens: Sequence[SourceToken]) -> bool:
    """Returns whether an operand ends at this token."""
    ends = (b"(", b")", b"{", b";", b",", b"&&", b"||")
    return all(token.kind == "op" and token.text in ends for token in tokens)


def matching_bracket(tokens: Sequence[SourceToken], opening: int) -> int | None:
    """Returns the index of the bracket that closes another."""
    depth = 0
    for index in range(opening, len(tokens)):
        text = tokens[index].text if tokens[index].kind == "op" else b""
        depth += (text in _OPENS) - (text in _CLOSES)
        if depth == 0:
            return index
    return None


def function_blocks(
    tokens: Sequence[SourceToken], heads: Sequence[bytes], prefix: bytes, empty: bool
) -> Iterator[TestBlock]:
    """Yields the functions whose name begins with a prefix, after one of some words.

    empty: whether they have no parameters.
    """
    for index in range(1, len(tokens) - 3):
        name = tokens[index]
        if tokens[index - 1].text not in heads or not name.text.startswith(prefix):
            continue
        if tokens[index + 1].text != b"(":
            continue
        closing = matching_bracket(tokens, index + 1)
        if closing is None or empty and closing != index + 2:
            continue
        body = next((i for i in range(closing, len(tokens)) if tokens[i].text in (b"{", b";")), None)  # fmt: skip
        end = (
            matching_bracket(tokens, body)
            if body is not None and tokens[body].text == b"{"
            else None
        )
        if body is not None and end is not None:
            yield TestBlock(_line_start(tokens, index), tokens[end].end, name, body + 1, end)


def _line_start(tokens: Sequence[SourceToken], index: int) -> int:
    """Returns the offset of the first token on the line of another."""
    while index and tokens[index - 1].line == tokens[index].line:
        index -= 1
    return tokens[index].start


def _go_blocks(tokens: Sequence[SourceToken]) -> Iterator[TestBlock]:
    return function_blocks(tokens, (b"func",), b"Test", empty=False)


def _php_blocks(tokens: Sequence[SourceToken]) -> Iterator[TestBlock]:
    return function_blocks(tokens, (b"function",), b"test", empty=True)


def _java_blocks(tokens: Sequence[SourceToken]) -> Iterator[TestBlock]:
    for block in function_blocks(tokens, (b"void",), b"", empty=True):
        index = tokens.index(block.name)
        above = next((i for i in range(index, 1, -1) if tokens[i].text in (b"}", b";", b"{")), 0)
        if [token.text for token in tokens[above + 1 : above + 3]] == [b"@", b"Test"]:
            if tokens[above + 3].text != b"(":
                yield block._replace(start=tokens[above + 1].start)


def _gtest_blocks(tokens: Sequence[SourceToken]) -> Iterator[TestBlock]:
    for index in range(len(tokens) - 6):
        if tokens[index].text in (b"TEST", b"TEST_F") and tokens[index + 5].text == b")":
            end = matching_bracket(tokens, index + 6) if tokens[index + 6].text == b"{" else None
            if end is not None:
                name = tokens[index + 4]
                yield TestBlock(tokens[index].start, tokens[end].end, name, index + 7, end)


def _javascript_blocks(tokens: Sequence[SourceToken]) -> Iterator[TestBlock]:
    for index in range(len(tokens) - 4):
        if tokens[index].text not in (b"it", b"test") or tokens[index + 1].text != b"(":
            continue
        title, end = tokens[index + 2], matching_bracket(tokens, index + 1)
        if title.kind != "text" or end is None or b"${" in title.text:
            continue
        body = next((i for i in range(index + 3, end) if tokens[i].text == b"{"), None)
        last = matching_bracket(tokens, body) if body is not None else None
        if body is not None and last is not None:
            has_semicolon = end + 1 < len(tokens) and tokens[end + 1].text == b";"
            stop = tokens[end + has_semicolon].end
            yield TestBlock(tokens[index].start, stop, title, body + 1, last)


def _c_blocks(tokens: Sequence[SourceToken]) -> Iterator[TestBlock]:
    """Yields main, the functions that it names, and the bodies of macros that define tests."""
    functions = list(function_blocks(tokens, _C_TYPES, b"", empty=False))
    called = {b"main"}
    for index in range(len(tokens) - 1):
        if tokens[index].text == b"main" and tokens[index + 1].text == b"(":
            head = matching_bracket(tokens, index + 1) or index
            end = matching_bracket(tokens, head + 1) if tokens[head + 1 : head + 2] else None
            called |= {token.text for token in tokens[head : end or head]}
    yield from (block for block in functions if block.name.text in called)
    for index in range(len(tokens) - 4):
        if tokens[index].text in _C_MACROS and tokens[index + 1].text == b"(":
            closing = matching_bracket(tokens, index + 1)
            if closing is not None and [token.text for token in tokens[closing + 1 : closing + 2]] == [b"{"]:  # fmt: skip
                end = matching_bracket(tokens, closing + 1)
                if end is not None:
                    name = tokens[index + 2]
                    yield TestBlock(tokens[index].start, tokens[end].end, name, closing + 2, end)


_C_TYPES = (b"void", b"int", b"bool")
_C_MACROS = {b"TEST_CASE", b"SCENARIO", b"START_TEST", b"Test", b"TEST"}
_BLOCKS = {
    "c": _c_blocks,
    "go": _go_blocks,
    "php": _php_blocks,
    "java": _java_blocks,
    "cpp": _gtest_blocks,
    "javascript": _javascript_blocks,
    "typescript": _javascript_blocks,
}


def _ruby_sites(source: bytes) -> list[TestSite]:
    """Returns the tests of minitest and RSpec, whose end is at the indentation of their head."""
    sites = []
    for match in _RUBY_TEST.finditer(source):
        end = re.compile(rb"^" + match[1] + rb"end\b", re.M).search(source, match.end())
        if end is None:
            continue
        literals = _RUBY_LITERAL.finditer(source, match.end(), end.start())
        changes = [
            ValueChange(*literal.span(2))
            for literal in literals
            if literal[1] == match[1] + b"  " and can_vary(literal[2])  # on the outermost level
        ]
        if changes:
            is_method = match[2] is not None
            span = match.span(2 if is_method else 4)
            joiner = "_" if is_method else " "
            sites.append(TestSite(match.start(), end.end(), *span, joiner, tuple(changes)))
    return sites
