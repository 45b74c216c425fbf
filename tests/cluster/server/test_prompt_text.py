"""Cut prompts, echoed prompts, and log-probabilities that name their tokens."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server import answer_size
from gemray_cluster.server.answer_size import refuse_what_no_answer_carries
from gemray_cluster.text.token_text import TokenText
from gemray_cluster.text.tokenizer import BOS_ID, ChatTokenizer
from gemray_workers.errors import InvalidField
from gemray_workers.sampling.params import SamplingParams
from support.cluster.fake_gang import Script, gang_info
from support.cluster.serving import Serving, bad_request_of, joined
from support.cluster.text import MULTILINGUAL, byte_ids

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("fresh_gang")]

LONG = "one two three four " * 400
"""More tokens than the model fits."""
CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content=LONG)])
CONTINUED = pb.Chat(
    messages=[pb.ChatMessage(role="user", content="Say it"), pb.ChatMessage(role="assistant", content="It is ")],
    continue_final_message=True,
)


async def prompt_of(served: Serving, kept: int, **body: Any) -> list[int]:
    sampling = pb.SamplingParameters(truncate_prompt_tokens=kept, **body.pop("sampling", {"max_tokens": 1}))
    answer = await served.stub.Generate(pb.GenerateRequest(sampling=sampling, **body))
    (submit,) = served.gang.submitted
    assert answer.completion.usage.prompt_tokens == len(submit.prompt_ids)
    served.gang.submitted.clear()
    return submit.prompt_ids


async def test_the_last_tokens_stay(served: Serving, tokenizer: ChatTokenizer) -> None:
    text = tokenizer.encode(LONG)
    chat = tokenizer.encode_chat([{"role": "user", "content": LONG}])
    for whole, body in ((text, {"text": LONG}), (chat, {"chat": CHAT})):
        assert await prompt_of(served, 7, **body) == [BOS_ID, *whole[-6:]]
        assert await prompt_of(served, 1, **body) == [BOS_ID]
    ids = pb.TokenIds(ids=text)
    assert await prompt_of(served, 7, token_ids=ids) == text[-7:], "nothing is added to ids"
    assert await prompt_of(served, 7, token_ids=pb.TokenIds(ids=[180, 181])) == [180, 181]
    assert await prompt_of(served, 50, text="Hi") == tokenizer.encode("Hi")


async def test_as_many_as_fit(served: Serving) -> None:
    longest = gang_info().model.max_model_len
    assert len(await prompt_of(served, -1, text=LONG, sampling={"max_tokens": 40})) == longest - 40
    for sampling in ({}, {"max_tokens": 0}):
        assert len(await prompt_of(served, -1, text=LONG, sampling=sampling)) == longest - 1


@pytest.mark.parametrize(("kept", "field"), [(0, "sampling.truncate_prompt_tokens"), (-2, None), (4000, "text")])
async def test_what_cannot_be_kept(served: Serving, kept: int, field: str | None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prompt_of(served, kept, text=LONG)
    named, words = bad_request_of(caught.value)
    assert named == (field or "sampling.truncate_prompt_tokens")
    assert field == "text" or words == f"{named} = {kept} is not allowed: -1 (as many as fit), or an integer >= 1"


async def test_a_text_far_too_long_can_be_cut(served: Serving, tokenizer: ChatTokenizer) -> None:
    text = "x" * (gang_info().model.max_model_len * tokenizer.longest_token + 1)
    with pytest.raises(grpc.aio.AioRpcError, match="bytes"):
        await served.stub.Generate(pb.GenerateRequest(text=text))
    assert len(await prompt_of(served, 9, text=text)) == 9


@pytest.mark.parametrize("sizes", [(1,), (3,)])
@pytest.mark.parametrize("n", [1, 2])
async def test_echo_comes_before_the_answer(
    served: Serving, tokenizer: ChatTokenizer, sizes: tuple[int, ...], n: int
) -> None:
    served.gang.script = Script(tokenizer.encode("said in")[1:], sizes, prompt_chunk=2)
    sampling = pb.SamplingParameters(echo=True, n=n, max_tokens=3, seed=1, stop=["漢字"], prompt_logprobs=0)
    for body, echo in (
        ({"text": MULTILINGUAL}, MULTILINGUAL),
        ({"token_ids": pb.TokenIds(ids=tokenizer.encode("it is"))}, "it is"),
        ({"chat": CONTINUED}, "It is "),
    ):
        fields: dict[str, Any] = {"sampling": sampling, "request_id": "same", **body}
        plain: dict[str, Any] = {**fields, "sampling": pb.SamplingParameters(max_tokens=3, seed=1)}
        alone = await served.stub.Generate(pb.GenerateRequest(**plain))
        whole = await served.stub.Generate(pb.GenerateRequest(**fields))
        assert [whole.text, *(answer.text for answer in whole.other_answers)] == [echo + alone.text] * n
        assert whole.token_ids == alone.token_ids
        assert len(whole.prompt_logprobs) == alone.completion.usage.prompt_tokens - 1
        if n == 1:
            messages = await served.stream(pb.GenerateStreamRequest(**fields))
            assert joined(messages) == whole
            bare = [message.delta for message in messages if message.HasField("delta") and not message.delta.token_ids]
            assert bare, "log-probabilities of the prompt come first"
            assert not any(delta.text for delta in bare), "the echo comes with the first token, which tells that it has"
            fields["emitted_token_ids"] = list(whole.token_ids[:1])
            rest = await served.stub.Generate(pb.GenerateRequest(**fields))
            assert not rest.text.startswith(echo), "what a client has is not repeated"


@pytest.mark.parametrize("prompt_chunk", [None, 2])
@pytest.mark.parametrize("token", [180, 106])
async def test_a_prompt_alone(served: Serving, tokenizer: ChatTokenizer, prompt_chunk: int | None, token: int) -> None:
    """No tokens are asked for: the prompt is scored, and the engine's token, a stop or not, belongs to nobody."""
    served.gang.script = Script([token], prompt_chunk=prompt_chunk)
    for body, echo in (
        ({"text": MULTILINGUAL}, MULTILINGUAL),
        ({"token_ids": pb.TokenIds(ids=tokenizer.encode("it is"))}, "it is"),
        ({"chat": CONTINUED}, "It is "),
    ):
        sampling = pb.SamplingParameters(max_tokens=0, echo=True, prompt_logprobs=1, logprobs=1, seed=3)
        request = pb.GenerateRequest(request_id="same", sampling=sampling, **body)
        whole = await served.stub.Generate(request)
        prompt_ids = served.gang.submitted[-1].prompt_ids
        assert (whole.text, list(whole.token_ids), list(whole.logprobs)) == (echo, [], [])
        assert [entry.token_id for entry in whole.prompt_logprobs] == prompt_ids[1:]
        usage = pb.Usage(prompt_tokens=len(prompt_ids), cached_tokens=1)
        assert whole.completion == pb.Completion(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage, seed=3)
        stream = pb.GenerateStreamRequest.FromString(request.SerializeToString())
        assert joined(await served.stream(stream)) == whole
        request.sampling.n = 2
        several = await served.stub.Generate(request)
        assert [several.text, *(answer.text for answer in several.other_answers)] == [echo] * 2
        assert several.completion.usage == usage
    assert (await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling={"max_tokens": 0}))).text == ""


async def test_a_prompt_alone_has_no_least_number_of_tokens(served: Serving) -> None:
    for sampling, field in (
        (pb.SamplingParameters(max_tokens=0, min_tokens=1), "min_tokens"),
        (pb.SamplingParameters(max_tokens=-1), "max_tokens"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling))
        assert bad_request_of(caught.value)[0] == f"sampling.{field}"


async def test_special_tokens_of_an_echo_are_shown_as_the_answer_s(served: Serving) -> None:
    served.gang.script = Script([180, 106])
    ids = pb.TokenIds(ids=[BOS_ID, 105, 180, 106])
    for skip, text in ((True, "HH"), (False, "<bos><|turn>H<turn|>H")):
        sampling = pb.SamplingParameters(echo=True, skip_special_tokens=skip)
        assert (await served.stub.Generate(pb.GenerateRequest(token_ids=ids, sampling=sampling))).text == text


async def test_a_chat_with_nothing_to_echo(served: Serving) -> None:
    chat = pb.Chat(messages=CONTINUED.messages[:1])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Generate(pb.GenerateRequest(chat=chat, sampling=pb.SamplingParameters(echo=True)))
    assert bad_request_of(caught.value)[0] == "sampling.echo"


async def test_echoes_that_few_clients_would_take_are_refused(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_size, "DEFAULT_CLIENT_BYTES", 30)
    for n, fits in ((3, True), (4, False)):
        request = pb.GenerateRequest(text="ten bytes!", sampling=pb.SamplingParameters(echo=True, n=n, max_tokens=1))
        if fits:
            assert len((await served.stub.Generate(request)).other_answers) == n - 1
            continue
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(request)
        assert bad_request_of(caught.value) == (
            "sampling.echo",
            "sampling.echo = true for 4 answers is not allowed: at most 30 bytes of text in an answer, these are 40",
        )


async def test_log_probabilities_name_their_tokens(served: Serving, tokenizer: ChatTokenizer) -> None:
    part = byte_ids(tokenizer, "漢".encode())
    served.gang.script = Script([180, *part, 106], prompt_chunk=1)
    sampling = pb.SamplingParameters(logprobs=2, prompt_logprobs=1, logprob_text=True, seed=1)
    request = pb.GenerateRequest(request_id="same", text="Hi", sampling=sampling)
    answer = await served.stub.Generate(request)
    said = [(entry.text, entry.token_bytes) for entry in answer.logprobs]
    assert said[0] == ("H", b"")
    assert b"".join(raw for _, raw in said[1:4]) == "漢".encode()
    assert all("\ufffd" in text for text, _ in said[1:4])
    assert said[4] == ("<turn|>", b"")
    assert "".join(entry.text for entry in answer.prompt_logprobs) == "Hi"
    for entry in (*answer.logprobs, *answer.prompt_logprobs):
        for top in entry.top:
            assert (top.text, top.token_bytes) == TokenText(tokenizer).of(top.token_id)
            assert top.text
    stream = pb.GenerateStreamRequest.FromString(request.SerializeToString())
    assert joined(await served.stream(stream)) == answer
    request.sampling.logprob_text = False
    plain = await served.stub.Generate(request)
    assert not any(entry.text or entry.token_bytes for entry in (*plain.logprobs, *plain.prompt_logprobs))


async def test_texts_count_in_the_size_of_an_answer(tokenizer: ChatTokenizer) -> None:
    names, prompt_len = TokenText(tokenizer), 300
    params = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, max_tokens=1, prompt_logprobs=5)

    def fits(most: int, most_token_bytes: int) -> bool:
        try:
            refuse_what_no_answer_carries(
                params,
                prompt_len=prompt_len,
                vocab_size=tokenizer.vocab_size,
                max_message_bytes=most,
                most_token_bytes=most_token_bytes,
            )
        except InvalidField:
            return False
        return True

    longest = max(range(tokenizer.vocab_size), key=lambda token_id: len(names.of(token_id)[0].encode()))
    text, raw = names.of(longest)
    top = pb.TopLogprob(token_id=longest, logprob=-1.0, text=text, token_bytes=raw)
    entry = pb.TokenLogprob(token_id=longest, logprob=-1.0, text=text, token_bytes=raw, top=[top] * 5)
    size = pb.GenerateResponse(prompt_logprobs=[entry] * (prompt_len - 1)).ByteSize()
    assert not fits(size - 1, names.most_bytes), "such an answer would not fit"
    assert fits(size - 1, 0)
