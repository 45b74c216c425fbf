"""Which part of an output is a thought: what stands between the channel tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from gemray_cluster.text.control_tokens import CHANNEL_TOKENS
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.messages import SequenceDelta


class Channels:
    """Cuts the deltas of one output where a thought begins or ends."""

    def __init__(self, tokenizer: ChatTokenizer, prompt_ids: Sequence[int]) -> None:
        """A template may leave a thought open at the end of the prompt."""
        self._opens, self._closes = (tokenizer.control_ids.get(token) for token in CHANNEL_TOKENS)
        ends = (self._opens, self._closes, tokenizer.control_ids.get("<|turn>"))
        newest = next((token_id for token_id in reversed(prompt_ids) if token_id in ends), None)
        self._is_open = newest is not None and newest == self._opens

    def parts(self, delta: SequenceDelta) -> Iterator[tuple[SequenceDelta, bool]]:
        """(part, whether it belongs to a thought), in order; the tokens that open and close a thought belong to it."""
        start = 0
        for at, token_id in enumerate(delta.token_ids):
            if token_id == self._opens and not self._is_open:
                if at > start:
                    yield _part(delta, start, at), False
                start, self._is_open = at, True
            elif token_id == self._closes and self._is_open:
                yield _part(delta, start, at + 1), True
                start, self._is_open = at + 1, False
        if start < len(delta.token_ids) or not delta.token_ids:
            yield _part(delta, start, len(delta.token_ids)), self._is_open


def _part(delta: SequenceDelta, start: int, stop: int) -> SequenceDelta:
    """Tokens start..stop-1; what is said of the prompt goes with the first part, the finish with the last."""
    if (start, stop) == (0, len(delta.token_ids)):
        return delta
    is_last = stop == len(delta.token_ids)
    return msgspec.structs.replace(
        delta,
        token_ids=delta.token_ids[start:stop],
        logprobs=None if delta.logprobs is None else delta.logprobs[start:stop],
        prompt_logprobs=delta.prompt_logprobs if start == 0 else None,
        finish=delta.finish if is_last else None,
        matched_stop_id=delta.matched_stop_id if is_last else None,
    )
