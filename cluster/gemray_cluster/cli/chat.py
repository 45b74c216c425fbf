"""gemray chat: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gemray_cluster.cli import options


def chat(
    *,
    address: options.Server = options.DEFAULT_SERVER,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system turn.")] = None,
    thinking: options.Thinking = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    auth_token_file: options.TokenFile = None,
    tls_ca_file: options.TlsCa = None,
    tls_cert_file: options.TlsCert = None,
    tls_key_file: options.TlsKey = None,
) -> None:
    """Talk to a server. Ctrl-C ends an answer, Ctrl-D the conversation."""
    from gemray.v1 import generation_pb2 as pb
    from gemray_cluster.cli.statistics import Stopwatch
    from gemray_cluster.client.client import ServerAddress, connected

    sampling = pb.SamplingParameters(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    server = ServerAddress(address, auth_token_file, tls_ca_file, tls_cert_file, tls_key_file)
    messages = [pb.ChatMessage(role="system", content=system)] if system else []
    with connected(server) as stub:
        while True:
            try:
                said = input("> ")
            except EOFError:
                print()
                return
            if not said.strip():
                continue
            messages.append(pb.ChatMessage(role="user", content=said))
            request = pb.GenerateStreamRequest(chat=pb.Chat(messages=messages), sampling=sampling)
            if thinking is not None:
                request.chat.enable_thinking = thinking
            answer, stopwatch = "", Stopwatch()
            call = stub.GenerateStream(request)
            try:
                for event in call:
                    if event.HasField("delta"):
                        stopwatch.token_came()
                        answer += event.delta.text  # a thought is shown, and not kept for the next question
                        print(event.delta.reasoning + event.delta.text, end="", flush=True)
                print(f"\n[{stopwatch.report(event.final)}]", file=sys.stderr)
            except KeyboardInterrupt:
                call.cancel()
                print("\n[interrupted]", file=sys.stderr)
            messages.append(pb.ChatMessage(role="assistant", content=answer))
