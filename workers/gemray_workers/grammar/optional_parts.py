"""How many parts of a regular expression a text may leave out: what its first step costs grows with their square.

Wherever a run of such parts is entered, each of them may come next, so llguidance writes out the run from each of them
on. 1,000 parts took 0.01 s of a core, 4,000 took 0.14 s and 13,000 took 1.4 s.
"""

from __future__ import annotations

import re

from gemray_workers.errors import InvalidField, Summary

MAX_OPTIONAL_PARTS = 1024
"""The most in one expression, or in one terminal of a Lark grammar with those that it is made of."""
ALLOWED = f"at most {MAX_OPTIONAL_PARTS}: write runs of them as one part with {{0,n}}"
_TOKEN = re.compile(
    r"""\\[pPuUx]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\(\?[a-zA-Z-]+\)
    |(?P<opening>\((?:\?(?:[a-zA-Z-]*:|P?<\w+>))?)
    |(?P<optional>[*?]\??|\{\s*(?:0+\s*)?(?:,[^}]*)?\}\??)
    |\+\??|\{[^}]*\}\??
    |(?P<bar>\|)|(?P<closing>\))|.""",
    re.VERBOSE | re.DOTALL,
)


def num_optional_parts(expression: str) -> int:
    """Parts with ``?``, ``*`` or a count from 0 on, and alternatives that are empty. Never fewer than there are."""
    count, may_be_empty = 0, True
    for token in _TOKEN.finditer(expression):
        kind = token.lastgroup
        count += kind == "optional" or (kind in ("bar", "closing") and may_be_empty)
        may_be_empty = kind in ("opening", "bar")
    return count + may_be_empty


def check_optional_parts(field: str, expression: str) -> None:
    """Raise InvalidField for an expression with more of them than are compiled."""
    count = num_optional_parts(expression)
    if count > MAX_OPTIONAL_PARTS:
        raise InvalidField(field, Summary(f"an expression of {count} parts that may be left out"), ALLOWED)
