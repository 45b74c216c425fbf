"""Help texts show what they say: rich takes words in brackets, such as an extra of a package, for its markup."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.text import Text

from gemray_cluster.cli.commands import app


def help_texts() -> Iterator[tuple[str, str]]:
    group = typer.main.get_command(app)
    commands = getattr(group, "commands")  # noqa: B009 - of a click group, whose type is typer's own
    assert len(commands) > 5
    for name, command in commands.items():
        yield name, command.help or ""
        for parameter in command.params:
            yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""


def test_no_help_text_loses_what_is_in_brackets() -> None:
    texts = dict(help_texts())
    shown = {name: Text.from_markup(text).plain for name, text in texts.items()}
    assert shown == {name: text.replace("\\[", "[") for name, text in texts.items()}
    assert "gemray[tracing]" in shown["serve otlp_traces_endpoint"]


def test_help_texts_break_no_line_inside_a_paragraph() -> None:
    """Terminals have other widths than the source."""
    whole = {name: text for name, text in help_texts() if " " not in name}
    assert len(whole["bench"]) > 40
    assert [name for name, text in whole.items() if "\n" in text.replace("\n\n", "")] == []
