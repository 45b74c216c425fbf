"""How much KV memory a known load takes: sequences of a known length at one time, and single longer ones."""

from __future__ import annotations

from gemray_workers.config import KVMemory
from gemray_workers.errors import CapacityError
from gemray_workers.kv.budget import PoolPlan, pages_together
from gemray_workers.rank.blueprint import Blueprint, pools_within

_STEP = 1 << 20
"""Bytes; what is found is a multiple."""
_PLENTY = 1 << 50


def holds(blueprint: Blueprint, kv_memory: int, *, num_seqs: int, length: int) -> bool:
    """Whether pools of `kv_memory` bytes a rank hold `num_seqs` sequences of `length` tokens at one time, and one of
    the blueprint's length alone. `num_seqs` may be 0.
    """
    try:
        pools = _pools(blueprint, kv_memory)
    except CapacityError:
        return False
    if pools.max_model_len < blueprint.requested_len:
        return False
    wanted = _pages(blueprint, num_seqs, length) if num_seqs else {}
    return all(pools.num_pages[name] >= pages for name, pages in wanted.items())


def kv_memory_for(blueprint: Blueprint, *, num_seqs: int, length: int) -> int:
    """Bytes a rank, not far above the fewest, of which `holds` is true.

    `num_seqs` is at most the config's `max_num_seqs`, and `length` at most the blueprint's.
    """
    # More memory may be dealt otherwise, with more windows and fewer full pages, so a size above one that holds the
    # load may not hold it. What is found does.
    most = _pools(blueprint, _PLENTY).num_pages
    too_little, enough = 0, -(-sum((most[spec.name] + 1) * spec.page_bytes for spec in blueprint.specs) // _STEP)
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        if holds(blueprint, middle * _STEP, num_seqs=num_seqs, length=length):
            enough = middle
        else:
            too_little = middle
    return enough * _STEP


def _pools(blueprint: Blueprint, kv_memory: int) -> PoolPlan:
    kv = KVMemory(kv_memory, kv_memory)
    drafter = blueprint.drafter
    return pools_within(blueprint.config, kv, blueprint.requested_len, blueprint.target_specs, drafter)


def _pages(blueprint: Blueprint, num_seqs: int, length: int) -> dict[str, int]:
    scheduler = blueprint.scheduler
    return pages_together(
        blueprint.specs,
        length=length,
        num_seqs=num_seqs,
        max_step_tokens=scheduler.max_step_tokens,
        num_draft_tokens=scheduler.num_draft_tokens,
        lag=scheduler.lag,
    )
