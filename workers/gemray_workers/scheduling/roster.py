"""Which requests run, in which slots, and which wait; both in order of arrival."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence as SequenceOf

from gemray_workers.scheduling.request import Sequence


class Roster:
    """The live requests in order of arrival, and the slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._by_id: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # oldest first
        self._running: list[Sequence] = []  # oldest first
        self._free_slots = list(range(num_slots))  # a heap
        self._released_slots: list[int] = []
        self._num_admissions = [0] * num_slots  # by slot

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __len__(self) -> int:
        """Requests, running or waiting."""
        return len(self._by_id)

    @property
    def request_ids(self) -> list[str]:
        """Every request's id."""
        return list(self._by_id)

    @property
    def running(self) -> SequenceOf[Sequence]:
        """The sequences that hold slots, oldest first."""
        return self._running

    @property
    def waiting(self) -> SequenceOf[Sequence]:
        """The sequences that wait, oldest first."""
        return self._waiting

    @property
    def num_free_slots(self) -> int:
        """Slots that `admit` can give."""
        return len(self._free_slots)

    @property
    def has_released(self) -> bool:
        """Whether `take_released` has something to give."""
        return bool(self._released_slots)

    def get(self, request_id: str) -> Sequence | None:
        """A live request, or None."""
        return self._by_id.get(request_id)

    def enqueue(self, sequence: Sequence) -> None:
        """A new request waits behind all others."""
        self._by_id[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def admit(self, sequence: Sequence, num_found: int = 0) -> None:
        """A waiting sequence takes the lowest free slot; its first `num_found` tokens have their KV."""
        self._waiting.remove(sequence)
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.epoch = self._num_admissions[sequence.slot]
        self._num_admissions[sequence.slot] += 1
        sequence.num_computed = sequence.num_found = num_found
        if sequence.num_cached is None:
            sequence.num_cached = min(num_found, sequence.prompt_len)
        insort(self._running, sequence, key=_arrival)

    def put_back(self, sequence: Sequence) -> None:
        """A running sequence leaves its slot and waits where its arrival puts it, with nothing computed: its confirmed
        tokens come back, what was in flight is void.
        """
        self._leave_slot(sequence)
        sequence.num_computed = sequence.num_found = 0
        insort(self._waiting, sequence, key=_arrival)

    def end(self, sequence: Sequence) -> None:
        """A request is over, whether it ran or waited."""
        del self._by_id[sequence.request_id]
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._leave_slot(sequence)

    def take_released(self) -> list[int]:
        """Slots that became free since the last call."""
        released, self._released_slots = self._released_slots, []
        return released

    def check(self) -> None:
        """Assert that slots and order are as they should be."""
        slots = [sequence.running_slot for sequence in self._running] + self._free_slots
        assert sorted(slots) == list(range(self._num_slots)), slots
        for sequences in (self._running, self._waiting):
            arrivals = [sequence.arrival for sequence in sequences]
            assert arrivals == sorted(set(arrivals)), arrivals
        everyone = [*self._running, *self._waiting]
        assert len(everyone) == len(self._by_id), self.request_ids
        assert {sequence.request_id for sequence in everyone} == self._by_id.keys(), self.request_ids
        for sequence in everyone:
            sequence.check()

    def _leave_slot(self, sequence: Sequence) -> None:
        slot = sequence.running_slot
        sequence.in_flight.clear()
        self._running.remove(sequence)
        self._released_slots.append(slot)
        heapq.heappush(self._free_slots, slot)
        sequence.slot = None


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
