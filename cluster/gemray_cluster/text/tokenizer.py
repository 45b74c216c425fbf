"""The checkpoint's tokenizer: text and chats to ids, and the bytes that each id stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gemray_workers.errors import CheckpointError, InvalidField

BOS_ID = 2

SPECIAL_TOKENS: Mapping[str, int] = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": BOS_ID,
    "<unk>": 3,
    "<mask>": 4,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
}
"""Spec section 3. Stops, templates and drafters rely on these ids, so a tokenizer is checked against them."""

REQUIRED_SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>")


class ChatTokenizer:
    """Encodes prompts with exactly one beginning-of-sequence token.

    Attributes:
        token_bytes: for each id, the UTF-8 bytes that it adds to the text; special tokens add none. A character
            may be spread over several ids (byte fallback), so these are bytes, not strings.
    """

    def __init__(self, tokenizer: Any, *, source: str) -> None:
        """Wrap a fast `transformers` tokenizer; raises CheckpointError when it is not a Gemma 4 one."""
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        _check_special_tokens(self._backend, source)
        self.token_bytes = _bytes_of_tokens(self._backend, source)

    @classmethod
    def from_directory(cls, path: str | Path) -> ChatTokenizer:
        """Load a checkpoint's tokenizer files; raises CheckpointError."""
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"there is no directory {directory}, nor an embedded model of that name")
        if not (directory / "tokenizer.json").is_file():
            raise CheckpointError(f"{directory} holds no tokenizer.json, so text cannot be tokenized")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # whatever a malformed file makes the library raise
            raise CheckpointError(f"the tokenizer in {directory} cannot be loaded: {error}") from error
        loaded = cls(tokenizer, source=str(directory))
        if loaded.has_chat_template:
            _check_chat_template(loaded, str(directory))
        return loaded

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows; a model may have more rows (padding)."""
        return len(self.token_bytes)

    @cached_property
    def longest_token(self) -> int:
        """Most bytes of text that one id stands for: what a number of tokens can hold at the utmost."""
        return max(map(len, self.token_bytes))

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a chat is written."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text, with one <bos> in front whether or not the text brings its own.

        Gemma degenerates without it (spec section 3), so it is not left to the tokenizer's post-processor.
        """
        # A batch of one: unlike `encode`, it lets other threads run while a long text is cut into tokens.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids if ids[:1] == [BOS_ID] else [BOS_ID, *ids]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None, enable_thinking: bool | None
    ) -> str:
        """The chat as the checkpoint's own template writes it, up to where the model's turn begins.

        `enable_thinking` None leaves the choice to the template. Raises InvalidField when the checkpoint has no
        template or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidField("chat", "messages", "text or token_ids: this checkpoint has no chat template")
        extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **extra,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidField("chat", "messages", f"what the chat template accepts ({error})") from error
        return str(rendered)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Ids of a rendered chat. Templates begin with <bos> themselves; `encode` does not add a second one."""
        return self.encode(self.render_chat(messages, tools=tools, enable_thinking=enable_thinking))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence: what a `Detokenizer` fed with it yields in total."""
        return b"".join(self.bytes_of(token_id) for token_id in token_ids).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one id; none for special tokens and for rows of the model beyond the tokenizer."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""


def _check_chat_template(tokenizer: ChatTokenizer, source: str) -> None:
    """At start, rather than at the first chat."""
    try:
        tokenizer.render_chat([{"role": "user", "content": "Hi"}], tools=None, enable_thinking=None)
    except InvalidField as error:
        raise CheckpointError(f"the chat template in {source} cannot write a chat of one message: {error}") from error


def _check_special_tokens(backend: Tokenizer, source: str) -> None:
    wrong = []
    for token, expected in SPECIAL_TOKENS.items():
        actual = backend.token_to_id(token)
        if actual != expected and (actual is not None or token in REQUIRED_SPECIAL_TOKENS):
            wrong.append(f"{token} is {'missing' if actual is None else actual}, expected {expected}")
    if wrong:
        raise CheckpointError(f"the tokenizer in {source} is not a Gemma 4 one: " + "; ".join(wrong))


def _bytes_of_tokens(backend: Tokenizer, source: str) -> list[bytes]:
    """Apply the tokenizer's decoder to each token alone.

    That is exact for Gemma's decoder (replace the space mark, join byte tokens, concatenate), whose steps look at one
    token at a time; any other kind of decoder is refused rather than approximated.
    """
    replacements, byte_fallback = _decoder_steps(backend, source)
    hidden = {id_ for id_, added in backend.get_added_tokens_decoder().items() if added.special}
    hidden.update(SPECIAL_TOKENS[token] for token in SPECIAL_TOKENS if backend.token_to_id(token) is not None)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    token_bytes = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if token_id not in hidden:
            token_bytes[token_id] = _token_bytes(token, replacements, byte_fallback)
    return token_bytes


def _token_bytes(token: str, replacements: Sequence[tuple[str, str]], byte_fallback: bool) -> bytes:
    if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    for pattern, content in replacements:
        token = token.replace(pattern, content)
    return token.encode("utf-8")


def _decoder_steps(backend: Tokenizer, source: str) -> tuple[list[tuple[str, str]], bool]:
    """The literal replacements of the decoder, in order, and whether it joins byte tokens."""
    decoder: dict[str, Any] = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    )
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    literal = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse"} or not literal:
        raise CheckpointError(
            f"the tokenizer in {source} decodes with {' + '.join(kinds)}; "
            "only literal Replace, ByteFallback and Fuse (the Gemma decoder) are known"
        )
    replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    return replacements, "ByteFallback" in kinds
