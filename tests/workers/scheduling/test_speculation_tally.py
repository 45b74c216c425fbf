"""Rounds of speculation, counted by drafter."""

from __future__ import annotations

import msgspec

from gemray_workers.messages import SpeculationCounters
from gemray_workers.scheduling.counters import SpeculationTally

MTP = SpeculationCounters(rounds=2, drafted=6, accepted=3, accepted_per_position=[2, 1, 0, 0])
DFLASH = SpeculationCounters(rounds=1, drafted=7, accepted=2, accepted_per_position=[1, 1, 0, 0, 0, 0, 0])


def tally_of(*rounds: tuple[int, int, int]) -> SpeculationCounters:
    tally = SpeculationTally()
    for drafter, drafted, accepted in rounds:
        tally.record(drafter=drafter, drafted=drafted, accepted=accepted)
    return tally.counters()


def test_rounds_are_counted_in_all_and_by_drafter() -> None:
    both = tally_of((0, 4, 2), (1, 7, 2), (0, 0, 0), (0, 2, 1))
    assert (both.rounds, both.drafted, both.accepted) == (3, 13, 5)
    assert both.accepted_per_position == [3, 2, 0, 0, 0, 0, 0]
    assert both.of_drafters == [MTP, DFLASH]
    assert both.newest == 0
    assert tally_of((0, 4, 2), (0, 2, 1)) == MTP, "one drafter has no parts"
    assert tally_of((1, 7, 2)).by_drafter == [SpeculationCounters(), DFLASH]


def test_counts_of_two_lives_add_up_by_drafter() -> None:
    total = tally_of((0, 4, 2), (0, 2, 1)).plus(tally_of((1, 7, 2)))
    assert (total.rounds, total.of_drafters) == (3, [MTP, DFLASH])
    assert total.newest == 1
    assert total.plus(SpeculationCounters()) == total


def test_what_a_client_is_not_given_is_taken_from_the_last_rounds_drafter() -> None:
    cut = tally_of((0, 4, 2), (0, 2, 1), (1, 7, 2)).without_acceptances(range(1, 2))
    assert cut.accepted == 4
    assert cut.of_drafters[0] == MTP
    assert (cut.of_drafters[1].accepted, cut.of_drafters[1].accepted_per_position[:2]) == (1, [1, 0])


def test_parts_cross_the_channel() -> None:
    both = tally_of((0, 4, 2), (1, 7, 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(both), type=SpeculationCounters) == both
