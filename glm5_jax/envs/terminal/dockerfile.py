"""Dockerfiles, as far as they are built here: FROM, WORKDIR, ENV, ARG, COPY, RUN, USER.

Anything else is refused by its name and line.
"""

import dataclasses
import json
import re
import shlex

KNOWN = ("FROM", "WORKDIR", "ENV", "ARG", "COPY", "RUN", "USER")
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
_VARIABLE = re.compile(
    r"\\\$|\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<kind>:?[-+])(?P<word>[^{}]*))?\})"
)
_HERE = re.compile(r"(?<!<)<<-?['\"]?[A-Za-z_]")
_FLAGS = {"COPY": ("chown", "chmod"), "FROM": ("platform",)}


class DockerfileError(ValueError):
    """What in a Dockerfile is wrong, or not built here."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile.

    text: what follows its name and flags. arguments: the list, where that is written as JSON.
    """

    name: str
    line: int
    text: str
    flags: dict[str, str]
    arguments: tuple[str, ...] | None


def parse(text: str) -> list[Instruction]:
    """The instructions in their order, the first FROM behind nothing but ARG; DockerfileError."""
    found = [_instruction(line, text) for line, text in _logical_lines(text)]
    froms = [item for item in found if item.name == "FROM"]
    if not froms:
        raise DockerfileError("it has no FROM")
    if len(froms) > 1:
        raise DockerfileError(f"line {froms[1].line}: FROM: several stages are not supported")
    for item in found[: found.index(froms[0])]:
        if item.name != "ARG":
            raise DockerfileError(f"line {item.line}: {item.name} stands before FROM")
    return found


def substitute(text: str, variables: dict[str, str]) -> str:
    """The text with $NAME, ${NAME}, ${NAME:-word} and ${NAME:+word} replaced."""

    def value(found: re.Match) -> str:
        if found[0] == r"\$":
            return "$"
        name, kind, word = found["plain"] or found["name"], found["kind"], found["word"]
        known = variables.get(name)
        given = known is not None if kind in ("-", "+") else bool(known)
        if kind in (":-", "-"):
            return known if given else word
        if kind in (":+", "+"):
            return word if given else ""
        return known or ""

    return _VARIABLE.sub(value, text)


def pairs(item: Instruction) -> dict[str, str]:
    """Names and values, not yet substituted, of ENV; of its old form with one name too."""
    try:
        words = shlex.split(item.text.replace("\\$", "\\\\$"))
    except ValueError as error:
        raise DockerfileError(f"line {item.line}: {item.name}: {error}") from None
    if words and all("=" in word for word in words):
        return dict(word.split("=", 1) for word in words)
    name, _, value = item.text.partition(" ")
    if not value.strip() or "=" in name:
        raise DockerfileError(f"line {item.line}: {item.name} {item.text}: no name and value")
    return {name: value.strip()}


def _logical_lines(text: str):
    """(number of its first line, text) of each instruction, with its continuations joined."""
    lines = text.splitlines()
    start, parts, head = 0, [], True
    for number, line in enumerate(lines, 1):
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
        yield start, "".join((*parts, line)).strip()
        start, parts = 0, []
    if parts:
        yield start, "".join(parts).strip()


def _instruction(line: int, text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    name, rest = name.upper(), rest.strip()
    if name not in KNOWN:
        raise DockerfileError(f"line {line}: {name} is not supported; known are {', '.join(KNOWN)}")
    flags = {}
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        key, _, value = flag[2:].partition("=")
        if key not in _FLAGS.get(name, ()):
            raise DockerfileError(f"line {line}: {name} --{key} is not supported")
        flags[key], rest = value, rest.strip()
    if not rest:
        raise DockerfileError(f"line {line}: {name} has no argument")
    if name in ("RUN", "COPY") and _HERE.search(rest):
        raise DockerfileError(f"line {line}: {name} <<: here-documents are not supported")
    arguments = None
    if name in ("RUN", "COPY") and rest.startswith("["):
        try:
            arguments = tuple(json.loads(rest))
        except ValueError:  # a shell's text, as Docker takes it
            arguments = None
        if arguments is not None and not all(isinstance(word, str) for word in arguments):
            raise DockerfileError(f"line {line}: {name} {rest}: a list must be of texts")
    return Instruction(name, line, rest, flags, arguments)
