"""Stop strings that spell control tokens end an output, though the text shows neither them nor a call that they cut."""

from __future__ import annotations

from typing import Any

import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import SPECIAL_TOKENS, ChatTokenizer
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import serving

CALL, END = SPECIAL_TOKENS["<|tool_call>"], SPECIAL_TOKENS["<turn|>"]


@pytest.mark.parametrize("group_sizes", [(1,), (3,), (50,)])
@pytest.mark.parametrize(
    ("stop", "text", "last"),
    [
        (["<|tool_call>"], "Hello", CALL),
        (["lo<|tool_call>"], "Hel", CALL),
        (["<|tool_call>call"], "Hello", None),
        (["nothing", "<turn|>"], "Hello", END),
        (["Hello", "<|tool_call>"], "", None),
    ],
)
async def test_stop(
    tokenizer: ChatTokenizer, stop: list[str], text: str, last: int | None, group_sizes: tuple[int, ...]
) -> None:
    ids = [*tokenizer.encode("Hello")[1:], CALL, *tokenizer.encode("call")[1:], END, *tokenizer.encode("on and on")[1:]]
    async with serving(tokenizer, FakeGang(Script(ids, group_sizes=group_sizes))) as served:
        sampling: Any = pb.SamplingParameters(stop=stop, ignore_eos=True, max_tokens=40)
        answer = await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling))
    assert answer.completion.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert answer.completion.stop_string in stop
    assert answer.text == text
    assert list(answer.token_ids) == ids[: len(answer.token_ids)]
    assert last is None or answer.token_ids[-1] == last
    assert answer.completion.usage.completion_tokens == len(answer.token_ids)
