"""What `gemray demo` does: the same request to three servers, which differ in their drafter alone."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import TextIO

import grpc
from rich import box
from rich.console import Console
from rich.table import Table

from gemray.channel_options import client_options
from gemray.cli.statistics import Stopwatch
from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.cli.progress import start_progress
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.observability.printed_lines import answers_alone
from gemray_cluster.ray_runtime.session import RaySession
from gemray_cluster.serving.app import Serving, serving
from gemray_cluster.settings.settings import ServeSettings
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import GemrayError

RANKS = 2


@dataclass(frozen=True)
class Contestant:
    """One way to serve the embedded model."""

    name: str
    drafter: str | None
    draft_tokens: int


@dataclass(frozen=True)
class Answer:
    """What one server said."""

    contestant: Contestant
    token_ids: list[int]
    completion: pb.Completion
    stopwatch: Stopwatch
    seconds: float


CONTESTANTS = (
    Contestant("none", None, 0),
    Contestant("mtp", "gemray-tiny-assistant", 4),
    Contestant("dflash", "gemray-tiny-dflash", 15),
)


class AnswersDiffer(GemrayError):
    """A drafter changed the tokens: the one thing that must never happen."""


def run(prompt: str, *, max_tokens: int, temperature: float, seed: int) -> None:
    """Serve, ask, compare; raises GemrayError."""
    request = pb.GenerateStreamRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=prompt)]),
        sampling=pb.SamplingParameters(max_tokens=max_tokens, temperature=temperature, seed=seed),
    )
    with answers_alone() as answers_to:
        asyncio.run(_run(request, prompt, Console(stderr=True), answers_to))


async def _run(request: pb.GenerateStreamRequest, prompt: str, console: Console, answers_to: TextIO) -> None:
    console.print(f"question: {prompt}", markup=False, highlight=False)
    console.print("Starting Ray, and three servers of gemray-tiny one after the other, each on two workers ...")
    session = await RaySession.open(ClusterConfig(local_num_cpus=RANKS, local_num_gpus=0), num_ranks=RANKS)
    try:
        answers = [await _serve_and_ask(contestant, request, console, answers_to) for contestant in CONTESTANTS]
    finally:
        await session.close()
    _compare(answers, console)


async def _serve_and_ask(
    contestant: Contestant, request: pb.GenerateStreamRequest, console: Console, answers_to: TextIO
) -> Answer:
    settings = ServeSettings(
        model=str(embedded_path("gemray-tiny")),
        drafter=() if contestant.drafter is None else (str(embedded_path(contestant.drafter)),),
        draft_tokens=contestant.draft_tokens,
        tp=RANKS,
        device="cpu",
        dtype="float64",  # sums in another order then flip no argmax: the ids must be equal
        kv_memory=64 << 20,
        max_num_seqs=4,
        port=0,
    )
    with start_progress() as progress:
        async with serving(settings, progress=progress) as running:
            return await _ask(running, contestant, request, console, answers_to)


async def _ask(
    running: Serving, contestant: Contestant, request: pb.GenerateStreamRequest, console: Console, answers_to: TextIO
) -> Answer:
    """Stream one answer over gRPC, as any client would."""
    async with grpc.aio.insecure_channel(
        running.server.address, options=client_options(running.server.address)
    ) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        shards = ", ".join(
            f"{rank.shard_indices.org_vocab_start_index}..{rank.shard_indices.org_vocab_end_index}"
            for rank in info.ranks
        )
        console.print(
            f"\n[bold]drafter: {contestant.name}[/bold] ({running.server.address}, vocabulary rows by rank {shards})"
        )
        token_ids: list[int] = []
        stopwatch = Stopwatch()
        async for answer in stub.GenerateStream(request):
            if answer.HasField("delta"):
                stopwatch.token_came()
                token_ids += answer.delta.token_ids
                print(answer.delta.text, end="", file=answers_to, flush=True)
        print(file=answers_to, flush=True)
    return Answer(contestant, token_ids, answer.final, stopwatch, stopwatch.elapsed())


def _compare(answers: list[Answer], console: Console) -> None:
    """The statistics side by side; raises AnswersDiffer."""
    table = Table(title="The same request, three drafters", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("drafter", "tokens", "rounds", "per round", "accepted", "drafts 1-3, %", "seconds", "ids"):
        table.add_column(column, justify="left" if column in ("drafter", "ids") else "right", no_wrap=True)
    for answer in answers:
        table.add_row(*_row(answer, same=answer.token_ids == answers[0].token_ids))
    console.print()
    console.print(table)
    differing = [a.contestant.name for a in answers if a.token_ids != answers[0].token_ids]
    if differing:
        raise AnswersDiffer(f"the ids with {', '.join(differing)} are not those without a drafter")
    print(f"seed {answers[0].completion.seed}: ask again with it and the tokens are the same", file=sys.stderr)


def _row(answer: Answer, *, same: bool) -> list[str]:
    counters = answer.completion.speculation
    tokens = len(answer.token_ids)
    rounds = counters.rounds
    # The prompt's own step gives the first token; each round gives its accepted drafts and one more.
    per_round = f"{1 + counters.accepted / rounds:.2f}" if rounds else "1.00"
    by_position = " ".join(f"{100 * accepted / rounds:.0f}" for accepted in counters.accepted_per_position[:3])
    return [
        answer.contestant.name,
        str(tokens),
        str(rounds) if rounds else "-",
        per_round,
        f"{counters.accepted}/{counters.drafted}" if rounds else "-",
        by_position,
        f"{answer.seconds:.2f}",
        "equal" if same else "differ",
    ]
