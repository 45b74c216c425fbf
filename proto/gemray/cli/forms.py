"""The form that `generate` asks of an answer, from flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gemray.cli.options import read_text

if TYPE_CHECKING:
    from gemray.v1 import generation_pb2 as pb

Schema = Annotated[
    str | None,
    typer.Option(metavar="FILE|JSON", help="The answer is JSON of this schema; {} takes any JSON.", show_default=False),
]
Regex = Annotated[str | None, typer.Option(metavar="REGEX", help="The whole answer matches this.")]
Choice = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="The answer is one of these; repeat it.")]
Grammar = Annotated[str | None, typer.Option(metavar="FILE", help="The answer follows this Lark grammar.")]
Tools = Annotated[
    str | None, typer.Option(metavar="FILE|JSON", help="Functions that the model may call, a JSON array.")
]

ToolChoice = Annotated[
    str | None,
    typer.Option(
        "--tool-choice", metavar="NAME", help="Which of --tools: auto (the default), none, required, or one's name."
    ),
]


def read_form(
    *, schema: str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> pb.Structured | None:
    """The form that was asked for; raises InvalidOption for two of them."""
    from gemray.client import InvalidOption
    from gemray.v1 import generation_pb2 as pb

    given = {"schema": schema, "regex": regex, "choice": choice or None, "grammar": grammar}
    asked = [flag for flag, value in given.items() if value is not None]
    if not asked:
        return None
    if len(asked) > 1:
        raise InvalidOption(asked[1], given[asked[1]], f"unset with --{asked[0]}: an answer has one form")
    if schema is not None:
        return pb.Structured(json_schema=read_json("schema", schema))
    if regex is not None:
        return pb.Structured(regex=regex)
    if grammar is not None:
        return pb.Structured(lark=_read_text("grammar", grammar))
    return pb.Structured(choice=pb.Choices(texts=choice))


def tool_choice_of(given: str) -> pb.ToolChoice:
    """A mode by its name, else the function of that name."""
    from gemray.v1 import generation_pb2 as pb

    if given in ("auto", "none", "required"):
        return pb.ToolChoice(mode=f"TOOL_CHOICE_MODE_{given.upper()}")
    return pb.ToolChoice(function=given)


def read_json(flag: str, given: str) -> str:
    """JSON as it stands, or what the file of that name holds; raises InvalidOption."""
    return given if given.lstrip()[:1] in ("{", "[") else _read_text(flag, given, "JSON that begins with { or [, or ")


def _read_text(flag: str, path: str, allowed_too: str = "") -> str:
    text = read_text(flag, path, allowed_too)
    if not text.strip():
        from gemray.client import InvalidOption

        raise InvalidOption(flag, path, f"{allowed_too}a text file that is not blank")
    return text
