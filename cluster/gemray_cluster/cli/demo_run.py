"""What `gemray demo` does."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
from rich.console import Console

from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.cli.progress import start_progress
from gemray_cluster.cli.statistics import Stopwatch
from gemray_cluster.demo_checkpoint import write_demo_checkpoint
from gemray_cluster.server.channel_options import client_options
from gemray_cluster.serving import Serving, serving
from gemray_cluster.settings import ServeSettings

RANKS = 2


def run(prompt: str, *, max_tokens: int, seed: int) -> None:
    """Make a checkpoint, serve it, ask it; raises GemrayError."""
    with tempfile.TemporaryDirectory(prefix="gemray-demo-") as directory:
        model = write_demo_checkpoint(Path(directory) / "model")
        asyncio.run(_run(str(model), prompt, max_tokens=max_tokens, seed=seed))


async def _run(model: str, prompt: str, *, max_tokens: int, seed: int) -> None:
    settings = ServeSettings(
        model=model, tp=RANKS, device="cpu", kv_memory=64 << 20, port=0, local_num_cpus=RANKS, local_num_gpus=0
    )
    console = Console(stderr=True)
    console.print("Starting Ray and a gang of two tensor-parallel ranks (a small Gemma 4 with random weights) ...")
    async with AsyncExitStack() as stack:
        with start_progress() as progress:
            running = await stack.enter_async_context(serving(settings, progress=progress))
        await _ask(running, prompt, max_tokens=max_tokens, seed=seed, console=console)


async def _ask(running: Serving, prompt: str, *, max_tokens: int, seed: int, console: Console) -> None:
    """Stream one answer over gRPC, as any client would."""
    request = pb.GenerateStreamRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=prompt)]),
        sampling=pb.SamplingParameters(max_tokens=max_tokens, seed=seed),
    )
    stopwatch = Stopwatch()
    async with grpc.aio.insecure_channel(running.server.address, options=client_options()) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        for rank in info.ranks:
            shard = rank.shard_indices
            console.print(
                f"rank {rank.rank} on {rank.device}: {rank.weight_bytes / 2**20:.1f} MiB of weights, "
                f"vocabulary rows {shard.org_vocab_start_index}..{shard.org_vocab_end_index}"
            )
        console.print(f"serving on {running.server.address}; prompt: {prompt}\n")
        async for answer in stub.GenerateStream(request):
            if answer.HasField("delta"):
                stopwatch.token_came()
                print(answer.delta.text, end="", flush=True)
    print(flush=True)
    print("\n" + stopwatch.report(answer.final), file=sys.stderr)
