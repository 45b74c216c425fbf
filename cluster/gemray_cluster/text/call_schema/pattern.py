"""`pattern` of a JSON schema, an expression of ECMA-262, as the expression of whole texts that a grammar takes.

A pattern may match anywhere in a text, and holds ^ and $ where it may not. A grammar's expressions know no anchors and
are of the whole text, so the text around a match is written out: `^ab` becomes `ab` and anything. Every mark that is
no letter or digit is written by its code, so that none has a meaning in one language alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemray_workers.grammar.optional_parts import MAX_OPTIONAL_PARTS, num_optional_parts

ANYTHING = "(?s:.*)"
_DIGITS, _WORD = "0-9", "A-Za-z0-9_"
_SPACE = r"\t-\r\u{20}\u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_NAMED = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_DOT = r"[^\n\r\u{2028}\u{2029}]"
_COUNTED = re.compile(r"\{(\d{1,6})(?:(,)(\d{1,6})?)?\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[\w=]{1,64}\}", re.ASCII)
_MAX_DEPTH = 64
_MAX_BRANCHES = 256


class UnknownPattern(ValueError):
    """A pattern that no grammar holds; the message says why."""


@dataclass(frozen=True)
class _Group:
    """Alternatives, each a sequence."""

    branches: tuple[tuple[_Item, ...], ...]

    @property
    def has_anchor(self) -> bool:
        """Whether ^ or $ is anywhere inside."""
        return any(item.has_anchor for branch in self.branches for item in branch)

    def text(self) -> str:
        return "(?:" + "|".join(_text(branch) for branch in self.branches) + ")"


@dataclass(frozen=True)
class _Item:
    """What stands in a sequence: one of text, anchor and group; and how often."""

    text: str = ""
    anchor: str = ""
    group: _Group | None = None
    times: str = ""

    @property
    def has_anchor(self) -> bool:
        return bool(self.anchor) or (self.group is not None and self.group.has_anchor)

    def written(self) -> str:
        if self.has_anchor and self.group is None:
            raise UnknownPattern(f"{self.anchor} elsewhere than at an end of the text")
        return (self.text if self.group is None else self.group.text()) + self.times


def whole_text_pattern(pattern: str) -> str:
    """The expression of all texts in which a pattern matches; raises UnknownPattern."""
    reader = _Reader(pattern)
    group = reader.alternatives(0)
    if not reader.is_over:
        raise UnknownPattern("a closing bracket without its opening one")
    branches = [whole for branch in group.branches for whole in _unfolded(branch)]
    expression = "|".join(_around(branch) for branch in branches)
    if (count := num_optional_parts(expression)) > MAX_OPTIONAL_PARTS:
        raise UnknownPattern(f"{count} parts that may be left out, where at most {MAX_OPTIONAL_PARTS} are compiled")
    return expression


def _around(branch: tuple[_Item, ...]) -> str:
    begins = ends = False
    while branch and branch[0].anchor == "^":
        begins, branch = True, branch[1:]
    while branch and branch[-1].anchor == "$":
        ends, branch = True, branch[:-1]
    return ("" if begins else ANYTHING) + _text(branch) + ("" if ends else ANYTHING)


def _unfolded(branch: tuple[_Item, ...]) -> list[tuple[_Item, ...]]:
    """The branch without groups that hold anchors: one branch for each of their alternatives."""
    for place, item in enumerate(branch):
        if item.group is None or not item.has_anchor:
            continue
        if item.times:
            raise UnknownPattern("^ or $ in a group that is repeated")
        whole = [
            unfolded
            for inner in item.group.branches
            for unfolded in _unfolded((*branch[:place], *inner, *branch[place + 1 :]))
        ]
        if len(whole) > _MAX_BRANCHES:
            raise UnknownPattern(f"more than {_MAX_BRANCHES} alternatives around ^ and $")
        return whole
    return [branch]


def _text(branch: tuple[_Item, ...]) -> str:
    return "".join(item.written() for item in branch)


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    @property
    def is_over(self) -> bool:
        return self._at == len(self._pattern)

    def alternatives(self, depth: int) -> _Group:
        """Up to a closing bracket or the end."""
        if depth > _MAX_DEPTH:
            raise UnknownPattern(f"groups of more than {_MAX_DEPTH} inside each other")
        branches = [self._sequence(depth)]
        while self._takes("|"):
            branches.append(self._sequence(depth))
        return _Group(tuple(branches))

    def _sequence(self, depth: int) -> tuple[_Item, ...]:
        items = []
        while not self.is_over and self._pattern[self._at] not in "|)":
            items.append(self._item(depth))
        return tuple(items)

    def _item(self, depth: int) -> _Item:
        char = self._next()
        if char in "^$":
            item = _Item(anchor=char)
        elif char == "(":
            item = _Item(group=self._group(depth))
        elif char == "[":
            item = _Item(text=self._class())
        elif char == ".":
            item = _Item(text=_DOT)
        elif char == "\\":
            item = _Item(text=self._escape())
        elif char in "*+?":
            raise UnknownPattern(f"{char} behind nothing that it could repeat")
        else:
            item = _Item(text=_code(ord(char)))
        times = self._times()
        if times and item.anchor:
            raise UnknownPattern(f"{item.anchor} that is repeated")
        return _Item(item.text, item.anchor, item.group, times)

    def _group(self, depth: int) -> _Group:
        if self._takes("?") and not self._takes(":"):
            name = re.compile(r"<[A-Za-z_]\w*>", re.ASCII).match(self._pattern, self._at)
            if name is None:
                raise UnknownPattern("lookaround or flags, (?...)")
            self._at = name.end()
        group = self.alternatives(depth + 1)
        if not self._takes(")"):
            raise UnknownPattern("an opening bracket without its closing one")
        return group

    def _times(self) -> str:
        counted = _COUNTED.match(self._pattern, self._at)
        if counted is not None:
            self._at = counted.end()
            least, comma, most = counted.groups()
            if most is not None and int(most) < int(least):
                raise UnknownPattern(f"{counted[0]}, which is out of order")
            times = f"{{{int(least)}{comma or ''}{'' if most is None else int(most)}}}"
        else:
            times = next((mark for mark in "*+?" if self._takes(mark)), "")
        if times:
            self._takes("?")  # as few as possible: of whole texts that says nothing
        return times

    def _escape(self) -> str:
        """What stands behind a backslash outside of a class."""
        char = self._peek()
        if char in "bB":
            raise UnknownPattern(f"\\{char}, a word's edge")
        if char.isdigit() and char != "0":
            raise UnknownPattern(f"\\{char}, a reference to a group")
        members = self._class_escape()
        is_class = members.startswith("[") or members in _CLASSES.values()
        return f"[{members}]" if is_class else members

    def _class_escape(self) -> str:
        """What stands behind a backslash, as members of a class."""
        if (prop := _PROPERTY.match(self._pattern, self._at)) is not None:
            self._at = prop.end()
            return "\\" + prop[0]
        if (code := _HEX.match(self._pattern, self._at)) is not None:
            self._at = code.end()
            return _code(self._pair(int(next(filter(None, code.groups())), 16)))
        char = self._next()
        if char.lower() in _CLASSES:
            members = _CLASSES[char.lower()]
            return members if char.islower() else f"[^{members}]"
        if char in _NAMED:
            return _code(_NAMED[char])
        if char == "c" and self._peek().isalpha() and self._peek().isascii():
            return _code(ord(self._next()) % 32)
        if char.isalnum():
            raise UnknownPattern(f"\\{char}, which JSON Schema's expressions do not know")
        return _code(ord(char))

    def _pair(self, code: int) -> int:
        """The character of two halves, if this is the first of them."""
        second = re.compile(r"\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE).match(self._pattern, self._at)
        if 0xD800 <= code < 0xDC00 and second is not None:
            self._at = second.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(second[1], 16) - 0xDC00
        return code

    def _class(self) -> str:
        is_negated = self._takes("^")
        members = ""
        while not self._takes("]"):
            first = self._member()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member()
                if not (_is_code(first) and _is_code(last)):
                    raise UnknownPattern("a range that does not go from one character to another")
                if _of_code(last) < _of_code(first):
                    raise UnknownPattern("a range that is out of order")
                first = f"{first}-{last}"
            members += first
        if not members:
            return r"[\u{0}-\u{10ffff}]" if is_negated else r"[^\u{0}-\u{10ffff}]"
        return f"[{'^' if is_negated else ''}{members}]"

    def _member(self) -> str:
        char = self._next()
        if char != "\\":
            return _code(ord(char))
        if self._takes("b"):
            return _code(8)
        return self._class_escape()

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        if self.is_over:
            raise UnknownPattern("an end in the middle of a class or an escape")
        self._at += 1
        return self._pattern[self._at - 1]

    def _takes(self, mark: str) -> bool:
        is_there = self._peek() == mark
        self._at += is_there
        return is_there


def _code(code: int) -> str:
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise UnknownPattern("a code that is no character")
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:x}}}"


def _is_code(member: str) -> bool:
    return len(member) == 1 or re.fullmatch(r"\\u\{[0-9a-f]+\}", member) is not None


def _of_code(member: str) -> int:
    return ord(member) if len(member) == 1 else int(member[3:-1], 16)


def literal_pattern(text: str) -> str:
    """The expression of one text."""
    return "".join(_code(ord(char)) for char in text)


def in_slashes(expression: str) -> str:
    """As Lark writes it; expressions spell their own slashes by code."""
    return f"/{expression or '(?:)'}/"  # two slashes begin a comment
