from protos.outrider.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_FIELD: _ClassVar[ErrorReason]
    ERROR_REASON_OUT_OF_ORDER: _ClassVar[ErrorReason]
    ERROR_REASON_WRONG_BASE: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_FEATURE: _ClassVar[ErrorReason]
    ERROR_REASON_PAIR_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_NO_CHAT_TEMPLATE: _ClassVar[ErrorReason]
    ERROR_REASON_OVERLOADED: _ClassVar[ErrorReason]
    ERROR_REASON_DRAINING: _ClassVar[ErrorReason]
    ERROR_REASON_NO_VERIFIER: _ClassVar[ErrorReason]
    ERROR_REASON_IDLE: _ClassVar[ErrorReason]
    ERROR_REASON_BAD_LOGITS: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
    ERROR_REASON_UNAUTHENTICATED: _ClassVar[ErrorReason]
    ERROR_REASON_PERMISSION_DENIED: _ClassVar[ErrorReason]
    ERROR_REASON_STEP_FAILED: _ClassVar[ErrorReason]

class EncoderKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODER_KIND_UNSPECIFIED: _ClassVar[EncoderKind]
    ENCODER_KIND_TEXT: _ClassVar[EncoderKind]
    ENCODER_KIND_SPEECH: _ClassVar[EncoderKind]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_FIELD: ErrorReason
ERROR_REASON_OUT_OF_ORDER: ErrorReason
ERROR_REASON_WRONG_BASE: ErrorReason
ERROR_REASON_UNKNOWN_FEATURE: ErrorReason
ERROR_REASON_PAIR_MISMATCH: ErrorReason
ERROR_REASON_NO_CHAT_TEMPLATE: ErrorReason
ERROR_REASON_OVERLOADED: ErrorReason
ERROR_REASON_DRAINING: ErrorReason
ERROR_REASON_NO_VERIFIER: ErrorReason
ERROR_REASON_IDLE: ErrorReason
ERROR_REASON_BAD_LOGITS: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_PERMISSION_DENIED: ErrorReason
ERROR_REASON_STEP_FAILED: ErrorReason
ENCODER_KIND_UNSPECIFIED: EncoderKind
ENCODER_KIND_TEXT: EncoderKind
ENCODER_KIND_SPEECH: EncoderKind

class Limits(_message.Message):
    __slots__ = ("max_gamma", "max_support", "max_message_bytes", "max_sequences", "max_sequence_tokens", "max_outstanding", "max_samples", "max_stop_strings", "max_stop_string_chars", "max_stop_token_ids", "kv_blocks", "kv_block_tokens")
    MAX_GAMMA_FIELD_NUMBER: _ClassVar[int]
    MAX_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRING_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_gamma: int
    max_support: int
    max_message_bytes: int
    max_sequences: int
    max_sequence_tokens: int
    max_outstanding: int
    max_samples: int
    max_stop_strings: int
    max_stop_string_chars: int
    max_stop_token_ids: int
    kv_blocks: int
    kv_block_tokens: int
    def __init__(self, max_gamma: _Optional[int] = ..., max_support: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., max_outstanding: _Optional[int] = ..., max_samples: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_string_chars: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ...) -> None: ...

class EncoderInfo(_message.Message):
    __slots__ = ("kind", "max_positions", "mels", "frames", "sample_rate", "decoder_prompt_token_ids", "first_timestamp_token_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    MELS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_FIELD_NUMBER: _ClassVar[int]
    DECODER_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TIMESTAMP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    kind: EncoderKind
    max_positions: int
    mels: int
    frames: int
    sample_rate: int
    decoder_prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_timestamp_token_id: int
    def __init__(self, kind: _Optional[_Union[EncoderKind, str]] = ..., max_positions: _Optional[int] = ..., mels: _Optional[int] = ..., frames: _Optional[int] = ..., sample_rate: _Optional[int] = ..., decoder_prompt_token_ids: _Optional[_Iterable[int]] = ..., first_timestamp_token_id: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "weights_fingerprint", "vocabulary_fingerprint", "vocab_size", "logits_size", "context_length", "eos_token_ids", "protocol_version", "features", "rules", "default_rule", "noise_version", "limits", "dtype", "device", "server_version", "has_chat_template", "lossy_rules", "encoder", "chat_template_fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_RULE_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LOSSY_RULES_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    weights_fingerprint: str
    vocabulary_fingerprint: str
    vocab_size: int
    logits_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    protocol_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    rules: _containers.RepeatedScalarFieldContainer[_sampling_pb2.AcceptanceRule]
    default_rule: _sampling_pb2.AcceptanceRule
    noise_version: int
    limits: Limits
    dtype: str
    device: str
    server_version: str
    has_chat_template: bool
    lossy_rules: _containers.RepeatedScalarFieldContainer[_sampling_pb2.AcceptanceRule]
    encoder: EncoderInfo
    chat_template_fingerprint: str
    def __init__(self, name: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., vocabulary_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., logits_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., protocol_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., rules: _Optional[_Iterable[_Union[_sampling_pb2.AcceptanceRule, str]]] = ..., default_rule: _Optional[_Union[_sampling_pb2.AcceptanceRule, str]] = ..., noise_version: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., server_version: _Optional[str] = ..., has_chat_template: _Optional[bool] = ..., lossy_rules: _Optional[_Iterable[_Union[_sampling_pb2.AcceptanceRule, str]]] = ..., encoder: _Optional[_Union[EncoderInfo, _Mapping]] = ..., chat_template_fingerprint: _Optional[str] = ...) -> None: ...
