"""`Document`: what a model reads as one text, also where it is made of several.

A long document is made of parts that stand elsewhere as documents of their own: the files of a
repository, the passages of a book. The held-out split is decided by part, so that one that is held
out of short texts is not trained on as a piece of a long one.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence

PASSAGE_LENGTH = 4096  # characters


@dataclasses.dataclass(frozen=True)
class Part:
    """A text inside a document; with a path, a header line names it (as `tail` prints files)."""

    text: str
    path: str = ""

    def render(self) -> str:
        """The text as it is read."""
        return f"==> {self.path} <==\n{self.text}\n" if self.path else self.text


@dataclasses.dataclass(frozen=True)
class Document:
    """Threads of parts: a thread's parts follow each other, threads alternate (interleave.py).

    Attributes:
      threads: one, except where similar documents are interleaved.
      chunk: tokens of a thread before the next one's turn; of no meaning for one thread.
    """

    threads: tuple[tuple[Part, ...], ...]
    chunk: int = 0

    @classmethod
    def of(cls, text: str) -> "Document":
        """A document that is one text."""
        return cls(((Part(text),),))

    @property
    def num_characters(self) -> int:
        """Characters of all parts, headers left out."""
        return sum(len(part.text) for thread in self.threads for part in thread)

    def texts(self) -> tuple[str, ...]:
        """The text of each thread."""
        return tuple("".join(part.render() for part in thread) for thread in self.threads)

    def select(self, keep: Callable[[str], bool]) -> "Document | None":
        """The document of the parts whose text is kept; None if there is none."""
        threads = (tuple(p for p in t if p.text and keep(p.text)) for t in self.threads)
        left = tuple(thread for thread in threads if thread)
        return dataclasses.replace(self, threads=left) if left else None

    def content(self) -> bytes:
        """What makes the document what it is; of a single text, its UTF-8 bytes."""
        parts = [part for thread in self.threads for part in thread]
        if len(parts) == 1 and not parts[0].path:
            return parts[0].text.encode("utf-8")
        return repr((self.chunk, self.threads)).encode("utf-8")


class Books:
    """A document per file, whole; its parts are the passages of the file (`passages`)."""

    def __init__(self, paths: Iterable[pathlib.Path]):
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Document:
        text = read_text(self._paths[index])
        return Document((tuple(map(Part, passages(text))),))


class Repositories:
    """A document per repository: its files in the order of their paths, each under its path.

    What stands directly in `root` is a repository: a folder with all that is below it, or one file.
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
        return Document((tuple(Part(text, path) for path, text in named),))


class AsDocuments:
    """Texts as documents."""

    def __init__(self, texts: Sequence[str]):
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Document:
        return Document.of(self._texts[index])


class AsTexts:
    """Documents as plain texts, threads one after the other."""

    def __init__(self, documents: Sequence[Document]):
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> str:
        return "".join(self._documents[index].texts())


def read_text(path: pathlib.Path) -> str:
    """A file's text; ValueError with the place of what is not UTF-8."""
    return decode(path.read_bytes(), path)


def decode(content: bytes, where: object) -> str:
    """The text of UTF-8 bytes; ValueError with the place of what is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte {content[error.start]:#04x} at offset {error.start}; "
            "convert the file to UTF-8"
        ) from error


def passages(text: str) -> list[str]:
    """Cuts at blank lines into about `PASSAGE_LENGTH`; joined, the passages are the text again."""
    found, current = [], ""
    for paragraph in text.split("\n\n"):
        if current and len(current) + len(paragraph) > PASSAGE_LENGTH:
            found.append(current)
            current = ""
        current += paragraph + "\n\n"
    found.append(current[: -len("\n\n")])
    return [passage for passage in found if passage.strip()]
