"""The set of ids that filters keep, seen through `choose`, against a plain implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemray_kernels.candidates import local_top
from gemray_kernels.reference.token_choice import ReferenceKernels
from gemray_kernels.slot_tables import MAX_CANDIDATES
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from support.oracles.sampling_oracle.row_request import RowRequest
from support.oracles.sampling_reference import choose_rows, filtered_law, local_columns, sampling_params


def favour_the_seed(seed_R: Tensor, position_R: Tensor, token_ids: Any, dtype: torch.dtype) -> Tensor:
    """Noise that makes id `seed` win whenever the filters let it take part."""
    return (token_ids == seed_R[:, None]).to(dtype) * 1e6


def kept_ids(logits: Any, **params: Any) -> list[int]:
    """Every id that some noise could choose."""
    size = len(logits)
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=size)
    requests = [RowRequest(sampling_params(seed=v, **params), position=1, prompt_len=1) for v in range(size)]
    logits_RV = local_columns(torch.tensor(logits, dtype=torch.float64).expand(size, -1), shard)
    kernels = ReferenceKernels(favour_the_seed)
    chosen = choose_rows(logits_RV, requests, shard, SoloCommunicator(), kernels=kernels).ids_R.tolist()
    return [v for v in range(size) if chosen[v] == v]


LOGIT = st.one_of(st.integers(-4, 4).map(float), st.floats(-8, 8), st.just(-math.inf))


@given(
    logits=st.lists(LOGIT, min_size=1, max_size=20),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 7, 19, 64, MAX_CANDIDATES + 1]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
@example([1.0, 1.0, 1.0, 1.0, 0.0], 1.0, 2, 1.0, 0.0)
@example([0.0] * 8, 1.0, 0, 0.51, 1.0)
@settings(max_examples=300)
def test_filters_keep_what_a_plain_implementation_keeps(
    logits: Any, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    assume(max(logits) > -math.inf)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    law, margin = filtered_law(logits, sampling_params(**params))
    ratios = [math.exp((logit - max(logits)) / temperature) for logit in logits if logit < max(logits)]
    assume(margin > 1e-9 and all(abs(ratio - min_p) > 1e-9 for ratio in ratios))
    assert kept_ids(logits, **params) == sorted(law)


def test_top_k_is_exact_and_its_ties_go_to_the_smallest_ids() -> None:
    assert kept_ids([2.0, 3.0, 2.0, 2.0, 1.0], top_k=3) == [0, 1, 2]
    assert kept_ids([2.0, 3.0, 2.0, 2.0, 1.0], top_k=50) == [0, 1, 2, 3, 4]


def test_top_p_takes_the_token_that_crosses_and_stops_at_equality() -> None:
    quarter = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert kept_ids(quarter, top_p=0.5) == [0]
    assert kept_ids(quarter, top_p=0.5001) == [0, 1]
    assert kept_ids([0.0] * 10, top_p=0.3) == [0, 1, 2]
    assert kept_ids(quarter, top_p=1e-9) == [0]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    law = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept_ids(law, top_k=2, top_p=0.56) == [0]  # 0.4 / 0.7 = 0.571
    assert kept_ids(law, top_p=0.56) == [0, 1]


def test_top_p_of_one_keeps_the_faintest_token() -> None:
    assert kept_ids([0.0, -200.0, -600.0], top_p=1.0, top_k=3) == [0, 1, 2]


@pytest.mark.parametrize("top_k", [0, 4])
def test_min_p_of_one_keeps_only_the_largest_and_its_equals(top_k: int) -> None:
    assert kept_ids([1.0, 5.0, 5.0, 4.9999], min_p=1.0, top_k=top_k) == [1, 2]


@given(st.lists(st.lists(LOGIT, min_size=9, max_size=9), min_size=1, max_size=5), st.integers(0, 12))
@settings(max_examples=100)
def test_local_top_is_a_stable_sort_cut_short(values: Any, count: int) -> None:
    values_RV = torch.tensor(values, dtype=torch.float64)
    found = local_top(values_RV, torch.arange(9) * 3, count).sorted()
    expected, column = values_RV.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.values_RC, expected[:, :count])
    assert torch.equal(found.ids_RC, column[:, :count] * 3)
