"""Which idle pages of the prefix cache go first when memory is wanted.

Least recently used alone loses what makes hits long. A text of which a beginning of length P is served needs the pages
of P-W..P in each sliding group; a long prompt pushes all of its windows through there, and nobody will go on behind
most of them. So blocks are marked as **ends** where texts are expected to go on: where a sequence has left, and where
one has parted from a text that was known. The pages of a sliding group that lie in no end's last window go first, and
those of a full group that lead to no end.

If there is none, the end of the least priority is given up. A priority is how often the end was used, plus the priority
of the last end that had been given up by then: so what is used often stays, and not for ever (LFU with dynamic aging:
Arlitt et al., "Evaluating content management techniques for web proxy caches", 2000). A chat that has gone on is not
expected to go on from its earlier turn, unless it has already done so in two ways.

That is an order and no more: what is still present is found, whether it was expected or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from gemray_workers.kv.allocator import PageAllocator, PageError
from gemray_workers.kv.prefix_block import Block
from gemray_workers.kv.spec import KVGroupSpec

MOST_OLD_ENTRIES = 64
"""Entries of the heap that no longer count, beyond as many as there are ends, before it is made anew."""


@dataclass
class _End:
    """What is known of a block that is an end."""

    num_uses: int = 0
    was_left: bool = False
    """Whether a sequence left there before any parted from a known text there."""
    priority: int = 0
    entry: int = 0
    """Which of its entries in the heap counts."""


class EvictionOrder:
    """The ends of texts, and by them which pages are spare in their allocators."""

    def __init__(self, specs: Sequence[KVGroupSpec], allocators: Mapping[str, PageAllocator]) -> None:
        """No ends.

        Args:
            specs: the KV groups, with pages of one size.
            allocators: by group.
        """
        self._full = [spec.name for spec in specs if spec.window is None]
        self._windows = {spec.name: (spec.window, spec.page_size) for spec in specs if spec.window is not None}
        self._allocators = allocators
        self._ends: dict[Block, _End] = {}
        self._heap: list[tuple[int, int, Block]] = []  # priority, entry, end; entries that no longer count among them
        self._num_entries = 0
        self._age = 0

    def columns(self, name: str, length: int) -> range:
        """The columns whose pages a group needs to serve `length` blocks."""
        if name not in self._windows:
            return range(length)
        window, page_size = self._windows[name]
        return range(max(0, length * page_size - window) // page_size, length)

    # What happens to texts

    def use(self, block: Block) -> None:
        """A sequence has parted here from the texts that were known; others will, if all groups can serve them."""
        if block in self._ends or self._is_served(block):
            self._count_use(block)

    def leave(self, block: Block) -> None:
        """A sequence has left, whose last block this is."""
        if block not in self._ends and not self._is_served(block):
            self._give_up(block)
            return
        is_new = block not in self._ends
        end = self._count_use(block)
        end.was_left |= is_new
        assert block.parent is not None, "a root is no end"
        before = next((b for b in block.parent.upwards() if b in self._ends), None)
        if before is not None and self._is_superseded(before):
            self._unmark(before)

    def add(self, block: Block) -> None:
        """A block is new, or has got pages."""
        for name in block.pages:
            self._settle_page(name, block)
        self._revive(block)

    def lose(self, name: str, block: Block) -> None:
        """A block that stays has lost its page of a sliding group."""
        for end in list(block.wanted_by.get(name, ())):
            self._unmark(end)
            self._give_up(end)

    def drop(self, parent: Block, blocks: Sequence[Block]) -> None:
        """Blocks that lay behind `parent` have left the tree."""
        for block in blocks:
            if block in self._ends:
                self._unmark(block)
        if parent.parent is not None:
            self._give_up(parent)

    # What goes

    def next_page(self, name: str) -> int:
        """The idle page of a group that is to be discarded next; there must be one."""
        allocator = self._allocators[name]
        while not allocator.has_idle_spare and self._give_up_least(name):
            pass
        return allocator.oldest_idle()

    def check(self, blocks: Sequence[Block]) -> None:
        """Ends, blocks and allocators agree; `blocks` are all of the tree.

        Raises:
            PageError: naming what does not.
        """
        if not self._ends.keys() <= set(blocks):
            raise PageError("an end is not in the tree")
        wanted: dict[tuple[str, Block], set[Block]] = {}
        for end in self._ends:
            for name in self._windows:
                for block in self._last_window(name, end):
                    wanted.setdefault((name, block), set()).add(end)
                    if name not in block.pages:
                        raise PageError(f"group {name}: an end at block {end.length} lacks the page of {block.length}")
        for block in blocks:
            if block.wanted_by != {name: wanted[name, block] for name in self._windows if (name, block) in wanted}:
                raise PageError(f"block {block.length} is wanted by ends that are none, or not by one that is")
            if block.is_hopeless and (block in self._ends or not all(child.is_hopeless for child in block.children)):
                raise PageError(f"block {block.length} leads to an end and is given up")
            for name, page in block.pages.items():
                if self._allocators[name].is_spare(page) != self._is_spare(name, block):
                    raise PageError(f"group {name}: page {page} of block {block.length} is in the wrong order")

    def _count_use(self, block: Block) -> _End:
        """One more use of an end, or of a block that is one from now on."""
        if block not in self._ends:
            self._ends[block] = _End()
            for name in self._windows:
                for before in self._last_window(name, block):
                    before.wanted_by.setdefault(name, set()).add(block)
                    self._settle_page(name, before)
            self._revive(block)
        end = self._ends[block]
        end.num_uses += 1
        end.priority = self._age + end.num_uses
        self._num_entries += 1
        end.entry = self._num_entries
        heappush(self._heap, (end.priority, end.entry, block))
        if len(self._heap) > 2 * len(self._ends) + MOST_OLD_ENTRIES:
            self._heap = [(end.priority, end.entry, block) for block, end in self._ends.items()]
            heapify(self._heap)
        return end

    def _is_superseded(self, block: Block) -> bool:
        """Whether an end is the earlier turn of a chat that has gone on, which nobody else has used."""
        end = self._ends[block]
        return end.was_left and end.num_uses <= 2 and len(block.children) == 1

    def _give_up_least(self, name: str) -> bool:
        """Give up the end of the least priority that holds idle pages of a group. Returns whether there was one."""
        held: list[tuple[int, int, Block]] = []
        least: Block | None = None
        while self._heap and least is None:
            priority, entry, block = item = heappop(self._heap)
            if block not in self._ends or self._ends[block].entry != entry:
                continue
            if self._has_idle(name, block):
                least, self._age = block, max(self._age, priority)
            else:
                held.append(item)
        for item in held:
            heappush(self._heap, item)
        if least is None:
            return False
        self._unmark(least)
        self._give_up(least)
        return True

    def _has_idle(self, name: str, end: Block) -> bool:
        """Whether nobody holds some page that an end needs; of a full group the last one is the first to be idle."""
        blocks = self._last_window(name, end) if name in self._windows else (end,)
        return any(self._allocators[name].num_holders(block.pages[name]) == 0 for block in blocks)

    def _last_window(self, name: str, block: Block) -> Iterator[Block]:
        return block.upwards(len(self.columns(name, block.length)))

    def _is_served(self, block: Block) -> bool:
        return all(name in before.pages for name in self._windows for before in self._last_window(name, block))

    def _unmark(self, end: Block) -> None:
        del self._ends[end]
        for name in self._windows:
            for block in self._last_window(name, end):
                ends = block.wanted_by[name]
                ends.remove(end)
                if not ends:
                    del block.wanted_by[name]
                    self._settle_page(name, block)

    def _give_up(self, block: Block) -> None:
        """Nobody is expected any more at a block, nor before it as long as nothing else lies behind."""
        for before in block.upwards():
            if before in self._ends or before.is_hopeless or not all(child.is_hopeless for child in before.children):
                return
            before.is_hopeless = True
            for name in self._full:
                self._settle_page(name, before)

    def _revive(self, block: Block) -> None:
        """Something is expected at a block again, and so before it."""
        for before in block.upwards():
            if not before.is_hopeless:
                return
            before.is_hopeless = False
            for name in self._full:
                self._settle_page(name, before)

    def _is_spare(self, name: str, block: Block) -> bool:
        return name not in block.wanted_by if name in self._windows else block.is_hopeless

    def _settle_page(self, name: str, block: Block) -> None:
        page = block.pages.get(name)
        if page is not None:
            self._allocators[name].set_spare(page, self._is_spare(name, block))
