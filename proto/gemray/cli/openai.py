"""gemray openai: OpenAI's HTTP API over a running server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gemray.cli import numbers, options
from gemray.cli.connection import quiet_grpc
from gemray.cli.terminal import has_terminal

if TYPE_CHECKING:
    from gemray.openai.serve import Listening

MIB = 1 << 20
FIRST_S = 10.0
"""Less than a program's own patience: clients of HTTP try again themselves."""

Host = Annotated[str, typer.Option(metavar="HOST", help="Where to listen.")]
Port = Annotated[int, numbers.integer("port", "0 takes a free one.", least=0, most=65535)]


def openai(
    *,
    address: options.Server = options.DEFAULT_SERVER,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    http_tls_cert_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="Serve HTTPS with this certificate, PEM.")
    ] = None,
    http_tls_key_file: Annotated[str | None, typer.Option(metavar="PATH", help="Its key, PEM.")] = None,
    timeout: Annotated[float | None, numbers.seconds("timeout", "Most time of one answer.")] = None,
    max_message_mib: Annotated[
        int, numbers.integer("max_message_mib", "Largest body of a request, in MiB.", least=1, most=1024)
    ] = 16,
    patience: Annotated[
        float | None,
        numbers.seconds(
            "patience",
            "How long to try a server that does not serve now (default: 10 before an answer, 120 within one)",
            excludes_least=False,
        ),
    ] = None,
    plaintext_token: options.PlaintextToken = False,
    tls: options.Tls = False,
    tls_ca_file: options.TlsCa = None,
    tls_cert_file: options.TlsCert = None,
    tls_key_file: options.TlsKey = None,
) -> None:
    """Serve OpenAI's HTTP API over a gemray server: chat completions, completions, models.

    A caller's bearer token is handed on to the server, which knows who may call. SIGTERM and Ctrl-C let answers finish.
    A terminal that goes away ends it in the same way; without one SIGHUP changes nothing.
    """
    try:
        import starlette
        import uvicorn
    except ImportError:
        sys.exit("error: the gateway needs more packages: pip install 'gemray[openai]' (or 'gemray-client[openai]')")
    del starlette, uvicorn
    quiet_grpc()

    import asyncio

    from gemray.client import Retry, ServerAddress
    from gemray.openai.app import application
    from gemray.openai.serve import Listening, serve
    from gemray.openai.settings import GatewaySettings

    server = ServerAddress(
        address,
        tls_ca_file=tls_ca_file,
        tls_cert_file=tls_cert_file,
        tls_key_file=tls_key_file,
        tls=tls,
        plaintext_token=plaintext_token,
    )
    server.credentials()  # here, where what is wrong with the files is one sentence
    settings = GatewaySettings(
        server=server,
        retry=Retry(first_s=FIRST_S)
        if patience is None
        else Retry(first_s=patience, resume_s=patience, starting_s=patience),
        timeout_s=timeout,
        max_bytes=max_message_mib * MIB,
    )
    listening = Listening(host, port, http_tls_cert_file, http_tls_key_file)
    warn(listening)
    asyncio.run(
        serve(application(settings), listening, lambda where: announce(where, address), ends_at_hangup=has_terminal())
    )


def announce(where: str, address: str) -> None:
    """Say where the API is."""
    print(f"ready: {where} (server {address})", file=sys.stderr, flush=True)


def warn(listening: Listening) -> None:
    """Say what others on the network could read."""
    from gemray.channel_options import is_every_interface, is_this_machine

    is_reached = is_every_interface(listening.host) or not is_this_machine(listening.host)
    if is_reached and listening.tls_cert_file is None:
        print(
            f"warning: {listening.host} is reached from other machines, and tokens and texts are readable on the way: "
            "--http-tls-cert-file and --http-tls-key-file, or a proxy with TLS in front, keep them secret",
            file=sys.stderr,
        )
