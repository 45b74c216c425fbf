"""Exact numerics on cards, in bfloat16: each request gets what it gets alone, ids and log-probabilities, to the bit.

Alone is one card, no drafter, eager cycles, the prompt in as few steps as there are rows. `-s` shows the counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, cast

import msgspec
import pytest
import torch

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_workers.config import EngineConfig, KVDTypeName
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.sampling.params import DraftMethod
from support.cluster.process_launcher import ProcessLauncher
from support.cluster.survival import kill_and_go_on
from support.engine.embedded_devices import family_config
from support.engine.exact_runs import compare, draw_ways, mixed_requests, serve_alone, serve_ways
from support.engine.gpu import needs_gpus, run_on_gpus, shortened
from support.engine.held_out_requests import held_out_requests
from support.processes.gang import RunOnGang

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]


@dataclass(frozen=True)
class Kind:
    """What is served."""

    model: str
    drafters: tuple[str, ...]
    kv_dtype: KVDTypeName = "auto"

    @property
    def is_embedded(self) -> bool:
        """Whether its weights are trained ones."""
        return self.model == "gemray-tiny"


KINDS = {
    "gemray-tiny": Kind("gemray-tiny", ("gemray-tiny-assistant", "gemray-tiny-dflash")),
    "gemray-tiny, centroids": Kind("gemray-tiny", ("gemray-tiny-assistant-centroid",)),
    "31B": Kind("31B-it", ("31B-it-assistant", "31B-it-DFlash")),
    "26B-A4B": Kind("26B-A4B-it", ("26B-A4B-it-assistant", "26B-A4B-it-DFlash")),
    "E4B": Kind("E4B-it", ("E4B-it-assistant",)),
    "31B, 8-bit KV": Kind("31B-it", ("31B-it-assistant",), "fp8_e4m3"),
    "31B, W4A16": Kind("31B-it-w4a16", ("31B-it-assistant", "31B-it-DFlash")),
    "31B, FP8": Kind("31B-it-fp8", ("31B-it-assistant",)),
    "31B, NVFP4": Kind("31B-it-nvfp4", ("31B-it-assistant",)),
    "26B-A4B, W8A16": Kind("26B-A4B-it-w8a16", ("26B-A4B-it-assistant",)),
    "E4B, W4A16": Kind("E4B-it-w4a16", ("E4B-it-assistant",)),
}
NUM_LAYERS = 8
"""Layers of the shapes that share no KV: a period of sliding layers and a full one, and some more."""
NUM_CASES = 150
LONGEST, MAX_TOKENS = 1300, 12
"""Longer than any window."""
CLUSTER = ClusterConfig(placement_deadline_s=60, start_deadline_s=200, heartbeat_deadline_s=30, stop_deadline_s=10)


def exact_config(kind: Kind, directory: Path, *, drafters: bool, **changes: Any) -> EngineConfig:
    """A kind in bfloat16 with its drafters or none; graphs are captured as they are wanted."""
    names = [kind.model, *(kind.drafters if drafters else ())]
    if kind.is_embedded:
        model, *paths = (embedded_path(cast(EmbeddedName, name)) for name in names)
    else:
        model, *paths = (shortened(name, directory, NUM_LAYERS) for name in names)
        changes["random_weights"] = True
    settings: dict[str, Any] = {
        "model_path": str(model),
        "drafter_path": str(paths[0]) if paths else None,
        "second_drafter_path": str(paths[1]) if len(paths) > 1 else None,
        "dtype": "bfloat16",
        "device": "cuda",
        "numerics": "exact",
        "kv_dtype": kind.kv_dtype,
        "max_model_len": LONGEST + MAX_TOKENS + 20,
        "max_num_seqs": 32,
        "max_step_tokens": 1024,
        "prefill_chunk": 512,
        "kv_memory_bytes": 3 << 30,
        "capture": "use",
    }
    return EngineConfig(**{**settings, "tensor_parallel_size": 1, **changes})


def check(
    run_on_gang: RunOnGang, name: str, directory: Path, tp: int, num_cases: int, told: Callable[[str, object], None]
) -> None:
    kind = KINDS[name]
    vocab_size = 4096 if kind.is_embedded else 200_000
    submits = mixed_requests(32, vocab_size, longest=LONGEST, max_tokens=MAX_TOKENS)
    begun = monotonic()
    alone = serve_alone(SoloCommunicator(), exact_config(kind, directory, drafters=False), submits)
    gc.collect()
    torch.cuda.empty_cache()  # kinds may run side by side on a card
    config = exact_config(kind, directory, drafters=True, tensor_parallel_size=tp)
    methods: list[DraftMethod] = ["auto", "none", "mtp"]
    if len(kind.drafters) > 1:
        methods.append("dflash")
    ways = list(draw_ways(tp, submits, alone, num_cases=num_cases, methods=methods, most_drafts=4))
    alone_s = monotonic() - begun
    served, *_ = run_on_gang(tp, serve_ways, config, ways, timeout_s=600.0)
    spent = f"{alone_s:.0f} s alone, {monotonic() - begun - alone_s:.0f} s together"
    found = compare(ways, served, alone)
    line = f"{name}, TP {tp}, {len(ways)} batches: {found}; {spent}"
    told("exact", line)
    print(line)
    assert not found.differences, "\n".join(found.differences[:10])
    assert found.counts["cases"] >= num_cases
    assert found.counts["preemptions"] > 0, line
    assert found.counts["replays"] > 0


@pytest.mark.parametrize("name", KINDS)
def test_a_request_has_the_bits_that_it_has_alone(
    run_on_gang: RunOnGang, name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    needs_gpus(1)
    check(run_on_gang, name, tmp_path, 1, NUM_CASES, record_property)


@pytest.mark.parametrize("name", KINDS)
def test_two_cards_give_it_the_bits_of_one(
    run_on_gang: RunOnGang, name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    needs_gpus(2)
    check(run_on_gang, name, tmp_path, 2, 100, record_property)


KILLS = 5
"""Times that the rank is killed, one after the other; the eighth would end a request."""


def streams(count: int) -> list[Submit]:
    """Long enough to run through all kills: half of them greedy, half as published."""
    drawn = {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
    return [
        msgspec.structs.replace(
            submit, params=msgspec.structs.replace(submit.params, seed=7 + i, **(drawn if i % 2 else {}))
        )
        for i, submit in enumerate(held_out_requests(count, 1700))
    ]


async def test_streams_go_on_with_their_ids_after_kills(record_property: Callable[[str, object], None]) -> None:
    """Each of 20 streams is cut by `kill -9` of the rank, again and again. Eager cycles start sooner."""
    needs_gpus(1)
    config = family_config("gemray-tiny-assistant", "cuda", "bfloat16", numerics="exact", num_draft_tokens=3)
    config = replace(config, max_model_len=2000, enforce_eager=True, kv_memory_bytes=1 << 30)
    submits = streams(20)
    undisturbed = run_on_gpus(SoloCommunicator(), replace(config, drafter_path=None, num_draft_tokens=None), submits)
    assert undisturbed is not None
    survived = await kill_and_go_on(
        lambda: Gang(ProcessLauncher(config), CLUSTER, config), submits, victims=[0] * KILLS, deadline_s=200
    )
    equal = sum(survived.ids[name] == ids for name, ids in undisturbed.ids.items())
    line = f"{equal} of {len(submits)} streams as undisturbed; {survived.tokens_at_kill} tokens at the kills"
    record_property("kills", line)
    print(line)
    assert equal == len(submits)
