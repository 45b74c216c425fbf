"""The free list of one KV group's pages, how many hold each, and which stay as they are when nobody does."""

from __future__ import annotations

from collections.abc import Sequence

from gemray_workers.errors import GemrayError


class PageError(GemrayError):
    """A page was given back that nobody holds: the page accounting is broken."""


class PageAllocator:
    """Hands out the pages 1..num_pages; page 0 is the null page and belongs to nobody.

    A page that everyone who held it has given back is free again. One that is kept (the prefix cache finds it) is idle
    instead: it stays as it is, can be shared again, and is free only once it is discarded.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))  # a stack, the lowest page on top
        self._holders = [0] * (num_pages + 1)
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # in the order in which they were given back
        self._num_shared = 0

    @property
    def num_pages(self) -> int:
        """Pages in all, free, idle or held."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, the idle ones among them."""
        return len(self._free) + len(self._idle)

    @property
    def num_empty(self) -> int:
        """Pages that `allocate` can hand out; the idle ones have to be discarded first."""
        return len(self._free)

    @property
    def num_shared(self) -> int:
        """Pages with several holders."""
        return self._num_shared

    @property
    def held(self) -> frozenset[int]:
        """The pages that are out."""
        return frozenset(page for page in range(1, self._num_pages + 1) if self._holders[page])

    @property
    def kept(self) -> frozenset[int]:
        """The pages that stay as they are when nobody holds them."""
        return frozenset(self._kept)

    def num_holders(self, page: int) -> int:
        """How many hold a page; 0 for one that is free or idle."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` pages, or None (and no page) when fewer are empty."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Give pages that are out or idle one holder more.

        Raises:
            PageError: a page is not of this pool or is free, or occurs twice; then none gets one.
        """
        self._check_used(pages, "shared", or_idle=True)
        for page in pages:
            self._holders[page] += 1
            self._num_shared += self._holders[page] == 2
            self._idle.pop(page, None)

    def free(self, pages: Sequence[int]) -> list[int]:
        """Take pages back from one holder each. Returns those that are free now.

        Idle pages are discarded in the order of `pages`, the first one first.

        Raises:
            PageError: a page is not of this pool, is free already, or occurs twice; then none is taken back.
        """
        self._check_used(pages, "given back")
        freed: list[int] = []
        for page in pages:
            self._holders[page] -= 1
            self._num_shared -= self._holders[page] == 1
            if self._holders[page]:
                continue
            if page in self._kept:
                self._idle[page] = None
            else:
                freed.append(page)
        self._free.extend(freed)
        return freed

    def keep(self, page: int) -> None:
        """Let a page that is out stay as it is when nobody holds it any more.

        Raises:
            PageError: the page is free, or kept already.
        """
        self._check_used([page], "kept")
        if page in self._kept:
            raise PageError(f"page {page} was kept twice")
        self._kept.add(page)

    def discard(self, page: int) -> bool:
        """Keep a page no longer. Returns whether it is free now, which it is when nobody holds it.

        Raises:
            PageError: the page is not kept.
        """
        if page not in self._kept:
            raise PageError(f"page {page} was discarded and is not kept")
        self._kept.remove(page)
        if page not in self._idle:
            return False
        del self._idle[page]
        self._free.append(page)
        return True

    def oldest_idle(self) -> int:
        """The idle page that was given back longest ago."""
        return next(iter(self._idle))

    def check(self) -> None:
        """Every page is exactly one of free, idle and held, and the idle ones are kept.

        Raises:
            PageError: naming the pages that are not.
        """
        places = [*self._free, *self._idle, *self.held]
        if sorted(places) != list(range(1, self._num_pages + 1)):
            raise PageError(f"free {self._free}, idle {list(self._idle)} and held {sorted(self.held)} are not the pool")
        if not self._kept >= self._idle.keys():
            raise PageError(f"pages {sorted(self._idle.keys() - self._kept)} are idle and not kept")

    def _check_used(self, pages: Sequence[int], done: str, *, or_idle: bool = False) -> None:
        for page in pages:
            if not 1 <= page <= self._num_pages:
                raise PageError(f"page {page} of a pool of pages 1..{self._num_pages} was {done}")
            if not self._holders[page] and not (or_idle and page in self._idle):
                raise PageError(f"page {page} was {done} while free")
        if len(set(pages)) != len(pages):
            raise PageError(f"a page occurs twice in {list(pages)}")
