"""Allocates pages of a cache by number, with a reference count for each."""

from collections.abc import Iterable, Sequence


class OutOfPages(Exception):
    """Raised if more pages are requested than are free; none is taken."""


class PagePool:
    """Pool of pages, all free at first. A shared page becomes free when its last holder drops it."""

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be positive")
        self._holders = [0] * num_pages
        self._free = list(reversed(range(num_pages)))

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Number of pages without a holder."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` free pages, each with one holder. Raises OutOfPages if fewer are free."""
        if count < 0:
            raise ValueError(f"count is {count}; it must not be negative")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages are needed, {len(self._free)} of {len(self)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page. Raises ValueError for a page that is free."""
        pages = list(pages)
        self._check(pages)
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Removes a holder from each page. Raises ValueError for a page that has fewer holders."""
        pages = list(pages)
        self._check(pages)
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is dropped more often than it is held")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """Returns the number of holders of a page."""
        return self._holders[page]

    def _check(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < len(self) or not self._holders[page]:
                raise ValueError(f"page {page} is not held; there are {len(self)} pages")
