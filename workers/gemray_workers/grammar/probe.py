"""Whether a part of a grammar has any text: tried over bytes, so that no model's vocabulary is needed."""

from __future__ import annotations

from functools import cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from gemray_workers.grammar.reasons import first_line

_NUM_BYTES = 256
NO_TEXT = "no text meets it"


def why_no_text(lark: str) -> str | None:
    """Why a Lark grammar has no text, in words; None where it has some, be it the empty one."""
    matcher = LLMatcher(_bytes(), lark, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        return first_line(matcher.get_error())
    if matcher.is_accepting():
        return None
    first_W = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        return first_line(matcher.get_error())
    return None if np.unpackbits(first_W, bitorder="little")[:_NUM_BYTES].any() else NO_TEXT


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
