"""What a user says in a chat: from a terminal with line editing and history, or from a pipe, line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

PROMPT, MORE = "> ", "| "


def said_lines() -> Iterator[str]:
    """One entry a turn, until the end of input. A line that ends in a backslash goes on in the next one."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    read = _terminal() if is_terminal else _pipe()
    while True:
        try:
            line = read(PROMPT)
            while line.endswith("\\"):
                line = line[:-1] + "\n" + read(MORE)
        except EOFError:
            return
        except KeyboardInterrupt:  # drops the line
            continue
        yield line


def _pipe() -> Callable[[str], str]:
    def read(_: str) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


def _terminal() -> Callable[[str], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(history=InMemoryHistory(), key_bindings=keys)
    return session.prompt
