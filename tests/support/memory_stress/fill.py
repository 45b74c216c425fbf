"""Loads a gang without a stated KV memory and runs the largest batch, then the longest context."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from gemray_workers.config import EngineConfig
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.messages import Cancel, FromGang, MemoryInfo, StepOutput, Submit, ToGang
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.process import ProcessLocation, RankSetup
from gemray_workers.rank.worker import RankWorker
from gemray_workers.sampling.params import SamplingParams
from support.memory_stress.watch import FreeMemoryWatch

LOOPBACK = "127.0.0.1"
PUBLISHED: dict[str, Any] = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0.0}
DEAREST: dict[str, Any] = {
    **PUBLISHED, "top_k": 0, "repetition_penalty": 1.1, "presence_penalty": 0.1, "logit_bias": {7: 1.0}, "logprobs": 20,
    "prompt_logprobs": 20,
}  # fmt: skip
BATCH_TOKENS = 32
LONG_TOKENS = 8


@dataclass(frozen=True)
class Filled:
    """What one rank saw."""

    rank: int
    max_model_len: int
    memory: MemoryInfo
    """Once it was ready."""
    least_free: int
    """Bytes, from its first load on to the last token."""
    load_s: float
    batch: int
    """Most sequences that ran at one time (rank 0)."""
    longest: int
    """Tokens of the longest sequence that was filled (rank 0)."""
    faults: tuple[str, ...]
    """What is wrong with requests that did not end as they should (rank 0)."""


class TimedInbox(LocalInbox):
    """Cancels what still runs at its deadline."""

    def __init__(self, submits: Sequence[Submit], seconds: float) -> None:
        super().__init__(submits)
        self._until = time.monotonic() + seconds
        self.most_running = 0
        self.most_rows = 0

    @override
    def poll(self, timeout_s: float) -> list[ToGang]:
        if self._open and time.monotonic() > self._until:
            return [*super().poll(timeout_s), *(Cancel(request_id) for request_id in self._open)]
        return super().poll(timeout_s)

    @override
    def send(self, message: FromGang) -> None:
        super().send(message)
        if isinstance(message, StepOutput):
            self.most_running = max(self.most_running, message.stats.num_running)
            self.most_rows = message.stats.prompt_tokens


def fill(comm: Any, config: EngineConfig, seconds: float, most_context: int | None = None) -> Filled:
    """On every rank of a gang of processes: start, fill, leave.

    Args:
        comm: of the processes, over which the ranks find each other.
        config: without a KV memory.
        seconds: after which the longest context is cut where it stands.
        most_context: tokens of the longest context that are tried; None for as many as the server allows.
    """
    gpu = comm.rank if config.device == "cuda" else None
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    worker = RankWorker(config, comm.rank, lambda _: ProcessLocation("here", LOOPBACK, gpu=gpu))
    rendezvous = worker.open_rendezvous(LOOPBACK).encode() if comm.rank == 0 else None
    address = comm.broadcast_bytes(rendezvous).decode()
    with FreeMemoryWatch(device) as watch:
        started = time.monotonic()
        threads = 1 if gpu is None else 2  # on a CPU those of all ranks spin for each other
        setup = RankSetup(rendezvous=address, interface_ip=LOOPBACK, threads=threads, ranks_here=comm.size)
        model, info = worker.load(setup)
        load_s = time.monotonic() - started
        ids = random.Random(5)
        longest = min(model.max_model_len, most_context or model.max_model_len)
        loads = (
            _batch(config, ids, model.vocab_size, longest, PUBLISHED),
            _batch(config, ids, model.vocab_size, longest, DEAREST),
            [_request("long", ids, model.vocab_size, longest - LONG_TOKENS, LONG_TOKENS, {"temperature": 0.0})],
        )
        batch, faults, rows = 0, [], 0
        for submits in loads:
            inbox = TimedInbox(submits, seconds) if comm.rank == 0 else None
            worker.run_offline(inbox)
            if inbox is not None:
                batch, rows = max(batch, inbox.most_running), inbox.most_rows
                faults += [f"{d.request_id}: {d.fault}" for d in inbox.deltas if d.fault is not None]
    worker.close()
    assert info.memory is not None
    return Filled(comm.rank, model.max_model_len, info.memory, watch.least, load_s, batch, rows, tuple(faults))


def _batch(
    config: EngineConfig, ids: random.Random, vocab_size: int, longest: int, sampling: dict[str, Any]
) -> list[Submit]:
    """As many requests as may run, with prompts of more than a chunk."""
    chunk = Blueprint.of(config).scheduler.prefill_chunk
    length = max(1, min(chunk + 40, longest - BATCH_TOKENS))
    return [
        _request(str(i), ids, vocab_size, length, min(BATCH_TOKENS, longest - length), {**sampling, "seed": i})
        for i in range(config.max_num_seqs)
    ]


def _request(
    name: str, ids: random.Random, vocab_size: int, length: int, max_tokens: int, sampling: dict[str, Any]
) -> Submit:
    params = SamplingParams(**{**PUBLISHED, "seed": 0, **sampling, "max_tokens": max_tokens})
    prompt_ids = [ids.randrange(vocab_size) for _ in range(length)]
    return Submit(request_id=name, prompt_ids=prompt_ids, params=params, cache_salt=f"{name} {length}")
