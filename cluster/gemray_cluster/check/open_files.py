"""May this process open as many files as a server needs: a connection is one, and Ray's processes inherit the limit."""

from __future__ import annotations

import resource

from gemray_cluster.check.result import CheckResult, fail, ok
from gemray_workers.errors import CapacityError

NAME = "open files"
_FOR_RAY_AND_RANKS = 256
"""Measured on two ranks with Ray 2.60: 52 for the server, 58 for Ray's GCS, 68 for rank 0; the rest is room."""


def open_files_wanted(max_live_requests: int) -> int:
    """Files that a server may hold: a connection for each request that it takes, beside its own."""
    return _FOR_RAY_AND_RANKS + max_live_requests


def check_open_files(limit: int, *, max_live_requests: int) -> CheckResult:
    """`limit` is the most that this process may set for itself (``ulimit -Hn``)."""
    wanted = open_files_wanted(max_live_requests)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        return fail(NAME, _shortage(limit, max_live_requests))
    return ok(NAME, f"{'any number' if limit == resource.RLIM_INFINITY else limit} may be open, {wanted} wanted.")


def raise_open_files(max_live_requests: int) -> None:
    """Raise this process's own limit where it is too low, as far as it may.

    Raises CapacityError when that is not far enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = open_files_wanted(max_live_requests)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise CapacityError(_shortage(hard, max_live_requests).rstrip("."))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def hard_limit() -> int:
    """The most that this process may set for itself."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def _shortage(limit: int, max_live_requests: int) -> str:
    return (
        f"open files (ulimit -n) = {limit} is too few: at least {open_files_wanted(max_live_requests)} are wanted, "
        f"{_FOR_RAY_AND_RANKS} for Ray and the ranks and one for each of max_live_requests = {max_live_requests}."
    )
