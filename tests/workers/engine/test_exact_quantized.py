"""Quantized checkpoints served in exact numerics, float32: each request gets what it gets alone, to the bit.

Alone is: one rank, no drafter, the whole prompt in one step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from gemray_workers.config import EngineConfig
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.sampling.params import DraftMethod
from support.checkpoints.quantized import every_format_in_turn
from support.checkpoints.tiny import VOCAB_SIZE, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config
from support.engine.exact_runs import Got, Way, compare, draw_ways, mixed_requests, serve_alone, serve_ways
from support.processes.gang import RunOnGang
from support.waiting import HANG_S

Library = Literal["compressed-tensors", "modelopt"]


@functools.cache
def served_alone(shape: Shape, library: Library) -> tuple[EngineConfig, list[Submit], Mapping[str, Got]]:
    """A quantized model's settings, requests, and what each gets alone."""
    directory, _ = every_format_in_turn(tiny_checkpoint(shape), library)
    config = engine_config(directory, dtype="float32", numerics="exact", max_model_len=80, max_step_tokens=96)
    config = replace(config, max_num_seqs=8)
    # The longest texts end behind the 64 keys that are added at a time.
    submits = mixed_requests(12, VOCAB_SIZE, longest=54, max_tokens=14)
    submits = [msgspec.structs.replace(submit, prompt_ids=submit.prompt_ids[:54]) for submit in submits]
    submits = sorted(submits, key=lambda submit: len(submit.prompt_ids))[:8]  # of every length and sampler
    return config, submits, serve_alone(SoloCommunicator(), config, submits)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("shape", "library"), [("31B", "modelopt"), ("26B-A4B", "compressed-tensors")])
def test_ways_of_serving_change_no_bit(run_on_gang: RunOnGang, shape: Shape, library: Library, tp: int) -> None:
    """Batches, chunks, drafts of either drafter, pages that run out, prompts found in the cache, and replays."""
    config, submits, alone = served_alone(shape, library)
    directory = Path(config.model_path)
    drafting = replace(
        config,
        tensor_parallel_size=tp,
        drafter_path=str(tiny_assistant(directory)),
        second_drafter_path=str(tiny_dflash(directory)),
    )
    methods: list[DraftMethod] = ["auto", "none", "mtp", "dflash"]
    ways = list(draw_ways(4 + tp, submits, alone, num_cases=16, methods=methods, most_drafts=3))
    # All that there are, for they all run when pages are wanted.
    ways.append(Way(tuple(submits), prefill_chunk=16, lag=1, graphs=False, scarce=True, prefix_cache=False))
    served, *_ = run_on_gang(tp, serve_ways, drafting, ways, timeout_s=HANG_S)
    assert served is not None
    found = compare(ways, served, alone)
    assert not found.differences
    assert found.counts["cases"] >= 24
    assert found.counts["replays"] > 0
    assert found.counts["preemptions"] > 0
    assert found.counts["accepted"] > 0
