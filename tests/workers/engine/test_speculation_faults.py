"""Logits that cannot be used end a request with a fault after the same tokens, drafts or none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.engine.engine_runner import request
from support.engine.lags import at_both_lags
from support.engine.toy_target import TableDrafter, ToyTarget, run_toy

VOCAB = 8
SPOILT_ID = 3
"""What follows it is unknown: all its logits are NaN."""


class SpoiltTarget(ToyTarget):
    """A target whose logits after one id are NaN."""

    def uncapped_logits(self, hidden_TV: Tensor) -> Tensor:
        logits_TV = super().uncapped_logits(hidden_TV).clone()
        logits_TV[hidden_TV[:, SPOILT_ID] == 1] = float("nan")
        return logits_TV


@at_both_lags
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_fault_comes_after_the_tokens_before_it(temperature: float, lag: int) -> None:
    table_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1.5
    target = SpoiltTarget(table_VV)
    submits = [
        request(f"r{i}", [1 + i % 2], 40, seed=i, temperature=temperature, logprobs=1 if i % 3 == 0 else None)
        for i in range(12)
    ]
    drafter = TableDrafter(target, table_VV, greedy=False)
    runs = [run_toy(target, drafter, submits, num_draft_tokens=k, lag=lag) for k in (0, 4)]
    plain, speculative = (
        {name: (r.ids, r.last.finish, r.last.fault) for name, r in run.results.items()} for run in runs
    )
    assert plain == speculative
    faulty = [ids for ids, finish, _ in plain.values() if finish == "fault"]
    assert len(faulty) >= 6
    assert all(ids[-1] == SPOILT_ID for ids in faulty)
    assert max(len(ids) for ids in faulty) >= 2
