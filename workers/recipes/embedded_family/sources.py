"""The corpus: what an ordinary install of named PyPI and Debian packages brings, under licences that allow it.

`collect(site, debian)` yields documents. `site` is a folder filled by `pip install --no-deps --target`, `debian` one
filled by `dpkg -x`; README.md names the packages. Only files of the licences listed in DATA_CARD.md are read.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import office_help

# Packages whose whole source is BSD, MIT, Apache-2.0, PSF or public domain.
CODE_PACKAGES = (
    "django", "networkx", "sqlalchemy", "babel", "wagtail", "flask", "werkzeug", "jinja2", "click", "rich",
    "requests", "attr", "tornado", "sphinx", "aiohttp", "trio", "setuptools", "boltons", "more_itertools", "toolz",
)  # fmt: skip
_SKIP = ("test", "_vendor", "locale", "migrations", "idlelib", "lib2to3", "encodings", "site-packages", "pydoc_data")
_BOOK = re.compile(r"^(.*?) (\d+):(\d+): (.*)$")


@dataclass(frozen=True)
class Document:
    """One text of one kind (code, prose or greek); `key` decides train or held-out."""

    kind: str
    key: str
    text: str


def python_files(root: Path) -> Iterator[Path]:
    """Source files worth learning from: no tests, vendored copies or data tables."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not any(word in part for part in parts for word in _SKIP) and 400 < path.stat().st_size < 120_000:
            yield path


def code(site: Path) -> Iterator[Document]:
    """The standard library and the packages above, one document a module."""
    roots = [("stdlib", Path(sysconfig.get_paths()["stdlib"]))] + [(name, site / name) for name in CODE_PACKAGES]
    for name, root in roots:
        for path in python_files(root):
            text = path.read_text("utf-8", errors="ignore").replace("\t", "    ")
            if max(map(len, text.splitlines()), default=0) < 400:
                yield Document("code", f"{name}/{path.relative_to(root)}", text)


def python_docs(debian: Path) -> Iterator[Document]:
    """Python's manual (PSF licence and Zero-Clause BSD), reStructuredText mark-up thinned to plain text."""
    root = debian / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(root.rglob("*.rst.txt")):
        name = str(path.relative_to(root))
        if "changelog" not in name:
            yield Document("prose", f"python-doc/{name}", plain(path.read_text("utf-8", errors="ignore")))


def plain(text: str) -> str:
    """Drop roles, labels and rulings that carry no prose."""
    text = re.sub(r":[a-z:]+:`~?!?([^`<]+?)(?: <[^>]*>)?`", r"\1", text)
    text = re.sub(r"``([^`]*)``", r"\1", text)
    text = re.sub(
        r"(?m)^(?:\.\. _.*|\.\. (?:index|highlight|currentmodule|sectionauthor|moduleauthor)::.*)\n", "", text
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def web_bible(debian: Path) -> Iterator[Document]:
    """The World English Bible (public domain), one document a chapter, read through SWORD's own reader."""
    env = {"LD_LIBRARY_PATH": str(debian / "usr/lib/x86_64-linux-gnu"), "SWORD_PATH": str(debian / "usr/share/sword")}
    out = subprocess.run(
        [str(debian / "usr/bin/diatheke"), "-b", "engWEB2015eb", "-f", "OSIS", "-k", "Genesis 1:1 - Revelation 22:21"],
        env=env, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    chapters: dict[str, list[str]] = {}
    for line in out.splitlines():
        match = _BOOK.match(line.strip())
        if match and (verse := unmarked(match[4])):
            chapters.setdefault(f"{match[1]} {match[2]}", []).append(f"{match[3]} {verse}")
    for name, verses in chapters.items():
        yield Document("prose", f"web/{name}", f"{name}\n\n" + "\n".join(verses) + "\n")


def unmarked(osis: str) -> str:
    """A verse without its tags; the module marks words one by one and drops some spaces between the marks."""
    text = re.sub(r"(?<=[\w’])<w>|</w>(?=[\w<]*<w>)|</w>(?=\w)", " ", osis.replace("</w><w>", " "))
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", text)).strip()


def greek_testament(site: Path) -> Iterator[Document]:
    """The SBL Greek New Testament (CC BY 4.0), the text column only, one document a chapter."""
    chapters: dict[str, dict[str, list[str]]] = {}
    for path in sorted((site / "pysblgnt/sblgnt").glob("*-morphgnt.txt")):
        for line in path.read_text("utf-8").splitlines():
            fields = line.split()
            reference, word = fields[0], fields[4]
            book = path.name.split("-")[1]
            chapter = chapters.setdefault(f"{book} {int(reference[2:4])}", {})
            chapter.setdefault(str(int(reference[4:6])), []).append(word.strip("⸀⸁⸂⸃⸄⸅"))
    for name, verses in chapters.items():
        body = "\n".join(f"{number} {' '.join(words)}" for number, words in verses.items())
        yield Document("greek", f"sblgnt/{name}", f"{name}\n\n{body}\n")


def greek_messages(site: Path) -> list[tuple[str, str]]:
    """(English, Greek) interface messages of BSD-licensed packages, from their gettext catalogues."""
    import polib

    pairs: dict[str, str] = {}
    catalogues = [p for p in sorted(site.rglob("*.po")) if "/el/LC_MESSAGES" in str(p)]
    for path in catalogues:
        for entry in polib.pofile(str(path)):
            if entry.msgstr and not entry.fuzzy and not entry.obsolete and len(entry.msgid) < 300:
                pairs.setdefault(entry.msgid.strip(), entry.msgstr.strip())
    return sorted(pairs.items())


def collect(site: Path, debian: Path) -> Iterator[Document]:
    """Every raw document; chat turns are made from these in `turns`."""
    yield from code(site)
    yield from python_docs(debian)
    yield from web_bible(debian)
    yield from greek_testament(site)
    for kind, language in (("prose", "en-US"), ("greek", "el")):
        for name, text in office_help.pages(debian, language):
            yield Document(kind, f"office-help/{language}/{name}", text)
    pairs = greek_messages(site)
    for start in range(0, len(pairs), 12):
        body = "\n".join(f"{english}\n{greek}\n" for english, greek in pairs[start : start + 12])
        yield Document("greek", f"messages/{start}", body)
