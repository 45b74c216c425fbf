"""A log-probability as it is reported."""

from __future__ import annotations

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the model's own distribution (before any edit or filter)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """The most likely tokens, best first; as many as the request asked for."""
    logits_checksum: int | None = None
    """uint64, of all logits of the token's row, where the request asked for it (`sampling.checksum`)."""
