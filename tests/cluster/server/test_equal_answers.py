"""Requests among others get what they get alone, over gRPC; `python -m support.equal_answers` does hundreds."""

from __future__ import annotations

from gemray.v1 import generation_pb2 as pb
from support.equal_answers.comparison import Tally, joined
from support.equal_answers.drawn import drawn_request

ANSWER = pb.GenerateResponse(
    request_id="a",
    token_ids=[5, 6],
    text="ab",
    logprobs=[pb.TokenLogprob(token_id=5, logprob=-0.5, logits_checksum=7), pb.TokenLogprob(token_id=6, logprob=-1.0)],
    completion=pb.Completion(
        finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=2)
    ),
    other_answers=[pb.Answer(token_ids=[8], text="c", completion=pb.Completion(seed=9))],
)
REQUEST = pb.GenerateRequest(text="x")


def _tally(alone: pb.GenerateResponse | str, among: pb.GenerateResponse | str) -> Tally:
    tally = Tally()
    tally.compare(0, REQUEST, alone, among, streamed=False)
    return tally


def test_what_only_tells_how_an_answer_came_about_may_differ() -> None:
    among = pb.GenerateResponse()
    among.CopyFrom(ANSWER)
    among.request_id = "b"
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
        delta(token_ids=[6], text="b", logprobs=ANSWER.logprobs[1:]),
        pb.GenerateStreamResponse(final=ANSWER.completion),
    ]
    assert not _tally(ANSWER, joined(messages)).differences


def test_requests_are_drawn_the_same_each_time() -> None:
    drawn = [drawn_request(0, index, most_tokens=12) for index in range(100)]
    assert drawn == [drawn_request(0, index, most_tokens=12) for index in range(100)]
    prompts = {request.WhichOneof("input") for request in drawn}
    assert prompts == {"text", "token_ids", "chat"}
    assert any(request.HasField("structured") for request in drawn)
