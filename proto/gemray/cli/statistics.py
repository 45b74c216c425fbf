"""Statistics of one generation, for people."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gemray.v1 import generation_pb2 as pb


def logprob_lines(logprobs: Iterable[pb.TokenLogprob]) -> Iterator[str]:
    """A line a token: its text as JSON writes it, id, log-probability, where it has one its checksum of logits in hex,
    then the top tokens' log-probabilities."""
    for entry in logprobs:
        top = " ".join(f"{_quoted(other.text)}:{other.logprob:.4f}" for other in entry.top)
        checksum = f"\t{entry.logits_checksum:016x}" if entry.HasField("logits_checksum") else ""
        yield f"{_quoted(entry.text)}\t{entry.token_id}\t{entry.logprob:.4f}{checksum}\t{top}".rstrip()


def _drafts(speculation: pb.Speculation) -> str:
    """What a drafter gave: how often its first, its second, ... draft was accepted, too."""
    places = " ".join(str(count) for count in speculation.accepted_per_position if count)
    return (
        f"{speculation.method}: {speculation.accepted} of {speculation.drafted} drafts accepted "
        f"in {speculation.rounds} rounds" + (f" (by place {places})" if places else "")
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass
class Stopwatch:
    """Times of one call."""

    started: float = field(default_factory=time.monotonic)
    first_at: float | None = None

    def token_came(self) -> None:
        """Call with each message that brings tokens."""
        self.first_at = self.first_at or time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.started

    def report(self, completion: pb.Completion) -> str:
        """Finish reason, counts, speeds, seed."""
        now = time.monotonic()
        usage = completion.usage
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        parts = [
            pb.FinishReason.Name(completion.finish_reason).removeprefix("FINISH_REASON_").lower(),
            f"{usage.prompt_tokens} prompt{cached} + {usage.completion_tokens} tokens",
            f"{now - self.started:.2f} s",
        ]
        if self.first_at is not None:
            parts.append(f"first token after {self.first_at - self.started:.2f} s")
            if usage.completion_tokens > 1 and now > self.first_at:
                parts.append(f"{(usage.completion_tokens - 1) / (now - self.first_at):.1f} tokens/s")
        if completion.HasField("speculation"):
            parts += map(_drafts, completion.speculation.by_method or [completion.speculation])
        parts.append(f"seed {completion.seed}")
        return ", ".join(parts)
