"""OpenAI's HTTP API over a server of a test, and clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn

from gemray.client import Retry, ServerAddress
from gemray.openai.app import application
from gemray.openai.serve import Listening
from gemray.openai.settings import GatewaySettings
from support.waiting import HANG_S, eventually

NO_PATIENCE = Retry(first_s=0, resume_s=0)


@dataclass(frozen=True)
class HttpGateway:
    """A running gateway."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's own client, which does not try again."""
        told = {"api_key": "none", "max_retries": 0, "timeout": HANG_S, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **told)


@asynccontextmanager
async def gateway(address: str, **settings: Any) -> AsyncIterator[HttpGateway]:
    """A gateway of the server at `address`, on a free port, in this event loop."""
    told = {"server": ServerAddress(address), "retry": NO_PATIENCE, **settings}
    config = uvicorn.Config(application(GatewaySettings(**told)), log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    with Listening(port=0).open() as port:
        serving = asyncio.ensure_future(server.serve(sockets=[port]))
        await eventually(lambda: server.started or serving.done(), HANG_S)
        try:
            yield HttpGateway(port.getsockname()[1])
        finally:
            server.should_exit = True
            await serving
