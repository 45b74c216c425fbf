"""All graphs of a rank, captured as it starts: with a progress bar, and what they took of its card."""

from __future__ import annotations

import logging
import time
from typing import Any

from gemray_workers.checkpoint.progress import progress_bar
from gemray_workers.engine.graphs import GraphedCycle
from gemray_workers.rank.card_memory import CardMemory
from gemray_workers.rank.memory import gib
from gemray_workers.rank.rehearsal import told_as_capacity

logger = logging.getLogger(__name__)


def capture_all(graphed: GraphedCycle[Any], card: CardMemory, *, rank: int, place: str) -> int:
    """Capture every bucket, and give the bytes of the card that this took.

    Args:
        graphed: nothing captured yet; every rank of the gang captures the same buckets at the same time.
        card: of the rank.
        rank: its number.
        place: the rank, its device and host.

    Raises:
        CapacityError: the card has no memory for them.
    """
    card.give_back()
    started, before = time.perf_counter(), card.free()
    with (
        progress_bar("capturing graphs", rank=rank, unit="graphs") as progress,
        told_as_capacity(place, "while it captured graphs: lower gpu_memory_utilization or kv_memory"),
    ):
        graphed.capture(progress)
    seconds = time.perf_counter() - started
    card.give_back()
    num_bytes = max(0, before - card.free())
    logger.info("captured %d shapes of cycles in %.1f s, %s", graphed.num_buckets, seconds, gib(num_bytes))
    return num_bytes
