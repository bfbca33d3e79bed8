"""Pages of a cache by number: which are free, and how many hold on to each of the others."""

from collections.abc import Iterable, Sequence


class OutOfPages(Exception):
    """More pages were asked for than are free; none was taken."""


class PagePool:
    """`num_pages` pages, all free at first. A page that several hold is shared, and free when the last lets go."""

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be positive")
        self._holders = [0] * num_pages
        self._free = list(reversed(range(num_pages)))

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages, each then held once. OutOfPages if there are fewer."""
        if count < 0:
            raise ValueError(f"count is {count}; it must not be negative")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages are needed, {len(self._free)} of {len(self)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each; ValueError for a page that is free."""
        pages = list(pages)
        self._check(pages)
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder fewer for each; ValueError, with nothing dropped, for a page held less often."""
        pages = list(pages)
        self._check(pages)
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is dropped more often than it is held")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def _check(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < len(self) or not self._holders[page]:
                raise ValueError(f"page {page} is not held; there are {len(self)} pages")
