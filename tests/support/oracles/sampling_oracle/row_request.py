"""What the sampler must know about one row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemray_workers.sampling.params import SamplingParams


@dataclass(frozen=True)
class RowRequest:
    """One logits row that chooses a token. A verify step has one for each draft and one more."""

    params: SamplingParams
    position: int
    """Absolute position at which the chosen token will stand."""
    prompt_len: int
    token_ids: Sequence[int] = ()
    """Prompt, then output. May be left out unless `wants_history(params)`."""
    draft_ids: Sequence[int] = ()
    """Drafts behind them that this row takes as accepted."""

    def __post_init__(self) -> None:
        if not 0 < self.prompt_len <= self.position:
            raise ValueError(f"position = {self.position} must be >= prompt_len = {self.prompt_len} >= 1")
        num_before = len(self.token_ids) + len(self.draft_ids)
        if wants_history(self.params) and num_before != self.position:
            raise ValueError(f"penalties need the {self.position} ids before the row, got {num_before}")

    @property
    def num_generated(self) -> int:
        """Output tokens before this row, drafts included."""
        return self.position - self.prompt_len

    @property
    def history(self) -> list[int]:
        """Every id before this row, drafts included."""
        return [*self.token_ids, *self.draft_ids]


def wants_history(params: SamplingParams) -> bool:
    """Whether a row's logits depend on which ids came before (its penalties are on)."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
