"""Which pages hold the KV of which beginnings of texts, so that no beginning is computed twice.

A text is cut into blocks of a page each. A block is found by a hash of its token ids chained to the hash of the block
before it, and then compared: the same ids behind the same block. So a block stands for a whole beginning, two different
ones are never taken for each other whatever their hashes, and blocks form a tree with one root for each salt.

What a block's pages hold is true for each KV group by itself. A full group needs every page of the beginning; a block
without its page there serves nobody, nor does any block behind it, so they leave together. A sliding group needs the
pages of the last W positions alone: blocks outlive their pages there, and a beginning is served when the pages of its
own last window are present.

Pages that are kept here are idle in their allocator when no sequence holds them, and are discarded when memory is
wanted, in an order that keeps what serves most (`eviction_order.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gemray_workers.errors import InvalidField
from gemray_workers.kv.allocator import PageAllocator, PageError
from gemray_workers.kv.eviction_order import EvictionOrder
from gemray_workers.kv.prefix_block import Block
from gemray_workers.kv.spec import KVGroupSpec

HashBlock = Callable[[int, bytes], int]
"""From the hash of the block before and the ids of a block to its hash."""


def chained_hash(before: int, ids: bytes) -> int:
    """The hash of a block; keyed anew in each process, as Python's hashes of bytes are, so that no client can choose
    texts that meet in one."""
    return hash((before, ids))


@dataclass(frozen=True)
class PrefixHit:
    """A beginning whose KV is present."""

    num_tokens: int
    """Whole blocks."""
    pages: Mapping[str, tuple[int, list[int]]]
    """By group: the first column that a sequence needs, and the pages from there on; empty without tokens."""
    block: Block | None
    """The last one; None without tokens."""
    deepest: Block | None = None
    """The last one that is known of the text, whether or not all groups can serve that much."""


NO_HIT = PrefixHit(0, {}, None)


class PrefixCache:
    """The blocks of all texts whose KV is present, over the allocators of all KV groups."""

    def __init__(
        self,
        specs: Sequence[KVGroupSpec],
        allocators: Mapping[str, PageAllocator],
        hash_block: HashBlock = chained_hash,
    ) -> None:
        """An empty cache.

        Args:
            specs: the KV groups; their pages must be of one size, and one of them must be full.
            allocators: by group.
            hash_block: of blocks (tests).

        Raises:
            InvalidField: groups with pages of several sizes, or sliding groups alone.
        """
        sizes = {spec.page_size for spec in specs}
        if len(sizes) != 1:
            raise InvalidField("prefix_cache", True, f"false: KV groups have pages of {sorted(sizes)} tokens")
        if all(spec.window is not None for spec in specs):
            raise InvalidField("prefix_cache", True, "false: there is no full KV group, by whose pages texts are kept")
        (self.block_size,) = sizes
        self._windows = {spec.name: spec.window for spec in specs}
        self._allocators = allocators
        self._hash_block = hash_block
        self._blocks: dict[int, list[Block]] = {}  # by key; several where hashes are equal
        self._roots: dict[str, Block] = {}  # by salt; those that have blocks
        self._owners: dict[str, dict[int, Block]] = {spec.name: {} for spec in specs}  # by group and page
        self._order = EvictionOrder(specs, allocators)
        self._num_evicted = 0

    @property
    def num_evicted(self) -> int:
        """Pages discarded since the start because memory was wanted."""
        return self._num_evicted

    def find(self, token_ids: Sequence[int], salt: str, most_tokens: int) -> PrefixHit:
        """The longest beginning of a text that every group can serve, at most `most_tokens`.

        Nothing is held by that: its pages are to be shared before any page is asked for.
        """
        chain: list[Block] = []
        block = self._roots.get(salt)
        for column in range(most_tokens // self.block_size):
            block = block and self._child(block, self._ids(token_ids, column))
            if block is None:
                break
            chain.append(block)
        length = self._longest_served(chain)
        if not length:
            return PrefixHit(0, {}, None, chain[-1]) if chain else NO_HIT
        pages = {name: self._order.columns(name, length) for name in self._windows}
        return PrefixHit(
            num_tokens=length * self.block_size,
            pages={
                name: (columns.start, [chain[column].pages[name] for column in columns])
                for name, columns in pages.items()
            },
            block=chain[length - 1],
            deepest=chain[-1],
        )

    def add(
        self, parent: Block | None, token_ids: Sequence[int], salt: str, column: int, pages: Mapping[str, int]
    ) -> Block:
        """Make the block of column `column` of a text findable, with pages that a sequence holds.

        A page that the block has already is left where it is; what it lacks in a sliding group is filled in.

        Args:
            parent: the block of the column before, still in the cache; None for column 0.
            token_ids: the text.
            salt: of the text.
            column: which page of the text.
            pages: by group; those of all full groups at least.
        """
        ids = self._ids(token_ids, column)
        if parent is None:
            parent = self._roots.setdefault(salt, Block(None, salt.encode(), hash(salt), 0))
        block = self._child(parent, ids)
        if block is None:
            block = Block(parent, ids, self._hash_block(parent.key, ids), parent.length + 1)
            block.is_hopeless = parent.is_hopeless  # until `add` of the order says otherwise
            parent.children.add(block)
            self._blocks.setdefault(block.key, []).append(block)
        for name, page in pages.items():
            if name not in block.pages:
                self._allocators[name].keep(page)
                block.pages[name] = page
                self._owners[name][page] = block
        self._order.add(block)
        assert all(name in block.pages for name, window in self._windows.items() if window is None), pages
        return block

    def has(self, block: Block, pages: Mapping[str, int]) -> bool:
        """Whether some of these pages, by group, is the one that `block` is found by."""
        return any(block.pages.get(name) == page for name, page in pages.items())

    def make_room(self, name: str, num_pages: int) -> list[tuple[str, int]]:
        """Discard idle pages of a group until so many pages can be allocated. Returns (group, page) of those that are
        free by that; in full groups that takes what lies behind along, in every group.

        `num_pages` must be at most what nobody holds.
        """
        allocator = self._allocators[name]
        freed: list[tuple[str, int]] = []
        while allocator.num_empty < num_pages:
            block = self._owners[name][self._order.next_page(name)]
            if self._windows[name] is None:
                freed += self._drop(block)
            else:
                freed += self._take_page(name, block)
                self._order.lose(name, block)
        self._num_evicted += len(freed)
        return freed

    def use(self, block: Block) -> None:
        """A text goes on behind a block, in a way of its own: keep what serves others that do."""
        if block.is_found:
            self._order.use(block)

    def leave(self, block: Block) -> None:
        """A sequence leaves whose last block this is."""
        if block.is_found:
            self._order.leave(block)

    def forget(self, block: Block) -> list[tuple[str, int]]:
        """Forget a block and all that lies behind it. Returns (group, page) of the pages that are free by that."""
        return self._drop(block) if block.is_found else []

    def num_pages(self) -> dict[str, int]:
        """Pages by group that can be found, held by sequences or not."""
        return {name: len(self._allocators[name].kept) for name in self._windows}

    def check(self) -> None:
        """Blocks and kept pages are the same, each of one place, and every block is reached from a root.

        Raises:
            PageError: naming what disagrees.
        """
        seen: dict[str, dict[int, Block]] = {name: {} for name in self._windows}
        blocks: list[Block] = []
        stack = [child for root in self._roots.values() for child in root.children]
        while stack:
            block = stack.pop()
            blocks.append(block)
            stack += block.children
            if block not in self._blocks.get(block.key, ()) or not block.is_found:
                raise PageError(f"a block with the pages {block.pages} is in the tree and cannot be found")
            for name, page in block.pages.items():
                if page in seen[name]:
                    raise PageError(f"group {name}: page {page} is found at two blocks")
                seen[name][page] = block
            lacking = [name for name, window in self._windows.items() if window is None and name not in block.pages]
            if lacking:
                raise PageError(f"a block has no page in the full groups {lacking}")
        if len(blocks) != sum(map(len, self._blocks.values())):
            raise PageError(f"{len(blocks)} blocks are reached from the roots, {len(self._blocks)} hashes are known")
        for name, pages in seen.items():
            kept = self._allocators[name].kept
            if pages != self._owners[name] or pages.keys() != kept:
                raise PageError(f"group {name}: blocks have pages {sorted(pages)}, kept are {sorted(kept)}")
        if any(not root.children for root in self._roots.values()):
            raise PageError("a salt without blocks is left")
        self._order.check(blocks)

    def _ids(self, token_ids: Sequence[int], column: int) -> bytes:
        return array("q", token_ids[column * self.block_size : (column + 1) * self.block_size]).tobytes()

    def _child(self, parent: Block, ids: bytes) -> Block | None:
        key = self._hash_block(parent.key, ids)
        for block in self._blocks.get(key, ()):
            if block.parent is parent and block.ids == ids:
                return block
        return None

    def _longest_served(self, chain: Sequence[Block]) -> int:
        """Most blocks of the beginning of a chain that every group has the pages for."""
        served = [True] * (len(chain) + 1)
        for name, window in self._windows.items():
            if window is None:
                continue  # every block has a page in every full group
            num_present = 0  # pages one after the other, up to here
            for length, block in enumerate(chain, 1):
                num_present = num_present + 1 if name in block.pages else 0
                served[length] &= num_present >= len(self._order.columns(name, length))
        return max(length for length, is_served in enumerate(served) if is_served)

    def _take_page(self, name: str, block: Block) -> list[tuple[str, int]]:
        page = block.pages.pop(name)
        del self._owners[name][page]
        return [(name, page)] if self._allocators[name].discard(page) else []

    def _drop(self, first: Block) -> list[tuple[str, int]]:
        """Take a block and all behind it out of the tree."""
        freed: list[tuple[str, int]] = []
        assert first.parent is not None, "a root is not a block"
        first.parent.children.remove(first)
        if first.parent.parent is None and not first.parent.children:
            del self._roots[first.parent.ids.decode()]
        stack = [first]
        dropped: list[Block] = []
        while stack:
            block = stack.pop()
            stack += block.children
            dropped.append(block)
            block.is_found = False
            self._remove(block)
            for name in list(block.pages):
                freed += self._take_page(name, block)
        self._order.drop(first.parent, dropped)
        return freed

    def _remove(self, block: Block) -> None:
        same_key = self._blocks[block.key]
        same_key.remove(block)
        if not same_key:
            del self._blocks[block.key]
