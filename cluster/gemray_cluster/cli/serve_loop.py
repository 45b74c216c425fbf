"""The life of `gemray serve`: start, serve, end on a signal or with the gang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack

from gemray.cli.exit_codes import FAILED
from gemray_cluster.cli.drain_socket import DrainSocket, Order, Outcome
from gemray_cluster.cli.exit_codes import CUT, exit_code_of
from gemray_cluster.cli.progress import stage_lines, start_progress
from gemray_cluster.cli.server_log import exit_with, printed_lines, set_up_logging
from gemray_cluster.cli.signals import listen_to_signals
from gemray_cluster.gang.client import GangState, GangUnavailable
from gemray_cluster.gang.launcher import ProgressListener, StartProgress
from gemray_cluster.server.server import GenerationServer
from gemray_cluster.serving.app import Serving, serving
from gemray_cluster.settings.settings import ServeSettings


def run(settings: ServeSettings) -> None:
    """Serve until a signal comes; raises GemrayError, also when the gang fails.

    Raises KeyboardInterrupt when the signal left no time to finish: before the gang was ready, or a second one.
    """
    log_format = settings.server_config().log_format
    tell = set_up_logging(log_format)
    try:
        with printed_lines(log_format):
            asyncio.run(_run(settings, tell, start_progress() if log_format == "text" else stage_lines(tell)))
    except Exception as error:
        code = exit_code_of(error)
        if log_format == "text" or code is None:
            raise
        exit_with(error, code)


async def _run(
    settings: ServeSettings, tell: Callable[[str], None], progress_of_start: AbstractContextManager[ProgressListener]
) -> None:
    serving_task = asyncio.current_task()
    assert serving_task is not None
    told_to_end = asyncio.Event()
    signalled = asyncio.Event()
    ready = asyncio.Event()

    def end(*, at_once: bool) -> None:
        """Drain, or before the gang is ready, end at once. The same order again changes nothing."""
        if at_once or not (ready.is_set() or told_to_end.is_set()):
            serving_task.cancel()
        told_to_end.set()

    def take_signal() -> None:
        """The first signal drains, also one that follows `gemray drain`; the second ends at once."""
        end(at_once=signalled.is_set())
        signalled.set()

    drains = DrainSocket(lambda order: end(at_once=order is Order.END_NOW))

    def say_listening(server: GenerationServer) -> None:
        tell(f"listening on {server.listens_on}; starting the gang")

    listen_to_signals(take_signal, tell)
    outcome = Outcome(0, "ended")
    try:
        await drains.open()
        async with AsyncExitStack() as stack:
            with progress_of_start as show:

                def progress(event: StartProgress) -> None:
                    if event.stage == "ray":
                        listen_to_signals(
                            take_signal, tell
                        )  # joining Ray has put a handler in our place that ends the process
                    show(event)

                running = await stack.enter_async_context(serving(settings, listening=say_listening, progress=progress))
            ready.set()
            weights = " with random weights" if settings.random_weights else ""
            tell(f"ready: serving {settings.model}{weights} on {running.server.listens_on}")
            await _until_told_or_failed(running, told_to_end)
            tell(f"draining {running.server.limiter.active} requests")
    except asyncio.CancelledError:
        how = "ended without waiting" if ready.is_set() else "ended before the gang was ready"
        outcome = Outcome(CUT, f"{how}: live requests were cut") if ready.is_set() else Outcome(0, how)
        tell(how)
        raise KeyboardInterrupt from None
    except Exception as error:
        outcome = Outcome(exit_code_of(error) or FAILED, str(error))
        raise
    finally:
        drains.close(outcome)


async def _until_told_or_failed(running: Serving, told_to_end: asyncio.Event) -> None:
    """Return on the first signal; raises GangUnavailable when the gang fails."""
    told = asyncio.create_task(told_to_end.wait())
    gang_ended = asyncio.create_task(running.gang.wait_ended())
    try:
        await asyncio.wait((told, gang_ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        gang_ended.cancel()
    if running.gang.state is GangState.FAILED:
        raise GangUnavailable(f"the gang failed: {running.gang.failure}")
