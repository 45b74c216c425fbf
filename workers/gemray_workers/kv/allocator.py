"""The free list of one KV group's pages, and how many hold each."""

from __future__ import annotations

from collections.abc import Sequence

from gemray_workers.errors import GemrayError


class PageError(GemrayError):
    """A page was given back that nobody holds: the page accounting is broken."""


class PageAllocator:
    """Hands out the pages 1..num_pages; page 0 is the null page and belongs to nobody.

    A page is free again when everyone who holds it has given it back. Each has one holder today, its sequence.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))  # a stack, the lowest page on top
        self._holders = [0] * (num_pages + 1)

    @property
    def num_pages(self) -> int:
        """Pages in all, free or held."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still hand out."""
        return len(self._free)

    @property
    def held(self) -> frozenset[int]:
        """The pages that are out."""
        return frozenset(page for page in range(1, self._num_pages + 1) if self._holders[page])

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` pages, or None (and no page) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Give pages that are out one holder more.

        Raises:
            PageError: a page is not of this pool or is free, or occurs twice; then none gets one.
        """
        self._check_held(pages, "shared")
        for page in pages:
            self._holders[page] += 1

    def free(self, pages: Sequence[int]) -> list[int]:
        """Take pages back from one holder each. Returns those that nobody holds any more.

        Raises:
            PageError: a page is not of this pool, is free already, or occurs twice; then none is taken back.
        """
        self._check_held(pages, "given back")
        for page in pages:
            self._holders[page] -= 1
        freed = [page for page in pages if not self._holders[page]]
        self._free.extend(freed)
        return freed

    def _check_held(self, pages: Sequence[int], done: str) -> None:
        for page in pages:
            if not 1 <= page <= self._num_pages:
                raise PageError(f"page {page} of a pool of pages 1..{self._num_pages} was {done}")
            if not self._holders[page]:
                raise PageError(f"page {page} was {done} while free")
        if len(set(pages)) != len(pages):
            raise PageError(f"a page occurs twice in {list(pages)}")
