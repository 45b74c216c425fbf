"""A log-probability as it is reported."""

from __future__ import annotations

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the model's own distribution (before any edit or filter)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """The most likely tokens, best first; as many as the request asked for."""
