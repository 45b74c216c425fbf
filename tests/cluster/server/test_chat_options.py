"""Options of a chat: a last message that goes on, and variables of the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.checkpoints.tiny_tokenizer import write_tiny_tokenizer
from support.cluster.serving import Serving, bad_request_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = pb.ChatMessage(role="user", content="Hi")


async def tokenized(served: Serving, *messages: pb.ChatMessage, **fields: Any) -> pb.TokenizeResponse:
    chat = pb.Chat(messages=[ASKED, *messages], **fields)
    answer: pb.TokenizeResponse = await served.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    return answer


@pytest.mark.parametrize("content", ["", "Hello, m", "ends with a space ", "<turn|> is text", "\ue000\uf8ff"])
async def test_the_last_message_stays_open(served: Serving, tokenizer: ChatTokenizer, content: str) -> None:
    said = pb.ChatMessage(role="assistant", content=content)
    answer = await tokenized(served, said, continue_final_message=True)
    assert answer.text == f"<bos><|turn>user\nHi<turn|>\n<|turn>model\n{content}"
    assert tokenizer.decode(answer.token_ids).endswith(content)
    assert list(answer.token_ids).count(tokenizer.control_ids["<turn|>"]) == 1


@pytest.mark.parametrize(
    "message",
    [
        ASKED,
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")]),
        pb.ChatMessage(role="tool", name="f"),
    ],
)
async def test_only_an_answer_can_go_on(served: Serving, message: pb.ChatMessage) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokenized(served, message, continue_final_message=True)
    assert bad_request_of(caught.value)[0] == "chat.continue_final_message"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ("[]", "a JSON object"),
        ('{"messages": []}', "the chat does not give itself"),
        ('{"enable_thinking": true}', "the chat does not give itself"),
        ('{"bos_token": "x"}', "the chat does not give itself"),
        ('{"chat_template": "x"}', "the chat does not give itself"),
        ('{"tokenize": true}', "the chat does not give itself"),
        ('{"self": 1}', "'self' is not allowed: names that the chat does not give itself"),
        ('{"conversations": 1}', "the chat does not give itself"),
        ('{"namespace": 5}', "'namespace' is not allowed: names that the chat does not give itself, nor templates"),
        ('{"raise_exception": 5}', "nor templates have"),
        ('{"a b": 1}', "letters, digits"),
        ('{"a": {"b": 1, "b": 2}}', 'a JSON object (this names "b" more than once in one object)'),
        ('{"_a": 1}', "letters, digits"),
        ('{"a": "' + "x" * 65536 + '"}', "at most 65536"),
    ],
)
async def test_variables_that_are_refused(served: Serving, kwargs: str, words: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokenized(served, chat_template_kwargs_json=kwargs)
    field, description = bad_request_of(caught.value)
    assert field == "chat.chat_template_kwargs_json"
    assert words in description


async def test_a_variable_changes_what_the_template_writes(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size=512)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ bos_token }}{{ mood }}" + template.read_text(encoding="utf-8"), encoding="utf-8")
    other = ChatTokenizer.from_directory(tmp_path)
    rendered = other.render_chat(
        [{"role": "user", "content": "Hi"}], tools=None, enable_thinking=None, variables={"mood": "<turn|>"}
    )
    assert rendered.text.startswith("<bos><turn|><bos>")
    assert rendered.spelled_at == {5}, "a control token that a variable spells is text"
