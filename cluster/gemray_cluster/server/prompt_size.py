"""How long a request's input may be, told by its size alone: before anything is made of it, or waits for a thread."""

from __future__ import annotations

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.limits import MAX_TOKENIZE_BYTES, MIB, check_limits
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.messages import ModelInfo

GenerationRequest = pb.GenerateRequest | pb.GenerateStreamRequest

MAX_CUT_BYTES = 4 * MIB
"""Most bytes of a text or a chat of which truncate_prompt_tokens keeps the end: they are all cut into tokens."""


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


def check_prompt_size(request: GenerationRequest, model: ModelInfo, *, longest_token: int) -> None:
    """Refuse what no tokenizing could make fit; raises InvalidField.

    Args:
        request: what asks for an answer.
        model: what is served.
        longest_token: most bytes of text that one id of its tokenizer stands for.
    """
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidField("input", Summary("none"), "one of text, token_ids, chat")
    is_cut = request.sampling.HasField("truncate_prompt_tokens")
    if kind == "token_ids":
        num_ids = len(request.token_ids.ids)
        check_prompt_length(kind, min(num_ids, 1) if is_cut else num_ids, model)
        return
    num_bytes, most = input_bytes(request), model.max_model_len * longest_token
    if num_bytes > (max(most, MAX_CUT_BYTES) if is_cut else most):
        raise InvalidField(
            kind,
            Summary(f"{num_bytes} bytes"),
            f"at most {most}: this server fits {model.max_model_len} tokens of at most "
            f"{longest_token} bytes, prompt and output together",
        )


def check_prompt_length(field: str, num_tokens: int, model: ModelInfo) -> None:
    """Raise InvalidField for a prompt of no tokens, or of so many that none has room behind it."""
    if num_tokens == 0:
        raise InvalidField(field, Summary("empty"), "a prompt of at least one token")
    if num_tokens >= model.max_model_len:
        raise PromptTooLong(field, num_tokens, model.max_model_len)


def check_tokenize_size(request: pb.TokenizeRequest) -> None:
    """Refuse what has no input or too much of it; raises InvalidField."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidField("input", Summary("none"), "one of text, chat")
    check_limits(request)
    check_tokenize_bytes(kind, input_bytes(request))


def check_tokenize_bytes(field: str, num_bytes: int) -> None:
    """Raise InvalidField for more text than an answer of Tokenize has room for."""
    if num_bytes > MAX_TOKENIZE_BYTES:
        of_chat = ", as its template writes it" if field == "chat" else ""
        raise InvalidField(field, Summary(f"{num_bytes} bytes"), f"at most {MAX_TOKENIZE_BYTES} bytes{of_chat}")


def input_bytes(request: GenerationRequest | pb.TokenizeRequest) -> int:
    """Bytes of a request's input, before any template."""
    return len(request.text.encode()) if request.WhichOneof("input") == "text" else request.chat.ByteSize()
