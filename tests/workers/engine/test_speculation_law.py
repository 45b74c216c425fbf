"""Sampling with drafts has the target's law: chi-square against the exact one, under drafters of mixed acceptance.

The target is a table (the next token depends on the last), so the law of every transition is known; everything else
is the engine's own. Beside it: how much more is accepted when drafts are chosen with the request's own noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from gemray_workers.messages import Submit
from support.engine.engine_runner import Run, request
from support.engine.toy_target import TableDrafter, ToyTarget, run_toy
from support.oracles.sampling_reference import filtered_law, sampling_params

VOCAB = 8
NUM_REQUESTS = 700
NUM_TOKENS = 18
NUM_DRAFT_TOKENS = 4
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
]
TEMPERATURES = [(0.7, 1.5), (1.0,), (0.7, 1.5), (0.7, 1.5), (1.0, 1.5)]
"""For each of these filters. What they leave follows from the temperature but for top_k; every pair is held, without
drafts, by sampling/test_sampling_law.py."""


def random_table(seed: int) -> Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


TARGET = ToyTarget(random_table(0))
NEAR = 0.75 * TARGET.table_VV + 0.5 * random_table(1)
"""A drafter's table: often right."""


def requests(count: int, **params: Any) -> list[Submit]:
    """Seeds that differ by one: neighbours must be independent."""
    return [request(f"r{i}", [1 + i % (VOCAB - 1)], NUM_TOKENS, seed=2**40 + i, **params) for i in range(count)]


def serve(
    submits: list[Submit],
    *,
    table: Tensor = NEAR,
    greedy: bool = False,
    num_drafts: int = NUM_DRAFT_TOKENS,
    lag: int = 1,
) -> Run:
    return run_toy(TARGET, TableDrafter(TARGET, table, greedy=greedy), submits, num_draft_tokens=num_drafts, lag=lag)


def transitions(submits: list[Submit], run: Run) -> Iterator[tuple[int, int]]:
    for submit in submits:
        text = [submit.prompt_ids[-1], *run.ids[submit.request_id]]
        yield from itertools.pairwise(text)


def pvalue(submits: list[Submit], run: Run, law_of: Callable[[int], dict[int, float]]) -> float:
    """The p-value of the counts of every transition, given the token before it: a G-test over all rows together."""
    counts = np.zeros((VOCAB, VOCAB))
    for last, following in transitions(submits, run):
        counts[last, following] += 1
    statistic, freedom = 0.0, 0
    for last in range(VOCAB):
        law = law_of(last)
        kept, total = sorted(law), counts[last].sum()
        assert counts[last, [v for v in range(VOCAB) if v not in law]].sum() == 0, "an id that the filters remove"
        if total == 0 or len(kept) == 1:
            continue
        expected = np.array([law[v] * total for v in kept])
        statistic += stats.power_divergence(counts[last, kept], expected, lambda_="log-likelihood").statistic
        freedom += len(kept) - 1
    return float(stats.chi2.sf(statistic, freedom))


def exact_law(last: int, temperature: float, **filters: Any) -> dict[int, float]:
    params = sampling_params(temperature=temperature, **filters)
    law, margin = filtered_law(TARGET.table_VV[last].tolist(), params)
    assert margin > 1e-9
    return law


@pytest.mark.parametrize(
    ("filters", "temperature"),
    [(filters, t) for filters, temperatures in zip(FILTERS, TEMPERATURES, strict=True) for t in temperatures],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) or "none" if isinstance(value, dict) else None,
)
def test_the_law_is_the_targets(filters: dict[str, Any], temperature: float) -> None:
    """12600 transitions a case; the drafts' law is another one, and some of them are accepted."""
    submits = requests(NUM_REQUESTS, temperature=temperature, **filters)
    run = serve(submits)
    counters = run.speculation
    assert 0.2 < counters.accepted / counters.drafted < 0.95, "acceptance is mixed"
    assert pvalue(submits, run, lambda last: exact_law(last, temperature, **filters)) > 1e-3


def test_a_wrong_law_would_be_seen() -> None:
    """The power of the test: T = 1.1 for 1.0, and the drafter's law for the target's."""
    submits = requests(NUM_REQUESTS, temperature=1.1)
    run = serve(submits)
    assert pvalue(submits, run, lambda last: exact_law(last, 1.0)) < 1e-6
    drafters = {last: filtered_law(NEAR[last].tolist(), sampling_params(temperature=1.1))[0] for last in range(VOCAB)}
    assert pvalue(submits, run, drafters.__getitem__) < 1e-6


def test_ids_do_not_depend_on_the_drafter() -> None:
    submits = [
        s for i, filters in enumerate(FILTERS) for s in requests(20 * (i + 1), temperature=1.0, **filters)[20 * i :]
    ]
    plain = serve(submits, num_drafts=0, lag=0).ids
    assert serve(submits, num_drafts=0).ids == plain
    for table, greedy in ((NEAR, False), (NEAR, True), (random_table(9), False), (TARGET.table_VV, False)):
        late, at_once = (serve(submits, table=table, greedy=greedy, lag=lag) for lag in (1, 0))
        assert late.ids == at_once.ids == plain
        assert late.speculation == at_once.speculation


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    """Same logits, same noise, same filters: a draft is the token that the target would choose."""
    for filters in FILTERS:
        counters = serve(requests(60, temperature=1.0, **filters), table=TARGET.table_VV).speculation
        assert counters.accepted == counters.drafted > 0


def first_draft_acceptance(target: ToyTarget, table: Tensor, submits: list[Submit], *, greedy: bool) -> float:
    counters = run_toy(target, TableDrafter(target, table, greedy=greedy), submits, num_draft_tokens=1).speculation
    return counters.accepted / counters.rounds


def test_shared_noise_against_greedy_drafts(record_property: Callable[[str, object], None]) -> None:
    """Drafts chosen with the request's noise against greedy ones, from the same imperfect logits.

    The same noise pays where the law is flat: there a greedy draft is right as seldom as its token is likely. Where
    one token has most of the mass and the drafter errs, greedy drafts may be right more often.
    The table goes to the test's output (`pytest -s`) and into its report.
    """
    lines = [f"{'law':>7} {'temperature':>11} {'filters':>9} {'greedy drafts':>14} {'shared noise':>13}"]
    for name, spread in (("flat", 0.4), ("peaked", 1.5)):
        target = ToyTarget(random_table(0) * spread / 1.5)
        table = target.table_VV + random_table(1) / 1.5 * spread / 3
        for temperature in (0.7, 1.0, 1.5):
            for filters in ({}, {"top_k": 5}, {"top_p": 0.8}):
                submits = requests(150, temperature=temperature, **filters)
                greedy, shared = (first_draft_acceptance(target, table, submits, greedy=g) for g in (True, False))
                named = ",".join(f"{k}={v}" for k, v in filters.items()) or "none"
                lines.append(f"{name:>7} {temperature:>11} {named:>9} {greedy:>14.3f} {shared:>13.3f}")
                record_property(f"{name}, T={temperature}, {named}", f"greedy {greedy:.3f}, shared {shared:.3f}")
                assert shared > greedy + 0.2 or name != "flat"
    print("\n" + "\n".join(lines))
