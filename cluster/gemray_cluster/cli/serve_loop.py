"""The life of `gemray serve`: start, serve, end on a signal or with the gang."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from gemray_cluster.cli.progress import start_progress
from gemray_cluster.gang_client import GangState, GangUnavailable
from gemray_cluster.server.server import GenerationServer
from gemray_cluster.serving import serving
from gemray_cluster.settings import ServeSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(settings: ServeSettings) -> None:
    """Serve until a signal comes; raises GemrayError, also when the gang fails."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    asyncio.run(_run(settings))


async def _run(settings: ServeSettings) -> None:
    serving_task = asyncio.current_task()
    assert serving_task is not None
    told_to_end = asyncio.Event()
    ready = asyncio.Event()

    def end() -> None:
        """The first signal drains; before the gang is ready, and the second time, it ends at once."""
        if told_to_end.is_set() or not ready.is_set():
            serving_task.cancel()
        told_to_end.set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, end)
    try:
        with start_progress() as progress:
            stack = serving(settings, listening=_say_listening, progress=progress)
            running = await stack.__aenter__()
    except asyncio.CancelledError:
        _say("ended before the gang was ready")
        return
    try:
        ready.set()
        _say(f"ready: serving {settings.model} on {running.server.address}")
        gang_ended = asyncio.create_task(running.gang.wait_ended())
        told = asyncio.create_task(told_to_end.wait())
        await asyncio.wait((gang_ended, told), return_when=asyncio.FIRST_COMPLETED)
        if running.gang.state is GangState.FAILED:
            raise GangUnavailable(f"the gang failed: {running.gang.failure}")
        _say(f"draining {running.server.admission.active} requests")
    except BaseException as error:
        await stack.__aexit__(type(error), error, error.__traceback__)
        raise
    else:
        await stack.__aexit__(None, None, None)


def _say_listening(server: GenerationServer) -> None:
    _say(f"listening on {server.address}; starting the gang")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
