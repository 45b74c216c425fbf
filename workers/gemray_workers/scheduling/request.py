"""One request as the scheduler holds it: its tokens and how many of them are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.token_logprob import TokenLogprob
from gemray_workers.scheduling.counters import SpeculationTally


@dataclass(eq=False, kw_only=True)
class Sequence:
    """Tokens 0..num_computed-1 have their KV; the others are pending. There are no phases beyond that."""

    request_id: str
    params: SamplingParams
    tokens: list[int]
    """Prompt, then what was generated (or replayed) so far."""
    prompt_len: int
    arrival: int
    """Order of arrival, unique; smaller is older."""
    num_computed: int = 0
    slot: int | None = None
    """The slot it runs in; None while it waits."""
    next_prompt_logprob: int = 1
    """First prompt position whose log-probability is still to be computed; position 0 has none."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Computed, not yet given out: they go with the first generated token, all at once."""
    speculation: SpeculationTally = field(default_factory=SpeculationTally)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Assert what holds between steps."""
        assert 1 <= self.prompt_len <= len(self.tokens), (self.request_id, self.prompt_len, len(self.tokens))
        assert 0 <= self.num_computed < len(self.tokens), (self.request_id, self.num_computed, len(self.tokens))
        assert self.slot is not None or self.num_computed == 0, (self.request_id, self.slot, self.num_computed)
        assert self.num_generated <= self.params.max_tokens, (self.request_id, self.num_generated)

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed; at least 1."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_len

    @property
    def running_slot(self) -> int:
        """The slot of a sequence that runs."""
        assert self.slot is not None, f"{self.request_id} does not run"
        return self.slot

    def prompt_logprobs_from(self, num_rows: int) -> int | None:
        """First prompt position that the next `num_rows` rows must report, or None.

        The row at position p gives the log-probability of the token at p + 1. What was computed before a
        preemption is not asked for again.
        """
        if self.params.prompt_logprobs is None:
            return None
        first = max(self.next_prompt_logprob, self.num_computed + 1)
        last = min(self.num_computed + num_rows, self.prompt_len - 1)
        return first if first <= last else None
