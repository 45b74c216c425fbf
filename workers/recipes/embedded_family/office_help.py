"""LibreOffice's help (MPL-2.0) as plain text: English prose, and the second script in quantity.

Its pages repeat whole paragraphs of one another. A paragraph is kept in the first page that has it alone, so that
what is held out was not also read in training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_BLOCKS = {"h1", "h2", "h3", "h4", "h5", "h6", "p", "pre", "li", "td", "th"}
_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_SHORT = 40
"""A paragraph below this many characters may be repeated: headings, names of buttons."""


class _Page(HTMLParser):
    """The blocks of a page's own area as (is a heading, text)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[bool, str]] = []
        self._inside = False
        self._heading = False
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        name = dict(attrs).get("id")
        if name == "DisplayArea":
            self._inside = True
        elif name == "SearchFrame":
            self._end_block()
            self._inside = False
        if tag in _BLOCKS:
            self._end_block()
            self._heading = tag in _HEADINGS
        elif tag == "br":
            self._text.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._end_block()

    def handle_data(self, data: str) -> None:
        if self._inside:
            self._text.append(data)

    def _end_block(self) -> None:
        lines = [re.sub(r"[ \t\xa0]+", " ", line).strip() for line in "".join(self._text).splitlines()]
        text = "\n".join(line for line in lines if line)
        if text and self._inside:
            self.blocks.append((self._heading, text))
        self._text, self._heading = [], False


def pages(debian: Path, language: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every page with something of its own, headings between empty lines."""
    root = debian / "usr/share/libreoffice/help" / language / "text"
    seen: set[str] = set()
    for path in sorted(root.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text("utf-8"))
        parts = []
        for heading, text in page.blocks:
            if len(text) >= _SHORT and text in seen:
                continue
            seen.add(text)
            parts.append(f"\n{text}\n\n" if heading else f"{text}\n")
        body = re.sub(r"\n{3,}", "\n\n", "".join(parts)).strip() + "\n"
        if len(body) > 300:
            yield str(path.relative_to(root)), body
