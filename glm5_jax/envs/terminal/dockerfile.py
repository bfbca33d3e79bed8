"""Dockerfiles, as far as they are built here: FROM, WORKDIR, ENV, ARG, COPY, RUN, USER.

What changes nothing of an image (CMD, LABEL, ...) is passed over. Anything else is refused by its name and line.
"""

import dataclasses
import json
import re
from collections.abc import Mapping

KNOWN = ("FROM", "WORKDIR", "ENV", "ARG", "COPY", "RUN", "USER")
PASSED_OVER = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL")
PASSED_OVER += ("VOLUME",)
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPERATOR = re.compile(r":?[-+?]")
_HERE = re.compile(r"""(?:^|\s)\d*<<(-?)(["']?)([A-Za-z_][\w.-]*)\2(?=[\s;|&>)]|$)""")
_FLAGS = {"COPY": ("chown", "chmod"), "FROM": ("platform",)}


class DockerfileError(ValueError):
    """What in a Dockerfile is wrong, or not built here."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile.

    Attributes:
      text: what follows its name and flags, without here-documents.
      arguments: the list, where that is written as JSON.
      documents: the rest of the lines that belong to it, with their here-documents.
    """

    name: str
    line: int
    text: str
    flags: dict[str, str]
    arguments: tuple[str, ...] | None
    documents: str = ""

    @property
    def script(self) -> str:
        """The text that a shell runs: of `RUN <<EOF` the document itself."""
        if not self.documents:
            return self.text
        found = _HERE.fullmatch(self.text)
        if found is None:
            return f"{self.text}\n{self.documents}\n"
        lines = self.documents.splitlines()[:-1]
        return "\n".join(line.lstrip("\t") if found[1] else line for line in lines) + "\n"


def parse(text: str) -> list[Instruction]:
    """The instructions in their order, the first FROM behind nothing but ARG; DockerfileError."""
    lines = _logical_lines(text.removeprefix("\ufeff"))
    found = [item for line in lines if (item := _instruction(*line)) is not None]
    froms = [item for item in found if item.name == "FROM"]
    if not froms:
        raise DockerfileError("it has no FROM")
    if len(froms) > 1:
        raise DockerfileError(f"line {froms[1].line}: FROM: several stages are not supported")
    for item in found[: found.index(froms[0])]:
        if item.name != "ARG":
            raise DockerfileError(f"line {item.line}: {item.name} stands before FROM")
    return found


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """The text as one word: variables replaced, but not within single quotes, then quotes and backslashes taken away.

    Of variables $NAME, ${NAME} and ${NAME:-word} with `-`, `+` and `?`, with a colon or without. DockerfileError.
    """
    return _Text(text, variables).word(stops="")


def words(text: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a text, parted at white space outside of quotes, each as of `substitute`."""
    reader, found = _Text(text, variables), []
    while not reader.skip_blank():
        found.append(reader.word(stops=" \t"))
    return found


class _Text:
    """A text of a Dockerfile that is being read."""

    def __init__(self, text: str, variables: Mapping[str, str]):
        self._text, self._variables, self._at = text, variables, 0

    def skip_blank(self) -> bool:
        """Whether there is nothing but white space left, which is skipped."""
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        return self._at >= len(self._text)

    def word(self, stops: str) -> str:
        """What there is up to one of the characters that end it, none of them in quotes."""
        parts = []
        while (letter := self._next()) and letter not in stops:
            self._at += 1
            if letter == "'":
                parts.append(self._up_to_quote())
            elif letter == '"':
                parts.append(self._quoted())
            elif letter == "\\":
                parts.append(self._take())
            elif letter == "$":
                parts.append(self._variable())
            else:
                parts.append(letter)
        return "".join(parts)

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        self._at += 1
        return self._text[self._at - 1 : self._at]

    def _up_to_quote(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise DockerfileError(f"{self._text}: a quote has no end")
        part, self._at = self._text[self._at : end], end + 1
        return part

    def _quoted(self) -> str:
        parts = []
        while (letter := self._take()) != '"':
            if not letter:
                raise DockerfileError(f"{self._text}: a quote has no end")
            if letter == "\\" and self._next() in ('"', "$", "\\"):
                letter = self._take()
            elif letter == "$":
                letter = self._variable()
            parts.append(letter)
        return "".join(parts)

    def _variable(self) -> str:
        is_braced = self._next() == "{"
        self._at += is_braced
        found = _NAME.match(self._text, self._at)
        if found is None:
            if is_braced:
                raise DockerfileError(f"{self._text}: ${{ has no name behind it")
            return "$"
        self._at = found.end()
        value = self._variables.get(found[0])
        if not is_braced:
            return value or ""
        kind = _OPERATOR.match(self._text, self._at)
        word = ""
        if kind is not None:
            self._at = kind.end()
            word = self.word(stops="}")
        if self._take() != "}":
            raise DockerfileError(
                f"{self._text}: ${{{found[0]} has no end, or is of a form unknown here"
            )
        return self._choose(found[0], value, kind[0] if kind else "", word)

    def _choose(self, name: str, value: str | None, kind: str, word: str) -> str:
        is_set = bool(value) if kind.startswith(":") else value is not None
        if kind.endswith("+"):
            return word if is_set else ""
        if kind.endswith("?") and not is_set:
            raise DockerfileError(f"{name}: {word or 'it is not set'}")
        return word if kind and not is_set else value or ""


def pairs(item: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Names and values of ENV; of its old form with one name too."""
    where = f"line {item.line}: {item.name}"
    try:
        name, _, value = item.text.replace("\t", " ").partition(" ")
        if "=" not in name:
            if not value.strip():
                raise DockerfileError(f"{item.text}: no name and value")
            return {name: substitute(item.text[len(name) :].strip(), variables)}
        found = words(item.text, variables)
        if missing := [word for word in found if "=" not in word]:
            raise DockerfileError(f"{item.text}: no = in {missing[0]}")
        return dict(word.split("=", 1) for word in found)
    except DockerfileError as error:
        raise DockerfileError(f"{where} {error}") from None


def _logical_lines(text: str):
    """(number of its first line, text, lines of here-documents) of each instruction, with its continuations joined."""
    lines = text.splitlines()
    start, parts, head, after = 0, [], True, 0
    for number, line in enumerate(lines, 1):
        if number <= after:
            continue
        stripped = line.strip()
        directive = _DIRECTIVE.fullmatch(stripped) if head else None
        if directive and directive[1].lower() == "escape" and directive[2] != "\\":
            raise DockerfileError(f"line {number}: escape={directive[2]} is not supported")
        head = head and directive is not None
        if stripped.startswith("#") or not stripped:
            continue
        start = start or number
        if stripped.endswith("\\"):
            parts.append(line.rstrip()[:-1])
            continue
        joined = "".join((*parts, line)).strip()
        after = _end_of_documents(joined, lines, number)
        yield start, joined, "\n".join(lines[number:after])
        start, parts = 0, []
    if parts:
        yield start, "".join(parts).strip(), ""


def _end_of_documents(text: str, lines: list[str], number: int) -> int:
    """The number of the last line of the here-documents of an instruction that ends in line `number`."""
    if text.split(None, 1)[0].upper() != "RUN":
        return number
    at = number
    for found in _HERE.finditer(text):
        while at < len(lines):
            at += 1
            if (lines[at - 1].lstrip("\t") if found[1] else lines[at - 1]) == found[3]:
                break
        else:  # << in a text of the shell's
            return number
    return at


def _instruction(line: int, text: str, documents: str) -> Instruction | None:
    """The instruction, or None if it changes nothing of an image."""
    name, *rest = text.split(None, 1)
    name, rest = name.upper(), "".join(rest).strip()
    if name in PASSED_OVER:
        return None
    if name not in KNOWN:
        shown = name if name.isprintable() and name.isascii() else ascii(name)
        raise DockerfileError(
            f"line {line}: {shown} is not supported; known are {', '.join(KNOWN)}"
        )
    flags = {}
    while rest.startswith("--"):
        flag, *after = rest.split(None, 1)
        rest = "".join(after)
        key, _, value = flag[2:].partition("=")
        if key not in _FLAGS.get(name, ()):
            raise DockerfileError(f"line {line}: {name} --{key} is not supported")
        flags[key], rest = value, rest.strip()
    if not rest:
        raise DockerfileError(f"line {line}: {name} has no argument")
    if name == "COPY" and _HERE.search(rest):
        raise DockerfileError(f"line {line}: {name} <<: here-documents are not supported")
    arguments = None
    if name in ("RUN", "COPY") and rest.startswith("["):
        try:
            arguments = tuple(json.loads(rest))
        except ValueError:  # a shell's text, as Docker takes it
            arguments = None
        if arguments is not None and not all(isinstance(word, str) for word in arguments):
            raise DockerfileError(f"line {line}: {name} {rest}: a list must be of texts")
    return Instruction(name, line, rest, flags, arguments, documents)
