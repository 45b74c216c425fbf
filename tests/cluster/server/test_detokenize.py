"""Detokenize gives the text that a generation of the same ids would have had."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from support.cluster.serving import Serving, bad_request_of
from support.cluster.text import MULTILINGUAL, byte_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def text_of(served: Serving, ids: list[int], *, skip: Any = None) -> str:
    answer = await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip))
    return str(answer.text)


async def test_what_was_tokenized_comes_back(served: Serving) -> None:
    tokenized = await served.stub.Tokenize(pb.TokenizeRequest(text=MULTILINGUAL + "<turn|>"))
    assert await text_of(served, list(tokenized.token_ids)) == MULTILINGUAL
    assert await text_of(served, list(tokenized.token_ids), skip=True) == MULTILINGUAL
    assert await text_of(served, list(tokenized.token_ids), skip=False) == f"<bos>{MULTILINGUAL}<turn|>"


@pytest.mark.parametrize("skip", [True, False])
async def test_a_cut_character(served: Serving, tokenizer: ChatTokenizer, skip: bool) -> None:
    first, second, _ = byte_ids(tokenizer, "漢".encode())
    assert await text_of(served, [first, second], skip=skip) == "\ufffd"
    assert await text_of(served, [], skip=skip) == ""
    end = "" if skip else "<turn|>"
    assert await text_of(served, [first, second, 106], skip=skip) == "\ufffd" + end


@pytest.mark.parametrize(("ids", "words"), [([2048], "0..2047"), ([7] * ((1 << 20) + 1), "at most 1048576 ids")])
async def test_bad_ids(served: Serving, ids: list[int], words: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await text_of(served, ids)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    field, description = bad_request_of(caught.value)
    assert field == "token_ids"
    assert words in description
