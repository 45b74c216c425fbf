"""Rows whose output nobody uses end early (spec 1.11): which rows each layer computes, and that no answer changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from gemray_workers.execution.cycle_rows import CycleRows
from gemray_workers.messages import Submit
from gemray_workers.model.mlp import MLP
from gemray_workers.model.target import TargetModel
from gemray_workers.scheduling.plan import ScheduledRows
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, request
from support.engine.lags import lags_in_turn
from support.engine.speculation_rig import Rig, gang_rig, solo_rig
from support.processes.gang import RunOnGang

PROMPT = [5, 77, 31, 200, 14, 9, 9, 150, 33, 8, 120, 61, 42, 3, 18, 90, 91, 17, 4, 250, 38]
CHUNK = 8
LAST_OWNER: dict[Shape, int] = {"E2B": 5, "E4B": 3, "12B": 5, "26B-A4B": 5, "31B": 5}


class RowCount:
    """Rows that each layer's feed-forward, and keys, are computed for, a forward pass after the other."""

    def __init__(self, model: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[list[int]] = []
        """Rows behind attention, by layer."""
        self.keys: list[int] = []
        """Rows that the last layer with KV writes."""
        self.embedded: list[Counter[int]] = []
        """Per-layer embeddings: rows by layer."""
        mlps = {id(layer._mlp): i for i, layer in enumerate(model._layers)}
        whole_mlp, whole_forward = MLP.__call__, TargetModel.forward
        owner = max(layer.index for layer in model.config.layers if layer.kv_donor is None)
        whole_queries = model._layers[owner]._attention.queries

        def mlp(self_: MLP, x_TH: Tensor) -> Tensor:
            if id(self_) in mlps:  # not a drafter's
                self.passes[-1][mlps[id(self_)]] += len(x_TH)
            return whole_mlp(self_, x_TH)

        def queries(x_TH: Tensor, *arguments: Any) -> Tensor:
            self.keys.append(len(x_TH))
            return whole_queries(x_TH, *arguments)

        def forward(self_: TargetModel, *arguments: Any, **named: Any) -> Any:
            self.passes.append([0] * len(mlps))
            self.embedded.append(Counter())
            return whole_forward(self_, *arguments, **named)

        monkeypatch.setattr(MLP, "__call__", mlp)
        monkeypatch.setattr(TargetModel, "forward", forward)
        monkeypatch.setattr(model._layers[owner]._attention, "queries", queries)
        embedding = model._per_layer_embedding
        if embedding is not None:

            def embed(token_ids_T: Tensor, embeddings_TH: Tensor, layers: range) -> Tensor:
                self.embedded[-1].update(dict.fromkeys(layers, len(token_ids_T)))
                return embedding(token_ids_T, embeddings_TH, layers)

            monkeypatch.setattr(model, "_per_layer_embedding", embed)


def rig_of(shape: Shape, *methods: str) -> Rig:
    directory = tiny_checkpoint(shape)
    makes = {"mtp": tiny_assistant, "dflash": tiny_dflash}
    paths = [makes[method](directory) for method in methods]
    return solo_rig(
        directory,
        drafter_path=paths[0] if paths else None,
        second_drafter_path=paths[1] if len(paths) > 1 else None,
        num_draft_tokens=3 if paths else None,
    )


@contextmanager
def no_shortcut() -> Iterator[None]:
    """Every row goes through every layer."""
    batch = CycleRows.batch
    CycleRows.batch = CycleRows.all_rows  # type: ignore[method-assign]
    try:
        yield
    finally:
        CycleRows.batch = batch  # type: ignore[method-assign]


@pytest.mark.parametrize("shape", SHAPES)
def test_prompt_rows_end_at_the_last_layer_that_owns_kv(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, last_owner = rig_of(shape), LAST_OWNER[shape]
    count = RowCount(rig.model, monkeypatch)
    rig.run([request("r", PROMPT, 3)], prefill_chunk=CHUNK, prefix_cache=False)
    num_layers = len(rig.model.config.layers)
    whole, narrow = last_owner, num_layers - last_owner
    # Two chunks that choose nothing, the last one, and two tokens after the first.
    expected = [(8, 0), (8, 0), (5, 1), (1, 1), (1, 1)]
    assert count.passes[:5] == [[rows] * whole + [outputs] * narrow for rows, outputs in expected]
    assert count.keys[:5] == [rows for rows, _ in expected]
    if rig.model.config.per_layer_embedding is not None:
        for embedded, (rows, outputs) in zip(count.embedded, expected, strict=False):
            assert [embedded[i] for i in range(whole)] == [rows] * whole
            assert [embedded[i] for i in range(whole, num_layers)] == [outputs] * narrow


def test_a_mixed_step_narrows_to_verify_rows_and_those_with_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_of("E4B", "mtp")
    count = RowCount(rig.model, monkeypatch)
    submits = [request("a", PROMPT[:2], 12), request("b", PROMPT, 2, prompt_logprobs=2), request("c", PROMPT, 2)]
    run = rig.run(submits, prefill_chunk=CHUNK, prefix_cache=False, lag=0)
    # Every prompt row of b but the last chunk's last has a log-probability; c's have none.
    assert (count.passes[0][0], count.passes[0][-1]) == (2 + 8 + 8, 1 + 8)
    # One row and three drafts of a, then.
    assert (count.passes[1][0], count.passes[1][-1]) == (4 + 8 + 8, 4 + 8)
    logprobs = [entry for delta in run.results["b"].deltas for entry in delta.prompt_logprobs or ()]
    assert len(logprobs) == len(PROMPT) - 1


@pytest.mark.parametrize("have", [3, 11])
def test_a_client_gets_the_log_probabilities_that_it_lacks(have: int) -> None:
    """Rows before them end early, so those that report are not the first of their chunk."""
    rig = rig_of("E4B")
    asked = request("r", PROMPT, 2, prompt_logprobs=2)
    found = []
    for submit in (asked, msgspec.structs.replace(asked, num_prompt_logprobs=have)):
        run = rig.run([submit], prefill_chunk=CHUNK, prefix_cache=False)
        entries = [entry for delta in run.results["r"].deltas for entry in delta.prompt_logprobs or ()]
        found.append([(entry.token_id, round(entry.logprob, 9)) for entry in entries])
    whole, rest = found
    assert len(whole) == len(PROMPT) - 1
    assert rest == whole[have:]


def test_all_rows_reach_the_last_captured_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of("E4B", "dflash")
    last = max(rig.plan.traits.captured_layers)
    assert last >= LAST_OWNER["E4B"], "the drafter is to read a layer that shares KV"
    count = RowCount(rig.model, monkeypatch)
    rig.run([request("r", PROMPT, 2)], prefill_chunk=64, prefix_cache=False)
    num_narrow = len(rig.model.config.layers) - last - 1
    assert count.passes[0] == [len(PROMPT)] * (last + 1) + [1] * num_narrow


@pytest.mark.parametrize("split", range(4))
def test_any_layer_may_be_the_last_captured(split: int) -> None:
    """Captured features are of all rows, and hidden states do not depend on where rows end."""
    rig = rig_of("E4B")
    captured = (LAST_OWNER["E4B"] - 1 + split,) if split else ()
    submits = [request(f"r{i}", PROMPT[i:], 4) for i in range(3)]
    with no_shortcut():
        whole = rig.run(submits, prefill_chunk=CHUNK, captured_layers=captured)
    assert rig.run(submits, prefill_chunk=CHUNK, captured_layers=captured).ids == whole.ids


def requests(count: int, methods: tuple[str, ...] = ("auto",)) -> list[Submit]:
    """Prompts that share beginnings, some with log-probabilities, that ask for `methods` of drafting in turn."""
    rng = random.Random(12)
    beginning = [rng.randrange(3, VOCAB_SIZE) for _ in range(17)]
    samplers: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        {"prompt_logprobs": 3},
        {"logprobs": 2, "temperature": 0.7},
        {},
    )
    return [
        request(
            f"r{i}",
            beginning[: rng.randrange(1, 18)] + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(30))],
            rng.randrange(1, 14),
            seed=rng.getrandbits(60),
            draft_method=methods[i // 2 % len(methods)],
            **samplers[i % len(samplers)],
        )
        for i in range(count)
    ]


def answers(run: Run) -> dict[str, Any]:
    """Ids, drafts accepted, hits and log-probabilities by request."""
    return {
        name: (
            result.ids,
            result.last.cached_tokens,
            [round(entry.logprob, 9) for delta in result.deltas for entry in delta.prompt_logprobs or ()],
            [round(entry.logprob, 9) for delta in result.deltas for entry in delta.logprobs or ()],
        )
        for name, result in run.results.items()
    }


@lags_in_turn("shape, methods", ["E2B", "E4B"], [(), ("mtp",), ("dflash",), ("mtp", "dflash")])
def test_answers_are_those_without_it(shape: Shape, methods: tuple[str, ...], lag: int) -> None:
    # An engine of two drafters that may choose goes by the time that steps take, which no two runs have in common.
    rig, submits = rig_of(shape, *methods), requests(8, methods if len(methods) > 1 else ("auto",))
    limits: dict[str, Any] = {"prefill_chunk": 7, "num_slots": 3, "lag": lag, "padded": lag == 1}
    with no_shortcut():
        whole = rig.run(submits, **limits)
    narrowed = rig.run(submits, **limits)
    assert answers(narrowed) == answers(whole)
    assert narrowed.speculation == whole.speculation
    assert any(result.last.cached_tokens for result in narrowed.results.values())


def serve_twice(comm: Any, directory: str, drafter: str, submits: list[Submit]) -> list[Any]:
    """On each rank: the answers without and with the shortcut, on rank 0."""
    found: list[Any] = []
    rig = gang_rig(comm, Path(directory), drafter_path=Path(drafter), num_draft_tokens=3)
    for shortcut in (False, True):
        if shortcut:
            found.append(_serve(rig, submits))
        else:
            with no_shortcut():
                found.append(_serve(rig, submits))
    return found


def _serve(rig: Rig, submits: list[Submit]) -> Any:
    if rig.comm.rank:
        rig.engine(None, prefill_chunk=7, num_slots=3).run()
        return None
    return answers(rig.run(submits, prefill_chunk=7, num_slots=3))


@pytest.mark.slow
def test_answers_are_those_without_it_on_two_ranks(run_on_gang: RunOnGang) -> None:
    directory = tiny_checkpoint("E4B")
    submits = requests(5)
    (whole, narrowed), _ = run_on_gang(2, serve_twice, str(directory), str(tiny_assistant(directory)), submits)
    alone = answers(rig_of("E4B", "mtp").run(submits, prefill_chunk=7, num_slots=3))
    assert narrowed == whole
    assert {name: answer[0] for name, answer in narrowed.items()} == {name: answer[0] for name, answer in alone.items()}


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ({"num_known": 9, "samples": False}, 0),
        ({"num_known": 9, "samples": True}, 1),
        ({"num_known": 1, "num_drafts": 4, "samples": True}, 1),
        ({"num_known": 9, "samples": False, "prompt_logprobs_from": 1, "start": 0}, 9),
        ({"num_known": 9, "samples": True, "prompt_logprobs_from": 25, "start": 20}, 5),
        ({"num_known": 9, "samples": False, "prompt_logprobs_from": 29, "start": 20}, 1),
    ],
)
def test_rows_with_outputs_are_a_sequence_s_last(rows: dict[str, Any], outputs: int) -> None:
    scheduled = {"slot": 0, "start": 20, "num_drafts": 0, **rows}
    assert ScheduledRows(**scheduled).num_outputs == outputs
