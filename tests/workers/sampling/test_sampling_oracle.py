"""`choose` gives the ids of the chooser that groups rows on the host and sorts whole vocabularies, in float64, to the
id: for any parameters, any rows beside them, any number of ranks, and any features beyond those needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.choose import choose
from gemray_workers.sampling.features import CANDIDATE_COUNTS, Features
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.state import SamplingState, drafts_before
from support.hypothesis_settings import FIXTURE_SERVES_ALL
from support.oracles.sampling_oracle.chooser import choose_tokens
from support.oracles.sampling_oracle.row_request import RowRequest
from support.oracles.sampling_oracle.rows import SamplingRows
from support.oracles.sampling_reference import CPU, choose_rows, local_columns, sampling_params

ORG, ADDED = 2500, 70
VOCAB = ORG + ADDED

ID = st.integers(0, VOCAB - 1)
FEW_IDS = st.lists(st.one_of(ID, st.sampled_from([-1, VOCAB, 10**9])), max_size=5).map(tuple)
MANY_IDS = st.integers(1, 40).map(lambda step: tuple(range(3, VOCAB, step)))


@st.composite
def row_requests(draw: st.DrawFn) -> Any:
    prompt = draw(st.lists(ID, min_size=1, max_size=5))
    output = draw(st.lists(st.one_of(ID, st.sampled_from(prompt)), max_size=6))
    known = len(output) - draw(st.integers(0, len(output)))
    params = sampling_params(
        temperature=draw(st.sampled_from([0.0, 0.4, 1.0, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 7, 64, 65, 300, 1024, 1025, 1800, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_tokens=draw(st.sampled_from([0, 0, 3, 6])),
        stop_token_ids=draw(FEW_IDS),
        suppress_tokens=draw(FEW_IDS),
        allowed_token_ids=draw(st.one_of(st.just(()), st.just(()), FEW_IDS, MANY_IDS)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.6, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -0.3])),
        logit_bias=draw(st.dictionaries(ID, st.sampled_from([-100.0, -1.5, 2.5]), max_size=3)),
    )
    return RowRequest(
        params, len(prompt) + len(output), len(prompt), token_ids=prompt + output[:known], draft_ids=output[known:]
    )


ANY_FEATURES = st.builds(
    Features,
    candidates=st.sampled_from([0, *CANDIDATE_COUNTS]),
    noise=st.booleans(),
    min_p=st.booleans(),
    top_p=st.booleans(),
    wide_top_k=st.booleans(),
    masks=st.booleans(),
)


def logits_of(num_rows: int, seed: int, *, ties: bool) -> Tensor:
    logits_RV = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4
    return (logits_RV * 2).round() / 2 if ties else logits_RV


def choose_on_rank(comm: Communicator, logits_RV: Tensor, requests: list[RowRequest], more: Any) -> Any:
    shard = ShardIndices.of_rank(comm.rank, comm.size, org_vocab_size=ORG, num_added=ADDED)
    needed = Features.union(Features.of(request.params) for request in requests)
    choice = choose_rows(local_columns(logits_RV, shard), requests, shard, comm, features=needed | more)
    return choice.ids_R.tolist(), choice.ok_R.tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
@given(
    requests=st.lists(row_requests(), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
    more=st.one_of(st.just(Features()), ANY_FEATURES),
    bad=st.sampled_from([None, None, torch.nan, torch.inf]),
)
@settings(max_examples=60, suppress_health_check=FIXTURE_SERVES_ALL)
def test_any_rows_choose_the_same_ids(
    run_on_gang: Any, size: int, requests: list[RowRequest], seed: int, ties: bool, more: Any, bad: float
) -> None:
    logits_RV = logits_of(len(requests), seed, ties=ties)
    if bad is not None:
        logits_RV[0, seed % VOCAB] = bad
    if more.min_p or more.top_p or more.wide_top_k:
        more = more | Features(noise=True)
    solo = ShardIndices.of_rank(0, 1, org_vocab_size=ORG, num_added=ADDED)
    expected = choose_tokens(local_columns(logits_RV, solo), SamplingRows.build(requests), solo, SoloCommunicator())
    for ids, ok in run_on_gang(size, choose_on_rank, logits_RV, requests, more):
        assert ids == expected.ids_R.tolist()
        assert ok == expected.ok_R.tolist()


SERVED: list[dict[str, Any]] = [
    {"top_k": 64, "top_p": 0.95, "suppress_tokens": (7, 9)},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"top_p": 0.9, "presence_penalty": 1.0, "min_tokens": 9, "stop_token_ids": (0, 1, 2)},
    {"min_p": 0.1, "logit_bias": {5: 4.0, 6: -100.0}, "allowed_token_ids": tuple(range(0, VOCAB, 3))},
]


def test_a_state_that_lives_through_many_requests_follows_them() -> None:
    """Slots are taken, used for some steps of several rows each, and taken again; each step equals rows written out."""
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=ORG, num_added=ADDED)
    state = SamplingState(3, shard, torch.float64, CPU)
    generator = torch.Generator().manual_seed(0)
    texts: dict[int, tuple[SamplingParams, list[int], int]] = {}
    for step in range(60):
        if step % 5 == 0:
            slot = step // 5 % 3
            if slot in texts:
                state.release(slot)
            params = sampling_params(seed=step, **SERVED[step // 5 % len(SERVED)])
            ids = torch.randint(0, 40, (4 + step % 3,), generator=generator).tolist()
            texts[slot] = params, ids, 3
            state.admit(slot, params, ids, 3)
        slots = sorted(texts)
        drafts_SK = torch.randint(0, 40, (len(slots), 2), generator=generator)
        rectangle_SQ = torch.cat([torch.tensor([[texts[s][1][-1]] for s in slots]), drafts_SK], dim=1)
        slot_S = torch.tensor(slots)
        start_S = torch.tensor([len(texts[s][1]) for s in slots])
        logits_RV = logits_of(3 * len(slots), step, ties=False)
        choice = choose(
            local_columns(logits_RV, shard),
            slot_S.repeat_interleave(3),
            (start_S[:, None] + torch.arange(3)).flatten(),
            state,
            SoloCommunicator(),
            drafts_RB=drafts_before(rectangle_SQ),
        )
        requests = [
            RowRequest(params, len(ids) + i, prompt_len, ids, drafts_SK[s, :i].tolist())
            for s, (params, ids, prompt_len) in enumerate(texts[slot] for slot in slots)
            for i in range(3)
        ]
        rows = SamplingRows.build(requests)
        expected = choose_tokens(local_columns(logits_RV, shard), rows, shard, SoloCommunicator())
        assert choice.ids_R.tolist() == expected.ids_R.tolist()

        emitted_SQ = choice.ids_R.view(-1, 3).clone()
        for s, slot in enumerate(slots):
            kept = 1 + (step + s) % 3
            emitted_SQ[s, kept:] = -1
            texts[slot][1].extend(emitted_SQ[s, :kept].tolist())
        state.commit(slot_S, emitted_SQ)


def test_rows_that_were_expanded_are_laid_out() -> None:
    """One sequence's slot, expanded over its verify rows, flattens to a view of one element."""
    state = SamplingState(2, ShardIndices.of_rank(0, 1, org_vocab_size=32), torch.float64, torch.device("cpu"))
    slot_R = torch.tensor([[1]]).expand(1, 5).flatten()
    assert slot_R.stride() == (0,)
    rows = state.rows(Features(), slot_R, torch.arange(10)[::2])
    assert rows.slot_R.is_contiguous()
    assert rows.position_R.is_contiguous()
    assert rows.slot_R.tolist() == [1] * 5
