"""What llguidance says of a grammar that it can't take, in words for the client."""

from __future__ import annotations

import re

_MAX_REASON_CHARS = 300
_SAID_OTHERWISE = (
    (
        r"^oneOf constraints are not supported\b.*",
        "oneOf whose alternatives may hold at once; anyOf takes them, or types or required constants that differ",
    ),
    (r"^Unsatisfiable schema: Regex is empty\b.*", "Unsatisfiable schema: no string has its pattern and its length"),
    (r"^NoExtensionBias\b.*", "no text meets it"),
    (r"^Unimplemented keys: \[(.*)\]", r"\1 can't be held"),
    (
        r"^Unknown format: (.*)",
        r"format \1 is not known, as date, time, date-time, duration, email, hostname, ipv4, ipv6, uuid and uri are",
    ),
    (r"^lexer precomputation failed\b.*", "its expressions take too much work together: fewer or smaller ones"),
    (
        r"^panic: assertion failed: grammar\.symbols\.len\(\).*",
        "its rules have more than about 65,000 symbols: fewer or shorter ones",
    ),
    (r"^panic: .*", "the compiler of grammars gives up on it: fewer or simpler rules"),
    (r"\s*<non-verbose/>", ""),
)
"""Words for users of llguidance's own interface, or of its insides."""


def first_line(message: str) -> str:
    """What llguidance says, without the state that it may dump behind it."""
    kept = [line.strip() for line in message.split("\n<state>", maxsplit=1)[0].splitlines() if line.strip(" ^")]
    reason = re.sub(r"\s+", " ", " ".join(kept))
    for said, better in _SAID_OTHERWISE:
        reason = re.sub(said, better, reason)
    return reason[:_MAX_REASON_CHARS]
