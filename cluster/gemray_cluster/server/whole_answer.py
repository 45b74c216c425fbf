"""The one message of a unary answer: what a stream would have sent, put together."""

from __future__ import annotations

from gemray.v1 import generation_pb2 as pb


class WholeAnswer:
    """Joins the deltas of one generation."""

    def __init__(self, request_id: str) -> None:
        """An answer to the request of that id."""
        self._response = pb.GenerateResponse(request_id=request_id)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[pb.ToolCall, list[str]]] = {}
        """By their index; the first may be one that an earlier call's answer began, and has no id and no name here."""

    def add(self, delta: pb.Delta) -> None:
        """Take the next delta."""
        response = self._response
        response.token_ids.extend(delta.token_ids)
        response.logprobs.extend(delta.logprobs)
        response.prompt_logprobs.extend(delta.prompt_logprobs)
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            if piece.index not in self._calls:
                call = response.tool_calls.add(id=piece.id, name=piece.name, is_incomplete=True)
                self._calls[piece.index] = call, []
            call, arguments = self._calls[piece.index]
            arguments.append(piece.arguments_json)
            call.is_incomplete &= not piece.is_complete

    def whole(self, completion: pb.Completion) -> pb.GenerateResponse:
        """The answer."""
        response = self._response
        response.text = "".join(self._texts)
        response.reasoning = "".join(self._reasoning)
        for call, arguments in self._calls.values():
            call.arguments_json = "".join(arguments)
        response.completion.CopyFrom(completion)
        return response

    def as_other(self, completion: pb.Completion) -> pb.Answer:
        """The answer, as one behind the first."""
        whole = self.whole(completion)
        return pb.Answer(
            token_ids=whole.token_ids,
            text=whole.text,
            logprobs=whole.logprobs,
            completion=whole.completion,
            reasoning=whole.reasoning,
            tool_calls=whole.tool_calls,
        )
