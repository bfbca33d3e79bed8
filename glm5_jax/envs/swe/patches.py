"""Parses unified diffs without loss, and splits them by kind of file.

A diff of git, of `diff -ru` or of a Debian package is read as a list of files with hunks. Every byte of a file's diff is
kept, so that a part of a patch applies where the patch does: lines end at "\\n" only, and carriage returns, form feeds
and missing line ends stay as they are. Text before and between files, such as the header of a mail, is dropped.

The parser is our own since `unidiff` (1.0.1) drops the content of binary hunks, so its output does not apply.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable

from glm5_jax.envs.swe.paths import Kind, classify_path

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*\n?)")
_EXTENDED = re.compile(
    r"(?:old mode|new mode|deleted file mode|new file mode|copy from|copy to|rename from|rename to|similarity index"
    r"|dissimilarity index|index) .*\n?"
)
_GIT = re.compile(r'diff --git (?:"?a/.*"? )"?b/.*"?\n?')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_ESCAPE = re.compile(rb"\\([abfnrtv\\\"]|[0-7]{3})")
_ESCAPES = {b"a": 7, b"b": 8, b"f": 12, b"n": 10, b"r": 13, b"t": 9, b"v": 11, b"\\": 92, b'"': 34}
_OPPOSITE = {" ": " ", "+": "-", "-": "+"}


class PatchError(ValueError):
    """Raised for a diff that is malformed or cannot be edited as asked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hunk:
    """Hunk of a text file.

    Attributes:
      old_start, new_start: first line in the old and the new file, from 1; 0 of an empty file.
      section: text after the second `@@`, with its line end.
      lines: lines with their mark and their end; `\\ No newline at end of file` is a line of its own.
    """

    old_start: int
    new_start: int
    section: str
    lines: tuple[str, ...]

    def count(self, mark: str) -> int:
        """Returns the number of lines with this mark: " ", "+" or "-"."""
        return sum(line[0] == mark for line in self.lines)

    def __str__(self) -> str:
        old, new = self.count(" ") + self.count("-"), self.count(" ") + self.count("+")
        old_range = f"{self.old_start}" + (f",{old}" if old != 1 else "")
        new_range = f"{self.new_start}" + (f",{new}" if new != 1 else "")
        return f"@@ -{old_range} +{new_range} @@{self.section}" + "".join(self.lines)

    def reverse(self) -> "Hunk":
        """Returns the hunk that undoes this one."""
        lines: list[str] = []
        removed: list[str] = []
        added: list[str] = []
        target = lines
        for line in self.lines:
            if line[0] == "\\":
                target.append(line)
                continue
            if line[0] == " ":
                lines += removed + added
                removed, added, target = [], [], lines
            else:
                if line[0] == "-" and removed:  # a new block of changes without context before it
                    lines += removed + added
                    removed, added = [], []
                target = added if line[0] == "-" else removed
            target.append(_OPPOSITE[line[0]] + line[1:])
        return dataclasses.replace(
            self,
            old_start=self.new_start,
            new_start=self.old_start,
            lines=(*lines, *removed, *added),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePatch:
    """Diff of one file.

    Attributes:
      old_path, new_path: paths below the root of the tree; None: the file does not exist on this side.
      header: lines before the first hunk.
      hunks: hunks of text.
      binary: text of binary hunks, or the line that says that binary files differ; empty for text.
    """

    old_path: str | None
    new_path: str | None
    header: tuple[str, ...]
    hunks: tuple[Hunk, ...] = ()
    binary: str = ""

    @property
    def path(self) -> str:
        """Returns the path of the file after the patch, or before it if the patch deletes the file."""
        return self.new_path or self.old_path or ""

    @property
    def paths(self) -> set[str]:
        """Returns the paths that the patch touches: two of a renamed file."""
        return {path for path in (self.old_path, self.new_path) if path}

    def count(self, mark: str) -> int:
        """Returns the number of lines that are added ("+") or removed ("-")."""
        return sum(hunk.count(mark) for hunk in self.hunks)

    def __str__(self) -> str:
        return "".join(self.header) + "".join(map(str, self.hunks)) + self.binary


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchParts:
    """Parts of a patch by kind of file, each a patch or empty.

    Attributes:
      code: part that an attempt must write.
      test: tests and their data.
      aux: documentation, change logs, lock files and CI, which are applied with the tests.
    """

    code: str
    test: str
    aux: str


def parse_patch(text: str) -> list[FilePatch]:
    """Returns the files of a diff. Raises PatchError that names the file and the line of what is malformed."""
    reader = _Reader(text)
    files = []
    while (file := reader.next_file()) is not None:
        files.append(file)
    if not files and text.strip():
        raise PatchError(f"no file of a diff begins in this text: {text.strip()[:60]!r}")
    return files


def render_patch(files: Iterable[FilePatch]) -> str:
    """Returns the text of a diff."""
    return "".join(map(str, files))


def split_patch(text: str, classify: Callable[[str], Kind] = classify_path) -> PatchParts:
    """Splits a diff by the kind of its files. A renamed file is a test if either path is."""
    parts: dict[Kind, list[FilePatch]] = {"code": [], "test": [], "aux": []}
    for file in parse_patch(text):
        kinds = {classify(path) for path in file.paths}
        kind: Kind = next(kind for kind in ("test", "code", "aux") if kind in kinds)
        parts[kind].append(file)
    return PatchParts(**{kind: render_patch(files) for kind, files in parts.items()})


class _Reader:
    """Position in the lines of a diff."""

    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.lines = [line + "\n" for line in self.lines[:-1]] + (
            [self.lines[-1]] if self.lines[-1] else []
        )
        self.at = 0

    def peek(self, offset: int = 0) -> str:
        """Returns a line ahead; empty after the end."""
        return self.lines[self.at + offset] if self.at + offset < len(self.lines) else ""

    def next_file(self) -> FilePatch | None:
        """Reads up to the end of the next file; None if there is no other."""
        while self.at < len(self.lines):
            if _GIT.fullmatch(self.peek()) or self._is_plain_header():
                return self._read_file()
            self.at += 1
        return None

    def _is_plain_header(self) -> bool:
        is_header = self.peek().startswith("--- ") and self.peek(1).startswith("+++ ")
        return is_header and self.peek(2).startswith("@@ ")

    def _read_file(self) -> FilePatch:
        header: list[str] = []
        old = new = None
        is_git = bool(_GIT.fullmatch(self.peek()))
        if is_git:
            header.append(self._take())
            old, new = read_git_paths(header[0])
            while _EXTENDED.fullmatch(self.peek()):
                header.append(self._take())
            old, new = _extended_paths(header, old, new)
        if self.peek().startswith("--- ") and self.peek(1).startswith("+++ "):
            header += [self._take(), self._take()]
            old = _path(header[-2][4:], is_git or header[-2].startswith("--- a/"))
            new = _path(header[-1][4:], is_git or header[-1].startswith("+++ b/"))
        path = new or old or "?"
        hunks: list[Hunk] = []
        while self.peek().startswith("@@ "):
            hunks.append(self._read_hunk(path))
        return FilePatch(
            old_path=old,
            new_path=new,
            header=tuple(header),
            hunks=tuple(hunks),
            binary=self._read_binary() if is_git else "",
        )

    def _read_hunk(self, path: str) -> Hunk:
        start = self.at
        match = _HUNK.fullmatch(self._take())
        if match is None:
            raise PatchError(f"line {start + 1}: the range of a hunk of {path} is malformed")
        old, new = int(match[2] or 1), int(match[4] or 1)
        lines: list[str] = []
        while old > 0 or new > 0 or self.peek().startswith("\\ "):
            line = self.peek()
            if line == "\n":  # mail programs strip the blank of an empty line of context
                line = " \n"
            mark = line[:1]
            if mark not in (" ", "+", "-", "\\"):
                raise PatchError(
                    f"line {self.at + 1}: a hunk of {path} ends {max(old, new)} lines early"
                )
            self.at += 1
            lines.append(line)
            old -= mark in " -"
            new -= mark in " +"
        if old < 0 or new < 0:
            raise PatchError(f"line {start + 1}: a hunk of {path} has more lines than its range")
        return Hunk(
            old_start=int(match[1]), new_start=int(match[3]), section=match[5], lines=tuple(lines)
        )

    def _read_binary(self) -> str:
        if self.peek().startswith("Binary files "):
            return self._take()
        if self.peek() != "GIT binary patch\n":
            return ""
        lines = [self._take()]
        while self.at < len(self.lines) and not _GIT.fullmatch(self.peek()):
            if self.peek().startswith("-- "):  # signature of a mail
                break
            lines.append(self._take())
        return "".join(lines)

    def _take(self) -> str:
        line = self.peek()
        self.at += 1
        return line


def read_git_paths(line: str) -> tuple[str | None, str | None]:
    """Returns both paths of a `diff --git` line; (None, None) where blanks make them ambiguous."""
    text = line.removeprefix("diff --git ").rstrip("\n")
    if text.startswith('"'):
        end = _QUOTED.match(text)
        old, new = (end[0], text[end.end() + 1 :]) if end else (text, text)
        return _path(old, True), _path(new, True)
    # Without a rename both paths are equal, so the line divides in the middle.
    middle = len(text) // 2
    if text[middle : middle + 1] == " " and text[2:middle] == text[middle + 3 :]:
        return text[2:middle], text[middle + 3 :]
    old, _, new = text.partition(" b/")
    return old.removeprefix("a/"), new.strip('"')


def _extended_paths(header: list[str], old: str | None, new: str | None):
    """Returns both paths by the lines of git after the first one of a file."""
    for line in header[1:]:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word in ("rename", "copy"):
            side, _, path = rest.partition(" ")
            path = _unquote(path)
            old, new = (path, new) if side == "from" else (old, path)
        elif line.startswith("new file mode"):
            old = None
        elif line.startswith("deleted file mode"):
            new = None
    return old, new


def _path(text: str, has_prefix: bool) -> str | None:
    """Returns the path in a header line below the root of the tree; None for /dev/null.

    has_prefix: whether the first part is `a/` or `b/`. Other diffs have the name of a folder there.
    """
    text = text.rstrip("\n")
    quoted = _QUOTED.match(text)
    # A tab follows a name with blanks, and a time may follow any name.
    text = quoted[0] if quoted else text.partition("\t")[0].rstrip("\r")
    path = _unquote(text)
    if path == "/dev/null" or path.startswith("/dev/null "):
        return None
    first, slash, rest = path.partition("/")
    strips = first in ("a", "b") if has_prefix else bool(slash)
    return rest if slash and strips else path


def _unquote(path: str) -> str:
    """Returns a path without git's quotes and escapes."""
    if not (path.startswith('"') and path.endswith('"')):
        return path

    def byte(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([_ESCAPES[code] if code in _ESCAPES else int(code, 8) & 255])

    return _ESCAPE.sub(byte, path[1:-1].encode()).decode("utf-8", "replace")
