"""Log-probabilities in the two forms that OpenAI's endpoints have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemray.v1 import generation_pb2 as pb

LEAST = -9999.0
"""JSON has no infinity; OpenAI tells this of what is as good as impossible."""


def chat_logprobs_of(logprobs: Sequence[pb.TokenLogprob]) -> dict[str, Any]:
    """As /v1/chat/completions tells them."""
    content = [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in logprobs]
    return {"content": content, "refusal": None}


def _entry(token: pb.TokenLogprob | pb.TopLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": max(token.logprob, LEAST),
        "bytes": list(token.token_bytes or token.text.encode()),
    }


def completion_logprobs_of(
    logprobs: Sequence[pb.TokenLogprob], *, offset: int = 0, begins_prompt: bool = False
) -> dict[str, Any]:
    """As /v1/completions tells them.

    Args:
        logprobs: of tokens in a row.
        offset: the number of characters before them.
        begins_prompt: they are a prompt's, whose first token has none: it comes first, without a text.
    """
    offsets = []
    for token in logprobs:
        offsets.append(offset)
        offset += len(token.text)
    unknown = [None] if begins_prompt else []
    return {
        "tokens": ["" for _ in unknown] + [token.text for token in logprobs],
        "token_logprobs": unknown + [max(token.logprob, LEAST) for token in logprobs],
        "top_logprobs": unknown
        + [{other.text: max(other.logprob, LEAST) for other in reversed(token.top)} for token in logprobs],
        "text_offset": [0 for _ in unknown] + offsets,
    }
