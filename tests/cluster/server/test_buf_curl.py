"""An independent gRPC stack (buf curl, in Go) as a client: unary, streamed, health, reflection, errors, tools, cancel.

It sends no deadlines.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.calls import call_ids
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUF = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
SERVICE = "gemray.v1.GenerationService"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Serving]:
    async with serving(tokenizer, FakeGang(Script([180, 213, 107, 106], group_sizes=(3,)))) as running:
        yield running


async def buf_curl(
    served: Serving, method: str, body: dict[str, Any] | None = None, *flags: str
) -> tuple[int, str, str]:
    """Exit code, stdout, stderr. The schema comes from the server's reflection."""
    process = await started(served, method, body, *flags)
    out, err = await asyncio.wait_for(process.communicate(), HANG_S)
    return process.returncode or 0, out.decode(), err.decode()


async def started(served: Serving, method: str, body: dict[str, Any] | None, *flags: str) -> asyncio.subprocess.Process:
    assert BUF is not None, "buf-bin belongs to the test extra"
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *flags]
    command += ["-d", json.dumps(body)] if body is not None else []
    return await asyncio.create_subprocess_exec(
        *command,
        f"http://{served.server.address}/{method}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_unary(served: Serving) -> None:
    code, out, err = await buf_curl(
        served, f"{SERVICE}/Generate", {"text": "Hi", "requestId": "r", "sampling": {"temperature": 0, "seed": "5"}}
    )
    assert code == 0, err
    answer = json.loads(out)
    assert (answer["requestId"], answer["text"], answer["tokenIds"]) == ("r", "Hi\n", [180, 213, 107, 106])
    assert answer["completion"]["finishReason"] == "FINISH_REASON_STOP_TOKEN"
    assert (answer["completion"]["stopTokenId"], answer["completion"]["seed"]) == (106, "5")


async def test_streamed(served: Serving) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    code, out, err = await buf_curl(served, f"{SERVICE}/GenerateStream", {"chat": chat})
    assert code == 0, err
    decoder, messages = json.JSONDecoder(), []
    while out := out.strip():
        message, end = decoder.raw_decode(out)
        messages.append(message)
        out = out[end:]
    assert [message["delta"].get("tokenIds") for message in messages[:-1]] == [[180, 213, 107], [106]]
    assert messages[-1]["final"]["finishReason"] == "FINISH_REASON_STOP_TOKEN"


async def test_health(served: Serving) -> None:
    code, out, err = await buf_curl(served, "grpc.health.v1.Health/Check", {"service": SERVICE})
    assert code == 0, err
    assert json.loads(out) == {"status": "SERVING"}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection(served: Serving, version: str) -> None:
    code, out, err = await buf_curl(served, "", None, "--reflect-protocol", f"grpc-{version}", "--list-services")
    assert code == 0, err
    assert {SERVICE, "grpc.health.v1.Health", f"grpc.reflection.{version}.ServerReflection"} <= set(out.split())
    code, out, err = await buf_curl(
        served, f"{SERVICE}/Tokenize", {"text": "Hi"}, "--reflect-protocol", f"grpc-{version}"
    )
    assert code == 0, err
    assert json.loads(out)["text"] == "Hi"


async def test_bad_value(served: Serving) -> None:
    code, _, err = await buf_curl(served, f"{SERVICE}/Generate", {"text": "Hi", "sampling": {"topP": 1.5}})
    assert code != 0
    error = json.loads(err)
    assert error["code"] == "invalid_argument"
    assert "sampling.top_p = 1.5 is not allowed: 0 < top_p <= 1" in error["message"]
    assert error["details"][0]["type"] == "google.rpc.BadRequest"


async def test_a_tool_is_called_and_answers(
    served: Serving, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = [*call_ids(tokenizer, "get_weather", {"city": "Paris"}), 106]
    monkeypatch.setattr(served.gang, "script", Script(called))
    asked = {"role": "user", "content": "Weather?"}
    code, out, err = await buf_curl(served, f"{SERVICE}/Generate", {"chat": {"messages": [asked]}})
    assert code == 0, err
    (call,) = json.loads(out)["toolCalls"]
    assert (call["name"], json.loads(call["argumentsJson"])) == ("get_weather", {"city": "Paris"})
    told = {"role": "tool", "toolCallId": call["id"], "content": "sun"}
    messages = [asked, {"role": "assistant", "toolCalls": [call]}, told]
    code, _, err = await buf_curl(served, f"{SERVICE}/Generate", {"chat": {"messages": messages}})
    assert code == 0, err
    assert "sun" in tokenizer.decode(served.gang.submitted[-1].prompt_ids)


async def test_an_interrupt_stops_the_generation(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.gang, "script", Script([107] * 200, stalls_after=3))
    body = {"text": "Hi", "sampling": {"maxTokens": 200, "ignoreEos": True}}
    process = await started(served, f"{SERVICE}/GenerateStream", body)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), HANG_S)
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), HANG_S)
    await eventually(lambda: len(served.gang.cancelled) == 1 and served.gang.num_active == 0)
