"""Who may enter: how many of the waiting sequences can start now.

What the prefix cache has of a waiting sequence's text takes fewer rows and, where others hold it for good, fewer pages.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

from gemray_workers.kv.prefix_cache import NO_HIT, PrefixHit
from gemray_workers.scheduling.config import SchedulerConfig
from gemray_workers.scheduling.page_ledger import Leavers, PageLedger
from gemray_workers.scheduling.request import Sequence

MOST_LOOKED_AT = 256
"""Waiting sequences that are looked at in one step, from the oldest on: a bound on the host's work."""
MOST_LOOKED_UP = 16
"""Waiting sequences that are looked up in one step although they fit only if some of their text is found."""


@dataclass(frozen=True)
class AdmissionDecision:
    """Who changes places before a step."""

    giving_way: SequenceOf[Sequence]
    """Running ones that go back to the waiting, newest first."""
    admitted: SequenceOf[tuple[Sequence, PrefixHit]]
    """Waiting ones that start, oldest first, each with what the prefix cache has of its text."""


def choose_admissions(
    waiting: SequenceOf[Sequence],
    running: SequenceOf[Sequence],
    ledger: PageLedger,
    config: SchedulerConfig,
    *,
    num_free_slots: int,
) -> AdmissionDecision:
    """Who finds a slot and pages: each that starts and each that runs must be able to compute all it knows and a little
    more.

    The oldest that waits claims what the running ones younger than it hold, newest first, if with that it can start:
    it waits for older ones alone. Behind it others start on what is idle, so a short request does not wait for a long
    one to find its pages; those are the younger ones that may have to give way, and come back with their tokens.

    When nothing older runs the oldest does start, since an accepted request fits alone. The pages that a running
    sequence needs in this step are part of what it knows, so an admission never makes a preemption necessary in the
    same step.
    """
    if not waiting:
        return AdmissionDecision([], [])
    missing = {id(sequence): _missing(sequence, ledger, config) for sequence in running}
    unclaimed = ledger.pages_free
    for pages in missing.values():
        unclaimed = _less(unclaimed, pages)
    giving_way: list[Sequence] = []
    most = num_free_slots  # a step has rows for as many sequences as there are slots
    leavers = ledger.leavers()
    applicant = _Applicant.of(waiting[0], ledger, config)
    if not applicant.fits(unclaimed, most, leavers):
        pages, num_places, with_theirs = unclaimed, most, dict[str, int]()
        for sequence in sorted(running, key=lambda sequence: -sequence.arrival):
            if sequence.arrival < applicant.sequence.arrival:
                break
            leavers.add(sequence.running_slot)
            pages = _plus(pages, missing[id(sequence)])
            num_places += 1
            giving_way.append(sequence)
            with_theirs = _plus(pages, leavers.freed)
            if applicant.fits(with_theirs, num_places, leavers):
                unclaimed, most = with_theirs, num_places
                break
        if unclaimed is not with_theirs:
            giving_way.clear()  # all of them together are not enough
            leavers = ledger.leavers()
    admitted: list[tuple[Sequence, PrefixHit]] = []
    num_looked_up = 0
    for sequence in islice(waiting, MOST_LOOKED_AT):
        if len(admitted) >= most or min(unclaimed.values()) <= 0:
            break
        applicant = _Applicant(sequence, NO_HIT, ledger, config)
        if applicant.fits(unclaimed, 1, leavers) or num_looked_up < MOST_LOOKED_UP:
            num_looked_up += 1
            applicant = _Applicant.of(sequence, ledger, config)
            if applicant.fits(unclaimed, 1, leavers):
                unclaimed = _less(unclaimed, applicant.demand(leavers))
                admitted.append((sequence, applicant.hit))
    return AdmissionDecision(giving_way, admitted)


@dataclass(frozen=True)
class _Applicant:
    """A waiting sequence, and what is known of its text."""

    sequence: Sequence
    hit: PrefixHit
    ledger: PageLedger
    config: SchedulerConfig

    @classmethod
    def of(cls, sequence: Sequence, ledger: PageLedger, config: SchedulerConfig) -> _Applicant:
        """Look its text up."""
        hit = ledger.find(sequence.tokens, sequence.cache_salt, sequence.most_found)
        return cls(sequence, hit, ledger, config)

    def demand(self, leavers: Leavers) -> dict[str, int]:
        """Pages that it takes when `leavers` have left."""
        num_rows = self.config.chunk(self.sequence.num_pending - self.hit.num_tokens)
        demand = self.ledger.demand(_foreseen_len(self.sequence, self.config), num_rows)
        return _less(demand, self.ledger.held_for_good(self.hit, leavers))

    def fits(self, unclaimed: dict[str, int], num_places: int, leavers: Leavers) -> bool:
        """Whether it finds a place and its pages."""
        return num_places > 0 and min(_less(unclaimed, self.demand(leavers)).values()) >= 0


def _missing(sequence: Sequence, ledger: PageLedger, config: SchedulerConfig) -> dict[str, int]:
    """Pages that a running sequence may yet take."""
    num_rows = sequence.num_rows_in_flight + config.chunk(sequence.num_pending)
    return ledger.still_missing(sequence.running_slot, _foreseen_len(sequence, config), num_rows)


def _foreseen_len(sequence: Sequence, config: SchedulerConfig) -> int:
    return min(sequence.most_len + config.admission_headroom, sequence.end_len(config.max_model_len))


def _plus(pages: dict[str, int], given: dict[str, int]) -> dict[str, int]:
    return {name: count + given[name] for name, count in pages.items()}


def _less(pages: dict[str, int], taken: dict[str, int]) -> dict[str, int]:
    return {name: count - taken[name] for name, count in pages.items()}
