import datetime

from google.protobuf import duration_pb2 as _duration_pb2
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

class Drafter(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTER_UNSPECIFIED: _ClassVar[Drafter]
    DRAFTER_MODEL: _ClassVar[Drafter]
    DRAFTER_NGRAM: _ClassVar[Drafter]
    DRAFTER_LOOKUP: _ClassVar[Drafter]
    DRAFTER_RANDOM: _ClassVar[Drafter]
    DRAFTER_NONE: _ClassVar[Drafter]
    DRAFTER_STAGED: _ClassVar[Drafter]
    DRAFTER_PARALLEL: _ClassVar[Drafter]

class SpeculationPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_POLICY_UNSPECIFIED: _ClassVar[SpeculationPolicy]
    SPECULATION_POLICY_FIXED: _ClassVar[SpeculationPolicy]
    SPECULATION_POLICY_HEURISTIC: _ClassVar[SpeculationPolicy]
    SPECULATION_POLICY_ADAPTIVE: _ClassVar[SpeculationPolicy]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_DRAFT: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_CORRECTION: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_TARGET: _ClassVar[TokenOrigin]
DRAFTER_UNSPECIFIED: Drafter
DRAFTER_MODEL: Drafter
DRAFTER_NGRAM: Drafter
DRAFTER_LOOKUP: Drafter
DRAFTER_RANDOM: Drafter
DRAFTER_NONE: Drafter
DRAFTER_STAGED: Drafter
DRAFTER_PARALLEL: Drafter
SPECULATION_POLICY_UNSPECIFIED: SpeculationPolicy
SPECULATION_POLICY_FIXED: SpeculationPolicy
SPECULATION_POLICY_HEURISTIC: SpeculationPolicy
SPECULATION_POLICY_ADAPTIVE: SpeculationPolicy
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_DRAFT: TokenOrigin
TOKEN_ORIGIN_CORRECTION: TokenOrigin
TOKEN_ORIGIN_TARGET: TokenOrigin

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "template_arguments")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template_arguments: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., template_arguments: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("gamma", "report_rounds", "drafter", "draft_temperature", "policy", "max_entropy", "outcome_cache", "fixed_size", "report_probabilities", "tokens_per_pass")
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    REPORT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_ENTROPY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_CACHE_FIELD_NUMBER: _ClassVar[int]
    FIXED_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPORT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_PASS_FIELD_NUMBER: _ClassVar[int]
    gamma: int
    report_rounds: bool
    drafter: Drafter
    draft_temperature: float
    policy: SpeculationPolicy
    max_entropy: float
    outcome_cache: bool
    fixed_size: bool
    report_probabilities: bool
    tokens_per_pass: int
    def __init__(self, gamma: _Optional[int] = ..., report_rounds: _Optional[bool] = ..., drafter: _Optional[_Union[Drafter, str]] = ..., draft_temperature: _Optional[float] = ..., policy: _Optional[_Union[SpeculationPolicy, str]] = ..., max_entropy: _Optional[float] = ..., outcome_cache: _Optional[bool] = ..., fixed_size: _Optional[bool] = ..., report_probabilities: _Optional[bool] = ..., tokens_per_pass: _Optional[int] = ...) -> None: ...

class EmissionPrivacy(_message.Message):
    __slots__ = ("frame_bytes", "pace")
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    frame_bytes: int
    pace: _duration_pb2.Duration
    def __init__(self, frame_bytes: _Optional[int] = ..., pace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "chat", "audio", "features", "committed_token_ids", "sampling", "max_new_tokens", "min_new_tokens", "stop_token_ids", "stop", "ignore_eos", "n", "logprobs", "time_limit", "speculation", "keep_special_tokens", "required_features", "weights_fingerprint", "cache_salt", "emission", "held_tokens", "decoder_prompt_token_ids", "transcription", "prompt_logprobs", "joined_responses", "fill_context")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    EMISSION_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODER_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JOINED_RESPONSES_FIELD_NUMBER: _ClassVar[int]
    FILL_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    chat: ChatPrompt
    audio: _input_pb2.Audio
    features: _input_pb2.LogMelFeatures
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    n: int
    logprobs: _sampling_pb2.LogprobsParams
    time_limit: _duration_pb2.Duration
    speculation: SpeculationParams
    keep_special_tokens: bool
    required_features: _containers.RepeatedScalarFieldContainer[str]
    weights_fingerprint: str
    cache_salt: str
    emission: EmissionPrivacy
    held_tokens: int
    decoder_prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    transcription: Transcription
    prompt_logprobs: _sampling_pb2.LogprobsParams
    joined_responses: bool
    fill_context: bool
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., audio: _Optional[_Union[_input_pb2.Audio, _Mapping]] = ..., features: _Optional[_Union[_input_pb2.LogMelFeatures, _Mapping]] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., logprobs: _Optional[_Union[_sampling_pb2.LogprobsParams, _Mapping]] = ..., time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., keep_special_tokens: _Optional[bool] = ..., required_features: _Optional[_Iterable[str]] = ..., weights_fingerprint: _Optional[str] = ..., cache_salt: _Optional[str] = ..., emission: _Optional[_Union[EmissionPrivacy, _Mapping]] = ..., held_tokens: _Optional[int] = ..., decoder_prompt_token_ids: _Optional[_Iterable[int]] = ..., transcription: _Optional[_Union[Transcription, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.LogprobsParams, _Mapping]] = ..., joined_responses: _Optional[bool] = ..., fill_context: _Optional[bool] = ...) -> None: ...

class Transcription(_message.Message):
    __slots__ = ("language", "task", "timestamps")
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    language: str
    task: str
    timestamps: bool
    def __init__(self, language: _Optional[str] = ..., task: _Optional[str] = ..., timestamps: _Optional[bool] = ...) -> None: ...

class GenerateStarted(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "seed", "weights_fingerprint", "rule", "max_new_tokens", "lossy", "drafter", "tokens_per_pass", "policy")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_PASS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    weights_fingerprint: str
    rule: _sampling_pb2.AcceptanceRule
    max_new_tokens: int
    lossy: bool
    drafter: Drafter
    tokens_per_pass: int
    policy: SpeculationPolicy
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., weights_fingerprint: _Optional[str] = ..., rule: _Optional[_Union[_sampling_pb2.AcceptanceRule, str]] = ..., max_new_tokens: _Optional[int] = ..., lossy: _Optional[bool] = ..., drafter: _Optional[_Union[Drafter, str]] = ..., tokens_per_pass: _Optional[int] = ..., policy: _Optional[_Union[SpeculationPolicy, str]] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("round", "output_length", "drafted_token_ids", "drafted_texts", "accepted", "beta", "draft_start_us", "sent_us", "timings", "target_probabilities", "draft_probabilities")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TEXTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BETA_FIELD_NUMBER: _ClassVar[int]
    DRAFT_START_US_FIELD_NUMBER: _ClassVar[int]
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    round: int
    output_length: int
    drafted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafted_texts: _containers.RepeatedScalarFieldContainer[str]
    accepted: int
    beta: _containers.RepeatedScalarFieldContainer[float]
    draft_start_us: int
    sent_us: int
    timings: RoundTimings
    target_probabilities: _containers.RepeatedScalarFieldContainer[float]
    draft_probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, round: _Optional[int] = ..., output_length: _Optional[int] = ..., drafted_token_ids: _Optional[_Iterable[int]] = ..., drafted_texts: _Optional[_Iterable[str]] = ..., accepted: _Optional[int] = ..., beta: _Optional[_Iterable[float]] = ..., draft_start_us: _Optional[int] = ..., sent_us: _Optional[int] = ..., timings: _Optional[_Union[RoundTimings, _Mapping]] = ..., target_probabilities: _Optional[_Iterable[float]] = ..., draft_probabilities: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("index", "text", "token_ids", "origins", "token_texts", "logprobs", "rounds", "held_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[TokenOrigin]
    token_texts: _containers.RepeatedScalarFieldContainer[str]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundReport]
    held_tokens: int
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[TokenOrigin, str]]] = ..., token_texts: _Optional[_Iterable[str]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[RoundReport, _Mapping]]] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SpeculationStatistics(_message.Message):
    __slots__ = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "num_draft_tokens_per_pos", "draft_acceptance_rate", "mean_acceptance_length", "alpha", "num_rounds", "drafter", "num_draft_failures", "policy", "mean_gamma", "num_short_drafts", "num_outcome_cache_queries", "num_outcome_cache_hits", "num_predrafted_tokens", "num_wasted_tokens", "num_failovers", "num_drain_moves", "num_reopened_tokens", "num_draft_recoveries")
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MEAN_GAMMA_FIELD_NUMBER: _ClassVar[int]
    NUM_SHORT_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTCOME_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTCOME_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WASTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAIN_MOVES_FIELD_NUMBER: _ClassVar[int]
    NUM_REOPENED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    draft_acceptance_rate: float
    mean_acceptance_length: float
    alpha: float
    num_rounds: int
    drafter: Drafter
    num_draft_failures: int
    policy: SpeculationPolicy
    mean_gamma: float
    num_short_drafts: int
    num_outcome_cache_queries: int
    num_outcome_cache_hits: int
    num_predrafted_tokens: int
    num_wasted_tokens: int
    num_failovers: int
    num_drain_moves: int
    num_reopened_tokens: int
    num_draft_recoveries: int
    def __init__(self, num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_accepted_tokens_per_pos: _Optional[_Iterable[int]] = ..., num_draft_tokens_per_pos: _Optional[_Iterable[int]] = ..., draft_acceptance_rate: _Optional[float] = ..., mean_acceptance_length: _Optional[float] = ..., alpha: _Optional[float] = ..., num_rounds: _Optional[int] = ..., drafter: _Optional[_Union[Drafter, str]] = ..., num_draft_failures: _Optional[int] = ..., policy: _Optional[_Union[SpeculationPolicy, str]] = ..., mean_gamma: _Optional[float] = ..., num_short_drafts: _Optional[int] = ..., num_outcome_cache_queries: _Optional[int] = ..., num_outcome_cache_hits: _Optional[int] = ..., num_predrafted_tokens: _Optional[int] = ..., num_wasted_tokens: _Optional[int] = ..., num_failovers: _Optional[int] = ..., num_drain_moves: _Optional[int] = ..., num_reopened_tokens: _Optional[int] = ..., num_draft_recoveries: _Optional[int] = ...) -> None: ...

class RoundTimings(_message.Message):
    __slots__ = ("draft_us", "verdict_us", "queue_us", "forward_us", "verify_us")
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    VERDICT_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    draft_us: int
    verdict_us: int
    queue_us: int
    forward_us: int
    verify_us: int
    def __init__(self, draft_us: _Optional[int] = ..., verdict_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., verify_us: _Optional[int] = ...) -> None: ...

class GenerateTimings(_message.Message):
    __slots__ = ("time_to_first_token_us", "total_us", "draft_us", "verdict_us", "queue_us", "forward_us", "verify_us", "saved_us", "failover_us", "first_round")
    TIME_TO_FIRST_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    VERDICT_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    SAVED_US_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_US_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROUND_FIELD_NUMBER: _ClassVar[int]
    time_to_first_token_us: int
    total_us: int
    draft_us: int
    verdict_us: int
    queue_us: int
    forward_us: int
    verify_us: int
    saved_us: int
    failover_us: int
    first_round: RoundTimings
    def __init__(self, time_to_first_token_us: _Optional[int] = ..., total_us: _Optional[int] = ..., draft_us: _Optional[int] = ..., verdict_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., saved_us: _Optional[int] = ..., failover_us: _Optional[int] = ..., first_round: _Optional[_Union[RoundTimings, _Mapping]] = ...) -> None: ...

class GenerateFinished(_message.Message):
    __slots__ = ("index", "finish_reason", "stop", "stop_token_id", "usage", "statistics", "timings", "cut_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: _sampling_pb2.FinishReason
    stop: str
    stop_token_id: int
    usage: Usage
    statistics: SpeculationStatistics
    timings: GenerateTimings
    cut_tokens: int
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., stop: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., statistics: _Optional[_Union[SpeculationStatistics, _Mapping]] = ..., timings: _Optional[_Union[GenerateTimings, _Mapping]] = ..., cut_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "finished", "prompt_logprobs", "padding", "queue_position", "joined")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    started: GenerateStarted
    chunk: GenerateChunk
    finished: GenerateFinished
    prompt_logprobs: _sampling_pb2.PromptLogprobs
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    queue_position: int
    joined: _containers.RepeatedCompositeFieldContainer[GenerateResponse]
    def __init__(self, started: _Optional[_Union[GenerateStarted, _Mapping]] = ..., chunk: _Optional[_Union[GenerateChunk, _Mapping]] = ..., finished: _Optional[_Union[GenerateFinished, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.PromptLogprobs, _Mapping]] = ..., padding: _Optional[_Iterable[bytes]] = ..., queue_position: _Optional[int] = ..., joined: _Optional[_Iterable[_Union[GenerateResponse, _Mapping]]] = ...) -> None: ...

class OpenDraft(_message.Message):
    __slots__ = ("prompt_token_ids", "committed_token_ids", "sampling", "required_features", "drafter", "draft_temperature", "encoder_input", "tokens_per_pass")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ENCODER_INPUT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_PASS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    required_features: _containers.RepeatedScalarFieldContainer[str]
    drafter: Drafter
    draft_temperature: float
    encoder_input: _input_pb2.EncoderInput
    tokens_per_pass: int
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., required_features: _Optional[_Iterable[str]] = ..., drafter: _Optional[_Union[Drafter, str]] = ..., draft_temperature: _Optional[float] = ..., encoder_input: _Optional[_Union[_input_pb2.EncoderInput, _Mapping]] = ..., tokens_per_pass: _Optional[int] = ...) -> None: ...

class Advance(_message.Message):
    __slots__ = ("round", "base_length", "committed_token_ids", "gamma")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_length: int
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    gamma: int
    def __init__(self, round: _Optional[int] = ..., base_length: _Optional[int] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., gamma: _Optional[int] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("sequence_id", "open", "advance")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    open: OpenDraft
    advance: Advance
    def __init__(self, sequence_id: _Optional[str] = ..., open: _Optional[_Union[OpenDraft, _Mapping]] = ..., advance: _Optional[_Union[Advance, _Mapping]] = ...) -> None: ...

class DraftOpened(_message.Message):
    __slots__ = ("limits", "rule", "drafter")
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    limits: _model_pb2.Limits
    rule: _sampling_pb2.AcceptanceRule
    drafter: Drafter
    def __init__(self, limits: _Optional[_Union[_model_pb2.Limits, _Mapping]] = ..., rule: _Optional[_Union[_sampling_pb2.AcceptanceRule, str]] = ..., drafter: _Optional[_Union[Drafter, str]] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("sequence_id", "opened", "proposal", "queue_position")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    opened: DraftOpened
    proposal: _speculation_pb2.Proposal
    queue_position: int
    def __init__(self, sequence_id: _Optional[str] = ..., opened: _Optional[_Union[DraftOpened, _Mapping]] = ..., proposal: _Optional[_Union[_speculation_pb2.Proposal, _Mapping]] = ..., queue_position: _Optional[int] = ...) -> None: ...

class DraftServiceGetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetModelResponse(_message.Message):
    __slots__ = ("model", "target", "drafters", "default_drafter")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    model: _model_pb2.ModelInfo
    target: _model_pb2.ModelInfo
    drafters: _containers.RepeatedScalarFieldContainer[Drafter]
    default_drafter: Drafter
    def __init__(self, model: _Optional[_Union[_model_pb2.ModelInfo, _Mapping]] = ..., target: _Optional[_Union[_model_pb2.ModelInfo, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[Drafter, str]]] = ..., default_drafter: _Optional[_Union[Drafter, str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "add_special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatPrompt
    add_special_tokens: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "token_texts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., token_texts: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "keep_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    keep_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., keep_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "token_texts")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., token_texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SpecialToken(_message.Message):
    __slots__ = ("name", "text", "id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    id: int
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., id: _Optional[int] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("tokenizer_class", "chat_template", "special_tokens")
    TOKENIZER_CLASS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokenizer_class: str
    chat_template: str
    special_tokens: _containers.RepeatedCompositeFieldContainer[SpecialToken]
    def __init__(self, tokenizer_class: _Optional[str] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Iterable[_Union[SpecialToken, _Mapping]]] = ...) -> None: ...
