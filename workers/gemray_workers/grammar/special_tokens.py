"""Which ids of Gemma's vocabulary structure a prompt and add nothing to a text."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer

SPECIAL_TOKENS: Mapping[str, int] = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<unk>": 3,
    "<mask>": 4,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
}
"""Spec section 3. Stops, templates and drafters rely on these ids, so a tokenizer is checked against them."""


def control_ids(backend: Tokenizer) -> dict[str, int]:
    """Ids of the tokens that structure a prompt, by their spelling: all special ones, and those of Gemma's by name."""
    return {
        added.content: token_id
        for token_id, added in sorted(backend.get_added_tokens_decoder().items())
        if added.special or added.content in SPECIAL_TOKENS
    }


def hidden_ids(backend: Tokenizer) -> frozenset[int]:
    """Ids that a text does not show: control tokens, and those of Gemma's that the file lists among plain ones."""
    listed = (backend.token_to_id(token) for token in SPECIAL_TOKENS)
    return frozenset([*control_ids(backend).values(), *(id_ for id_ in listed if id_ is not None)])
