"""gemray generate: one request, text to stdout, statistics to stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gemray.cli import forms, numbers, options
from gemray.cli.connection import Connection, with_connection
from gemray.cli.sampling import Sampling, with_sampling

if TYPE_CHECKING:
    from gemray.client import Client
    from gemray.v1 import generation_pb2 as pb

STDIN = "-"


@with_connection
@with_sampling
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; - or none reads it from stdin.", show_default=False)
    ] = None,
    *,
    connection: Connection,
    sampling: Sampling,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Text to put behind the prompt, - for stdin; may be repeated."),
    ] = None,
    system: options.System = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the answer as the protocol's JSON; with --stream a line for each message."),
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it stands, without chat template.")] = False,
    thinking: options.Thinking = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        numbers.integer(
            "truncate_prompt_tokens",
            "Keep this many of the prompt's last tokens, -1 for as many as fit (default: refuse a longer prompt)",
            least=-1,
            most=numbers.INT32_MAX,
        ),
    ] = None,
    n: Annotated[
        int | None, numbers.integer("n", "Answers, with seeds SEED, SEED + 1 and so on.", least=1, most=128)
    ] = None,
    schema: forms.Schema = None,
    regex: forms.Regex = None,
    choice: forms.Choice = None,
    grammar: forms.Grammar = None,
    tools: forms.Tools = None,
    tool_choice: forms.ToolChoice = None,
    logprobs: Annotated[
        int | None,
        numbers.integer(
            "logprobs", "Also print each token's log-probability and of so many top tokens.", least=0, most=20
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, numbers.integer("prompt_logprobs", "The same of the prompt's tokens.", least=0, most=20)
    ] = None,
    logits_checksum: Annotated[
        bool,
        typer.Option(
            "--logits-checksum",
            help="Also print a checksum of all logits that each token was chosen by: equal where the bits are.",
        ),
    ] = False,
    checkpoint_hash: options.CheckpointHash = None,
    timeout: Annotated[float | None, numbers.seconds("timeout", "Most time for the whole answer.")] = None,
) -> None:
    """Send one request to a server."""
    from gemray.client import InvalidOption
    from gemray.v1 import generation_pb2 as pb

    if raw and any(part is not None for part in (system, thinking, tools, tool_choice)):
        raise InvalidOption("raw", True, "unset with --system, --thinking, --tools and --tool-choice, parts of a chat")
    if tool_choice is not None and tools is None:
        raise InvalidOption("tool_choice", tool_choice, "unset without --tools")
    if stream and not json and (n or 1) > 1:
        raise InvalidOption("stream", True, "unset, or with --json, for several answers")
    text = _prompt(prompt, file or [])
    form = forms.read_form(schema=schema, regex=regex, choice=choice, grammar=grammar)
    request = pb.GenerateStreamRequest(
        sampling=sampling.parameters,
        speculation=sampling.speculation,
        structured=form,
        checkpoint_hash=checkpoint_hash,
    )
    request.sampling.MergeFrom(
        pb.SamplingParameters(
            n=n,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logits_checksum=logits_checksum,
            logprob_text=logits_checksum or logprobs is not None or prompt_logprobs is not None,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
    )
    if raw:
        request.text = text
    else:
        turns = [("system", system)] if system is not None else []
        turns.append(("user", text))
        request.chat.messages.extend(pb.ChatMessage(role=role, content=content) for role, content in turns)
        if thinking is not None:
            request.chat.enable_thinking = thinking
        if tools is not None:
            request.chat.tools_json = forms.read_json("tools", tools)
        if tool_choice is not None:
            request.chat.tool_choice.CopyFrom(forms.tool_choice_of(tool_choice))
    with connection.open() as client:
        if json:
            _print_json(client, request, timeout, stream=stream)
        else:
            _print_text(client, request, timeout, stream=stream)


def _prompt(prompt: str | None, files: list[str]) -> str:
    """The argument and the files behind it, an empty line between them; stdin where it is named, or nothing else is."""
    from gemray.client import InvalidOption

    if [prompt, *files].count(STDIN) > 1:
        raise InvalidOption("file", STDIN, "named once: stdin is read to its end")
    sources = [] if prompt is None else [_read_stdin() if prompt == STDIN else prompt]
    sources += [_read_stdin() if path == STDIN else options.read_text("file", path) for path in files]
    if not sources:
        if sys.stdin.isatty():
            raise InvalidOption("prompt", None, "a text, - for stdin, or --file")
        sources.append(_read_stdin())
    text = "\n\n".join(source.rstrip("\n") for source in sources) if len(sources) > 1 else sources[0]
    if not text.strip():
        raise InvalidOption("prompt", text[:20], "a text that is not blank, from the argument, --file or stdin")
    return text


def _read_stdin() -> str:
    from gemray.client import InvalidOption

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidOption("stdin", f"byte {error.start}", "UTF-8 text") from error


def _print_text(client: Client, request: pb.GenerateStreamRequest, timeout: float | None, *, stream: bool) -> None:
    from gemray.cli.pieces import Page, Piece, pieces_of
    from gemray.cli.statistics import Stopwatch, logprob_lines

    page, stopwatch = Page.of_stdout(), Stopwatch()
    shows_thoughts = sys.stdout.isatty()  # what another program reads is the answer alone
    num_answers = max(1, request.sampling.n)
    pieces: list[list[Piece]] = [[] for _ in range(num_answers)]
    logprobs: list[list[pb.TokenLogprob]] = [[] for _ in range(num_answers)]
    prompt_logprobs: list[pb.TokenLogprob] = []
    with client.stream(request, timeout_s=timeout) as answer:
        for message in answer:
            if not message.HasField("delta"):
                continue
            stopwatch.token_came()
            delta = message.delta
            logprobs[delta.index] += delta.logprobs
            prompt_logprobs += delta.prompt_logprobs
            shown = [piece for piece in pieces_of(delta) if shows_thoughts or piece.kind != "thought"]
            pieces[delta.index] += shown
            for piece in shown if stream else []:
                page.write(piece)
    groups = {"[prompt]": prompt_logprobs}
    for index, (own, own_logprobs) in enumerate(zip(pieces, logprobs, strict=True)):
        if num_answers > 1:
            page.head(f"[answer {index}]")
        for piece in [] if stream else own:
            page.write(piece)
        page.end()
        groups["[answer]" if num_answers == 1 else f"[answer {index}]"] = own_logprobs
    told = {head: entries for head, entries in groups.items() if entries}
    for head, entries in told.items():
        for line in [head, *logprob_lines(entries)] if len(told) > 1 else logprob_lines(entries):
            print(line, file=sys.stderr)
    print(stopwatch.report(message.final), file=sys.stderr)


def _print_json(client: Client, request: pb.GenerateStreamRequest, timeout: float | None, *, stream: bool) -> None:
    from google.protobuf.json_format import MessageToJson

    from gemray.v1 import generation_pb2 as pb

    if stream:
        with client.stream(request, timeout_s=timeout) as answer:
            for message in answer:
                print(MessageToJson(message, preserving_proto_field_name=True, indent=None), flush=True)
        return
    whole = client.generate(pb.GenerateRequest.FromString(request.SerializeToString()), timeout_s=timeout)
    print(MessageToJson(whole, preserving_proto_field_name=True, ensure_ascii=False))
