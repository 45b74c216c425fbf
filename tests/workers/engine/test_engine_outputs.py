"""What the engine reports beside ids: log-probabilities, endings, faults, statistics; and that it cleans up."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.errors import CheckpointError
from gemray_workers.messages import Cancel, FromGang, StepOutput, Stop, Submit, ToGang
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling.token_logprob import TokenLogprob
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, engine_config, request, run_engine, serve
from support.engine.lags import at_both_lags
from support.oracles.oracle import prompt_logits, solo_model

PROMPT = [5, 77, 31, 200, 14, 9, 9, 150, 33, 8, 120, 61, 42]


def run_alone(submits: list[Submit], shape: Any = "31B", **settings: Any) -> Run:
    run = run_engine(SoloCommunicator(), engine_config(tiny_checkpoint(shape), **settings), submits)
    assert run is not None
    return run


def gather(run: Run, request_id: str, field: str) -> list[TokenLogprob]:
    return [entry for delta in run.results[request_id].deltas for entry in getattr(delta, field) or []]


@pytest.mark.parametrize(("prefill_chunk", "lag"), [(1, 1), (4, 0), (4, 1), (64, 0)])
def test_logprobs_are_those_of_the_models_own_distribution(prefill_chunk: int, lag: int) -> None:
    """Before temperature, filters and edits; the same however the prompt is cut."""
    submit = request(
        "a", PROMPT, 12, temperature=0.8, top_k=20, seed=4, logit_bias={7: 3.0}, logprobs=3, prompt_logprobs=2
    )
    others = [request("b", PROMPT[:4], 9), request("c", PROMPT[2:9], 9, logprobs=0)]
    run = run_alone([submit, *others], prefill_chunk=prefill_chunk, lag=lag)
    text = PROMPT + run.ids["a"]
    expected = prompt_logits(solo_model(tiny_checkpoint("31B")), text).log_softmax(-1)

    found = gather(run, "a", "prompt_logprobs") + gather(run, "a", "logprobs")
    assert [entry.token_id for entry in found] == text[1:]
    for row, entry in enumerate(found):
        assert entry.logprob == pytest.approx(expected[row, entry.token_id].item(), abs=1e-9)
        best = expected[row].topk(len(entry.top))
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)
    assert [len(entry.top) for entry in found] == [2] * (len(PROMPT) - 1) + [3] * 12
    assert gather(run, "b", "logprobs") == []
    assert [len(entry.top) for entry in gather(run, "c", "logprobs")] == [0] * 9


def test_checksums_of_logits_come_where_they_are_asked_for() -> None:
    submits = [
        request("asks", PROMPT, 6, logprobs=1, logits_checksum=True),
        request("again", PROMPT, 6, logprobs=0, logits_checksum=True, prompt_logprobs=0),
        request("does not", PROMPT, 6, logprobs=2),
    ]
    run = run_alone(submits)
    found = {name: [entry.logits_checksum for entry in gather(run, name, "logprobs")] for name in run.ids}
    assert found["does not"] == [None] * 6
    assert len(set(found["asks"])) == 6
    assert all(value is not None and 0 <= value < 2**64 for value in found["asks"])
    assert [entry.logits_checksum for entry in gather(run, "again", "prompt_logprobs")] == [None] * 12
    assert run_alone(submits[:1]).ids["asks"] == run.ids["asks"]


@at_both_lags
def test_prompt_logprobs_come_once_under_preemption(lag: int) -> None:
    submits = [request(f"r{i}", PROMPT * 2, 30, prompt_logprobs=0) for i in range(6)]
    budgets = range(400_000, 1_000_000, 60_000)
    runs = (run_alone(submits, kv_memory_bytes=b, max_model_len=64, prefill_chunk=8, lag=lag) for b in budgets)
    run = next(run for run in runs if run.preemptions > 0)
    for submit in submits:
        found = gather(run, submit.request_id, "prompt_logprobs")
        assert [entry.token_id for entry in found] == (PROMPT * 2)[1:]


@at_both_lags
def test_a_stop_id_ends_the_request_and_is_reported(lag: int) -> None:
    free = run_alone([request("a", PROMPT, 20)]).ids["a"]
    stop = free[4]
    first = free.index(stop)
    run = run_alone([request("a", PROMPT, 20, stop_token_ids=(stop,))], lag=lag)
    assert run.ids["a"] == free[: first + 1]
    assert (run.results["a"].last.finish, run.results["a"].last.matched_stop_id) == ("stop_token", stop)


@at_both_lags
def test_the_context_limit_ends_the_request(lag: int) -> None:
    run = run_alone([request("a", PROMPT, 1000)], max_model_len=32, lag=lag)
    assert len(run.ids["a"]) == 32 - len(PROMPT)
    assert run.results["a"].last.finish == "length"


class CancellingInbox(LocalInbox):
    """Cancels a request as soon as it has given some tokens."""

    def __init__(self, submits: list[Submit], victim: str, after: int) -> None:
        super().__init__(submits)
        self._victim, self._after = victim, after
        self.cancelled_at: int | None = None

    def poll(self, timeout_s: float) -> list[ToGang]:
        if self.cancelled_at is None and len(self.token_ids(self._victim)) >= self._after:
            self.cancelled_at = len(self.steps)
            return [Cancel(self._victim), Cancel("never heard of")]
        return super().poll(timeout_s)


@at_both_lags
def test_cancel_takes_effect_within_one_step_and_frees_everything(lag: int) -> None:
    """With lag 1 the step in flight holds a fourth token, which is dropped."""
    rank = EngineRank(engine_config(tiny_checkpoint("E2B"), lag=lag), SoloCommunicator(), torch.device("cpu"))
    submits = [request("stays", PROMPT, 20), request("goes", PROMPT[:5], 200)]
    alone = serve(rank, SoloCommunicator(), [submits[0]])
    inbox = CancellingInbox(submits, "goes", after=3)
    rank.engine(inbox).run()
    assert inbox.last("goes").finish == "cancelled"
    assert len(inbox.token_ids("goes")) == 3
    end = next(i for i, step in enumerate(inbox.steps) if any(d.finish == "cancelled" for d in step.deltas))
    assert inbox.cancelled_at is not None
    assert end - inbox.cancelled_at <= 1
    assert alone is not None
    assert inbox.token_ids("stays") == alone.ids["stays"]
    assert inbox.steps[-1].stats.pages_in_use == {"sliding": 0, "full": 0}


def poison_one_row(rank: EngineRank, token_id: int) -> None:
    """Make one token's embedding NaN, so that requests holding it get NaN logits."""
    rank._model.embedding.table_VH[token_id] = float("nan")


@at_both_lags
def test_nan_logits_end_their_request_alone(lag: int) -> None:
    """The head is tied: a NaN embedding row is a NaN logit of every row, so give the head a table of its own."""
    rank = EngineRank(engine_config(tiny_checkpoint("12B"), lag=lag), SoloCommunicator(), torch.device("cpu"))
    rank._model._head._table_VH = rank._model._head._table_VH.clone()
    expected = serve(rank, SoloCommunicator(), [request("good", PROMPT, 12)])
    poison_one_row(rank, 251)
    run = serve(rank, SoloCommunicator(), [request("good", PROMPT, 12), request("bad", [251, 5, 6], 12)])
    assert run is not None
    assert expected is not None
    assert run.ids["good"] == expected.ids["good"]
    assert run.results["bad"].ids == []
    assert run.results["bad"].last.finish == "fault"
    assert "NaN" in (run.results["bad"].last.fault or "")
    again = serve(rank, SoloCommunicator(), [request("good", PROMPT, 12)])
    assert again is not None
    assert again.ids == expected.ids


def test_the_warm_up_refuses_a_model_that_cannot_generate() -> None:
    rank = EngineRank(engine_config(tiny_checkpoint("31B")), SoloCommunicator(), torch.device("cpu"))
    rank.warm_up()
    poison_one_row(rank, 2)
    with pytest.raises(CheckpointError, match="cannot generate"):
        rank.warm_up()


@at_both_lags
def test_statistics_count_rows_and_tokens(lag: int) -> None:
    run = run_alone([request("a", PROMPT, 10), request("b", PROMPT[:3], 4)])
    rank = EngineRank(engine_config(tiny_checkpoint("31B"), lag=lag), SoloCommunicator(), torch.device("cpu"))
    inbox = LocalInbox([request("a", PROMPT, 10), request("b", PROMPT[:3], 4)])
    rank.engine(inbox).run()
    stats = inbox.steps[-1].stats
    assert stats.prompt_tokens == len(PROMPT) + 3
    assert stats.generated_tokens == 14 == sum(map(len, run.ids.values()))
    assert stats.num_running == stats.num_waiting == 0
    assert all(0 <= step.stats.last_step_seconds < 60 for step in inbox.steps)


@pytest.mark.parametrize("make_drafter", [tiny_assistant, tiny_dflash])
def test_info_counts_the_drafters_weights(make_drafter: Callable[[Path], Path]) -> None:
    target = tiny_checkpoint("31B")
    drafter = make_drafter(target)
    plain, drafting = (
        EngineRank(engine_config(target, **settings), SoloCommunicator(), torch.device("cpu")).rank_info().weight_bytes
        for settings in ({}, {"drafter_path": str(drafter)})
    )
    with safe_open(drafter / "model.safetensors", "pt") as weights:
        elements = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    assert drafting - plain == pytest.approx(elements * torch.float64.itemsize, rel=0.05)


def test_info_tells_the_fitted_length_and_the_backend() -> None:
    config = engine_config(tiny_checkpoint("31B"), kv_memory_bytes=200_000, max_model_len=4096)
    rank = EngineRank(config, SoloCommunicator(), torch.device("cpu"))
    info = rank.model_info()
    assert 2 <= info.max_model_len < 4096
    run = serve(rank, SoloCommunicator(), [request("a", [5] * (info.max_model_len - 4), 100)])
    assert run is not None
    assert len(run.ids["a"]) == 4
    assert {c.what: c.chosen for c in info.choices} == {
        "target attention backend": "torch",
        "cycles": "eager",
        "KV dtype": "float64",
    }
    seeded = engine_config(tiny_checkpoint("31B"), random_weights=True)
    assert "random" in [c.chosen for c in Blueprint.of(seeded).model_info().choices]
    groups = {group.name: group for group in rank.rank_info().kv_groups}
    assert groups["sliding"].window == 8
    total = sum(group.num_pages * group.page_bytes for group in groups.values())
    assert total <= 200_000


@at_both_lags
def test_stop_while_requests_run_cancels_them(lag: int) -> None:
    class Stopping(LocalInbox):
        def poll(self, timeout_s: float) -> list[ToGang]:
            return [Stop()] if len(self.steps) == 5 else super().poll(timeout_s)

        def send(self, message: FromGang) -> None:
            assert isinstance(message, StepOutput)
            super().send(message)

    rank = EngineRank(engine_config(tiny_checkpoint("E4B"), lag=lag), SoloCommunicator(), torch.device("cpu"))
    inbox = Stopping([request("a", PROMPT, 1000)])
    rank.engine(inbox).run()
    assert inbox.last("a").finish == "cancelled"
    assert 0 < len(inbox.token_ids("a")) < 10
    assert math.isfinite(inbox.steps[-1].stats.last_step_seconds)


def test_a_request_that_can_never_run_ends_alone() -> None:
    run = run_alone([request("good", PROMPT, 8), request("long", [5] * 300, 8), request("empty", [], 8)])
    assert len(run.ids["good"]) == 8
    for request_id in ("long", "empty"):
        assert run.results[request_id].last.finish == "fault"
        assert "prompt" in (run.results[request_id].last.fault or "")
