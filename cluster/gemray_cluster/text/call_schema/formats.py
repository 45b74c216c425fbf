"""Texts of the formats that a JSON schema may ask of a string, as expressions of whole texts."""

from __future__ import annotations

from types import MappingProxyType

_YEARS = "[0-9]{4}"
_LEAP_YEARS = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEARS}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEARS}-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
_ZONE = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME_UNITS = "(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DATE_UNITS = "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_WORD = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_WORD}:){{7}}{_WORD}",
        *(f"(?:{_WORD}:){{{n}}}(?::{_WORD}){{1,{7 - n}}}" for n in range(1, 7)),
        f":(?::{_WORD}){{1,7}}",
        f"(?:{_WORD}:){{1,7}}:",
        "::",
    ]
)
_HEX = "[0-9A-Fa-f]"
_IN_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}"

FORMATS = MappingProxyType(
    {
        "date": _DATE,
        "time": _CLOCK + _ZONE,
        "date-time": f"{_DATE}T{_CLOCK}{_ZONE}",
        "duration": f"P(?:[0-9]{{1,9}}W|{_DATE_UNITS}(?:T{_TIME_UNITS})?|T{_TIME_UNITS})",
        "email": rf"[A-Za-z0-9_%+-]{{1,32}}(?:\.[A-Za-z0-9_%+-]{{1,16}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,2}}",
        "hostname": _HOST,
        "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
        "ipv6": f"(?:{_IPV6})",
        "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
        "uri": rf"[A-Za-z][A-Za-z0-9+.-]{{0,15}}:\u{{2f}}\u{{2f}}{_HOST}(?::[0-9]{{1,5}})?"
        rf"(?:\u{{2f}}(?:{_IN_PATH})*)*(?:\?(?:{_IN_PATH}|[\u{{2f}}?])*)?(?:\u{{23}}(?:{_IN_PATH}|[\u{{2f}}?])*)?",
    }
)
"""By name. Each has only texts of its format, not all of them."""

INTEGERS = MappingProxyType(
    {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
    | {f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)}
)
"""The least and the most of integers of so many bits, as OpenAPI names them."""

SAYS_NOTHING = frozenset({"password", "byte", "binary", "float", "double"})
"""Names of OpenAPI for people, or of how a value is kept; no value has to look otherwise for them."""
