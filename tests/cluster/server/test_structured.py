"""`structured` over gRPC: what the gang is asked for, how its ends are told, and what is refused before it runs."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import SPECIAL_TOKENS
from gemray_workers.grammar.compiler import MAX_CHOICES, MAX_GRAMMAR_BYTES
from gemray_workers.grammar.grammar import Grammar, Thought
from support.cluster.fake_gang import Script
from support.cluster.serving import Serving, bad_request_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("fresh_gang")]

OPENS, CLOSES = SPECIAL_TOKENS["<|channel>"], SPECIAL_TOKENS["<channel|>"]
SAMPLING = pb.SamplingParameters(max_tokens=2)


async def grammar_of(served: Serving, structured: pb.Structured, **body: Any) -> Grammar:
    await served.stub.Generate(pb.GenerateRequest(**{"text": "Hi", **body}, sampling=SAMPLING, structured=structured))
    grammar = served.gang.submitted[-1].params.grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize(
    ("structured", "kind", "text"),
    [
        (pb.Structured(json_schema='{"type": "null"}'), "json_schema", '{"type": "null"}'),
        (pb.Structured(json_object=True), "json_object", ""),
        (pb.Structured(regex="a+"), "regex", "a+"),
        (pb.Structured(choice=pb.Choices(texts=["a", "漢"])), "choice", '["a", "漢"]'),
        (pb.Structured(lark="start: /a/"), "lark", "start: /a/"),
    ],
)
async def test_the_gang_is_asked_for_each_form(
    served: Serving, structured: pb.Structured, kind: str, text: str
) -> None:
    grammar = await grammar_of(served, structured)
    assert (grammar.kind, grammar.text, grammar.thought) == (kind, text, None)


async def test_a_thought_may_come_first_where_the_chat_thinks(served: Serving) -> None:
    def chat(**more: Any) -> pb.Chat:
        return pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")], **more)

    form = pb.Structured(json_object=True)
    thought = Thought(opens=OPENS, closes=CLOSES)
    assert (await grammar_of(served, form, chat=chat(), text=None)).thought is None
    assert (await grammar_of(served, form, chat=chat(enable_thinking=True), text=None)).thought == thought
    never = pb.Structured(json_object=True, thought_first=False)
    assert (await grammar_of(served, never, chat=chat(enable_thinking=True), text=None)).thought is None
    always = pb.Structured(json_object=True, thought_first=True)
    assert (await grammar_of(served, always)).thought == thought
    opened = pb.TokenIds(ids=[2, OPENS, 300])
    assert (await grammar_of(served, form, token_ids=opened, text=None)).thought == Thought(
        opens=OPENS, closes=CLOSES, is_open=True
    )
    closed = pb.TokenIds(ids=[2, OPENS, 300, CLOSES])
    assert (await grammar_of(served, form, token_ids=closed, text=None)).thought is None


@pytest.mark.parametrize(
    ("structured", "field"),
    [
        (pb.Structured(), "structured"),
        (pb.Structured(json_object=False), "structured.json_object"),
        (pb.Structured(json_schema=""), "structured.json_schema"),
        (pb.Structured(json_schema="{"), "structured.json_schema"),
        (pb.Structured(json_schema='{"type": "null", "type": "object"}'), "structured.json_schema"),
        (pb.Structured(json_schema=" " * (MAX_GRAMMAR_BYTES + 1)), "structured.json_schema"),
        (
            pb.Structured(json_schema=json.dumps({"properties": {"a": {"not": {}}}})),
            "structured.json_schema#/properties/a",
        ),
        (pb.Structured(json_schema='{"type": "string", "enum": [1]}'), "structured.json_schema"),
        (pb.Structured(regex="("), "structured.regex"),
        (pb.Structured(choice=pb.Choices()), "structured.choice.texts"),
        (pb.Structured(choice=pb.Choices(texts=["a", ""])), "structured.choice.texts"),
        (pb.Structured(choice=pb.Choices(texts=["a"] * (MAX_CHOICES + 1))), "structured.choice.texts"),
        (pb.Structured(lark="start: x"), "structured.lark"),
    ],
)
async def test_bad_forms_are_refused_before_anything_runs(
    served: Serving, structured: pb.Structured, field: str
) -> None:
    request = pb.GenerateRequest(text="Hi", sampling=SAMPLING, structured=structured)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_request_of(caught.value)[0] == field
    assert not served.gang.submitted


async def test_a_complete_form_is_told(served: Serving) -> None:
    served.gang.script = Script(grammar_end="grammar")
    request: dict[str, Any] = {"text": "Hi", "sampling": SAMPLING, "structured": pb.Structured(regex="a+")}
    answer = await served.stub.Generate(pb.GenerateRequest(**request))
    assert answer.completion.finish_reason == pb.FINISH_REASON_FORM_COMPLETE
    messages = await served.stream(pb.GenerateStreamRequest(**request))
    assert messages[-1].final.finish_reason == pb.FINISH_REASON_FORM_COMPLETE


async def test_a_form_that_cannot_be_met_is_the_requests_fault(served: Serving) -> None:
    served.gang.script = Script(grammar_end="unmet")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(
            pb.GenerateRequest(text="Hi", sampling=SAMPLING, structured=pb.Structured(regex="a+"))
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    field, description = bad_request_of(caught.value)
    assert field == "structured"
    assert "nothing is left" in description
