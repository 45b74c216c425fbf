"""A conversation: its turns, and what its commands do to them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from gemray.v1 import generation_pb2 as pb

HELP = """\
/help           this
/reset          forget the conversation; the system turn stays
/system [TEXT]  set the system turn, or remove it; begins anew
/save FILE      write the conversation as JSON
/exit           leave, as Ctrl-D does
A line that ends in \\ goes on in the next one; on a terminal Alt-Enter begins a new line, too.
Ctrl-C ends an answer."""


@dataclass
class Conversation:
    """The turns so far, the system turn apart."""

    system: str | None = None
    turns: list[pb.ChatMessage] = field(default_factory=list)

    def request_messages(self, said: str) -> list[pb.ChatMessage]:
        """The messages of a request that says `said` now."""
        first = [] if self.system is None else [pb.ChatMessage(role="system", content=self.system)]
        return [*first, *self.turns, pb.ChatMessage(role="user", content=said)]

    def answered(self, said: str, answer: str) -> None:
        """Keep a turn that was answered; one that failed leaves no trace, so that it can be said again."""
        self.turns += [pb.ChatMessage(role="user", content=said), pb.ChatMessage(role="assistant", content=answer)]

    def command(self, line: str) -> str:
        """Do what a line that begins with / says, and tell what was done."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name == "/help":
            return HELP
        if name == "/reset":
            self.turns.clear()
            return "the conversation begins anew"
        if name == "/system":
            self.system = rest or None
            self.turns.clear()
            return "the system turn is set" if rest else "there is no system turn now"
        if name == "/save":
            return self._save(rest)
        return f"{name} is no command; /help lists them"

    def _save(self, path: str) -> str:
        if not path:
            return "/save needs the name of a file"
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        turns = [*first, *({"role": turn.role, "content": turn.content} for turn in self.turns)]
        try:
            Path(path).write_text(json.dumps(turns, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            return f"cannot write {path}: {error.strerror}"
        return f"{len(turns)} messages are in {path}"
