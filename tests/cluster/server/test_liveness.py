"""What the probes of the Helm chart are told: readiness and liveness part ways when the engine is dead."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gemray_cluster.check import health_probe
from gemray_cluster.gang.client import GangState
from gemray_cluster.server.health import LIVENESS
from gemray_cluster.server.service import SERVICE_NAME
from support.cluster.certificates import make_certificates
from support.cluster.fake_gang import FakeGang
from support.cluster.serving import serving
from support.cluster.text import tiny_tokenizer
from support.waiting import HANG_S

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("state", "ready", "alive"),
    [
        (GangState.STARTING, NOT_SERVING, SERVING),
        (GangState.SERVING, SERVING, SERVING),
        (GangState.DRAINING, NOT_SERVING, SERVING),
        (GangState.FAILED, NOT_SERVING, NOT_SERVING),
        (GangState.STOPPED, NOT_SERVING, NOT_SERVING),
    ],
)
async def test_health_by_state(state: GangState, ready: int, alive: int, tmp_path: Path) -> None:
    async with serving(tiny_tokenizer(tmp_path), FakeGang(state=state)) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        for service, expected in (("", ready), (SERVICE_NAME, ready), (LIVENESS, alive)):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=HANG_S)
            assert answer.status == expected, service


def test_the_chart_asks_for_these_names() -> None:
    assert (SERVICE_NAME, LIVENESS) == ("gemray.v1.GenerationService", "gemray.liveness")


def test_probe_says_why_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert health_probe.main(["--address=127.0.0.1:9", "--service=x", "--timeout=2"]) == 1
    assert "127.0.0.1:9 'x': UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize("mutual", [False, True])
async def test_probe_speaks_tls_to_its_own_pod(mutual: bool, tmp_path: Path) -> None:
    """By address, as in the chart, where the certificate is made out to a name."""
    make_certificates(tmp_path)
    secret = tmp_path / "tls"
    secret.mkdir()
    for file, key in (("cert.pem", "tls.crt"), ("key.pem", "tls.key"), ("cert.pem", "ca.crt")):
        (secret / key).write_bytes((tmp_path / file).read_bytes())
    config: dict[str, Any] = {"tls_cert_file": str(secret / "tls.crt"), "tls_key_file": str(secret / "tls.key")}
    if mutual:
        config["tls_client_ca_file"] = str(secret / "ca.crt")
    gang = FakeGang()
    async with serving(tiny_tokenizer(tmp_path), gang, **config) as running:
        address = f"--address=127.0.0.1:{running.server.port}"

        async def probe(service: str, *more: str) -> int:
            return await asyncio.to_thread(
                health_probe.main, [address, f"--service={service}", f"--timeout={HANG_S}", *more]
            )

        tls = (f"--tls-dir={secret}", "--tls-name=localhost")
        assert await probe(SERVICE_NAME, *tls) == 0
        assert await probe(SERVICE_NAME) == 1, "plain text is refused"
        gang.state = GangState.FAILED
        async with asyncio.timeout(HANG_S):
            while await probe(LIVENESS, *tls) == 0:
                await asyncio.sleep(0.05)
