"""The scheduler's limits."""

from __future__ import annotations

from dataclasses import dataclass

from gemray_workers.errors import InvalidField


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Validated once; see `EngineConfig` for the meaning of the fields."""

    max_num_seqs: int
    max_step_tokens: int
    prefill_chunk: int
    max_model_len: int
    """As fitted to the KV memory: prompt and output of one request together."""
    num_draft_tokens: int = 0
    lag: int = 0
    """Steps that may be in flight while the next one is planned, 0 or 1."""
    prefix_cache: bool = False
    """As in `EngineConfig`."""
    tells_freed_pages: bool = False
    """Name the pages that were given back in every plan, for those who poison them (debugging)."""
    admission_headroom: int = 16
    """Tokens that each running sequence must be able to add before another one is admitted: an admission that
    leads straight to a preemption wastes the prefill."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "an integer >= 1")
        for name in ("num_draft_tokens", "admission_headroom"):
            if getattr(self, name) < 0:
                raise InvalidField(name, getattr(self, name), "an integer >= 0")
        if self.lag not in (0, 1):
            raise InvalidField("lag", self.lag, "0 or 1")
        if self.max_model_len < 2:
            raise InvalidField("max_model_len", self.max_model_len, "an integer >= 2")
        least_rows = self.max_num_seqs * (1 + self.num_draft_tokens)
        if self.max_step_tokens < least_rows:
            raise InvalidField(
                "max_step_tokens",
                self.max_step_tokens,
                f">= {least_rows}, so that each of max_num_seqs = {self.max_num_seqs} sequences can decode in every "
                f"step with all of its {self.num_draft_tokens} drafts",
            )

    def chunk(self, num_pending: int) -> int:
        """Most rows in a step of a sequence with so many pending tokens, drafts aside."""
        return min(num_pending, self.prefill_chunk, self.max_step_tokens)

    @property
    def max_rows(self) -> int:
        """Most rows of one sequence beside its window: those of a step, and of the steps in flight before it."""
        return (1 + self.lag) * max(self.chunk(self.max_model_len), 1 + self.num_draft_tokens)
