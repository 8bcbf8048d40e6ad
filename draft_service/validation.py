"""Checks a `GenerateRequest`. Every error is a `RequestError` that names the field, its value and the limit."""

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

import structlog

from draft_service.drafters.base import RUN_A_MODEL, DrafterKind, DraftSequence
from draft_service.pair import Pair
from draft_service.privacy import check_emission, round_sizes
from draft_service.prompt import check_prompt
from draft_service.request import DRAFTER_TO_WIRE, POLICY_TO_WIRE, CheckedRequest, PolicyKind, Speculation
from draft_service.settings import DraftSettings
from kernels.verify import Rule
from outrider.rpc.errors import above_limit, counted, invalid_field, outside
from outrider.service.encoder_input import misfit
from outrider.service.model_info import check_fingerprint, check_name, check_required_features
from outrider.service.sampling import (
    RULES,
    Sampling,
    check_logprobs,
    check_prompt_logprobs,
    check_sampling,
    check_temperature,
    check_token_ids,
)
from outrider.service.wire import bytes_with_logits, most_logits
from protos.outrider.v1 import draft_service_pb2, model_pb2, sampling_pb2

_log = structlog.get_logger()

DEFAULT_NEW_TOKENS = 256

_DRAFTERS = {number: kind for kind, number in DRAFTER_TO_WIRE.items()}
_POLICIES = {number: kind for kind, number in POLICY_TO_WIRE.items()}

Drafted: TypeAlias = draft_service_pb2.SpeculationParams | draft_service_pb2.OpenDraft
"""A message that says how to draft."""


def check_generate(message: draft_service_pb2.GenerateRequest, pair: Pair, settings: DraftSettings) -> CheckedRequest:
    """Checks a request against the pair and the limits. Tokenises the prompt, which may take seconds.

    Raises:
        RequestError: INVALID_ARGUMENT or FAILED_PRECONDITION.
    """
    draft, target, requested = pair.draft, pair.target, message.speculation
    limits = draft.limits
    longest = limits.max_sequence_tokens
    check_required_features(message.required_features, draft.features)
    check_fingerprint(message.weights_fingerprint, target)
    check_name("request_id", message.request_id)
    check_name("cache_salt", message.cache_salt)
    sampling = check_target_sampling(message.sampling, target, seed_decides=True)
    top_logprobs = check_logprobs(message.logprobs) if message.HasField("logprobs") else None
    scores_prompt = message.HasField("prompt_logprobs")
    top_prompt_logprobs = check_prompt_logprobs(message.prompt_logprobs, target) if scores_prompt else None
    samples = _check_samples(message, limits)
    speculation = _check_speculation(requested, sampling, pair, settings)
    time_limit = _check_time_limit(message)
    stop_token_ids = _check_stop_token_ids(message, limits, target.vocab_size)
    stop = _check_stop(message.stop, limits)
    committed = check_token_ids("committed_token_ids", message.committed_token_ids, target.vocab_size, longest)
    if message.held_tokens > len(committed):
        raise above_limit("held_tokens", message.held_tokens, len(committed), ", the number of committed_token_ids")
    if message.HasField("token_ids") and not target.HasField("encoder"):  # before it reads all, which may be millions
        check_lengths(message, len(message.token_ids.ids), len(committed), longest)
    prompt, encoder_input = check_prompt(message, pair, settings.max_prompt_tokens)
    new = check_lengths(message, len(prompt), len(committed), longest)
    request_id = message.request_id or secrets.token_hex(8)
    if encoder_input is not None and speculation.drafter in RUN_A_MODEL and (why := misfit(encoder_input, draft)):
        _log.info(
            "the draft's encoder does not take the input",
            request_id=request_id,
            reason=why,
            effect="the target writes without a draft",
        )
        speculation = speculation.without_drafts()
    stops = stop_token_ids if message.ignore_eos else [*stop_token_ids, *target.eos_token_ids]
    sampling = replace(
        sampling,
        logit_rules=replace(
            sampling.logit_rules,
            stop_token_ids=tuple(sorted(set(stops))),
            min_new_tokens=message.min_new_tokens,
            generation=pair.generation_rules,
            max_new_tokens=new,
        ),
    )
    draft_sequence = DraftSequence(
        prompt=prompt,
        committed=committed,
        params=sampling.params,
        logit_rules=sampling.logit_rules,
        seed=sampling.seed if sampling.seed is not None else secrets.randbits(64),
        rule=sampling.rule,
        seed_is_fresh=sampling.seed is None,
        max_entropy=_check_max_entropy(requested, default=settings.max_entropy),
        draft_temperature=check_draft_temperature(
            "speculation.draft_temperature", requested, sampling, default=settings.draft_temperature
        ),
        uses_outcome_cache=requested.outcome_cache if requested.HasField("outcome_cache") else settings.outcome_cache,
        tokens_per_pass=check_tokens_per_pass(
            "speculation.tokens_per_pass", requested, speculation.drafter, default=settings.tokens_per_pass
        ),
        cache_salt=message.cache_salt,
    )
    return CheckedRequest(
        message=message,
        request_id=request_id,
        prompt=prompt,
        encoder_input=encoder_input,
        committed=committed,
        sampling=sampling,
        draft_sequence=draft_sequence,
        max_new_tokens=new,
        stop=stop,
        samples=samples,
        top_logprobs=top_logprobs,
        top_prompt_logprobs=top_prompt_logprobs,
        time_limit=time_limit,
        speculation=speculation,
        report_rounds=requested.report_rounds or requested.report_probabilities,
        emission=check_emission(message, max_gamma=limits.max_gamma, top_logprobs=top_logprobs),
        joined_responses=message.joined_responses and not message.HasField("emission"),
        round_sizes=round_sizes(
            message,
            sampling,
            gamma=speculation.gamma,
            name_bytes=len(f"{request_id}/{samples}".encode()),
            max_support=limits.max_support,
            target=target,
            top_logprobs=top_logprobs,
        ),
    )


# --------------------------------------------------------------------------------------- checks shared with Propose


def check_target_sampling(
    params: sampling_pb2.SamplingParams, target: model_pb2.ModelInfo, *, seed_decides: bool = False
) -> Sampling:
    """Checks sampling parameters against the target.

    Without a rule, takes the target's default; with `seed_decides` and a seed, `coupled`.
    """
    rules = [RULES[number] for number in target.rules if number in RULES]
    default_rule = RULES[target.default_rule]
    # A seed promises the same text again. Only `coupled` keeps this promise with any drafts (invariant 7). With a
    # lenience below 1, `check_sampling` takes `tokenwise` instead.
    if seed_decides and params.HasField("seed") and Rule.COUPLED in rules:
        default_rule = Rule.COUPLED
    return check_sampling(params, vocab_size=target.vocab_size, rules=rules, default_rule=default_rule)


def check_gamma(field: str, gamma: int, limits: model_pb2.Limits) -> int:
    """Checks γ."""
    if gamma > limits.max_gamma:
        advice = ": give less, or raise --max-gamma of the draft service and of the verifier"
        raise above_limit(field, gamma, limits.max_gamma, advice)
    return gamma


def message_limit(draft: model_pb2.ModelInfo, target: model_pb2.ModelInfo) -> int:
    """The largest message from the draft to the target, in bytes."""
    return min(draft.limits.max_message_bytes, target.limits.max_message_bytes)


def check_message_size(field: str, gamma: int, draft: model_pb2.ModelInfo, target: model_pb2.ModelInfo) -> None:
    """Checks that a proposal of `gamma` tokens with the draft's logits fits into a message."""
    limit, needed = message_limit(draft, target), bytes_with_logits(gamma, target.vocab_size)
    if gamma and needed > limit:
        most = most_logits(limit, target.vocab_size)
        raise invalid_field(
            field,
            f"{field} is {gamma}; at most {most} under the rule sigmoid: a proposal of {counted(gamma, 'token')} has "
            f"up to {needed} bytes of logits, and a message at most {limit} bytes; give less, or raise "
            "--max-message-bytes of both services",
            given=gamma,
            maximum=most,
            message_bytes=needed,
            max_message_bytes=limit,
        )


def check_drafter(
    field: str,
    requested: draft_service_pb2.Drafter,
    sampling: Sampling,
    *,
    offered: Collection[DrafterKind],
    default: DrafterKind,
) -> DrafterKind:
    """The drafter of a request; `default` if it names none."""
    kind = _DRAFTERS.get(requested) if requested else default
    if kind is None or kind not in offered:
        name = kind.value if kind else requested
        names = ", ".join(sorted(offered))
        raise invalid_field(field, f"{field} is {name}; this service offers {names}", given=name, offered=names)
    if sampling.needs_logits and kind is not DrafterKind.NONE and kind not in RUN_A_MODEL:
        raise invalid_field(
            "sampling.rule",
            f"sampling.rule is sigmoid, which needs the logits of a draft model, and the drafter {kind.value} has "
            "none: name the drafter model, or another rule",
            given=sampling.rule.value,
            drafter=kind.value,
        )
    return kind


def check_draft_temperature(field: str, message: Drafted, sampling: Sampling, *, default: float | None) -> float | None:
    """The draft's temperature; None is the target's. A default that the rule does not allow is ignored."""
    if not message.HasField("draft_temperature"):
        return None if default == 0 and sampling.needs_logits else default
    requested = message.draft_temperature
    check_temperature(field, requested)
    if requested == 0 and sampling.needs_logits:
        raise invalid_field(field, f"{field} is 0; under the rule sigmoid it must be above 0", given=requested)
    return requested


MAX_TOKENS_PER_PASS = 256


def check_tokens_per_pass(field: str, message: Drafted, drafter: DrafterKind, *, default: int) -> int:
    """The tokens that one pass of the draft model drafts; 1 with another drafter than `PARALLEL`."""
    requested = message.tokens_per_pass if message.HasField("tokens_per_pass") else default
    if not 1 <= requested <= MAX_TOKENS_PER_PASS:
        raise outside(field, requested, 1, MAX_TOKENS_PER_PASS)
    return requested if drafter is DrafterKind.PARALLEL else 1


# ----------------------------------------------------------------------------------------------------- checks of fields


def _check_speculation(
    requested: draft_service_pb2.SpeculationParams, sampling: Sampling, pair: Pair, settings: DraftSettings
) -> Speculation:
    draft, target = pair.draft, pair.target
    default_policy = PolicyKind(settings.speculation)
    if sampling.seed is not None and not (sampling.params.is_greedy or sampling.rule is Rule.COUPLED):
        default_policy = PolicyKind.FIXED  # draws decide the text: a seed repeats it only with the same γ in each round
    policy = _check_policy(requested, default=default_policy)
    most = draft.limits.max_gamma
    if sampling.needs_logits:
        most = min(most, max(1, most_logits(message_limit(draft, target), target.vocab_size)))
    first_gamma = min(settings.gamma, most)
    gamma = first_gamma if policy is PolicyKind.FIXED else most
    if requested.HasField("gamma"):
        gamma = check_gamma("speculation.gamma", requested.gamma, draft.limits)
    drafter = DrafterKind.NONE
    if gamma:
        drafter = check_drafter(
            "speculation.drafter", requested.drafter, sampling, offered=pair.drafters, default=pair.default
        )
    if drafter is DrafterKind.NONE:
        gamma = 0
    if sampling.needs_logits:
        check_message_size("speculation.gamma", gamma, draft, target)
    may_choose = policy is PolicyKind.ADAPTIVE and drafter is DrafterKind.PARALLEL
    return Speculation(
        policy=policy,
        gamma=gamma,
        first_gamma=min(first_gamma, gamma),
        drafter=drafter,
        chooses_tokens_per_pass=may_choose and not requested.HasField("tokens_per_pass"),
    )


def _check_policy(requested: draft_service_pb2.SpeculationParams, *, default: PolicyKind) -> PolicyKind:
    """The policy for γ: the named one; else `fixed` if the request gives γ; else the default."""
    if not requested.policy:
        return PolicyKind.FIXED if requested.HasField("gamma") else default
    kind = _POLICIES.get(requested.policy)
    if kind is None:
        names = ", ".join(f"{name} ({number})" for number, name in _POLICIES.items())
        text = f"speculation.policy is {requested.policy}; this service offers {names}"
        raise invalid_field("speculation.policy", text, given=requested.policy, offered=names)
    return kind


def _check_max_entropy(requested: draft_service_pb2.SpeculationParams, *, default: float | None) -> float | None:
    """The bound on the entropy of q, in nats; None is no bound."""
    if not requested.HasField("max_entropy"):
        return default
    if not requested.max_entropy >= 0:  # also refuses NaN
        text = f"speculation.max_entropy is {requested.max_entropy:g} nats; it must be at least 0"
        raise invalid_field("speculation.max_entropy", text, given=requested.max_entropy)
    return None if math.isinf(requested.max_entropy) else requested.max_entropy


def check_lengths(message: draft_service_pb2.GenerateRequest, prompt: int, committed: int, longest: int) -> int:
    """The most output tokens, committed ones included. `longest` is the limit of prompt and output."""
    # Libraries that shorten a conversation look for these words, which are OpenAI's and vLLM's.
    context = f"this model's maximum context length is {counted(longest, 'token')}, prompt and output together"
    if prompt >= longest:
        raise invalid_field(
            "prompt",
            f"the prompt has {counted(prompt, 'token')}; at most {longest - 1}: {context}. Shorten the prompt, or "
            "raise --max-sequence-tokens of both services",
            given=prompt,
            maximum=longest - 1,
            max_sequence_tokens=longest,
        )
    default = longest - prompt if message.fill_context else min(DEFAULT_NEW_TOKENS, longest - prompt)
    new = message.max_new_tokens if message.HasField("max_new_tokens") else default
    if message.fill_context:
        new = min(new, longest - prompt)
    if not 1 <= new <= longest - prompt:
        raise invalid_field(
            "max_new_tokens",
            f"max_new_tokens is {new}; 1 to {longest - prompt}: the prompt has {counted(prompt, 'token')}, and "
            f"{context} (--max-sequence-tokens)",
            given=new,
            prompt_tokens=prompt,
            maximum=longest - prompt,
            max_sequence_tokens=longest,
        )
    if new < committed or (new == committed and not message.held_tokens):
        raise invalid_field(
            "max_new_tokens",
            f"max_new_tokens is {new}; it counts committed_token_ids, {committed}, and must be more",
            given=new,
            committed=committed,
        )
    if message.min_new_tokens > new:
        raise above_limit("min_new_tokens", message.min_new_tokens, new, ", which is max_new_tokens")
    return new


def _check_samples(message: draft_service_pb2.GenerateRequest, limits: model_pb2.Limits) -> int:
    samples = message.n if message.HasField("n") else 1
    if not 1 <= samples <= limits.max_samples:
        advice = ": ask for less, or raise --max-samples and --max-sequences of the draft service"
        raise outside("n", samples, 1, limits.max_samples, advice)
    if samples > 1 and message.committed_token_ids:
        raise invalid_field(
            "committed_token_ids",
            f"n is {samples} and committed_token_ids is set; only one sample can be resumed: set n to 1",
            n=samples,
        )
    return samples


def _check_time_limit(message: draft_service_pb2.GenerateRequest) -> float | None:
    if not message.HasField("time_limit"):
        return None
    seconds = message.time_limit.seconds + message.time_limit.nanos / 1e9
    if seconds <= 0:
        raise invalid_field("time_limit", f"time_limit is {seconds:g} s; it must be above 0, or unset", given=seconds)
    return seconds


def _check_stop_token_ids(
    message: draft_service_pb2.GenerateRequest, limits: model_pb2.Limits, vocab_size: int
) -> list[int]:
    given, most = len(message.stop_token_ids), limits.max_stop_token_ids
    if given > most:
        raise above_limit("stop_token_ids", given, most, ": give fewer", noun="id")
    return check_token_ids("stop_token_ids", message.stop_token_ids, vocab_size)


def _check_stop(stop: Sequence[str], limits: model_pb2.Limits) -> tuple[str, ...]:
    if len(stop) > limits.max_stop_strings:
        advice = ": give fewer, or raise --max-stop-strings of the draft service"
        raise above_limit("stop", len(stop), limits.max_stop_strings, advice, noun="string")
    for i, string in enumerate(stop):
        if not 1 <= len(string) <= limits.max_stop_string_chars:
            advice = ": shorten or remove it, or raise --max-stop-string-chars of the draft service"
            raise outside(f"stop[{i}]", len(string), 1, limits.max_stop_string_chars, advice, noun="character")
    return tuple(stop)
