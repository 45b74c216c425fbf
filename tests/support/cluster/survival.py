"""Ranks of a real model are killed while requests run: the gang is built anew, and every stream goes on.

The same on CPU and on cards, over plain processes or over Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemray_cluster.gang.client import GangState
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.laps import in_parts
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_workers.config import DeviceName, EngineConfig
from gemray_workers.messages import Submit
from gemray_workers.rank.worker import RankWorker
from support import waiting
from support.checkpoints.tiny import VOCAB_SIZE, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant
from support.engine.engine_runner import engine_config, request

SAMPLERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2},
)
MAX_TOKENS = {"cpu": 60, "cuda": 1000}
"""Long enough that requests still run when the second rank is killed."""


@dataclass
class Survival:
    """What the clients got, and what the failures cost."""

    ids: dict[str, list[int]]
    finishes: set[str | None]
    rebuild_seconds: list[float] = field(default_factory=list)
    """From each kill to serving again."""
    tokens_at_kill: list[int] = field(default_factory=list)
    """Tokens that all streams together had at each kill."""
    loads: list[str] = field(default_factory=list)
    """What rank 0 of each gang loaded in, and on what it spent that."""


def surviving_config(device: DeviceName) -> EngineConfig:
    """Two ranks with an MTP assistant; float64 on CPU, float32 and graphs on CUDA."""
    target = tiny_checkpoint("31B")
    return engine_config(
        target,
        device=device,
        dtype="float64" if device == "cpu" else "float32",
        tensor_parallel_size=2,
        drafter_path=str(tiny_assistant(target)),
        num_draft_tokens=3,
        max_model_len=64 + MAX_TOKENS[device],
        max_num_seqs=4,
        kv_memory_bytes=256 << 20,
        collective_timeout_s=30.0,
        lag=1,
    )


def surviving_requests(device: DeviceName) -> list[Submit]:
    """Requests of several samplers that end by length alone."""
    return [
        request(
            f"r{i}",
            [3 + (i + 1) * 17 * k % (VOCAB_SIZE - 3) for k in range(3 + 9 * i)],
            MAX_TOKENS[device],
            **{**SAMPLERS[i], "seed": 100 + i},
        )
        for i in range(len(SAMPLERS))
    ]


async def kill_and_go_on(
    make_gang: Callable[[], Gang], submits: Sequence[Submit], victims: Sequence[int], *, deadline_s: float
) -> Survival:
    """Serve `submits`; kill one rank after the other, each once its gang serves and every stream has moved on.

    Args:
        make_gang: the first gang, and each that follows.
        submits: what is asked of the first one.
        victims: ranks.
        deadline_s: for each start.
    """
    router, gangs = Router(ReplicaLimits(), max_rebuilds=len(victims)), list[Gang]()

    def make() -> Gang:
        gangs.append(make_gang())
        return gangs[-1]

    found = Survival({submit.request_id: [] for submit in submits}, set())

    async def listen(submit: Submit) -> None:
        finish = None
        async for delta in router.generate(submit):
            found.ids[submit.request_id] += delta.token_ids
            finish = delta.finish
        found.finishes.add(finish)

    def lengths() -> list[int]:
        return [len(ids) for ids in found.ids.values()]

    def note_load() -> None:
        seconds = gangs[-1].info.ranks[0].load_seconds
        found.loads.append(f"{sum(seconds.values()):.1f} s: {in_parts(seconds)}")

    await router.start(make, slots=len(submits))
    try:
        note_load()
        clients = [asyncio.create_task(listen(submit)) for submit in submits]
        for count, victim in enumerate(victims):
            before = lengths()
            # Asked before it is needed, so that nothing lies between the streams' move and the kill.
            facts = await gangs[-1]._ranks[victim].call(RankWorker.facts)  # answers while `run` blocks
            await waiting.eventually(lambda before=before: _all_moved(before, lengths()), deadline_s)  # type: ignore[misc]
            began = time.monotonic()
            os.kill(facts.pid, signal.SIGKILL)
            found.tokens_at_kill.append(sum(lengths()))
            await waiting.eventually(
                lambda count=count: router.num_rebuilds == count + 1 or router.state is GangState.FAILED,  # type: ignore[misc]
                deadline_s,
            )
            assert router.state is GangState.SERVING, router.failure
            found.rebuild_seconds.append(time.monotonic() - began)
            note_load()
        await asyncio.wait_for(asyncio.gather(*clients), deadline_s)
    finally:
        await router.stop()
    return found


def _all_moved(before: Sequence[int], now: Sequence[int]) -> bool:
    return all(b > a for a, b in zip(before, now, strict=True))
