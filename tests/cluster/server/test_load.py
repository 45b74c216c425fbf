"""Each stream of a load is accounted for on both sides: read, cancelled, refused or unread (in large: support.load)."""

from __future__ import annotations

from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.fake_gang import FakeGang, Script, gang_info
from support.cluster.serving import serving
from support.load.client import Plan, run_load
from support.waiting import eventually

PLAN = Plan(requests=150, streams=40, unread=4)


async def test_every_stream_is_accounted_for(tokenizer: ChatTokenizer) -> None:
    gang = FakeGang(Script(delay_s=0.002), gang_info(max_model_len=512))
    async with serving(tokenizer, gang, max_live_requests=30) as served:
        outcome = await run_load(served.server.address, PLAN)
        limiter = served.server.limiter
        await eventually(lambda: limiter.active == 0 and gang.num_active == 0)
    assert outcome.unexpected == []
    assert outcome.count == PLAN.requests
    assert outcome.most_at_once <= PLAN.streams
    status = outcome.by_status
    refused = status["RESOURCE_EXHAUSTED"]
    assert refused <= limiter.rejected <= refused + status["CANCELLED"], "who cancels does not hear of it"
    assert limiter.failed == 0
    taken = limiter.completed + limiter.cancelled + limiter.rejected
    assert PLAN.requests - status["CANCELLED"] <= taken <= PLAN.requests, "a cancel may come before its request"
    assert min(status["OK"], status["CANCELLED"]) > 0
