"""The embedded family in the engine: greedy ids with and without drafters, and acceptance as measured offline.

Offline is the recipe's own teacher-forced evaluation, which shares no code with the engine: it drafts from every
position of a finished text and replays the rounds.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.messages import Submit
from support.engine.engine_runner import Run
from support.engine.held_out_requests import held_out_requests
from support.engine.lags import lags_in_turn
from support.engine.scripted_drafters import ScriptedDrafter
from support.engine.speculation_rig import Rig, solo_rig

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "workers" / "recipes"))

from embedded_family.assistant import Assistant  # noqa: E402
from embedded_family.dflash import DFlash  # noqa: E402
from embedded_family.settings import FAMILY, STOP_IDS  # noqa: E402

from embedded_family import evaluate, export  # noqa: E402

NUM_PROMPTS = 12
NUM_TOKENS = 48
MAX_MODEL_LEN = 512
CPU = torch.device("cpu")
DRAFTERS: tuple[EmbeddedName, ...] = ("gemray-tiny-assistant", "gemray-tiny-assistant-centroid", "gemray-tiny-dflash")
LIMITS: dict[str, Any] = {
    "prefill_chunk": 128,
    "max_step_tokens": 1024,
    "max_model_len": MAX_MODEL_LEN,
    "num_slots": 16,
}


class Accepted(NamedTuple):
    """One round."""

    start: int
    num_accepted: int


@functools.cache
def submits() -> tuple[Submit, ...]:
    """Held-out prompts of every kind, spread over the whole list."""
    return tuple(held_out_requests(NUM_PROMPTS, NUM_TOKENS, stop_token_ids=tuple(STOP_IDS)))


def rig_of(drafter: EmbeddedName | None) -> Rig:
    path = None if drafter is None else embedded_path(drafter)
    num_draft_tokens = evaluate.MTP_DRAFTS if drafter is not None and "assistant" in drafter else None
    return solo_rig(embedded_path("gemray-tiny"), drafter_path=path, num_draft_tokens=num_draft_tokens)


@functools.cache
def plain_run() -> Run:
    return rig_of(None).run(list(submits()), **LIMITS)


def offline_drafts(drafter: EmbeddedName, sample: evaluate.Sample) -> torch.Tensor:
    target, module = offline_models(drafter)
    if isinstance(module, DFlash):
        return evaluate.dflash_drafts(target, module, sample)
    return evaluate.mtp_drafts(target, module, sample.ids[None])


@functools.cache
def offline_models(drafter: EmbeddedName) -> tuple[Any, Any]:
    module: Any = DFlash(FAMILY.dflash, FAMILY.target)
    if "assistant" in drafter:
        module = Assistant(FAMILY.assistant, FAMILY.target, ordered="centroid" in drafter)
    target = export.load_target(embedded_path("gemray-tiny"), torch.float32, CPU)
    return target, export.load_module(module, embedded_path(drafter), torch.float32, CPU)


def offline_rounds(drafter: EmbeddedName, submit: Submit, ids: list[int]) -> list[Accepted]:
    """What the recipe's evaluation accepts, in rounds as an engine has them: none whose only token is the last."""
    text, start = [*submit.prompt_ids, *ids], len(submit.prompt_ids)
    sample = evaluate.Sample("", "", torch.tensor(text), start, len(text))
    _, walked = evaluate.walk(sample, offline_drafts(drafter, sample))
    ends_by_length = ids[-1] not in STOP_IDS
    rounds, at = [], start
    for num_accepted, _ in walked:
        room = len(text) - 1 - at - ends_by_length  # the last token of a budget is never drafted
        if room > 0:
            rounds.append(Accepted(at, min(num_accepted, room)))
        at += num_accepted + 1
    return rounds


@lags_in_turn("drafter", DRAFTERS)
def test_ids_are_the_plain_ones_and_every_round_accepts_what_it_does_offline(drafter: EmbeddedName, lag: int) -> None:
    rig = rig_of(drafter)
    watched = ScriptedDrafter(lambda *_: None, rig.drafter)
    run = rig.run(list(submits()), drafter=watched, lag=lag, **LIMITS)
    assert run.ids == plain_run().ids
    found, expected = {}, {}
    for submit in submits():
        ids = run.ids[submit.request_id]
        end = len(submit.prompt_ids) + len(ids)
        found[submit.request_id] = [
            Accepted(r.start, min(r.num_accepted, end - 1 - r.start))
            for r in watched.rounds
            if r.request_id == submit.request_id and r.start + 1 < end  # none that was in flight at the end
        ]
        expected[submit.request_id] = offline_rounds(drafter, submit, ids)
    assert found == expected
    counters = run.speculation
    assert counters.accepted == sum(r.num_accepted for rounds in expected.values() for r in rounds)
    assert counters.accepted / counters.rounds > 0.8, "an untrained drafter gets next to nothing"
