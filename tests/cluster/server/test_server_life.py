"""Health, draining, ports, authentication, TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gemray.client.errors import InvalidOption
from gemray.client.server_address import ServerAddress
from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.gang.client import GangState
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.errors import CallCut
from gemray_cluster.server.live_calls import LiveCalls
from gemray_cluster.server.server import GenerationServer
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.errors import AddressUnavailable, InvalidField
from gemray_workers.messages import SequenceDelta, Submit
from support.cluster.certificates import make_certificates
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import Serving, joined, reader_of, retry_delay_of, serving
from support.waiting import HANG_S, eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "gemray.v1.GenerationService"
HI = pb.GenerateRequest(text="Hi")


def health(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


@pytest.mark.parametrize("name", ["", SERVICE])
async def test_health_follows_the_gang(tokenizer: ChatTokenizer, name: str) -> None:
    gang = FakeGang(state=GangState.STARTING)
    async with serving(tokenizer, gang) as served:
        request = health_pb2.HealthCheckRequest(service=name)
        assert (await health(served.channel).Check(request)).status == NOT_SERVING
        watch = health(served.channel).Watch(request)
        assert (await watch.read()).status == NOT_SERVING
        for state, expected in [
            (GangState.SERVING, SERVING),
            (GangState.FAILED, NOT_SERVING),
            (GangState.SERVING, SERVING),
            (GangState.DRAINING, NOT_SERVING),
        ]:
            gang.state = state
            assert (await asyncio.wait_for(watch.read(), HANG_S)).status == expected
        watch.cancel()


async def test_health_of_an_unknown_service(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang()) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(served.channel).Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang()) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        assert {SERVICE, "grpc.health.v1.Health"} <= {s.name for s in answer.list_services_response.service}
        call.cancel()


class HeldGang(FakeGang):
    """Gives the first token of a request; the others once it is let go."""

    def __init__(self, token_ids: Sequence[int] | None = (180,) * 20) -> None:
        super().__init__(Script(token_ids))
        self.let_go = asyncio.Event()

    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        async for delta in super().generate(submit):
            yield delta
            await self.let_go.wait()


async def test_draining_finishes_what_runs_and_takes_nothing_new(tokenizer: ChatTokenizer) -> None:
    gang = HeldGang([180] * 10 + [106])
    async with serving(tokenizer, gang, drain_notice_s=HANG_S, drain_deadline_s=HANG_S) as served:
        running = asyncio.ensure_future(served.stub.Generate(HI))
        while gang.num_active == 0:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(served.server.drain())
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError, match="draining") as caught:
            await served.stub.Generate(HI)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await health(served.channel).Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        stats = await served.stub.GetServerStats(pb.GetServerStatsRequest())
        assert stats.state == pb.SERVER_STATE_DRAINING
        assert not running.done()
        gang.let_go.set()
        assert (await running).text == "H" * 10
        assert await draining == 0


async def held_stream(served: Serving) -> Any:
    """A stream that has begun."""
    sampling = pb.SamplingParameters(max_tokens=20, ignore_eos=True)
    call = served.stub.GenerateStream(pb.GenerateStreamRequest(text="Hi", sampling=sampling))
    await anext(aiter(call))
    return call


async def sent_away(channel: grpc.aio.Channel) -> None:
    """Return when the channel's connection has got a GOAWAY: it takes no new calls then."""
    async with asyncio.timeout(HANG_S):
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)


async def rest_of(call: Any) -> pb.Completion:
    """The end of a stream that goes on."""
    async with asyncio.timeout(HANG_S):
        *_, last = [answer async for answer in call]
    assert await call.code() is grpc.StatusCode.OK
    completion: pb.Completion = last.final
    return completion


async def test_draining_sends_clients_away_and_their_streams_go_on(tokenizer: ChatTokenizer) -> None:
    gang = HeldGang()
    async with serving(tokenizer, gang, drain_notice_s=0.0, drain_deadline_s=HANG_S) as served:
        call = await held_stream(served)
        draining = asyncio.create_task(served.server.drain())
        await sent_away(served.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.GetServerStats(pb.GetServerStatsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "nobody listens here any more"
        assert not draining.done()
        gang.let_go.set()
        assert (await rest_of(call)).usage.completion_tokens == 20
        assert await draining == 0


async def test_old_connections_are_replaced_and_their_streams_go_on(tokenizer: ChatTokenizer) -> None:
    gang = HeldGang()
    async with serving(tokenizer, gang, max_connection_age_s=0.2) as served:
        call = await held_stream(served)
        await sent_away(served.channel)
        assert (await served.stub.GetServerStats(pb.GetServerStatsRequest())).requests.active == 1
        gang.let_go.set()
        assert (await rest_of(call)).usage.completion_tokens == 20


async def cut(call: Any) -> tuple[list[int], str]:
    """What a stream that a server cuts gives, and what it is told."""
    ids: list[int] = []

    async def read() -> None:
        async for message in call:
            ids.extend(message.delta.token_ids)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read(), HANG_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_delay_of(caught.value) > 0
    return ids, caught.value.details() or ""


async def test_what_a_drain_cuts_goes_on_elsewhere(tokenizer: ChatTokenizer) -> None:
    request = pb.GenerateStreamRequest(text="Hi", sampling={"seed": 5, "max_tokens": 20, "ignore_eos": True})
    gang = HeldGang(None)
    async with serving(tokenizer, gang, drain_deadline_s=0, drain_notice_s=HANG_S) as served:
        whole = asyncio.ensure_future(served.stub.Generate(HI))
        call = served.stub.GenerateStream(request)
        (first,) = (await anext(aiter(call))).delta.token_ids
        await eventually(lambda: gang.num_active == 2)
        assert await served.server.drain() == 2
        with pytest.raises(grpc.aio.AioRpcError, match="within drain_deadline_s = 0: ask again") as caught:
            await whole
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        ids, told = await cut(call)
        assert "same sampling.seed and the tokens so far as emitted_token_ids" in told
        assert len(gang.cancelled) == 2
        assert (served.server.limiter.failed, served.server.limiter.cancelled) == (2, 0)
    async with serving(tokenizer, FakeGang()) as another:
        expected = joined(await another.stream(request)).token_ids
        request.emitted_token_ids.extend([first, *ids])
        rest = joined(await another.stream(request)).token_ids
    assert [first, *ids, *rest] == expected
    assert len(rest) > 10


async def test_a_client_that_leaves_while_it_is_cut_has_left(tokenizer: ChatTokenizer) -> None:
    calls = LiveCalls()

    async def call() -> None:
        async with calls.live():
            await asyncio.sleep(HANG_S)

    for leaves, error in ((False, CallCut), (True, asyncio.CancelledError)):
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        assert calls.cut("the reason") == 1
        assert calls.cut("another") == 0
        if leaves:
            task.cancel()
        with pytest.raises(error):
            await task
        await calls.wait_for_none()


async def test_a_server_that_ends_without_a_drain_says_so(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, HeldGang()) as served:
        call = await held_stream(served)
        await served.server.close()
        _, told = await cut(call)
        assert told.startswith("the server ends: ask again")


async def test_taken_port_is_named(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang()) as served:
        second = GenerationServer(ServerConfig(port=served.server.port), FakeGang(), reader_of(tokenizer))
        with pytest.raises(AddressUnavailable, match=rf"127\.0\.0\.1:{served.server.port}: Address already in use"):
            await second.start()
        assert (await served.stub.Generate(HI)).request_id


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic right", "right", "Bearer "])
async def test_no_or_bad_token(tokenizer: ChatTokenizer, tmp_path: Path, authorization: str | None) -> None:
    (tmp_path / "tokens").write_text("right\nnext\n")
    metadata = (("authorization", authorization),) if authorization else ()
    async with serving(tokenizer, FakeGang(), auth_token_file=str(tmp_path / "tokens")) as served:
        stream = pb.GenerateStreamRequest(text="Hi")
        for call in (served.stub.Generate(HI, metadata=metadata), served.stream(stream, metadata=metadata)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert served.gang.submitted == []
        assert (await health(served.channel).Check(health_pb2.HealthCheckRequest())).status == SERVING


@pytest.mark.parametrize("authorization", ["Bearer right", "bearer next"])
async def test_good_token(tokenizer: ChatTokenizer, tmp_path: Path, authorization: str) -> None:
    (tmp_path / "tokens").write_text("right\nnext\n")
    async with serving(tokenizer, FakeGang(), auth_token_file=str(tmp_path / "tokens")) as served:
        metadata = (("authorization", authorization),)
        assert (await served.stub.Generate(HI, metadata=metadata)).request_id
        assert await served.stream(pb.GenerateStreamRequest(text="Hi"), metadata=metadata)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"port": 65536}, "port"),
        ({"max_live_requests": 0}, "max_live_requests"),
        ({"max_message_bytes": 1}, "64KiB"),
        ({"tls_cert_file": "cert"}, "tls_key_file"),
        ({"tls_client_ca_file": "ca"}, "tls_client_ca_file"),
        ({"drain_deadline_s": -1.0}, "drain_deadline_s"),
    ],
)
def test_bad_settings_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        ServerConfig(**config)


async def test_unreadable_files_are_named(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for config, words in [
        ({"auth_token_file": str(tmp_path / "none")}, "auth_token_file"),
        ({"auth_token_file": str(tmp_path / "empty")}, "at least one token"),
        ({"tls_cert_file": str(tmp_path / "none"), "tls_key_file": str(tmp_path / "none")}, "tls_key_file"),
        ({"tls_cert_file": str(tmp_path / "empty"), "tls_key_file": str(tmp_path / "empty")}, "a PEM file"),
    ]:
        server = GenerationServer(ServerConfig(port=0, **config), FakeGang(), reader_of(tokenizer))  # type: ignore[arg-type]
        with pytest.raises(InvalidField, match=words):
            await server.start()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"key": "other/key.pem"}, "tls_key_file.*not allowed.*key values mismatch"),
        ({"key": "locked.pem"}, "tls_key_file.*without a pass phrase"),
        ({"key": "cert.pem"}, "tls_key_file.*the private key"),
        ({"cert": "key.pem"}, "tls_cert_file.*certificates"),
        ({"cert": "torn.pem"}, "tls_cert_file.*certificates"),
        ({"ca": "key.pem"}, "tls_client_ca_file.*certificates"),
        ({"ca": "torn.pem"}, "tls_client_ca_file.*certificates"),
    ],
)
async def test_tls_files_that_do_not_fit_are_named(
    tokenizer: ChatTokenizer, tmp_path: Path, files: dict[str, str], words: str
) -> None:
    (tmp_path / "other").mkdir()
    make_certificates(tmp_path)
    make_certificates(tmp_path / "other")
    key = serialization.load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    (tmp_path / "locked.pem").write_bytes(locked)
    (tmp_path / "torn.pem").write_bytes((tmp_path / "cert.pem").read_bytes()[:200])
    names = {"key": "key.pem", "cert": "cert.pem", "ca": "cert.pem"} | files
    path = {name: str(tmp_path / file) for name, file in names.items()}
    config = ServerConfig(port=0, tls_key_file=path["key"], tls_cert_file=path["cert"], tls_client_ca_file=path["ca"])
    server = GenerationServer(config, FakeGang(), reader_of(tokenizer))
    with pytest.raises(InvalidField, match=words):
        await server.start()
    client = ServerAddress("localhost:1", tls_ca_file=path["ca"], tls_key_file=path["key"], tls_cert_file=path["cert"])
    with pytest.raises(InvalidOption, match=words.replace("client_ca", "ca")):
        client.credentials()


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(tokenizer: ChatTokenizer, tmp_path: Path, mutual: bool) -> None:
    make_certificates(tmp_path)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    config: dict[str, Any] = {"tls_cert_file": str(cert), "tls_key_file": str(key)}
    if mutual:
        config["tls_client_ca_file"] = str(cert)
    anonymous = grpc.ssl_channel_credentials(cert.read_bytes())
    known = grpc.ssl_channel_credentials(cert.read_bytes(), key.read_bytes(), cert.read_bytes())
    async with serving(tokenizer, FakeGang(), **config) as served:
        address = f"localhost:{served.server.port}"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(HI, timeout=HANG_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "plain text is refused"
        async with grpc.aio.secure_channel(address, known) as channel:
            assert (await _stub(served, channel).Generate(HI, timeout=HANG_S)).request_id
        async with grpc.aio.secure_channel(address, anonymous) as channel:
            call = _stub(served, channel).Generate(HI, timeout=HANG_S)
            if not mutual:
                assert (await call).request_id
                return
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def _stub(served: Serving, channel: grpc.aio.Channel) -> Any:
    return generation_pb2_grpc.GenerationServiceStub(channel)
