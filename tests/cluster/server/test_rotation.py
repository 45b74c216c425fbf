"""Certificates and tokens are replaced while the server runs: new calls need the new ones, live streams go on."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.server.watched_files import WatchedFiles
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.errors import InvalidField
from support.cluster.certificates import make_certificates
from support.cluster.fake_gang import FakeGang
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S

HI = pb.GenerateRequest(text="Hi")


def put(content: str, path: Path) -> None:
    """Replace a file at once, with another time whatever the clock's steps are."""
    new = path.with_suffix(".new")
    new.write_text(content)
    os.utime(new, ns=(0, path.stat().st_mtime_ns + 1))
    new.replace(path)


async def told(served: Serving, token: str) -> grpc.StatusCode:
    try:
        await served.stub.Generate(HI, metadata=(("authorization", f"Bearer {token}"),), timeout=HANG_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_tokens(tokenizer: ChatTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gemray_cluster")
    file = tmp_path / "tokens"
    file.write_text("old\n")
    ok, refused = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
    async with serving(tokenizer, FakeGang(), auth_token_file=str(file)) as served:
        assert [await told(served, token) for token in ("old", "new")] == [ok, refused]
        put("old\nnew\n", file)
        assert [await told(served, token) for token in ("old", "new")] == [ok, ok]
        put("new\n", file)
        assert [await told(served, token) for token in ("old", "new")] == [refused, ok]
        put("\n", file)
        assert [await told(served, token) for token in ("old", "new")] == [refused, ok], "an empty file lets nobody out"
        put("# who may call\nnewer\n", file)
        assert [await told(served, token) for token in ("# who may call", "newer", "new")] == [refused, refused, ok]
        put("\N{ZERO WIDTH NO-BREAK SPACE}new\r\n", file)
        assert await told(served, "new") is ok, "as some editors write it"
        file.unlink()
        assert await told(served, "new") is ok
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 3, "once each"
    assert "a file with at least one token, one a line; what was read before stays in use" in warnings[0]
    assert "new" not in caplog.text.replace(str(file), ""), "no token gets into the log"


async def test_certificate(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    old = cert.read_bytes()
    (tmp_path / "next").mkdir()
    make_certificates(tmp_path / "next")
    new = (tmp_path / "next" / "cert.pem").read_bytes()
    config: dict[str, Any] = {"tls_cert_file": str(cert), "tls_key_file": str(key)}
    async with serving(tokenizer, FakeGang(), **config) as served:

        async def is_trusted(authority: bytes) -> bool:
            credentials = grpc.ssl_channel_credentials(authority)
            async with grpc.aio.secure_channel(f"localhost:{served.server.port}", credentials) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                try:
                    return bool((await stub.Generate(HI, timeout=HANG_S)).request_id)
                except grpc.aio.AioRpcError:
                    return False

        assert [await is_trusted(old), await is_trusted(new)] == [True, False]
        credentials = grpc.ssl_channel_credentials(old)
        async with grpc.aio.secure_channel(f"localhost:{served.server.port}", credentials) as live:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(live)
            assert (await stub.Generate(HI, timeout=HANG_S)).request_id
            put((tmp_path / "next" / "key.pem").read_text(), key)  # no pair with the certificate that is still there
            assert await is_trusted(old)
            put(new.decode(), cert)
            assert [await is_trusted(old), await is_trusted(new)] == [False, True]
            assert (await stub.Generate(HI, timeout=HANG_S)).request_id, "a connection that is there stays"


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces a mounted secret."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tokens").write_text(version)
    (tmp_path / "data").symlink_to("1")
    file = tmp_path / "data" / "tokens"
    reads = []

    def read() -> str:
        reads.append(file.read_text())
        return reads[-1]

    watched = WatchedFiles([str(file)], read)
    assert [watched.latest(), watched.latest()] == ["1", "1"]
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").replace(tmp_path / "data")
    assert [watched.latest(), watched.latest()] == ["2", "2"]
    assert reads == ["1", "2"]


def test_what_cannot_be_read_at_the_start_is_an_error(tmp_path: Path) -> None:
    def read() -> str:
        raise InvalidField("f", "v", "readable")

    with pytest.raises(InvalidField):
        WatchedFiles([str(tmp_path / "none")], read)
