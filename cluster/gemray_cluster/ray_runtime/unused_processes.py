"""Processes of Ray that a server's own Ray has no use for: each imports Ray for more than a second of CPU time.

Ray (2.60) starts its autoscaler's monitor, though there is nothing to scale, and a dashboard's server even without the
dashboard, for statistics of use, and waits until it has come up. There is no public setting for either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

from ray._private import parameter, services

logger = logging.getLogger(__name__)

_NO_MONITOR = "no_monitor"
"""A parameter of Ray's own, and a flag of ``ray start``."""


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """A Ray that starts in the block has neither; a version of Ray that starts them in another way has both."""
    params: Any = getattr(parameter, "RayParams", None)
    start_dashboard: Any = getattr(services, "start_api_server", None)
    if params is None or start_dashboard is None or _NO_MONITOR not in signature(params).parameters:
        logger.debug("this version of Ray starts its processes in a way unknown here: all of them are started")
        yield
        return
    vars(parameter)["RayParams"] = partial(params, **{_NO_MONITOR: True})
    vars(services)["start_api_server"] = _no_dashboard
    try:
        yield
    finally:
        vars(parameter)["RayParams"] = params
        vars(services)["start_api_server"] = start_dashboard


def _no_dashboard(*_args: Any, **_kwargs: Any) -> tuple[None, None]:
    """Neither an address nor a process, as where Ray could not start it."""
    return None, None
