"""From a gRPC request to what the gang runs. Whatever is not allowed is refused here, before it reaches a rank."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.fields import check_token_ids
from gemray_cluster.server.sampling import read_sampling
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.checkpoint.generation import GenerationDefaults
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.messages import ModelInfo, Submit
from gemray_workers.model.config import ModelConfig

MAX_REQUEST_ID_CHARS = 128
ROLES = ("system", "developer", "user", "assistant", "model", "tool")
"""Of a message; templates write what they do not know as it stands, a misspelt role too."""
MAX_TOKENIZE_BYTES = 4 << 20
"""Of Tokenize, which needs no model whose length could bound it."""

GenerationRequest = pb.GenerateRequest | pb.GenerateStreamRequest


class PromptTooLong(InvalidField):
    """The prompt leaves no room for a single token; the message says both numbers."""

    def __init__(self, field: str, num_tokens: int, max_model_len: int) -> None:
        super().__init__(
            field, num_tokens, f"a prompt of at most {max_model_len - 1} tokens (this server fits {max_model_len})"
        )
        self.args = (
            f"{field} has {num_tokens} tokens, but the prompt may have at most {max_model_len - 1}: "
            f"this server fits {max_model_len} tokens, prompt and output together",
        )


@dataclass(frozen=True)
class AcceptedRequest:
    """A request that a rank can run."""

    submit: Submit
    """Under the client's request id; two clients may use the same (the gang has ids of its own)."""
    stop_strings: tuple[str, ...]


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one checkpoint."""

    tokenizer: ChatTokenizer
    defaults: GenerationDefaults

    @classmethod
    def from_directory(cls, model: str) -> RequestReader:
        """Of a checkpoint's directory; raises CheckpointError and InvalidField."""
        ModelConfig.from_directory(model)  # an unfit model is named before its tokenizer is looked at
        return cls(ChatTokenizer.from_directory(model), GenerationDefaults.from_directory(model))

    def read(self, request: GenerationRequest, request_id: str, model: ModelInfo) -> AcceptedRequest:
        """Validate and tokenize; raises InvalidField. Slow for long texts: run it in a thread."""
        prompt_ids = self._prompt_ids(request, model)
        params, stop_strings = read_sampling(
            request.sampling, request.speculation, self.defaults, model, prompt_len=len(prompt_ids)
        )
        submit = Submit(request_id=request_id, prompt_ids=prompt_ids, params=params)
        return AcceptedRequest(submit, stop_strings)

    def tokenize(self, request: pb.TokenizeRequest) -> tuple[list[int], str]:
        """The ids that a generation would run, and their text; raises InvalidField."""
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidField("input", None, "one of text, chat")
        num_bytes = sum(len(text.encode()) for text in _texts(request))
        if num_bytes > MAX_TOKENIZE_BYTES:
            raise InvalidField(kind, Summary(f"{num_bytes} bytes"), f"at most {MAX_TOKENIZE_BYTES}")
        text = request.text if kind == "text" else self._render(request.chat)
        return self.tokenizer.encode(text), text

    def _prompt_ids(self, request: GenerationRequest, model: ModelInfo) -> list[int]:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidField("input", None, "one of text, token_ids, chat")
        if kind == "token_ids":
            if len(request.token_ids.ids) >= model.max_model_len:  # before any of them is looked at
                raise PromptTooLong(kind, len(request.token_ids.ids), model.max_model_len)
            ids = list(check_token_ids("token_ids.ids", request.token_ids.ids, model.vocab_size))
        else:
            self._check_length(kind, _texts(request), model)
            text = request.text if kind == "text" else self._render(request.chat)
            ids = self.tokenizer.encode(text) if text else []
        if not ids:
            raise InvalidField(kind, Summary("empty"), "a prompt of at least one token")
        if len(ids) >= model.max_model_len:
            raise PromptTooLong(kind, len(ids), model.max_model_len)
        return ids

    def _check_length(self, field: str, texts: Iterable[str], model: ModelInfo) -> None:
        """Refuse what no tokenizing could make fit: cutting megabytes into tokens takes seconds."""
        num_bytes = sum(len(text.encode()) for text in texts)
        most = model.max_model_len * self.tokenizer.longest_token
        if num_bytes > most:
            raise InvalidField(
                field,
                Summary(f"{num_bytes} bytes"),
                f"at most {most}: this server fits {model.max_model_len} tokens of at most "
                f"{self.tokenizer.longest_token} bytes, prompt and output together",
            )

    def _render(self, chat: pb.Chat) -> str:
        if not chat.messages:
            raise InvalidField("chat.messages", [], "at least one message")
        for index, message in enumerate(chat.messages):
            if message.role not in ROLES:
                raise InvalidField(f"chat.messages[{index}].role", message.role, "one of " + ", ".join(ROLES))
        return self.tokenizer.render_chat(
            [{"role": message.role, "content": message.content} for message in chat.messages],
            tools=_read_tools(chat),
            enable_thinking=chat.enable_thinking if chat.HasField("enable_thinking") else None,
        )


def read_request_id(request: GenerationRequest) -> str:
    """The client's id, or a new one; raises InvalidField. Ids travel in metadata, hence plain ASCII."""
    if not request.HasField("request_id"):
        return uuid.uuid4().hex
    request_id = request.request_id
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS or not all("!" <= char <= "~" for char in request_id):
        raise InvalidField(
            "request_id", Summary.of_text(request_id), f"1 to {MAX_REQUEST_ID_CHARS} visible ASCII characters"
        )
    return request_id


def _read_tools(chat: pb.Chat) -> list[Any] | None:
    if not chat.HasField("tools_json"):
        return None
    try:
        tools = json.loads(chat.tools_json)
    except ValueError as error:
        raise InvalidField("chat.tools_json", Summary.of_text(chat.tools_json), f"a JSON array ({error})") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidField("chat.tools_json", Summary.of_text(chat.tools_json), "a JSON array of objects")
    return tools


def _texts(request: GenerationRequest | pb.TokenizeRequest) -> list[str]:
    """The texts of a request's input, before any template."""
    if request.WhichOneof("input") == "text":
        return [request.text]
    return [request.chat.tools_json, *(message.content for message in request.chat.messages)]
