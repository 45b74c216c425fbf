"""No mixture of requests takes a Triton program of the choice of tokens that warm-up and graphs have not launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations_with_replacement, product
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from triton.runtime import driver

from gemray_kernels.triton.token_choice import TritonKernels
from gemray_workers.engine.buckets import GREEDY, PUBLISHED
from gemray_workers.execution.programs_ahead import noted_programs
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.rank.warm_up import warm_up_requests
from gemray_workers.sampling.choose import choose
from gemray_workers.sampling.features import CANDIDATE_COUNTS, Features
from gemray_workers.sampling.row_masks import RowMasks
from gemray_workers.sampling.state import SamplingState
from support.kernels.pretended_card import PretendedDriver, forget_programs

VOCAB_SIZE = 1100
"""More than the most candidates."""
SIZES = (1, 3, 16)
"""Rows of a choice: one, a multiple of 16 and neither, as Triton tells them apart."""
NUM_SLOTS = max(SIZES)
CPU = torch.device("cpu")


def requested() -> list[Features]:
    """Those of warm-up's requests."""
    submits = warm_up_requests(vocab_size=VOCAB_SIZE, max_model_len=64, prefill_chunk=16, has_grammars=True)
    return list(dict.fromkeys(Features.of(submit.params) for submit in submits))


def any_request() -> Iterable[Features]:
    """Everything that one request may ask for, sensible or not."""
    for masks, penalties, bias, grammar in product((False, True), repeat=4):
        edits = {"masks": masks, "penalties": penalties, "bias": bias, "grammar": grammar}
        yield from (Features(candidates=n, **edits) for n in (0, *CANDIDATE_COUNTS))
        for min_p, top_p, wide_top_k in product((False, True), repeat=3):
            yield Features(noise=True, min_p=min_p, top_p=top_p, wide_top_k=wide_top_k, **edits)


def launch(features: Features, state: SamplingState, num_rows: int, num_drafts: int) -> None:
    """A choice of the target's, then one of a drafter's, by features as a cycle fits them."""
    slot_R = torch.arange(num_rows)
    logits_RV = torch.zeros(num_rows, state.shard.num_elements_padded, dtype=torch.bfloat16)
    allowed = np.full((1, (VOCAB_SIZE + 31) // 32), 0xFFFFFFFF, dtype=np.uint32)
    masks = RowMasks.of_ids([0], allowed, state.shard, CPU) if features.grammar else None
    drafts_RB = torch.zeros(num_rows, num_drafts, dtype=torch.int64) if features.penalties else None

    def choose_by(features: Features, drafts_RB: torch.Tensor | None, masks: RowMasks | None) -> None:
        choose(
            logits_RV, slot_R, slot_R + 1, state, SoloCommunicator(),
            features=features, drafts_RB=drafts_RB, row_masks=masks, softcap=30.0,
        )  # fmt: skip

    choose_by(features, drafts_RB, masks)
    choose_by(features.of_drafts(), None, None)


def programs_of(
    features: Iterable[Features], fit: Callable[[SamplingState, Features], Features], sizes: Iterable[int]
) -> set[str]:
    """What choices of these features launch, for these numbers of rows, with and without drafts."""
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=VOCAB_SIZE)
    state = SamplingState(NUM_SLOTS, shard, torch.float32, CPU, TritonKernels())
    fitted = dict.fromkeys(fit(state, one) for one in features)
    with mock.patch.object(driver, "_active", PretendedDriver()), noted_programs() as programs:
        for one, num_rows in product(fitted, sizes):
            for num_drafts in (0, 3) if one.penalties else (0,):
                launch(one, state, num_rows, num_drafts)
    forget_programs()
    return {f"{program.name} {program.arguments[0]}" for program in programs}


def test_warm_up_and_graphs_launch_what_any_mixture_does() -> None:
    eager = SamplingState.in_few_programs
    started = programs_of(requested(), eager, (1,)) | programs_of((GREEDY, PUBLISHED), lambda _, own: own, (1, 3))
    mixed = dict.fromkeys(one | other for one, other in combinations_with_replacement(any_request(), 2))
    served = programs_of(mixed, eager, SIZES)
    assert len(served) > 20
    assert served <= started, sorted(served - started)


def test_mixtures_come_down_to_a_few_features_that_cover_them() -> None:
    mixed = dict.fromkeys(one | other for one, other in combinations_with_replacement(any_request(), 2))
    fitted = {one: one.in_few_programs() for one in mixed}
    assert all(few.covers(one) for one, few in fitted.items())
    assert all(few.in_few_programs() == few for few in fitted.values())
    switches = {(f.candidates, f.cut, f.penalties, f.grammar) for f in fitted.values() if f.noise}
    assert len(switches) == 3 * 2 * 2 * 2
    assert {f for f in fitted.values() if not f.noise} == {GREEDY, PUBLISHED}
