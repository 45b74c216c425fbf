"""Arguments of a tool call, from Gemma's notation to JSON, character by character.

Gemma writes `{city:<|"|>Paris<|"|>,days:[1,2],exact:true}`: keys are bare, and strings stand between two tokens of
their own, so that a string may hold any character. What comes out is JSON at every point: its beginning while the
arguments grow, a whole object once `is_complete`. Where a model departs from the notation the result is still JSON: a
bare word is a string, JSON's own quotes are understood, and a bracket that closes nothing is part of its word.
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum, auto

MAX_DEPTH = 64
"""Objects and lists inside each other; arguments nested deeper never become complete."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MOST_DIGITS = 400
"""Longer numbers are strings: no reader of JSON would keep their digits."""


class _At(Enum):
    """What the next character belongs to."""

    KEY = auto()
    VALUE = auto()
    STRING = auto()
    """Between two quote tokens."""
    JSON_STRING = auto()
    """Between two of JSON's quotes."""
    BEHIND_VALUE = auto()


class CallArguments:
    """The arguments of one call, from behind the brace that opens them."""

    def __init__(self) -> None:
        """Nothing is written yet, the brace neither."""
        self._open = ["}"]
        """What closes the objects and lists around the next character, innermost last."""
        self._has_items = [False]
        self._at = _At.KEY
        self._is_key = False
        """Whether the string that is open is a key."""
        self._word = ""
        """A key or a value that is not over yet."""
        self._is_escaped = False
        self._is_too_deep = False

    @property
    def is_complete(self) -> bool:
        """Whether the last brace has closed; nothing is written behind it."""
        return not self._open

    def write(self, text: str) -> str:
        """Take text of the call; returns the JSON that it adds."""
        if self._at is _At.STRING and not self._is_key:
            return _inside_quotes(text)
        return "".join(map(self._write_char, text))

    def quote(self) -> str:
        """Take a quote token; returns the JSON that it adds."""
        if self._is_over:
            return ""
        if self._at is _At.STRING:
            return self._end_string("" if self._is_key else '"')
        if self._at in (_At.KEY, _At.VALUE) and not self._word.strip():
            self._word, self._is_key, self._at = "", self._at is _At.KEY, _At.STRING
            return "" if self._is_key else self._separator() + '"'
        return self._write_char('"')

    @property
    def _is_over(self) -> bool:
        return self.is_complete or self._is_too_deep

    @property
    def _is_object(self) -> bool:
        return self._open[-1] == "}"

    def _write_char(self, char: str) -> str:
        if self._is_over:
            return ""
        match self._at:
            case _At.KEY:
                return self._in_key(char)
            case _At.VALUE:
                return self._in_value(char)
            case _At.JSON_STRING:
                return self._in_json_string(char)
            case _At.BEHIND_VALUE:
                return self._end_item() if char == "," else self._close() if char == self._open[-1] else ""
            case _At.STRING:
                self._word += char  # of a key
                return ""

    def _in_key(self, char: str) -> str:
        if char == ":":
            return self._end_key()
        if char in ",}":
            written = self._end_key() + '""' if self._word.strip() else ""  # a key without a value
            return written + (self._end_item() if char == "," else self._close())
        if char == '"' and not self._word.strip():
            self._word, self._is_key, self._at = "", True, _At.JSON_STRING
            return ""
        self._word += char
        return ""

    def _in_value(self, char: str) -> str:
        is_first = not self._word.strip()
        if char == "," or char == self._open[-1]:
            is_nothing = is_first and not self._is_object  # an empty list, or a comma too many
            written = "" if is_nothing else self._separator() + _scalar(self._word.strip())
            return written + (self._end_item() if char == "," else self._close())
        if is_first and char in "{[":
            return self._open_inner(char)
        if is_first and char == '"':
            self._word, self._is_key, self._at = "", False, _At.JSON_STRING
            return ""
        self._word += char
        return ""

    def _in_json_string(self, char: str) -> str:
        if char == '"' and not self._is_escaped:
            text = _of_json(self._word)
            if self._is_key:
                self._word = text
                return self._end_string("")
            return self._end_string(self._separator() + json.dumps(text, ensure_ascii=False))
        self._word += char
        self._is_escaped = char == "\\" and not self._is_escaped
        return ""

    def _end_string(self, written: str) -> str:
        """Go on behind a string; a key is written once its colon comes."""
        self._at = _At.KEY if self._is_key else _At.BEHIND_VALUE
        return written

    def _end_key(self) -> str:
        written = self._comma() + json.dumps(self._word.strip(), ensure_ascii=False) + ":"
        self._word, self._at = "", _At.VALUE
        return written

    def _end_item(self) -> str:
        self._word, self._at = "", _At.KEY if self._is_object else _At.VALUE
        return ""

    def _open_inner(self, bracket: str) -> str:
        separator = self._separator()
        if len(self._open) == MAX_DEPTH:
            self._is_too_deep = True
            return ""
        self._open.append("}" if bracket == "{" else "]")
        self._has_items.append(False)
        self._end_item()
        return separator + bracket

    def _close(self) -> str:
        self._has_items.pop()
        self._word, self._at = "", _At.BEHIND_VALUE
        return self._open.pop()

    def _separator(self) -> str:
        """What stands before a value: in an object its key has written it."""
        return "" if self._is_object else self._comma()

    def _comma(self) -> str:
        had_items, self._has_items[-1] = self._has_items[-1], True
        return "," if had_items else ""


def _scalar(word: str) -> str:
    if word in ("true", "false", "null"):
        return word
    if len(word) <= _MOST_DIGITS and _NUMBER.fullmatch(word) and math.isfinite(float(word)):
        return word
    return json.dumps(word, ensure_ascii=False)


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _of_json(raw: str) -> str:
    """What stands between two of JSON's quotes; as it stands where its escapes are none."""
    try:
        text = str(json.loads(f'"{raw}"', strict=False))
    except ValueError:
        return raw
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # halves of a pair are no text
