"""Where the ranks of a gang first meet: a key-value store that rank 0 serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlsplit

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistStoreError

from gemray_workers.errors import CommunicationError, InvalidField


class JoinDeadline:
    """One rank's patience while it joins: what is left of it, and the error that says it ran out."""

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
        self._who = f"rank {rank} of {size} could not join the gang at {rendezvous}"
        self._timeout_s = timeout_s
        self._started = time.monotonic()

    def remaining(self) -> timedelta:
        """Time left, never zero (torch takes zero as no limit)."""
        return timedelta(seconds=max(0.001, self._timeout_s - (time.monotonic() - self._started)))

    def error(self, why: object) -> CommunicationError:
        """The error to raise: who, where, how long, why."""
        waited = time.monotonic() - self._started
        reason = str(why).partition("\n")[0]
        return CommunicationError(f"{self._who} within {waited:.1f} s of {self._timeout_s:g}: {reason}")


def meet(rank: int, size: int, rendezvous: str, deadline: JoinDeadline) -> Store:
    """Wait at the store until all ranks are there. Raises CommunicationError, naming the absent ranks."""
    host, port = parse_rendezvous(rendezvous)
    try:
        # multi_tenant: where rank 0's launcher already serves a store at this port, that one is used.
        store = TCPStore(
            host,
            port,
            is_master=rank == 0,
            timeout=deadline.remaining(),
            wait_for_workers=False,
            multi_tenant=True,
        )
        problem = _roll_call(store, rank, size, deadline.remaining)
        store.set_timeout(deadline.remaining())
    except RuntimeError as error:
        raise deadline.error(error) from error
    if problem:
        raise deadline.error(problem)
    return store


def absent_at(store: Store, milestone: str, rank: int, size: int, patience: timedelta) -> list[int]:
    """Sign in at a milestone and wait for the others; the ranks that did not come in time."""
    keys = [f"{milestone}/{peer}" for peer in range(size)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, patience)
    except DistStoreError:
        return [peer for peer, key in enumerate(keys) if not store.check([key])]
    return []


def _roll_call(store: Store, rank: int, size: int, remaining: Callable[[], timedelta]) -> str | None:
    """Sign in and wait for the others; what was wrong, or None."""
    if store.add(f"joined/{rank}", 1) > 1:
        return f"another process has joined as rank {rank}"
    store.set(f"size/{rank}", str(size))
    if absent := absent_at(store, "arrived", rank, size, remaining()):
        return f"rank {', '.join(map(str, absent))} did not arrive"
    sizes = [int(store.get(f"size/{peer}")) for peer in range(size)]
    if set(sizes) != {size}:
        return f"the ranks disagree about the gang's size: {sizes} by rank"
    return None


def parse_rendezvous(rendezvous: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``. Raises InvalidField."""
    try:
        address = urlsplit(rendezvous)
        scheme, host, port = address.scheme, address.hostname, address.port
    except ValueError:  # a port that is no number, or an unbalanced [IPv6]
        scheme, host, port = "", None, None
    if scheme != "tcp" or not host or not port:
        raise InvalidField("rendezvous", rendezvous, "tcp://host:port with a port of 1..65535")
    return host, port
