"""The free list of one KV group's pages."""

from __future__ import annotations

from collections.abc import Sequence

from gemray_workers.errors import GemrayError


class PageError(GemrayError):
    """A page was given back that nobody holds: the page accounting is broken."""


class PageAllocator:
    """Hands out the pages 1..num_pages; page 0 is the null page and belongs to nobody."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))  # a stack, the lowest page on top
        self._held = bytearray(num_pages + 1)

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
        return frozenset(page for page in range(1, self._num_pages + 1) if self._held[page])

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` pages, or None (and no page) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._held[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back.

        Raises:
            PageError: a page is not of this pool, is free already, or occurs twice; then none is taken back.
        """
        for page in pages:
            if not 1 <= page <= self._num_pages:
                raise PageError(f"page {page} was given back to a pool of pages 1..{self._num_pages}")
            if not self._held[page]:
                raise PageError(f"page {page} was given back while free")
        if len(set(pages)) != len(pages):
            raise PageError(f"a page occurs twice in {list(pages)}")
        for page in pages:
            self._held[page] = 0
        self._free.extend(pages)
