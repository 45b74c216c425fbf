from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.kv.allocator import PageAllocator, PageError
from gemray_workers.kv.block_table import SequencePages, most_pages


def test_all_pages_but_the_null_page_are_handed_out_once() -> None:
    allocator = PageAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    assert allocator.num_free == 0
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == []


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1, 1], "occurs twice"),
        ([1, 3], "page 3 was given back while free"),
        ([0], "page 0 of a pool of pages 1..4"),
        ([1, 5], "page 5 of a pool of pages 1..4"),
    ],
)
def test_wrong_pages_are_refused_and_nothing_changes(pages: list[int], message: str) -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(2) == [1, 2]
    with pytest.raises(PageError, match=message):
        allocator.free(pages)
    assert allocator.held == {1, 2}
    assert allocator.num_free == 2


def test_only_pages_that_are_out_are_shared() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(2) == [1, 2]
    with pytest.raises(PageError, match="page 3 was shared while free"):
        allocator.share([1, 3])
    allocator.share([2])
    assert allocator.free([1, 2]) == [1]
    assert allocator.free([2]) == [2]


def test_spare_pages_are_the_first_to_be_discarded_and_each_kind_in_the_order_of_its_return() -> None:
    allocator = PageAllocator(6)
    pages = allocator.allocate(6)
    assert pages is not None
    for page in pages:
        allocator.keep(page)
    for page in (2, 5):
        allocator.set_spare(page, True)
    allocator.free([4, 5, 1, 2, 3])
    allocator.set_spare(1, True)  # while idle: last of the spare ones
    allocator.set_spare(5, False)
    allocator.set_spare(5, False)
    allocator.share([3])
    order = []
    while allocator.num_free > allocator.num_empty:
        allocator.check()
        assert allocator.has_idle_spare == (allocator.oldest_idle() in (1, 2))
        order.append(allocator.oldest_idle())
        assert allocator.discard(order[-1])
    assert order == [2, 1, 4, 5]
    assert not allocator.discard(6), "it is held"
    with pytest.raises(PageError, match="page 6 was made spare and is not kept"):
        allocator.set_spare(6, True)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 12)), max_size=60))
def test_allocator_against_a_counter(actions: list[tuple[str, int]]) -> None:
    allocator, holders = PageAllocator(20), Counter[int]()
    for action, count in actions:
        some = sorted(holders)[:count]
        if action == "allocate":
            pages = allocator.allocate(count)
            assert (pages is None) == (count > 20 - len(holders))
            assert not holders.keys() & set(pages or [])
            holders.update(pages or [])
        elif action == "share":
            allocator.share(some)
            holders.update(some)
        else:
            last = [page for page in some if holders[page] == 1]
            assert allocator.free(some) == last
            holders -= Counter(some)
        assert allocator.held == holders.keys()
        assert allocator.num_free == 20 - len(holders)


@given(
    page_size=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 12)),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=30),
)
def test_a_sequence_holds_exactly_the_columns_it_needs(
    page_size: int, window: int | None, steps: list[tuple[int, int]]
) -> None:
    """Each step covers `rows` more positions and then drops `rejected` of them again."""
    table, num_computed, next_page = SequencePages(page_size, window), 0, 1
    announced: dict[int, int] = {}
    for rows, rejected in steps:
        end = num_computed + rows
        pages = list(range(next_page, next_page + table.num_missing(end)))
        next_page += len(pages)
        table.extend(pages)
        assert table.num_missing(end) == 0
        assert end <= table.end < end + page_size or not pages
        assert len(table.pages) <= most_pages(table.end, page_size, window, max(9 + 3, rows))
        new = table.take_new()
        assert (new is not None) == bool(pages)
        if new is not None:
            announced.update(enumerate(new[1], new[0]))
        num_computed += rows - min(rejected, rows - 1)
        released = table.release_out_of_window(num_computed)
        first_kept = 0 if window is None else max(0, num_computed - window)
        assert table.first_column == first_kept // page_size
        columns = range(table.first_column, table.first_column + len(table.pages))
        assert [announced[column] for column in columns] == list(table.pages)
        assert not set(released) & set(table.pages)
    assert sorted(announced) == list(range(len(announced)))


@given(
    num_tokens=st.integers(1, 80),
    page_size=st.integers(1, 6),
    window=st.integers(1, 20),
    max_rows=st.integers(1, 20),
    data=st.data(),
)
def test_most_pages_is_reached_by_no_chunking(
    num_tokens: int, page_size: int, window: int, max_rows: int, data: st.DataObject
) -> None:
    table, num_computed = SequencePages(page_size, window), 0
    while num_computed < num_tokens:
        num_computed += data.draw(st.integers(1, min(max_rows, num_tokens - num_computed)))
        table.extend([1] * table.num_missing(num_computed))
        assert len(table.pages) <= most_pages(num_tokens, page_size, window, max_rows)
        table.release_out_of_window(num_computed)
