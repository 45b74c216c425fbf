"""The rows of a vocabulary that each rank holds (spec 6.2)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.parallel.shard_indices import VOCAB_PADDING, ShardIndices

VOCABULARIES = st.tuples(st.integers(1, 5000), st.integers(0, 300), st.sampled_from([1, 2, 4, 8]))


def shards(org: int, added: int, size: int) -> list[ShardIndices]:
    return [ShardIndices.of_rank(rank, size, org_vocab_size=org, num_added=added) for rank in range(size)]


def test_the_example_of_the_specification() -> None:
    first, second = shards(1010, 16, 2)
    assert first.num_elements_padded + second.num_elements_padded == 1088
    assert (first.num_org_elements_padded, first.num_added_elements_padded) == (512, 32)
    assert first.global_ids().tolist() == [*range(512), *range(1010, 1026), *[-1] * 16]
    assert second.global_ids().tolist() == [*range(512, 1010), *[-1] * (544 - 498)]
    assert (second.num_org_elements, second.num_org_vocab_padding) == (498, 14)
    assert (second.num_added_elements, second.num_added_vocab_padding) == (0, 32)


def test_a_published_vocabulary_needs_no_padding() -> None:
    for size in (1, 2, 4, 8):
        for shard in shards(262144, 0, size):
            assert shard.num_elements_padded == shard.num_org_elements == 262144 // size


@given(VOCABULARIES)
def test_every_id_lies_in_one_row_of_one_rank(vocabulary: tuple[int, int, int]) -> None:
    org, added, size = vocabulary
    ids = torch.cat([shard.global_ids() for shard in shards(org, added, size)])
    assert sorted(ids[ids >= 0].tolist()) == list(range(org + added))
    assert len(ids) % VOCAB_PADDING == 0
    assert len(ids) < org + added + 2 * VOCAB_PADDING


@given(VOCABULARIES)
def test_rows_and_ids_are_inverses(vocabulary: tuple[int, int, int]) -> None:
    org, added, size = vocabulary
    everything = torch.arange(org + added)
    for shard in shards(org, added, size):
        rows, is_here = shard.local_rows(everything)
        assert torch.equal(shard.global_ids()[rows[is_here]], everything[is_here])
        assert not rows[~is_here].any()
        assert int(is_here.sum()) == shard.num_org_elements + shard.num_added_elements
        assert 0 <= int(rows.min()) <= int(rows.max()) < shard.num_elements_padded


@given(VOCABULARIES)
def test_the_counts_add_up(vocabulary: tuple[int, int, int]) -> None:
    org, added, size = vocabulary
    ranks = shards(org, added, size)
    assert sum(s.num_org_elements for s in ranks) == org
    assert sum(s.num_added_elements for s in ranks) == added
    assert len({s.num_elements_padded for s in ranks}) == 1
    for s in ranks:
        assert s.num_org_elements + s.num_org_vocab_padding == s.num_org_elements_padded
        assert s.num_added_elements + s.num_added_vocab_padding == s.num_added_elements_padded
        assert min(s.num_org_vocab_padding, s.num_added_vocab_padding) >= 0


@pytest.mark.parametrize("token_id", [-1, 1026, 1 << 40])
def test_ids_outside_the_vocabulary_are_nowhere(token_id: int) -> None:
    for shard in shards(1010, 16, 2):
        rows, is_here = shard.local_rows(torch.tensor([token_id]))
        assert (rows.tolist(), is_here.tolist()) == ([0], [False])


def test_a_vocabulary_that_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"320 \+ 0 rows does not split over 3 ranks"):
        ShardIndices.of_rank(0, 3, org_vocab_size=259)
