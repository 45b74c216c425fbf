"""A running server, measured as its clients see it."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.bench.report import OnlineRow, Spread
from gemray_cluster.client.client import ServerAddress, connected


@dataclass
class _Call:
    """What one request saw: times of its messages, and its final one."""

    began: float = 0.0
    arrived: list[float] = field(default_factory=list)
    final: Any = None


def measure_server(server: ServerAddress, batch: int, prompt_len: int, max_tokens: int) -> tuple[OnlineRow, list[str]]:
    """`batch` greedy requests of random ids at one time; also the names of the server's devices."""
    with connected(server) as stub:
        model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
        ids = random.Random(0)
        requests = [
            pb.GenerateStreamRequest(
                token_ids=pb.TokenIds(ids=[ids.randrange(model.vocab_size) for _ in range(prompt_len)]),
                sampling=pb.SamplingParameters(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            )
            for _ in range(batch)
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(batch) as threads:
            calls = list(threads.map(lambda request: _call(stub, request), requests))
        seconds = time.perf_counter() - began
    return _row(calls, seconds, model, batch, prompt_len, max_tokens), sorted({rank.device for rank in model.ranks})


def _call(stub: Any, request: pb.GenerateStreamRequest) -> _Call:
    call = _Call(began=time.perf_counter())
    for answer in stub.GenerateStream(request):
        if answer.HasField("delta"):
            call.arrived.append(time.perf_counter())
        else:
            call.final = answer.final
    return call


def _row(
    calls: list[_Call], seconds: float, model: pb.GetModelInfoResponse, batch: int, prompt_len: int, max_tokens: int
) -> OnlineRow:
    gaps = [b - a for call in calls for a, b in zip(call.arrived, call.arrived[1:], strict=False)]
    rounds = sum(call.final.speculation.rounds for call in calls if call.final.HasField("speculation"))
    accepted = sum(call.final.speculation.accepted for call in calls if call.final.HasField("speculation"))
    return OnlineRow(
        batch=batch,
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        method=model.drafter.method if model.HasField("drafter") else "none",
        first_token=Spread.of([1000 * (call.arrived[0] - call.began) for call in calls]),
        between_messages=Spread.of([1000 * gap for gap in gaps] or [0.0]),
        tokens_per_s=sum(call.final.usage.completion_tokens for call in calls) / seconds,
        acceptance_length=1 + accepted / rounds if rounds else None,
    )
