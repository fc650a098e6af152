from tinsmith.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolCallFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CALL_FORMAT_UNSPECIFIED: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_HERMES: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_LLAMA3: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_QWEN_XML: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_GLM: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_MISTRAL: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_MISTRAL_ARRAY: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_DEEPSEEK_V3: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_DEEPSEEK_V31: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_KIMI: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_HARMONY: _ClassVar[ToolCallFormat]
TOOL_CALL_FORMAT_UNSPECIFIED: ToolCallFormat
TOOL_CALL_FORMAT_HERMES: ToolCallFormat
TOOL_CALL_FORMAT_LLAMA3: ToolCallFormat
TOOL_CALL_FORMAT_QWEN_XML: ToolCallFormat
TOOL_CALL_FORMAT_GLM: ToolCallFormat
TOOL_CALL_FORMAT_MISTRAL: ToolCallFormat
TOOL_CALL_FORMAT_MISTRAL_ARRAY: ToolCallFormat
TOOL_CALL_FORMAT_DEEPSEEK_V3: ToolCallFormat
TOOL_CALL_FORMAT_DEEPSEEK_V31: ToolCallFormat
TOOL_CALL_FORMAT_KIMI: ToolCallFormat
TOOL_CALL_FORMAT_HARMONY: ToolCallFormat

class GetSamplerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSamplerInfoResponse(_message.Message):
    __slots__ = ("base_models", "max_context_length", "max_lora_rank", "engine", "device", "boot_id", "adapter_groups", "max_version_bytes", "vocab_size", "max_running")
    BASE_MODELS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    base_models: _containers.RepeatedScalarFieldContainer[str]
    max_context_length: int
    max_lora_rank: int
    engine: str
    device: str
    boot_id: str
    adapter_groups: _containers.RepeatedScalarFieldContainer[_types_pb2.AdapterGroup]
    max_version_bytes: int
    vocab_size: int
    max_running: int
    def __init__(self, base_models: _Optional[_Iterable[str]] = ..., max_context_length: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., engine: _Optional[str] = ..., device: _Optional[str] = ..., boot_id: _Optional[str] = ..., adapter_groups: _Optional[_Iterable[_Union[_types_pb2.AdapterGroup, str]]] = ..., max_version_bytes: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_running: _Optional[int] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("version_id", "prompt", "num_samples", "sampling_params", "prompt_logprobs", "prompt_logprobs_last_n", "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "follow_run", "cache_salt", "grammar")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_LAST_N_FIELD_NUMBER: _ClassVar[int]
    TOPK_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_SAMPLE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ALT_TOKENS_K_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_RUN_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    prompt: _containers.RepeatedCompositeFieldContainer[_types_pb2.Chunk]
    num_samples: int
    sampling_params: SamplingParams
    prompt_logprobs: bool
    prompt_logprobs_last_n: int
    topk_prompt_logprobs: int
    topk_sample_logprobs: int
    target_prompt_logprobs: _types_pb2.Tensor
    prompt_alt_tokens_k: int
    follow_run: str
    cache_salt: str
    grammar: Grammar
    def __init__(self, version_id: _Optional[str] = ..., prompt: _Optional[_Iterable[_Union[_types_pb2.Chunk, _Mapping]]] = ..., num_samples: _Optional[int] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., prompt_logprobs: _Optional[bool] = ..., prompt_logprobs_last_n: _Optional[int] = ..., topk_prompt_logprobs: _Optional[int] = ..., topk_sample_logprobs: _Optional[int] = ..., target_prompt_logprobs: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., prompt_alt_tokens_k: _Optional[int] = ..., follow_run: _Optional[str] = ..., cache_salt: _Optional[str] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "seed", "temperature", "top_k", "top_p", "stop", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    stop: StopCondition
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_p: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., stop: _Optional[_Union[StopCondition, _Mapping]] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_p: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class StopCondition(_message.Message):
    __slots__ = ("strings", "token_ids")
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, strings: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("sequences", "prompt_logprobs", "topk_prompt_logprobs", "prompt_cache_hit_tokens", "target_prompt_logprobs", "prompt_alt_tokens")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ALT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[_types_pb2.SampledSequence]
    prompt_logprobs: bytes
    topk_prompt_logprobs: _types_pb2.TopkLogprobs
    prompt_cache_hit_tokens: int
    target_prompt_logprobs: _types_pb2.Tensor
    prompt_alt_tokens: _types_pb2.PromptAltTokens
    def __init__(self, sequences: _Optional[_Iterable[_Union[_types_pb2.SampledSequence, _Mapping]]] = ..., prompt_logprobs: _Optional[bytes] = ..., topk_prompt_logprobs: _Optional[_Union[_types_pb2.TopkLogprobs, _Mapping]] = ..., prompt_cache_hit_tokens: _Optional[int] = ..., target_prompt_logprobs: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., prompt_alt_tokens: _Optional[_Union[_types_pb2.PromptAltTokens, _Mapping]] = ...) -> None: ...

class StreamSampleRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: SampleRequest
    def __init__(self, request: _Optional[_Union[SampleRequest, _Mapping]] = ...) -> None: ...

class StreamSampleResponse(_message.Message):
    __slots__ = ("delta", "result")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    delta: SampleDelta
    result: SampleResponse
    def __init__(self, delta: _Optional[_Union[SampleDelta, _Mapping]] = ..., result: _Optional[_Union[SampleResponse, _Mapping]] = ...) -> None: ...

class SampleDelta(_message.Message):
    __slots__ = ("index", "tokens", "logprobs", "topk_sampled_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_SAMPLED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    tokens: bytes
    logprobs: bytes
    topk_sampled_logprobs: _types_pb2.TopkLogprobs
    def __init__(self, index: _Optional[int] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., topk_sampled_logprobs: _Optional[_Union[_types_pb2.TopkLogprobs, _Mapping]] = ...) -> None: ...

class DescribeRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class DescribeRequestResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _types_pb2.QueueStatus
    def __init__(self, status: _Optional[_Union[_types_pb2.QueueStatus, _Mapping]] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("tokenizer_json", "has_chat_template", "eos_token_ids", "tool_call_format")
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: str
    has_chat_template: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tool_call_format: ToolCallFormat
    def __init__(self, tokenizer_json: _Optional[str] = ..., has_chat_template: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tool_call_format: _Optional[_Union[ToolCallFormat, str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "add_special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    add_special_tokens: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools", "add_generation_prompt", "continue_final_message", "template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: str
    tools: str
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: str
    def __init__(self, messages: _Optional[str] = ..., tools: _Optional[str] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., template_kwargs: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    def __init__(self, tokens: _Optional[bytes] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions", "next_page_token")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[VersionInfo]
    next_page_token: str
    def __init__(self, versions: _Optional[_Iterable[_Union[VersionInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class VersionInfo(_message.Message):
    __slots__ = ("version_id", "lora_config", "size_bytes", "num_running")
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    LORA_CONFIG_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    lora_config: _types_pb2.LoraConfig
    size_bytes: int
    num_running: int
    def __init__(self, version_id: _Optional[str] = ..., lora_config: _Optional[_Union[_types_pb2.LoraConfig, _Mapping]] = ..., size_bytes: _Optional[int] = ..., num_running: _Optional[int] = ...) -> None: ...

class MoveGenerationsRequest(_message.Message):
    __slots__ = ("run_id", "version_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version_id: str
    def __init__(self, run_id: _Optional[str] = ..., version_id: _Optional[str] = ...) -> None: ...

class MoveGenerationsResponse(_message.Message):
    __slots__ = ("num_sequences",)
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    def __init__(self, num_sequences: _Optional[int] = ...) -> None: ...
