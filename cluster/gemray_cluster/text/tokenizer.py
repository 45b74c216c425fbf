"""The checkpoint's tokenizer: text and chats to ids, and the bytes that each id stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.defaults import DEFAULT_NAMESPACE
from llguidance import LLTokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils.chat_template_utils import render_jinja_template

from gemray_cluster.text.control_tokens import (
    ANSWERING_ROLES,
    CHANNEL_TOKENS,
    ControlTokens,
    RenderedText,
    map_texts,
    texts_of,
    unused_mark,
)
from gemray_cluster.text.tokenizer_settings import check_ids, switch_off_silent_changes
from gemray_workers.checkpoint.json_file import refuse_broken_link
from gemray_workers.checkpoint.lfs import refuse_lfs_pointer
from gemray_workers.errors import CheckpointError, InvalidField, Summary
from gemray_workers.grammar.special_tokens import SPECIAL_TOKENS, control_ids, hidden_ids
from gemray_workers.grammar.token_bytes import bytes_of_tokens
from gemray_workers.grammar.vocabulary import grammar_vocabulary

__all__ = ["BOS_ID", "SPECIAL_TOKENS", "ChatTokenizer"]

BOS_ID = SPECIAL_TOKENS["<bos>"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What transformers reads, leaving out in silence what is not there."""

_OF_TEMPLATES = frozenset({*DEFAULT_NAMESPACE, "raise_exception", "strftime_now"})
"""Names of functions that a chat template may call."""

REQUIRED_SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>")


@dataclass(frozen=True)
class TemplateInput:
    """What a template is given."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    variables: dict[str, Any]


class ChatTokenizer:
    """Encodes prompts with exactly one beginning-of-sequence token.

    Attributes:
        token_bytes: for each id, the UTF-8 bytes that it adds to the text; special tokens add none. A character
            may be spread over several ids (byte fallback), so these are bytes, not strings.
        control_ids: the special tokens by their spelling: they structure a prompt and add nothing to a text.
    """

    def __init__(self, tokenizer: Any, *, source: str) -> None:
        """Wrap a fast `transformers` tokenizer; raises CheckpointError when it is not a Gemma 4 one."""
        self._tokenizer = tokenizer
        self._source = source
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        _check_special_tokens(self._backend, source)
        switch_off_silent_changes(self._backend, source)
        self.control_ids = control_ids(self._backend)
        self._control = ControlTokens(self._backend, self.control_ids)
        self.token_bytes = bytes_of_tokens(self._backend, hidden_ids(self._backend), source)

    @classmethod
    def from_directory(cls, path: str | Path) -> ChatTokenizer:
        """Load a checkpoint's tokenizer files; raises CheckpointError."""
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"there is no directory {directory}, nor an embedded model of that name")
        for name in TOKENIZER_FILES:
            refuse_broken_link(directory / name)
            refuse_lfs_pointer(directory / name)
        if not (directory / "tokenizer.json").is_file():
            raise CheckpointError(f"{directory} holds no tokenizer.json, so text cannot be tokenized")
        try:
            # Tokenizers state their class themselves; to look for it in config.json imports the model's, for seconds.
            nothing_of_the_model = PreTrainedConfig()
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, config=nothing_of_the_model
            )
        except Exception as error:  # whatever a malformed file makes the library raise
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise CheckpointError(f"the tokenizer in {directory} cannot be loaded: {why}") from error
        check_ids(tokenizer.backend_tokenizer, directory / "tokenizer.json")
        loaded = cls(tokenizer, source=str(directory))
        if loaded.has_chat_template:
            _check_chat_template(loaded, str(directory))
        return loaded

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows; a model may have more rows (padding)."""
        return len(self.token_bytes)

    @cached_property
    def control_spellings(self) -> dict[int, str]:
        """Control tokens by id."""
        return {token_id: token for token, token_id in self.control_ids.items()}

    def spells_control(self, text: str) -> bool:
        """Whether a text spells a control token."""
        return self._control.are_spelled_in([text])

    @cached_property
    def longest_token(self) -> int:
        """Most bytes of text that one id stands for: the most that a number of tokens can hold."""
        return max(map(len, self.token_bytes))

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a chat is written."""
        return bool(self._tokenizer.chat_template)

    def grammar_vocabulary(self, vocab_size: int) -> LLTokenizer:
        """What grammars are compiled for, see `gemray_workers.grammar.vocabulary`; the model has `vocab_size` ids."""
        return grammar_vocabulary(self._backend, vocab_size, self._source)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text, with one <bos> in front whether or not the text brings its own.

        Gemma degenerates without it (spec section 3), so it is not left to the tokenizer's post-processor.
        """
        # A batch of one: unlike `encode`, it lets other threads run while a long text is cut into tokens.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids if ids[:1] == [BOS_ID] else [BOS_ID, *ids]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        enable_thinking: bool | None,
        control_tokens: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedText:
        """The chat as the checkpoint's own template writes it, up to where the model's turn begins.

        `enable_thinking` None leaves the choice to the template, which also gets `variables`. With
        `continue_final_message` the text ends behind the last message's content, whose turn stays open. A control token
        that messages, tools or variables spell stays text unless `control_tokens` is set; only the channel tokens of
        earlier answers are shown to the template, which leaves the thoughts between them out. Raises InvalidField when
        the checkpoint has no template or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidField("chat", Summary("set"), "text or token_ids: this checkpoint has no chat template")
        chat = TemplateInput([dict(message) for message in messages], list(tools or []), dict(variables or {}))
        self._check_variables(chat.variables)
        if enable_thinking is not None:
            chat.variables["enable_thinking"] = enable_thinking
        texts = texts_of([chat.messages, chat.tools, chat.variables])
        if not continue_final_message:
            return self._rendered(chat, texts, control_tokens=control_tokens)
        end = unused_mark(texts)
        chat.messages[-1]["content"] += end
        rendered = self._rendered(chat, [*texts, end], control_tokens=control_tokens, is_open=True)
        if rendered.text.count(end) != 1:
            raise InvalidField("chat.continue_final_message", True, "false: the chat template changes the last message")
        return rendered.up_to(rendered.text.index(end))

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Refuse the names that the library or the chat's own fields give."""
        taken = {"messages", "enable_thinking", *self._tokenizer.special_tokens_map, *_OF_TEMPLATES}
        for call in (self._tokenizer.apply_chat_template, render_jinja_template, Template.render):
            taken.update(signature(call).parameters)
        for name in variables:
            if name in taken:
                allowed = "names that the chat does not give itself, nor templates have for functions of theirs"
                raise InvalidField("chat.chat_template_kwargs_json", name, allowed)

    def _rendered(
        self, chat: TemplateInput, texts: Sequence[str], *, control_tokens: bool, is_open: bool = False
    ) -> RenderedText:
        """What the template writes; `texts` are all that people wrote. `is_open` has no turn begin at the end."""
        if control_tokens or not self._control.are_spelled_in(texts):
            return RenderedText(self._render(chat, is_open=is_open))
        marks = self._control.marks_for(texts)
        tools, variables = (map_texts(value, marks.put_into) for value in (chat.tools, chat.variables))

        def rendered(but_not: Sequence[str]) -> RenderedText:
            kept = [but_not if message["role"] in ANSWERING_ROLES else () for message in chat.messages]
            marked = [
                map_texts(message, partial(marks.put_into, but_not=tokens))
                for message, tokens in zip(chat.messages, kept, strict=True)
            ]
            return marks.take_out_of(self._render(TemplateInput(marked, tools, variables), is_open=is_open))

        all_text, but_thoughts = rendered(()), rendered(CHANNEL_TOKENS)
        left_out = self._control.count(but_thoughts, CHANNEL_TOKENS) == self._control.count(all_text, CHANNEL_TOKENS)
        return but_thoughts if left_out else all_text

    def _render(self, chat: TemplateInput, *, is_open: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                chat.messages,
                tools=chat.tools or None,
                add_generation_prompt=not is_open,
                tokenize=False,
                **chat.variables,
            )
        except Exception as error:  # a template is a program of the checkpoint's, and may raise anything
            what = Summary(f"{len(chat.messages)} messages")
            raise InvalidField("chat", what, f"what the checkpoint's chat template takes ({error})") from error
        return str(rendered)

    def encode_rendered(self, rendered: RenderedText) -> list[int]:
        """Ids of a rendered chat. Templates begin with <bos> themselves; a second one is not added."""
        if not rendered.spelled_at:
            return self.encode(rendered.text)
        ids = self._control.encode(rendered)
        return ids if ids[:1] == [BOS_ID] else [BOS_ID, *ids]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Ids of a chat."""
        return self.encode_rendered(self.render_chat(messages, tools=tools, enable_thinking=enable_thinking))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence: what a `Detokenizer` fed with it yields in total."""
        return b"".join(self.bytes_of(token_id) for token_id in token_ids).decode("utf-8", errors="replace")

    def spelling_of(self, token_id: int) -> str:
        """How the tokenizer's file spells one id."""
        return str(self._backend.id_to_token(token_id))

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
