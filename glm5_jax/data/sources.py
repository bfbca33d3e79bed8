"""Opens documents on disk as random-access sources: `len(source)` documents, `source[i]` one of them.

- Opening a source reads its index only. Exceptions are `passages`, `parquet` and `arrow`, whose text is held in memory,
  and interleaved sources, which read every document to compare them. Use jsonl or array_record for corpora beyond memory.
- Reads are thread-safe and deterministic, as Grain requires.
- Invalid text in a file raises a ValueError with the file and the position.
"""

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import pathlib
import sysconfig
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from glm5_jax.data.document import (
    AsDocuments,
    AsTexts,
    Books,
    Document,
    RandomAccess,
    Repositories,
    decode,
    passages,
    read_text,
)
from glm5_jax.data.interleave import InterleaveConfig, Interleaved
from glm5_jax.data.record import TokenRecord
from glm5_jax.runtime.files import check_line, read_line, read_lines

if TYPE_CHECKING:
    import pyarrow

ASSETS = pathlib.Path(__file__).parent / "assets"
SHAKESPEARE = ASSETS / "tinyshakespeare.txt"

# Folders without prose or programs (tables, generated text), or outside of the library.
STDLIB_SKIPPED = frozenset(
    "test tests idle_test site-packages dist-packages encodings pydoc_data __pycache__".split()
)
STDLIB_MAX_BYTES = 256 * 1024
FINGERPRINT_DOCUMENTS = 256  # read at every start
FINGERPRINT_RECORDS = 4  # created at every start, which takes longer
# A running training needs the same documents, so only correction is possible after its start.
_FIX = "correct it, or remove it before a run begins"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of a mixture. Raises ValueError if options are invalid.

    Attributes:
      kind: one of
        - "text": a document per file, such as .txt and .md (a single file is divided like "books"),
        - "passages": files split at blank lines into documents of about 4096 characters,
        - "books": the same files, a document per file,
        - "repositories": a document per entry of the path's fixed folder (the part before the first `*`), a folder or a
          file, with its files one after the other,
        - "jsonl", "parquet", "array_record",
        - "arrow": the files of a folder that Hugging Face datasets saved, as DIR/**/*.arrow,
        - "shakespeare" (passages), "shakespeare_book" (one document): shipped text,
        - "stdlib" (a document per file), "stdlib_packages" (a document per package): the standard library of the running
          Python.
      path: file or glob (`**` matches folders); empty for the last four kinds.
      field: key of the text in a jsonl or array_record object, or its column in parquet and arrow files. Empty: the records of an
        array_record are UTF-8 text.
      weight: share of the rows, relative to the other sources.
      min_characters, max_characters: minimum length of documents, and exclusive maximum (None: no maximum), in
        characters, held-out parts included. The same texts may be two sources, a long and a short one
        (long_context.py).
      interleave: options for interleaving similar documents (interleave.py); None: no interleaving.
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
        if not 0 <= self.min_characters < self._length_limit:
            raise ValueError(
                f"source {self.name!r} takes documents from min_characters {self.min_characters} to "
                f"below max_characters {self.max_characters}; make the first not negative and the "
                "second larger, or None"
            )

    @property
    def name(self) -> str:
        """The name of the source in errors and metrics."""
        name = f"{self.kind}:{self.path}" if self.path else self.kind
        if self.min_characters or self.max_characters is not None:
            name += f"[{self.min_characters}:{self.max_characters}]"
        return f"interleaved:{name}" if self.interleave else name

    def fits(self, document: Document) -> bool:
        """Returns True if a document has a length within the limits."""
        return self.min_characters <= document.num_characters < self._length_limit

    @property
    def _length_limit(self) -> float:
        return float("inf") if self.max_characters is None else self.max_characters


T = TypeVar("T", str, Document)
# Function that opens the files of a source.
Opener = Callable[[Sequence[pathlib.Path], SourceConfig], RandomAccess[T]]


class TextFiles:
    """Source with a document per file, in the order of the paths."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        return read_text(self._paths[index])


class Passages:
    """Source of files split at blank lines; adjacent paragraphs share a document (document.passages)."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._texts = []
        for path in paths:
            self._texts += passages(read_text(path))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> str:
        return self._texts[index]


class JsonLines:
    """Source with a document per line: the string at `field` of a JSON object. Empty lines are skipped.

    Opening checks every line, so that training does not fail later: msgspec does so at 500 MB/s, and json parses again the
    lines that it rejects. Raises ValueError with the number of a line without text.
    """

    def __init__(self, paths: Sequence[pathlib.Path], field: str):
        self._paths, self._field = list(paths), field
        struct = msgspec.defstruct("Line", [("text", str)], rename={"text": field})
        decoder = msgspec.json.Decoder(struct)
        lines = []  # file number, line number, offset, size
        for number, path in enumerate(self._paths):
            for line in read_lines(path):
                if not _is_plain(line.content, decoder):
                    _field(line.content, field, f"{path}, line {line.number}")
                lines.append((number, line.number, line.offset, line.size))
        self._lines = np.array(lines, np.int64).reshape(-1, 4)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> str:
        number, line_number, offset, size = self._lines[index].tolist()
        line = read_line(self._paths[number], offset, size)
        return _field(line, self._field, f"{self._paths[number]}, line {line_number}")


class Columns:
    """Source with a document per row of tables: their string column `field`, which is held in memory.

    read: returns the table of a file, with that column at least. kind: kind of the files, for errors.
    """

    def __init__(
        self,
        paths: Sequence[pathlib.Path],
        field: str,
        read: Callable[[pathlib.Path, str], "pyarrow.Table"],
        kind: str,
    ):
        import pyarrow  # slow to import, and only these kinds need it

        columns = []
        for path in paths:
            try:
                table = read(path, field)
                _check_column(table.schema, field, path)
                column = table[field]
            except (OSError, pyarrow.ArrowException) as error:
                raise ValueError(f"{path} is no complete {kind} file: {error}") from error
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


def _check_column(schema: "pyarrow.Schema", field: str, path: pathlib.Path) -> None:
    """Raises ValueError unless a table has one string column of that name."""
    if schema.names.count(field) != 1:
        raise ValueError(
            f"{path} has {schema.names.count(field)} columns {field!r}; it has {schema.names}"
        )
    if str(schema.field(field).type) not in ("string", "large_string"):
        raise ValueError(
            f"column {field!r} of {path} is {schema.field(field).type}; it must be string"
        )


def _read_parquet(path: pathlib.Path, field: str) -> "pyarrow.Table":
    import pyarrow.parquet

    _check_column(pyarrow.parquet.read_schema(path), field, path)
    return pyarrow.parquet.read_table(path, columns=[field])


def _open_arrow(paths: Sequence[pathlib.Path], field: str) -> Columns:
    """Opens arrow files. Raises ValueError if some are results of `map` or `filter`, which repeat the others' rows."""
    copies = [path for path in paths if path.name.startswith("cache-")]
    if 0 < len(copies) < len(paths):
        raise ValueError(
            f"{copies[0]} repeats rows of the other files, because datasets stores the results of map and filter there; "
            "give a glob of either, such as data-*.arrow"
        )
    return Columns(paths, field, _read_arrow, "arrow")


def _read_arrow(path: pathlib.Path, field: str) -> "pyarrow.Table":
    del field  # all columns are in each record
    import pyarrow

    with pyarrow.OSFile(str(path)) as file:
        return pyarrow.ipc.open_stream(file).read_all()


class ArrayRecords:
    """Source with a document per record: UTF-8 text, or the string at `field` of a JSON object."""

    def __init__(self, paths: Sequence[pathlib.Path], field: str):
        self._name, self._field = ", ".join(map(str, paths)), field
        import grain

        self._records = grain.sources.ArrayRecordDataSource([str(path) for path in paths])

    def __len__(self) -> int:
        return len(self._records)  # pyright: ignore[reportArgumentType]: its base class has no types

    def __getitem__(self, index: int) -> str:
        record, where = self._records[index], f"record {index} of {self._name}"
        return _field(record, self._field, where) if self._field else decode(record, where)


def open_source(config: SourceConfig) -> RandomAccess[str]:
    """Opens a source as plain texts of any length.

    Raises ValueError with the path if no file matches or the files have no document.
    """
    if config.kind in DOCUMENT_KINDS:
        return AsTexts(_open(config, DOCUMENT_KINDS[config.kind]))
    return _open(config, TEXT_KINDS[config.kind])


def open_documents(config: SourceConfig) -> RandomAccess[Document]:
    """Opens a source as documents with parts, interleaved if the config says so.

    Without interleaving it includes documents outside the config's limits of length, because their length is known only
    after reading (`SourceConfig.fits`). Raises ValueError like `open_source`, and if no document is left to interleave.
    """
    if config.kind in DOCUMENT_KINDS:
        documents = _open(config, DOCUMENT_KINDS[config.kind])
    else:
        documents = AsDocuments(_open(config, TEXT_KINDS[config.kind]))
    if config.interleave is None:
        return documents
    numbers = [i for i in range(len(documents)) if config.fits(documents[i])]
    if not numbers:
        raise ValueError(f"source {config.name!r}: none of {len(documents)} documents is that long")
    return Interleaved(documents, numbers, config.interleave)


def _open(config: SourceConfig, open_files: Opener[T]) -> RandomAccess[T]:
    if config.kind.startswith("stdlib"):
        paths = stdlib_paths()
    elif config.kind.startswith("shakespeare"):
        paths = [SHAKESPEARE]
    else:
        matches = sorted(glob.glob(os.path.expanduser(config.path), recursive=True))
        paths = [path for path in map(pathlib.Path, matches) if path.is_file()]
    if not paths:
        fix = "give a file or a glob"
        if pathlib.Path(config.path).expanduser().is_dir():
            fix = f"it is a folder; give its files, as in {config.path.rstrip('/')}/**/*"
        raise ValueError(f"source {config.name!r}: no file matches; {fix}")
    try:
        source = open_files(paths, config)
    except ValueError as error:
        raise ValueError(f"source {config.name!r}: {error}") from error
    if not len(source):
        raise ValueError(f"source {config.name!r}: {len(paths)} file(s), but no document in them")
    return source


@functools.cache
def stdlib_paths() -> tuple[pathlib.Path, ...]:
    """Returns the Python files of the running interpreter's standard library, sorted by relative path.

    It leaves out tests, installed packages, code tables, empty files and files above 256 KiB.
    """
    root, paths = _stdlib(), []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        generated = parts[-1].startswith("_sysconfigdata")
        if STDLIB_SKIPPED.isdisjoint(parts) and not generated:
            if 0 < path.stat().st_size <= STDLIB_MAX_BYTES:
                paths.append(path)
    return tuple(paths)


def is_held_out(text: str, fraction: float) -> bool:
    """Returns True if a text belongs to the held-out split, which a hash of the text decides.

    So the split is the same on every machine, does not change when documents are added, and never has copies of one
    document on both sides.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def fingerprint(source: RandomAccess[str | Document | TokenRecord]) -> str:
    """Returns the fingerprint of a source, the same on every machine.

    It has the number of documents and a hash of at most `FINGERPRINT_DOCUMENTS` of them (`FINGERPRINT_RECORDS` for a
    source of records), evenly spaced. The hash is that of the text of a document, or the tokens of a record.
    """
    digest, item = hashlib.blake2b(digest_size=8), source[0]
    is_record = isinstance(item, TokenRecord)
    count = min(len(source), FINGERPRINT_RECORDS if is_record else FINGERPRINT_DOCUMENTS)
    for number in range(count):
        if number:
            item = source[number * (len(source) - 1) // (count - 1)]
        digest.update(hashlib.blake2b(_content(item)).digest())
    return f"{len(source)} documents {digest.hexdigest()}"


def _content(item: str | Document | TokenRecord) -> bytes:
    if isinstance(item, TokenRecord):
        return b"".join(stream.tobytes() for stream in item.streams().values())
    return item.content() if isinstance(item, Document) else item.encode("utf-8")


def _is_plain(line: bytes, decoder: msgspec.json.Decoder) -> bool:
    """Returns True if msgspec accepts a line as UTF-8 JSON with a text at the field; json accepts more lines."""
    try:
        line.decode("utf-8")  # msgspec does not check the fields that it skips
        decoder.decode(line)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return False
    return True


def _field(content: bytes, field: str, where: str) -> str:
    try:
        check_line(content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    text = decode(content, where)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}; {_FIX}") from error
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        have = list(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(
            f"{where} has no string at {field!r}; it has {have}; "
            f"name the text's key in the source's field, or {_FIX}"
        )
    try:
        value[field].encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds half of a surrogate pair, character {error.start} of {field!r}; {_FIX}"
        ) from error
    return value[field]


def _stdlib() -> pathlib.Path:
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def _fixed_folder(pattern: str) -> pathlib.Path:
    """Returns the folder part of a glob before its first wildcard."""
    path = pathlib.Path(os.path.expanduser(pattern))
    fixed = itertools.takewhile(lambda part: glob.escape(part) == part, path.parts[:-1])
    return pathlib.Path(*fixed)


SHIPPED = ("shakespeare", "shakespeare_book", "stdlib", "stdlib_packages")
TEXT_KINDS: dict[str, Opener[str]] = {
    "text": lambda paths, config: TextFiles(paths),
    "passages": lambda paths, config: Passages(paths),
    "jsonl": lambda paths, config: JsonLines(paths, config.field),
    "parquet": lambda paths, config: Columns(paths, config.field, _read_parquet, "parquet"),
    "arrow": lambda paths, config: _open_arrow(paths, config.field),
    "array_record": lambda paths, config: ArrayRecords(paths, config.field),
    "shakespeare": lambda paths, config: Passages(paths),
    "stdlib": lambda paths, config: TextFiles(paths),
}
DOCUMENT_KINDS: dict[str, Opener[Document]] = {
    "books": lambda paths, config: Books(paths),
    "repositories": lambda paths, config: Repositories(_fixed_folder(config.path), paths),
    "shakespeare_book": lambda paths, config: Books(paths),
    "stdlib_packages": lambda paths, config: Repositories(_stdlib(), paths),
}
KINDS = (*TEXT_KINDS, *DOCUMENT_KINDS)
