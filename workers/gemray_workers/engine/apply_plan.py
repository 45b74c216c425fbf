"""What a step plan changes before its rows run; the same at the target's ranks and at a drafter's own."""

from __future__ import annotations

from collections.abc import Iterable

from gemray_workers.drafters.protocol import Drafter
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.pool import KVPools
from gemray_workers.scheduling.plan import StepPlan


def apply_plan(plan: StepPlan, drafter: Drafter, slots: SlotTable, poisoned: Iterable[KVPools]) -> None:
    """Forget the sequences that have left their slots, and bring the slot table to where the plan says.

    Args:
        plan: of this step.
        drafter: told of each slot that is free or gets another sequence.
        slots: the sequences.
        poisoned: pools whose freed pages are filled with NaN; none outside of debugging.
    """
    for slot in (*plan.released, *(admission.slot for admission in plan.admitted)):
        drafter.reset(slot)
    slots.apply(plan)
    for pools in poisoned:
        pools.poison(plan.freed_pages)
