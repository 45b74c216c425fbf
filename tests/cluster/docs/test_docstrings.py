"""Docstrings begin with a noun or a verb: neither with "Of", whose noun is left to the reader, nor with "See"."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("cluster", "workers", "kernels", "proto", "tests", "benchmarks")
BARE = ("Of ", "See ")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone (docstrings, and those of attributes) or is a flag's help."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text), lineno=line)):
                yield line, text.strip()
            case ast.keyword(arg="help", value=ast.Constant(value=str(text), lineno=line)):
                yield line, text.strip()


def python_files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    files = python_files()
    assert len(files) > 400
    bare = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        for line, text in docstrings(path.read_text())
        if text.startswith(BARE)
    ]
    assert not bare, "\n".join(bare)


@pytest.mark.parametrize("text", ["Of the slot.", "See `Engine`."])
def test_a_bare_docstring_would_be_found(text: str) -> None:
    source = f'class A:\n    slot: int\n    """{text}"""\n\n\nflag(help="{text}")\n'
    assert [found for _, found in docstrings(source) if found.startswith(BARE)] == [text, text]
