"""Files and ports that would end a start are told by `gemray check`, not only by `gemray serve`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gemray.client import InvalidOption
from gemray.openai.serve import Listening
from gemray_cluster.check import run
from gemray_cluster.check.port import check_port
from gemray_cluster.check.result import CheckResult, Status
from gemray_cluster.check.server_files import check_server_files
from gemray_cluster.observability.metrics import MetricsServer
from gemray_cluster.ray_runtime.session import RaySession
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.server import _check_address
from gemray_cluster.settings.errors import InvalidSetting
from gemray_cluster.settings.settings import ServeSettings
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import AddressUnavailable, GemrayError, InvalidField
from support.cluster.certificates import make_certificates


def _check(**settings: Any) -> list[CheckResult]:
    return check_server_files(ServerConfig(**settings))


def test_nothing_is_said_of_files_that_are_not_named() -> None:
    assert _check() == []


def test_files_that_the_server_takes(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    (tmp_path / "tokens").write_text("one\ntwo\n")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    tls, tokens = _check(
        tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=cert, auth_token_file=str(tmp_path / "tokens")
    )
    assert (tls.status, tokens.status) == (Status.OK, Status.OK)
    assert f"{cert} and {key} are a pair, and clients show one of {cert}" in tls.sentence
    assert f"{tmp_path / 'tokens'} has 2" in tokens.sentence


def test_files_that_the_server_refuses(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    empty = tmp_path / "empty"
    empty.touch()
    for settings, words in (
        ({"tls_cert_file": str(empty), "tls_key_file": str(tmp_path / "key.pem")}, "tls_cert_file"),
        ({"auth_token_file": str(empty)}, "a file with at least one token"),
        ({"auth_token_file": str(tmp_path / "nowhere")}, "No such file"),
        ({"otlp_traces_endpoint": "collector:4317"}, "http://HOST:PORT"),
    ):
        (result,) = _check(**settings)
        assert result.status is Status.FAIL
        assert words in result.sentence


def test_a_free_port_of_a_host_that_is_none() -> None:
    result = check_port("grpc port", "no.such.host.invalid", 0)
    assert result.status is Status.FAIL
    assert "no.such.host.invalid is no address of this host" in result.sentence


def test_an_address_in_brackets_comes_with_the_one_to_write() -> None:
    result = check_port("grpc port", "[::1]", 0)
    assert result.status is Status.FAIL
    assert "an IPv6 address is written as ::1" in result.sentence


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_taken_address_is_written_as_clients_write_it() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        assert f"[::1]:{port} is taken" in check_port("grpc port", "::1", port).sentence
        with pytest.raises(AddressUnavailable, match=rf"cannot listen on \[::1\]:{port}: Address already in use"):
            _check_address("::1", port)
        with pytest.raises(InvalidOption, match=rf"'\[::1\]:{port}'"):
            Listening("::1", port).open()
        with pytest.raises(AddressUnavailable, match=rf"cannot serve metrics on \[::1\]:{port}"):
            MetricsServer(CollectorRegistry(), host="::1", port=port)
    assert f"[::1]:{port} is free" in check_port("grpc port", "::1", port).sentence


def test_two_servers_on_one_port() -> None:
    with pytest.raises(InvalidField, match=r"metrics_port = 9400 is not allowed: another port than gRPC's, 9400"):
        ServerConfig(port=9400, metrics_port=9400)
    ServerConfig(port=0, metrics_port=0)


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(config: object, *, num_ranks: int) -> None:
        raise GemrayError("no cluster here")

    monkeypatch.setattr(RaySession, "open", unreachable)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
async def test_what_configs_alone_refuse_is_told_before_a_cluster_is_asked_for(device: str) -> None:
    settings = ServeSettings(model=str(embedded_path("gemray-tiny")), port=0, tp=3, device=device)
    results = await run.check_all(settings, lambda result: None)
    assert [result.name for result in results[-2:]] == ["fit", "ray"]
    assert "tp = 3" in results[-2].sentence


@pytest.mark.usefixtures("no_cluster")
async def test_no_ranks_are_refused_before_cpus_are_counted_for_them() -> None:
    """`local_num_cpus = 0`, which nobody gave, used to be refused as well."""
    with pytest.raises(InvalidSetting, match=r"tp = 0 .* is not allowed: an integer >= 1"):
        await run.check_all(ServeSettings(model=str(embedded_path("gemray-tiny")), port=0, tp=0), lambda result: None)


@pytest.mark.usefixtures("no_cluster")
async def test_what_depends_on_the_device_waits_for_the_cluster() -> None:
    settings = ServeSettings(model=str(embedded_path("gemray-tiny")), port=0)
    results = await run.check_all(settings, lambda result: None)
    assert "fit" not in [result.name for result in results]


@pytest.mark.usefixtures("no_cluster")
async def test_the_command_looks_at_them(tmp_path: Path) -> None:
    settings = ServeSettings(model=str(embedded_path("gemray-tiny")), port=0, auth_token_file=str(tmp_path / "nowhere"))
    results = await run.check_all(settings, lambda result: None)
    assert "auth_token_file" in next(result.sentence for result in results if result.name == "tokens")
