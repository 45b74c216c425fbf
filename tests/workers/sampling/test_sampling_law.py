"""`choose` draws from softmax of the filtered logits / T, independently at each position and seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from support.oracles.sampling_oracle.row_request import RowRequest
from support.oracles.sampling_reference import choose_rows, filtered_law, local_columns, sampling_params

NUM_SAMPLES = 12_000
LOGITS = torch.tensor([1.2, -0.4, 2.0, 0.3, 2.0, -3.0, 0.9, 1.7, -1.1, 0.0, 1.2, -0.2])
SHARD = ShardIndices.of_rank(0, 1, org_vocab_size=len(LOGITS))


def choose(requests: list[RowRequest], logits: Any = LOGITS, dtype: torch.dtype = torch.float32) -> Any:
    logits_RV = local_columns(logits.to(dtype).expand(len(requests), -1), SHARD)
    choice = choose_rows(logits_RV, requests, SHARD, SoloCommunicator())
    assert choice.ok_R.all()
    return choice.ids_R.numpy()


def request(position: int = 1, **params: Any) -> RowRequest:
    return RowRequest(sampling_params(**params), position=position, prompt_len=1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"top_k": 6, "top_p": 0.7},
        {"top_k": 6, "min_p": 0.3},
        {"top_p": 0.9, "min_p": 0.2},
        {"top_k": 8, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=lambda filters: ",".join(f"{k}={v}" for k, v in filters.items()) or "none",
)
def test_law_is_softmax_of_the_filtered_logits(temperature: float, filters: dict[str, Any]) -> None:
    params = {"temperature": temperature, **filters}
    law, margin = filtered_law(LOGITS.tolist(), sampling_params(**params))
    assert margin > 1e-6
    # Half of the samples differ by seed, half by position.
    half = NUM_SAMPLES // 2
    ids = choose(
        [request(seed=2**63 + 977 * s, **params) for s in range(half)]
        + [request(position=1 + p, seed=5, **params) for p in range(half)]
    )
    kept = sorted(law)
    assert set(ids.tolist()) <= set(kept)
    for samples in (ids[:half], ids[half:], ids):
        observed = [int((samples == v).sum()) for v in kept]
        expected = [law[v] * len(samples) for v in kept]
        assert stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue > 1e-3


def test_a_wrong_law_would_be_seen() -> None:
    """The power of the test above: T 1.1 for 1.0 is rejected."""
    ids = choose([request(seed=s, temperature=1.1) for s in range(NUM_SAMPLES)])
    law, _ = filtered_law(LOGITS.tolist(), sampling_params())
    observed = [int((ids == v).sum()) for v in sorted(law)]
    assert stats.chisquare(observed, [law[v] * NUM_SAMPLES for v in sorted(law)]).pvalue < 1e-6


def test_uniform_logits_choose_uniformly() -> None:
    ids = choose([request(position=1 + i % 200, seed=i // 200) for i in range(2 * NUM_SAMPLES)], torch.zeros(12))
    assert stats.chisquare(np.bincount(ids, minlength=12)).pvalue > 1e-3


@pytest.mark.parametrize("pair", ["next position", "next seed"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}], ids=["none", "top_k"])
def test_neighbouring_choices_are_independent(pair: Any, filters: dict[str, Any]) -> None:
    step = {"next position": (1, 0), "next seed": (0, 1)}[pair]
    base = [(1 + 2 * (i % 150), 2 * (i // 150)) for i in range(NUM_SAMPLES)]
    first = choose([request(position=p, seed=s, **filters) for p, s in base])
    second = choose([request(position=p + step[0], seed=s + step[1], **filters) for p, s in base])
    table = np.zeros((12, 12))
    np.add.at(table, (first, second), 1)
    table = table[np.ix_(table.sum(1) > 60, table.sum(0) > 60)]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_a_choice_depends_on_its_own_row_alone() -> None:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}]
    kinds.append({"top_k": 9, "top_p": 0.5})
    requests = [request(position=1 + i, seed=i, **params) for i, params in enumerate(kinds * 5)]
    together = choose(requests, dtype=torch.float64)
    assert [int(choose([r], dtype=torch.float64)[0]) for r in requests] == together.tolist()


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    ids = choose([request(seed=s, temperature=t) for s in range(20) for t in (1e-300, 1e-30, 1e-6)])
    assert set(ids.tolist()) <= {2, 4}  # the two largest are equal: noise may still decide between them
