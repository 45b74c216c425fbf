"""The graphs of a rank's cycles: whether there are any, when they are captured, and what they took of its card."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from gemray_workers.checkpoint.progress import progress_bar
from gemray_workers.engine.cycle import CycleRunner
from gemray_workers.engine.graphs import Captures, GraphedCycle
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.card_memory import CardMemory
from gemray_workers.rank.graph_buckets import graph_buckets
from gemray_workers.rank.memory import gib
from gemray_workers.rank.rehearsal import GraphsToCapture, told_as_capacity

logger = logging.getLogger(__name__)

OutputT = TypeVar("OutputT")


class RankGraphs(Generic[OutputT]):
    """Makes graphs of a rank's cycles, the target's or a dedicated drafter's.

    Every rank of the gang captures the same buckets at the same time: what ranks exchange is among what is captured.
    """

    def __init__(
        self,
        card: CardMemory | None,
        device: torch.device,
        give_up: Callable[[OutputT], OutputT],
        *,
        rank: int,
        place: str,
    ) -> None:
        """Capture nothing yet.

        Args:
            card: the rank's; None on a CPU.
            device: of the rank.
            give_up: as of `GraphedCycle`.
            rank: its number.
            place: the rank, its device and host.
        """
        self._card = card
        self._device = device
        self._give_up = give_up
        self._rank = rank
        self._place = place
        self.captures = Captures()
        self.num_bytes = 0
        """Bytes of the card that all that a start has captured took."""

    def runner(self, cycle: CycleRunner[OutputT], blueprint: Blueprint, null_slot: int) -> CycleRunner[OutputT]:
        """What runs such cycles: graphs, captured now where a start captures them, or `cycle` itself.

        Args:
            cycle: kernel by kernel, over the rank's pools and slots.
            blueprint: of the gang.
            null_slot: of those slots.

        Raises:
            CapacityError: the card has no memory for them.
        """
        if blueprint.why_eager() is not None:
            return cycle
        graphed = self._graphed(cycle, blueprint, null_slot)
        if blueprint.config.capture == "start":
            self._capture(graphed)
        return graphed

    def to_capture(self, cycle: CycleRunner[OutputT], blueprint: Blueprint, null_slot: int) -> GraphsToCapture | None:
        """What a start will capture, nothing of it captured yet; None where cycles run kernel by kernel.

        Arguments as of `runner`.
        """
        if blueprint.why_eager() is not None:
            return None
        graphed = self._graphed(cycle, blueprint, null_slot)
        return GraphsToCapture(graphed, graphed.num_buckets if blueprint.config.capture == "start" else 0)

    def _graphed(self, cycle: CycleRunner[OutputT], blueprint: Blueprint, null_slot: int) -> GraphedCycle[OutputT]:
        return GraphedCycle(
            cycle,
            graph_buckets(blueprint),
            null_slot=null_slot,
            device=self._device,
            captures=self.captures,
            give_up=self._give_up,
        )

    def _capture(self, graphed: GraphedCycle[OutputT]) -> None:
        """Capture every bucket, with a progress bar."""
        assert self._card is not None
        self._card.give_back()
        started, before = time.perf_counter(), self._card.free()
        with (
            progress_bar("capturing graphs", rank=self._rank, unit="graphs") as progress,
            told_as_capacity(self._place, "while it captured graphs: lower gpu_memory_utilization or kv_memory"),
        ):
            graphed.capture(progress)
        seconds = time.perf_counter() - started
        self._card.give_back()
        num_bytes = max(0, before - self._card.free())
        self.num_bytes += num_bytes
        logger.info("captured %d shapes of cycles in %.1f s, %s", graphed.num_buckets, seconds, gib(num_bytes))
