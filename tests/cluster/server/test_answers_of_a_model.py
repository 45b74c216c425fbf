"""Several answers, bad words and forms from a real model: a prompt computed once, each answer that of its own seed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gemray.client import AsyncClient, answers_of
from gemray.v1 import generation_pb2 as pb
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.embedded import embedded_path
from support.cluster.embedded_server import embedded_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Write a Python function that adds two numbers, and one that takes them apart again. " * 3
NUM_TOKENS = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    async with embedded_server(prefix_cache=True) as server, AsyncClient(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_directory(embedded_path("gemray-tiny"))


async def test_one_prompt_is_computed_once_for_all_answers(client: AsyncClient) -> None:
    sampling = pb.SamplingParameters(seed=11, n=3, max_tokens=NUM_TOKENS, bad_words=["def add", "return"])
    request = pb.GenerateStreamRequest(text=PROMPT, sampling=sampling, cache_salt="several")
    messages = [message async for message in client.stream(request)]
    ends = {m.answer_end.index: m.answer_end.completion for m in messages if m.HasField("answer_end")}
    num_prompt = messages[-1].final.usage.prompt_tokens
    cached = [ends[index].usage.cached_tokens for index in range(3)]
    assert cached[0] == 0
    assert all(num_prompt - 17 <= found < num_prompt for found in cached[1:]), (num_prompt, cached)
    assert messages[-1].final.usage.cached_tokens == 0
    ids = [[t for m in messages if m.delta.index == index for t in m.delta.token_ids] for index in range(3)]
    for index in range(3):
        alone = pb.GenerateRequest(text=PROMPT, sampling=sampling)
        alone.sampling.n, alone.sampling.seed = 1, 11 + index
        assert list((await client.generate(alone)).token_ids) == ids[index]
    assert len({tuple(one) for one in ids}) > 1, "different seeds"


async def test_bad_words_change_what_would_be_said(client: AsyncClient, tokenizer: ChatTokenizer) -> None:
    sampling = pb.SamplingParameters(temperature=0, max_tokens=NUM_TOKENS)
    free = await client.generate(pb.GenerateRequest(text=PROMPT, sampling=sampling))
    words = [tokenizer.decode(free.token_ids[i : i + 2]) for i in range(2, 12, 3)]
    sampling.bad_words.extend(word for word in words if word.strip())
    sequences = {tuple(tokenizer.encode(text)[1:]) for word in sampling.bad_words for text in (word, " " + word)}
    assert sequences
    held = await client.generate(pb.GenerateRequest(text=PROMPT, sampling=sampling))
    ids = list(held.token_ids)
    said = {tuple(ids[i : i + len(s)]) for s in sequences for i in range(len(ids))}
    assert not sequences & said
    sampling.ClearField("bad_words")
    undrafted = pb.GenerateRequest(text=PROMPT, sampling=sampling)
    undrafted.speculation.num_draft_tokens = 0
    assert (await client.generate(undrafted)).token_ids == free.token_ids


async def test_forms_and_echo_hold_for_each_answer(client: AsyncClient) -> None:
    sampling = pb.SamplingParameters(seed=3, n=4, echo=True, logprobs=1, logprob_text=True)
    form = pb.Structured(choice=pb.Choices(texts=["yes", "no", "never"]))
    response = await client.generate(pb.GenerateRequest(text="Is it?", sampling=sampling, structured=form))
    answers = answers_of(response)
    assert len(answers) == 4
    for answer in answers:
        assert answer.text in ("Is it?yes", "Is it?no", "Is it?never")
        assert "".join(entry.text for entry in answer.logprobs if not entry.text.startswith("<")) == answer.text[6:]
    assert response.completion.usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)
