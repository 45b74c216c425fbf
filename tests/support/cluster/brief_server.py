"""A server whose gang dies again and again: each call gives some deltas, then UNAVAILABLE."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from gemray_cluster.gang.client import GangUnavailable
from gemray_workers.messages import SequenceDelta, Submit
from support.cluster.fake_gang import FakeGang


class BriefGang(FakeGang):
    """Gives the first call the first of `deltas_of_calls`, and so on; further calls get as many as the last.

    It refuses the calls in `refused`, counted from 0.
    """

    deltas_of_calls: Sequence[int] = (2,)
    refused: frozenset[int] = frozenset()
    num_calls: int = 0

    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        call = self.num_calls
        self.num_calls += 1
        if call in self.refused:
            raise GangUnavailable("the gang is being rebuilt")
        num_deltas = self.deltas_of_calls[min(call, len(self.deltas_of_calls) - 1)]
        async for delta in super().generate(submit):
            if num_deltas == 0:
                raise GangUnavailable("rank 1 died")
            num_deltas -= 1
            yield delta
