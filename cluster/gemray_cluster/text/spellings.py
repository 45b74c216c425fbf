"""One regular expression for many words that share their beginnings, as reserved tokens do by the thousand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby


def pattern_of(words: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the words, the longest that fits; matches nothing where there are none.

    Words branch at their first different character, so a place in a text costs what its own characters cost, not one
    comparison a word.
    """
    ordered = sorted(set(words))
    return re.compile(_branches(ordered) if ordered else "(?!)")


def _branches(words: list[str]) -> str:
    """A pattern of sorted, different words; an empty one comes first and makes the others optional."""
    optional, rest = words[0] == "", words[words[0] == "" :]
    if not rest:
        return ""
    branches = []
    for first, sharing in groupby(rest, key=lambda word: word[0]):
        branches.append(re.escape(first) + _branches([word[1:] for word in sharing]))
    joined = branches[0] if len(branches) == 1 and not optional else "(?:" + "|".join(branches) + ")"
    return joined + "?" if optional else joined
