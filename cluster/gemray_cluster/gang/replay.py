"""Requests that outlive a gang: the next one is told what the failed one gave, and goes on from there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from gemray_cluster.gang.client import GangClient, GangState, GangUnavailable
from gemray_cluster.gang.live_request import LiveRequest, Suspects
from gemray_cluster.gang.move import Move
from gemray_workers.messages import SequenceDelta, Submit

G = TypeVar("G", bound=GangClient)


class Replays:
    """Runs requests to their end, each over as many gangs as it takes."""

    def __init__(self) -> None:
        """No request yet."""
        self._suspects = Suspects()
        self.num_live = 0
        """Requests that have not ended."""

    async def run(
        self,
        submit: Submit,
        gang: G,
        gang_after: Callable[[G, LiveRequest], Awaitable[G]],
        move: Move[G] | None = None,
    ) -> AsyncGenerator[SequenceDelta, None]:
        """Yield the deltas of `submit` as if one gang had given them all.

        Args:
            submit: the request.
            gang: the gang that begins.
            gang_after: waits for the gang that follows a failed one for this request; raises GangUnavailable when none
                will.
            move: tells the request to wait in another gang, unless it is a suspect; None for nobody.

        Raises:
            GangUnavailable: no gang follows, the gang was stopped, or the request may be what kills gangs.
            NoLongerFits: the gang that follows has less memory, and the request needs more.
        """
        request = LiveRequest(submit)
        self.num_live += 1
        try:
            while True:
                try:
                    async with (
                        aclosing(gang.generate(request.rest)) as all_deltas,
                        aclosing(
                            all_deltas if move is None or request.is_suspect else move.until_told(all_deltas)
                        ) as deltas,
                    ):
                        async for delta in deltas:
                            given = request.take(delta)
                            if given.finish == "length":
                                request.require_room(gang.info.model.max_model_len)
                            if not request.is_suspect:
                                self._suspects.clear(request)
                            yield given
                    target = None if move is None else move.take_target()
                    if target is None:
                        return
                    gang = target
                    continue
                except GangUnavailable:
                    if gang.state is not GangState.FAILED or not request.survives_failure():
                        raise
                self._suspects.clear(request)
                await self._suspects.wait_for_turn(request)
                gang = await gang_after(gang, request)
                request.require_room(gang.info.model.max_model_len)
        finally:
            self._suspects.clear(request)
            self.num_live -= 1
