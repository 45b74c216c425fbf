"""Cutting a step's deltas to what one message of the channel may hold.

A step's ids are a few kilobytes. Log-probabilities are not: with 20 of the most likely, a prompt position takes 330
bytes, and a step may cover every position of a long prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from gemray_workers.channel import MAX_MESSAGE_BYTES
from gemray_workers.messages import SequenceDelta
from gemray_workers.sampling.token_logprob import TokenLogprob

MOST_BYTES = MAX_MESSAGE_BYTES // 4
"""Bytes of the deltas in one message: well below the limit, and a coordinator that decodes them is soon free again."""
_BYTES_OF_DELTA = 1024
"""Names of the fields, the request's id, the counters of drafting."""
_BYTES_OF_TOKEN_ID = 5
_BYTES_OF_LOGPROB = 20
"""A token id and a number as msgpack, and what encloses them: for each token and for each of the most likely."""


def split_for_channel(deltas: Sequence[SequenceDelta], most_bytes: int = MOST_BYTES) -> Iterator[list[SequenceDelta]]:
    """The deltas of a step in order, as lists of at most `most_bytes`; one list, possibly empty, when all fit in it.

    A delta whose prompt log-probabilities alone exceed that is cut; its tokens and its end go with the last part.
    """
    part: list[SequenceDelta] = []
    num_bytes = 0
    for delta in deltas:
        for piece in _pieces(delta, most_bytes):
            size = _num_bytes(piece)
            if part and num_bytes + size > most_bytes:
                yield part
                part, num_bytes = [], 0
            part.append(piece)
            num_bytes += size
    yield part


def _pieces(delta: SequenceDelta, most_bytes: int) -> Iterator[SequenceDelta]:
    """A delta, with what is too much of its prompt's log-probabilities in deltas before it."""
    rest = delta.prompt_logprobs or []
    while rest and _num_bytes(delta, rest) > most_bytes:
        most = max(1, (most_bytes - _BYTES_OF_DELTA) // max(map(_bytes_of_logprob, rest)))
        yield SequenceDelta(request_id=delta.request_id, token_ids=[], prompt_logprobs=rest[:most])
        rest = rest[most:]
    if len(rest) == len(delta.prompt_logprobs or []):
        yield delta
    else:
        yield msgspec.structs.replace(delta, prompt_logprobs=rest or None)


def _num_bytes(delta: SequenceDelta, prompt_logprobs: Sequence[TokenLogprob] | None = None) -> int:
    """Most bytes of a delta as msgpack, with other prompt log-probabilities if given."""
    if prompt_logprobs is None:
        prompt_logprobs = delta.prompt_logprobs or []
    listed = sum(map(_bytes_of_logprob, delta.logprobs or ())) + sum(map(_bytes_of_logprob, prompt_logprobs))
    return _BYTES_OF_DELTA + _BYTES_OF_TOKEN_ID * len(delta.token_ids) + listed


def _bytes_of_logprob(logprob: TokenLogprob) -> int:
    return _BYTES_OF_LOGPROB * (1 + len(logprob.top))
