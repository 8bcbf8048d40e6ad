"""The events of a generation and their sum: frozen values with the fields of the contract's messages.

Enums are strings in lower case. A value that only a newer server has is `unspecified`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias, TypeVar

from outrider.client.mirror import Mirror, Named
from protos.outrider.v1 import draft_service_pb2

T = TypeVar("T")


class FinishReason(Named):
    """Why a sample ended; see the contract's `FinishReason`."""

    UNSPECIFIED = "unspecified"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT = "context"  # never sent: see the contract
    TIME_LIMIT = "time_limit"


class AcceptanceRule(Named):
    """How proposals are accepted; see the contract's `AcceptanceRule`. `sigmoid` is lossy."""

    UNSPECIFIED = "unspecified"
    TOKENWISE = "tokenwise"
    BLOCK = "block"
    COUPLED = "coupled"
    SIGMOID = "sigmoid"


class Drafter(Named):
    """The source of proposals; see the contract's `Drafter`."""

    UNSPECIFIED = "unspecified"
    MODEL = "model"
    NGRAM = "ngram"
    LOOKUP = "lookup"
    RANDOM = "random"
    NONE = "none"
    STAGED = "staged"
    PARALLEL = "parallel"


class SpeculationPolicy(Named):
    """How γ is chosen; see the contract's `SpeculationPolicy`."""

    UNSPECIFIED = "unspecified"
    FIXED = "fixed"
    HEURISTIC = "heuristic"
    ADAPTIVE = "adaptive"


class TokenOrigin(Named):
    """Origin of a token; see the contract's `TokenOrigin`."""

    UNSPECIFIED = "unspecified"
    DRAFT = "draft"
    CORRECTION = "correction"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Started(Mirror):
    """The request is accepted; the first event."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    weights_fingerprint: str
    rule: AcceptanceRule
    max_new_tokens: int
    lossy: bool  # the text does not follow the target's distribution
    drafter: Drafter
    tokens_per_pass: int = 0  # that the drafter drafts in one pass; 0 from an older service
    policy: SpeculationPolicy = SpeculationPolicy.UNSPECIFIED  # which chooses γ; unspecified from an older service


@dataclass(frozen=True, slots=True)
class TokenLogprob(Mirror):
    """Natural logs of one token's probability: by the target's own distribution, and after all adjustments."""

    token_id: int
    raw: float
    adjusted: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs(Mirror):
    """Of the token at a position, and of the most probable ones, best first."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs(Mirror):
    """Of the next tokens of the prompt, from `first_position` on, which begins at 1; `adjusted` equals `raw`."""

    first_position: int
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RoundTimings(Mirror):
    """Times of one round, in microseconds."""

    draft_us: int = 0
    verdict_us: int = 0
    queue_us: int = 0
    forward_us: int = 0
    verify_us: int = 0


@dataclass(frozen=True, slots=True)
class Round(Mirror):
    """One round: the drafted tokens, how many of them were accepted, and when.

    `draft_start_us` and `sent_us` are microseconds from the request's arrival at the draft service. The verdict came
    at `sent_us` + `timings.verdict_us`. Older services send no times.

    `target_probabilities` and `draft_probabilities` are p and q of each drafted token, on request; `coupled` has no q.
    """

    round: int
    output_length: int
    drafted_token_ids: tuple[int, ...]
    drafted_texts: tuple[str, ...]
    accepted: int
    beta: tuple[float, ...]
    draft_start_us: int = 0
    sent_us: int = 0
    timings: RoundTimings = RoundTimings()
    target_probabilities: tuple[float, ...] = ()
    draft_probabilities: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk(Mirror):
    """More of one sample. `token_texts`, `logprobs` and `rounds` are empty unless requested.

    Tokens arrive once they are committed, their text perhaps later: the text of the last `held_tokens` so far is
    incomplete, because it may become a stop string or ends inside a character. If a stop string cuts them, they are not
    part of the output: see `Finished.cut_tokens`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    token_texts: tuple[str, ...]
    logprobs: tuple[PositionLogprobs, ...]
    rounds: tuple[Round, ...]
    held_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage(Mirror):
    """Token counts of a sample."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Statistics(Mirror):
    """Statistics of speculation, of one sample.

    `alpha` is the mean of β over verified positions; under `coupled`, which has no β, the accepted share of them.
    `num_draft_failures` counts failed proposals, after which the target writes alone. `num_draft_recoveries` counts
    proposals that followed a failure. `mean_gamma` is the mean γ that `policy` chose, over all rounds;
    `num_short_drafts` counts proposals with fewer tokens. `num_failovers` counts changes of the verifier,
    `num_drain_moves` those from a draining one, and `num_reopened_tokens` the tokens sent to the new ones.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_draft_tokens_per_pos: tuple[int, ...]
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


@dataclass(frozen=True, slots=True)
class Timings(Mirror):
    """Times of one sample at the services, in microseconds. `first_round` reads the prompt; the sums include it."""

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


@dataclass(frozen=True, slots=True)
class Finished(Mirror):
    """The end of one sample; the last event about it.

    The last `cut_tokens` of its tokens are not part of the output: a stop string begins in their text or before it.
    `num_resumes` counts changes of the draft service. After one, `usage.completion_tokens`, `timings.total_us` and
    `timings.time_to_first_token_us` are of the whole text, by this client's clock; `statistics` and all other fields
    are of the last part, because those of a service that dies are lost.
    """

    index: int
    finish_reason: FinishReason
    stop: str | None
    stop_token_id: int | None
    usage: Usage
    statistics: Statistics
    timings: Timings
    cut_tokens: int = 0
    num_resumes: int = 0

    @classmethod
    def of(cls, message: Any) -> Self:
        finished = cls(*cls._read(message))
        return replace(
            finished,
            stop=finished.stop if finished.finish_reason is FinishReason.STOP_STRING else None,
            stop_token_id=finished.stop_token_id if message.HasField("stop_token_id") else None,
        )


@dataclass(frozen=True, slots=True)
class Tokenized(Mirror):
    """The tokens of a prompt, and the text of each by itself."""

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Detokenized(Mirror):
    """The text of tokens, and the text of each by itself."""

    text: str
    token_texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpecialToken(Mirror):
    """A special token. `name` is its role in transformers, for example `eos_token`."""

    name: str
    text: str
    id: int


@dataclass(frozen=True, slots=True)
class TokenizerInfo(Mirror):
    """The tokenizer of the pair. `chat_template` is empty if there is none."""

    tokenizer_class: str
    chat_template: str
    special_tokens: tuple[SpecialToken, ...]


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits behind `position` calls. Sent again when that changes; after `Started` if the call moved."""

    position: int


Event: TypeAlias = Queued | Started | PromptLogprobs | Chunk | Finished


def read(response: draft_service_pb2.GenerateResponse) -> list[Event]:
    """The events of this message: one, several that the service joined, or none."""
    return [event for each in (response.joined or (response,)) if (event := _read(each)) is not None]


def _read(response: draft_service_pb2.GenerateResponse) -> Event | None:
    """None for an empty message, or a kind that only a newer server sends."""
    match response.WhichOneof("event"):
        case "started":
            return Started.of(response.started)
        case "prompt_logprobs":
            return PromptLogprobs.of(response.prompt_logprobs)
        case "chunk":
            return Chunk.of(response.chunk)
        case "finished":
            return Finished.of(response.finished)
    return Queued(response.queue_position) if response.HasField("queue_position") else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, whole."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finish_reason: FinishReason
    stop: str | None
    stop_token_id: int | None
    usage: Usage
    statistics: Statistics
    timings: Timings
    token_texts: tuple[str, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    rounds: tuple[Round, ...] = ()
    num_resumes: int = 0  # how often it went on at another draft service; see `Finished`


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation. Its properties are those of the first sample, the only one unless `n` was given.

    `prompt_logprobs`, if requested, begin with the second token of the prompt: entry i is of position i + 1.
    """

    started: Started
    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Collects the events of one generation.

        Raises:
            ValueError: they do not begin with `Started`, or do not end with a `Finished` for each sample.
        """
        started: Started | None = None
        chunks: dict[int, list[Chunk]] = {}
        ends: dict[int, Finished] = {}
        prompt_logprobs: list[PositionLogprobs] = []
        for event in events:
            match event:
                case Started():
                    started = event
                case PromptLogprobs():
                    prompt_logprobs += event.logprobs
                case Chunk():
                    chunks.setdefault(event.index, []).append(event)
                case Finished():
                    ends[event.index] = event
        unfinished = chunks.keys() - ends.keys()
        if started is None or not ends or unfinished:
            missing = "Started" if started is None else f"Finished of samples {sorted(unfinished) or 'all'}"
            raise ValueError(
                f"the events are not a whole generation: {missing} is missing; pass all events of one call"
            )
        samples = tuple(_sample(end, chunks.get(index, [])) for index, end in sorted(ends.items()))
        return cls(started, samples, tuple(prompt_logprobs))

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.samples[0].usage

    @property
    def statistics(self) -> Statistics:
        return self.samples[0].statistics

    @property
    def timings(self) -> Timings:
        return self.samples[0].timings

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        return self.samples[0].logprobs

    @property
    def seed(self) -> int:
        return self.started.seed

    @property
    def rule(self) -> AcceptanceRule:
        return self.started.rule

    @property
    def drafter(self) -> Drafter:
        return self.started.drafter

    @property
    def lossy(self) -> bool:
        """Whether the text may differ from the target's distribution: the rule `sigmoid`, or lenience below 1."""
        return self.started.lossy


def _joined(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(item for part in parts for item in part)


def _sample(end: Finished, chunks: Sequence[Chunk]) -> Sample:
    kept = slice(max(0, sum(len(chunk.token_ids) for chunk in chunks) - end.cut_tokens))
    return Sample(
        index=end.index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=_joined(chunk.token_ids for chunk in chunks)[kept],
        origins=_joined(chunk.origins for chunk in chunks)[kept],
        finish_reason=end.finish_reason,
        stop=end.stop,
        stop_token_id=end.stop_token_id,
        usage=end.usage,
        statistics=end.statistics,
        timings=end.timings,
        token_texts=_joined(chunk.token_texts for chunk in chunks)[kept],
        logprobs=_joined(chunk.logprobs for chunk in chunks)[kept],
        rounds=_joined(chunk.rounds for chunk in chunks),
        num_resumes=end.num_resumes,
    )
