"""How much fits into one message: known before the work where it can be, and streams are cut to it."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.errors import AnswerTooLarge
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.sampling.params import SamplingParams

DEFAULT_CLIENT_BYTES = 4_000_000
"""Most bytes of text in an answer that every client takes: gRPC's take messages of 4 MiB unless told otherwise."""
STREAM_MESSAGE_BYTES = 1 << 20
"""Bytes of log-probabilities in one message of a stream."""
_TAG_AND_LENGTH = 3
"""Bytes before an entry of a list whose entries have at least 128 and at most 16,383."""


def refuse_what_no_answer_carries(
    params: SamplingParams, *, prompt_len: int, vocab_size: int, max_message_bytes: int, most_token_bytes: int = 0
) -> None:
    """Raise InvalidField when a prompt's log-probabilities leave no room in a unary answer, whatever is generated.

    `most_token_bytes` is what each token's text and bytes take, where they are asked for.
    """
    if params.prompt_logprobs is None:
        return
    num_bytes = (prompt_len - 1) * _most_bytes(params.prompt_logprobs, vocab_size, most_token_bytes)
    if num_bytes <= max_message_bytes:
        return
    raise InvalidField(
        "sampling.prompt_logprobs",
        Summary(f"{params.prompt_logprobs} for a prompt of {prompt_len} tokens"),
        f"log-probabilities of at most max_message_bytes = {max_message_bytes} in one answer, these may take "
        f"{num_bytes}: fewer top tokens, a shorter prompt, or GenerateStream, which sends them in parts",
    )


def refuse_long_text(field: str, num_bytes: int, what: str) -> None:
    """Raise InvalidField where a request would be answered by more text than every client takes."""
    if num_bytes > DEFAULT_CLIENT_BYTES:
        raise InvalidField(
            field, Summary(what), f"at most {DEFAULT_CLIENT_BYTES} bytes of text in an answer, these are {num_bytes}"
        )


def refuse_too_large(
    num_bytes: int,
    max_message_bytes: int,
    instead: str = "less (max_tokens, logprobs, prompt_logprobs), or use GenerateStream",
) -> None:
    """Raise AnswerTooLarge for a message that gRPC would not carry; `instead` is what to ask for."""
    if num_bytes > max_message_bytes:
        raise AnswerTooLarge(
            f"the answer has {num_bytes} bytes, max_message_bytes = {max_message_bytes}: ask for {instead}"
        )


def in_messages(delta: pb.Delta, max_message_bytes: int) -> Iterator[pb.Delta]:
    """A delta, with what is too much of its prompt's log-probabilities in deltas before it."""
    most = min(STREAM_MESSAGE_BYTES, max_message_bytes // 2)
    if delta.ByteSize() > most and delta.prompt_logprobs:
        part = pb.Delta()
        num_bytes = 0
        for entry in delta.prompt_logprobs:
            size = _entry_bytes(entry)
            if num_bytes + size > most:
                yield part
                part, num_bytes = pb.Delta(), 0
            part.prompt_logprobs.append(entry)
            num_bytes += size
        yield part
        delta.ClearField("prompt_logprobs")
    yield delta


def _most_bytes(num_top: int, vocab_size: int, most_token_bytes: int) -> int:
    """Most bytes of one position's log-probabilities: numbers have 8 bytes, ids more the larger they are."""
    text, raw = " " * most_token_bytes, b"" if most_token_bytes == 0 else b" "
    top = pb.TopLogprob(token_id=vocab_size - 1, logprob=-1.0, text=text, token_bytes=raw)
    tops = [top] * min(num_top, vocab_size)
    return _entry_bytes(pb.TokenLogprob(token_id=vocab_size - 1, logprob=-1.0, text=text, token_bytes=raw, top=tops))


def _entry_bytes(entry: Message) -> int:
    return _TAG_AND_LENGTH + entry.ByteSize()
