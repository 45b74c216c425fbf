"""Lists with commas between: members of objects and items of arrays, in their order, some of which may be left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemray_cluster.text.call_schema.rules import Rules
from gemray_cluster.text.call_schema.shape import Counts


@dataclass(frozen=True)
class Entry:
    """One that may come at its place."""

    rule: str | None
    """None: it may not come."""
    is_required: bool = False


class Members:
    """The rules of one list. Counting goes on only as far as a bound needs it."""

    def __init__(
        self, rules: Rules, entries: Sequence[Entry], more: str | None, size: Counts, *, may_repeat: bool = False
    ) -> None:
        """`more` is the rule of what may follow the entries any number of times; None: nothing may. With `may_repeat`
        they may be the same one, so that they count once towards the least."""
        self._rules = rules
        self._entries = entries
        self._more = more
        self._size = size
        self._may_repeat = may_repeat
        needs_all = size.most is not None and (more is not None or size.most < len(entries))
        self._cap = len(entries) + 1 if needs_all else max(1, size.least)
        self._known: dict[tuple[int, int], str | None] = {}

    def expression(self) -> str | None:
        """The list, without what closes it in; None where there is none."""
        # From the end, so that no list is too long for the stack.
        for place in range(len(self._entries), -1, -1):
            for count in range(min(place, self._cap) + 1):
                self._known[place, count] = self._from(place, count)
        return self._known[0, 0]

    def _from(self, place: int, count: int) -> str | None:
        """From an entry on, where `count` have come; "" is the empty text."""
        if place == len(self._entries):
            return self._behind_entries(count)
        entry, after = self._entries[place], min(count + 1, self._cap)
        may_come = entry.rule is not None and (self._size.most is None or count < self._size.most)
        behind = self._known[place + 1, after] if may_come else None
        comma = '"," ' if count else ""
        taken = None if behind is None else f"{comma}{entry.rule} {behind}".strip()
        skipped = None if entry.is_required else self._known[place + 1, count]
        if taken is None or skipped is None:
            return taken if skipped is None else skipped
        if after == count:  # the same comes behind it, whether it is there or not
            return self._rules.add(f'("," {entry.rule})? {behind}'.strip())
        return f"({taken})?" if skipped == "" else self._rules.add(f"{taken} | {skipped}")

    def _behind_entries(self, count: int) -> str | None:
        least = max(0, self._size.least - count)
        most = None if self._size.most is None else self._size.most - count
        if self._more is None or most == 0:
            return "" if least == 0 and (most is None or most >= 0) else None
        if most is not None and (most < least or most < 0):
            return None
        if self._may_repeat and least > 1:
            return None
        if count > 0:
            return _times(f'("," {self._more})', least, most)
        rest = _times(f'("," {self._more})', max(0, least - 1), None if most is None else most - 1)
        whole = f"{self._more} {rest}".strip()
        return whole if least else f"({whole})?"


def items_expression(rules: Rules, prefix: Sequence[str], more: str | None, length: Counts) -> str | None:
    """Items of which none comes where one before it is missing, without brackets; None where there are none.

    Args:
        rules: get what is needed.
        prefix: rules of the first items, one each.
        more: the rule of all further items; None: there are none.
        length: of the whole; its least is at most its most.
    """
    if not prefix:
        return Members(rules, [], more, length).expression()
    least = max(0, length.least - len(prefix))
    if more is None and least:
        return None
    most = None if length.most is None else max(0, length.most - len(prefix))
    behind = "" if more is None else _times(f'("," {more})', least, most)
    for index in range(len(prefix) - 1, -1, -1):
        if length.most is not None and index >= length.most:
            behind = ""
            continue
        comma = '"," ' if index else ""
        item = rules.add(f"{comma}{prefix[index]} {behind}".strip())
        behind = item if index < length.least else f"({item})?"
    return behind


def _times(part: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    if least == 0 and most is None:
        return f"{part}*"
    return f"{part}{{{least},{'' if most is None else most}}}"
