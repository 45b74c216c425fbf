"""The gangs that a router or a supervisor was given, so that a test can reach their processes."""

from __future__ import annotations

from collections.abc import Callable

from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.supervisor import SupervisedGang
from gemray_workers.rank.worker import RankWorker


class GangLog:
    """Makes gangs and remembers them."""

    def __init__(self, make: Callable[[], Gang]) -> None:
        self._make = make
        self.made: list[Gang] = []

    def __call__(self) -> Gang:
        self.made.append(self._make())
        return self.made[-1]

    async def process_ids(self, gang: SupervisedGang) -> list[int]:
        """The processes of a gang that serves, by rank: they answer while `run` blocks."""
        ranks = next(made for made in self.made if made is gang)._ranks
        return [(await rank.call(RankWorker.facts)).pid for rank in ranks]
