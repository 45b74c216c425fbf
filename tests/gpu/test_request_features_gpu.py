"""What requests may ask for beside sampling, on a card as on the CPU: two drafters, grammars, bad words, found prompts.

The same engines run on both, so `CPU` in float64 says what is right; the card runs in float64 kernel by kernel, and in
float32 with graphs, where ids may not depend on how cycles run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from gemray_workers.embedded import embedded_path
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.grammar.grammar import Grammar
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.rank.warm_up import OneByOne
from support.engine.engine_runner import Run, collect, engine_config, request, run_engine
from support.engine.gpu import needs_gpus
from support.engine.held_out_requests import held_out_requests
from support.structured.sweep import STOP_IDS

pytestmark = pytest.mark.gpu

TARGET = embedded_path("gemray-tiny")
MTP = str(embedded_path("gemray-tiny-assistant"))
DFLASH = str(embedded_path("gemray-tiny-dflash"))
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "mtp": {"drafter_path": MTP},
    "dflash": {"drafter_path": DFLASH},
    "both": {"drafter_path": DFLASH, "second_drafter_path": MTP},
}
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "seed": 5},
)
METHODS = ("auto", "mtp", "dflash", "none")
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "tall": {"type": "boolean"}},
    "required": ["name", "tall"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(kind="json_schema", text=json.dumps(PERSON)),
    Grammar(kind="regex", text="[0-9]{3}-[a-z]{4}"),
    Grammar(kind="choice", text='["yes", "no", "yesterday"]'),
)
NUM_TOKENS = 24


@functools.cache
def mixed() -> tuple[Submit, ...]:
    """Requests with a grammar, with bad words and with neither, greedy and drawn, each asking for its drafter."""
    prompts = held_out_requests(12, 1, longest_prompt=24)
    submits = [
        request(
            f"{kind} {number}",
            prompts[number].prompt_ids,
            NUM_TOKENS,
            stop_token_ids=STOP_IDS,
            **SAMPLERS[number % 2],
            **changes,
        )
        for number, (kind, changes) in enumerate(
            [*((g.kind, {"grammar": g}) for g in GRAMMARS for _ in range(2)), *[("free", {})] * 6]
        )
    ]
    said = on_cpu([s for s in submits if s.request_id.startswith("free")])
    for place in (-1, -2):
        ids = said[submits[place].request_id]
        params = msgspec.structs.replace(submits[place].params, bad_words=(tuple(ids[1:3]), tuple(ids[4:7])))
        submits[place] = msgspec.structs.replace(submits[place], params=params)
    return tuple(submits)


def on_cpu(submits: Sequence[Submit]) -> dict[str, list[int]]:
    """Ids of plain decoding."""
    run = run_engine(SoloCommunicator(), engine_config(TARGET), list(submits))
    assert run is not None
    return run.ids


@functools.cache
def plain() -> dict[str, list[int]]:
    return on_cpu(mixed())


def asking(submits: Sequence[Submit]) -> list[Submit]:
    """The same, each naming a drafter or leaving it to the server."""
    return [
        msgspec.structs.replace(s, params=msgspec.structs.replace(s.params, draft_method=METHODS[i % len(METHODS)]))
        for i, s in enumerate(submits)
    ]


def gpu_rank(dtype: str, drafter: str, **changes: Any) -> EngineRank:
    needs_gpus(1)
    config = engine_config(
        TARGET, dtype=dtype, device="cuda", max_num_seqs=8, max_step_tokens=512, **DRAFTERS[drafter], **changes
    )
    return EngineRank(config, SoloCommunicator(), torch.device("cuda", 0))


def served(rank: EngineRank, submits: Sequence[Submit], inbox: LocalInbox | None = None) -> Run:
    inbox = inbox or LocalInbox(list(submits))
    rank.engine(inbox).run()
    return collect(inbox, list(submits))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_float64_ids_are_those_of_plain_decoding_on_the_cpu(drafter: str, lag: int) -> None:
    submits = asking(mixed()) if drafter == "both" else mixed()
    run = served(gpu_rank("float64", drafter, lag=lag), submits)
    assert run.ids == plain()
    assert (run.speculation.accepted > 0) == (drafter != "none")


@pytest.mark.parametrize("drafter", ["dflash", "both"])
def test_float32_ids_do_not_depend_on_graphs(drafter: str) -> None:
    """With requests that graphs are captured for, beside some that need kernel-by-kernel cycles."""
    submits = asking(mixed()) if drafter == "both" else mixed()
    free = [s for s in submits if s.request_id.startswith("free")][:-2]
    for batch in (free, submits):
        eager = served(gpu_rank("float32", drafter, enforce_eager=True), batch)
        graphs = served(gpu_rank("float32", drafter), batch)
        assert graphs.ids == eager.ids


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prompt_that_is_found_changes_no_id(drafter: str) -> None:
    ids = [token for submit in held_out_requests(6, 1) for token in submit.prompt_ids][:100]
    submits = [request(f"r{i}", ids, NUM_TOKENS, **SAMPLERS[i // 2]) for i in range(4)]
    inbox = OneByOne(submits)
    run = served(gpu_rank("float64", drafter), submits, inbox)
    assert run.ids == on_cpu(submits)
    cached = [max(delta.cached_tokens for delta in run.results[s.request_id].deltas) for s in submits]
    assert cached[0] == 0
    assert min(cached[1:]) >= 96, cached
