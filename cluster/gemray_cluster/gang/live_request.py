"""What a request has got so far, so that another gang can go on with it."""

from __future__ import annotations

import asyncio

import msgspec

from gemray_cluster.gang.client import NoLongerFits
from gemray_workers.messages import SequenceDelta, SpeculationCounters, Submit

FRUITLESS_FAILURES = 2
"""After this many failures in a row without a token between them a request is suspected of causing them; after one more
it is not run again."""
MOST_FAILURES = 8
"""After this many failures under one request it is not run again, whatever it got between them."""


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
