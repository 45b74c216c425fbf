"""An independent gRPC stack (@grpc/grpc-js, in JavaScript) as a client: unary, streamed, cancel, deadline, errors."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.calls import call_ids
from support.cluster.fake_gang import Script
from support.cluster.node import PACKAGES, node_environment
from support.cluster.serving import Serving
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROTO = Path(__file__).parents[3] / "proto"


@pytest.fixture(scope="module")
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return node_environment(request.config, tmp_path_factory.mktemp("node"))


@pytest.fixture(autouse=True)
def _fresh_gang(served: Serving) -> None:
    served.gang.script = Script([180, 213, 107, 106], group_sizes=(3,))
    served.gang.cancelled.clear()


async def ask(environment: dict[str, str], served: Serving, scenario: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        "node", str(PACKAGES.with_name("client.js")), str(PROTO), served.server.address, scenario,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def test_unary(environment: dict[str, str], served: Serving) -> None:
    answer = await ask(environment, served, "unary")
    assert (answer["request_id"], answer["text"], answer["token_ids"]) == ("r", "Hi\n", [180, 213, 107, 106])
    assert answer["completion"]["finish_reason"] == "FINISH_REASON_STOP_TOKEN"
    assert answer["completion"]["seed"] == "18446744073709551615"


async def test_streamed(environment: dict[str, str], served: Serving) -> None:
    *deltas, last = await ask(environment, served, "stream")
    assert [message["delta"]["token_ids"] for message in deltas] == [[180, 213, 107], [106]]
    assert last["event"] == "final"
    assert last["final"]["stop_token_id"] == 106


async def test_a_tool_is_called_and_answers(
    environment: dict[str, str], served: Serving, tokenizer: ChatTokenizer
) -> None:
    served.gang.script = Script([*call_ids(tokenizer, "get_weather", {"city": "Paris"}), 106], group_sizes=(2,))
    (call,) = (await ask(environment, served, "tools"))["tool_calls"]
    assert (call["name"], json.loads(call["arguments_json"])) == ("get_weather", {"city": "Paris"})
    first, second = (tokenizer.decode(submit.prompt_ids) for submit in served.gang.submitted[-2:])
    assert "sun" in second
    assert "sun" not in first


async def test_cancelling_stops_the_generation(environment: dict[str, str], served: Serving) -> None:
    served.gang.script = Script([107] * 200, stalls_after=3)
    assert (await ask(environment, served, "cancel"))["code"] == "CANCELLED"
    await eventually(lambda: len(served.gang.cancelled) == 1 and served.gang.num_active == 0, HANG_S)


async def test_a_deadline_stops_the_generation(environment: dict[str, str], served: Serving) -> None:
    served.gang.script = Script([107] * 200, stalls_after=3)
    assert (await ask(environment, served, "deadline"))["code"] == "DEADLINE_EXCEEDED"
    await eventually(lambda: served.gang.num_active == 0 and served.server.limiter.active == 0, HANG_S)


async def test_a_bad_value_is_named(environment: dict[str, str], served: Serving) -> None:
    error = await ask(environment, served, "error")
    assert (error["code"], error["has_status"]) == ("INVALID_ARGUMENT", 1)
    assert "sampling.top_p = 1.5 is not allowed: 0 < top_p <= 1" in error["details"]
