"""A drain under load: calls end whole, refused before they began, or cut at the deadline, and in no other way."""

from __future__ import annotations

import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.chaos.calls import CUT, CUT_BY_DRAIN, REFUSED, WHOLE, Callers
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import serving
from support.waiting import HANG_S, eventually

CALLERS = 20


@pytest.mark.parametrize(("notice_s", "deadline_s"), [(0.0, HANG_S), (0.0, 0.3), (HANG_S, 0.3)])
async def test_calls_end_in_three_ways(tokenizer: ChatTokenizer, notice_s: float, deadline_s: float) -> None:
    asked = [
        pb.GenerateStreamRequest(text="Hi", sampling={"seed": i, "max_tokens": 8 * (i + 1), "ignore_eos": True})
        for i in range(CALLERS)
    ]
    gang = FakeGang(Script(delay_s=0.01))
    async with serving(tokenizer, gang, drain_notice_s=notice_s, drain_deadline_s=deadline_s) as served:
        callers = Callers(served.server.address, asked)
        try:
            await eventually(lambda: callers.num_begun >= CALLERS // 2)
            num_cut = await served.server.drain()
            await eventually(lambda: callers.num_begun == 0 and callers.ended[REFUSED] > 0)
            await callers.end(HANG_S)
        finally:
            await callers.cancel()
    assert callers.cut == []
    assert callers.ended[CUT] == 0
    assert served.server.limiter.cancelled == 0, "no call that was taken"
    if deadline_s == HANG_S:
        assert (num_cut, callers.ended[CUT_BY_DRAIN]) == (0, 0)
        assert callers.ended[WHOLE] >= CALLERS // 2
    else:
        assert 0 < callers.ended[CUT_BY_DRAIN] <= num_cut, "one may have been sent its last message just before"
