"""A pytest hook that keeps failures printable on Python 3.11.

pytest parses the source of what failed. If garbage is collected meanwhile, an asyncio task may end whose error nobody
has read; its traceback is logged, for which Python parses, too, and the outer parse ends in "SystemError: AST
constructor recursion depth mismatch" (python/cpython#106905). pytest takes that for an error of its own and stops.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect no garbage while a failure is written down."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was_enabled:
            gc.enable()
