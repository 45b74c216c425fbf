"""Fixtures of the tests that share one server over a fake gang; a folder's conftest.py imports them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang
from support.cluster.serving import Serving, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    """A server for all tests of a module."""
    async with serving(tokenizer, FakeGang()) as running:
        yield running


@pytest.fixture
def fresh_gang(served: Serving) -> None:
    """Let the gang of `served` know nothing of the tests before."""
    served.gang.begin_anew()
