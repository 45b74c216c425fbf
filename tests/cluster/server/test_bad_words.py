"""Bad words of a request, as the ids that a rank is told."""

from __future__ import annotations

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.limits import LIMITS
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.sampling.params import SamplingParams
from support.cluster.serving import Serving, bad_request_of

LIMIT = LIMITS["SamplingParameters.bad_words"]
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = LIMIT.entries or 0, LIMIT.chars or 0

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def params_of(served: Serving, *words: str) -> SamplingParams:
    served.gang.submitted.clear()
    sampling = pb.SamplingParameters(bad_words=words, max_tokens=1)
    await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling))
    return served.gang.submitted[0].params


async def test_words_are_written_with_and_without_a_space(served: Serving, tokenizer: ChatTokenizer) -> None:
    word = "the Zwölfte"
    params = await params_of(served, word, " " + word)
    written = {tuple(tokenizer.encode(text)[1:]) for text in (word, " " + word)}
    assert set(params.bad_words) == written
    assert {tokenizer.decode(ids) for ids in params.bad_words} == {word, " " + word}


async def test_a_word_of_one_token_is_never_chosen(served: Serving, tokenizer: ChatTokenizer) -> None:
    (alone,) = tokenizer.encode("e")[1:]
    params = await params_of(served, "e")
    assert alone in params.suppress_tokens
    assert all(len(ids) > 1 for ids in params.bad_words)
    sampling = pb.SamplingParameters(bad_words=["e"], allowed_token_ids=[alone])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling))
    assert bad_request_of(caught.value)[0] == "sampling.allowed_token_ids"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ([""], "sampling.bad_words[0]"),
        (["fine", " \n"], "sampling.bad_words[1]"),
        (["x" * (MAX_BAD_WORD_CHARS + 1)], "sampling.bad_words[0]"),
        (["x"] * (MAX_BAD_WORDS + 1), "sampling.bad_words"),
    ],
)
async def test_what_is_refused(served: Serving, words: list[str], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await params_of(served, *words)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_request_of(caught.value)[0] == field


async def test_the_longest_list_is_taken(served: Serving) -> None:
    words = [f"{n:03} {'漢' * (MAX_BAD_WORD_CHARS - 4)}" for n in range(MAX_BAD_WORDS)]
    assert len((await params_of(served, *words)).bad_words) == 2 * MAX_BAD_WORDS
