"""Splits sources of eight languages into tokens, without comments.

The rules know comments, texts, numbers, words and operators. They do not know grammars, so a wrong token is possible. A
mutation at one does not build, or breaks no test, and is dropped.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

# Languages of C's family share everything that is not named here.
_LINE_COMMENTS = {"php": rb"//|#(?!\[)", "ruby": rb"#"}
_TEXTS = {
    "go": rb'"(?:\\.|[^"\\\n])*"|`[^`]*`|\'(?:\\.|[^\'\\\n])*\'',
    "cpp": rb'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'',
    "java": rb'""".*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'',
    "javascript": rb'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|`(?:\\.|[^`\\])*`',
    "php": rb'<<<\s*[\'"]?(\w+)[\'"]?\n.*?\n\s*\1\b|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'',
    "ruby": rb'%[wiWIqQ]?(?:\([^)]*\)|\[[^\]]*\]|\{[^}]*\})|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'',
}
_TEXTS["typescript"] = _TEXTS["javascript"]
_TEXTS["c"] = _TEXTS["cpp"]
_WORD = {
    "javascript": rb"#?[A-Za-z_$][\w$]*",
    "typescript": rb"#?[A-Za-z_$][\w$]*",
    "php": rb"\$?[A-Za-z_]\w*",
    "ruby": rb"(?:@{0,2}|\$)[A-Za-z_]\w*[?!]?(?!=)|[A-Za-z_]\w*",
}
_OPERATORS = (
    rb"<=>|===|!==|>>>=?|<<=|>>=|\*\*=|\.\.\.|&&=|\|\|=|\?\?=|->\*|::|->|=>|=~|!~|\+\+|--|&&|\|\||\?\?|\?\.|<<|>>"
    rb"|[<>=!+\-*/%&|^:]=|\.\.|[\[\](){}<>;,.:?=+\-*/%&|^~!@\\]"
)
_NUMBER = rb"0[xX][\da-fA-F_]+\w*|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?\w*"
# Before a regular expression there is no value.
_REGEX = rb"/(?![*/ ])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[a-z]*"
_REGEX_LANGUAGES = ("javascript", "typescript", "ruby")
_VALUE_WORDS = {b"return", b"typeof", b"case", b"in", b"if", b"unless", b"and", b"or", b"when"}
_HEREDOC = re.compile(rb"<<[~-]?(['\"]?)([A-Z_]\w*)\1")


class SourceToken(NamedTuple):
    """Token of a source.

    Attributes:
      kind: "word", "number", "text" or "op".
      text: content.
      start, end: offsets, in bytes.
      line: number of its line, from 0.
    """

    kind: str
    text: bytes
    start: int
    end: int
    line: int


def split_tokens(source: bytes, language: str) -> list[SourceToken]:
    """Returns the tokens of a source, without comments and lines of a preprocessor."""
    return list(_tokens(source, language))


def _tokens(source: bytes, language: str) -> Iterator[SourceToken]:
    pattern = _pattern(language)
    position, line, previous = _first(source, language), 0, None
    heredocs: list[bytes] = []
    while position < len(source):
        match = pattern.match(source, position)
        if match is None:  # a byte of another language
            position += 1
            continue
        kind, text = match.lastgroup or "", match[0]
        if kind == "regex" and not _begins_value(previous):
            kind, text = "op", b"/="[: 1 + source.startswith(b"=", position + 1)]
        if kind == "close":  # PHP's end of code
            opening = source.find(b"<?php", position)
            text = source[position : len(source) if opening < 0 else opening + 5]
        if kind in ("word", "number", "text", "op", "regex"):
            previous = SourceToken("text" if kind == "regex" else kind, text, position, position + len(text), line)  # fmt: skip
            yield previous
        position += len(text)
        if kind == "heredoc":
            named = _HEREDOC.match(text)
            heredocs.append(named[2] if named else b"")
        if kind == "newline" and heredocs:
            for name in heredocs:
                end = re.compile(rb"^[ \t]*" + name + rb"$", re.MULTILINE).search(source, position)
                stop = end.end() if end else len(source)
                text += source[position:stop]
                position = stop
            heredocs = []
        line += text.count(b"\n")


@functools.cache
def _pattern(language: str) -> re.Pattern[bytes]:
    # Groups of a text are numbered from 1, because it comes first.
    parts = [rb"(?P<text>" + _shifted(_TEXTS[language]) + rb")"]
    if language in ("c", "cpp"):
        parts += [rb"(?P<directive>(?<![^\n])[ \t]*#(?:\\\r?\n|[^\n])*)"]
    if language == "ruby":
        parts += [rb"(?P<block>(?<![^\n])=begin\b.*?\n=end\b[^\n]*|(?<![^\n])__END__\n.*)"]
        parts += [rb"(?P<heredoc><<[~-]?['\"]?[A-Z_]\w*['\"]?)"]
    else:
        parts += [rb"(?P<block>/\*.*?\*/)"]
    if language == "php":
        parts += [rb"(?P<close>\?>)"]
    parts += [rb"(?P<newline>\n)", rb"(?P<space>[ \t\r\f]+)"]
    parts += [rb"(?P<comment>(?:" + _LINE_COMMENTS.get(language, rb"//") + rb")[^\n]*)"]
    if language in _REGEX_LANGUAGES:
        parts += [rb"(?P<regex>" + _REGEX + rb")"]
    word = _WORD.get(language, rb"[A-Za-z_]\w*")
    parts += [rb"(?P<word>" + word + rb")", rb"(?P<number>" + _NUMBER + rb")"]
    parts += [rb"(?P<op>" + _OPERATORS + rb")"]
    return re.compile(b"|".join(parts), re.DOTALL)


def _shifted(text: bytes) -> bytes:
    """Returns a pattern whose only group is the second one of the pattern that holds it."""
    return text.replace(rb"\1", rb"\2")


def _first(source: bytes, language: str) -> int:
    """Returns where code begins, which in PHP is after `<?php`."""
    if language != "php":
        return 0
    opening = source.find(b"<?php")
    return len(source) if opening < 0 else opening + 5


def _begins_value(previous: SourceToken | None) -> bool:
    if previous is None:
        return True
    if previous.kind == "word":
        return previous.text in _VALUE_WORDS
    return previous.kind == "op" and previous.text not in (b")", b"]", b"}")
