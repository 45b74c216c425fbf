"""Flags of the commands that ask a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemray.cli.numbers import seconds

Server = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="The gemray server.")]
TokenFile = Annotated[str | None, typer.Option(metavar="PATH", help="File with the bearer token.")]
PlaintextToken = Annotated[
    bool, typer.Option("--plaintext-token", help="Send the token to another machine without TLS, readable on the way.")
]
Tls = Annotated[bool, typer.Option("--tls", help="TLS, with the authorities that this system trusts.")]
TlsCa = Annotated[str | None, typer.Option(metavar="PATH", help="TLS, with this authority, PEM.")]
TlsCert = Annotated[str | None, typer.Option(metavar="PATH", help="The client's certificate, PEM (mTLS).")]
TlsKey = Annotated[str | None, typer.Option(metavar="PATH", help="Its key, PEM.")]
Patience = Annotated[
    float | None,
    seconds(
        "patience",
        "How long to try a server that does not serve now (default: not at all before an answer, 120 within one)",
        excludes_least=False,
    ),
]

System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system turn.")]
Thinking = Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Let the model think first.")]
CheckpointHash = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-hash",
        metavar="HASH",
        help="The checkpoint that is to answer, as `gemray info` tells it; a server of another one refuses.",
    ),
]

DEFAULT_SERVER = "127.0.0.1:50051"


def read_text(flag: str, path: str, allowed_too: str = "") -> str:
    """What a file holds; raises InvalidOption, naming `flag` and what else it takes."""
    from gemray.client import InvalidOption

    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidOption(flag, path, f"{allowed_too}a readable text file ({why})") from error
