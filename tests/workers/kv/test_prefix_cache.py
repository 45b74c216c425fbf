"""The prefix cache and the allocators under it: what is found is what was asked for, and no page is lost or doubled."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gemray_workers.errors import InvalidField
from gemray_workers.kv.allocator import PageAllocator, PageError
from gemray_workers.kv.prefix_block import Block
from gemray_workers.kv.prefix_cache import NO_HIT, HashBlock, PrefixCache, chained_hash
from gemray_workers.kv.spec import KVGroupSpec

PAGE = 2


def spec(name: str, window: int | None, page_size: int = PAGE) -> KVGroupSpec:
    return KVGroupSpec(name, (0,), 1, 8, page_size, window, torch.float32)


class Rig:
    """A full and a sliding group with a window of 3 tokens, and texts whose pages are added by hand."""

    def __init__(self, num_pages: int = 12, hash_block: HashBlock = chained_hash) -> None:
        specs = [spec("sliding", 3), spec("full", None)]
        self.allocators = {s.name: PageAllocator(num_pages) for s in specs}
        self.cache = PrefixCache(specs, self.allocators, hash_block)

    def hold(self, token_ids: list[int], salt: str = "") -> dict[str, list[int]]:
        """Compute a text: pages in both groups, all findable."""
        count = len(token_ids) // PAGE
        pages = {}
        for name, allocator in self.allocators.items():
            self.cache.make_room(name, count)
            pages[name] = allocator.allocate(count) or []
        block: Block | None = None
        for column in range(count):
            block = self.cache.add(block, token_ids, salt, column, {name: pages[name][column] for name in pages})
        return pages

    def give_back(self, pages: dict[str, list[int]]) -> None:
        self.cache.leave(self.cache._owners["full"][pages["full"][-1]])
        for name, numbers in pages.items():
            assert self.allocators[name].free(list(reversed(numbers))) == []

    def found(self, token_ids: list[int], salt: str = "") -> int:
        return self.cache.find(token_ids, salt, len(token_ids)).num_tokens


def test_a_beginning_is_found_as_far_as_ids_are_equal() -> None:
    rig = Rig()
    pages = rig.hold([1, 2, 3, 4, 5, 6])
    rig.give_back(pages)
    hit = rig.cache.find([1, 2, 3, 4, 9, 9], "", 6)
    assert hit.num_tokens == 4
    assert hit.pages == {"sliding": (0, pages["sliding"][:2]), "full": (0, pages["full"][:2])}
    assert rig.cache.find([1, 2, 3, 4, 5, 6], "", 5).num_tokens == 4, "the last token is to be computed"
    assert rig.cache.find([2, 1, 3, 4], "", 4) is NO_HIT
    assert rig.cache.find([3, 4, 5, 6], "", 4) is NO_HIT, "a block counts behind its own beginning alone"


def test_a_sliding_group_needs_the_last_window_alone() -> None:
    rig = Rig()
    rig.give_back(rig.hold([1, 2, 3, 4, 5, 6, 7, 8]))
    hit = rig.cache.find([1, 2, 3, 4, 5, 6, 7, 8], "", 8)
    assert hit.pages["sliding"][0] == 2, "positions 5 to 7 lie in columns 2 and 3"
    first, second, *_ = rig.cache._owners["sliding"].values()
    for block in (first, second):
        rig.cache._take_page("sliding", block)
    assert rig.found([1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert rig.found([1, 2, 3, 4, 5, 6, 7]) == 0, "three tokens before position 6 reach into column 1"
    rig.cache.check()


def test_salts_keep_texts_apart() -> None:
    rig = Rig()
    rig.hold([1, 2, 3, 4], salt="a")
    assert rig.found([1, 2, 3, 4], salt="a") == 4
    assert rig.found([1, 2, 3, 4], salt="b") == rig.found([1, 2, 3, 4]) == 0


def test_equal_hashes_are_told_apart_by_their_ids() -> None:
    rig = Rig(hash_block=lambda _before, _ids: 7)
    one, other = rig.hold([1, 2, 3, 4]), rig.hold([5, 6, 3, 4])
    assert rig.cache.find([1, 2, 3, 4], "", 4).pages["full"] == (0, one["full"])
    assert rig.cache.find([5, 6, 3, 4], "", 4).pages["full"] == (0, other["full"])
    assert rig.found([3, 4]) == rig.found([1, 2, 5, 6]) - 2 == 0


def test_what_was_used_longest_ago_goes_first_and_what_lies_behind_it_too() -> None:
    rig = Rig(num_pages=4)
    rig.give_back(rig.hold([1, 2, 3, 4]))
    rig.give_back(rig.hold([5, 6, 7, 8]))
    hit = rig.cache.find([1, 2, 3, 4], "", 4)
    assert hit.deepest is not None
    rig.cache.use(hit.deepest)
    for name, (_, numbers) in hit.pages.items():
        rig.allocators[name].share(numbers)
        rig.allocators[name].free(list(reversed(numbers)))
    rig.give_back(rig.hold([9, 9]))
    assert (rig.found([1, 2, 3, 4]), rig.found([5, 6, 7, 8]), rig.found([9, 9])) == (4, 2, 2)
    rig.cache.check()


def test_held_pages_stay() -> None:
    rig = Rig(num_pages=4)
    rig.hold([1, 2, 3, 4])
    rig.give_back(rig.hold([5, 6, 7, 8]))
    rig.hold([9, 9, 8, 8])
    assert (rig.found([1, 2, 3, 4]), rig.found([5, 6]), rig.found([9, 9, 8, 8])) == (4, 0, 4)
    assert rig.cache.num_evicted == 4


def test_a_forgotten_text_is_not_found_and_its_held_pages_stay_with_their_holder() -> None:
    rig = Rig()
    pages = rig.hold([1, 2, 3, 4])
    block = rig.cache.find([1, 2, 3, 4], "", 4).block
    assert block is not None
    assert rig.cache.forget(block) == []
    assert rig.cache.forget(block) == []
    assert rig.found([1, 2, 3, 4]) == 2, "what lies before it stays"
    assert rig.allocators["full"].free(pages["full"]) == pages["full"][1:]
    rig.cache.check()


def test_groups_that_cannot_be_served_are_refused() -> None:
    for specs in ([spec("a", None), spec("b", 4, page_size=4)], [spec("sliding", 4)]):
        with pytest.raises(InvalidField, match="prefix_cache"):
            PrefixCache(specs, {s.name: PageAllocator(4) for s in specs})


def test_the_check_sees_a_page_that_is_kept_and_not_found() -> None:
    rig = Rig()
    pages = rig.allocators["full"].allocate(1)
    assert pages is not None
    rig.allocators["full"].keep(pages[0])
    with pytest.raises(PageError, match=r"group full: blocks have pages \[\], kept are \[1\]"):
        rig.cache.check()


@dataclass
class Holder:
    """A made-up sequence."""

    ids: list[int]
    salt: str
    pages: dict[str, dict[int, int]]
    """By group and column."""
    num_confirmed: int
    block: Block | None
    num_added: int = 0


class CacheMachine(RuleBasedStateMachine):
    """Texts of few different tokens come, find, grow, slide, and leave; pages remember what was written to them."""

    @initialize(
        data=st.data(),
        windows=st.lists(st.sampled_from([None, 1, 2, 3, 5, 8]), min_size=1, max_size=3),
        num_pages=st.integers(4, 14),
        collide=st.booleans(),
    )
    def build(self, data: st.DataObject, windows: list[int | None], num_pages: int, collide: bool) -> None:
        self.specs = [spec("full", None), *(spec(f"g{i}", window) for i, window in enumerate(windows))]
        self.allocators = {s.name: PageAllocator(num_pages) for s in self.specs}
        self.cache = PrefixCache(self.specs, self.allocators, (lambda _b, _i: 3) if collide else chained_hash)
        self.written: dict[tuple[str, int], tuple[str, list[int]]] = {}
        self.holders: list[Holder] = []

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from(["", "", "s"]))
    def come(self, ids: list[int], salt: str) -> None:
        hit = self.cache.find(ids, salt, len(ids) - 1)
        assert hit.num_tokens < len(ids)
        pages: dict[str, dict[int, int]] = {}
        for s in self.specs:
            first, numbers = hit.pages.get(s.name, (0, []))
            need = 0 if s.window is None else max(0, hit.num_tokens - s.window) // PAGE
            assert (first, len(numbers)) == (need, hit.num_tokens // PAGE - need)
            for column, page in enumerate(numbers, first):
                assert self.written[s.name, page] == (salt, ids[: (column + 1) * PAGE]), "another text's page"
            self.allocators[s.name].share(numbers)
            pages[s.name] = dict(enumerate(numbers, first))
        if hit.deepest is not None:
            self.cache.use(hit.deepest)
        self.holders.append(Holder(list(ids), salt, pages, hit.num_tokens, hit.block, hit.num_tokens // PAGE))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4))
    def compute(self, data: st.DataObject, more: list[int]) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        holder.ids += more
        end = data.draw(st.integers(holder.num_confirmed, len(holder.ids)))
        columns = range(holder.num_confirmed // PAGE, -(-end // PAGE))
        for s in self.specs:
            missing = [column for column in columns if column not in holder.pages[s.name]]
            if len(missing) > self.allocators[s.name].num_free:
                return
        for s in self.specs:
            missing = [column for column in columns if column not in holder.pages[s.name]]
            for name, page in self.cache.make_room(s.name, len(missing)):
                del self.written[name, page]
            got = self.allocators[s.name].allocate(len(missing))
            assert got is not None
            assert not any((s.name, page) in self.written for page in got), "a page of the cache was handed out"
            holder.pages[s.name].update(zip(missing, got, strict=True))
        holder.num_confirmed = end
        self.publish(holder)
        for s in self.specs:
            kept_from = 0 if s.window is None else max(0, end - s.window) // PAGE
            self.free(s.name, [holder.pages[s.name].pop(c) for c in sorted(holder.pages[s.name]) if c < kept_from])

    def publish(self, holder: Holder) -> None:
        if holder.block is None or not holder.block.is_found:
            holder.block, holder.num_added = None, 0
        for column in range(holder.num_added, holder.num_confirmed // PAGE):
            held = {name: pages[column] for name, pages in holder.pages.items() if column in pages}
            holder.block = self.cache.add(holder.block, holder.ids, holder.salt, column, held)
            holder.num_added = column + 1
            for name, page in held.items():
                if self.cache._owners[name].get(page) is holder.block:
                    self.written[name, page] = (holder.salt, holder.ids[: (column + 1) * PAGE])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), forget=st.booleans())
    def leave(self, data: st.DataObject, forget: bool) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        if forget and holder.block is not None:
            for name, page in self.cache.forget(holder.block):
                del self.written[name, page]
        elif holder.block is not None:
            self.cache.leave(holder.block)
        for name, pages in holder.pages.items():
            self.free(name, [pages[column] for column in sorted(pages, reverse=True)])

    def free(self, name: str, pages: list[int]) -> None:
        for page in self.allocators[name].free(pages):
            self.written.pop((name, page), None)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for name, allocator in self.allocators.items():
            allocator.check()
            for page in range(1, allocator.num_pages + 1):
                holders = sum(page in holder.pages[name].values() for holder in self.holders)
                assert allocator.num_holders(page) == holders

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            while self.holders:
                holder = self.holders.pop()
                for name, pages in holder.pages.items():
                    self.free(name, list(pages.values()))
            for allocator in self.allocators.values():
                assert allocator.num_free == allocator.num_pages, "a page is lost"
            self.adds_up()


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase
