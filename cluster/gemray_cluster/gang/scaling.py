"""How many replicas the load asks for."""

from __future__ import annotations

from dataclasses import dataclass

from gemray_workers.errors import InvalidField
from gemray_workers.ranges import AT_LEAST_ONE, DURATION, check_ranges, ranged

BUSY_SHARE = 1.0
"""Requests for each slot above which a replica is missing."""
IDLE_SHARE = 0.5
"""Requests for each slot, with one replica less, below which one is too many: far enough below `BUSY_SHARE` that the
one that goes is not missed at once."""


@dataclass(frozen=True, kw_only=True)
class ReplicaLimits:
    """How many replicas there are, and how soon that follows the load."""

    replicas: int | None = ranged(AT_LEAST_ONE, None)
    """At start; None is min_replicas."""
    min_replicas: int | None = ranged(AT_LEAST_ONE, None)
    """None is `replicas`, or 1 where that is unset, too."""
    max_replicas: int | None = ranged(AT_LEAST_ONE, None)
    """More than `replicas` where the load asks for them and the cluster has, or gets, the room; None is `replicas`."""
    scale_up_s: float = ranged(DURATION, 10.0)
    """How long requests must have waited for a slot before another replica is started."""
    scale_down_s: float = ranged(DURATION, 300.0)
    """How long one replica less must have sufficed before one is ended."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.replicas is not None and self.least > self.replicas:
            raise InvalidField("min_replicas", self.min_replicas, f"at most replicas = {self.replicas}")
        if self.most < self.at_start:
            raise InvalidField("max_replicas", self.max_replicas, f"at least {self.at_start}, the replicas at start")

    @property
    def least(self) -> int:
        """Replicas that are always kept."""
        return self.min_replicas or self.replicas or 1

    @property
    def at_start(self) -> int:
        """Replicas that the server starts with."""
        return self.replicas or self.least

    @property
    def most(self) -> int:
        """Replicas that are never exceeded."""
        return self.max_replicas or self.at_start


class Scaling:
    """Watches the load: it must have lasted before it counts."""

    def __init__(self, limits: ReplicaLimits) -> None:
        """No load seen yet."""
        self._limits = limits
        self._busy_since: float | None = None
        self._idle_since: float | None = None

    def change(self, *, now: float, replicas: int, num_live: int, slots: int) -> int:
        """Replicas to start (1), to end (-1), or neither (0); after a change its wait begins again.

        Args:
            now: seconds of a clock that never goes back.
            replicas: those that serve; 0 asks for nothing: they are being started or rebuilt.
            num_live: requests that have not ended, of all replicas.
            slots: requests that one replica runs at a time.
        """
        busy = 0 < replicas < self._limits.most and num_live > BUSY_SHARE * replicas * slots
        idle = replicas > self._limits.least and num_live <= IDLE_SHARE * (replicas - 1) * slots
        self._busy_since = _since(self._busy_since, now, holds=busy)
        self._idle_since = _since(self._idle_since, now, holds=idle)
        if self._busy_since is not None and now - self._busy_since >= self._limits.scale_up_s:
            self._busy_since = None
            return 1
        if self._idle_since is not None and now - self._idle_since >= self._limits.scale_down_s:
            self._idle_since = None
            return -1
        return 0


def _since(began: float | None, now: float, *, holds: bool) -> float | None:
    if not holds:
        return None
    return now if began is None else began
