"""`gemray chat` on a terminal: line editing, history, turns of several lines, thoughts apart from answers."""

from __future__ import annotations

import asyncio
import os
import pty
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import pytest_asyncio

from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.calls import thought_ids
from support.cluster.command import GEMRAY
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

UP, BACKSPACE, ALT_ENTER, ENTER, INTERRUPT, END = "\x1b[A", "\x7f", "\x1b\r", "\r", "\x03", "\x04"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
EDITOR_READS = "\x1b[?2004h"
"""Pasted text is to come in brackets."""


@dataclass
class Terminal:
    """The end of a pseudo-terminal at which a person sits."""

    descriptor: int
    shown: str = ""
    _reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self.descriptor, 4096):
                self.shown += data.decode(errors="replace")
        except OSError:  # the other end is closed
            return

    def has_asked(self, times: int) -> bool:
        """Whether the editor has begun so many lines: before it does, keys are the terminal's."""
        return self.shown.count(EDITOR_READS) >= times

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    async with serving(tokenizer, FakeGang()) as running:
        yield running


async def test_a_conversation(served: Serving, tokenizer: ChatTokenizer) -> None:
    served.gang.script = Script([*thought_ids(tokenizer, "hush"), *tokenizer.encode("Hello")[1:], 106])
    mine, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *GEMRAY, "chat", "--address", served.server.address,
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
    )  # fmt: skip
    os.close(theirs)
    terminal = Terminal(mine)
    try:
        typed = [
            f"Onf{BACKSPACE}e{ENTER}",
            f"{UP}{ENTER}",
            f"dropped{INTERRUPT}",
            f"two{ALT_ENTER}lines{ENTER}",
            END,
        ]
        for times, keys in enumerate(typed, start=1):
            await eventually(partial(terminal.has_asked, times), HANG_S)
            terminal.type(keys)
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0, terminal.shown
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(mine)
    turns: list[dict[str, str]] = []
    for said, submit in zip(["One", "One", "two\nlines"], served.gang.submitted, strict=True):
        turns.append({"role": "user", "content": said})
        assert submit.prompt_ids == tokenizer.encode_chat(turns)
        turns.append({"role": "assistant", "content": "Hello"})
    assert f"{DIM}hush{PLAIN}Hello" in terminal.shown
