from protos.outrider.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerdictStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_STATUS_UNSPECIFIED: _ClassVar[VerdictStatus]
    VERDICT_STATUS_JUDGED: _ClassVar[VerdictStatus]
    VERDICT_STATUS_STALE: _ClassVar[VerdictStatus]
VERDICT_STATUS_UNSPECIFIED: VerdictStatus
VERDICT_STATUS_JUDGED: VerdictStatus
VERDICT_STATUS_STALE: VerdictStatus

class SparseDistribution(_message.Message):
    __slots__ = ("token_ids", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    weights: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., weights: _Optional[bytes] = ...) -> None: ...

class PointMass(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DenseLogits(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...

class TokenDistribution(_message.Message):
    __slots__ = ("sparse", "point_mass", "logits")
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    POINT_MASS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    sparse: SparseDistribution
    point_mass: PointMass
    logits: DenseLogits
    def __init__(self, sparse: _Optional[_Union[SparseDistribution, _Mapping]] = ..., point_mass: _Optional[_Union[PointMass, _Mapping]] = ..., logits: _Optional[_Union[DenseLogits, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("round", "base_length", "prefix_hash", "token_ids", "distributions", "seen_round")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    SEEN_ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_length: int
    prefix_hash: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    distributions: _containers.RepeatedCompositeFieldContainer[TokenDistribution]
    seen_round: int
    def __init__(self, round: _Optional[int] = ..., base_length: _Optional[int] = ..., prefix_hash: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., distributions: _Optional[_Iterable[_Union[TokenDistribution, _Mapping]]] = ..., seen_round: _Optional[int] = ...) -> None: ...

class VerdictTimings(_message.Message):
    __slots__ = ("queue_us", "forward_us", "verify_us", "pass_tokens", "pass_sequences", "joined_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    PASS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PASS_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    JOINED_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    forward_us: int
    verify_us: int
    pass_tokens: int
    pass_sequences: int
    joined_us: int
    def __init__(self, queue_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., pass_tokens: _Optional[int] = ..., pass_sequences: _Optional[int] = ..., joined_us: _Optional[int] = ...) -> None: ...

class VerifierLoad(_message.Message):
    __slots__ = ("running", "waiting", "kv_usage", "pass_fixed_us", "pass_token_us", "active")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    PASS_FIXED_US_FIELD_NUMBER: _ClassVar[int]
    PASS_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_usage: float
    pass_fixed_us: float
    pass_token_us: float
    active: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., pass_fixed_us: _Optional[float] = ..., pass_token_us: _Optional[float] = ..., active: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("round", "base_length", "status", "judged", "accepted", "token_ids", "beta", "logprobs", "finish_reason", "timings", "load", "target_probabilities")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BETA_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_length: int
    status: VerdictStatus
    judged: int
    accepted: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    beta: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    finish_reason: _sampling_pb2.FinishReason
    timings: VerdictTimings
    load: VerifierLoad
    target_probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, round: _Optional[int] = ..., base_length: _Optional[int] = ..., status: _Optional[_Union[VerdictStatus, str]] = ..., judged: _Optional[int] = ..., accepted: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., beta: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., timings: _Optional[_Union[VerdictTimings, _Mapping]] = ..., load: _Optional[_Union[VerifierLoad, _Mapping]] = ..., target_probabilities: _Optional[_Iterable[float]] = ...) -> None: ...
