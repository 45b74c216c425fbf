"""A running server, measured as its clients see it."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from gemray.client.connection import connected
from gemray.client.server_address import ServerAddress
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.bench.report import OnlineRow, Spread

WARM_UP_TOKENS = 16


@dataclass
class _Call:
    """What one request saw: times of its messages, and its final one."""

    began: float = 0.0
    arrived: list[float] = field(default_factory=list)
    final: Any = None


def measure_server(
    server: ServerAddress, batch: int, prompt_len: int, max_tokens: int, draft_method: str = "auto"
) -> tuple[OnlineRow, list[str]]:
    """Send `batch` greedy requests of random ids at one time, which name `draft_method`; also the names of the server's
    devices.

    The same number of other requests goes first, unmeasured: a server may compile what it has not run before.
    """
    with connected(server) as stub:
        model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
        with ThreadPoolExecutor(batch) as threads:

            def send(seed: int, max_tokens: int) -> list[_Call]:
                requests = _requests(seed, batch, model.vocab_size, prompt_len, max_tokens, draft_method)
                return list(threads.map(lambda request: _call(stub, request), requests))

            send(1, min(max_tokens, WARM_UP_TOKENS))
            began = time.perf_counter()
            calls = send(0, max_tokens)
            seconds = time.perf_counter() - began
    method = draft_method
    if method == "auto":
        method = model.drafter.method if model.HasField("drafter") else "none"
    return _row(calls, seconds, method, batch, prompt_len, max_tokens), sorted({rank.device for rank in model.ranks})


def _requests(
    seed: int, count: int, vocab_size: int, prompt_len: int, max_tokens: int, draft_method: str
) -> list[pb.GenerateStreamRequest]:
    """Requests whose ids follow from the seed: those of another seed share no prompt with them, and the server's prefix
    cache finds nothing of an earlier run."""
    ids, salt = random.Random(seed), uuid4().hex
    return [
        pb.GenerateStreamRequest(
            token_ids=pb.TokenIds(ids=[ids.randrange(vocab_size) for _ in range(prompt_len)]),
            sampling=pb.SamplingParameters(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            speculation=pb.SpeculationParameters(method=draft_method),
            cache_salt=salt,
        )
        for _ in range(count)
    ]


def _call(stub: Any, request: pb.GenerateStreamRequest) -> _Call:
    call = _Call(began=time.perf_counter())
    for answer in stub.GenerateStream(request):
        if answer.HasField("delta"):
            call.arrived.append(time.perf_counter())
        else:
            call.final = answer.final
    return call


def _row(calls: list[_Call], seconds: float, method: str, batch: int, prompt_len: int, max_tokens: int) -> OnlineRow:
    gaps = [b - a for call in calls for a, b in zip(call.arrived, call.arrived[1:], strict=False)]
    rounds = sum(call.final.speculation.rounds for call in calls if call.final.HasField("speculation"))
    accepted = sum(call.final.speculation.accepted for call in calls if call.final.HasField("speculation"))
    return OnlineRow(
        batch=batch,
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        method=method,
        first_token=Spread.of([1000 * (call.arrived[0] - call.began) for call in calls]),
        between_messages=Spread.of([1000 * gap for gap in gaps] or [0.0]),
        tokens_per_s=sum(call.final.usage.completion_tokens for call in calls) / seconds,
        acceptance_length=1 + accepted / rounds if rounds else None,
    )
