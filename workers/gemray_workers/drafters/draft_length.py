"""How many tokens to draft: from measured acceptance and measured step times, as a pure function.

A round with k drafts yields ``1 + a_1 + a_1 a_2 + ... + a_1...a_k`` tokens on average, where a_i is the rate at which
the i-th draft is accepted when all before it were, and takes t(k) seconds, which depends on how many sequences are in
the batch and how long they are. The best k has the most tokens a second; 0 stops drafting. The answer changes speed,
never ids, so it may be tried out freely: a length whose time is unknown here is tried before it is judged.

Steps are seldom alike: prompts are prefilled beside the decoding sequences, requests state numbers of their own, and
limits cut what was asked for. So a time is recorded under what the step really had, a decision under what was known
before the step, and a length that was asked for in vain a few times is no longer waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

MEMORY = 0.05
"""Weight of a new measurement against all older ones."""
TRIES = 3
"""Steps at a length before its time is believed."""
HELD_UP = 4
"""A step that takes this many times the usual seconds of its length was held up and does not count."""
MOST_HELD_UP = 8
"""How many steps in a row may be held up; after one more, the length is believed to be that slow."""
PATIENCE = 4
"""How often a length may be asked for without a step of that length, before it is no longer waited for."""
RETRY_EVERY = 256
"""Steps after which a length other than the best is tried again: load and text change."""
LONG_REST = 32
"""Steps in a row without drafts after which acceptance that was measured before them is doubted: texts change."""
DOUBTED = 2
"""New measurements that weigh as much as what is doubted."""
INITIAL_RATE = 0.8
"""Acceptance assumed of a position that was never drafted."""
LEAST_GAIN = 0.05
"""Tokens that drafts must add to a round for their time to be worth measuring."""
ASSUMED_COST = 0.05
"""Share of a plain step that a draft is taken to cost as long as no load has shown it."""


@dataclass(frozen=True)
class Load:
    """What a step's time depends on beside the draft length, in classes so wide that loads recur."""

    batch: int
    """Class of the number of sequences whose draft length is chosen: powers of two."""
    context: int
    """Class of their mean length: powers of four."""
    other_rows: int = 0
    """Class of the rows that are there whatever is chosen (prompt chunks, requests with a number of their own): powers
    of four, none a class for itself."""

    @classmethod
    def of(cls, num_sequences: int, mean_context: float, num_other_rows: int = 0) -> Load:
        """The class of a batch."""
        return cls(
            max(0, num_sequences - 1).bit_length(),
            int(mean_context).bit_length() // 2,
            (num_other_rows.bit_length() + 1) // 2,
        )

    def beside(self, num_other_rows: int) -> Load:
        """The same sequences beside `num_other_rows` rows of others."""
        return replace(self, other_rows=Load.of(0, 0, num_other_rows).other_rows)

    def distance(self, other: Load) -> int:
        """How many classes apart two loads are."""
        return (
            abs(self.batch - other.batch) + abs(self.context - other.context) + abs(self.other_rows - other.other_rows)
        )


@dataclass(frozen=True)
class StepTime:
    """Measured seconds of steps with one draft length under one load.

    The seconds are a moving average of the median of each three steps in a row. Steps that were held up (the machine
    was busy, memory was paged in) take many times as long: a few of them in a row do not count, and if they came first,
    the first step that was not held up replaces them.
    """

    seconds: float = 0.0
    count: int = 0
    newest: tuple[float, ...] = ()
    """The last three steps that count."""
    num_held_up: int = 0
    """Steps held up since the last one that counts."""

    @property
    def is_known(self) -> bool:
        """Whether there were enough steps to believe it."""
        return self.count >= TRIES

    def updated(self, seconds: float) -> StepTime:
        """The time with one more step."""
        if HELD_UP * seconds < self.seconds:
            return StepTime(seconds, 1, (seconds,))
        if self.is_known and seconds > HELD_UP * self.seconds:
            if self.num_held_up == MOST_HELD_UP:
                return StepTime(seconds, 1, (seconds,))
            return replace(self, num_held_up=self.num_held_up + 1)
        newest = (*self.newest, seconds)[-TRIES:]
        if self.count < TRIES:
            return StepTime(median(newest), self.count + 1, newest)
        weight = max(MEMORY, 1 / (self.count - TRIES + 2))
        return StepTime(self.seconds + weight * (median(newest) - self.seconds), self.count + 1, newest)


@dataclass(frozen=True)
class Estimates:
    """Everything that was measured so far."""

    rates: tuple[float, ...] = ()
    """Acceptance of each position, given that all before it were accepted."""
    rested: int = 0
    """Steps since the last drafts."""
    since_rest: tuple[int, ...] = ()
    """Measurements of each position since the last long rest; none before the first."""
    times: Mapping[tuple[Load, int], StepTime] = field(default_factory=dict)
    """By load and draft length."""
    in_vain: Mapping[tuple[Load, int], int] = field(default_factory=dict)
    """How often a length was decided on under a load since a step there last had it."""
    decisions: Mapping[Load, int] = field(default_factory=dict)

    def with_decision(self, load: Load, draft_length: int) -> Estimates:
        """After a step for which `draft_length` was decided on under `load`, whatever the step then had."""
        key = (load, draft_length)
        return replace(
            self,
            in_vain={**self.in_vain, key: self.in_vain.get(key, 0) + 1},
            decisions={**self.decisions, load: self.decisions.get(load, 0) + 1},
        )

    def with_step(self, load: Load, draft_length: int, seconds: float) -> Estimates:
        """After a step under `load` in which sequences decoded with this draft length."""
        key = (load, draft_length)
        time = self.times.get(key, StepTime()).updated(seconds)
        return replace(self, times={**self.times, key: time}, in_vain={**self.in_vain, key: 0})

    def with_acceptance(self, num_drafted: int, num_accepted: int) -> Estimates:
        """After a round of one sequence: the first drafts were accepted, the next one, if any, was not."""
        rates = list(self.rates) + [INITIAL_RATE] * (num_drafted - len(self.rates))
        since_rest = [0] * len(rates) if self.rested >= LONG_REST else list(self.since_rest)
        for position in range(min(num_accepted + 1, num_drafted)):
            weight = MEMORY
            if position < len(since_rest):
                weight = max(MEMORY, 1 / (DOUBTED + since_rest[position] + 1))
                since_rest[position] += 1
            rates[position] += weight * ((position < num_accepted) - rates[position])
        return replace(self, rates=tuple(rates), rested=0, since_rest=tuple(since_rest))

    def with_rest(self) -> Estimates:
        """After a step in which it did not draft."""
        return replace(self, rested=self.rested + 1)

    def expected_tokens(self, draft_length: int) -> float:
        """Mean tokens of a round."""
        tokens = reached = 1.0
        for position in range(draft_length):
            reached *= self.rates[position] if position < len(self.rates) else INITIAL_RATE
            tokens += reached
        return tokens


def choose_draft_length(estimates: Estimates, load: Load, num_draft_tokens: int) -> int:
    """Drafts for each sequence of the next step, 0 to `num_draft_tokens`.

    A few lengths are measured under each load; the time of one between two measured ones is interpolated, until it
    is chosen and so measured itself. Lengths that steps never reach (limits cut them) are not judged.

    Args:
        estimates: what was measured.
        load: of the next step, as far as it is known before.
        num_draft_tokens: the drafter's limit.
    """
    untold = length_to_measure(estimates, load, num_draft_tokens)
    if untold is not None:
        return untold
    best, _ = best_length(estimates, load, num_draft_tokens)
    decision = estimates.decisions.get(load, 0)
    if decision % RETRY_EVERY == RETRY_EVERY - 1:
        return other_length(best, num_draft_tokens, decision // RETRY_EVERY)
    return best


def length_to_measure(estimates: Estimates, load: Load, num_draft_tokens: int) -> int | None:
    """A length whose time is not known under `load`; None when enough are, or drafts gain too little to ask."""
    if estimates.expected_tokens(num_draft_tokens) - 1 < LEAST_GAIN:
        return None
    lengths = (length for length in _anchors(num_draft_tokens) if is_worth_trying(estimates, load, length))
    return next(lengths, None)


def best_length(estimates: Estimates, load: Load, num_draft_tokens: int) -> tuple[int, float]:
    """The length with the most tokens a second, and how many times those of plain decoding they are."""
    measured = _measured(estimates, load, num_draft_tokens)
    lengths = range(measured[-1][0] + 1)
    best = max(lengths, key=lambda length: estimates.expected_tokens(length) / _seconds(measured, length))
    return best, estimates.expected_tokens(best) * _seconds(measured, 0) / _seconds(measured, best)


def other_length(best: int, num_draft_tokens: int, turn: int) -> int:
    """One of the measured lengths beside the best, another in each turn; the best where there is none."""
    others = [length for length in _anchors(num_draft_tokens) if length != best]
    return others[turn % len(others)] if others else best


def is_worth_trying(estimates: Estimates, load: Load, length: int) -> bool:
    """Whether the time of a length is not known under `load`, and has not been asked for in vain."""
    time = estimates.times.get((load, length))
    return (time is None or not time.is_known) and estimates.in_vain.get((load, length), 0) < PATIENCE


def _anchors(num_draft_tokens: int) -> tuple[int, ...]:
    """The lengths that are always measured: the longest first, since it also shows acceptance at every position."""
    return tuple(sorted({0, (num_draft_tokens + 1) // 2, num_draft_tokens}, reverse=True))


def _measured(estimates: Estimates, load: Load, num_draft_tokens: int) -> list[tuple[int, float]]:
    """Lengths, 0 and at least one more, and their seconds: of this load, else of the nearest that has both."""
    by_load: dict[Load, list[tuple[int, float]]] = {}
    for (measured_load, length), time in estimates.times.items():
        if length <= num_draft_tokens and time.is_known:
            by_load.setdefault(measured_load, []).append((length, time.seconds))
    complete = {
        key: sorted(times)
        for key, times in by_load.items()
        if min(times)[0] == 0 and (len(times) > 1 or not num_draft_tokens)
    }
    if not complete:
        return sorted({(0, 1.0), (num_draft_tokens, 1.0 + ASSUMED_COST * num_draft_tokens)})
    return complete[min(complete, key=load.distance)]


def _seconds(measured: Sequence[tuple[int, float]], length: int) -> float:
    """Step time at `length`, on the line between its measured neighbours (0 and the longest judged are among them)."""
    below = max(point for point in measured if point[0] <= length)
    above = min(point for point in measured if point[0] >= length)
    if below[0] == above[0]:
        return below[1]
    share = (length - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])
