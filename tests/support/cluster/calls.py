"""Outputs with thoughts and tool calls, as token ids and as what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from gemray_cluster.text.tokenizer import SPECIAL_TOKENS, ChatTokenizer
from support.cluster.text import byte_ids

QUOTE = SPECIAL_TOKENS['<|"|>']

words = st.text(alphabet='ab {}[],:"\\\n\t<|漢👩\u200d\u0301é', max_size=8)
keys = st.from_regex(r"[a-z_]{1,5}", fullmatch=True)
scalars = st.one_of(words, st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6), st.booleans(), st.none())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)
arguments = st.dictionaries(keys, values, max_size=3)


def argument_ids(tokenizer: ChatTokenizer, value: Any) -> list[int]:
    """One value in Gemma's notation."""
    if isinstance(value, str):
        return [QUOTE, *byte_ids(tokenizer, value.encode()), QUOTE]
    if isinstance(value, dict):
        entries = [
            [*byte_ids(tokenizer, f"{key}:".encode()), *argument_ids(tokenizer, inner)] for key, inner in value.items()
        ]
        return [*byte_ids(tokenizer, b"{"), *_joined(tokenizer, entries), *byte_ids(tokenizer, b"}")]
    if isinstance(value, list):
        entries = [argument_ids(tokenizer, inner) for inner in value]
        return [*byte_ids(tokenizer, b"["), *_joined(tokenizer, entries), *byte_ids(tokenizer, b"]")]
    return byte_ids(tokenizer, json.dumps(value).encode())


def _joined(tokenizer: ChatTokenizer, entries: list[list[int]]) -> list[int]:
    comma = byte_ids(tokenizer, b",")
    return [token_id for index, entry in enumerate(entries) for token_id in [*(comma if index else []), *entry]]


def call_ids(tokenizer: ChatTokenizer, name: str, value: dict[str, Any]) -> list[int]:
    """A whole call with its tokens."""
    return [
        SPECIAL_TOKENS["<|tool_call>"],
        *byte_ids(tokenizer, f"call:{name}".encode()),
        *argument_ids(tokenizer, value),
        SPECIAL_TOKENS["<tool_call|>"],
    ]


def thought_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """A whole thought with its tokens and its header."""
    ids = byte_ids(tokenizer, f"thought\n{text}".encode())
    return [SPECIAL_TOKENS["<|channel>"], *ids, SPECIAL_TOKENS["<channel|>"]]


def chunks(items: Sequence[int], sizes: Sequence[int]) -> Iterable[list[int]]:
    """The items in groups of these sizes, in turn."""
    start = turn = 0
    while start < len(items):
        yield list(items[start : start + sizes[turn % len(sizes)]])
        start, turn = start + sizes[turn % len(sizes)], turn + 1
