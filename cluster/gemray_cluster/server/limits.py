"""How large each list and text of a request may be: one table, which the checks, their messages and a test read.

The protocol's comments state the same numbers. What is bounded by the model is checked where the model is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gemray_cluster.server.fields import at_most
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.grammar.compiler import MAX_CHOICES, MAX_GRAMMAR_BYTES
from gemray_workers.sampling.bounds import MAX_STOP_CHARS, MAX_STOP_STRINGS

KIB, MIB = 1 << 10, 1 << 20
MAX_TOKENIZE_BYTES = 960 * KIB
"""Most bytes of a text or a chat for Tokenize. Its answer has the text and up to three bytes of ids for each of its
bytes: less than the 4 MiB that gRPC's clients take."""
MODEL_LENGTH = "the model's length"
VOCABULARY = "the vocabulary"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The bounds of a field, and of each entry where it is a list."""

    entries: int | None = None
    """Most entries of a list, which are ..."""
    noun: str = "entries"
    least_chars: int = 0
    chars: int | None = None
    """Most characters of a text."""
    num_bytes: int | None = None
    """Most bytes of a text as UTF-8."""
    bounded_by: str | None = None
    """What bounds the field where no number here does, in the words of the protocol's comment."""

    def check(self, name: str, value: Any) -> None:
        """Raise InvalidField, naming the field `name`, if the value is larger."""
        if self.entries is not None:
            at_most(name, value, self.entries, self.noun)
        if self.chars is None and self.num_bytes is None:
            return
        texts = {name: value} if isinstance(value, str) else {f"{name}[{i}]": text for i, text in enumerate(value)}
        for path, text in texts.items():
            self._check_text(path, text)

    def _check_text(self, name: str, text: str) -> None:
        if self.chars is not None and not self.least_chars <= len(text) <= self.chars:
            least = f"{self.least_chars} to" if self.least_chars else "at most"
            raise InvalidField(name, Summary.of_text(text), f"{least} {self.chars} characters")
        if self.num_bytes is not None and (num_bytes := len(text.encode())) > self.num_bytes:
            raise InvalidField(name, Summary(f"{num_bytes} bytes"), f"at most {self.num_bytes} bytes")


LIMITS: Mapping[str, Limit] = {
    "GenerateRequest.request_id": Limit(least_chars=1, chars=128),
    "GenerateRequest.text": Limit(bounded_by=MODEL_LENGTH),
    "GenerateRequest.emitted_token_ids": Limit(bounded_by="max_tokens"),
    "GenerateRequest.emitted_by_answer": Limit(entries=128, noun="lists, one an answer"),
    "GenerateRequest.cache_salt": Limit(num_bytes=256),
    "GenerateRequest.checkpoint_hash": Limit(chars=128),
    "TokenIds.ids": Limit(bounded_by=MODEL_LENGTH),
    "Chat.messages": Limit(entries=8192, noun="messages"),
    "Chat.tools_json": Limit(num_bytes=MIB),
    "Chat.chat_template_kwargs_json": Limit(num_bytes=64 * KIB),
    "ToolChoice.function": Limit(chars=256),
    "ChatMessage.role": Limit(bounded_by="One of"),
    "ChatMessage.content": Limit(bounded_by=MODEL_LENGTH),
    "ChatMessage.name": Limit(least_chars=1, chars=256),
    "ChatMessage.tool_call_id": Limit(chars=256),
    "ChatMessage.tool_calls": Limit(entries=128, noun="calls"),
    "ChatMessage.reasoning": Limit(bounded_by=MODEL_LENGTH),
    "ToolCall.id": Limit(chars=256),
    "ToolCall.name": Limit(least_chars=1, chars=256),
    "ToolCall.arguments_json": Limit(num_bytes=MIB),
    "SamplingParameters.stop": Limit(entries=MAX_STOP_STRINGS, noun="strings", least_chars=1, chars=MAX_STOP_CHARS),
    "SamplingParameters.stop_token_ids": Limit(entries=256, noun="ids"),
    "SamplingParameters.logit_bias": Limit(bounded_by=VOCABULARY),
    "SamplingParameters.allowed_token_ids": Limit(bounded_by=VOCABULARY),
    "SamplingParameters.bad_words": Limit(entries=256, noun="texts", least_chars=1, chars=128),
    "SpeculationParameters.method": Limit(bounded_by="One of"),
    "Structured.json_schema": Limit(num_bytes=MAX_GRAMMAR_BYTES),
    "Structured.regex": Limit(num_bytes=MAX_GRAMMAR_BYTES),
    "Structured.lark": Limit(num_bytes=MAX_GRAMMAR_BYTES),
    "Choices.texts": Limit(entries=MAX_CHOICES, noun="texts", num_bytes=MAX_GRAMMAR_BYTES),
    "TokenizeRequest.text": Limit(num_bytes=MAX_TOKENIZE_BYTES),
    "DetokenizeRequest.token_ids": Limit(entries=MIB, noun="ids"),
}
"""By message and field."""

SAME_FIELDS: Mapping[str, str] = {"GenerateStreamRequest": "GenerateRequest"}
"""Messages whose fields are those of another one."""


def limit_of(field: FieldDescriptor) -> Limit | None:
    """The bounds of a field; None for numbers, switches and single messages."""
    message = field.containing_type.name if field.containing_type else ""  # extensions have none
    return LIMITS.get(f"{SAME_FIELDS.get(message, message)}.{field.name}")


def check_limits(request: Message) -> None:
    """Raise InvalidField for the first field of a request, or of a message in it, that is larger than it may be.

    A list's length is looked at before its entries, so the work is bounded, too.
    """
    _check(request, "")


def _check(message: Message, path: str) -> None:
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        limit = limit_of(field)
        if limit is not None:
            limit.check(name, value)
        if isinstance(value, Message):
            _check(value, f"{name}.")
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            entries: Sequence[Message] = value
            for index, entry in enumerate(entries):
                _check(entry, f"{name}[{index}].")
