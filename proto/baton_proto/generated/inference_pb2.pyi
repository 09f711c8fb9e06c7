from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_AUTO: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_REPETITION: _ClassVar[FinishReason]

class DiffVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIFF_VERDICT_UNSPECIFIED: _ClassVar[DiffVerdict]
    DIFF_VERDICT_EQUAL: _ClassVar[DiffVerdict]
    DIFF_VERDICT_DIFFERENT: _ClassVar[DiffVerdict]
    DIFF_VERDICT_UNREACHABLE: _ClassVar[DiffVerdict]
    DIFF_VERDICT_MOVING: _ClassVar[DiffVerdict]

class PlacementReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_REASON_UNSPECIFIED: _ClassVar[PlacementReason]
    PLACEMENT_REASON_SHIPPED: _ClassVar[PlacementReason]
    PLACEMENT_REASON_DECODE_BUSY: _ClassVar[PlacementReason]
    PLACEMENT_REASON_SHORT_PROMPT: _ClassVar[PlacementReason]
    PLACEMENT_REASON_PREFILL_FULL: _ClassVar[PlacementReason]
    PLACEMENT_REASON_NO_PREFILL: _ClassVar[PlacementReason]
    PLACEMENT_REASON_WAITS_FOR_DECODE: _ClassVar[PlacementReason]
    PLACEMENT_REASON_WAITS_FOR_DECODE_ROOM: _ClassVar[PlacementReason]
    PLACEMENT_REASON_WAITS_FOR_PREFILL_ROOM: _ClassVar[PlacementReason]
    PLACEMENT_REASON_TOO_LATE: _ClassVar[PlacementReason]
    PLACEMENT_REASON_KEPT: _ClassVar[PlacementReason]

class LeftOutReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEFT_OUT_REASON_UNSPECIFIED: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_MISFIT: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_NOT_READY: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_UNREACHABLE: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_TOO_SMALL: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_NO_DECODE: _ClassVar[LeftOutReason]

class BarredReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BARRED_REASON_UNSPECIFIED: _ClassVar[BarredReason]
    BARRED_REASON_EXCLUDED: _ClassVar[BarredReason]
    BARRED_REASON_QUEUE_FULL: _ClassVar[BarredReason]
    BARRED_REASON_NO_ROOM: _ClassVar[BarredReason]
    BARRED_REASON_PREFILL_FULL: _ClassVar[BarredReason]
TOOL_CHOICE_AUTO: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_REPETITION: FinishReason
DIFF_VERDICT_UNSPECIFIED: DiffVerdict
DIFF_VERDICT_EQUAL: DiffVerdict
DIFF_VERDICT_DIFFERENT: DiffVerdict
DIFF_VERDICT_UNREACHABLE: DiffVerdict
DIFF_VERDICT_MOVING: DiffVerdict
PLACEMENT_REASON_UNSPECIFIED: PlacementReason
PLACEMENT_REASON_SHIPPED: PlacementReason
PLACEMENT_REASON_DECODE_BUSY: PlacementReason
PLACEMENT_REASON_SHORT_PROMPT: PlacementReason
PLACEMENT_REASON_PREFILL_FULL: PlacementReason
PLACEMENT_REASON_NO_PREFILL: PlacementReason
PLACEMENT_REASON_WAITS_FOR_DECODE: PlacementReason
PLACEMENT_REASON_WAITS_FOR_DECODE_ROOM: PlacementReason
PLACEMENT_REASON_WAITS_FOR_PREFILL_ROOM: PlacementReason
PLACEMENT_REASON_TOO_LATE: PlacementReason
PLACEMENT_REASON_KEPT: PlacementReason
LEFT_OUT_REASON_UNSPECIFIED: LeftOutReason
LEFT_OUT_REASON_MISFIT: LeftOutReason
LEFT_OUT_REASON_NOT_READY: LeftOutReason
LEFT_OUT_REASON_UNREACHABLE: LeftOutReason
LEFT_OUT_REASON_TOO_SMALL: LeftOutReason
LEFT_OUT_REASON_NO_DECODE: LeftOutReason
BARRED_REASON_UNSPECIFIED: BarredReason
BARRED_REASON_EXCLUDED: BarredReason
BARRED_REASON_QUEUE_FULL: BarredReason
BARRED_REASON_NO_ROOM: BarredReason
BARRED_REASON_PREFILL_FULL: BarredReason

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "tokens", "sampling", "request_id", "priority", "cache_salt", "keep_cache_s", "drop_cache", "prompt_cache_key", "resume_from", "tokens_so_far")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    KEEP_CACHE_S_FIELD_NUMBER: _ClassVar[int]
    DROP_CACHE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SO_FAR_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatMessages
    tokens: TokenIds
    sampling: SamplingOptions
    request_id: str
    priority: int
    cache_salt: str
    keep_cache_s: int
    drop_cache: bool
    prompt_cache_key: str
    resume_from: str
    tokens_so_far: _containers.RepeatedCompositeFieldContainer[TokenIds]
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., keep_cache_s: _Optional[int] = ..., drop_cache: _Optional[bool] = ..., prompt_cache_key: _Optional[str] = ..., resume_from: _Optional[str] = ..., tokens_so_far: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "tools", "tool_choice", "named_tool", "parallel_tool_calls", "template_variables", "with_parts", "allowed_tools", "thinking_token_budget", "reasoning_effort")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    NAMED_TOOL_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    WITH_PARTS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    named_tool: str
    parallel_tool_calls: bool
    template_variables: str
    with_parts: bool
    allowed_tools: _containers.RepeatedScalarFieldContainer[str]
    thinking_token_budget: int
    reasoning_effort: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, str]] = ..., named_tool: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ..., template_variables: _Optional[str] = ..., with_parts: _Optional[bool] = ..., allowed_tools: _Optional[_Iterable[str]] = ..., thinking_token_budget: _Optional[int] = ..., reasoning_effort: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "logit_bias", "n", "grammar", "prompt_logprobs", "bad_words", "allowed_token_ids", "vllm_xargs", "logprob_token_ids", "repetition_detection")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class RepetitionDetectionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VLLM_XARGS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_DETECTION_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    n: int
    grammar: Grammar
    prompt_logprobs: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    vllm_xargs: str
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    repetition_detection: _containers.ScalarMap[str, int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., n: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., vllm_xargs: _Optional[str] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., repetition_detection: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    json_object: JsonObject
    json_schema: str
    regex: str
    choice: Alternatives
    ebnf: str
    structural_tag: str
    def __init__(self, json_object: _Optional[_Union[JsonObject, _Mapping]] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Alternatives, _Mapping]] = ..., ebnf: _Optional[str] = ..., structural_tag: _Optional[str] = ...) -> None: ...

class JsonObject(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alternatives(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "bookmark", "started", "piece", "finished", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BOOKMARK_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    bookmark: str
    started: Started
    piece: Piece
    finished: Finished
    prompt_logprobs: PromptLogprobs
    def __init__(self, request_id: _Optional[str] = ..., bookmark: _Optional[str] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("model", "prompt_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt_tokens: int
    def __init__(self, model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs", "finish_reason", "parts")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish_reason: FinishReason
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("content", "reasoning", "call_begun", "call_arguments", "call_cut")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CALL_BEGUN_FIELD_NUMBER: _ClassVar[int]
    CALL_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    CALL_CUT_FIELD_NUMBER: _ClassVar[int]
    content: str
    reasoning: str
    call_begun: CallBegun
    call_arguments: CallArguments
    call_cut: CallCut
    def __init__(self, content: _Optional[str] = ..., reasoning: _Optional[str] = ..., call_begun: _Optional[_Union[CallBegun, _Mapping]] = ..., call_arguments: _Optional[_Union[CallArguments, _Mapping]] = ..., call_cut: _Optional[_Union[CallCut, _Mapping]] = ...) -> None: ...

class CallBegun(_message.Message):
    __slots__ = ("index", "id", "name")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class CallArguments(_message.Message):
    __slots__ = ("index", "text")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class CallCut(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: int
    def __init__(self, index: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "text", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("index", "first", "tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    first: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., first: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "text", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("usage", "served_by")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SERVED_BY_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    served_by: _containers.RepeatedCompositeFieldContainer[ServedBy]
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ..., served_by: _Optional[_Iterable[_Union[ServedBy, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class ServedBy(_message.Message):
    __slots__ = ("index", "decode_worker", "prefill_worker", "kv_blocks", "kv_bytes", "transport", "attempts")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    decode_worker: str
    prefill_worker: str
    kv_blocks: int
    kv_bytes: int
    transport: str
    attempts: int
    def __init__(self, index: _Optional[int] = ..., decode_worker: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., kv_blocks: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., attempts: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "max_model_len", "created_s", "aliases")
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    id: str
    max_model_len: int
    created_s: int
    aliases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., max_model_len: _Optional[int] = ..., created_s: _Optional[int] = ..., aliases: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("router_id", "workers", "queue", "totals", "routers")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    queue: QueueStatus
    totals: Totals
    routers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, router_id: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., queue: _Optional[_Union[QueueStatus, _Mapping]] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., routers: _Optional[_Iterable[str]] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("clock_s", "requests", "prompt_tokens", "cached_tokens", "output_tokens", "event_batches", "events_refused", "events_malformed", "event_gaps", "snapshots", "tree_blocks", "tree_runs")
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENT_BATCHES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_MALFORMED_FIELD_NUMBER: _ClassVar[int]
    EVENT_GAPS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    TREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TREE_RUNS_FIELD_NUMBER: _ClassVar[int]
    clock_s: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    event_batches: int
    events_refused: int
    events_malformed: int
    event_gaps: int
    snapshots: int
    tree_blocks: int
    tree_runs: int
    def __init__(self, clock_s: _Optional[float] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., event_batches: _Optional[int] = ..., events_refused: _Optional[int] = ..., events_malformed: _Optional[int] = ..., event_gaps: _Optional[int] = ..., snapshots: _Optional[int] = ..., tree_blocks: _Optional[int] = ..., tree_runs: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "state", "incarnation", "blocks_used", "blocks_cached", "blocks_total", "running", "waiting", "last_event_id", "address", "leases", "note", "blocks_in_tree", "event_batches", "prompt_tokens", "cached_tokens", "output_tokens", "queued_prefill_tokens", "step_ms", "host_blocks_used", "host_blocks_total", "disk_blocks_used", "disk_blocks_total", "engine", "used", "model", "serves")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_TREE_FIELD_NUMBER: _ClassVar[int]
    EVENT_BATCHES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    state: str
    incarnation: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    running: int
    waiting: int
    last_event_id: int
    address: str
    leases: int
    note: str
    blocks_in_tree: int
    event_batches: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queued_prefill_tokens: int
    step_ms: float
    host_blocks_used: int
    host_blocks_total: int
    disk_blocks_used: int
    disk_blocks_total: int
    engine: str
    used: bool
    model: str
    serves: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., incarnation: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_total: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., last_event_id: _Optional[int] = ..., address: _Optional[str] = ..., leases: _Optional[int] = ..., note: _Optional[str] = ..., blocks_in_tree: _Optional[int] = ..., event_batches: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., step_ms: _Optional[float] = ..., host_blocks_used: _Optional[int] = ..., host_blocks_total: _Optional[int] = ..., disk_blocks_used: _Optional[int] = ..., disk_blocks_total: _Optional[int] = ..., engine: _Optional[str] = ..., used: _Optional[bool] = ..., model: _Optional[str] = ..., serves: _Optional[str] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("worker_id", "level", "timeout_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    level: int
    timeout_s: float
    def __init__(self, worker_id: _Optional[str] = ..., level: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("worker_id", "tags")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("worker_id", "state", "asleep", "freed_bytes", "seconds")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    asleep: _containers.RepeatedScalarFieldContainer[str]
    freed_bytes: int
    seconds: float
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., asleep: _Optional[_Iterable[str]] = ..., freed_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("model", "worker_id", "timeout_s", "served_model")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    worker_id: str
    timeout_s: float
    served_model: str
    def __init__(self, model: _Optional[str] = ..., worker_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., served_model: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerWeights]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerWeights, _Mapping]]] = ...) -> None: ...

class WorkerWeights(_message.Message):
    __slots__ = ("worker_id", "state", "model_hash", "seconds", "problem")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    model_hash: str
    seconds: float
    problem: str
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., model_hash: _Optional[str] = ..., seconds: _Optional[float] = ..., problem: _Optional[str] = ...) -> None: ...

class QueueStatus(_message.Message):
    __slots__ = ("waiting", "running", "capacity", "oldest_age_s")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    capacity: int
    oldest_age_s: float
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., capacity: _Optional[int] = ..., oldest_age_s: _Optional[float] = ...) -> None: ...

class TreeRequest(_message.Message):
    __slots__ = ("max_depth", "max_children", "max_runs", "max_hottest", "model")
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNS_FIELD_NUMBER: _ClassVar[int]
    MAX_HOTTEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    max_depth: int
    max_children: int
    max_runs: int
    max_hottest: int
    model: str
    def __init__(self, max_depth: _Optional[int] = ..., max_children: _Optional[int] = ..., max_runs: _Optional[int] = ..., max_hottest: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class TreeChunk(_message.Message):
    __slots__ = ("summary", "runs")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    summary: TreeSummary
    runs: _containers.RepeatedCompositeFieldContainer[TreeRun]
    def __init__(self, summary: _Optional[_Union[TreeSummary, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[TreeRun, _Mapping]]] = ...) -> None: ...

class TreeSummary(_message.Message):
    __slots__ = ("router_id", "block_size", "blocks", "runs", "workers", "hottest", "first_runs")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    HOTTEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_RUNS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    block_size: int
    blocks: int
    runs: int
    workers: _containers.RepeatedCompositeFieldContainer[TreeOwner]
    hottest: _containers.RepeatedCompositeFieldContainer[HotPrefix]
    first_runs: int
    def __init__(self, router_id: _Optional[str] = ..., block_size: _Optional[int] = ..., blocks: _Optional[int] = ..., runs: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[TreeOwner, _Mapping]]] = ..., hottest: _Optional[_Iterable[_Union[HotPrefix, _Mapping]]] = ..., first_runs: _Optional[int] = ...) -> None: ...

class TreeOwner(_message.Message):
    __slots__ = ("worker_id", "incarnation", "blocks", "host_blocks", "disk_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    blocks: int
    host_blocks: int
    disk_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ...) -> None: ...

class TreeRun(_message.Message):
    __slots__ = ("number", "parent", "depth", "first_block", "blocks", "first_hash", "owners", "hits", "children")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HASH_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    number: int
    parent: int
    depth: int
    first_block: int
    blocks: int
    first_hash: int
    owners: _containers.RepeatedCompositeFieldContainer[TreeOwner]
    hits: int
    children: int
    def __init__(self, number: _Optional[int] = ..., parent: _Optional[int] = ..., depth: _Optional[int] = ..., first_block: _Optional[int] = ..., blocks: _Optional[int] = ..., first_hash: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[TreeOwner, _Mapping]]] = ..., hits: _Optional[int] = ..., children: _Optional[int] = ...) -> None: ...

class HotPrefix(_message.Message):
    __slots__ = ("last_hash", "blocks", "hits", "owners")
    LAST_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    last_hash: int
    blocks: int
    hits: int
    owners: _containers.RepeatedCompositeFieldContainer[TreeOwner]
    def __init__(self, last_hash: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[TreeOwner, _Mapping]]] = ...) -> None: ...

class DiffRequest(_message.Message):
    __slots__ = ("worker_ids", "max_blocks", "model")
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    max_blocks: int
    model: str
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ..., max_blocks: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class WorkerDiff(_message.Message):
    __slots__ = ("worker_id", "incarnation", "verdict", "event_id", "tree_event_id", "worker_blocks", "tree_blocks", "missing", "extra", "changed", "missing_hashes", "extra_hashes", "changed_hashes", "attempts", "note", "moved", "moved_hashes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    TREE_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    MISSING_HASHES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_HASHES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_HASHES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    MOVED_HASHES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    verdict: DiffVerdict
    event_id: int
    tree_event_id: int
    worker_blocks: int
    tree_blocks: int
    missing: int
    extra: int
    changed: int
    missing_hashes: _containers.RepeatedScalarFieldContainer[int]
    extra_hashes: _containers.RepeatedScalarFieldContainer[int]
    changed_hashes: _containers.RepeatedScalarFieldContainer[int]
    attempts: int
    note: str
    moved: int
    moved_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., verdict: _Optional[_Union[DiffVerdict, str]] = ..., event_id: _Optional[int] = ..., tree_event_id: _Optional[int] = ..., worker_blocks: _Optional[int] = ..., tree_blocks: _Optional[int] = ..., missing: _Optional[int] = ..., extra: _Optional[int] = ..., changed: _Optional[int] = ..., missing_hashes: _Optional[_Iterable[int]] = ..., extra_hashes: _Optional[_Iterable[int]] = ..., changed_hashes: _Optional[_Iterable[int]] = ..., attempts: _Optional[int] = ..., note: _Optional[str] = ..., moved: _Optional[int] = ..., moved_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "text", "chat", "tokens", "cache_salt", "tenant", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    chat: ChatMessages
    tokens: TokenIds
    cache_salt: str
    tenant: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., cache_salt: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decisions", "rules", "other_requests", "hops")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    OTHER_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    rules: PlacementRules
    other_requests: int
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., rules: _Optional[_Union[PlacementRules, _Mapping]] = ..., other_requests: _Optional[int] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("name", "depth", "choice", "attempt", "from_ms", "to_ms", "worker", "tokens", "kv_bytes", "layers", "gb_per_s", "transport", "problem", "off_by_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FROM_MS_FIELD_NUMBER: _ClassVar[int]
    TO_MS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    OFF_BY_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    depth: int
    choice: int
    attempt: int
    from_ms: float
    to_ms: float
    worker: str
    tokens: int
    kv_bytes: int
    layers: int
    gb_per_s: float
    transport: str
    problem: str
    off_by_ms: float
    def __init__(self, name: _Optional[str] = ..., depth: _Optional[int] = ..., choice: _Optional[int] = ..., attempt: _Optional[int] = ..., from_ms: _Optional[float] = ..., to_ms: _Optional[float] = ..., worker: _Optional[str] = ..., tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., layers: _Optional[int] = ..., gb_per_s: _Optional[float] = ..., transport: _Optional[str] = ..., problem: _Optional[str] = ..., off_by_ms: _Optional[float] = ...) -> None: ...

class PlacementRules(_message.Message):
    __slots__ = ("block_size", "local_prefill_tokens", "prefill_queue_tokens", "max_running_per_worker", "weights", "terms")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    local_prefill_tokens: int
    prefill_queue_tokens: int
    max_running_per_worker: int
    weights: _containers.ScalarMap[str, float]
    terms: _containers.RepeatedCompositeFieldContainer[TermRule]
    def __init__(self, block_size: _Optional[int] = ..., local_prefill_tokens: _Optional[int] = ..., prefill_queue_tokens: _Optional[int] = ..., max_running_per_worker: _Optional[int] = ..., weights: _Optional[_Mapping[str, float]] = ..., terms: _Optional[_Iterable[_Union[TermRule, _Mapping]]] = ...) -> None: ...

class TermRule(_message.Message):
    __slots__ = ("name", "heading", "amount", "key")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEADING_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    name: str
    heading: str
    amount: str
    key: str
    def __init__(self, name: _Optional[str] = ..., heading: _Optional[str] = ..., amount: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("request_id", "choice", "attempt", "age_s", "waited_s", "num_tokens", "decode_worker", "prefill_worker", "candidates", "left_out", "reason", "expected_ms", "took_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MS_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    attempt: int
    age_s: float
    waited_s: float
    num_tokens: int
    decode_worker: str
    prefill_worker: str
    candidates: _containers.RepeatedCompositeFieldContainer[CandidateCost]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    reason: PlacementReason
    expected_ms: float
    took_ms: float
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., attempt: _Optional[int] = ..., age_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., num_tokens: _Optional[int] = ..., decode_worker: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[CandidateCost, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ..., reason: _Optional[_Union[PlacementReason, str]] = ..., expected_ms: _Optional[float] = ..., took_ms: _Optional[float] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("worker_id", "role", "reason", "detail")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    reason: LeftOutReason
    detail: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., reason: _Optional[_Union[LeftOutReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class CandidateCost(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "prompt_blocks", "cached_blocks", "queued_prefill_tokens", "active_blocks", "uncached_tokens", "runs_prompt", "total", "chance", "chosen", "terms", "barred", "host_blocks", "disk_blocks", "ttft_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    CHANCE_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    role: str
    prompt_blocks: int
    cached_blocks: int
    queued_prefill_tokens: int
    active_blocks: int
    uncached_tokens: int
    runs_prompt: bool
    total: float
    chance: float
    chosen: bool
    terms: _containers.RepeatedCompositeFieldContainer[CostTerm]
    barred: BarredReason
    host_blocks: int
    disk_blocks: int
    ttft_ms: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[str] = ..., prompt_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., active_blocks: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., runs_prompt: _Optional[bool] = ..., total: _Optional[float] = ..., chance: _Optional[float] = ..., chosen: _Optional[bool] = ..., terms: _Optional[_Iterable[_Union[CostTerm, _Mapping]]] = ..., barred: _Optional[_Union[BarredReason, str]] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., ttft_ms: _Optional[float] = ...) -> None: ...

class CostTerm(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
