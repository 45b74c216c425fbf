"""What a request asks its answer to look like, as it travels."""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
GRAMMAR_KINDS: Final[tuple[GrammarKind, ...]] = get_args(GrammarKind)


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """A thought that may stand before the constrained part, or stands there already."""

    opens: int
    """Id that begins it."""
    closes: int
    """Id that ends it: the constrained part begins behind it."""
    is_open: bool = False
    """Whether the prompt ends inside it."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """Checked by the coordinator, which compiles it before a rank sees it."""

    kind: GrammarKind
    text: str
    """The schema, the expression or the Lark grammar; a JSON array of strings for ``choice``, none for
    ``json_object``."""
    thought: Thought | None = None
    """None: the first token belongs to the constrained part."""
    begins_at: int | None = None
    """Id that begins the constrained part, each time that the answer comes to it: before it and behind the part
    anything may be written. None: the answer is the constrained part."""
    asked_by: str | None = None
    """The field of the request that asks for it, if that is another than `structured`."""

    @property
    def field(self) -> str:
        """Where it stands in a request."""
        return self.asked_by or f"structured.{self.kind}"
