"""Who a client is let in by, what it sends in plain text, and what an error tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gemray.client import AsyncClient, Client, InvalidOption, RequestRefused, Retry, ServerAddress, ServerUnreachable
from gemray.client.errors import error_of
from gemray.client.tls import BUNDLES, system_authorities
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.certificates import make_certificates
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    async with serving(tokenizer, FakeGang(Script([180, 106]))) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_every_call_in_a_thread(served: Serving) -> None:
    def ask() -> None:
        with Client(served.server.address) as client:
            assert client.generate(pb.GenerateRequest(text="Hi")).text == "H"
            tokens = client.tokenize(pb.TokenizeRequest(text="Hi"))
            assert client.detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids)).text == "Hi"
            assert client.model_info(timeout_s=HANG_S).model_type == "gemma4_text"
            assert client.server_stats().state == pb.SERVER_STATE_SERVING

    await asyncio.to_thread(ask)


@pytest.mark.asyncio(loop_scope="module")
async def test_every_call_in_a_loop(served: Serving) -> None:
    async with AsyncClient(served.server.address) as client:
        assert (await client.generate(pb.GenerateRequest(text="Hi"))).text == "H"
        tokens = await client.tokenize(pb.TokenizeRequest(text="Hi"))
        assert (await client.detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))).text == "Hi"
        assert (await client.model_info(timeout_s=HANG_S)).model_type == "gemma4_text"
        assert (await client.server_stats()).state == pb.SERVER_STATE_SERVING


@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_names_the_field(served: Serving) -> None:
    request = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(top_p=7))
    async with AsyncClient(served.server.address) as client:
        with pytest.raises(RequestRefused, match=r"INVALID_ARGUMENT: sampling\.top_p = 7") as caught:
            await client.generate(request)
    assert caught.value.field == "sampling.top_p"
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("address", "more", "allowed"),
    [
        ("127.0.0.1:1", {}, True),
        ("localhost:1", {}, True),
        ("[::1]:1", {}, True),
        ("example.org:1", {}, False),
        ("10.0.0.1:1", {}, False),
        ("example.org:1", {"tls": True}, True),
        ("example.org:1", {"tls_ca_file": "ca.pem"}, True),
        ("example.org:1", {"plaintext_token": True}, True),
    ],
)
def test_a_token_goes_in_plain_text_to_this_machine_alone(
    tmp_path: Path, address: str, more: dict[str, object], allowed: bool
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    if allowed:
        server = ServerAddress(address, str(token), **more)  # type: ignore[arg-type]
        assert server.metadata == (("authorization", "Bearer secret"),)
    else:
        with pytest.raises(InvalidOption, match="auth_token_file") as caught:
            ServerAddress(address, str(token), **more)  # type: ignore[arg-type]
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "can_be"),
    [
        ("localhost:50051", True),
        ("10.0.0.1:1", True),
        ("[::1]:65535", True),
        ("dns:///localhost:1", True),
        ("http://localhost:50051", False),
        ("grpc://localhost:50051", False),
        ("::1:50051", False),
        ("localhost", False),
        (":50051", False),
        ("[]:50051", False),
        ("localhost:0", False),
        ("localhost:65536", False),
        ("localhost:\u0665", False),
        ("localhost:50051/", False),
        ("me@localhost:50051", False),
        ("my host:50051", False),
        ("", False),
    ],
)
def test_addresses(address: str, can_be: bool) -> None:
    if can_be:
        assert ServerAddress(address).address == address
    else:
        with pytest.raises(InvalidOption) as caught:
            Client(address)
        assert caught.value.field == "address"


@pytest.mark.parametrize(
    ("content", "allowed"),
    [
        (None, "No such file"),
        (b"", "at least one token"),
        (b" \n", "at least one token"),
        (b"\xff", "not UTF-8"),
        (b"one\n# the other\ntwo\n", r"without remarks \(line 2\)"),
        (b"one\n\ntwo words", r"without spaces, one a line \(not line 3\)"),
        ("t\N{LATIN SMALL LETTER O WITH DIAERESIS}ken".encode(), r"visible ASCII .* \(not line 1\)"),
    ],
)
def test_a_file_without_a_token(tmp_path: Path, content: bytes | None, allowed: str) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content)
    with pytest.raises(InvalidOption, match=f"auth_token_file = .*{allowed}") as caught:
        _ = ServerAddress("127.0.0.1:1", str(token)).metadata
    assert "two" not in str(caught.value)


@pytest.mark.parametrize("content", ["one\n", "one\r\ntwo\r\n", "\N{ZERO WIDTH NO-BREAK SPACE}one", "\n  one  \n"])
def test_the_first_token_of_a_file_is_shown(tmp_path: Path, content: str) -> None:
    token = tmp_path / "token"
    token.write_bytes(content.encode())
    assert ServerAddress("127.0.0.1:1", str(token)).metadata == (("authorization", "Bearer one"),)


async def test_tls_with_the_system_s_authorities(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    make_certificates(tmp_path)
    certificate = str(tmp_path / "cert.pem")
    files: dict[str, Any] = {"tls_cert_file": certificate, "tls_key_file": str(tmp_path / "key.pem")}
    async with serving(tokenizer, FakeGang(Script([180, 106])), **files) as served:
        address = f"localhost:{served.server.port}"
        never = Retry(first_s=0)
        async with AsyncClient(ServerAddress(address, tls=True), retry=never) as stranger:
            with pytest.raises(ServerUnreachable, match="UNAVAILABLE"):
                await stranger.generate(pb.GenerateRequest(text="Hi"), timeout_s=HANG_S)
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        async with AsyncClient(ServerAddress(address, tls=True), retry=never) as client:
            assert (await client.generate(pb.GenerateRequest(text="Hi"), timeout_s=HANG_S)).text == "H"


@pytest.mark.parametrize(
    ("details", "hint"),
    [
        ("failed to connect to all addresses; last error: SSL_ERROR_SSL: WRONG_VERSION_NUMBER", "has no TLS"),
        ("failed to connect to all addresses; last error: CERTIFICATE_VERIFY_FAILED: self signed", "tls_ca_file"),
        ("failed to connect to all addresses; last error: Hostname Verification Check failed.", "the address is not"),
        ("failed to connect to all addresses; last error: Socket closed", "may want TLS"),
        ("failed to connect to all addresses; last error: Connection reset by peer", "may want TLS"),
        ("failed to connect to all addresses; last error: Connection refused", ""),
        ("Socket closed", ""),
        (None, ""),
    ],
)
def test_a_connection_that_fails_says_what_may_help(details: str | None, hint: str) -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details, None)
    told = error_of("host:1", error)
    said, _, helps = str(told).removeprefix(f"host:1: UNAVAILABLE: {details}").partition("; ")
    assert (said, hint in helps, bool(helps)) == ("", True, bool(hint))
    assert told.details == details


def test_the_authorities_of_this_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    named = tmp_path / "mine.pem"
    named.write_bytes(b"mine")
    monkeypatch.setenv("SSL_CERT_FILE", str(named))
    assert system_authorities() == b"mine"
    monkeypatch.delenv("SSL_CERT_FILE")
    if any(Path(bundle).is_file() for bundle in BUNDLES):
        assert b"-----BEGIN" in (system_authorities() or b"")
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "theirs")
    assert system_authorities() is None
