"""Logit edits on every shard against a plain implementation on whole rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from support.oracles.sampling_oracle.row_request import RowRequest
from support.oracles.sampling_reference import choose_rows, edited, edited_rows, local_columns, sampling_params

ORG, ADDED = 21, 4
VOCAB = ORG + ADDED
SOLO = ShardIndices.of_rank(0, 1, org_vocab_size=ORG, num_added=ADDED)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def edit_on_ranks(logits_RV: Tensor, requests: list[RowRequest], size: int) -> Tensor:
    """Edit each rank's shard, then put the whole rows together again."""
    whole = torch.full((len(requests), VOCAB), torch.nan, dtype=logits_RV.dtype)
    for rank in range(size):
        shard = ShardIndices.of_rank(rank, size, org_vocab_size=ORG, num_added=ADDED, padding=8)
        local = local_columns(logits_RV, shard)
        before = local.clone()
        result = edited_rows(local, requests, shard)
        assert torch.equal(local, before)
        ids = shard.global_ids()
        assert (result[:, ids < 0] == -math.inf).all()
        whole[:, ids[ids >= 0]] = result[:, ids >= 0]
    return whole


ID = st.integers(0, VOCAB - 1)
STRANGE_ID = st.sampled_from([-1, VOCAB, 10**9])
IDS = st.lists(st.one_of(ID, ID, STRANGE_ID), max_size=6).map(tuple)


@st.composite
def row_requests(draw: st.DrawFn) -> Any:
    prompt = draw(st.lists(ID, min_size=1, max_size=6))
    output = draw(st.lists(ID, max_size=6))
    num_drafts = draw(st.integers(0, len(output)))
    params = sampling_params(
        min_tokens=draw(st.integers(0, 5)),
        stop_token_ids=draw(IDS),
        suppress_tokens=draw(IDS),
        allowed_token_ids=draw(st.one_of(st.just(()), IDS)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.6, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -0.3])),
        logit_bias=draw(st.dictionaries(st.one_of(ID, STRANGE_ID), st.sampled_from([-100.0, -1.5, 2.5]), max_size=4)),
    )
    known = len(output) - num_drafts
    request = RowRequest(
        params, len(prompt) + len(output), len(prompt), token_ids=prompt + output[:known], draft_ids=output[known:]
    )
    return request, prompt, output


@given(st.lists(row_requests(), min_size=1, max_size=4), st.sampled_from([1, 2, 4]), st.integers(0, 2**31))
@settings(max_examples=200)
def test_edits_equal_a_plain_implementation(rows: Any, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(len(rows), VOCAB, generator=generator, dtype=torch.float64) * 3
    expected = [edited(logits_RV[i].tolist(), r.params, prompt, output) for i, (r, prompt, output) in enumerate(rows)]
    result = edit_on_ranks(logits_RV, [r for r, _, _ in rows], size)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_verify_row_counts_the_drafts_before_it() -> None:
    params = sampling_params(frequency_penalty=1.0, repetition_penalty=2.0)
    requests = [RowRequest(params, 3 + i, 2, token_ids=[5, 6, 7], draft_ids=[7, 8][:i]) for i in range(3)]
    result = edit_on_ranks(torch.ones(3, VOCAB, dtype=torch.float64), requests, 2)
    assert result[:, 5].tolist() == [0.5, 0.5, 0.5]  # a prompt id: repetition alone
    assert result[:, 7].tolist() == [-0.5, -1.5, -1.5]  # 1 / 2 minus its count in the output
    assert result[:, 8].tolist() == [1.0, 1.0, -0.5]


def test_min_tokens_counts_drafts_too() -> None:
    params = sampling_params(min_tokens=2, stop_token_ids=(3,))
    requests = [RowRequest(params, 4 + i, 4) for i in range(3)]
    result = edit_on_ranks(torch.zeros(3, VOCAB, dtype=torch.float64), requests, 1)
    assert result[:, 3].tolist() == [-math.inf, -math.inf, 0.0]


def test_rows_without_edits_are_passed_on_as_they_are() -> None:
    logits_RV = torch.zeros(2, SOLO.num_elements_padded)
    assert edited_rows(logits_RV, [RowRequest(sampling_params(), 1, 1)] * 2, SOLO) is logits_RV


def choose(logits_RV: Tensor, requests: list[RowRequest]) -> Any:
    return choose_rows(local_columns(logits_RV, SOLO), requests, SOLO, SoloCommunicator())


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_row_with_every_id_forbidden_is_a_fault_of_that_row_alone(filters: dict[str, Any]) -> None:
    forbidden = sampling_params(allowed_token_ids=(4,), suppress_tokens=(4,), **filters)
    single = sampling_params(allowed_token_ids=(4,), **filters)
    choice = choose(torch.randn(2, VOCAB), [RowRequest(p, 1, 1) for p in (forbidden, single)])
    assert choice.ok_R.tolist() == [False, True]
    assert choice.ids_R.tolist() == [-1, 4]


def test_forbidding_an_id_does_not_hide_its_nan() -> None:
    logits_RV = torch.zeros(2, VOCAB)
    logits_RV[:, 4] = torch.nan
    params = [sampling_params(suppress_tokens=(4,)), sampling_params(allowed_token_ids=(1,))]
    assert not choose(logits_RV, [RowRequest(p, 1, 1) for p in params]).ok_R.any()


def test_penalties_without_the_history_are_refused() -> None:
    with pytest.raises(ValueError, match="penalties need the 5 ids"):
        RowRequest(sampling_params(presence_penalty=0.1), 5, 2, token_ids=[1, 2, 3])
