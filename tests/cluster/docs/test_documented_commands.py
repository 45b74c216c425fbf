"""What documents call, gemray has: each `gemray COMMAND` and each flag behind it, each benchmark and each suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from gemray_cluster.cli.commands import app

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "benchmarks" / "README.md",
    ROOT / "helm" / "gemray" / "README.md",
    ROOT / "proto" / "README.md",
]
CALL = re.compile(r"(?:^ {4}(?:[A-Z_]+=\S+ )*|`|\| )gemray ([a-z]+)\b([^`\n#]*)", re.MULTILINE)


def flags_by_command() -> dict[str, set[str]]:
    commands = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - of a click group, whose type is typer's own
    return {
        name: {
            "--help",
            *(flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)),
        }
        for name, command in commands.items()
    }


def calls(text: str) -> list[tuple[str, list[str]]]:
    """Each command that a document calls, with the flags behind it; a backslash goes on in the next line."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [(command, re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)) for command, rest in CALL.findall(joined)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_calls_what_there_is(document: Path) -> None:
    known = flags_by_command()
    found = calls(document.read_text(encoding="utf-8"))
    assert [command for command, _ in found if command not in known] == []
    assert [(command, flag) for command, flags in found for flag in flags if flag not in known[command]] == []


def test_calls_are_found() -> None:
    readme = dict(calls((ROOT / "README.md").read_text(encoding="utf-8")))
    assert readme.keys() >= {"serve", "check", "generate", "chat", "info", "verify", "openai"}
    assert calls("    A=1 gemray bench --tp \\\n  2 --batch 1  # --not\nor `gemray info --json`, not --this") == [
        ("bench", ["--tp", "--batch"]),
        ("info", ["--json"]),
    ]


def test_the_benchmarks_that_are_called_are_there() -> None:
    home = ROOT / "benchmarks"
    text = (home / "README.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`(?:benchmarks/)?([\w/.-]+\.(?:py|toml))`|benchmarks/(suites/[\w-]+\.toml)", text))
    names = {name for pair in files for name in pair if name}
    assert len(names) > 15
    assert [name for name in names if not any((home / folder / name).is_file() for folder in (".", "suites"))] == []
    modules = re.findall(r"python\s+-m\s+([\w.]+)", text)
    assert len(modules) >= 5
    paths = [home / module.replace(".", "/") for module in modules]
    assert [str(p) for p in paths if not p.with_suffix(".py").is_file() and not (p / "__main__.py").is_file()] == []
