"""What several engines did, as one number each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

import msgspec

from gemray_workers.messages import EngineStats

_OF_THE_MOMENT = {"num_running": 0, "num_waiting": 0, "last_step_seconds": 0.0}


def total_stats(all_stats: Iterable[EngineStats | None]) -> EngineStats | None:
    """Counts added up, and the longest of the newest steps; None where no engine has stepped."""
    known = [stats for stats in all_stats if stats is not None]
    return reduce(_plus, known) if known else None


def counts_of_gone(stats: EngineStats | None) -> EngineStats | None:
    """What is left of an engine that has ended: its counts since the start, and nothing that it held."""
    if stats is None:
        return None
    return msgspec.structs.replace(stats, **_OF_THE_MOMENT, pages_in_use={}, pages_total={}, pages_cached={})


def _plus(one: EngineStats, other: EngineStats) -> EngineStats:
    numbers = [name for name in EngineStats.__struct_fields__ if isinstance(getattr(one, name), int | float)]
    fields = {name: getattr(one, name) + getattr(other, name) for name in numbers}
    fields["last_step_seconds"] = max(one.last_step_seconds, other.last_step_seconds)
    return msgspec.structs.replace(
        one,
        **fields,
        pages_in_use=_added(one.pages_in_use, other.pages_in_use),
        pages_total=_added(one.pages_total, other.pages_total),
        pages_cached=_added(one.pages_cached, other.pages_cached),
        speculation=one.speculation.plus(other.speculation),
        step_seconds=one.step_seconds.plus(other.step_seconds),
        batch_sizes=one.batch_sizes.plus(other.batch_sizes),
    )


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {group: one.get(group, 0) + other.get(group, 0) for group in {**one, **other}}
