"""Exact numerics on cards, in bfloat16: each request gets what it gets alone, ids and log-probabilities, to the bit.

Alone is one card, no drafter, eager cycles, the prompt in as few steps as there are rows. `-s` shows the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic

import msgspec
import pytest

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from support.cluster.process_launcher import ProcessLauncher
from support.cluster.survival import kill_and_go_on
from support.engine.embedded_devices import family_config
from support.engine.exact_kinds import KINDS, NUM_CASES, NUM_CASES_OF_TWO, exact_config, exact_requests, exact_ways
from support.engine.exact_runs import compare, serve_alone, serve_ways
from support.engine.gpu import needs_gpus, run_on_gpus
from support.engine.held_out_requests import held_out_requests
from support.processes.gang import RunOnGang

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(0)]


CLUSTER = ClusterConfig(placement_deadline_s=60, start_deadline_s=200, heartbeat_deadline_s=30, stop_deadline_s=10)


def check(
    run_on_gang: RunOnGang, name: str, directory: Path, tp: int, num_cases: int, told: Callable[[str, object], None]
) -> None:
    kind = KINDS[name]
    submits = exact_requests(kind)
    begun = monotonic()
    alone = serve_alone(SoloCommunicator(), exact_config(kind, directory, drafters=False), submits)
    config = exact_config(kind, directory, drafters=True, tensor_parallel_size=tp)
    ways = exact_ways(kind, submits, alone, tp=tp, num_cases=num_cases)
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


@pytest.mark.cards(2)
@pytest.mark.parametrize("name", KINDS)
def test_two_cards_give_it_the_bits_of_one(
    run_on_gang: RunOnGang, name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    needs_gpus(2)
    check(run_on_gang, name, tmp_path, 2, NUM_CASES_OF_TWO, record_property)


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
    served = ServedCheckpoints()
    survived = await kill_and_go_on(
        lambda: Gang(ProcessLauncher(config), CLUSTER, config, served), submits, victims=[0] * KILLS, deadline_s=200
    )
    equal = sum(survived.ids[name] == ids for name, ids in undisturbed.ids.items())
    line = f"{equal} of {len(submits)} streams as undisturbed; {survived.tokens_at_kill} tokens at the kills"
    record_property("kills", line)
    print(line)
    assert equal == len(submits)
