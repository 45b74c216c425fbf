"""gemray chat: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from gemray.cli import options
from gemray.cli.connection import Connection, with_connection
from gemray.cli.sampling import Sampling, with_sampling

if TYPE_CHECKING:
    from gemray.client import Client
    from gemray.v1 import generation_pb2 as pb

EXITS = ("/exit", "/quit")


@with_connection
@with_sampling
def chat(
    *,
    connection: Connection,
    sampling: Sampling,
    system: options.System = None,
    thinking: options.Thinking = None,
    checkpoint_hash: options.CheckpointHash = None,
) -> None:
    """Talk to a server. /help lists commands; Ctrl-C ends an answer, Ctrl-D the conversation.

    With stdin that is no terminal the exit status is that of the first turn that failed; later turns are asked all the
    same.
    """
    from gemray.cli.conversation import Conversation
    from gemray.cli.exit_codes import FAILED, exit_code_of
    from gemray.cli.lines import said_lines
    from gemray.client import ClientError
    from gemray.v1 import generation_pb2 as pb

    conversation, failure = Conversation(system), 0
    with connection.open() as client:
        for said in said_lines():
            if not said.strip():
                continue
            if said.strip() in EXITS:
                break
            if said.startswith("/"):
                print(conversation.command(said), file=sys.stderr)
                continue
            turn = pb.Chat(messages=conversation.request_messages(said))
            if thinking is not None:
                turn.enable_thinking = thinking
            try:
                request = pb.GenerateStreamRequest(
                    chat=turn,
                    sampling=sampling.parameters,
                    speculation=sampling.speculation,
                    checkpoint_hash=checkpoint_hash,
                )
                answer = _answer(client, request)
            except ClientError as error:
                print(f"\nerror: {error}", file=sys.stderr)
                failure = failure or exit_code_of(error) or FAILED
                continue
            conversation.answered(said, answer)
    if failure and not sys.stdin.isatty():  # a person has seen it
        raise typer.Exit(failure)


def _answer(client: Client, request: pb.GenerateStreamRequest) -> str:
    """Print an answer as it comes; its text without thoughts. An interrupt ends it where it is."""
    from gemray.cli.pieces import Page, pieces_of
    from gemray.cli.statistics import Stopwatch

    page, stopwatch, kept = Page.of_stdout(), Stopwatch(), ""
    try:
        with client.stream(request) as answer:
            for message in answer:
                if message.HasField("final"):
                    page.end()
                    print(f"[{stopwatch.report(message.final)}]", file=sys.stderr)
                    continue
                stopwatch.token_came()
                for piece in pieces_of(message.delta):
                    page.write(piece)
                    if piece.kind == "text":  # a thought is shown, and not kept for the next question
                        kept += piece.text
    except KeyboardInterrupt:
        page.end()
        print("[interrupted]", file=sys.stderr)
    return kept
