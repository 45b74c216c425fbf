"""The commands of `gemray`. Each is a file; heavy imports happen inside commands, so that --help is quick."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from gemray.cli.chat import chat
from gemray.cli.generate import generate
from gemray.cli.help_texts import with_whole_paragraphs
from gemray.cli.info import info
from gemray.cli.openai import openai
from gemray.cli.verify import verify
from gemray_cluster.cli.bench import bench
from gemray_cluster.cli.check import check
from gemray_cluster.cli.demo import demo
from gemray_cluster.cli.drain import drain
from gemray_cluster.cli.serve import serve


def show_version(wanted: bool) -> None:
    """Print the installed version, if that was asked for, and exit."""
    if wanted:
        print(f"gemray {version('gemray')}")
        raise typer.Exit


app = typer.Typer(
    name="gemray",
    help="Serve Gemma 4 on a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print gemray's version and exit.")
    ] = False,
) -> None:
    del version


for command in (serve, drain, check, generate, chat, info, verify, openai, bench, demo):
    app.command(help=with_whole_paragraphs(command))(command)
