"""What is remembered of prompts: equal beginnings, block by block, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemray_cluster.gang import prefix_affinity
from gemray_cluster.gang.prefix_affinity import BLOCK_TOKENS, MAX_BLOCKS, RememberedPrefixes, block_keys


@given(st.lists(st.integers(0, 3), max_size=4 * BLOCK_TOKENS), st.lists(st.integers(0, 3), max_size=4 * BLOCK_TOKENS))
def test_as_many_keys_are_equal_as_blocks_from_the_beginning(one: list[int], other: list[int]) -> None:
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    remembered = RememberedPrefixes()
    remembered.note(block_keys(one))
    assert remembered.num_known(block_keys(other)) == common // BLOCK_TOKENS


def test_the_same_block_later_in_a_prompt_is_another_one() -> None:
    first, second = block_keys([7] * BLOCK_TOKENS * 2)
    assert first != second


def test_a_very_long_prompt_is_looked_at_up_to_a_bound() -> None:
    assert len(block_keys(range(BLOCK_TOKENS * (MAX_BLOCKS + 3)))) == MAX_BLOCKS


def test_what_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_affinity, "MAX_REMEMBERED", 3)
    old, new = block_keys([1] * BLOCK_TOKENS * 2), block_keys([2] * BLOCK_TOKENS * 2)
    remembered = RememberedPrefixes()
    remembered.note(old)
    remembered.note(new)
    assert (len(remembered), remembered.num_known(old), remembered.num_known(new)) == (3, 1, 2)


def test_what_is_used_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_affinity, "MAX_REMEMBERED", 3)
    again, once, last = (
        block_keys([1] * BLOCK_TOKENS * 2),
        block_keys([2] * BLOCK_TOKENS),
        block_keys([3] * BLOCK_TOKENS),
    )
    remembered = RememberedPrefixes()
    for keys in (again, once, again, last):
        remembered.note(keys)
    assert [remembered.num_known(keys) for keys in (again, once, last)] == [2, 0, 1]
