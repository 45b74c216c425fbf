"""How much text a grammar may force at one place: a mask there costs work for all of it."""

from __future__ import annotations

from llguidance import LLMatcher

MAX_FORCED_BYTES = 16 << 10
"""Most bytes without a choice between them, behind any token. Each mask inside of them cuts what is left into ids: 12
ms for so many, 250 for 100,000, which every other request of a step would wait for."""


def num_forced_bytes(matcher: LLMatcher) -> int:
    """Bytes that must follow where a matcher stands. Their computation is kept: the next mask does not repeat it."""
    return len(matcher.compute_ff_bytes())
