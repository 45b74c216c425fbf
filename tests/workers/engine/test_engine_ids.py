"""One request, one answer: ids do not depend on batch, chunks, page pressure or TP (float64, no exceptions)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from support.checkpoints.tiny import SHAPES, Shape, tiny_checkpoint
from support.engine.engine_runner import Run, engine_config, request, run_engine
from support.engine.lags import lags_in_turn
from support.engine.scarce_memory import least_memory
from support.oracles.plain_loop import plain_decode
from support.processes.gang import RunOnGang

SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "seed": 2**63 + 11},
    {"temperature": 0.7, "top_p": 0.8, "seed": 5},
    {"temperature": 1.3, "min_p": 0.02, "seed": 7},
    {"temperature": 1.0, "seed": 2**64 - 1},
    {"temperature": 0.9, "top_k": 20, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"presence_penalty": 0.7, "logit_bias": {17: 2.0, 3: -50.0}, "suppress_tokens": (5, 9)},
    {"temperature": 1.1, "top_k": 30, "seed": 12, "stop_token_ids": tuple(range(0, 259, 9)), "min_tokens": 5},
]
PROMPT_LENGTHS = [1, 3, 7, 8, 9, 19, 26, 40]  # around the window of 8, and 2W + 3


def mixed_requests(seed: int, max_tokens: int = 24) -> list[Submit]:
    """Eight requests, each with another prompt length and another way to sample."""
    rng = random.Random(seed)
    samplers = SAMPLERS[:]
    rng.shuffle(samplers)
    return [
        request(f"r{i}", [rng.randrange(3, 259) for _ in range(length)], max_tokens, **sampler)
        for i, (length, sampler) in enumerate(zip(PROMPT_LENGTHS, samplers, strict=True))
    ]


def solo_run(shape: Shape, submits: list[Submit], **settings: Any) -> Run:
    run = run_engine(SoloCommunicator(), engine_config(tiny_checkpoint(shape), **settings), submits)
    assert run is not None
    return run


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_equal_the_plain_loop_in_any_batch_and_chunking(shape: Shape) -> None:
    submits = mixed_requests(seed=1)
    expected = {s.request_id: plain_decode(tiny_checkpoint(shape), s) for s in submits}
    assert len({tuple(ids) for ids in expected.values()}) == len(submits)
    for prefill_chunk, lag in ((1, 1), (7, 0), (64, 1)):
        assert solo_run(shape, submits, prefill_chunk=prefill_chunk, lag=lag).ids == expected, prefill_chunk
    for i, submit in enumerate(submits):
        assert solo_run(shape, [submit], lag=i % 2).ids == {submit.request_id: expected[submit.request_id]}


@lags_in_turn("shape", SHAPES)
def test_ids_survive_preemption(shape: Shape, lag: int) -> None:
    submits = mixed_requests(seed=2, max_tokens=40)
    plenty = solo_run(shape, submits, lag=1 - lag)
    assert plenty.preemptions == 0
    # Full pages for about two and a half sequences of eight.
    config = engine_config(tiny_checkpoint(shape), max_model_len=96, prefill_chunk=16, lag=lag)
    scarce = None
    for share in (3, 4, 5, 6, 8):
        budget = least_memory(config) * share // 2
        scarce = solo_run(shape, submits, kv_memory_bytes=budget, max_model_len=96, prefill_chunk=16, lag=lag)
        assert scarce.ids == plenty.ids
        if scarce.preemptions:
            break
    assert scarce is not None
    assert scarce.preemptions > 0


def serve_everything(comm: Communicator, directories: list[str], submits: list[Submit], tp: int) -> list[Any]:
    """On each rank: serve the requests on each checkpoint; rank 0 returns ids."""
    ids = []
    for i, directory in enumerate(directories):
        run = run_engine(comm, engine_config(directory, tensor_parallel_size=tp, lag=(i + comm.size // 2) % 2), submits)
        ids.append(None if run is None else run.ids)
    return ids


@pytest.mark.slow
def test_ids_do_not_depend_on_tensor_parallelism(run_on_gang: RunOnGang) -> None:
    """All shapes (KV heads fewer than ranks, a vocabulary that TP does not divide), one with added vocabulary."""
    directories = [str(tiny_checkpoint(shape)) for shape in SHAPES]
    directories.append(str(tiny_checkpoint("31B", vocab_size=280, num_added=21, seed=4)))
    submits = mixed_requests(seed=3, max_tokens=16)
    expected = serve_everything(SoloCommunicator(), directories, submits, tp=1)
    for tp, some in ((2, slice(None)), (4, slice(0, None, 5))):  # four ranks share two cores: the ends of the list
        found, *followers = run_on_gang(tp, serve_everything, directories[some], submits, tp)
        assert found == expected[some]
        assert followers == [[None] * len(found)] * (tp - 1)
