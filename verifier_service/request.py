"""Checks the messages of a stream: the opening, and the rounds.

Every field is checked before it reaches a tensor (invariant 8). Each error is a `RequestError` that names the field,
its value and the limit. Checks that need the state of the sequence, such as its base, are in `TargetSequence`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from kernels.adjustments import LogitRules
from kernels.generation_rules import GenerationRules
from kernels.sigmoid import EXCLUDED, DraftLogits
from kernels.sparse import SparseDistribution, validate
from kernels.verify import Rule
from kernels.verify_c import valid_supports
from outrider.rpc.errors import above_limit, counted, invalid_field, outside
from outrider.service.encoder_input import check_opening_input
from outrider.service.model_info import check_fingerprint, check_name, check_required_features
from outrider.service.sampling import (
    DEFAULT_RULE,
    RULES,
    Sampling,
    check_logprobs,
    check_prompt_logprobs,
    check_sampling,
    check_token_ids,
)
from outrider.service.wire import HASH_BYTES, decode_all_sparse, decode_logits, decode_sparse, divide_sparse
from protos.outrider.v1 import model_pb2, speculation_pb2, verifier_service_pb2

FEATURES = (
    "decode",
    "encoder",
    "fixed_rounds",
    "logprobs",
    "penalties",
    "prompt_logprobs",
    "report_probabilities",
    "resume",
)
MIN_RESPONSE_BYTES, MAX_RESPONSE_BYTES = 256, 1 << 20
JOIN_MS, MAX_JOIN_MS = 100, 1000  # of `OpenSequence.join_ms`: the default, and the limit


@dataclass(frozen=True, slots=True)
class Opening:
    """A checked `OpenSequence`.

    Attributes:
        resumed: it was in progress at another verifier.
        isolated: until its first verdict it runs in steps of its own.
        encoder_input: of an encoder–decoder model: token ids `[S]`, or log-Mel features `[mels, frames]`; `prompt` is
            then that of the decoder.
    """

    request_id: str
    cache_salt: str
    prompt: list[int]
    committed: list[int]
    sampling: Sampling
    seed: int
    logit_rules: LogitRules
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    top_logprobs: int  # -1: none
    top_prompt_logprobs: int = -1  # the same for tokens of the prompt
    reports_probabilities: bool = False  # of drafted tokens
    response_bytes: int = 0  # each response is padded to a multiple of this; 0: no padding
    resumed: bool = False
    isolated: bool = False
    joined_verdicts: bool = False  # a verdict may hold several tokens of a Decode
    seconds_joined: float = JOIN_MS / 1e3  # for which they may wait for later ones
    joins_first: bool = False  # whether the first token of the sequence may wait, too
    first_round: "Round | None" = None  # a Decode
    encoder_input: Tensor | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Round:
    """A checked `Proposal` or `Decode`.

    Attributes:
        tokens: drafted tokens, `[γ]`; empty for a Decode.
        distributions: q̂ of each drafted token, `[γ]`, or the draft's logits; None is the point mass.
        decode: tokens of a Decode; 0 for a proposal.
        arrived: `time.perf_counter()` at its arrival.
    """

    number: int
    base_length: int
    prefix_hash: bytes
    seen_round: int
    tokens: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution | DraftLogits | None, ...] = ()
    decode: int = 0
    arrived: float = field(default_factory=lambda: time.perf_counter())


def check_open(
    message: verifier_service_pb2.OpenSequence, model: model_pb2.ModelInfo, generation: GenerationRules | None = None
) -> Opening:
    """Checks an opening against the model and the server's limits, except the values of the encoder's input.

    Args:
        generation: the model's own rules for logits.

    Raises:
        RequestError: INVALID_ARGUMENT naming the field, or FAILED_PRECONDITION.
    """
    check_required_features(message.required_features, model.features)
    check_opening_input(message, model)
    check_fingerprint(message.weights_fingerprint, model)
    check_name("request_id", message.request_id)
    check_name("cache_salt", message.cache_salt)
    vocab_size, longest = model.vocab_size, model.limits.max_sequence_tokens
    prompt = check_token_ids("prompt_token_ids", message.prompt_token_ids, vocab_size, longest)
    if not prompt:
        raise invalid_field("prompt_token_ids", "prompt_token_ids is empty; at least 1 token is needed", given=0)
    committed = check_token_ids("committed_token_ids", message.committed_token_ids, vocab_size, longest)
    _check_lengths(message, len(prompt), len(committed), longest)
    sampling = check_sampling(
        message.sampling, vocab_size=model.vocab_size, rules=RULES.values(), default_rule=DEFAULT_RULE
    )
    if sampling.seed is None:
        raise invalid_field("sampling.seed", "sampling.seed is not set; OpenSequence needs a seed")
    if message.response_bytes and not MIN_RESPONSE_BYTES <= message.response_bytes <= MAX_RESPONSE_BYTES:
        or_any = ", or 0 for any size"
        raise outside("response_bytes", message.response_bytes, MIN_RESPONSE_BYTES, MAX_RESPONSE_BYTES, or_any)
    if message.join_ms > MAX_JOIN_MS:
        raise above_limit("join_ms", message.join_ms, MAX_JOIN_MS)
    stops = _check_stops(message, model)
    if committed and committed[-1] in stops:
        raise invalid_field(
            "committed_token_ids",
            f"committed_token_ids ends with the stop token {committed[-1]}, so the text has ended",
        )
    return Opening(
        request_id=message.request_id,
        cache_salt=message.cache_salt,
        prompt=prompt,
        committed=committed,
        sampling=sampling,
        seed=sampling.seed,
        logit_rules=replace(
            sampling.logit_rules,
            stop_token_ids=tuple(sorted(stops)),
            min_new_tokens=message.min_new_tokens,
            generation=generation,
            max_new_tokens=message.max_new_tokens,
        ),
        stop_token_ids=stops,
        max_new_tokens=message.max_new_tokens,
        top_logprobs=check_logprobs(message.logprobs) if message.HasField("logprobs") else -1,
        top_prompt_logprobs=(
            check_prompt_logprobs(message.prompt_logprobs, model) if message.HasField("prompt_logprobs") else -1
        ),
        reports_probabilities=message.report_probabilities,
        response_bytes=message.response_bytes,
        resumed=message.reopened or bool(committed),
        isolated=message.isolated,
        joined_verdicts=message.joined_verdicts,
        seconds_joined=(message.join_ms if message.HasField("join_ms") else JOIN_MS) / 1e3,
        joins_first=message.HasField("join_ms"),
        first_round=check_decode(message.decode) if message.HasField("decode") else None,
    )


def check_proposal(
    message: speculation_pb2.Proposal, model: model_pb2.ModelInfo, *, rule: Rule = DEFAULT_RULE, is_greedy: bool = False
) -> Round:
    """Checks a proposal against the model, and the sequence's rule and temperature."""
    common = _check_round("proposal", message)
    gamma, limit = len(message.token_ids), model.limits.max_gamma
    if gamma > limit:
        raise above_limit("proposal.token_ids", gamma, limit, " (--max-gamma)", noun="token")
    tokens = tuple(check_token_ids("proposal.token_ids", message.token_ids, model.vocab_size))
    expected = 0 if rule is Rule.COUPLED else gamma
    if len(message.distributions) != expected:
        raise invalid_field(
            "proposal.distributions",
            f"proposal.distributions has {counted(len(message.distributions), 'element')}; the rule {rule.value} needs "
            f"{expected} for {counted(gamma, 'token')}",
            given=len(message.distributions),
            expected=expected,
        )
    distributions: tuple[SparseDistribution | DraftLogits | None, ...]
    if rule is Rule.SIGMOID:
        distributions = tuple(
            _check_logits(f"proposal.distributions[{i}]", distribution, tokens[i], model, is_greedy=is_greedy)
            for i, distribution in enumerate(message.distributions)
        )
    else:
        distributions = _check_distributions(message.distributions, tokens, model)
    return Round(*common, tokens=tokens, distributions=distributions)


def check_decode(message: verifier_service_pb2.Decode) -> Round:
    """Checks a Decode."""
    common = _check_round("decode", message)
    if message.num_tokens < 1:
        raise invalid_field("decode.num_tokens", "decode.num_tokens is 0; it must be at least 1", given=0)
    return Round(*common, decode=message.num_tokens)


def _check_lengths(
    message: verifier_service_pb2.OpenSequence, prompt: int, committed: int, max_sequence_tokens: int
) -> None:
    new, least = message.max_new_tokens, message.min_new_tokens
    if new < 1 or new <= committed:
        raise invalid_field(
            "max_new_tokens",
            f"max_new_tokens is {new}; it counts committed_token_ids, {committed}, and must be more",
            given=new,
            committed=committed,
        )
    if least > new:
        raise above_limit("min_new_tokens", least, new, ", which is max_new_tokens")
    if prompt + new > max_sequence_tokens:
        raise invalid_field(
            "max_new_tokens",
            f"max_new_tokens is {new}, and the prompt has {counted(prompt, 'token')}: together {prompt + new}; at most "
            f"{max_sequence_tokens} (--max-sequence-tokens)",
            prompt_tokens=prompt,
            max_new_tokens=new,
            maximum=max_sequence_tokens,
        )


def _check_stops(message: verifier_service_pb2.OpenSequence, model: model_pb2.ModelInfo) -> frozenset[int]:
    limit = model.limits.max_stop_token_ids
    if (count := len(message.stop_token_ids)) > limit:
        raise above_limit("stop_token_ids", count, limit, noun="id")
    own = check_token_ids("stop_token_ids", message.stop_token_ids, model.vocab_size)
    return frozenset(own if message.ignore_eos else (*own, *model.eos_token_ids))


def _check_round(
    kind: str, message: speculation_pb2.Proposal | verifier_service_pb2.Decode
) -> tuple[int, int, bytes, int]:
    """Returns the first fields of the `Round`, which both kinds have."""
    if message.round < 1:
        raise invalid_field(f"{kind}.round", f"{kind}.round is 0; it must be at least 1", given=0)
    if message.base_length < 1:
        raise invalid_field(f"{kind}.base_length", f"{kind}.base_length is 0; it must be at least 1", given=0)
    if len(message.prefix_hash) != HASH_BYTES:
        raise invalid_field(
            f"{kind}.prefix_hash",
            f"{kind}.prefix_hash has {counted(len(message.prefix_hash), 'byte')}; it must have {HASH_BYTES}",
            given=len(message.prefix_hash),
            expected=HASH_BYTES,
        )
    return message.round, message.base_length, message.prefix_hash, message.seen_round


def _check_distributions(
    messages: Sequence[speculation_pb2.TokenDistribution], tokens: Sequence[int], model: model_pb2.ModelInfo
) -> tuple[SparseDistribution | None, ...]:
    """All of a proposal in one go, if they are sparse or point masses, and valid. If not, each on its own."""
    forms = [message.WhichOneof("form") for message in messages]
    sparse = [message.sparse for message, form in zip(messages, forms, strict=True) if form == "sparse"]
    if not sparse and all(form == "point_mass" for form in forms):
        return (None,) * len(forms)
    drafted = [token for token, form in zip(tokens, forms, strict=True) if form == "sparse"]
    found = decode_all_sparse(sparse) if len(sparse) + forms.count("point_mass") == len(forms) else None
    if found is not None and max(found[2]) <= model.limits.max_support:
        totals = valid_supports(*found, drafted, model.vocab_size)
        if totals is not None:
            every = divide_sparse(*found, totals)
            return tuple(next(every) if form == "sparse" else None for form in forms)
    return tuple(
        _check_distribution(f"proposal.distributions[{i}]", message, tokens[i], model)
        for i, message in enumerate(messages)
    )


def _check_distribution(
    field_name: str, message: speculation_pb2.TokenDistribution, token: int, model: model_pb2.ModelInfo
) -> SparseDistribution | None:
    form = message.WhichOneof("form")
    if form == "point_mass":
        return None
    if form != "sparse":
        given = "is not set" if form is None else f"is {form}, which is for the rule sigmoid only"
        raise invalid_field(f"{field_name}.form", f"{field_name}.form {given}; set sparse or point_mass")
    try:
        ids, weights = decode_sparse(message.sparse)
        if len(ids) > model.limits.max_support:
            raise ValueError(f"it has {len(ids)} tokens; at most {model.limits.max_support}")
        q = validate(ids, weights, model.vocab_size)
    except ValueError as error:
        raise invalid_field(f"{field_name}.sparse", f"{field_name}.sparse: {error}") from None
    if q.probability(token) <= 0.0:
        raise invalid_field(
            f"{field_name}.sparse",
            f"{field_name}.sparse: the drafted token {token} is not among its {len(ids)} token_ids",
            given=token,
        )
    return q


def _check_logits(
    field_name: str,
    message: speculation_pb2.TokenDistribution,
    token: int,
    model: model_pb2.ModelInfo,
    *,
    is_greedy: bool,
) -> DraftLogits | None:
    form = message.WhichOneof("form")
    if form == "point_mass" and is_greedy:
        return None
    if form != "logits":
        given = "is not set" if form is None else f"is {form}"
        raise invalid_field(f"{field_name}.form", f"{field_name}.form {given}; the rule sigmoid requires logits")
    try:
        logits = decode_logits(message.logits, model.vocab_size)
    except ValueError as error:
        raise invalid_field(f"{field_name}.logits", f"{field_name}.logits: {error}") from None
    if logits.values[token] == EXCLUDED:
        raise invalid_field(
            f"{field_name}.logits",
            f"{field_name}.logits: the drafted token {token} has the logit {EXCLUDED:g}, which excludes it",
            given=token,
        )
    return logits
