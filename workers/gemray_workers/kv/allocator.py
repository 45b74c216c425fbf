"""The free list of one KV group's pages, how many hold each, and which stay as they are when nobody does."""

from __future__ import annotations

from collections.abc import Sequence

from gemray_workers.errors import GemrayError


class PageError(GemrayError):
    """A page was given back that nobody holds: the page accounting is broken."""


class PageAllocator:
    """Hands out the pages 1..num_pages; page 0 is the null page and belongs to nobody.

    A page that everyone who held it has given back is free again. One that is kept (the prefix cache finds it) is idle
    instead: it stays as it is, can be shared again, and is free only once it is discarded. Some of those that are kept
    are spare: they are to be discarded before the others.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))  # a stack, the lowest page on top
        self._holders = [0] * (num_pages + 1)
        self._kept: set[int] = set()
        self._spare: set[int] = set()
        self._idle: dict[int, None] = {}  # without the spare ones, in the order in which they were given back
        self._idle_spare: dict[int, None] = {}  # likewise
        self._num_shared = 0

    @property
    def num_pages(self) -> int:
        """Pages in all, free, idle or held."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, the idle ones among them."""
        return len(self._free) + len(self._idle) + len(self._idle_spare)

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
            self._idle_with(page).pop(page, None)

    def free(self, pages: Sequence[int]) -> list[int]:
        """Take pages back from one holder each. Returns those that are free now; of those that are idle by that the
        first one of `pages` is the oldest.

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
                self._idle_with(page)[page] = None
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
        is_idle = not self._holders[page]
        if is_idle:
            del self._idle_with(page)[page]
            self._free.append(page)
        self._kept.remove(page)
        self._spare.discard(page)
        return is_idle

    def set_spare(self, page: int, is_spare: bool) -> None:
        """Say whether a page that is kept is spare. An idle one counts as given back by that.

        Raises:
            PageError: the page is not kept.
        """
        if page not in self._kept:
            raise PageError(f"page {page} was made {'spare' if is_spare else 'no spare'} and is not kept")
        if is_spare == (page in self._spare):
            return
        is_idle = not self._holders[page]
        if is_idle:
            del self._idle_with(page)[page]
        (self._spare.add if is_spare else self._spare.remove)(page)
        if is_idle:
            self._idle_with(page)[page] = None

    def is_spare(self, page: int) -> bool:
        """Whether a page is among the first to be discarded."""
        return page in self._spare

    @property
    def has_idle_spare(self) -> bool:
        """Whether some of the idle pages are spare."""
        return bool(self._idle_spare)

    def oldest_idle(self) -> int:
        """The idle page that was given back longest ago, of the spare ones if there are any."""
        return next(iter(self._idle_spare or self._idle))

    def check(self) -> None:
        """Every page is exactly one of free, idle and held, and the idle ones are kept.

        Raises:
            PageError: naming the pages that are not.
        """
        idle = [*self._idle_spare, *self._idle]
        if sorted([*self._free, *idle, *self.held]) != list(range(1, self._num_pages + 1)):
            raise PageError(f"free {self._free}, idle {idle} and held {sorted(self.held)} are not the pool")
        if not self._kept.issuperset(idle):
            raise PageError(f"pages {sorted(set(idle) - self._kept)} are idle and not kept")
        if self._spare & self._idle.keys() or not self._idle_spare.keys() <= self._spare <= self._kept:
            raise PageError(f"spare are {sorted(self._spare)}, and of the idle ones {list(self._idle_spare)}")

    def _idle_with(self, page: int) -> dict[int, None]:
        """The idle pages among which a page is when nobody holds it."""
        return self._idle_spare if page in self._spare else self._idle

    def _check_used(self, pages: Sequence[int], done: str, *, or_idle: bool = False) -> None:
        for page in pages:
            if not 1 <= page <= self._num_pages:
                raise PageError(f"page {page} of a pool of pages 1..{self._num_pages} was {done}")
            if not self._holders[page] and not (or_idle and page in self._kept):
                raise PageError(f"page {page} was {done} while free")
        if len(set(pages)) != len(pages):
            raise PageError(f"a page occurs twice in {list(pages)}")
