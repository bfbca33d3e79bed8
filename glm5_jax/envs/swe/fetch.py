"""Fetches archives of sources into a folder by their digests: the only step that needs a network.

    CACHE/<sha256>          content
    CACHE/.unfinished-...   downloads that were cut off; the next call removes those of its files

A mirror loses files. One that is missing, or has another content, is reported and stops nothing.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

# Downloads a URL into a file. Raises OSError if that fails; urllib's errors are some.
Download = Callable[[str, pathlib.Path], None]

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """File to fetch. Raises ValueError for a malformed digest.

    Attributes:
      url: where it is.
      sha256: digest of its content.
    """

    url: str
    sha256: str

    def __post_init__(self):
        if not _DIGEST.fullmatch(self.sha256):
            raise ValueError(f"sha256 of {self.url} is {self.sha256!r}; use 64 hexadecimal digits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchReport:
    """Result of fetching.

    Attributes:
      files: path of each file that is there, by its digest.
      missing: why a file is not there, by its digest.
    """

    files: Mapping[str, pathlib.Path]
    missing: Mapping[str, str]


def fetch_sources(
    sources: Sequence[SourceFile], cache: str | os.PathLike, download: Download
) -> FetchReport:
    """Fetches files that are not in the cache yet."""
    folder = pathlib.Path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    files, missing = {}, {}
    for source in sources:
        place = folder / source.sha256
        problem = None if place.exists() else _fetch(source, place, download)
        if problem is None:
            files[source.sha256] = place
        else:
            missing[source.sha256] = problem
    return FetchReport(files=files, missing=missing)


def _fetch(source: SourceFile, place: pathlib.Path, download: Download) -> str | None:
    """Fetches one file; returns why it is missing, or None."""
    unfinished = place.with_name(f".unfinished-{source.sha256}")
    unfinished.unlink(missing_ok=True)
    try:
        download(source.url, unfinished)
        with open(unfinished, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != source.sha256:
            return f"{source.url} has sha256 {digest}; the list may name an older version"
        os.replace(unfinished, place)
    except OSError as error:
        return f"{source.url}: {error}"
    finally:
        unfinished.unlink(missing_ok=True)
    return None
