"""The application: OpenAI's endpoints over one gemray server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gemray.openai.endpoints import CHAT, COMPLETIONS, Endpoint
from gemray.openai.errors import ClientGone, HttpError
from gemray.openai.gateway import Gateway
from gemray.openai.models import ServedModel
from gemray.openai.settings import GatewaySettings

CLIENT_CLOSED = 499
"""The status of an answer that nobody is left to read, as nginx has it."""


def application(settings: GatewaySettings) -> Starlette:
    """An ASGI application, which connects when its lifespan begins."""
    routes = [
        Route("/v1/chat/completions", _generating(CHAT), methods=["POST"]),
        Route("/v1/completions", _generating(COMPLETIONS), methods=["POST"]),
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/models/{name:path}", _model, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/live", _live, methods=["GET"]),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        gateway = Gateway(settings)
        app.state.gateway, app.state.served = gateway, ServedModel(gateway)
        try:
            yield
        finally:
            await gateway.close()

    handlers: dict[Any, Any] = {
        HttpError: _told,
        HTTPException: _no_route,
        ClientGone: _nobody,
        Exception: _unforeseen,
    }
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def _generating(endpoint: Endpoint) -> Callable[[Request], Awaitable[ASGIApp]]:
    async def answer(request: Request) -> ASGIApp:
        state = request.app.state
        return await endpoint.answer(request, state.gateway, state.served)

    return answer


async def _models(request: Request) -> Response:
    served: ServedModel = request.app.state.served
    model = await served.now(request.app.state.gateway.caller(request.headers.get("authorization")))
    return JSONResponse({"object": "list", "data": [served.body(model)]})


async def _model(request: Request) -> Response:
    served: ServedModel = request.app.state.served
    caller = request.app.state.gateway.caller(request.headers.get("authorization"))
    return JSONResponse(served.body(await served.check(request.path_params["name"], caller)))


async def _health(request: Request) -> Response:
    """200 while the server is ready: where a load balancer looks."""
    is_serving = await request.app.state.gateway.is_serving()
    return JSONResponse({"status": "ok" if is_serving else "the server is not ready"}, 200 if is_serving else 503)


async def _live(_request: Request) -> Response:
    """200 while the gateway runs, whatever becomes of the server: where a supervisor looks."""
    return JSONResponse({"status": "ok"})


async def _told(_request: Request, error: HttpError) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _no_route(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(HttpError(error.status_code, message).body, error.status_code, headers=error.headers)


async def _nobody(_request: Request, _error: ClientGone) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _unforeseen(_request: Request, _error: Exception) -> Response:
    """Starlette raises the error again behind this answer, and uvicorn logs it."""
    told = HttpError(500, "internal error; the gateway's log has the details", kind="server_error")
    return JSONResponse(told.body, 500)
