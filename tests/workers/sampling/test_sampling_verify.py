"""Verification: whatever is drafted, the ids emitted are those of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.verify import count_accepted, verify
from support.oracles.sampling_oracle.row_request import RowRequest
from support.oracles.sampling_reference import choose_rows, local_columns, sampling_params

TOKEN = st.integers(0, 3)


@given(st.lists(TOKEN, max_size=6), st.lists(TOKEN, min_size=7, max_size=7))
def test_the_longest_matching_prefix_is_accepted(drafts: list[int], tokens: list[int]) -> None:
    chosen = tokens[: len(drafts) + 1]
    n = count_accepted(drafts, chosen)
    assert 0 <= n <= len(drafts)
    assert drafts[:n] == chosen[:n]
    assert n == len(drafts) or drafts[n] != chosen[n]


@pytest.mark.parametrize(("drafts", "chosen"), [([], []), ([1], [1]), ([1], [1, 2, 3])])
def test_a_wrong_number_of_rows_is_refused(drafts: list[int], chosen: list[int]) -> None:
    with pytest.raises(ValueError, match="verify rows"):
        count_accepted(drafts, chosen)


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(TOKEN, min_size=9, max_size=9)), min_size=1, max_size=5))
def test_the_batched_form_equals_the_plain_one(sequences: list[tuple[int, list[int]]]) -> None:
    num_drafts = torch.tensor([n for n, _ in sequences])
    drafts_SK = torch.tensor([tokens[:4] for _, tokens in sequences])
    chosen_SJ = torch.tensor([tokens[4:] for _, tokens in sequences])
    result = verify(drafts_SK, num_drafts, chosen_SJ)
    for s, (n, tokens) in enumerate(sequences):
        accepted = count_accepted(tokens[:n], tokens[4 : 5 + n])
        assert result.num_accepted_S[s] == accepted
        assert result.ids_SJ[s].tolist() == tokens[4 : 5 + accepted] + [-1] * (4 - accepted)


def test_sequences_without_drafts_emit_one_token() -> None:
    result = verify(torch.empty(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.tensor([[5], [6]]))
    assert result.num_accepted_S.tolist() == [0, 0]
    assert result.ids_SJ.tolist() == [[5], [6]]


VOCAB = 11
SHARD = ShardIndices.of_rank(0, 1, org_vocab_size=VOCAB)
PROMPT = [3, 1, 4]


def toy_logits(ids: Any) -> Tensor:
    """A model: logits from the last two ids."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(ids[-1] * 31 + ids[-2]), dtype=torch.float64)


def next_tokens(params: SamplingParams, ids: Any, drafts: list[int]) -> list[int]:
    """The verify rows' tokens t_0 .. t_K after `ids`, from one call as an engine makes it."""
    logits_RV = torch.stack([toy_logits([*ids, *drafts[:i]]) for i in range(len(drafts) + 1)])
    requests = [RowRequest(params, len(ids) + i, len(PROMPT), ids, drafts[:i]) for i in range(len(drafts) + 1)]
    choice = choose_rows(local_columns(logits_RV, SHARD), requests, SHARD, SoloCommunicator())
    return choice.ids_R.tolist()


def decode(params: SamplingParams, num_tokens: int, draft: Any) -> tuple[list[int], int]:
    """Generate with `draft(ids, rounds)` proposing; (ids, rounds)."""
    ids, rounds = list(PROMPT), 0
    while len(ids) < len(PROMPT) + num_tokens:
        drafts = draft(ids, rounds)
        chosen = next_tokens(params, ids, drafts)
        ids += chosen[: count_accepted(drafts, chosen) + 1]
        rounds += 1
    return ids[: len(PROMPT) + num_tokens], rounds


PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 4, "top_p": 0.9},
    {"min_p": 0.1, "presence_penalty": 0.7, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"min_tokens": 9, "stop_token_ids": (0, 1, 2, 3), "top_p": 0.8},
]


@pytest.mark.parametrize("changes", PARAMS, ids=str)
@given(seed=st.integers(0, 2**64 - 1), noise=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), max_size=14))
@settings(max_examples=12)
def test_any_drafter_gives_the_ids_of_plain_decoding(changes: dict[str, Any], seed: int, noise: Any) -> None:
    params = sampling_params(seed=seed, **changes)
    plain, rounds = decode(params, 14, lambda ids, _: [])
    assert rounds == 14
    assert decode(params, 14, lambda ids, r: noise[r] if r < len(noise) else [])[0] == plain
    # A drafter that knows the answer, and one that errs at every third position.
    perfect, rounds = decode(params, 14, lambda ids, _: plain[len(ids) : len(ids) + 4])
    assert perfect == plain
    assert rounds == 3  # 5 + 5 + 4
    erring = [t if i % 3 else (t + 1) % VOCAB for i, t in enumerate(plain)]
    assert decode(params, 14, lambda ids, _: erring[len(ids) : len(ids) + 4])[0] == plain
