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


def completion_logprobs_of(logprobs: Sequence[pb.TokenLogprob], *, offset: int) -> dict[str, Any]:
    """As /v1/completions tells them; `offset` is the number of characters before the first of these tokens."""
    offsets = []
    for token in logprobs:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [max(token.logprob, LEAST) for token in logprobs],
        "top_logprobs": [
            {other.text: max(other.logprob, LEAST) for other in reversed(token.top)} for token in logprobs
        ],
        "text_offset": offsets,
    }
