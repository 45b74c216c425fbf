"""Running counts behind the frozen statistics that the engine publishes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

import msgspec

from gemray_workers.messages import SpeculationCounters


class SpeculationTally:
    """Counts drafting rounds of one request, or of all, by drafter."""

    def __init__(self) -> None:
        self._parts: list[_Rounds] = [_Rounds()]
        self._newest = 0

    def record(self, *, drafted: int, accepted: int, drafter: int = 0) -> None:
        """Count one round; a step without drafts is none. A position counts from when it was first drafted."""
        if drafted == 0:
            return
        self._parts.extend(_Rounds() for _ in range(len(self._parts), drafter + 1))
        self._parts[drafter].record(drafted, accepted)
        self._newest = drafter

    def counters(self) -> SpeculationCounters:
        """The counts so far."""
        parts = [part.counters() for part in self._parts]
        if len(parts) == 1:
            return parts[0]
        total = reduce(SpeculationCounters.plus, parts)
        return msgspec.structs.replace(total, of_drafters=parts, newest=self._newest)


class _Rounds:
    """Counts the rounds of one drafter."""

    def __init__(self) -> None:
        self._rounds = 0
        self._drafted = 0
        self._accepted_per_position: list[int] = []

    def record(self, drafted: int, accepted: int) -> None:
        self._rounds += 1
        self._drafted += drafted
        counts = self._accepted_per_position
        counts.extend([0] * (drafted - len(counts)))
        for position in range(accepted):
            counts[position] += 1

    def counters(self) -> SpeculationCounters:
        return SpeculationCounters(
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=sum(self._accepted_per_position),
            accepted_per_position=list(self._accepted_per_position),
        )


@dataclass
class Totals:
    """Since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_rows: int = 0
    num_generated: int = 0
    num_looked_up: int = 0
    """Tokens that the prefix cache was asked for."""
    num_found: int = 0
    """Tokens that it had."""
    speculation: SpeculationTally = field(default_factory=SpeculationTally)
