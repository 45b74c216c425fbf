from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.outcome import SequenceOutcome, TrimmedTokens, apply_outcome, trim
from gemray_workers.scheduling.plan import ScheduledRows
from gemray_workers.scheduling.request import Sequence
from support.scheduling.scheduler_bench import request

STOP = 9


def params(max_tokens: int, min_tokens: int = 0, stops: tuple[int, ...] = (STOP,)) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stops,
    )


def ending(
    token_ids: list[int], request: SamplingParams, *, num_generated: int = 0, num_tokens: int = 4, max_len: int = 100
) -> TrimmedTokens:
    return trim(token_ids, num_generated=num_generated, num_tokens=num_tokens, params=request, max_model_len=max_len)


@pytest.mark.parametrize(
    ("token_ids", "request_params", "expected"),
    [
        ([10, 11, STOP, 20, 21], params(5), TrimmedTokens(3, "stop_token", STOP)),
        ([10, 11, 12, 13, 14, STOP], params(5), TrimmedTokens(5, "length")),
        ([10, 11, 12, 13, STOP], params(5), TrimmedTokens(5, "stop_token", STOP)),
        ([10, 11, 12, 13, 14], params(5), TrimmedTokens(5, "length")),
        ([10, 11, 12], params(5), TrimmedTokens(3)),
        ([STOP, 10, STOP, 11], params(9, min_tokens=1), TrimmedTokens(3, "stop_token", STOP)),
        ([STOP, 10, STOP, 11], params(9, min_tokens=3), TrimmedTokens(4)),
        ([10, STOP], params(9, stops=()), TrimmedTokens(2)),
        ([10, 8, STOP], params(9, stops=(STOP, 8)), TrimmedTokens(2, "stop_token", 8)),
        ([], params(5), TrimmedTokens(0)),
    ],
)
def test_the_earliest_event_wins(token_ids: list[int], request_params: SamplingParams, expected: TrimmedTokens) -> None:
    assert ending(token_ids, request_params) == expected


def test_the_model_length_ends_a_sequence() -> None:
    assert ending([1, 2, 3], params(50), num_tokens=8, max_len=10) == TrimmedTokens(2, "length")
    assert ending([1, STOP, 3], params(50), num_tokens=8, max_len=10) == TrimmedTokens(2, "stop_token", STOP)


@given(
    token_ids=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    blocks=st.lists(st.integers(1, 6), min_size=40, max_size=40),
    max_tokens=st.integers(1, 20),
    min_tokens=st.integers(0, 8),
    prompt_len=st.integers(1, 10),
    max_len=st.integers(11, 24),
    stops=st.sets(st.integers(0, 5), max_size=2),
)
def test_any_blocks_end_like_single_tokens(
    token_ids: list[int],
    blocks: list[int],
    max_tokens: int,
    min_tokens: int,
    prompt_len: int,
    max_len: int,
    stops: set[int],
) -> None:
    request = params(max_tokens, min_tokens, tuple(stops))

    def run(sizes: list[int]) -> tuple[list[int], TrimmedTokens | None]:
        kept: list[int] = []
        rest = list(token_ids)
        for size in sizes:
            block, rest = rest[:size], rest[size:]
            end = ending(block, request, num_generated=len(kept), num_tokens=prompt_len + len(kept), max_len=max_len)
            kept += block[: end.num_kept]
            if end.finish is not None:
                return kept, TrimmedTokens(len(kept), end.finish, end.matched_stop_id)
            assert end.num_kept == len(block)
        return kept, None

    kept, end = run([1] * len(token_ids))
    assert run(blocks) == (kept, end)
    assert len(kept) <= min(max_tokens, max_len - prompt_len)
    early = [i for i, token_id in enumerate(kept[:-1]) if token_id in stops]
    assert all(i < min_tokens for i in early)
    if end is not None and end.finish == "length":
        assert len(kept) in (max_tokens, max_len - prompt_len)


@pytest.mark.parametrize(("min_tokens", "finish"), [(1, "fault"), (2, "unmet")])
def test_a_row_without_a_choice_is_the_requests_fault_only_where_nothing_was_left(min_tokens: int, finish: str) -> None:
    """Behind an accepted draft 5 the bad word 5 5 leaves the stop token alone, once there are enough tokens."""
    submit = request(
        "a", 4, bad_words=((5, 5),), allowed_token_ids=(5, STOP), stop_token_ids=(STOP,), min_tokens=min_tokens
    )
    sequence = Sequence.of(submit, arrival=0, max_model_len=64)
    rows = ScheduledRows(0, 0, 4, 1, True)
    sequence.slot, sequence.in_flight = 0, [rows]
    outcome = SequenceOutcome(slot=0, token_ids=[5], num_accepted=1, num_drafts=1, fault="the model's")
    delta = apply_outcome(sequence, rows, outcome, 64)
    assert delta is not None
    assert (delta.token_ids, delta.finish) == ([5], finish)
