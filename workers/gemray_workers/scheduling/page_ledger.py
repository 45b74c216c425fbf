"""Who holds which page: the allocators of all KV groups, the pages of every running sequence, the prefix cache.

Sequences share pages of equal beginnings. A shared page is whole and confirmed: nobody writes to it any more, as rows
lie behind the tokens that are confirmed, those in flight for a sequence that has left its slot too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemray_workers.kv.allocator import PageAllocator, PageError
from gemray_workers.kv.block_table import SequencePages, most_pages
from gemray_workers.kv.prefix_block import Block
from gemray_workers.kv.prefix_cache import NO_HIT, HashBlock, PrefixCache, PrefixHit, chained_hash
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.scheduling.plan import PageGrant


@dataclass
class _Published:
    """How much of a sequence's text the cache can find."""

    salt: str
    block: Block | None
    """The last block; None before the first."""
    num_blocks: int
    parting: Block | None = None
    """The last block of its text that was known when it started, as long as it has not computed that far."""
    first_own: Block | None = None
    """The first block that it did not find but added."""


class PageLedger:
    """Pages by group and slot. A sequence grows equally far in all groups."""

    def __init__(
        self,
        specs: Sequence[KVGroupSpec],
        num_pages: Mapping[str, int],
        *,
        prefix_cache: bool = False,
        hash_block: HashBlock = chained_hash,
    ) -> None:
        """No sequence holds a page.

        Args:
            specs: the KV groups.
            num_pages: by group.
            prefix_cache: whether pages are found again by what they hold.
            hash_block: of the cache's blocks (tests).

        Raises:
            InvalidField: these groups cannot have a prefix cache.
        """
        self._specs = {spec.name: spec for spec in specs}
        self._allocators = {name: PageAllocator(num_pages[name]) for name in self._specs}
        self._tables: dict[int, dict[str, SequencePages]] = {}
        self._freed: dict[str, list[int]] = {name: [] for name in self._specs}
        self._cache = PrefixCache(specs, self._allocators, hash_block) if prefix_cache else None
        self._published: dict[int, _Published] = {}

    def find(self, token_ids: Sequence[int], salt: str, most_tokens: int) -> PrefixHit:
        """The longest beginning of a text, at most `most_tokens`, whose KV is present in all groups."""
        return NO_HIT if self._cache is None else self._cache.find(token_ids, salt, most_tokens)

    def open(self, slot: int, salt: str = "", hit: PrefixHit = NO_HIT) -> None:
        """A sequence starts in `slot`, with the pages of what was found of its text."""
        assert slot not in self._tables, f"slot {slot} already owns pages"
        tables = {name: SequencePages(spec.page_size, spec.window) for name, spec in self._specs.items()}
        for name, (first, pages) in hit.pages.items():
            self._allocators[name].share(pages)
            tables[name].adopt(first, pages)
        self._tables[slot] = tables
        num_blocks = 0 if self._cache is None else hit.num_tokens // self._cache.block_size
        self._published[slot] = _Published(salt, hit.block, num_blocks, hit.deepest)
        self._note_parting(slot)

    def close(self, slot: int) -> None:
        """Give back every page of `slot`. Those at its end are the first to go when memory is wanted: what lies behind
        a missing page serves nobody."""
        published = self._published.pop(slot)
        if self._cache is not None and published.block is not None:
            self._cache.leave(published.block)
        for name, table in self._tables.pop(slot).items():
            self._give_back(name, list(reversed(table.pages)))

    def publish(self, slot: int, token_ids: Sequence[int], num_confirmed: int) -> None:
        """Let whole pages of the first `num_confirmed` tokens be found, as far as `slot` still holds them."""
        if self._cache is None:
            return
        published, tables = self._published[slot], self._tables[slot]
        num_blocks = num_confirmed // self._cache.block_size
        if num_blocks <= published.num_blocks:
            return
        block, first = published.block, published.num_blocks
        if block is None or not block.is_found:  # another's pages stood for it, and have gone
            block, first, published.first_own = None, 0, None
        for column in range(first, num_blocks):
            held = {name: page for name, table in tables.items() if (page := table.page_at(column)) is not None}
            block = self._cache.add(block, token_ids, published.salt, column, held)
            if published.first_own is None and self._cache.has(block, held):
                published.first_own = block
        published.block, published.num_blocks = block, num_blocks
        self._note_parting(slot)

    def forget(self, slot: int) -> None:
        """Let nothing be found any more that `slot` has computed."""
        block = self._published[slot].first_own
        if self._cache is not None and block is not None:
            self._note_freed(self._cache.forget(block))

    def grow(self, slot: int, end: int) -> int:
        """Cover all positions below `end`, or as many as the free pages allow. Returns the end reached."""
        tables = self._tables[slot]
        if all(table.end >= end for table in tables.values()):
            return end
        for name, table in tables.items():
            end = min(end, table.end + self._allocators[name].num_free * self._specs[name].page_size)
        for name, table in tables.items():
            table.extend(self._take(name, table.num_missing(end)))
        return end

    def release_out_of_window(self, slot: int, num_computed: int) -> None:
        """Give back what no query of `slot` will see again."""
        for name, table in self._tables[slot].items():
            self._give_back(name, table.release_out_of_window(num_computed))

    def take_grants(self, slot: int) -> list[PageGrant]:
        """The pages that `slot` got since the last call."""
        return [
            PageGrant(slot, name, *new)
            for name, table in self._tables[slot].items()
            if (new := table.take_new()) is not None
        ]

    def take_freed(self) -> dict[str, list[int]]:
        """The pages given back since the last call, by group."""
        freed = {name: pages for name, pages in self._freed.items() if pages}
        self._freed = {name: [] for name in self._specs}
        return freed

    def demand(self, num_tokens: int, max_rows: int) -> dict[str, int]:
        """Most pages by group that a sequence holds until `num_tokens` tokens are computed."""
        return {
            name: most_pages(num_tokens, spec.page_size, spec.window, max_rows) for name, spec in self._specs.items()
        }

    def still_missing(self, slot: int, num_tokens: int, max_rows: int) -> dict[str, int]:
        """Pages by group that `slot` may yet take until `num_tokens` tokens are computed.

        A window that slides gives back the pages it shares without making room by that, so they do not count as held.
        """
        demand = self.demand(num_tokens, max_rows)
        missing: dict[str, int] = {}
        for name, table in self._tables[slot].items():
            allocator, held = self._allocators[name], len(table.pages)
            if self._specs[name].window is not None and allocator.num_shared:
                held = sum(allocator.num_holders(page) == 1 for page in table.pages)
            missing[name] = max(0, demand[name] - held)
        return missing

    def leavers(self) -> Leavers:
        """Nobody of those who hold pages, for what would be if some of them left."""
        return Leavers(self._tables, self._allocators)

    def held_for_good(self, hit: PrefixHit, leavers: Leavers) -> dict[str, int]:
        """Pages of `hit` by group that others than `leavers` hold and that its sequence keeps to its end: they take no
        memory. Those of a window are left behind."""
        return {
            name: sum(leavers.leave_held(name, page) for page in hit.pages[name][1])
            if hit.pages and spec.window is None
            else 0
            for name, spec in self._specs.items()
        }

    @property
    def pages_free(self) -> dict[str, int]:
        """Pages by group that no sequence holds; the prefix cache may find them until they are wanted."""
        return {name: allocator.num_free for name, allocator in self._allocators.items()}

    @property
    def pages_cached(self) -> dict[str, int]:
        """Pages by group that the prefix cache finds, held by sequences or not; empty without a cache."""
        return {} if self._cache is None else self._cache.num_pages()

    @property
    def num_evicted(self) -> int:
        """Pages that the prefix cache had to give up since the start."""
        return 0 if self._cache is None else self._cache.num_evicted

    @property
    def pages_total(self) -> dict[str, int]:
        """Pages by group."""
        return {name: allocator.num_pages for name, allocator in self._allocators.items()}

    @property
    def pages_in_use(self) -> dict[str, int]:
        """Pages by group that sequences hold."""
        return {name: allocator.num_pages - allocator.num_free for name, allocator in self._allocators.items()}

    def pages_of(self, slot: int) -> dict[str, Sequence[int]]:
        """The pages of one sequence by group."""
        return {name: table.pages for name, table in self._tables[slot].items()}

    def check(self, slots: Iterable[int]) -> None:
        """Every page is held by as many of `slots` as its allocator counts, idle in the cache, or free.

        Raises:
            PageError: naming the pages and slots that disagree.
        """
        running = sorted(slots)
        if running != sorted(self._tables):
            raise PageError(f"slots {sorted(self._tables)} own pages, slots {running} run")
        for name, allocator in self._allocators.items():
            owners: dict[int, list[int]] = {}
            for slot, tables in self._tables.items():
                for page in tables[name].pages:
                    owners.setdefault(page, []).append(slot)
            for page, slots_of_page in owners.items():
                if len(slots_of_page) != allocator.num_holders(page) != 0:
                    raise PageError(
                        f"group {name}: page {page} is owned by slots {' and '.join(map(str, slots_of_page))}, "
                        f"and counted for {allocator.num_holders(page)}"
                    )
            if owners.keys() != allocator.held:
                raise PageError(
                    f"group {name}: pages {sorted(allocator.held - owners.keys())} are owned by no sequence, "
                    f"pages {sorted(owners.keys() - allocator.held)} are owned and free"
                )
            allocator.check()
        if self._cache is not None:
            self._cache.check()

    def _note_parting(self, slot: int) -> None:
        published = self._published[slot]
        parting = published.parting
        if self._cache is not None and parting is not None and parting.length <= published.num_blocks:
            self._cache.use(parting)
            published.parting = None

    def _give_back(self, name: str, pages: list[int]) -> None:
        if not pages:
            return
        self._freed[name].extend(self._allocators[name].free(pages))

    def _take(self, name: str, count: int) -> list[int]:
        """Pages that nobody holds, at the cost of what the cache could have found."""
        if self._cache is not None:
            self._note_freed(self._cache.make_room(name, count))
        pages = self._allocators[name].allocate(count)
        assert pages is not None
        return pages

    def _note_freed(self, pages: Iterable[tuple[str, int]]) -> None:
        for name, page in pages:
            self._freed[name].append(page)


class Leavers:
    """Sequences of which is asked what would be if they gave back their pages."""

    def __init__(
        self, tables: Mapping[int, Mapping[str, SequencePages]], allocators: Mapping[str, PageAllocator]
    ) -> None:
        """Nobody yet."""
        self._tables = tables
        self._allocators = allocators
        self._counts: dict[str, Counter[int]] = {name: Counter() for name in allocators}
        self.freed = dict.fromkeys(allocators, 0)
        """Pages by group that nobody would hold any more."""

    def add(self, slot: int) -> None:
        """One more that leaves."""
        for name, table in self._tables[slot].items():
            counts, allocator = self._counts[name], self._allocators[name]
            counts.update(table.pages)
            self.freed[name] += sum(counts[page] == allocator.num_holders(page) for page in table.pages)

    def leave_held(self, name: str, page: int) -> bool:
        """Whether somebody else holds a page."""
        return self._allocators[name].num_holders(page) > self._counts[name][page]
