"""Requests that no client of OpenAI's sends: what is not JSON, too large, half sent, or never read."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gemray.client import InvalidOption, Retry, ServerAddress
from gemray.openai import body, streaming
from gemray.openai.app import application
from gemray.openai.gateway import Gateway
from gemray.openai.serve import Listening, serve
from gemray.openai.settings import GatewaySettings
from gemray_cluster.gang.client import GangState
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.certificates import make_certificates
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.http_gateway import NO_PATIENCE, HttpGateway, gateway
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S, eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("fresh_gang")]

MAX_BYTES = 1 << 16
CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(served: Serving) -> AsyncIterator[HttpGateway]:
    async with gateway(served.server.address, max_bytes=MAX_BYTES) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(http: HttpGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=http.url, timeout=HANG_S) as made:
        yield made


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_events_as_they_are_written(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={**ASKED, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)


async def test_request_ids(served: Serving, client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=ASKED)
    assert response.headers["x-request-id"] == response.json()["id"]
    assert response.json()["id"].startswith("chatcmpl-")
    assert served.gang.submitted[-1].request_id == response.json()["id"]
    response = await client.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert served.gang.submitted[-1].request_id == "mine"
    response = await client.post(CHAT, json=ASKED, headers={"x-request-id": "x" * 200})
    assert (response.status_code, error_of(response)["param"]) == (400, "request_id")


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"", 400), (b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 60_000, 400), (b'"' + b"x" * MAX_BYTES, 413)],
)  # fmt: skip
async def test_bodies_that_are_no_request(client: httpx.AsyncClient, content: bytes, status: int) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        yield content[:7]
        yield content[7:]

    for sent in (content, in_pieces()):
        response = await client.post(CHAT, content=sent, headers={"content-type": "application/json"})
        assert (response.status_code, bool(error_of(response)["message"])) == (status, True)


@pytest.mark.parametrize("depth", [50, 800, 900, 960, 980, 990, 5000])
async def test_schemas_of_any_depth_are_told_of(client: httpx.AsyncClient, depth: int) -> None:
    """The reader's own depth ends where Python's does, wherever that is for what it writes anew."""
    schema = '{"not": ' * depth + "{}" + "}" * depth
    body = json.dumps({**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": "SCHEMA"}}})
    response = await client.post(
        CHAT, content=body.replace('"SCHEMA"', schema), headers={"content-type": "application/json"}
    )
    assert (response.status_code, bool(error_of(response)["message"])) == (400, True)


async def test_a_large_body_is_read(served: Serving) -> None:
    async with gateway(served.server.address) as roomy, httpx.AsyncClient(base_url=roomy.url) as large:
        response = await large.post("/v1/completions", json={"prompt": [2] * 10**6}, timeout=HANG_S)
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    assert error_of(response)["code"] == "context_length_exceeded"


async def test_a_prompt_that_is_too_long_by_its_bytes_has_the_same_code(served: Serving) -> None:
    async with gateway(served.server.address) as roomy, httpx.AsyncClient(base_url=roomy.url) as large:
        response = await large.post("/v1/completions", json={"prompt": "word " * 300_000}, timeout=HANG_S)
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    assert error_of(response)["code"] == "context_length_exceeded"


async def test_a_choice_is_told_in_the_words_of_http(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={**ASKED, "tool_choice": "required"})
    assert (response.status_code, error_of(response)["param"]) == (400, "tool_choice")
    assert error_of(response)["message"] == "tool_choice = required is not allowed: auto for a chat without tools"


async def test_what_a_web_page_could_send_unasked_is_refused(client: httpx.AsyncClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = await client.post(CHAT, content=json.dumps(ASKED), headers={"content-type": kind})
        assert (response.status_code, "application/json" in error_of(response)["message"]) == (415, True)
    assert (await client.options(CHAT, headers={"origin": "http://evil"})).status_code == 405


async def test_a_compressed_body_is_refused_as_such(client: httpx.AsyncClient) -> None:
    """It would be told as text that is not UTF-8."""
    packed = gzip.compress(json.dumps(ASKED).encode())
    headers = {"content-type": "application/json", "content-encoding": "GZIP"}
    response = await client.post(CHAT, content=packed, headers=headers)
    assert response.status_code == 415
    assert error_of(response)["message"].startswith("content-encoding = 'gzip' is not allowed")
    plain = await client.post(CHAT, json=ASKED, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


async def test_paths_and_methods(client: httpx.AsyncClient) -> None:
    for path in ("/v1/embeddings", "/chat/completions", "/"):
        response = await client.post(path, json={})
        assert (response.status_code, path in error_of(response)["message"]) == (404, True)
    response = await client.get(CHAT)
    assert response.status_code == 405
    assert error_of(response)["type"] == "invalid_request_error"


async def test_health_follows_the_server(served: Serving, client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    served.gang.state = GangState.FAILED
    try:
        for _ in range(int(HANG_S * 10)):  # the server looks at its gang every now and then
            response = await client.get("/health")
            if response.status_code == 503:
                break
            await asyncio.sleep(0.1)
        assert response.status_code == 503
        assert (await client.get("/live")).status_code == 200
        response = await client.post(CHAT, json=ASKED)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert error_of(response)["code"] == "unavailable"
    finally:
        served.gang.state = GangState.SERVING


async def connect(http: HttpGateway, request: dict[str, Any], *, sent: int | None = None) -> tuple[Any, Any]:
    """A plain connection that has sent a request, or its first bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    content = json.dumps(request).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content[:sent])
    await writer.drain()
    return reader, writer


async def test_a_half_closed_connection_is_one_that_left(served: Serving, http: HttpGateway) -> None:
    served.gang.script = Script([107] * 200, stalls_after=3)
    reader, writer = await connect(http, {**ASKED, "max_tokens": 150, "stream": True})
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.write_eof()
    await eventually(lambda: len(served.gang.cancelled) == 1 and served.gang.num_active == 0, HANG_S)
    writer.close()


async def test_a_body_that_does_not_come(http: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "READ_S", 0.2)
    reader, writer = await connect(http, ASKED, sent=5)
    assert await asyncio.wait_for(reader.readline(), HANG_S) == b"HTTP/1.1 408 Request Timeout\r\n"
    writer.close()
    _, writer = await connect(http, ASKED, sent=5)
    writer.close()


async def test_a_client_that_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WRITE_S", 0.1)
    closed = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"x"
        finally:
            closed.append(True)

    async def for_ever(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await for_ever()

    stream = streaming.EventStream(endless(), endless(), {})
    await asyncio.wait_for(stream({}, for_ever, send), HANG_S)
    assert closed == [True], "the events have begun, and their source has not"


async def test_events_that_never_begin_close_their_source() -> None:
    """The client left between the first message and the answer's head."""
    closed = []

    async def source() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
        finally:
            closed.append(True)

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        await asyncio.Event().wait()

    messages = source()
    assert await anext(messages) == b"first"
    await asyncio.wait_for(streaming.EventStream(source(), messages, {})({}, gone, send), HANG_S)
    assert closed == [True]


async def test_silence_is_filled(served: Serving, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "HEARTBEAT_S", 0.05)
    served.gang.script = Script([107] * 10, delay_s=0.4)
    response = await client.post(CHAT, json={**ASKED, "stream": True})
    assert ": waiting\n\n" in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.text.count('"content":"\\n"') == 4


async def test_tokens_are_handed_on(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    async with (
        serving(tokenizer, FakeGang(), auth_token_file=str(tmp_path / "tokens")) as served,
        gateway(served.server.address) as http,
        httpx.AsyncClient(base_url=http.url, timeout=HANG_S) as client,
    ):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": b"Bearer \xff"}):
            for response in (
                await client.post(CHAT, json=ASKED, headers=headers),  # type: ignore[arg-type]
                await client.post(CHAT, json={**ASKED, "stream": True}, headers=headers),  # type: ignore[arg-type]
                await client.get("/v1/models", headers=headers),  # type: ignore[arg-type]
            ):
                assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
        assert (await client.get("/health")).status_code == 200
        response = await client.post(CHAT, json=ASKED, headers={"authorization": "Bearer secret"})
        assert response.status_code == 200


@pytest.mark.parametrize("streams", [False, True])
async def test_another_checkpoint_than_asked_for(client: httpx.AsyncClient, streams: bool) -> None:
    asked = {**ASKED, "stream": streams}
    assert (await client.post(CHAT, json=asked, headers={"x-checkpoint-hash": "0123"})).status_code == 200
    refused = await client.post(CHAT, json=asked, headers={"x-checkpoint-hash": "4567"})
    assert (refused.status_code, error_of(refused)["code"]) == (412, "checkpoint_changed")


async def test_a_token_is_not_sent_over_the_network_in_plain_text() -> None:
    def caller_of(server: ServerAddress) -> Any:
        return Gateway(GatewaySettings(server, Retry())).caller("Bearer secret")

    open_way = caller_of(ServerAddress("192.0.2.1:50051"))
    assert open_way.metadata == ()
    assert "--plaintext-token" in open_way.hint
    for server in (
        ServerAddress("192.0.2.1:50051", plaintext_token=True),
        ServerAddress("192.0.2.1:50051", tls=True),
        ServerAddress("localhost:50051"),
    ):
        assert caller_of(server).metadata == (("authorization", "Bearer secret"),)


async def test_settings_that_cannot_be() -> None:
    server = ServerAddress("localhost:1")
    with pytest.raises(InvalidOption, match="timeout"):
        GatewaySettings(server, NO_PATIENCE, timeout_s=0)
    with pytest.raises(InvalidOption, match="max_message_mib"):
        GatewaySettings(server, NO_PATIENCE, max_bytes=0)
    with pytest.raises(InvalidOption, match="auth_token_file"):
        GatewaySettings(ServerAddress("localhost:1", auth_token_file="x"), NO_PATIENCE)
    with pytest.raises(InvalidOption):
        Listening(port=70000)
    with pytest.raises(InvalidOption):
        Listening(tls_cert_file="x")
    with pytest.raises(InvalidOption), Listening(host="192.0.2.1").open():
        pass
    with pytest.raises(InvalidOption, match="http_tls_key_file = 'none' is not allowed: a readable PEM file"):
        Listening(tls_cert_file="none", tls_key_file="none")


async def test_https_until_it_is_told_to_end(tmp_path: Path, served: Serving) -> None:
    make_certificates(tmp_path)
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    listening = Listening("localhost", 0, tls_cert_file=certificate, tls_key_file=key)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    app = application(GatewaySettings(ServerAddress(served.server.address), NO_PATIENCE))
    handler = signal.getsignal(signal.SIGTERM)
    serving_it = asyncio.create_task(serve(app, listening, told.set_result))
    url = await asyncio.wait_for(told, HANG_S)
    assert re.fullmatch(r"https://127\.0\.0\.1:\d+/v1", url)
    trust = ssl.create_default_context(cafile=certificate)
    async with httpx.AsyncClient(base_url=url.replace("127.0.0.1", "localhost"), verify=trust) as client:
        response = await client.post("/chat/completions", json=ASKED, timeout=HANG_S)
    assert response.status_code == 200
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(serving_it, HANG_S)
    assert signal.getsignal(signal.SIGTERM) is handler


async def test_a_certificate_is_rotated_without_a_restart(
    tmp_path: Path, served: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path)
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    listening = Listening("localhost", 0, tls_cert_file=certificate, tls_key_file=key)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    app = application(GatewaySettings(ServerAddress(served.server.address), NO_PATIENCE))
    serving_it = asyncio.create_task(serve(app, listening, told.set_result))
    url = (await asyncio.wait_for(told, HANG_S)).replace("127.0.0.1", "localhost").removesuffix("/v1")

    async def is_trusted(trust: ssl.SSLContext) -> bool:
        async with httpx.AsyncClient(verify=trust) as client:
            try:
                return (await client.get(f"{url}/live", timeout=HANG_S)).is_success
            except httpx.ConnectError:
                return False

    old = ssl.create_default_context(cafile=certificate)
    assert await is_trusted(old)
    (tmp_path / "key.pem").write_text("-----BEGIN half a key")
    await eventually(lambda: "http_tls_key_file" in caplog.text)
    assert await is_trusted(old), "what is half written is passed over"
    make_certificates(tmp_path)
    new = ssl.create_default_context(cafile=certificate)
    async with asyncio.timeout(HANG_S):
        while not await is_trusted(new):
            await asyncio.sleep(0.05)
    assert not await is_trusted(old)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(serving_it, HANG_S)
