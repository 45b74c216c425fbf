"""One request as the scheduler holds it: its tokens, how many of them are computed, and what is in flight.

Tokens and computed lengths are confirmed: they are what committed steps gave. Rows in flight move a sequence by their
known tokens at least and by their drafts at most; a step is planned between these bounds.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from gemray_workers.errors import InvalidField
from gemray_workers.grammar.bad_words import BadWords, allowed_words
from gemray_workers.grammar.run import GrammarRun, Words
from gemray_workers.messages import Submit
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.counters import SpeculationTally
from gemray_workers.scheduling.plan import ScheduledRows


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
    cache_salt: str = ""
    """Texts of different salts share no KV."""
    num_found: int = 0
    """Tokens that the prefix cache had when it got its slot: those it did not compute there."""
    num_cached: int | None = None
    """Prompt tokens that the cache had when it got a slot for the first time; None before."""
    epoch: int = 0
    """Which of the slot's sequences it is, one after the other, as its rows say."""
    in_flight: list[ScheduledRows] = field(default_factory=list)
    """Its rows in plans that are not committed, oldest first."""
    next_prompt_logprob: int = 1
    """First prompt position whose log-probability is still to be computed; position 0 has none."""
    grammar: GrammarRun | None = None
    """Has taken every generated token; a preemption leaves it as it is."""
    bad_words: BadWords | None = None
    speculation: SpeculationTally = field(default_factory=SpeculationTally)

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def of(cls, submit: Submit, *, arrival: int, max_model_len: int) -> Sequence:
        """The sequence of a request. Replayed tokens count as generated, and prompt log-probabilities that the client
        has are not given again.

        Raises:
            InvalidField: the prompt is empty or leaves no room for a token.
        """
        prompt_len = len(submit.prompt_ids)
        if prompt_len == 0:
            raise InvalidField("prompt_ids", submit.prompt_ids, "at least one token")
        if prompt_len >= max_model_len:
            raise InvalidField(
                "prompt_ids",
                f"{prompt_len} tokens",
                f"at most {max_model_len - 1} tokens: prompt and output together are at most {max_model_len}",
            )
        return cls(
            request_id=submit.request_id,
            params=submit.params,
            tokens=[*submit.prompt_ids, *submit.emitted_ids],
            prompt_len=prompt_len,
            arrival=arrival,
            next_prompt_logprob=1 + submit.num_prompt_logprobs,
            cache_salt=submit.cache_salt,
            bad_words=BadWords(submit.params.bad_words) if submit.params.bad_words else None,
        )

    def check(self) -> None:
        """Assert what holds between steps."""
        assert 1 <= self.prompt_len <= len(self.tokens), (self.request_id, self.prompt_len, len(self.tokens))
        assert 0 <= self.num_computed < len(self.tokens), (self.request_id, self.num_computed, len(self.tokens))
        assert self.slot is not None or self.num_computed == 0, (self.request_id, self.slot, self.num_computed)
        assert self.slot is not None or not self.in_flight, (self.request_id, self.in_flight)
        assert self.num_generated <= self.params.max_tokens, (self.request_id, self.num_generated)

    @property
    def least_len(self) -> int:
        """Tokens it has at least when nothing is in flight any more: a step that samples gives one or ends it."""
        return len(self.tokens) + sum(rows.samples for rows in self.in_flight)

    @property
    def most_len(self) -> int:
        """Tokens it has at most then: every draft may be accepted."""
        return self.least_len + sum(rows.num_drafts for rows in self.in_flight)

    @property
    def least_computed(self) -> int:
        """Tokens that are computed at least when nothing is in flight any more; exact before the first sampling."""
        return self.num_computed + sum(rows.num_known for rows in self.in_flight)

    @property
    def num_rows_in_flight(self) -> int:
        """Rows in flight, drafts included."""
        return sum(rows.num_known + rows.num_drafts for rows in self.in_flight)

    @property
    def num_pending(self) -> int:
        """Tokens that are known by the time of the next step, and not computed; 1 as soon as a step has sampled."""
        return self.least_len - self.least_computed

    def end_len(self, max_model_len: int) -> int:
        """Tokens it has at its end, at most."""
        return min(self.prompt_len + self.params.max_tokens, max_model_len)

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_len

    def allowed(self, drafts: SequenceOf[int], num_words: int) -> Words:
        """Which ids may come next, and behind each draft, as `allowed_words` has it. Nothing may be in flight."""
        reach = 0 if self.bad_words is None else self.bad_words.reach
        generated = self.tokens[max(self.prompt_len, len(self.tokens) - reach) :]
        return allowed_words(self.grammar, self.bad_words, generated=generated, drafts=drafts, num_words=num_words)

    @property
    def most_found(self) -> int:
        """Tokens whose KV may come from the prefix cache: the last one's row chooses the next token, and rows that
        give log-probabilities of the prompt are computed too."""
        wants = self.params.prompt_logprobs is not None and self.next_prompt_logprob < self.prompt_len
        return min(len(self.tokens), self.next_prompt_logprob if wants else len(self.tokens)) - 1

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
        first = max(self.next_prompt_logprob, self.least_computed + 1)
        last = min(self.least_computed + num_rows, self.prompt_len - 1)
        return first if first <= last else None
