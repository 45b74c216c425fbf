"""A client that asks for too much at once, in a process of its own: its work is not the server's.

``python -m support.cluster.bad_client ADDRESS COUNT`` sends COUNT Tokenize calls with the text that it reads from its
standard input, and prints how many ended with which status, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from gemray.channel_options import client_options
from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc

TESTS = Path(__file__).resolve().parents[2]


async def tokenize_at_once(address: str, text: str, count: int) -> Counter[str]:
    """Start the client, and return how many of its calls ended with which status."""
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "support.cluster.bad_client", address, str(count),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    out, _ = await process.communicate(text.encode())
    assert process.returncode == 0
    return Counter(json.loads(out))


async def _ask(address: str, text: str, count: int) -> Counter[str]:
    async with grpc.aio.insecure_channel(address, options=client_options(address)) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.Tokenize(pb.TokenizeRequest(text=text)) for _ in range(count)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    return Counter(answer.code().name if isinstance(answer, grpc.aio.AioRpcError) else "OK" for answer in answers)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_ask(sys.argv[1], sys.stdin.read(), int(sys.argv[2])))))
