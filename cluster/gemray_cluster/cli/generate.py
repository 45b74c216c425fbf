"""gemray generate: one request, text to stdout, statistics to stderr."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gemray_cluster.cli import options


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask, or - to read it from stdin.")],
    *,
    address: options.Server = options.DEFAULT_SERVER,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it stands, without chat template.")] = False,
    thinking: options.Thinking = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    auth_token_file: options.TokenFile = None,
    tls_ca_file: options.TlsCa = None,
    tls_cert_file: options.TlsCert = None,
    tls_key_file: options.TlsKey = None,
) -> None:
    """Send one request to a server."""
    from gemray.v1 import generation_pb2 as pb
    from gemray_cluster.cli.statistics import Stopwatch
    from gemray_cluster.client.client import ServerAddress, connected

    text = sys.stdin.read() if prompt == "-" else prompt
    request = pb.GenerateStreamRequest(
        sampling=pb.SamplingParameters(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop or []
        )
    )
    if raw:
        request.text = text
    else:
        message = pb.ChatMessage(role="user", content=text)
        request.chat.CopyFrom(pb.Chat(messages=[message]))
        if thinking is not None:
            request.chat.enable_thinking = thinking
    server = ServerAddress(address, auth_token_file, tls_ca_file, tls_cert_file, tls_key_file)
    stopwatch = Stopwatch()
    pieces = []
    with connected(server) as stub:
        for answer in stub.GenerateStream(request):
            if answer.HasField("delta"):
                stopwatch.token_came()
                pieces.append(answer.delta.text)
                if stream:
                    print(answer.delta.text, end="", flush=True)
    print("" if stream else "".join(pieces))
    print(stopwatch.report(answer.final), file=sys.stderr)
