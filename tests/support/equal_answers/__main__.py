"""``python -m support.equal_answers --count 320 --output FILE``: the embedded model in exact numerics on a CPU.

One server runs each request alone: no drafter, no prefix cache. The other has a DFlash drafter, a prefix cache and few
pages, and runs several at a time beside clients that cancel; there some streams are broken off and asked to go on, and
some requests come over OpenAI's HTTP API. Whatever an answer says must be equal, to the bit: ids, texts, tool calls,
log-probabilities, checksums of logits, and how it ended. ``--numerics fast`` shows what the comparison finds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import get_args

import httpx

from gemray.v1 import generation_pb2 as pb
from gemray_workers.config import NumericsName
from gemray_workers.embedded import embedded_path
from support.cluster.embedded_server import embedded_server
from support.cluster.http_gateway import gateway
from support.equal_answers.traffic import Traffic, stub_of

MODEL_LEN = 192


async def main(options: argparse.Namespace) -> int:
    """Compare until all are compared or the time is over; 1 where any differed."""
    same = {"numerics": options.numerics, "dtype": options.dtype, "max_model_len": MODEL_LEN}
    alone = {**same, "drafter_path": None, "num_draft_tokens": None, "prefix_cache": False, "max_num_seqs": 1}
    busy = {
        **same,
        "drafter_path": str(embedded_path("gemray-tiny-dflash")),
        "num_draft_tokens": options.draft_tokens,
        "kv_memory_bytes": options.kv_memory,
        "max_num_seqs": 8,
        "max_step_tokens": 192,
        "prefill_chunk": 64,
    }
    began = time.monotonic()
    async with (
        embedded_server(**alone) as quiet_server,
        embedded_server(**busy) as busy_server,
        stub_of(quiet_server.address) as quiet_stub,
        stub_of(busy_server.address) as busy_stub,
        gateway(busy_server.address) as busy_gateway,
        httpx.AsyncClient(base_url=busy_gateway.url) as busy_http,
    ):
        traffic = Traffic(quiet_stub, busy_stub, busy_http, options.seed, options.count, options.most_tokens)
        told = str(traffic.tally)
        async for tally in traffic.run(options.at_a_time, options.cancelling):
            stats = await busy_stub.GetServerStats(pb.GetServerStatsRequest())
            told = "\n\n".join([f"{tally}; {_happened(stats)}; {time.monotonic() - began:,.0f} s", *tally.differences])
            options.output.write_text(told + "\n", encoding="utf-8")
            if time.monotonic() - began > options.time_limit:
                break
    print(told)
    return 1 if traffic.tally.differences else 0


def _happened(stats: pb.GetServerStatsResponse) -> str:
    engine, requests = stats.engine, stats.requests
    return (
        f"{requests.cancelled:,} cancelled beside them, {engine.num_preemptions:,} preemptions, "
        f"{engine.prefix_cache_hits:,} of {engine.prefix_cache_queries:,} prompt tokens found in the cache, "
        f"{engine.speculation.accepted:,} of {engine.speculation.drafted:,} drafts accepted"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=320, help="requests to compare (default 320)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-tokens", type=int, default=16, help="of an answer (default 16)")
    parser.add_argument("--at-a-time", type=int, default=8, help="calls on the busy server (default 8)")
    parser.add_argument("--cancelling", type=int, default=1, help="clients that cancel (default 1)")
    parser.add_argument("--numerics", choices=get_args(NumericsName), default="exact")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kv-memory", type=int, default=2 << 20, help="bytes of the busy server's pages")
    parser.add_argument("--draft-tokens", type=int, default=5, help="of the busy server (default 5)")
    parser.add_argument("--time-limit", type=float, default=36000.0, help="seconds after which no more is waited for")
    parser.add_argument("--output", type=Path, required=True, help="what was found, written anew after each comparison")
    sys.exit(asyncio.run(main(parser.parse_args())))
