"""`gemray-client`: the commands that ask a running server, without what serves one."""

from __future__ import annotations

import sys

from gemray.cli.run import Commands, run


def main() -> None:
    """Run a command of `gemray-client`."""
    run(_commands)


def _commands() -> Commands:
    try:
        import typer
    except ImportError:
        sys.exit("error: the commands need more packages: pip install 'gemray-client[cli]'")

    from gemray.cli.chat import chat
    from gemray.cli.exit_codes import exit_code_of
    from gemray.cli.generate import generate
    from gemray.cli.help_texts import with_whole_paragraphs
    from gemray.cli.info import info
    from gemray.cli.openai import openai
    from gemray.cli.verify import verify

    app = typer.Typer(
        name="gemray-client",
        help="Ask a gemray server.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    for command in (generate, chat, info, verify, openai):
        app.command(help=with_whole_paragraphs(command))(command)
    return Commands(app, exit_code_of)
