"""Choices and log-probabilities on 1, 2 and 4 ranks: equal to the id, whatever lies where."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.logprobs import token_logprobs
from support.oracles.sampling_oracle.row_request import RowRequest
from support.oracles.sampling_reference import choose_rows, filtered_law, local_columns, sampling_params

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 7},
    {"top_k": 64, "top_p": 0.95},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.6, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 5000},
    {"top_k": 5, "suppress_tokens": (0, 1, 2), "logit_bias": {130: 3.0, 255: -4.0}},
    {"allowed_token_ids": tuple(range(100, 259, 3)), "repetition_penalty": 1.4, "presence_penalty": 0.3},
]
VOCABULARIES = {"org 259": (259, 0), "org 1010 + added 16": (1010, 16), "org 300 + added 100": (300, 100)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class CountingCommunicator(SoloCommunicator):
    """Passes on to another and keeps the sizes of what is gathered."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.gathered: list[int] = []
        self.reduced: list[int] = []

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(x.numel())
        return self._comm.all_gather(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.reduced.append(x.numel())
        return self._comm.all_reduce(x)


def row_requests(num_rows: int, kinds: Any = KINDS) -> Any:
    requests = []
    for i, kind in zip(range(num_rows), itertools.cycle(kinds), strict=False):
        history = [i % 200, 7, 250, 7, 130] + [9] * i
        params = sampling_params(seed=2**64 - 1 - i, **kind)
        requests.append(RowRequest(params, len(history), 3, token_ids=history))
    return requests


def choose_on_rank(
    comm: Communicator, logits_RV: Tensor, vocabulary: tuple[int, int], requests: list[RowRequest]
) -> Any:
    org, added = vocabulary
    shard = ShardIndices.of_rank(comm.rank, comm.size, org_vocab_size=org, num_added=added)
    counting = CountingCommunicator(comm)
    choice = choose_rows(local_columns(logits_RV, shard), requests, shard, counting)
    return choice.ids_R.tolist(), choice.ok_R.tolist(), (counting.gathered, counting.reduced)


def logprobs_on_rank(
    comm: Communicator, logits_RV: Tensor, vocabulary: tuple[int, int], token_ids: Any, top_n: int
) -> Any:
    org, added = vocabulary
    shard = ShardIndices.of_rank(comm.rank, comm.size, org_vocab_size=org, num_added=added)
    return token_logprobs(local_columns(logits_RV, shard), torch.tensor(token_ids), top_n, shard, comm).listed()


@pytest.fixture
def choose_everywhere(run_on_gang: Any) -> Any:
    """Choose on 1, 2 and 4 ranks; what all of them agree on."""

    def run(logits_RV: Tensor, vocabulary: tuple[int, int], requests: list[RowRequest]) -> Any:
        answers = [
            (ids, ok)
            for size in (1, 2, 4)
            for ids, ok, _ in run_on_gang(size, choose_on_rank, logits_RV, vocabulary, requests)
        ]
        assert answers.count(answers[0]) == 7
        return answers[0]

    return run


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mixed_rows_choose_the_same_ids_on_any_number_of_ranks(
    choose_everywhere: Any, name: str, dtype: torch.dtype
) -> None:
    org, added = VOCABULARIES[name]
    logits_RV = (torch.randn(110, org + added, generator=torch.Generator().manual_seed(7)) * 3).to(dtype)
    ids, ok = choose_everywhere(logits_RV, (org, added), row_requests(110))
    assert all(ok)
    assert all(0 <= i < org + added for i in ids)
    assert len(set(ids)) > 30
    greedy = ids[:: len(KINDS)]
    assert greedy == logits_RV[:: len(KINDS)].float().argmax(dim=-1).tolist()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ties_across_shard_borders_go_to_the_lowest_id(choose_everywhere: Any, name: str) -> None:
    org, added = VOCABULARIES[name]
    vocab = org + added
    # Added ids live on rank 0 too, so rank order is not id order.
    tied = [[vocab - 1, 0], [vocab - 1, org // 2], [org - 1, 300 % org, 64], [org + added // 2 - 1, 200], [63, 64]]
    logits_RV = torch.randn(len(tied), vocab, dtype=torch.float64)
    for row, ids in enumerate(tied):
        logits_RV[row, ids] = 9.0
    requests = [RowRequest(sampling_params(temperature=0.0), 1, 1)] * len(tied)
    assert choose_everywhere(logits_RV, (org, added), requests)[0] == [min(ids) for ids in tied]
    first_of_top_k = [RowRequest(sampling_params(top_k=1), 1, 1)] * len(tied)
    assert choose_everywhere(logits_RV, (org, added), first_of_top_k)[0] == [min(ids) for ids in tied]


def test_a_vocabulary_of_equals_keeps_the_smallest_ids(choose_everywhere: Any) -> None:
    """top_k over ties that fill every shard; what can be chosen are ids 0..9 and nothing else."""
    requests = [RowRequest(sampling_params(top_k=10, seed=s), 1, 1) for s in range(200)]
    ids, _ = choose_everywhere(torch.zeros(200, 1026, dtype=torch.float64), (1010, 16), requests)
    assert set(ids) == set(range(10))
    requests = [RowRequest(sampling_params(top_p=0.5, seed=s), 1, 1) for s in range(100)]
    ids, _ = choose_everywhere(torch.zeros(100, 1026, dtype=torch.float64), (1010, 16), requests)
    assert max(ids) < 513


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_are_found_on_all_ranks_and_leave_the_others_alone(choose_everywhere: Any, bad: float) -> None:
    requests = row_requests(33)
    logits_RV = torch.randn(33, 259, dtype=torch.float64)
    expected, ok = choose_everywhere(logits_RV, (259, 0), requests)
    assert all(ok)
    spoilt = logits_RV.clone()
    broken = range(0, 33, 2)  # 17 rows: every kind, as 2 and the number of kinds have no common factor
    for row in broken:
        # One id for NaN and +inf, on one shard or another; -inf only hurts when it is everywhere.
        spoilt[row, slice(None) if bad == -math.inf else 103 + 3 * row] = bad
    ids, ok = choose_everywhere(spoilt, (259, 0), requests)
    assert ok == [row not in broken for row in range(33)]
    assert ids == [-1 if row in broken else i for row, i in enumerate(expected)]


def test_choices_stay_within_the_filtered_set_of_whole_rows(choose_everywhere: Any) -> None:
    logits_RV = torch.randn(80, 1026, dtype=torch.float64) * 2
    requests = row_requests(80, kinds=KINDS[:9])
    ids, _ = choose_everywhere(logits_RV, (1010, 16), requests)
    for row, (i, request) in enumerate(zip(ids, requests, strict=True)):
        assert i in filtered_law(logits_RV[row].tolist(), request.params)[0]


@pytest.mark.parametrize("size", [2, 4])
def test_one_gather_a_step_and_never_whole_logits(run_on_gang: Any, size: int) -> None:
    num_rows = 30
    logits_RV = torch.randn(num_rows, 1026)
    plain = row_requests(num_rows, kinds=[{"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.9}])
    for _, _, (gathered, reduced) in run_on_gang(size, choose_on_rank, logits_RV, (1010, 16), plain):
        assert gathered == [2 * (30 + 30 * 64)]  # a value and an id each
        assert reduced == []
    digits = [30 << bits for bits in (8, 8, 8, 8, 8, 8, 6)]
    with_top_p = row_requests(num_rows, kinds=[{"min_p": 0.1}, {"top_k": 20, "min_p": 0.1}, {"top_p": 0.5}])
    for _, _, (gathered, reduced) in run_on_gang(size, choose_on_rank, logits_RV, (1010, 16), with_top_p):
        assert gathered == [30, 2 * (30 + 30 * 64)]
        assert reduced == digits
    with_wide_top_k = row_requests(num_rows, kinds=[{"top_k": 1025, "top_p": 0.5}])
    for _, _, (gathered, reduced) in run_on_gang(size, choose_on_rank, logits_RV, (1010, 16), with_wide_top_k):
        assert gathered == [30, 2 * 30]
        assert reduced == [*digits, 30, *digits]


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("top_n", [0, 1, 5, 2000])
def test_logprobs_equal_log_softmax_on_any_number_of_ranks(run_on_gang: Any, name: str, top_n: int) -> None:
    org, added = VOCABULARIES[name]
    logits_RV = torch.randn(6, org + added, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 4
    logits_RV[:, [0, org - 1, org + added - 1]] = 14.0  # three equal leaders
    token_ids = [0, org - 1, org + added - 1, 65, 128, 7]
    expected = logits_RV.log_softmax(dim=-1)
    order = expected.sort(dim=-1, descending=True, stable=True).indices[:, :top_n].tolist()
    for size in (1, 2, 4):
        for answer in run_on_gang(size, logprobs_on_rank, logits_RV, (org, added), token_ids, top_n):
            assert [a.token_id for a in answer] == token_ids
            for row, found in enumerate(answer):
                assert found.logprob == pytest.approx(expected[row, token_ids[row]].item(), abs=1e-12)
                assert [i for i, _ in found.top] == order[row]
                assert [p for _, p in found.top] == pytest.approx(expected[row, order[row]].tolist(), abs=1e-12)


def test_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    logits_RV = (torch.randn(3, 259) * 5).bfloat16()
    found = logprobs_on_rank(SoloCommunicator(), logits_RV, (259, 0), [1, 2, 3], 1)
    expected = logits_RV.double().log_softmax(dim=-1)
    for row, answer in enumerate(found):
        assert answer.logprob == pytest.approx(expected[row, row + 1].item(), abs=2e-6)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_logprobs_have_the_same_bits_alone_and_on_any_number_of_ranks(run_on_gang: Any, name: str) -> None:
    org, added = VOCABULARIES[name]
    logits_RV = torch.randn(40, org + added, generator=torch.Generator().manual_seed(5)) * 4
    token_ids = list(range(0, 240, 6))
    expected = [
        logprobs_on_rank(SoloCommunicator(), logits_RV[row : row + 1], (org, added), token_ids[row : row + 1], 5)[0]
        for row in range(40)
    ]
    for size in (1, 2, 4):
        for answer in run_on_gang(size, logprobs_on_rank, logits_RV, (org, added), token_ids, 5):
            assert answer == expected


def test_no_rows_need_no_collective() -> None:
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=259)
    counting = CountingCommunicator(SoloCommunicator())
    logits_RV = torch.empty(0, shard.num_elements_padded)
    choice = choose_rows(logits_RV, [], shard, counting)
    assert choice.ids_R.shape == choice.ok_R.shape == (0,)
    assert counting.gathered == []


def test_logits_of_another_shape_are_refused() -> None:
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=259)
    with pytest.raises(ValueError, match=r"\(1, 259\), expected \(1, 320\)"):
        choose_rows(torch.zeros(1, 259), row_requests(1), shard, SoloCommunicator())
