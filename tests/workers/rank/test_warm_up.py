"""The warm-up runs what serving will: prompt chunks of the full length and, on a card, each kind of choice."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from gemray_workers.embedded import embedded_path
from gemray_workers.execution import cycle_rows
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.rank.warm_up import NUM_TOKENS, warm_up_requests
from gemray_workers.sampling.features import CANDIDATE_COUNTS, Features
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request, serve
from support.engine.whole_warm_up import whole_warm_up


@pytest.mark.parametrize("make", [None, tiny_assistant, tiny_dflash])
def test_every_part_of_a_choice_runs_before_the_first_request(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_checkpoint("31B")
    drafter = None if make is None else str(make(target))
    config = engine_config(target, drafter_path=drafter, max_step_tokens=256, prefill_chunk=32)
    rank = EngineRank(config, SoloCommunicator(), torch.device("cpu"))
    plans: list[CyclePlan] = []
    of = CyclePlan.of

    def noted(*args: Any) -> CyclePlan:
        plans.append(of(*args))
        return plans[-1]

    monkeypatch.setattr(cycle_rows.CyclePlan, "of", noted)
    with whole_warm_up():
        rank.warm_up()
    seen = {plan.features for plan in plans}
    assert Features() in seen, "greedy alone"
    for part in fields(Features):
        # Forbidden ids are bits that the same kernels read; without a tokenizer there are no grammars.
        if part.name not in ("masks", "grammar"):
            assert any(getattr(features, part.name) for features in seen), part.name
    assert {features.candidates for features in seen} == {0, *CANDIDATE_COUNTS}
    assert max(plan.shape.most_rows for plan in plans) == config.prefill_chunk
    eager = [plan for plan in plans if plan.features.penalties]  # no graph holds these
    assert max(plan.shape.most_rows for plan in eager) == config.prefill_chunk
    assert (max(plan.shape.num_drafting for plan in plans) > 0) == (make is not None)

    # What one request asks for, in a chunk or decoding, has run before.
    plans.clear()
    kinds = [{}, {"temperature": 0.9, "top_k": 40}, {"temperature": 1.0, "top_p": 0.9}, {"presence_penalty": 1.0}]
    for kind in kinds:
        assert serve(rank, SoloCommunicator(), [request("a", [5] * 40, 4, **kind)]) is not None
    assert {plan.features for plan in plans} <= seen | {Features(penalties=True)}


def test_grammars_run_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = EngineRank(
        engine_config(embedded_path("gemray-tiny"), max_step_tokens=256), SoloCommunicator(), torch.device("cpu")
    )
    seen: list[Features] = []
    of = CyclePlan.of

    def noted(*args: Any) -> CyclePlan:
        plan = of(*args)
        seen.append(plan.features)
        return plan

    monkeypatch.setattr(cycle_rows.CyclePlan, "of", noted)
    with whole_warm_up():
        rank.warm_up()
    assert {features.candidates for features in seen if features.grammar} == {0, CANDIDATE_COUNTS[0]}


def test_where_nothing_is_compiled_two_requests_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(tiny_checkpoint("31B"), max_step_tokens=256, prefill_chunk=32)
    rank = EngineRank(config, SoloCommunicator(), torch.device("cpu"))
    rows: list[int] = []
    of = CyclePlan.of

    def noted(*args: Any) -> CyclePlan:
        plan = of(*args)
        rows.append(plan.shape.most_rows)
        return plan

    monkeypatch.setattr(cycle_rows.CyclePlan, "of", noted)
    rank.warm_up()
    assert len(rows) == NUM_TOKENS + 1 + NUM_TOKENS, "a prompt of two tokens, and one of a chunk and two tokens"
    assert max(rows) == config.prefill_chunk


@pytest.mark.parametrize("max_model_len", [2, 3, 5, 4096])
def test_requests_fit_any_model_length(max_model_len: int) -> None:
    for submit in warm_up_requests(vocab_size=7, max_model_len=max_model_len, prefill_chunk=64):
        assert 1 <= len(submit.prompt_ids) < max_model_len
        assert len(submit.prompt_ids) + submit.params.max_tokens <= max_model_len
        assert max(submit.prompt_ids) < 7
