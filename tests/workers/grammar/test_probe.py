"""Whether parts of grammars have texts."""

from __future__ import annotations

import pytest

from gemray_workers.grammar.probe import NO_TEXT, why_no_text


@pytest.mark.parametrize(
    ("terminal", "reason"),
    [
        ("/a+/", None),
        ("/a*/ & /(?s:.{0,2})/", None),
        ('""', None),
        ("/(?s:.{70000})/", None),
        ("/a/ & /b/", NO_TEXT),
        ("/a*/ & /b+/", NO_TEXT),
        ("/a+/ & ~/a*/", NO_TEXT),
        (r"/\p{Foo}/", "property not found"),
    ],
)
def test_why_there_is_no_text(terminal: str, reason: str | None) -> None:
    said = why_no_text(f"start: PART\nPART: {terminal}\n")
    assert (said is None) == (reason is None)
    assert (reason or "") in (said or "")
