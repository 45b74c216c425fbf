"""What the probes of the Helm chart are told: readiness and liveness part ways when the engine is dead."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gemray_cluster.check import health_probe
from gemray_cluster.gang_client import GangState
from gemray_cluster.server.health import LIVENESS
from gemray_cluster.server.service import SERVICE_NAME
from support.fake_gang import FakeGang
from support.serving import serving
from support.text import demo_tokenizer

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
    async with serving(demo_tokenizer(tmp_path), FakeGang(state=state)) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        for service, expected in (("", ready), (SERVICE_NAME, ready), (LIVENESS, alive)):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == expected, service


def test_the_chart_asks_for_these_names() -> None:
    assert (SERVICE_NAME, LIVENESS) == ("gemray.v1.GenerationService", "gemray.liveness")


def test_probe_says_why_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert health_probe.main(["--address=127.0.0.1:9", "--service=x", "--timeout=2"]) == 1
    assert "127.0.0.1:9 'x': UNAVAILABLE" in capsys.readouterr().err
