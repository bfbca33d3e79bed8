"""Parses Dockerfiles with FROM, WORKDIR, ENV, ARG, COPY, RUN and USER.

Instructions that do not change an image (CMD, LABEL, ...) are ignored. Any other raises an error with its
name and line.
"""

import dataclasses
import json
import re
from collections.abc import Mapping

KNOWN = ("FROM", "WORKDIR", "ENV", "ARG", "COPY", "RUN", "USER")
IGNORED = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL")
IGNORED += ("VOLUME",)
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPERATOR = re.compile(r":?[-+?]")
_HERE_DOCUMENT = re.compile(r"""(?:^|\s)\d*<<(-?)(["']?)([A-Za-z_][\w.-]*)\2(?=[\s;|&>)]|$)""")
_FLAGS = {"COPY": ("chown", "chmod"), "FROM": ("platform",)}


class DockerfileError(ValueError):
    """Raised for something in a Dockerfile that is wrong or not supported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DockerInstruction:
    """Instruction of a Dockerfile.

    Attributes:
      name: name in capitals.
      line: number of its first line.
      text: text after its name and flags, without here-documents.
      flags: values of its flags.
      arguments: list if the text is one in JSON, else None.
      documents: remaining lines that belong to it, with their here-documents.
    """

    name: str
    line: int
    text: str
    flags: dict[str, str]
    arguments: tuple[str, ...] | None
    documents: str = ""

    def files(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns the here-documents of a COPY by name, with variables replaced unless the name is in quotes."""
        files, lines = {}, iter(self.documents.splitlines())
        for match in _HERE_DOCUMENT.finditer(self.text):
            part = []
            for line in lines:
                line = line.lstrip("\t") if match[1] else line
                if line == match[3]:
                    break
                part.append(line if match[2] else _expand(line, variables))
            files[match[3]] = "".join(f"{line}\n" for line in part)
        return files

    @property
    def script(self) -> str:
        """Returns the text that a shell runs: for `RUN <<EOF` the document itself."""
        if not self.documents:
            return self.text
        match = _HERE_DOCUMENT.fullmatch(self.text)
        if match is None:
            return f"{self.text}\n{self.documents}\n"
        lines = self.documents.splitlines()[:-1]
        return "\n".join(line.lstrip("\t") if match[1] else line for line in lines) + "\n"


def parse(text: str) -> list[DockerInstruction]:
    """Returns the instructions in order, the first FROM preceded only by ARG. Raises DockerfileError."""
    lines = _logical_lines(text.removeprefix("\ufeff"))
    items = [item for line in lines if (item := _instruction(*line)) is not None]
    froms = [item for item in items if item.name == "FROM"]
    if not froms:
        raise DockerfileError("it has no FROM")
    if len(froms) > 1:
        raise DockerfileError(f"line {froms[1].line}: FROM: several stages are not supported")
    for item in items[: items.index(froms[0])]:
        if item.name != "ARG":
            raise DockerfileError(f"line {item.line}: {item.name} must come after FROM")
    return items


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Returns the text as one word, with variables replaced outside of single quotes, then quotes and
    backslashes removed.

    Variables are $NAME, ${NAME} and ${NAME:-word} with `-`, `+` and `?`, with a colon or without. Raises
    DockerfileError.
    """
    return _Text(text, variables).word(stops="")


def words(text: str, variables: Mapping[str, str]) -> list[str]:
    """Returns the words of a text, split at white space outside of quotes, each as by `substitute`."""
    reader, result = _Text(text, variables), []
    while not reader.skip_blank():
        result.append(reader.word(stops=" \t"))
    return result


def _expand(line: str, variables: Mapping[str, str]) -> str:
    """Returns a line of a here-document with variables replaced; quotes and backslashes stay, as in BuildKit."""
    literal = re.sub(r"\\(.?)|[\"']", lambda m: "\\" + m[0].replace("\\", "\\\\", 1), line)
    return substitute(literal, variables)


class _Text:
    """Reader of a text of a Dockerfile."""

    def __init__(self, text: str, variables: Mapping[str, str]):
        self._text, self._variables, self._at = text, variables, 0

    def skip_blank(self) -> bool:
        """Skips white space; returns whether nothing is left."""
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        return self._at >= len(self._text)

    def word(self, stops: str) -> str:
        """Returns the text up to one of the stop characters outside of quotes."""
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
        match = _NAME.match(self._text, self._at)
        if match is None:
            if is_braced:
                raise DockerfileError(f"{self._text}: ${{ needs a name after it")
            return "$"
        self._at = match.end()
        value = self._variables.get(match[0])
        if not is_braced:
            return value or ""
        kind = _OPERATOR.match(self._text, self._at)
        word = ""
        if kind is not None:
            self._at = kind.end()
            word = self.word(stops="}")
        if self._take() != "}":
            raise DockerfileError(
                f"{self._text}: ${{{match[0]} has no end, or a form that is not supported"
            )
        return self._choose(match[0], value, kind[0] if kind else "", word)

    def _choose(self, name: str, value: str | None, kind: str, word: str) -> str:
        is_set = bool(value) if kind.startswith(":") else value is not None
        if kind.endswith("+"):
            return word if is_set else ""
        if kind.endswith("?") and not is_set:
            raise DockerfileError(f"{name}: {word or 'it is not set'}")
        return word if kind and not is_set else value or ""


def pairs(item: DockerInstruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns names and values of ENV, also of its old form with one name."""
    where = f"line {item.line}: {item.name}"
    try:
        name, _, value = item.text.replace("\t", " ").partition(" ")
        if "=" not in name:
            if not value.strip():
                raise DockerfileError(f"{item.text}: no name and value")
            return {name: substitute(item.text[len(name) :].strip(), variables)}
        assignments = words(item.text, variables)
        if missing := [word for word in assignments if "=" not in word]:
            raise DockerfileError(f"{item.text}: no = in {missing[0]}")
        return dict(word.split("=", 1) for word in assignments)
    except DockerfileError as error:
        raise DockerfileError(f"{where} {error}") from None


def _logical_lines(text: str):
    """Yields (number of the first line, text, lines of here-documents) of each instruction, with continuations
    joined.
    """
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
    """Returns the last line number of the here-documents of an instruction that ends in line `number`."""
    name = text.split(None, 1)[0].upper()
    if name not in ("RUN", "COPY"):
        return number
    at = number
    for match in _HERE_DOCUMENT.finditer(text):
        while at < len(lines):
            at += 1
            if (lines[at - 1].lstrip("\t") if match[1] else lines[at - 1]) == match[3]:
                break
        else:
            if name == "COPY":
                raise DockerfileError(f"line {number}: COPY <<{match[3]} has no end")
            return number  # << is part of a shell text
    return at


def _instruction(line: int, text: str, documents: str) -> DockerInstruction | None:
    """Returns the instruction, or None if it does not change an image."""
    name, *rest = text.split(None, 1)
    name, rest = name.upper(), "".join(rest).strip()
    if name in IGNORED:
        return None
    if name not in KNOWN:
        shown = name if name.isprintable() and name.isascii() else ascii(name)
        raise DockerfileError(
            f"line {line}: {shown} is not supported; known are {', '.join(KNOWN)}"
        )
    # Flags.
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
    # Arguments in JSON.
    arguments = None
    if name in ("RUN", "COPY") and rest.startswith("["):
        try:
            arguments = tuple(json.loads(rest))
        except ValueError:  # a shell text, as in Docker
            arguments = None
        if arguments is not None and not all(isinstance(word, str) for word in arguments):
            raise DockerfileError(f"line {line}: {name} {rest}: a list must be of texts")
    return DockerInstruction(
        name=name, line=line, text=rest, flags=flags, arguments=arguments, documents=documents
    )
