"""MTP in a live engine against transformers: the logits of every draft of every round, whatever was accepted.

What is verified comes from a script, so that rounds of every acceptance follow each other: the recurrent state, the
keys and the position must follow. Around the keys that a draft may read, everything is NaN (see `WatchedDrafter`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gemray_workers.drafters.mtp import drafter as mtp_drafter
from gemray_workers.messages import Submit
from gemray_workers.model.batch import ForwardBatch
from support.checkpoints.tiny import SHAPES, WINDOW, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant
from support.engine.scripted_drafters import Texts, plain_texts
from support.engine.speculation_rig import Rig, solo_rig
from support.engine.watched_drafter import Faulty, OtherTables, WatchedDrafter, WatchedRound
from support.engine.watched_requests import every_acceptance, greedy_requests, plain_greedy_texts
from support.oracles.mtp_reference import TargetStates, draft_steps, target_states
from support.oracles.oracle import solo_model

PROMPT_LENGTHS = (1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)
NUM_DRAFTS = (8, 4, 1, 6, 0, 8)
TOLERANCE = 1e-3
"""transformers computes norms and angles in float32; the logits are spread by about 6."""


def watched_requests() -> list[Submit]:
    return greedy_requests(PROMPT_LENGTHS, NUM_DRAFTS)


def texts_of(shape: Shape) -> Texts:
    return plain_greedy_texts(shape, PROMPT_LENGTHS, NUM_DRAFTS)


@functools.cache
def states_of(shape: Shape, request_id: str) -> TargetStates:
    return target_states(tiny_checkpoint(shape), texts_of(shape)[request_id])


def expected_logits(shape: Shape, watched: WatchedRound, *, centroids: bool, position_delta: int = 0) -> Tensor:
    directory = tiny_checkpoint(shape)
    newest = texts_of(shape)[watched.request_id][watched.start]
    logits_KV, _ = draft_steps(
        directory,
        tiny_assistant(directory, centroids=centroids),
        states_of(shape, watched.request_id),
        watched.start,
        [newest, *watched.drafts[:-1]],
        window=WINDOW,
        position_delta=position_delta,
    )
    return logits_KV


def worst_difference(shape: Shape, rounds: Sequence[WatchedRound], **settings: Any) -> float:
    """Over all rounds, of the logits that are scored; a NaN is as bad as can be."""
    worst = 0.0
    for w in rounds:
        expected_KV = expected_logits(shape, w, **settings)
        difference_KV = (w.logits_KV - expected_KV).abs()
        scored_KV = w.logits_KV != -torch.inf
        difference = difference_KV[scored_KV].max().item()
        worst = max(worst, torch.inf if math.isnan(difference) else difference)
    return worst


def mtp_rig(shape: Shape, *, centroids: bool = False) -> Rig:
    directory = tiny_checkpoint(shape)
    return solo_rig(directory, drafter_path=tiny_assistant(directory, centroids=centroids), num_draft_tokens=8)


def watch(shape: Shape, rig: Rig, inner: Any = None, *, prefix_cache: bool = False, **limits: Any) -> WatchedDrafter:
    """While a prefix cache keeps pages that left a window, all groups hold the same page numbers, and one group's table
    would do for another's."""
    texts = texts_of(shape)
    drafter = WatchedDrafter(rig, every_acceptance(texts), inner)
    run = rig.run(watched_requests(), drafter=drafter.outer, prefix_cache=prefix_cache, **limits)
    assert plain_texts(watched_requests(), run.ids) == texts, "no drafter changes ids"
    return drafter


@pytest.mark.parametrize("centroids", [False, True], ids=["dense", "centroids"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_round_equals_transformers(shape: Shape, centroids: bool) -> None:
    chunks: dict[str, Any] = {"prefill_chunk": 5, "num_slots": 3, "prefix_cache": True} if centroids else {}
    drafter = watch(shape, mtp_rig(shape, centroids=centroids), **chunks)
    assert {r.num_accepted for r in drafter.scripted_rounds} >= {0, 1, 2, 3, 8}
    assert worst_difference(shape, drafter.rounds, centroids=centroids) < TOLERANCE
    for w in drafter.rounds:
        assert w.drafts == w.logits_KV.argmax(-1).tolist()


def test_the_position_is_a_setting() -> None:
    directory = tiny_checkpoint("12B")
    rig = Rig(
        solo_model(directory),
        directory,
        drafter_path=tiny_assistant(directory),
        num_draft_tokens=8,
        mtp_position_delta=-1,
    )
    rounds = watch("12B", rig).rounds
    assert worst_difference("12B", rounds, centroids=False, position_delta=-1) < TOLERANCE
    assert worst_difference("12B", rounds, centroids=False) > 10 * TOLERANCE


def swapped_tables(rig: Rig) -> Any:
    return Faulty(rig.drafter, slots=lambda slots: OtherTables(slots, {"sliding": "full", "full": "sliding"}))


def first_groups_table_for_all(rig: Rig) -> Any:
    return Faulty(rig.drafter, slots=lambda slots: OtherTables(slots, {"full": "sliding"}))


def hidden_row_before(rig: Rig) -> Any:
    """Row n - 1 instead of n."""
    return Faulty(rig.drafter, num_accepted=lambda _rows, accepted_A: (accepted_A - 1).clamp(min=0))


def last_hidden_row(rig: Rig) -> Any:
    """The row behind all drafts, accepted or not."""
    return Faulty(rig.drafter, num_accepted=lambda rows, _: rows.drafts_A)


@pytest.mark.parametrize("fault", [swapped_tables, first_groups_table_for_all, hidden_row_before, last_hidden_row])
def test_a_drafter_with_a_fault_is_caught(fault: Callable[[Rig], Any]) -> None:
    rig = mtp_rig("26B-A4B")
    assert worst_difference("26B-A4B", watch("26B-A4B", rig, fault(rig)).rounds, centroids=False) > 10 * TOLERANCE


@pytest.mark.parametrize("more_keys", [1, -1])
def test_a_wrong_number_of_keys_is_caught(more_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not committed, or all but the newest committed one."""
    rig = mtp_rig("E4B")
    sound = mtp_drafter._forward_batch

    def misaligned(*args: Any) -> ForwardBatch:
        batch = sound(*args)
        return replace(batch, kv_len_S=batch.kv_len_S + more_keys)

    monkeypatch.setattr(mtp_drafter, "_forward_batch", misaligned)
    assert worst_difference("E4B", watch("E4B", rig).rounds, centroids=False) > 10 * TOLERANCE


@pytest.mark.parametrize("more", [1, -1])
def test_a_wrong_window_is_caught(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = mtp_rig("E4B")
    drafter: Any = rig.drafter
    for layer in drafter._assistant._layers:
        attention = layer._attention
        kernel = attention._kernel

        def wrong(*args: Any, window: int | None, kernel: Any = kernel, **rest: Any) -> Tensor:
            out: Tensor = kernel(*args, window=None if window is None else window + more, **rest)
            return out

        monkeypatch.setattr(attention, "_kernel", wrong)
    assert worst_difference("E4B", watch("E4B", rig).rounds, centroids=False) > 10 * TOLERANCE


def test_an_unscaled_embedding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = mtp_rig("E4B")
    drafter: Any = rig.drafter
    monkeypatch.setattr(drafter, "_embedding", functools.partial(drafter._embedding, scale=1.0))
    assert worst_difference("E4B", watch("E4B", rig).rounds, centroids=False) > 10 * TOLERANCE
