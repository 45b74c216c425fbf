"""Patterns of JSON schemas as expressions of whole texts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_cluster.text.call_schema.formats import FORMATS
from gemray_cluster.text.call_schema.pattern import UnknownPattern, in_slashes, whole_text_pattern
from gemray_cluster.text.call_schema.texts import Texts

TEXTS = Texts()


def is_met(pattern: str, text: str) -> bool:
    return TEXTS.matches(whole_text_pattern(pattern), text)


@pytest.mark.parametrize(
    ("pattern", "met", "unmet"),
    [
        ("b", ["b", "abc", "\nb\n"], ["", "a"]),
        ("^a", ["a", "ab"], ["ba"]),
        ("a$", ["a", "ba"], ["ab"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("^(?:a|b)$", ["a", "b"], ["ab", ""]),
        ("(^a$)|(^(b|^c)d$)", ["a", "bd", "cd"], ["xa", "xbd", "d"]),
        ("^$", [""], ["a"]),
        ("", ["", "anything"], []),
        (r"^\d+$", ["042"], ["٣", "4a"]),
        (r"^\w\W$", ["a!", "_漢"], ["ab", "漢!"]),
        (r"^\s\S$", [" a", "\u00a0a", "\u3000a"], ["  ", "ab"]),
        (r"^[\d\-x]$", ["1", "-", "x"], ["a"]),
        (r"^[^\D5]$", ["4"], ["5", "a"]),
        (r"^[\]\\^-]$", ["]", "\\", "^", "-"], ["a"]),
        (r"^[a-]$", ["a", "-"], ["b"]),
        ("^.$", ["a", "漢", "👩"], ["\n", "\u2028", "ab"]),
        (r"^\u00e9\xe9\u{1f600}\ud83d\ude00$", ["éé😀😀"], ["é"]),
        (r"^\t\n\cA\0\/\.\-$", ["\t\n\x01\x00/.-"], ["/"]),
        (r"^\p{Lu}+$", ["ÄB"], ["a"]),
        ("^a{2}b{1,}c{0,1}d{x$", ["aabd{x", "aabbcd{x"], ["abd{x"]),
        ("^a+?b*?c??$", ["a", "aabc"], ["b"]),
        ("^(?<year>[0-9]{4})/$", ["2024/"], ["2024"]),
        ("^&&--~~#[&&]$", ["&&--~~#&"], ["&&"]),
        ("^[]$|^[^]{2}$", ["ab", "\n\n"], ["", "a"]),
    ],
)
def test_texts_of_a_pattern(pattern: str, met: list[str], unmet: list[str]) -> None:
    assert [text for text in met if not is_met(pattern, text)] == []
    assert [text for text in unmet if is_met(pattern, text)] == []


@settings(max_examples=150)
@given(
    pattern=st.text(alphabet="ab^$|()[]*+?.{}1,-\\", max_size=8),
    text=st.text(alphabet="ab1-^\n{", max_size=4),
)
def test_a_pattern_is_read_or_refused_and_means_what_it_means_elsewhere(pattern: str, text: str) -> None:
    try:
        expression = whole_text_pattern(pattern)
    except UnknownPattern:
        return
    if TEXTS.fault_of(in_slashes(expression)) is not None:
        return
    try:
        elsewhere = re.compile(pattern.replace("$", r"\Z"))
    except re.error:
        return  # Python reads some braces and brackets otherwise
    if any(mark in pattern for mark in ("[]", "[^]", "{,", "\\", "++", "*+", "?+", "}+", "[^")):
        return  # what the two languages read differently; `.` and line ends, too
    if "." in pattern and "\n" in text:
        return
    assert TEXTS.matches(expression, text) == (elsewhere.search(text) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
     "(?=a)", "(?!a)", "(?<=a)b", "(?i)a",
     r"\bword", r"(a)\1", r"\k<a>", r"\Z", "a^b", "a$b", "(^a)*", "^*", "(a", "a)",
     "a?" * 1025, "[a", "*a", "a**", "a{3,2}", "[b-a]", r"[\d-z]", "\\", "(" * 70 + "a" + ")" * 70,
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(pattern: str) -> None:
    with pytest.raises(UnknownPattern):
        whole_text_pattern(pattern)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("date", ["2024-02-29", "1999-12-31", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-04-31", "24-1-1"]),
        ("time", ["23:59:59Z", "00:00:00.5+02:00"], ["24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-01-02T03:04:05Z"], ["2024-01-02 03:04:05Z"]),
        ("duration", ["P1D", "PT2H30M", "P1Y2M3DT4H", "P3W"], ["P", "PT", "1D"]),
        ("email", ["a.b+c@example.org"], ["a@b", "@example.org", "a b@example.org"]),
        ("hostname", ["example.org", "a-b"], ["-a", "a-", "a..b"]),
        ("ipv4", ["0.0.0.0", "255.1.20.3"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
        ("ipv6", ["::", "::1", "1::", "2001:db8::ff:1", "1:2:3:4:5:6:7:8"], ["1:2:3", "1::2::3", ":::"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        ("uri", ["https://example.org:80/a%20b?q=1#f", "urn://x"], ["example.org", "http://a b"]),
    ],
)
def test_texts_of_a_format(name: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not TEXTS.matches(FORMATS[name], text)] == []
    assert [text for text in wrong if TEXTS.matches(FORMATS[name], text)] == []
