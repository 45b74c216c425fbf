"""Thoughts are told from answers by token, whatever the steps grouped together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_cluster.text.channels import Channels
from gemray_cluster.text.tokenizer import SPECIAL_TOKENS, ChatTokenizer
from gemray_workers.messages import SequenceDelta
from gemray_workers.sampling.token_logprob import TokenLogprob

OPEN, CLOSE, TURN = (SPECIAL_TOKENS[token] for token in ("<|channel>", "<channel|>", "<|turn>"))
ids = st.sampled_from([120, 121, OPEN, CLOSE])


def flags_by_definition(token_ids: list[int], *, is_open: bool) -> list[bool]:
    flags = []
    for token_id in token_ids:
        is_open = is_open or token_id == OPEN
        flags.append(is_open)
        is_open = is_open and token_id != CLOSE
    return flags


@settings(deadline=None, max_examples=300)
@given(groups=st.lists(st.lists(ids, max_size=6), min_size=1, max_size=5), opened=st.booleans())
def test_any_grouping_gives_the_same_thoughts(tokenizer: ChatTokenizer, groups: list[list[int]], opened: bool) -> None:
    channels = Channels(tokenizer, [2, TURN, 120, *([OPEN] if opened else [])])
    flags: list[bool] = []
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        delta = SequenceDelta(
            request_id="a",
            token_ids=group,
            logprobs=[TokenLogprob(token_id, -1.0) for token_id in group],
            prompt_logprobs=[TokenLogprob(7, -1.0)] if index == 0 else None,
            finish="length" if is_last else None,
        )
        parts = list(channels.parts(delta))
        assert [token_id for part, _ in parts for token_id in part.token_ids] == group
        assert [entry.token_id for part, _ in parts for entry in part.logprobs or []] == group
        assert [part.finish for part, _ in parts] == [None] * (len(parts) - 1) + [delta.finish]
        assert [part.prompt_logprobs for part, _ in parts] == [delta.prompt_logprobs] + [None] * (len(parts) - 1)
        flags += [is_thought for part, is_thought in parts for _ in part.token_ids]
    assert flags == flags_by_definition([token_id for group in groups for token_id in group], is_open=opened)


def test_an_earlier_turn_opens_nothing(tokenizer: ChatTokenizer) -> None:
    delta = SequenceDelta(request_id="a", token_ids=[120])
    assert [flag for _, flag in Channels(tokenizer, [2, OPEN, 7, TURN, 7]).parts(delta)] == [False]
    assert [flag for _, flag in Channels(tokenizer, [2, OPEN, 7, CLOSE]).parts(delta)] == [False]
    assert [flag for _, flag in Channels(tokenizer, [2, TURN, OPEN, 7]).parts(delta)] == [True]
