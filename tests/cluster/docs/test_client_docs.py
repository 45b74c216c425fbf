"""docs/clients.md and docs/openai.md: every example is run, and every field of the HTTP API is in a table."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gemray.openai import chat_request, completion_request
from gemray.openai.fields import Fields
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.server import GenerationServer
from support.cluster.command import GEMRAY, end_in_order, killed_at_last
from support.cluster.embedded_server import embedded_server
from support.cluster.node import node_environment
from support.waiting import HANG_S

ROOT = Path(__file__).parents[3]
CLIENTS, OPENAI = ROOT / "docs/clients.md", ROOT / "docs/openai.md"
ONE_MODULE = pytest.mark.asyncio(loop_scope="module")


def blocks_of(document: Path) -> list[tuple[str, str]]:
    """(language, code), in order."""
    return re.findall(r"```(\w+)\n(.*?)```", document.read_text(), re.DOTALL)


PROGRAMS = [
    pytest.param(document.name, language, code, id=f"{document.stem}-{index}-{language}")
    for document in (CLIENTS, OPENAI)
    for index, (language, code) in enumerate(blocks_of(document))
    if not code.startswith("gemray openai ")
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[GenerationServer]:
    async with embedded_server() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ports(server: GenerationServer) -> AsyncIterator[dict[str, str]]:
    """The ports of the documents, and those that stand for them here."""
    grpc_port = server.address.rpartition(":")[2]
    (command,) = [code for _, code in blocks_of(OPENAI) if code.startswith("gemray openai ")]
    async with _gateway(command.replace("50051", grpc_port).replace("8000", "0")) as http_port:
        yield {"50051": grpc_port, "8000": http_port}


@asynccontextmanager
async def _gateway(command: str) -> AsyncIterator[str]:
    """The port of the gateway that a documented command starts, which ends in order when it is told to."""
    process = await asyncio.create_subprocess_exec(*GEMRAY, *shlex.split(command)[1:], stderr=asyncio.subprocess.PIPE)
    async with killed_at_last(process):
        assert process.stderr is not None
        line = (await asyncio.wait_for(process.stderr.readline(), HANG_S)).decode()
        ready = re.match(r"ready: http://127\.0\.0\.1:(\d+)/v1 ", line)
        assert ready, line
        yield ready[1]
        await end_in_order(process)


@ONE_MODULE
@pytest.mark.parametrize(("document", "language", "code"), PROGRAMS)
async def test_examples(
    ports: dict[str, str],
    document: str,
    language: str,
    code: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for written, here in ports.items():
        code = code.replace(f":{written}", f":{here}")
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = {"python": [sys.executable, "-c", code], "sh": ["bash", "-euc", code], "js": ["node", "-e", code]}[
        language
    ]
    if language == "js":
        environment |= node_environment(request.config, tmp_path_factory.mktemp("node"))
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 0, err.decode()
    assert out.strip(), f"{document}: an example says nothing: {err.decode()}"
    assert b'"error"' not in out


def test_every_field_is_in_a_table() -> None:
    known: set[str] = set()
    minimal: list[tuple[Any, dict[str, Any]]] = [
        (chat_request.read_chat_request, {"messages": [{"role": "user", "content": "Hi"}]}),
        (completion_request.read_completion_request, {"prompt": "Hi"}),
    ]
    for read, body in minimal:
        fields = Fields(body)
        read(fields)
        known |= fields.known
    tables = [line for line in OPENAI.read_text().splitlines() if line.startswith("| `")]
    documented = {name for line in tables for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    documented -= {name for name in documented if name.isupper()}  # statuses
    (refused,) = re.findall(r"Refused, among others: (.*?)\.\n", OPENAI.read_text(), re.DOTALL)
    assert documented <= known
    assert known <= documented | set(re.findall(r"`(\w+)`", refused))


def test_what_has_no_effect_is_listed() -> None:
    (sentence,) = re.findall(r"Taken and without effect on answers: (.*?)\.", OPENAI.read_text(), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(chat_request.WITHOUT_EFFECT)
    assert set(completion_request.WITHOUT_EFFECT) <= set(chat_request.WITHOUT_EFFECT)


def test_fields_of_the_protocol_in_the_tables_exist() -> None:
    messages: dict[str, Any] = {
        "chat": pb.Chat,
        "sampling": pb.SamplingParameters,
        "structured": pb.Structured,
        "speculation": pb.SpeculationParameters,
    }
    named = re.findall(r"`(\w+)\.(\w+)`", "".join(re.findall(r"^\|.*?\|.*?\|", OPENAI.read_text(), re.MULTILINE)))
    assert len(named) > 25
    for message, field in named:
        assert field in messages[message].DESCRIPTOR.fields_by_name, f"{message}.{field}"
