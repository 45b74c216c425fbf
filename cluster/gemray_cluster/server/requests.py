"""From a gRPC request to what the gang runs. Whatever is not allowed is refused here, before it reaches a rank."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.answer_size import refuse_long_text, refuse_what_no_answer_carries
from gemray_cluster.server.bad_words import read_bad_words
from gemray_cluster.server.chat import ChatInput, read_chat
from gemray_cluster.server.fields import at_most, check_token_ids
from gemray_cluster.server.limits import LIMITS, check_limits
from gemray_cluster.server.prompt_size import (
    GenerationRequest,
    check_prompt_length,
    check_prompt_size,
    check_tokenize_bytes,
    check_tokenize_size,
)
from gemray_cluster.server.prompt_text import (
    newest,
    read_echo,
    read_kept_tokens,
    shows_special,
    text_bytes,
    text_of,
)
from gemray_cluster.server.required_calls import read_required_calls, read_strict_calls
from gemray_cluster.server.sampling import read_sampling
from gemray_cluster.server.structured import read_structured
from gemray_cluster.text.control_tokens import RenderedText
from gemray_cluster.text.output import OutputRules
from gemray_cluster.text.structure import CLOSES_CALL, OPENS_CALL
from gemray_cluster.text.token_text import TokenText
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.checkpoint.generation import GenerationDefaults
from gemray_workers.errors import InvalidField, Summary
from gemray_workers.grammar.compiler import GrammarCompiler
from gemray_workers.grammar.grammar import Grammar
from gemray_workers.messages import ModelInfo, Submit
from gemray_workers.model.config import ModelConfig
from gemray_workers.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

NUM_SEEDS = 1 << 64
"""Seeds go round: behind the largest comes 0."""
BYTES_PER_MESSAGE = 64
"""Bytes of plain text that are cut into tokens while a template writes one message."""
BYTES_PER_ID = 16
"""Bytes of plain text that are cut into tokens while one id is written."""


@dataclass(frozen=True)
class AcceptedRequest:
    """A request that a rank can run."""

    submit: Submit
    """Under the client's request id; two clients may use the same (the gang has ids of its own)."""
    output: OutputRules
    others: tuple[Submit, ...] = ()
    """The answers behind the first, where there are several."""
    echo: str = ""
    """What the text of each begins with."""
    generates: bool = True
    """False where the prompt alone is asked for: what the engine gives behind it is dropped."""
    names_tokens: bool = False
    """Whether log-probabilities tell the text of their tokens."""

    @property
    def answers(self) -> tuple[AcceptedRequest, ...]:
        """One for each answer."""
        return (replace(self, others=()), *(replace(self, submit=other, others=()) for other in self.others))


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one checkpoint."""

    tokenizer: ChatTokenizer
    defaults: GenerationDefaults
    vocab_size: int
    """Ids that the model has a row for; a tokenizer may know more."""

    @classmethod
    def from_directory(cls, model: str) -> RequestReader:
        """Read a checkpoint's directory; raises CheckpointError and InvalidField."""
        config = ModelConfig.from_directory(model)  # an unfit model is named before its tokenizer is looked at
        tokenizer = ChatTokenizer.from_directory(model)
        if tokenizer.vocab_size > config.vocab_size:
            logger.warning(
                "the tokenizer in %s makes ids up to %d, the model has rows for 0..%d: text with others is refused",
                model,
                tokenizer.vocab_size - 1,
                config.vocab_size - 1,
            )
        defaults = GenerationDefaults.from_directory(model, vocab_size=config.vocab_size)
        return cls(tokenizer, defaults, config.vocab_size)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles what requests ask of their answers; compile in a thread."""
        return GrammarCompiler(self.tokenizer.grammar_vocabulary(self.vocab_size))

    @cached_property
    def token_text(self) -> TokenText:
        """What single tokens say."""
        return TokenText(self.tokenizer)

    def prepare_grammars(self) -> None:
        """Build `grammars` now: nothing else of the process runs meanwhile, up to two seconds."""
        _ = self.grammars

    def check_size(self, request: GenerationRequest, model: ModelInfo) -> None:
        """Refuse an input that cannot fit, by its size alone; raises InvalidField. Takes no time."""
        check_prompt_size(request, model, longest_token=self.tokenizer.longest_token)

    def read(
        self, request: GenerationRequest, request_id: str, model: ModelInfo, *, max_answer_bytes: int | None = None
    ) -> AcceptedRequest:
        """Validate and tokenize; raises InvalidField. Slow for long texts: run it in a thread.

        `max_answer_bytes` is what the one message of a unary answer may hold; None for a stream.
        """
        check_limits(request)
        chat, prompt_ids = self._prompt(request, model)
        bad_words = read_bad_words(request.sampling, self.tokenizer, self.vocab_size)
        forbidden, stop_token_ids = self._call_rules(chat)
        params, output = read_sampling(
            request.sampling,
            request.speculation,
            self.defaults,
            model,
            prompt_len=len(prompt_ids),
            forbidden=(*forbidden, *bad_words.single),
            stop_token_ids=stop_token_ids,
        )
        params = msgspec.structs.replace(
            params, grammar=self._grammar(request, chat, prompt_ids), bad_words=bad_words.several
        )
        if max_answer_bytes is not None:
            refuse_what_no_answer_carries(
                params,
                prompt_len=len(prompt_ids),
                vocab_size=model.vocab_size,
                max_message_bytes=max_answer_bytes,
                most_token_bytes=self.token_text.most_bytes if request.sampling.logprob_text else 0,
            )
        first_ids, *other_ids = self._emitted_ids(request, params)
        generates = params.max_tokens > 0
        if not generates:  # an engine gives each prompt a token
            params = msgspec.structs.replace(params, max_tokens=1)
        submit = Submit(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            emitted_ids=first_ids,
            num_prompt_logprobs=len(prompt_ids) - 1 if first_ids else 0,  # they come before the first token
            cache_salt=request.cache_salt,
        )
        others = tuple(_other(submit, index, ids) for index, ids in enumerate(other_ids, start=1))
        echo = read_echo(request, prompt_ids, self.tokenizer)
        num_answers = 1 + len(others)
        refuse_long_text("sampling.echo", num_answers * len(echo.encode()), f"true for {num_answers} answers")
        return AcceptedRequest(
            submit,
            output,
            others,
            echo=echo,
            generates=generates,
            names_tokens=request.sampling.logprob_text,
        )

    def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """The ids that a generation would run, and their text; raises InvalidField. Slow for long texts, as `read`."""
        check_tokenize_size(request)
        is_chat = request.HasField("chat")
        rendered = self._render(read_chat(request.chat)) if is_chat else RenderedText(request.text)
        field = "chat" if is_chat else "text"
        check_tokenize_bytes(field, len(rendered.text.encode()))
        return pb.TokenizeResponse(token_ids=self._encode(field, rendered), text=rendered.text)

    def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """The text of token ids; raises InvalidField."""
        check_limits(request)
        ids = check_token_ids("token_ids", request.token_ids, self.vocab_size)
        shown, what = shows_special(request), f"{len(ids)} ids"
        refuse_long_text("token_ids", text_bytes(ids, self.tokenizer, shows_special=shown), what)
        text = text_of(ids, self.tokenizer, shows_special=shown)
        refuse_long_text("token_ids", len(text.encode()), what)  # each part of a character may have become U+FFFD
        return pb.DetokenizeResponse(text=text)

    def _call_rules(self, chat: ChatInput | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids that a chat forbids, ids that end its answer) for the sake of calls."""
        control_ids = self.tokenizer.control_ids
        if chat is None:
            return (), ()
        return (
            (control_ids[OPENS_CALL],) if not chat.choice.may_call and OPENS_CALL in control_ids else (),
            (control_ids[CLOSES_CALL],) if chat.takes_one_call and CLOSES_CALL in control_ids else (),
        )

    def _grammar(self, request: GenerationRequest, chat: ChatInput | None, prompt_ids: list[int]) -> Grammar | None:
        """What the answer must follow, not compiled yet."""
        control_ids, thinks = self.tokenizer.control_ids, chat is not None and bool(chat.enable_thinking)
        if chat is not None and chat.choice.must_call:
            if not request.HasField("structured"):
                return read_required_calls(chat, prompt_ids, control_ids)
            raise InvalidField("structured", Summary("set"), "unset where chat.tool_choice requires a call")
        if not request.HasField("structured"):
            return None if chat is None else read_strict_calls(chat, control_ids)
        return read_structured(request.structured, thinks=thinks, prompt_ids=prompt_ids, control_ids=control_ids)

    def _prompt(self, request: GenerationRequest, model: ModelInfo) -> tuple[ChatInput | None, list[int]]:
        """(the chat, if the prompt is one; its ids)."""
        self.check_size(request, model)
        kept = read_kept_tokens(request.sampling, max_model_len=model.max_model_len)
        if request.HasField("token_ids"):
            ids = newest(request.token_ids.ids, kept, keeps_bos=False)
            check_prompt_length("token_ids", len(ids), model)
            return None, list(check_token_ids("token_ids.ids", ids, self.vocab_size))
        chat = read_chat(request.chat) if request.HasField("chat") else None
        field = "text" if chat is None else "chat"
        rendered = RenderedText(request.text) if chat is None else self._render(chat)
        ids = newest(self._encode(field, rendered) if rendered.text else [], kept, keeps_bos=True)
        check_prompt_length(field, len(ids), model)
        return chat, ids

    def _emitted_ids(self, request: GenerationRequest, params: SamplingParams) -> list[list[int]]:
        """What earlier calls gave, one list an answer; raises InvalidField where no such call can have."""
        num_answers = request.sampling.n if request.sampling.HasField("n") else 1
        fields = {"emitted_token_ids": request.emitted_token_ids}
        if num_answers > 1:
            if request.emitted_token_ids:
                raise InvalidField("emitted_token_ids", Summary("set"), "emitted_by_answer where sampling.n is above 1")
            at_most("emitted_by_answer", request.emitted_by_answer, num_answers, "lists, one an answer")
            fields = {f"emitted_by_answer[{i}].ids": one.ids for i, one in enumerate(request.emitted_by_answer)}
        elif request.emitted_by_answer:
            raise InvalidField("emitted_by_answer", Summary("set"), "emitted_token_ids where sampling.n is 1")
        for field, ids in fields.items():
            if len(ids) > params.max_tokens:
                raise InvalidField(
                    field,
                    Summary(f"{len(ids)} ids"),
                    f"at most {params.max_tokens} ids, what max_tokens and the model's length leave: they are what an "
                    "earlier call of the same request has given",
                )
            if ids and not request.sampling.HasField("seed"):
                raise InvalidField(
                    "sampling.seed", Summary("unset"), f"the seed of the earlier call that has given {field}"
                )
        emitted = [list(check_token_ids(field, ids, self.vocab_size)) for field, ids in fields.items()]
        for field, given in zip(fields, emitted, strict=True):
            _refuse_ids_behind_an_end(field, given, params)
        return emitted + [[] for _ in range(num_answers - len(emitted))]

    def _render(self, chat: ChatInput) -> RenderedText:
        return self.tokenizer.render_chat(
            chat.messages,
            tools=chat.tools,
            enable_thinking=chat.enable_thinking,
            control_tokens=chat.parse_control_tokens,
            continue_final_message=chat.continue_final_message,
            variables=chat.variables,
        )

    def _encode(self, field: str, rendered: RenderedText) -> list[int]:
        """Ids of a text, each of which the model has a row for: others would run as zeros."""
        ids = self.tokenizer.encode_rendered(rendered)
        largest = max(ids)
        if largest >= self.vocab_size:
            raise InvalidField(
                field,
                Summary(f"text that holds {self.tokenizer.spelling_of(largest)!r} (token id {largest})"),
                f"text of token ids 0..{self.vocab_size - 1}, which the model has rows for",
            )
        return ids


def _refuse_ids_behind_an_end(field: str, ids: list[int], params: SamplingParams) -> None:
    """Raise InvalidField for ids that go on behind a stop token: no earlier call has given them."""
    stops = frozenset(params.stop_token_ids)
    for place, token_id in enumerate(ids[:-1]):
        if token_id in stops and place >= params.min_tokens:
            raise InvalidField(
                f"{field}[{place}]",
                token_id,
                "a stop token as the last id alone: it ends an answer (sampling.stop_token_ids or the checkpoint's)",
            )


def _other(first: Submit, index: int, emitted_ids: list[int]) -> Submit:
    """The answer `index` to the prompt of `first`, which alone tells the prompt's log-probabilities."""
    params = msgspec.structs.replace(first.params, seed=(first.params.seed + index) % NUM_SEEDS, prompt_logprobs=None)
    return msgspec.structs.replace(first, params=params, emitted_ids=emitted_ids, num_prompt_logprobs=0)


def read_request_id(request: GenerationRequest) -> str:
    """The client's id, or a new one; raises InvalidField. Ids travel in metadata, hence plain ASCII."""
    if not request.HasField("request_id"):
        return uuid.uuid4().hex
    request_id = request.request_id
    most = LIMITS["GenerateRequest.request_id"].chars or 0
    if not 0 < len(request_id) <= most or not all("!" <= char <= "~" for char in request_id):
        raise InvalidField("request_id", Summary.of_text(request_id), f"1 to {most} visible ASCII characters")
    return request_id


def text_cost(request: GenerationRequest | pb.TokenizeRequest) -> int:
    """How much work reading a request is, in bytes of plain text that cost as much."""
    return request.ByteSize() + BYTES_PER_MESSAGE * len(request.chat.messages)
