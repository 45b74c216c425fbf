"""How many tokens to draft: from measured acceptance and measured step times, as a pure function.

A round with k drafts yields ``1 + a_1 + a_1 a_2 + ... + a_1...a_k`` tokens on average, where a_i is the rate at which
the i-th draft is accepted when all before it were, and takes t(k) seconds, which depends on how many sequences are in
the batch and how long they are. The best k has the most tokens a second; 0 stops drafting. The answer changes speed,
never ids, so it may be tried out freely: a length whose time is unknown here is tried before it is judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

MEMORY = 0.05
"""Weight of a new measurement against all older ones."""
TRIES = 3
"""Steps at a length before its time is believed."""
RETRY_EVERY = 256
"""Steps after which a length other than the best is tried again: load and text change."""
INITIAL_RATE = 0.8
"""Acceptance assumed of a position that was never drafted."""


@dataclass(frozen=True)
class Load:
    """What a step's time depends on, in classes wide enough to be met again: powers of two, and of four."""

    batch: int
    context: int

    @classmethod
    def of(cls, num_sequences: int, mean_context: float) -> Load:
        """The class of a batch."""
        return cls(max(0, num_sequences - 1).bit_length(), int(mean_context).bit_length() // 2)


@dataclass(frozen=True)
class StepTime:
    """Measured seconds of steps with one draft length under one load."""

    seconds: float
    count: int

    def updated(self, seconds: float) -> StepTime:
        """With one more step, the first few averaged, later ones remembered less and less."""
        weight = max(MEMORY, 1 / (self.count + 1))
        return StepTime(self.seconds + weight * (seconds - self.seconds), self.count + 1)


@dataclass(frozen=True)
class Estimates:
    """Everything that was measured so far."""

    rates: tuple[float, ...] = ()
    """Acceptance of each position, given that all before it were accepted."""
    times: Mapping[tuple[Load, int], StepTime] = field(default_factory=dict)
    """By load and draft length."""
    steps: Mapping[Load, int] = field(default_factory=dict)

    def with_step(self, load: Load, draft_length: int, seconds: float) -> Estimates:
        """After a step in which every sequence decoded with this draft length."""
        key = (load, draft_length)
        time = self.times.get(key, StepTime(seconds, 0)).updated(seconds)
        return replace(
            self,
            times={**self.times, key: time},
            steps={**self.steps, load: self.steps.get(load, 0) + 1},
        )

    def with_acceptance(self, num_drafted: int, num_accepted: int) -> Estimates:
        """After a round of one sequence: the first drafts were accepted, the next one, if any, was not."""
        rates = list(self.rates) + [INITIAL_RATE] * (num_drafted - len(self.rates))
        for position in range(min(num_accepted + 1, num_drafted)):
            rates[position] += MEMORY * ((position < num_accepted) - rates[position])
        return replace(self, rates=tuple(rates))

    def expected_tokens(self, draft_length: int) -> float:
        """Mean tokens of a round."""
        tokens = reached = 1.0
        for position in range(draft_length):
            reached *= self.rates[position] if position < len(self.rates) else INITIAL_RATE
            tokens += reached
        return tokens


def choose_draft_length(estimates: Estimates, load: Load, most: int) -> int:
    """Drafts for each sequence of the next step, 0 to `most`.

    A few lengths are measured under each load; the time of one between two measured ones is interpolated, until it
    is chosen and so measured itself.

    Args:
        estimates: what was measured.
        load: of the next step.
        most: the drafter's limit.
    """
    for length in _anchors(most):
        time = estimates.times.get((load, length))
        if time is None or time.count < TRIES:
            return length
    measured = _measured(estimates, load, most)
    best = max(range(most + 1), key=lambda length: estimates.expected_tokens(length) / _seconds(measured, length))
    step = estimates.steps.get(load, 0)
    if step % RETRY_EVERY == RETRY_EVERY - 1:
        others = [length for length in _anchors(most) if length != best]
        return others[step // RETRY_EVERY % len(others)] if others else best
    return best


def _anchors(most: int) -> tuple[int, ...]:
    """The lengths that are always measured: the longest first, since it also shows acceptance at every position."""
    return tuple(sorted({0, (most + 1) // 2, most}, reverse=True))


def _measured(estimates: Estimates, load: Load, most: int) -> list[tuple[int, float]]:
    return sorted(
        (length, time.seconds)
        for (measured_load, length), time in estimates.times.items()
        if measured_load == load and length <= most and time.count >= TRIES
    )


def _seconds(measured: Sequence[tuple[int, float]], length: int) -> float:
    """Step time at `length`, on the line between its measured neighbours (0 and the longest are among them)."""
    below = max(point for point in measured if point[0] <= length)
    above = min(point for point in measured if point[0] >= length)
    if below[0] == above[0]:
        return below[1]
    share = (length - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])
