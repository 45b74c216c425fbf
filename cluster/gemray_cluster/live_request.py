"""What a request has got so far, so that another gang can go on with it."""

from __future__ import annotations

import msgspec

from gemray_workers.messages import SequenceDelta, SpeculationCounters, Submit

FRUITLESS_FAILURES = 2
"""A request that lived through more failures than this without a token between them may be their cause."""


class LiveRequest:
    """One request on its way through gangs that may fail."""

    def __init__(self, submit: Submit) -> None:
        """It has got nothing yet."""
        self._submit = submit
        self._new_ids: list[int] = []
        self._earlier = SpeculationCounters()
        """Of gangs that have failed."""
        self._counters = self._earlier
        self._num_fruitless = 0

    @property
    def rest(self) -> Submit:
        """The request as the next gang is to see it: what was emitted is replayed, not emitted again."""
        return msgspec.structs.replace(self._submit, emitted_ids=[*self._submit.emitted_ids, *self._new_ids])

    def take(self, delta: SequenceDelta) -> SequenceDelta:
        """Note what a gang gave, and give it with the counters of all gangs."""
        self._new_ids += delta.token_ids
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
        return self._num_fruitless <= FRUITLESS_FAILURES
