"""Checksums of logits: the same on any number of ranks, another for any other bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling import checksum
from gemray_workers.sampling.checksum import logits_checksums
from support.oracles.sampling_reference import local_columns

VOCABULARIES = {"org 259": (259, 0), "org 1010 + added 16": (1010, 16)}


def checksums_on_rank(comm: Communicator, logits_RV: Tensor, vocabulary: tuple[int, int]) -> Any:
    org, added = vocabulary
    shard = ShardIndices.of_rank(comm.rank, comm.size, org_vocab_size=org, num_added=added)
    return logits_checksums(local_columns(logits_RV, shard), shard, comm).tolist()


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_number_of_ranks_gives_the_same(run_on_gang: Any, name: str, dtype: torch.dtype) -> None:
    logits_RV = torch.randn(9, sum(VOCABULARIES[name]), generator=torch.Generator().manual_seed(1)).to(dtype)
    answers = [
        answer for size in (1, 2, 4) for answer in run_on_gang(size, checksums_on_rank, logits_RV, VOCABULARIES[name])
    ]
    assert answers.count(answers[0]) == 7
    assert len(set(answers[0])) == 9


def _checksum(logits_V: Tensor) -> int:
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=len(logits_V))
    (found,) = logits_checksums(local_columns(logits_V[None], shard), shard, SoloCommunicator()).tolist()
    return int(found)


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(0, 99), st.integers(0, 31), st.booleans())
def test_one_bit_changes_it(seed: int, column: int, bit: int, is_wide: bool) -> None:
    logits_V = torch.randn(100, generator=torch.Generator().manual_seed(seed)).to(
        torch.float64 if is_wide else torch.float32
    )
    other_V = logits_V.clone()
    bits = other_V.view(torch.int64 if is_wide else torch.int32)
    bits[column] ^= 1 << bit if bit < 31 or is_wide else -(1 << 31)
    assert _checksum(other_V) != _checksum(logits_V)


def test_the_place_of_a_logit_counts() -> None:
    logits_V = torch.arange(64.0)
    assert _checksum(logits_V.flip(0)) != _checksum(logits_V)


def test_rows_are_hashed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = torch.randn(7, 128, generator=torch.Generator().manual_seed(2))
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=128)
    whole = logits_checksums(logits_RV, shard, SoloCommunicator()).tolist()
    monkeypatch.setattr(checksum, "MOST_CELLS", 300)
    assert logits_checksums(logits_RV, shard, SoloCommunicator()).tolist() == whole
    assert logits_checksums(logits_RV[:0], shard, SoloCommunicator()).tolist() == []
