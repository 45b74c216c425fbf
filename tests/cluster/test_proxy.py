"""A proxy in the environment is not asked for a server on this machine."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gemray.channel_options import NO_PROXY, client_options, is_every_interface, listening_in_words
from gemray.client.connection import connected
from gemray.client.server_address import ServerAddress
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.check import health_probe
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang
from support.cluster.serving import serving
from support.waiting import HANG_S


@pytest.fixture
def _dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nothing listens there


@pytest.mark.usefixtures("_dead_proxy")
async def test_clients_and_probes_reach_the_loopback(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang()) as served:

        def generate() -> str:
            with connected(ServerAddress(served.server.address)) as stub:
                return str(stub.Generate(pb.GenerateRequest(text="Hi", request_id="a"), timeout=HANG_S).request_id)

        assert await asyncio.to_thread(generate) == "a"
        assert await asyncio.to_thread(health_probe.main, ["--address", served.server.address]) == 0


@pytest.mark.usefixtures("_dead_proxy")
async def test_the_proxy_of_this_test_catches_what_is_not_kept_from_it(tokenizer: ChatTokenizer) -> None:
    async with serving(tokenizer, FakeGang()) as served, grpc.aio.insecure_channel(served.server.address) as channel:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.channel_ready(), 1)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.8.8.8", "localhost", "LOCALHOST", "localhost.", "a.localhost", "[::1]", "0.0.0.0", "[::]"],
)
def test_names_of_this_machine(host: str) -> None:
    assert NO_PROXY in client_options(f"{host}:50051")


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "example.org", "localhost.example.org", "128.0.0.1", "[fe80::1]", "127.0.0"]
)
def test_other_machines_may_be_behind_a_proxy(host: str) -> None:
    assert NO_PROXY not in client_options(f"{host}:50051")


@pytest.mark.parametrize(("host", "every"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("::1", False)])
def test_every_interface(host: str, every: bool) -> None:
    assert is_every_interface(host) is every


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "127.0.0.1:7"),
        ("::1", "[::1]:7"),
        ("10.0.0.1", "10.0.0.1:7"),
        ("0.0.0.0", "0.0.0.0:7, all addresses of this machine: from here 127.0.0.1:7"),
        ("::", "[::]:7, all addresses of this machine: from here [::1]:7"),
    ],
)
def test_where_a_server_listens_is_told_as_it_is(host: str, words: str) -> None:
    told = listening_in_words(host, 7)
    assert told == words
    here = told.rsplit(maxsplit=1)[-1]
    assert listening_in_words(host, 7, "http://{}/v1").rsplit(maxsplit=1)[-1] == f"http://{here}/v1"
