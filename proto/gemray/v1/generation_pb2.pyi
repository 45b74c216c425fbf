from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoiceMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
    TOOL_CHOICE_MODE_UNSPECIFIED: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_AUTO: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_NONE: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_REQUIRED: _ClassVar[ToolChoiceMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALL: _ClassVar[FinishReason]
    FINISH_REASON_FORM_COMPLETE: _ClassVar[FinishReason]

class KvSharing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
    KV_SHARING_UNSPECIFIED: _ClassVar[KvSharing]
    KV_SHARING_SHARED: _ClassVar[KvSharing]
    KV_SHARING_OWN: _ClassVar[KvSharing]

class DrafterPlacement(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
    DRAFTER_PLACEMENT_UNSPECIFIED: _ClassVar[DrafterPlacement]
    DRAFTER_PLACEMENT_COLOCATED: _ClassVar[DrafterPlacement]
    DRAFTER_PLACEMENT_DEDICATED: _ClassVar[DrafterPlacement]

class RankRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
    RANK_ROLE_UNSPECIFIED: _ClassVar[RankRole]
    RANK_ROLE_TARGET: _ClassVar[RankRole]
    RANK_ROLE_DRAFTER: _ClassVar[RankRole]

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_STARTING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_FAILED: _ClassVar[ServerState]
    SERVER_STATE_STOPPED: _ClassVar[ServerState]
TOOL_CHOICE_MODE_UNSPECIFIED: ToolChoiceMode
TOOL_CHOICE_MODE_AUTO: ToolChoiceMode
TOOL_CHOICE_MODE_NONE: ToolChoiceMode
TOOL_CHOICE_MODE_REQUIRED: ToolChoiceMode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALL: FinishReason
FINISH_REASON_FORM_COMPLETE: FinishReason
KV_SHARING_UNSPECIFIED: KvSharing
KV_SHARING_SHARED: KvSharing
KV_SHARING_OWN: KvSharing
DRAFTER_PLACEMENT_UNSPECIFIED: DrafterPlacement
DRAFTER_PLACEMENT_COLOCATED: DrafterPlacement
DRAFTER_PLACEMENT_DEDICATED: DrafterPlacement
RANK_ROLE_UNSPECIFIED: RankRole
RANK_ROLE_TARGET: RankRole
RANK_ROLE_DRAFTER: RankRole
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_FAILED: ServerState
SERVER_STATE_STOPPED: ServerState

class GenerateRequest(_message.Message):
    __slots__ = ["request_id", "text", "token_ids", "chat", "sampling", "speculation", "emitted_token_ids", "cache_salt", "structured", "emitted_by_answer", "checkpoint_hash"]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_BY_ANSWER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_HASH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: SamplingParameters
    speculation: SpeculationParameters
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    structured: Structured
    emitted_by_answer: _containers.RepeatedCompositeFieldContainer[TokenIds]
    checkpoint_hash: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParameters, _Mapping]] = ..., emitted_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., structured: _Optional[_Union[Structured, _Mapping]] = ..., emitted_by_answer: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., checkpoint_hash: _Optional[str] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ["request_id", "text", "token_ids", "chat", "sampling", "speculation", "emitted_token_ids", "cache_salt", "structured", "emitted_by_answer", "checkpoint_hash"]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_BY_ANSWER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_HASH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: SamplingParameters
    speculation: SpeculationParameters
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    structured: Structured
    emitted_by_answer: _containers.RepeatedCompositeFieldContainer[TokenIds]
    checkpoint_hash: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParameters, _Mapping]] = ..., emitted_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., structured: _Optional[_Union[Structured, _Mapping]] = ..., emitted_by_answer: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., checkpoint_hash: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ["ids"]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ["messages", "tools_json", "enable_thinking", "parse_control_tokens", "tool_choice", "parallel_tool_calls", "continue_final_message", "chat_template_kwargs_json"]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    ENABLE_THINKING_FIELD_NUMBER: _ClassVar[int]
    PARSE_CONTROL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    enable_thinking: bool
    parse_control_tokens: bool
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    continue_final_message: bool
    chat_template_kwargs_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., enable_thinking: bool = ..., parse_control_tokens: bool = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: bool = ..., continue_final_message: bool = ..., chat_template_kwargs_json: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ["mode", "function"]
    MODE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoiceMode
    function: str
    def __init__(self, mode: _Optional[_Union[ToolChoiceMode, str]] = ..., function: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ["role", "content", "name", "tool_call_id", "tool_calls", "reasoning"]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_call_id: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ["id", "name", "arguments_json", "is_incomplete"]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    is_incomplete: bool
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., is_incomplete: bool = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ["temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output", "n", "bad_words", "truncate_prompt_tokens", "echo", "logprob_text", "logits_checksum"]
    class LogitBiasEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGITS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    n: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    truncate_prompt_tokens: int
    echo: bool
    logprob_text: bool
    logits_checksum: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., skip_special_tokens: bool = ..., include_stop_str_in_output: bool = ..., n: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., truncate_prompt_tokens: _Optional[int] = ..., echo: bool = ..., logprob_text: bool = ..., logits_checksum: bool = ...) -> None: ...

class SpeculationParameters(_message.Message):
    __slots__ = ["num_draft_tokens", "method"]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    num_draft_tokens: int
    method: str
    def __init__(self, num_draft_tokens: _Optional[int] = ..., method: _Optional[str] = ...) -> None: ...

class Structured(_message.Message):
    __slots__ = ["json_schema", "json_object", "regex", "choice", "lark", "thought_first"]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    THOUGHT_FIRST_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choices
    lark: str
    thought_first: bool
    def __init__(self, json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., lark: _Optional[str] = ..., thought_first: bool = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ["texts"]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ["request_id", "token_ids", "text", "logprobs", "prompt_logprobs", "completion", "reasoning", "tool_calls", "other_answers"]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    OTHER_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    completion: Completion
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    other_answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., completion: _Optional[_Union[Completion, _Mapping]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., other_answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ["token_ids", "text", "logprobs", "completion", "reasoning", "tool_calls"]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    completion: Completion
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., completion: _Optional[_Union[Completion, _Mapping]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ["request_id", "delta", "final", "answer_end"]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    ANSWER_END_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    delta: Delta
    final: Completion
    answer_end: AnswerEnd
    def __init__(self, request_id: _Optional[str] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., final: _Optional[_Union[Completion, _Mapping]] = ..., answer_end: _Optional[_Union[AnswerEnd, _Mapping]] = ...) -> None: ...

class AnswerEnd(_message.Message):
    __slots__ = ["index", "completion"]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    index: int
    completion: Completion
    def __init__(self, index: _Optional[int] = ..., completion: _Optional[_Union[Completion, _Mapping]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ["token_ids", "text", "logprobs", "prompt_logprobs", "reasoning", "tool_calls", "index"]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    index: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., index: _Optional[int] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ["index", "id", "name", "arguments_json", "is_complete"]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments_json: str
    is_complete: bool
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., is_complete: bool = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ["finish_reason", "stop_token_id", "stop_string", "usage", "speculation", "seed"]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    stop_token_id: int
    stop_string: str
    usage: Usage
    speculation: Speculation
    seed: int
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ["prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ["method", "rounds", "drafted", "accepted", "accepted_per_position", "by_method"]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    BY_METHOD_FIELD_NUMBER: _ClassVar[int]
    method: str
    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    by_method: _containers.RepeatedCompositeFieldContainer[Speculation]
    def __init__(self, method: _Optional[str] = ..., rounds: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., by_method: _Optional[_Iterable[_Union[Speculation, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ["token_id", "logprob", "top", "text", "token_bytes", "logits_checksum"]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGITS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    text: str
    token_bytes: bytes
    logits_checksum: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., text: _Optional[str] = ..., token_bytes: _Optional[bytes] = ..., logits_checksum: _Optional[int] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ["token_id", "logprob", "text", "token_bytes"]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    text: str
    token_bytes: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[str] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ["text", "chat"]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ["token_ids", "text"]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ["token_ids", "skip_special_tokens"]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ["text"]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ["model_type", "hidden_size", "num_layers", "num_attention_heads", "layer_types", "vocab_size", "max_model_len", "max_position_embeddings", "sliding_window", "dtype", "tensor_parallel_size", "choices", "drafter", "ranks", "generation_defaults", "replicas", "model_name", "revision", "gemray_version", "checkpoint_hash", "drafters", "numerics"]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTENTION_HEADS_FIELD_NUMBER: _ClassVar[int]
    LAYER_TYPES_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    GEMRAY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_HASH_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    layer_types: _containers.RepeatedScalarFieldContainer[str]
    vocab_size: int
    max_model_len: int
    max_position_embeddings: int
    sliding_window: int
    dtype: str
    tensor_parallel_size: int
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    drafter: Drafter
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    generation_defaults: GenerationDefaults
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaInfo]
    model_name: str
    revision: str
    gemray_version: str
    checkpoint_hash: str
    drafters: _containers.RepeatedCompositeFieldContainer[Drafter]
    numerics: str
    def __init__(self, model_type: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_attention_heads: _Optional[int] = ..., layer_types: _Optional[_Iterable[str]] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_position_embeddings: _Optional[int] = ..., sliding_window: _Optional[int] = ..., dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., drafter: _Optional[_Union[Drafter, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., generation_defaults: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaInfo, _Mapping]]] = ..., model_name: _Optional[str] = ..., revision: _Optional[str] = ..., gemray_version: _Optional[str] = ..., checkpoint_hash: _Optional[str] = ..., drafters: _Optional[_Iterable[_Union[Drafter, _Mapping]]] = ..., numerics: _Optional[str] = ...) -> None: ...

class ReplicaInfo(_message.Message):
    __slots__ = ["index", "max_model_len", "ranks"]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    index: int
    max_model_len: int
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    def __init__(self, index: _Optional[int] = ..., max_model_len: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ["what", "chosen", "reason"]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    what: str
    chosen: str
    reason: str
    def __init__(self, what: _Optional[str] = ..., chosen: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Drafter(_message.Message):
    __slots__ = ["method", "kv_sharing", "placement", "max_draft_tokens", "name", "revision", "checkpoint_hash"]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    KV_SHARING_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_HASH_FIELD_NUMBER: _ClassVar[int]
    method: str
    kv_sharing: KvSharing
    placement: DrafterPlacement
    max_draft_tokens: int
    name: str
    revision: str
    checkpoint_hash: str
    def __init__(self, method: _Optional[str] = ..., kv_sharing: _Optional[_Union[KvSharing, str]] = ..., placement: _Optional[_Union[DrafterPlacement, str]] = ..., max_draft_tokens: _Optional[int] = ..., name: _Optional[str] = ..., revision: _Optional[str] = ..., checkpoint_hash: _Optional[str] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ["rank", "host", "device", "weight_bytes", "shard_indices", "kv_groups", "role", "memory"]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDICES_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    device: str
    weight_bytes: int
    shard_indices: ShardIndices
    kv_groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    role: RankRole
    memory: RankMemory
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., shard_indices: _Optional[_Union[ShardIndices, _Mapping]] = ..., kv_groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., role: _Optional[_Union[RankRole, str]] = ..., memory: _Optional[_Union[RankMemory, _Mapping]] = ...) -> None: ...

class RankMemory(_message.Message):
    __slots__ = ["total", "weights", "drafter", "kv", "graphs", "work", "elsewhere", "headroom"]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_FIELD_NUMBER: _ClassVar[int]
    total: int
    weights: int
    drafter: int
    kv: int
    graphs: int
    work: int
    elsewhere: int
    headroom: int
    def __init__(self, total: _Optional[int] = ..., weights: _Optional[int] = ..., drafter: _Optional[int] = ..., kv: _Optional[int] = ..., graphs: _Optional[int] = ..., work: _Optional[int] = ..., elsewhere: _Optional[int] = ..., headroom: _Optional[int] = ...) -> None: ...

class ShardIndices(_message.Message):
    __slots__ = ["padded_org_vocab_start_index", "padded_org_vocab_end_index", "padded_added_vocab_start_index", "padded_added_vocab_end_index", "org_vocab_start_index", "org_vocab_end_index", "added_vocab_start_index", "added_vocab_end_index", "num_org_elements", "num_added_elements", "num_org_elements_padded", "num_added_elements_padded", "num_org_vocab_padding", "num_added_vocab_padding", "num_elements_padded"]
    PADDED_ORG_VOCAB_START_INDEX_FIELD_NUMBER: _ClassVar[int]
    PADDED_ORG_VOCAB_END_INDEX_FIELD_NUMBER: _ClassVar[int]
    PADDED_ADDED_VOCAB_START_INDEX_FIELD_NUMBER: _ClassVar[int]
    PADDED_ADDED_VOCAB_END_INDEX_FIELD_NUMBER: _ClassVar[int]
    ORG_VOCAB_START_INDEX_FIELD_NUMBER: _ClassVar[int]
    ORG_VOCAB_END_INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDED_VOCAB_START_INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDED_VOCAB_END_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_ORG_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADDED_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ORG_ELEMENTS_PADDED_FIELD_NUMBER: _ClassVar[int]
    NUM_ADDED_ELEMENTS_PADDED_FIELD_NUMBER: _ClassVar[int]
    NUM_ORG_VOCAB_PADDING_FIELD_NUMBER: _ClassVar[int]
    NUM_ADDED_VOCAB_PADDING_FIELD_NUMBER: _ClassVar[int]
    NUM_ELEMENTS_PADDED_FIELD_NUMBER: _ClassVar[int]
    padded_org_vocab_start_index: int
    padded_org_vocab_end_index: int
    padded_added_vocab_start_index: int
    padded_added_vocab_end_index: int
    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int
    num_org_elements: int
    num_added_elements: int
    num_org_elements_padded: int
    num_added_elements_padded: int
    num_org_vocab_padding: int
    num_added_vocab_padding: int
    num_elements_padded: int
    def __init__(self, padded_org_vocab_start_index: _Optional[int] = ..., padded_org_vocab_end_index: _Optional[int] = ..., padded_added_vocab_start_index: _Optional[int] = ..., padded_added_vocab_end_index: _Optional[int] = ..., org_vocab_start_index: _Optional[int] = ..., org_vocab_end_index: _Optional[int] = ..., added_vocab_start_index: _Optional[int] = ..., added_vocab_end_index: _Optional[int] = ..., num_org_elements: _Optional[int] = ..., num_added_elements: _Optional[int] = ..., num_org_elements_padded: _Optional[int] = ..., num_added_elements_padded: _Optional[int] = ..., num_org_vocab_padding: _Optional[int] = ..., num_added_vocab_padding: _Optional[int] = ..., num_elements_padded: _Optional[int] = ...) -> None: ...

class KvGroup(_message.Message):
    __slots__ = ["name", "num_layers", "num_kv_heads", "head_dim", "window", "page_size", "num_pages", "page_bytes"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int
    page_size: int
    num_pages: int
    page_bytes: int
    def __init__(self, name: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., window: _Optional[int] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ["temperature", "top_k", "top_p", "stop_token_ids", "suppress_tokens", "min_p", "repetition_penalty", "max_tokens", "min_tokens", "stop", "max_length"]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    min_p: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    max_length: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., suppress_tokens: _Optional[_Iterable[int]] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., max_length: _Optional[int] = ...) -> None: ...

class GetServerStatsRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetServerStatsResponse(_message.Message):
    __slots__ = ["state", "uptime_seconds", "seconds_since_heartbeat", "requests", "engine", "replicas"]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    uptime_seconds: float
    seconds_since_heartbeat: float
    requests: Requests
    engine: EngineStats
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStats]
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., uptime_seconds: _Optional[float] = ..., seconds_since_heartbeat: _Optional[float] = ..., requests: _Optional[_Union[Requests, _Mapping]] = ..., engine: _Optional[_Union[EngineStats, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStats, _Mapping]]] = ...) -> None: ...

class ReplicaStats(_message.Message):
    __slots__ = ["index", "state", "failure", "active", "rebuilds", "seconds_since_heartbeat", "engine"]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    REBUILDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: ServerState
    failure: str
    active: int
    rebuilds: int
    seconds_since_heartbeat: float
    engine: EngineStats
    def __init__(self, index: _Optional[int] = ..., state: _Optional[_Union[ServerState, str]] = ..., failure: _Optional[str] = ..., active: _Optional[int] = ..., rebuilds: _Optional[int] = ..., seconds_since_heartbeat: _Optional[float] = ..., engine: _Optional[_Union[EngineStats, _Mapping]] = ...) -> None: ...

class Requests(_message.Message):
    __slots__ = ["active", "limit", "completed", "cancelled", "failed", "rejected"]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    active: int
    limit: int
    completed: int
    cancelled: int
    failed: int
    rejected: int
    def __init__(self, active: _Optional[int] = ..., limit: _Optional[int] = ..., completed: _Optional[int] = ..., cancelled: _Optional[int] = ..., failed: _Optional[int] = ..., rejected: _Optional[int] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ["steps", "num_running", "num_waiting", "num_preemptions", "pools", "prompt_tokens", "generated_tokens", "last_step_seconds", "speculation", "draft_seconds", "verify_seconds", "compiled_programs", "prefix_cache_queries", "prefix_cache_hits"]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPILED_PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolUsage]
    prompt_tokens: int
    generated_tokens: int
    last_step_seconds: float
    speculation: Speculation
    draft_seconds: float
    verify_seconds: float
    compiled_programs: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    def __init__(self, steps: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolUsage, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., last_step_seconds: _Optional[float] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., compiled_programs: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ...) -> None: ...

class PoolUsage(_message.Message):
    __slots__ = ["group", "pages_in_use", "pages_total"]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAGES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    group: str
    pages_in_use: int
    pages_total: int
    def __init__(self, group: _Optional[str] = ..., pages_in_use: _Optional[int] = ..., pages_total: _Optional[int] = ...) -> None: ...
