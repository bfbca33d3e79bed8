"""Documents on disk as random-access sources: `len(source)` texts, `source[i]` a str.

A source reads nothing but its index until a document is asked for, apart from `passages` and
`parquet`, whose text is held in memory; corpora beyond memory belong in jsonl or array_record.
Reads are thread-safe and deterministic, as Grain asks of its sources. What a file holds in place of
text is a ValueError that names the file and the place.
"""

import dataclasses
import glob
import hashlib
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Sequence
from typing import Protocol

import grain
import numpy as np

ASSETS = pathlib.Path(__file__).parent / "assets"
SHAKESPEARE = ASSETS / "tinyshakespeare.txt"

# Neither prose nor programs (tables, generated text), or not part of the library.
STDLIB_SKIPPED = frozenset(
    "test tests idle_test site-packages dist-packages encodings pydoc_data __pycache__".split()
)
STDLIB_MAX_BYTES = 256 * 1024
PASSAGE_LENGTH = 4096  # characters
FINGERPRINT_DOCUMENTS = 256  # read at every start
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a pair, as JSON escapes it


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of a mixture.

    Attributes:
      kind: "text" (a document per file), "passages" (files cut at blank lines into documents of
        about 4096 characters), "jsonl", "parquet", "array_record", "shakespeare" (shipped,
        passages) or "stdlib" (the running Python's standard library, a document per file).
      path: a file or a glob (`**` goes into folders); empty for the last two kinds.
      field: the text's key in a jsonl or array_record object, or its parquet column. An
        array_record with an empty field holds bare UTF-8 text.
      weight: the source's share of the rows, relative to the other sources.
    """

    kind: str
    path: str = ""
    field: str = "text"
    weight: float = 1.0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"source kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        if self.kind in SHIPPED and self.path:
            raise ValueError(f"source {self.kind!r} takes no path, but path is {self.path!r}")
        if self.kind not in SHIPPED and not self.path:
            raise ValueError(f"source {self.kind!r} needs a path")
        if not self.weight > 0:
            raise ValueError(
                f"the weight of source {self.name!r} is {self.weight}; make it positive"
            )

    @property
    def name(self) -> str:
        """How messages and metrics call the source."""
        return f"{self.kind}:{self.path}" if self.path else self.kind


class Source(Protocol):
    """Documents by number; satisfies Grain's `RandomAccessDataSource`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...


class TextFiles:
    """A document per file, in the order given."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        path = self._paths[index]
        return _decode(path.read_bytes(), path)


class Passages:
    """Files cut at blank lines; neighbouring paragraphs share a document (`PASSAGE_LENGTH`)."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._texts = []
        for path in paths:
            self._texts += _passages(_decode(path.read_bytes(), path))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> str:
        return self._texts[index]


class JsonLines:
    """A document per line: the string at `field` of a JSON object. Empty lines are skipped.

    A line that holds no text is a ValueError with its number. Opening parses only the lines that
    look odd, since parsing all takes five times as long as the index; the rest wait until they are
    read.
    """

    def __init__(self, paths: Sequence[pathlib.Path], field: str):
        self._paths, self._field = list(paths), field
        key = json.dumps(field, ensure_ascii=False).encode()
        lines = []  # file number, line number, offset, size
        for number, path in enumerate(self._paths):
            offset = 0
            with open(path, "rb") as file:
                for line_number, line in enumerate(file, start=1):
                    if line.strip():
                        lines.append((number, line_number, offset, len(line)))
                        if _looks_odd(line, key):
                            _field(line, field, f"{path}, line {line_number}")
                    offset += len(line)
        self._lines = np.array(lines, np.int64).reshape(-1, 4)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> str:
        number, line_number, offset, size = self._lines[index].tolist()
        with open(self._paths[number], "rb") as file:
            file.seek(offset)
            line = file.read(size)
        return _field(line, self._field, f"{self._paths[number]}, line {line_number}")


class Parquet:
    """A document per row: the string column `field`. The column is held in memory."""

    def __init__(self, paths: Sequence[pathlib.Path], field: str):
        import pyarrow  # slow to import, and only this kind needs it
        import pyarrow.parquet

        columns = []
        for path in paths:
            schema = pyarrow.parquet.read_schema(path)
            if field not in schema.names:
                raise ValueError(f"{path} has no column {field!r}; it has {schema.names}")
            if str(schema.field(field).type) not in ("string", "large_string"):
                raise ValueError(
                    f"column {field!r} of {path} is {schema.field(field).type}; it must be string"
                )
            column = pyarrow.parquet.read_table(path, columns=[field])[field]
            if column.null_count:
                raise ValueError(
                    f"column {field!r} of {path} has {column.null_count} empty entries"
                )
            try:
                column.validate(full=True)
            except pyarrow.ArrowInvalid as error:
                raise ValueError(
                    f"column {field!r} of {path} is not UTF-8: {error}; convert it to UTF-8"
                ) from error
            columns += column.cast(pyarrow.large_string()).chunks
        self._column = pyarrow.chunked_array(columns, pyarrow.large_string())

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> str:
        return self._column[int(index)].as_py()


class ArrayRecords:
    """A document per record: UTF-8 text, or the string at `field` of a JSON object."""

    def __init__(self, paths: Sequence[pathlib.Path], field: str):
        self._name, self._field = ", ".join(map(str, paths)), field
        self._records = grain.sources.ArrayRecordDataSource([str(path) for path in paths])

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> str:
        record, where = self._records[index], f"record {index} of {self._name}"
        return _field(record, self._field, where) if self._field else _decode(record, where)


def open_source(config: SourceConfig) -> Source:
    """Opens a source.

    Raises ValueError naming the path if no file matches or there is no document in them.
    """
    if config.kind == "stdlib":
        paths = stdlib_paths()
    elif config.kind == "shakespeare":
        paths = [SHAKESPEARE]
    else:
        matches = sorted(glob.glob(os.path.expanduser(config.path), recursive=True))
        paths = [path for path in map(pathlib.Path, matches) if path.is_file()]
    if not paths:
        raise ValueError(f"source {config.name!r}: no file matches; give a file or a glob")
    try:
        source = KINDS[config.kind](paths, config)
    except ValueError as error:
        raise ValueError(f"source {config.name!r}: {error}") from error
    if not len(source):
        raise ValueError(f"source {config.name!r}: {len(paths)} file(s), but no document in them")
    return source


def stdlib_paths() -> list[pathlib.Path]:
    """Python files of the running interpreter's standard library, sorted by their relative path.

    Without tests, installed packages, code tables, empty files and files above 256 KiB.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        generated = parts[-1].startswith("_sysconfigdata")
        if STDLIB_SKIPPED.isdisjoint(parts) and not generated:
            if 0 < path.stat().st_size <= STDLIB_MAX_BYTES:
                paths.append(path)
    return paths


def held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out split, decided by a hash of its text alone.

    So the split is the same on every machine, does not move when documents are added, and copies
    of one document never stand on both sides.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def fingerprint(source: Source) -> str:
    """What tells a source from another: its number of documents, and a hash of the texts of at most
    `FINGERPRINT_DOCUMENTS` of them, evenly spaced. The same on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    count = min(len(source), FINGERPRINT_DOCUMENTS)
    for number in range(count):
        text = source[number * (len(source) - 1) // max(1, count - 1)]
        digest.update(hashlib.blake2b(text.encode("utf-8")).digest())
    return f"{len(source)} documents {digest.hexdigest()}"


def _decode(content: bytes, where: object) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte {content[error.start]:#04x} at offset {error.start}; "
            "convert the file to UTF-8"
        ) from error


def _looks_odd(line: bytes, key: bytes) -> bool:
    """Whether a line may lack the text at a key, as far as can be told without parsing it."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return True
    stripped = line.strip()
    whole = stripped.startswith(b"{") and stripped.endswith(b"}")
    return not whole or key not in line or SURROGATE.search(line) is not None


def _field(content: bytes, field: str, where: str) -> str:
    text = _decode(content, where)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}; correct or remove it") from error
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        have = list(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(
            f"{where} has no string at {field!r}; it has {have}; "
            "correct or remove it, or name the text's key in the source's field"
        )
    try:
        value[field].encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds half of a surrogate pair, character {error.start} of {field!r}; "
            "correct or remove it"
        ) from error
    return value[field]


def _passages(text: str) -> list[str]:
    """Cuts at blank lines; joined, the passages are the text again."""
    passages, current = [], ""
    for paragraph in text.split("\n\n"):
        if current and len(current) + len(paragraph) > PASSAGE_LENGTH:
            passages.append(current)
            current = ""
        current += paragraph + "\n\n"
    passages.append(current[: -len("\n\n")])
    return [passage for passage in passages if passage.strip()]


SHIPPED = ("shakespeare", "stdlib")
KINDS = {
    "text": lambda paths, config: TextFiles(paths),
    "passages": lambda paths, config: Passages(paths),
    "jsonl": lambda paths, config: JsonLines(paths, config.field),
    "parquet": lambda paths, config: Parquet(paths, config.field),
    "array_record": lambda paths, config: ArrayRecords(paths, config.field),
    "shakespeare": lambda paths, config: Passages(paths),
    "stdlib": lambda paths, config: TextFiles(paths),
}
