"""An independent gRPC stack (buf curl, written in Go) as a client: unary, streamed, health, reflection, errors."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import Serving, serving
from support.waiting import HANG_S

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
    assert BUF is not None, "buf-bin belongs to the test extra"
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *flags]
    command += ["-d", json.dumps(body)] if body is not None else []
    process = await asyncio.create_subprocess_exec(
        *command,
        f"http://{served.server.address}/{method}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), HANG_S)
    return process.returncode or 0, out.decode(), err.decode()


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
