"""Who owns which page: the allocators of all KV groups and the pages of every running sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gemray_workers.kv.allocator import PageAllocator, PageError
from gemray_workers.kv.block_table import SequencePages, most_pages
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.scheduling.plan import PageGrant


class PageLedger:
    """Pages by group and slot. A sequence grows equally far in all groups."""

    def __init__(self, specs: Sequence[KVGroupSpec], num_pages: Mapping[str, int]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._allocators = {name: PageAllocator(num_pages[name]) for name in self._specs}
        self._tables: dict[int, dict[str, SequencePages]] = {}
        self._freed: dict[str, list[int]] = {name: [] for name in self._specs}

    def open(self, slot: int) -> None:
        """A sequence starts in `slot`, with no pages."""
        assert slot not in self._tables, f"slot {slot} already owns pages"
        self._tables[slot] = {name: SequencePages(spec.page_size, spec.window) for name, spec in self._specs.items()}

    def close(self, slot: int) -> None:
        """Give back every page of `slot`."""
        for name, table in self._tables.pop(slot).items():
            self._give_back(name, list(table.pages))

    def grow(self, slot: int, end: int) -> int:
        """Cover all positions below `end`, or as many as the free pages allow. Returns the end reached."""
        tables = self._tables[slot]
        if all(table.end >= end for table in tables.values()):
            return end
        for name, table in tables.items():
            end = min(end, table.end + self._allocators[name].num_free * self._specs[name].page_size)
        for name, table in tables.items():
            pages = self._allocators[name].allocate(table.num_missing(end))
            assert pages is not None
            table.extend(pages)
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
        """Pages by group that `slot` may yet take until `num_tokens` tokens are computed."""
        demand = self.demand(num_tokens, max_rows)
        return {name: max(0, demand[name] - len(table.pages)) for name, table in self._tables[slot].items()}

    @property
    def pages_free(self) -> dict[str, int]:
        """Pages by group that nobody owns."""
        return {name: allocator.num_free for name, allocator in self._allocators.items()}

    @property
    def pages_total(self) -> dict[str, int]:
        """Pages by group."""
        return {name: allocator.num_pages for name, allocator in self._allocators.items()}

    @property
    def pages_in_use(self) -> dict[str, int]:
        """Pages by group that sequences own."""
        return {name: allocator.num_pages - allocator.num_free for name, allocator in self._allocators.items()}

    def pages_of(self, slot: int) -> dict[str, Sequence[int]]:
        """The pages of one sequence by group."""
        return {name: table.pages for name, table in self._tables[slot].items()}

    def check(self, slots: Iterable[int]) -> None:
        """Every page is free or owned by exactly one of `slots`.

        Raises:
            PageError: naming the pages and slots that disagree.
        """
        running = sorted(slots)
        if running != sorted(self._tables):
            raise PageError(f"slots {sorted(self._tables)} own pages, slots {running} run")
        for name, allocator in self._allocators.items():
            owner: dict[int, int] = {}
            for slot, tables in self._tables.items():
                for page in tables[name].pages:
                    if page in owner:
                        raise PageError(f"group {name}: page {page} is owned by slots {owner[page]} and {slot}")
                    owner[page] = slot
            if owner.keys() != allocator.held:
                raise PageError(
                    f"group {name}: pages {sorted(allocator.held - owner.keys())} are owned by no sequence, "
                    f"pages {sorted(owner.keys() - allocator.held)} are owned and free"
                )

    def _give_back(self, name: str, pages: list[int]) -> None:
        if not pages:
            return
        self._freed[name].extend(self._allocators[name].free(pages))
