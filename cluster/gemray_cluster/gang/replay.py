"""A request's way over gangs: what a failed one gave is told to the next, which goes on from there.

As long as a gang has given it nothing, a request that waits may also be told to wait in another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

import msgspec

from gemray_cluster.gang.client import GangClient, GangState, GangUnavailable, NoLongerFits
from gemray_workers.messages import SequenceDelta, SpeculationCounters, Submit

FRUITLESS_FAILURES = 2
"""After this many failures in a row without a token between them a request is suspected of causing them; after one more
it is not run again."""
MOST_FAILURES = 8
"""After this many failures under one request it is not run again, whatever it got between them."""

G = TypeVar("G", bound=GangClient)


class LiveRequest:
    """One request on its way through gangs that may fail."""

    def __init__(self, submit: Submit) -> None:
        """Start without tokens."""
        self._submit = submit
        self._new_ids: list[int] = []
        self._num_prompt_logprobs = submit.num_prompt_logprobs
        self._earlier = SpeculationCounters()
        """Counters of gangs that have failed."""
        self._counters = self._earlier
        self._num_fruitless = 0
        self._num_failures = 0

    @property
    def rest(self) -> Submit:
        """The request as the next gang is to see it: what was emitted is replayed, not emitted again."""
        return msgspec.structs.replace(
            self._submit,
            emitted_ids=[*self._submit.emitted_ids, *self._new_ids],
            num_prompt_logprobs=self._num_prompt_logprobs,
        )

    def require_room(self, max_model_len: int) -> None:
        """Raise NoLongerFits when a gang other than the first cannot give what the first one had promised.

        Args:
            max_model_len: most tokens of a request in the gang in which it is to go on, or has come to its end.
        """
        submit = self._submit
        num_prompt_tokens = len(submit.prompt_ids)
        num_tokens = num_prompt_tokens + len(submit.emitted_ids) + len(self._new_ids)
        wants_more = num_tokens < num_prompt_tokens + submit.params.max_tokens
        if self._num_failures and wants_more and num_tokens >= max_model_len:
            raise NoLongerFits(
                f"the gang that ran this request failed, and the one in its place has memory for {max_model_len} "
                f"tokens a request: this one has {num_tokens} and wants more"
            )

    @property
    def is_suspect(self) -> bool:
        """Whether it should join the next gang alone."""
        return self._num_fruitless >= FRUITLESS_FAILURES

    def take(self, delta: SequenceDelta) -> SequenceDelta:
        """Record a delta of the gang; return it with counters summed over all gangs."""
        self._new_ids += delta.token_ids
        self._num_prompt_logprobs += len(delta.prompt_logprobs or ())
        if delta.token_ids:
            self._num_fruitless = 0
        if delta.speculation is None:
            return delta
        self._counters = self._earlier.plus(delta.speculation)
        return msgspec.structs.replace(delta, speculation=self._counters)

    def survives_failure(self) -> bool:
        """The gang has failed: may another one be given this request?"""
        self._earlier = self._counters
        self._num_fruitless += 1
        self._num_failures += 1
        return self._num_fruitless <= FRUITLESS_FAILURES and self._num_failures < MOST_FAILURES


class Suspects:
    """Lets suspected requests join a gang one at a time: the one that kills it is then alone, and the others go on."""

    def __init__(self) -> None:
        """Start with no request on trial."""
        self._lock = asyncio.Lock()
        self._on_trial: LiveRequest | None = None

    async def wait_for_turn(self, request: LiveRequest) -> None:
        """Return at once for a request that is no suspect; it is a suspect's turn until it is cleared."""
        if request.is_suspect:
            await self._lock.acquire()
            self._on_trial = request

    def clear(self, request: LiveRequest) -> None:
        """`request` got a token or left: the next one's turn. Nothing if it was not on trial."""
        if self._on_trial is request:
            self._on_trial = None
            self._lock.release()


class Move(Generic[G]):
    """One request's way from gang to gang: it may go as long as the gang that it is in has given it nothing.

    Nothing is lost by it but the part of a prompt that was computed.
    """

    def __init__(self) -> None:
        """Nothing has been asked of a gang yet."""
        self._told: asyncio.Future[G] | None = None
        self._target: G | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the request waits, and has not been told to go."""
        return self._told is not None and not self._told.done()

    def go_to(self, gang: G) -> None:
        """Let it wait in `gang`; only where `is_possible`."""
        assert self._told is not None
        self._told.set_result(gang)

    def take_target(self) -> G | None:
        """The gang to go to, once; None where the request has not been told to go."""
        target, self._target = self._target, None
        return target

    async def until_told(self, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
        """Yield `deltas`; none where the request is told to go before the first, which leaves `deltas` to be closed."""
        told = self._told = asyncio.get_running_loop().create_future()
        first = asyncio.ensure_future(anext(deltas, None))
        first.add_done_callback(lambda done: done.cancelled() or done.exception())  # its error may come too late
        try:
            await asyncio.wait((first, told), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._told = None
            if not first.done():
                first.cancel()
                await asyncio.wait([first])
        if told.done():
            self._target = told.result()
            return
        delta = first.result()
        if delta is None:
            return
        yield delta
        async for delta in deltas:
            yield delta


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
