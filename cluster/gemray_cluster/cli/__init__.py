"""The `gemray` command. Each command is a file; heavy imports happen inside commands, so that --help is quick."""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from gemray_cluster.cli.account import flush_or_forget, tell
from gemray_cluster.cli.bench import bench
from gemray_cluster.cli.chat import chat
from gemray_cluster.cli.check import check
from gemray_cluster.cli.demo import demo
from gemray_cluster.cli.exit_codes import FAILED, INTERRUPTED, exit_code_of
from gemray_cluster.cli.generate import generate
from gemray_cluster.cli.info import info
from gemray_cluster.cli.serve import serve
from gemray_workers.errors import GemrayError, InvalidField


def show_version(wanted: bool) -> None:
    """Print the installed version, if that was asked for, and exit."""
    if wanted:
        print(f"gemray {version('gemray')}")
        raise typer.Exit


app = typer.Typer(
    name="gemray",
    help="Serve Gemma 4 on a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print gemray's version and exit.")
    ] = False,
) -> None:
    del version


for command in (serve, check, generate, chat, info, bench, demo):
    app.command()(command)


def main() -> None:
    """Run a command; what gemray raises on purpose becomes one sentence and an exit code."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where it can be told, rather than at the interpreter's end
    except GemrayError as error:
        tell(f"error: {error}")
        sys.exit(exit_code_of(error))
    except UnicodeEncodeError as error:
        tell(f"error: the text is not valid UTF-8 ({error.reason})")
        sys.exit(exit_code_of(InvalidField("text", "bytes", "UTF-8")))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        if error.errno != errno.EPIPE:
            tell(f"error: the output cannot be written: {error.strerror}")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        flush_or_forget()
