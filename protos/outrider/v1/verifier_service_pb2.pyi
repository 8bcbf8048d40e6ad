from protos.outrider.v1 import input_pb2 as _input_pb2
from protos.outrider.v1 import model_pb2 as _model_pb2
from protos.outrider.v1 import sampling_pb2 as _sampling_pb2
from protos.outrider.v1 import speculation_pb2 as _speculation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NoticeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTICE_KIND_UNSPECIFIED: _ClassVar[NoticeKind]
    NOTICE_KIND_QUEUED: _ClassVar[NoticeKind]
    NOTICE_KIND_DRAINING: _ClassVar[NoticeKind]
NOTICE_KIND_UNSPECIFIED: NoticeKind
NOTICE_KIND_QUEUED: NoticeKind
NOTICE_KIND_DRAINING: NoticeKind

class OpenSequence(_message.Message):
    __slots__ = ("prompt_token_ids", "committed_token_ids", "sampling", "max_new_tokens", "min_new_tokens", "stop_token_ids", "ignore_eos", "logprobs", "required_features", "weights_fingerprint", "request_id", "cache_salt", "reopened", "request_bytes", "response_bytes", "isolated", "encoder_input", "prompt_logprobs", "report_probabilities", "joined_verdicts", "decode", "join_ms")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REOPENED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_FIELD_NUMBER: _ClassVar[int]
    ENCODER_INPUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPORT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    JOINED_VERDICTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    JOIN_MS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: _sampling_pb2.LogprobsParams
    required_features: _containers.RepeatedScalarFieldContainer[str]
    weights_fingerprint: str
    request_id: str
    cache_salt: str
    reopened: bool
    request_bytes: int
    response_bytes: int
    isolated: bool
    encoder_input: _input_pb2.EncoderInput
    prompt_logprobs: _sampling_pb2.LogprobsParams
    report_probabilities: bool
    joined_verdicts: bool
    decode: Decode
    join_ms: int
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[_Union[_sampling_pb2.LogprobsParams, _Mapping]] = ..., required_features: _Optional[_Iterable[str]] = ..., weights_fingerprint: _Optional[str] = ..., request_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., reopened: _Optional[bool] = ..., request_bytes: _Optional[int] = ..., response_bytes: _Optional[int] = ..., isolated: _Optional[bool] = ..., encoder_input: _Optional[_Union[_input_pb2.EncoderInput, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.LogprobsParams, _Mapping]] = ..., report_probabilities: _Optional[bool] = ..., joined_verdicts: _Optional[bool] = ..., decode: _Optional[_Union[Decode, _Mapping]] = ..., join_ms: _Optional[int] = ...) -> None: ...

class Decode(_message.Message):
    __slots__ = ("round", "base_length", "prefix_hash", "num_tokens", "seen_round")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEEN_ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_length: int
    prefix_hash: bytes
    num_tokens: int
    seen_round: int
    def __init__(self, round: _Optional[int] = ..., base_length: _Optional[int] = ..., prefix_hash: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., seen_round: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("sequence_id", "open", "proposal", "decode", "padding")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    open: OpenSequence
    proposal: _speculation_pb2.Proposal
    decode: Decode
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sequence_id: _Optional[str] = ..., open: _Optional[_Union[OpenSequence, _Mapping]] = ..., proposal: _Optional[_Union[_speculation_pb2.Proposal, _Mapping]] = ..., decode: _Optional[_Union[Decode, _Mapping]] = ..., padding: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("cached_tokens", "limits", "rules", "rule", "weights_fingerprint", "round")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    limits: _model_pb2.Limits
    rules: _containers.RepeatedScalarFieldContainer[_sampling_pb2.AcceptanceRule]
    rule: _sampling_pb2.AcceptanceRule
    weights_fingerprint: str
    round: int
    def __init__(self, cached_tokens: _Optional[int] = ..., limits: _Optional[_Union[_model_pb2.Limits, _Mapping]] = ..., rules: _Optional[_Iterable[_Union[_sampling_pb2.AcceptanceRule, str]]] = ..., rule: _Optional[_Union[_sampling_pb2.AcceptanceRule, str]] = ..., weights_fingerprint: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "queue_position", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: NoticeKind
    queue_position: int
    message: str
    def __init__(self, kind: _Optional[_Union[NoticeKind, str]] = ..., queue_position: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("sequence_id", "opened", "verdict", "notice", "prompt_logprobs", "padding")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    opened: Opened
    verdict: _speculation_pb2.Verdict
    notice: Notice
    prompt_logprobs: _sampling_pb2.PromptLogprobs
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sequence_id: _Optional[str] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., verdict: _Optional[_Union[_speculation_pb2.Verdict, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.PromptLogprobs, _Mapping]] = ..., padding: _Optional[_Iterable[bytes]] = ...) -> None: ...

class VerifierServiceGetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierServiceGetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _model_pb2.ModelInfo
    def __init__(self, model: _Optional[_Union[_model_pb2.ModelInfo, _Mapping]] = ...) -> None: ...
