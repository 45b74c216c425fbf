"""Python's garbage collector while pytest collects, and afterwards.

Thousands of modules are imported then, and nothing of them is garbage: to look through them again and again takes a
fifth of the time, and half a second whenever a test asks for a collection.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile, and later none of what is there then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
