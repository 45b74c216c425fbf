"""What `gemray demo --openai` does: the embedded model on two workers, and OpenAI's HTTP API over it."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack

from gemray.cli.terminal import has_terminal
from gemray.client import Retry, ServerAddress
from gemray.openai.app import application
from gemray.openai.serve import Listening, serve
from gemray.openai.settings import GatewaySettings
from gemray_cluster.cli.demo_run import RANKS
from gemray_cluster.cli.progress import start_progress
from gemray_cluster.serving.app import serving
from gemray_cluster.settings.settings import ServeSettings
from gemray_workers.embedded import embedded_path


def run(listening: Listening) -> None:
    """Serve until SIGTERM or Ctrl-C; raises GemrayError and InvalidOption."""
    asyncio.run(_run(listening))


async def _run(listening: Listening) -> None:
    settings = ServeSettings(
        model=str(embedded_path("gemray-tiny")),
        drafter=(str(embedded_path("gemray-tiny-assistant")),),
        tp=RANKS,
        local_num_cpus=RANKS,
        local_num_gpus=0,
        device="cpu",
        kv_memory=64 << 20,
        port=0,
    )
    print("Starting Ray, and a server of gemray-tiny on two workers ...", file=sys.stderr)
    with ExitStack() as bar:
        progress = bar.enter_context(start_progress())
        async with serving(settings, progress=progress) as running:
            bar.close()  # it has come to its end
            address = running.server.address
            gateway = GatewaySettings(ServerAddress(address), Retry())
            await serve(application(gateway), listening, lambda url: _told(url, address), ends_at_hangup=has_terminal())


def _told(url: str, address: str) -> None:
    print(f"ready: {url} (gRPC: {address}); Ctrl-C ends both", file=sys.stderr, flush=True)
