"""Speculation is lossless: ids with a drafter equal ids without, to the id, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from gemray_workers.parallel.communicator import SoloCommunicator
from support.engine_runner import Run, engine_config, run_engine
from support.tiny import SHAPES, Shape, tiny_checkpoint
from support.tiny_drafters import tiny_assistant, tiny_dflash

from .test_engine_ids import mixed_requests


def serve(shape: Shape, submits: Any, **settings: Any) -> Run:
    run = run_engine(SoloCommunicator(), engine_config(tiny_checkpoint(shape), **settings), submits)
    assert run is not None
    return run


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_mtp_ids(shape: Shape, k: int) -> None:
    submits = mixed_requests(seed=10 + k)
    expected = serve(shape, submits).ids
    for centroids in (False, True):
        run = serve(
            shape,
            submits,
            drafter_path=str(tiny_assistant(tiny_checkpoint(shape), centroids=centroids)),
            max_draft_tokens=k,
            max_step_tokens=80,
            prefill_chunk=7,
        )
        assert run.ids == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 4, 7])
def test_dflash_ids(shape: Shape, k: int) -> None:
    submits = mixed_requests(seed=20 + k)
    expected = serve(shape, submits).ids
    run = serve(
        shape,
        submits,
        drafter_path=str(tiny_dflash(tiny_checkpoint(shape))),
        max_draft_tokens=k,
        max_step_tokens=80,
        prefill_chunk=7,
    )
    assert run.ids == expected
