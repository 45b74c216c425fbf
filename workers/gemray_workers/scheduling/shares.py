"""The rows of one sequence in the plan that is being made."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from gemray_workers.scheduling.config import SchedulerConfig
from gemray_workers.scheduling.plan import ScheduledRows
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.sharing import fair_shares


@dataclass
class Share:
    """How many rows a sequence gets; shrinks while pages are looked for."""

    sequence: Sequence
    num_known: int
    num_drafts: int = 0

    def rows(self) -> ScheduledRows:
        """As the plan says it."""
        sequence = self.sequence
        return ScheduledRows(
            slot=sequence.running_slot,
            start=sequence.least_computed,
            num_known=self.num_known,
            num_drafts=self.num_drafts,
            samples=self.num_known == sequence.num_pending,
            prompt_logprobs_from=sequence.prompt_logprobs_from(self.num_known),
            epoch=sequence.epoch,
        )


def chunk_shares(budget: int, sequences: SequenceOf[Sequence], config: SchedulerConfig) -> list[Share]:
    """Deal `budget` rows among sequences with several tokens pending, each a chunk at most."""
    rows = fair_shares(budget, [config.chunk(sequence.num_pending) for sequence in sequences])
    return [Share(sequence, num_known) for sequence, num_known in zip(sequences, rows, strict=True)]
