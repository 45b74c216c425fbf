"""Requests among others get what they get alone, over gRPC; `python -m support.equal_answers` does hundreds."""

from __future__ import annotations

from dataclasses import replace

from gemray.v1 import generation_pb2 as pb
from support.equal_answers.comparison import Tally, joined
from support.equal_answers.drawn import drawn_request
from support.equal_answers.over_http import told_over_http

ANSWER = pb.GenerateResponse(
    request_id="a",
    token_ids=[5, 6],
    text="ab",
    logprobs=[pb.TokenLogprob(token_id=5, logprob=-0.5, logits_checksum=7), pb.TokenLogprob(token_id=6, logprob=-1.0)],
    completion=pb.Completion(
        finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=2)
    ),
    tool_calls=[pb.ToolCall(id="c", name="say", arguments_json='{"t":"x"}')],
    other_answers=[pb.Answer(token_ids=[8], text="c", completion=pb.Completion(seed=9))],
)
REQUEST = pb.GenerateRequest(text="x")


def _tally(alone: pb.GenerateResponse | str, among: pb.GenerateResponse | str) -> Tally:
    tally = Tally()
    tally.compare(0, REQUEST, alone, among, how="unary")
    return tally


def test_what_only_tells_how_an_answer_came_about_may_differ() -> None:
    among = pb.GenerateResponse()
    among.CopyFrom(ANSWER)
    among.request_id = "b"
    among.tool_calls[0].id = "d"
    among.completion.usage.cached_tokens = 0
    among.completion.speculation.drafted = 4
    tally = _tally(ANSWER, among)
    assert not tally.differences
    assert (tally.counts["answers"], tally.counts["tokens"], tally.counts["checksums"]) == (2, 3, 1)


def test_each_part_of_an_answer_is_compared() -> None:
    for change in (
        lambda answer: answer.token_ids.append(9),
        lambda answer: setattr(answer, "text", "abc"),
        lambda answer: setattr(answer.logprobs[0], "logits_checksum", 8),
        lambda answer: setattr(answer.logprobs[1], "logprob", -1.0000000000000002),
        lambda answer: setattr(answer.completion, "finish_reason", pb.FINISH_REASON_STOP_TOKEN),
        lambda answer: setattr(answer.other_answers[0], "text", "d"),
        lambda answer: answer.prompt_logprobs.add(token_id=3),
        lambda answer: setattr(answer.tool_calls[0], "arguments_json", "{}"),
        lambda answer: setattr(answer.tool_calls[0], "is_incomplete", True),
    ):
        among = pb.GenerateResponse()
        among.CopyFrom(ANSWER)
        change(among)
        assert len(_tally(ANSWER, among).differences) == 1, among
    assert len(_tally(ANSWER, "INTERNAL: x").differences) == 1
    assert not _tally("INVALID_ARGUMENT: x", "INVALID_ARGUMENT: x").differences


def test_a_streams_messages_add_up_to_the_answer() -> None:
    def delta(**fields: object) -> pb.GenerateStreamResponse:
        return pb.GenerateStreamResponse(delta=pb.Delta(**fields))  # type: ignore[arg-type]

    end = pb.AnswerEnd(index=1, completion=ANSWER.other_answers[0].completion)
    messages = [
        delta(token_ids=[5], text="a", logprobs=ANSWER.logprobs[:1]),
        delta(index=1, token_ids=[8], text="c"),
        pb.GenerateStreamResponse(answer_end=end),
        delta(tool_calls=[pb.ToolCallDelta(index=0, id="c", name="say", arguments_json='{"t":')]),
        delta(token_ids=[6], text="b", logprobs=ANSWER.logprobs[1:]),
        delta(tool_calls=[pb.ToolCallDelta(index=0, arguments_json='"x"}', is_complete=True)]),
        pb.GenerateStreamResponse(final=ANSWER.completion),
    ]
    assert not _tally(ANSWER, joined(messages)).differences


def test_requests_are_drawn_the_same_each_time() -> None:
    drawn = [drawn_request(0, index, most_tokens=12) for index in range(100)]
    assert drawn == [drawn_request(0, index, most_tokens=12) for index in range(100)]
    prompts = {request.WhichOneof("input") for request in drawn}
    assert prompts == {"text", "token_ids", "chat"}
    assert any(request.HasField("structured") for request in drawn)
    assert any(request.chat.tools_json for request in drawn)
    assert any(request.chat.enable_thinking for request in drawn)


def test_what_http_tells_of_an_answer_is_compared() -> None:
    told = told_over_http(ANSWER)
    assert not isinstance(told, str)
    (first, second), usage = told
    assert (first.text, first.calls, first.finish, first.logprobs) == (
        "ab",
        (("say", '{"t":"x"}'),),
        "length",
        (-0.5, -1.0),
    )
    tally = Tally()
    tally.compare_http(0, REQUEST, ANSWER, told)
    assert not tally.differences
    for got in (
        "refused",
        ((second, first), usage),
        ((replace(first, finish="stop"), second), usage),
        ((replace(first, logprobs=(-0.5, -1.0000000000000002)), second), usage),
        ((first, second), (3, 4)),
    ):
        tally.compare_http(0, REQUEST, ANSWER, got)
    assert len(tally.differences) == 5
