"""Defines `Document`, a text that may consist of several parts.

The parts of a long document may also be separate documents: the files of a repository, the passages of a book. The held-out
split is decided per part, so that a held-out short text is not trained on as part of a long one.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

PASSAGE_LENGTH = 4096  # characters
# First bytes of compressed files, and the programs that unpack them.
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\xfd7zXZ\x00": "unxz",
    b"BZh91AY&SY": "bunzip2",
}
Item = TypeVar("Item", covariant=True)


class RandomAccess(Protocol[Item]):
    """Random-access sequence of items; satisfies Grain's `RandomAccessDataSource`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


@dataclasses.dataclass(frozen=True)
class DocumentPart:
    """Text inside a document; with a path, a header line names it (in the form of `tail`)."""

    text: str
    path: str = ""

    def render(self) -> str:
        """Returns the text with its header line."""
        return f"==> {self.path} <==\n{self.text}\n" if self.path else self.text


@dataclasses.dataclass(frozen=True)
class Document:
    """Document of one or more threads of parts: the parts of a thread are consecutive, threads alternate (interleave.py).

    Attributes:
      threads: threads; one, unless similar documents are interleaved.
      chunk: tokens of a thread before the next one continues; ignored for one thread.
    """

    threads: tuple[tuple[DocumentPart, ...], ...]
    chunk: int = 0

    @classmethod
    def of(cls, text: str) -> "Document":
        """Returns the document of a single text."""
        return cls(((DocumentPart(text),),))

    @property
    def num_characters(self) -> int:
        """The characters of all parts, without headers."""
        return sum(len(part.text) for thread in self.threads for part in thread)

    def texts(self) -> tuple[str, ...]:
        """Returns the text of each thread."""
        return tuple("".join(part.render() for part in thread) for thread in self.threads)

    def select(self, keep: Callable[[str], bool]) -> "Document | None":
        """Returns the document of the parts for whose text keep(text) is true; None if there are none."""
        threads = (tuple(p for p in t if p.text and keep(p.text)) for t in self.threads)
        non_empty = tuple(thread for thread in threads if thread)
        return dataclasses.replace(self, threads=non_empty) if non_empty else None

    def content(self) -> bytes:
        """Returns bytes that identify the document; for a single text, its UTF-8 bytes."""
        parts = [part for thread in self.threads for part in thread]
        if len(parts) == 1 and not parts[0].path:
            return parts[0].text.encode("utf-8")
        return repr((self.chunk, self.threads)).encode("utf-8")


class Books:
    """Sequence of a document per file, whose parts are the passages of the file (`passages`)."""

    def __init__(self, paths: Iterable[pathlib.Path]):
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Document:
        text = read_text(self._paths[index])
        return Document((tuple(map(DocumentPart, passages(text))),))


class Repositories:
    """Sequence of a document per repository: its files in the order of their paths, each with its path.

    Each entry of `root` is a repository: a folder with all its files, or a single file.
    """

    def __init__(self, root: pathlib.Path, paths: Iterable[pathlib.Path]):
        self._root, repositories = root, {}
        for path in sorted(paths, key=lambda path: path.relative_to(root).parts):
            repositories.setdefault(path.relative_to(root).parts[0], []).append(path)
        self._repositories = list(repositories.values())

    def __len__(self) -> int:
        return len(self._repositories)

    def __getitem__(self, index: int) -> Document:
        paths = self._repositories[index]
        named = [(path.relative_to(self._root).as_posix(), read_text(path)) for path in paths]
        return Document((tuple(DocumentPart(text, path) for path, text in named),))


class AsDocuments:
    """Sequence of texts as documents."""

    def __init__(self, texts: RandomAccess[str]):
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Document:
        return Document.of(self._texts[index])


class AsTexts:
    """Sequence of documents as plain texts, with their threads concatenated."""

    def __init__(self, documents: RandomAccess[Document]):
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> str:
        return "".join(self._documents[index].texts())


def read_text(path: pathlib.Path) -> str:
    """Reads the text of a file, without a byte order mark. Raises ValueError as `decode`."""
    return decode(path.read_bytes(), path).removeprefix("\ufeff")


def decode(content: bytes, where: object) -> str:
    """Decodes UTF-8 bytes.

    Raises ValueError with the position of bytes that are not UTF-8, or with the program that unpacks compressed ones.
    """
    for magic, program in _COMPRESSED.items():
        if content.startswith(magic):
            raise ValueError(f"{where} is compressed; unpack the file with {program}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte {content[error.start]:#04x} at offset {error.start}; "
            "convert the file to UTF-8"
        ) from error


def passages(text: str) -> list[str]:
    """Splits a text at blank lines into passages of about `PASSAGE_LENGTH`; joined, they are the text again.

    A longer paragraph is split at its line ends or, without any, at its blanks.
    """
    parts, current = [], ""
    for paragraph in text.split("\n\n"):
        for piece in _pieces(paragraph):
            if current and len(current) + len(piece) > PASSAGE_LENGTH:
                parts.append(current)
                current = ""
            current += piece
        current += "\n\n"
    parts.append(current[: -len("\n\n")])
    return [passage for passage in parts if passage.strip()]


def _pieces(paragraph: str) -> Iterator[str]:
    """Yields pieces of at most `PASSAGE_LENGTH`; joined, they are the paragraph again."""
    start = 0
    while len(paragraph) - start > PASSAGE_LENGTH:
        limit = start + PASSAGE_LENGTH
        ends = (paragraph.rfind(mark, start, limit) + 1 for mark in ("\n", " "))
        end = next((end for end in ends if end > start), limit)
        yield paragraph[start:end]
        start = end
    yield paragraph[start:]
