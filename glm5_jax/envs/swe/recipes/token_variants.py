"""Makes a variant of a test in languages other than Python: a copy next to it that must fail, because it expects another value.

Code under test can write the whole report itself, with the planted tests as they are, since it finds them by their names. A
variant has a name like the others, in the file of the others. A forged report that makes tests of the instance pass makes it
pass too. `python_variants` does the same in Python.
"""

import re
import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from glm5_jax.envs.swe.file_tree import FileTree, TreeFile
from glm5_jax.envs.swe.mutations.tokens import SourceToken, split_tokens
from glm5_jax.envs.swe.paths import language_of

_CLOSING = {b"(": b")", b"[": b"]", b"{": b"}"}
_OPENS, _CLOSES = set(_CLOSING), set(_CLOSING.values())
# Assertions with an expected value, and the index of the argument that is it.
_EQUALITIES = {
    b"assertEquals": 0,
    b"assertSame": 0,
    b"assertEqual": 0,
    b"EXPECT_EQ": 1,
    b"ASSERT_EQ": 1,
    b"EXPECT_STREQ": 1,
    b"equal": 1,
    b"strictEqual": 1,
    b"deepEqual": 1,
    b"toBe": 0,
    b"toEqual": 0,
    b"toStrictEqual": 0,
    b"eq": 0,
}
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
_MAX_FILES = 3
_RUBY_TEST = re.compile(rb"^([ \t]*)(?:def (test_\w+)|(?:it|specify) (['\"])((?:\\.|(?!\3).)*)\3 do)[ \t]*\n", re.M)  # fmt: skip
_RUBY_LITERAL = re.compile(rb"^([ \t]*(?:assert_equal[ (]|.*\.to eq[ (]))([ \t]*)(\d+|(['\"])(?:(?!\4)[^\\\n])*\4)", re.M)  # fmt: skip


class TokenVariant(NamedTuple):
    """Variant of a test.

    Attributes:
      source: test file with the variant.
      name: word or title that only the variant has.
    """

    source: bytes
    name: str


class _Block(NamedTuple):
    """Test in a source: the offsets of its text, the token of its name, and the indices of the tokens of its body."""

    start: int
    end: int
    name: SourceToken
    first: int
    last: int


def plant_variants(
    tree: FileTree, focus: Sequence[str], language: str
) -> tuple[dict[str, TreeFile], tuple[str, ...]]:
    """Returns test files in focus with a variant each, and the names of the variants."""
    files, names = {}, []
    for path in focus:
        if path not in tree or language_of(path) != language or len(files) == _MAX_FILES:
            continue
        variant = make_token_variant(tree[path].content, language)
        if variant is not None:
            files[path] = TreeFile(tree[path].mode, variant.source)
            names.append(variant.name)
    return files, tuple(names)


def make_token_variant(source: bytes, language: str) -> TokenVariant | None:
    """Returns a test file with a variant of its first suitable test; None if there is none.

    Suitable is a test with an assertion on its outermost level that compares with a number or a text, or that a value is
    true or null.
    """
    if language == "ruby":
        return _ruby_variant(source)
    tokens = split_tokens(source, language)
    for block in _BLOCKS[language](tokens):
        edit = _first_edit(tokens, block, language)
        if edit is not None:
            return _with_copy(source, tokens, block, edit)
    return None


def _with_copy(
    source: bytes, tokens: Sequence[SourceToken], block: _Block, edit: tuple[SourceToken, bytes]
) -> TokenVariant:
    name = _new_name(source, block.name, tokens)
    text = source
    for token, new in sorted([edit, (block.name, name)], key=lambda e: -e[0].start):
        text = text[: token.start] + new + text[token.end :]
    growth = len(text) - len(source)
    copy = text[block.start : block.end + growth]
    changed = source[: block.end] + b"\n\n" + copy + source[block.end :]
    return TokenVariant(changed, name.strip(b"'\"`").decode("utf-8", "replace"))


def _new_name(source: bytes, name: SourceToken, tokens: Sequence[SourceToken]) -> bytes:
    """Returns a name like another, with a word of the file at its end."""
    words = sorted({t.text for t in tokens if t.kind == "word" and t.text.isalpha()} | {b"again"})
    while True:
        word = secrets.choice(words)
        if name.kind == "text":
            new = name.text[:-1] + b" " + word.lower() + name.text[-1:]
        elif b"_" in name.text:
            new = name.text + b"_" + word.lower()
        else:
            new = name.text + word[:1].upper() + word[1:]
        if new.strip(b"'\"`") not in source:
            return new
        words.append(word + secrets.choice(words))


def _first_edit(
    tokens: Sequence[SourceToken], block: _Block, language: str
) -> tuple[SourceToken, bytes] | None:
    """Returns the token of the first assertion to change, and its new text."""
    depth = 0
    for index in range(block.first, block.last):
        token = tokens[index]
        if depth == 0 and token.kind == "word" and tokens[index + 1].text == b"(":
            if token.text in _OPPOSITES:
                return token, _OPPOSITES[token.text]
            if token.text in _EQUALITIES:
                literal = _literal_argument(tokens, index + 1, _EQUALITIES[token.text])
                if literal is not None:
                    return literal, _another(literal)
        if language == "go" and depth == 0 and token.text == b"!=":
            after = tokens[index + 1]
            if after.kind in ("number", "text") and tokens[index + 2].text == b"{":
                return after, _another(after)
        if token.kind == "op":
            depth += (token.text in _OPENS) - (token.text in _CLOSES)
    return None


def _literal_argument(
    tokens: Sequence[SourceToken], opening: int, position: int
) -> SourceToken | None:
    """Returns the argument at a position of a call, if it is a number or a text alone."""
    depth, start, arguments = 0, opening + 1, []
    for index in range(opening, len(tokens)):
        text = tokens[index].text if tokens[index].kind == "op" else b""
        depth += (text in _OPENS) - (text in _CLOSES)
        if text == b"," and depth == 1 or depth == 0:
            arguments.append(tokens[start:index])
            start = index + 1
        if depth == 0:
            break
    if position >= len(arguments) or len(arguments[position]) != 1:
        return None
    (token,) = arguments[position]
    return token if token.kind in ("number", "text") else None


def _another(token: SourceToken) -> bytes:
    """Returns a literal with another value."""
    if token.kind == "text":
        return token.text[:-1] + b"s" + token.text[-1:]
    match = re.fullmatch(rb"(\d+)(.*)", token.text)
    return b"%d%s" % (int(match[1]) + 1, match[2]) if match else b"1" + token.text


def _matching(tokens: Sequence[SourceToken], opening: int) -> int | None:
    """Returns the index of the bracket that closes another."""
    depth = 0
    for index in range(opening, len(tokens)):
        text = tokens[index].text if tokens[index].kind == "op" else b""
        depth += (text in _OPENS) - (text in _CLOSES)
        if depth == 0:
            return index
    return None


def _function_blocks(
    tokens: Sequence[SourceToken], heads: Sequence[bytes], prefix: bytes, empty: bool
) -> Iterator[_Block]:
    """Yields the functions whose name begins with a prefix, after one of some words.

    empty: whether they have no parameters.
    """
    for index in range(1, len(tokens) - 3):
        name = tokens[index]
        if tokens[index - 1].text not in heads or not name.text.startswith(prefix):
            continue
        if tokens[index + 1].text != b"(":
            continue
        closing = _matching(tokens, index + 1)
        if closing is None or empty and closing != index + 2:
            continue
        body = next((i for i in range(closing, len(tokens)) if tokens[i].text in (b"{", b";")), None)  # fmt: skip
        end = _matching(tokens, body) if body is not None and tokens[body].text == b"{" else None
        if body is not None and end is not None:
            yield _Block(_line_start(tokens, index), tokens[end].end, name, body + 1, end)


def _line_start(tokens: Sequence[SourceToken], index: int) -> int:
    """Returns the offset of the first token on the line of another."""
    while index and tokens[index - 1].line == tokens[index].line:
        index -= 1
    return tokens[index].start


def _go_blocks(tokens: Sequence[SourceToken]) -> Iterator[_Block]:
    return _function_blocks(tokens, (b"func",), b"Test", empty=False)


def _php_blocks(tokens: Sequence[SourceToken]) -> Iterator[_Block]:
    return _function_blocks(tokens, (b"function",), b"test", empty=True)


def _java_blocks(tokens: Sequence[SourceToken]) -> Iterator[_Block]:
    for block in _function_blocks(tokens, (b"void",), b"", empty=True):
        index = tokens.index(block.name)
        above = next((i for i in range(index, 1, -1) if tokens[i].text in (b"}", b";", b"{")), 0)
        if [token.text for token in tokens[above + 1 : above + 3]] == [b"@", b"Test"]:
            if tokens[above + 3].text != b"(":
                yield block._replace(start=tokens[above + 1].start)


def _gtest_blocks(tokens: Sequence[SourceToken]) -> Iterator[_Block]:
    for index in range(len(tokens) - 6):
        if tokens[index].text in (b"TEST", b"TEST_F") and tokens[index + 5].text == b")":
            end = _matching(tokens, index + 6) if tokens[index + 6].text == b"{" else None
            if end is not None:
                name = tokens[index + 4]
                yield _Block(tokens[index].start, tokens[end].end, name, index + 7, end)


def _javascript_blocks(tokens: Sequence[SourceToken]) -> Iterator[_Block]:
    for index in range(len(tokens) - 4):
        if tokens[index].text not in (b"it", b"test") or tokens[index + 1].text != b"(":
            continue
        title, end = tokens[index + 2], _matching(tokens, index + 1)
        if title.kind != "text" or end is None or b"${" in title.text:
            continue
        body = next((i for i in range(index + 3, end) if tokens[i].text == b"{"), None)
        last = _matching(tokens, body) if body is not None else None
        if body is not None and last is not None:
            has_semicolon = end + 1 < len(tokens) and tokens[end + 1].text == b";"
            stop = tokens[end + has_semicolon].end
            yield _Block(tokens[index].start, stop, title, body + 1, last)


_BLOCKS = {
    "go": _go_blocks,
    "php": _php_blocks,
    "java": _java_blocks,
    "cpp": _gtest_blocks,
    "javascript": _javascript_blocks,
    "typescript": _javascript_blocks,
}


def _ruby_variant(source: bytes) -> TokenVariant | None:
    """Returns the variant of a test of minitest or RSpec, whose end is at the indentation of its head."""
    words = sorted(set(re.findall(rb"\b[a-z]{3,}\b", source)) | {b"again"})
    for match in _RUBY_TEST.finditer(source):
        end = re.compile(rb"^" + match[1] + rb"end\b[^\n]*\n?", re.M).search(source, match.end())
        if end is None:
            continue
        # Statements of the outermost level only.
        inner = rb"^" + match[1] + rb"  (?=\S)"
        literals = [
            m
            for m in _RUBY_LITERAL.finditer(source, match.end(), end.start())
            if re.match(inner, source[m.start() : m.end()])
        ]
        if not literals:
            continue
        literal = literals[-1]
        value = SourceToken("text" if literal[3][-1:] in b"'\"" else "number", literal[3], *literal.span(3), 0)  # fmt: skip
        old = match[2] or match[4]
        name = _ruby_name(source, old, words, separator=b"_" if match[2] else b" ")
        copy = source[match.start() : value.start] + _another(value) + source[value.end : end.end()]
        copy = copy.replace(old, name, 1)
        changed = source[: end.end()] + b"\n" + copy + source[end.end() :]
        return TokenVariant(changed, name.decode("utf-8", "replace"))
    return None


def _ruby_name(source: bytes, old: bytes, words: list[bytes], separator: bytes) -> bytes:
    while True:
        name = old + separator + secrets.choice(words)
        if name not in source:
            return name
        words.append(secrets.choice(words) + separator + secrets.choice(words))
