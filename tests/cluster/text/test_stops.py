"""Stop strings: the same cut for every way of chopping the text, nothing shown that belongs to one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_cluster.text.stops import StopMatcher

texts = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


def first_match(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By the definition: the match that is complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500)
@given(text=texts, stops=stop_lists, cuts=st.sets(st.integers(0, 30)))
def test_any_chopping_gives_the_first_match(text: str, stops: list[str], cuts: set[int]) -> None:
    borders = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert run(StopMatcher(stops), pieces) == first_match(text, stops)


@settings(max_examples=200)
@given(text=texts, stops=stop_lists)
def test_what_was_shown_is_never_taken_back(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    expected, _ = first_match(text, stops)
    for char in text:
        shown += matcher.push(char)
        assert expected.startswith(shown)
        if matcher.matched is not None:
            break


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, ("x", "ab")), (1, ("x", "ab")), (2, ("xaby", "ab"))])
def test_matches_before_min_tokens_are_passed_over(min_tokens: int, expected: tuple[str, str]) -> None:
    assert run(StopMatcher(["ab"], min_tokens=min_tokens), ["xab", "y", "ab"]) == expected


def test_a_match_may_begin_before_min_tokens_and_end_after() -> None:
    assert run(StopMatcher(["ab"], min_tokens=2), ["xa", "b"]) == ("x", "ab")


def test_overlapping_itself() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.push(piece) for piece in ("a", "a", "a", "b")] == ["", "", "a", ""]
    assert matcher.matched == "aab"


def test_without_stops_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""


# --- control tokens, here <a> and <b>: not shown, but a stop string may spell them -----------------------------------

tokens = st.lists(st.sampled_from(["a", "b", "c", "<", "<a>", "<b>"]), max_size=20)
parts_of_stops = st.lists(st.sampled_from(["a", "c", "<", "<a>"]), min_size=1, max_size=3)


def first_match_written_out(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """By the definition: strings with a control token are looked for in all, others in what is shown."""
    shown, everything = "", [("", True)]
    for piece in pieces:
        hidden = piece in ("<a>", "<b>")
        for char in piece:
            everything.append((char, not hidden))
            shown += "" if hidden else char
            text = "".join(c for c, _ in everything)
            matches = [stop for stop in stops if (text if "<a>" in stop else "" if hidden else shown).endswith(stop)]
            if matches:
                stop = max(matches, key=len)
                inside = everything[len(everything) - len(stop) :] if "<a>" in stop else [("", True)] * len(stop)
                return shown[: len(shown) - sum(is_shown for _, is_shown in inside)], stop
    return shown, None


@settings(max_examples=500)
@given(pieces=tokens, of_tokens=st.lists(parts_of_stops, min_size=1, max_size=3))
def test_control_tokens_are_written_out_for_the_stops_that_spell_them(
    pieces: list[str], of_tokens: list[list[str]]
) -> None:
    stops = ["".join(parts) for parts in of_tokens]
    matcher, shown = StopMatcher(stops, spells_control=lambda stop: "<a>" in stop), ""
    for piece in pieces:
        hidden = piece in ("<a>", "<b>")
        shown += matcher.push("" if hidden else piece, piece if hidden else "")
        if matcher.matched is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.matched) == first_match_written_out(pieces, stops)
