"""Documents on disk as random-access sources: `len(source)` documents, `source[i]` one of them.

A source reads nothing but its index until a document is asked for, apart from `passages` and
`parquet`, whose text is held in memory, and interleaved ones, which read every document to compare
them; corpora beyond memory belong in jsonl or array_record.
Reads are thread-safe and deterministic, as Grain asks of its sources. What a file holds in place of
text is a ValueError that names the file and the place.
"""

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Sequence
from typing import Protocol

import grain
import numpy as np

from glm5_jax.data.document import (
    AsDocuments,
    AsTexts,
    Books,
    Document,
    Repositories,
    decode,
    passages,
    read_text,
)
from glm5_jax.data.interleave import InterleaveConfig, Interleaved
from glm5_jax.data.record import TokenRecord

ASSETS = pathlib.Path(__file__).parent / "assets"
SHAKESPEARE = ASSETS / "tinyshakespeare.txt"

# Neither prose nor programs (tables, generated text), or not part of the library.
STDLIB_SKIPPED = frozenset(
    "test tests idle_test site-packages dist-packages encodings pydoc_data __pycache__".split()
)
STDLIB_MAX_BYTES = 256 * 1024
FINGERPRINT_DOCUMENTS = 256  # read at every start
FINGERPRINT_RECORDS = 4  # made at every start, which takes longer
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a pair, as JSON escapes it


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of a mixture.

    Attributes:
      kind: "text" (a document per file), "passages" (files cut at blank lines into documents of
        about 4096 characters), "books" (the same files whole), "repositories" (a document per
        folder or file that stands directly in the path's fixed folder, the part before the first
        `*`: its files one after the other), "jsonl", "parquet", "array_record"; or what is there
        already: "shakespeare" (passages), "shakespeare_book" (the same text whole), "stdlib" (the
        running Python's standard library, a document per file) and "stdlib_packages" (a document
        per package).
      path: a file or a glob (`**` goes into folders); empty for the last four kinds.
      field: the text's key in a jsonl or array_record object, or its parquet column. An
        array_record with an empty field holds bare UTF-8 text.
      weight: the source's share of the rows, relative to the other sources.
      min_characters, max_characters: takes documents of at least, and of fewer than, so many
        characters, what is held out of them counted; None for no upper limit. The same texts may
        make two sources, a long and a short one (long_context.py).
      interleave: puts similar documents into one (interleave.py); None leaves each by itself.
    """

    kind: str
    path: str = ""
    field: str = "text"
    weight: float = 1.0
    min_characters: int = 0
    max_characters: int | None = None
    interleave: InterleaveConfig | None = None

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
        if not 0 <= self.min_characters < self._most:
            raise ValueError(
                f"source {self.name!r} takes documents from min_characters {self.min_characters} to "
                f"below max_characters {self.max_characters}; make the first not negative and the "
                "second larger, or None"
            )

    @property
    def name(self) -> str:
        """How messages and metrics call the source."""
        name = f"{self.kind}:{self.path}" if self.path else self.kind
        if self.min_characters or self.max_characters is not None:
            name += f"[{self.min_characters}:{self.max_characters}]"
        return f"interleaved:{name}" if self.interleave else name

    def fits(self, document: Document) -> bool:
        """Whether a document has the length that is asked for."""
        return self.min_characters <= document.num_characters < self._most

    @property
    def _most(self) -> float:
        return float("inf") if self.max_characters is None else self.max_characters


class Source(Protocol):
    """Texts by number; satisfies Grain's `RandomAccessDataSource`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...


class TextFiles:
    """A document per file, in the order given."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        return read_text(self._paths[index])


class Passages:
    """Files cut at blank lines; neighbouring paragraphs share a document (document.passages)."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._texts = []
        for path in paths:
            self._texts += passages(read_text(path))

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
        return _field(record, self._field, where) if self._field else decode(record, where)


def open_source(config: SourceConfig) -> Source:
    """Opens a source as plain texts, whatever their length.

    Raises ValueError naming the path if no file matches or there is no document in them.
    """
    source = _open(config)
    return AsTexts(source) if config.kind in COMPOSITE else source


def open_documents(config: SourceConfig) -> Sequence[Document]:
    """Opens a source as documents that know their parts, interleaved as the config says.

    Documents that the config's lengths leave out are among them if they are not interleaved: they
    are known when they are read (`SourceConfig.fits`). Raises ValueError as `open_source`, and if
    none is left to be interleaved.
    """
    source = _open(config)
    documents = source if config.kind in COMPOSITE else AsDocuments(source)
    if config.interleave is None:
        return documents
    numbers = [i for i in range(len(documents)) if config.fits(documents[i])]
    if not numbers:
        raise ValueError(f"source {config.name!r}: none of {len(documents)} documents is that long")
    return Interleaved(documents, numbers, config.interleave)


def _open(config: SourceConfig) -> Source | Sequence[Document]:
    if config.kind.startswith("stdlib"):
        paths = stdlib_paths()
    elif config.kind.startswith("shakespeare"):
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


@functools.cache
def stdlib_paths() -> tuple[pathlib.Path, ...]:
    """Python files of the running interpreter's standard library, sorted by their relative path.

    Without tests, installed packages, code tables, empty files and files above 256 KiB.
    """
    root, paths = _stdlib(), []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        generated = parts[-1].startswith("_sysconfigdata")
        if STDLIB_SKIPPED.isdisjoint(parts) and not generated:
            if 0 < path.stat().st_size <= STDLIB_MAX_BYTES:
                paths.append(path)
    return tuple(paths)


def held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out split, decided by a hash of its text alone.

    So the split is the same on every machine, does not move when documents are added, and copies
    of one document never stand on both sides.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def fingerprint(source: Sequence[str | Document | TokenRecord]) -> str:
    """What tells a source from another: its number of documents, and a hash of at most
    `FINGERPRINT_DOCUMENTS` of them (`FINGERPRINT_RECORDS` of a source of records), evenly spaced: of
    a document's text, of a record's tokens. The same on every machine."""
    digest, item = hashlib.blake2b(digest_size=8), source[0]
    most = FINGERPRINT_RECORDS if isinstance(item, TokenRecord) else FINGERPRINT_DOCUMENTS
    count = min(len(source), most)
    for number in range(count):
        if number:
            item = source[number * (len(source) - 1) // (count - 1)]
        digest.update(hashlib.blake2b(_content(item)).digest())
    return f"{len(source)} documents {digest.hexdigest()}"


def _content(item: str | Document | TokenRecord) -> bytes:
    if isinstance(item, TokenRecord):
        return b"".join(stream.tobytes() for stream in item.streams().values())
    return item.content() if isinstance(item, Document) else item.encode("utf-8")


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
    text = decode(content, where)
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


def _stdlib() -> pathlib.Path:
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def _fixed_folder(pattern: str) -> pathlib.Path:
    """The part of a glob before what may vary, a file's name left out."""
    path = pathlib.Path(os.path.expanduser(pattern))
    fixed = itertools.takewhile(lambda part: glob.escape(part) == part, path.parts[:-1])
    return pathlib.Path(*fixed)


SHIPPED = ("shakespeare", "shakespeare_book", "stdlib", "stdlib_packages")
KINDS = {
    "text": lambda paths, config: TextFiles(paths),
    "passages": lambda paths, config: Passages(paths),
    "jsonl": lambda paths, config: JsonLines(paths, config.field),
    "parquet": lambda paths, config: Parquet(paths, config.field),
    "array_record": lambda paths, config: ArrayRecords(paths, config.field),
    "books": lambda paths, config: Books(paths),
    "repositories": lambda paths, config: Repositories(_fixed_folder(config.path), paths),
    "shakespeare": lambda paths, config: Passages(paths),
    "shakespeare_book": lambda paths, config: Books(paths),
    "stdlib": lambda paths, config: TextFiles(paths),
    "stdlib_packages": lambda paths, config: Repositories(_stdlib(), paths),
}
COMPOSITE = ("books", "repositories", "shakespeare_book", "stdlib_packages")  # Documents, not texts
