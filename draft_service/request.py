"""A request as plain, checked data, and what it may choose: a drafter, a policy of γ."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from draft_service.drafters.base import HAVE_LOGITS, Kind
from draft_service.privacy import Emission, RoundSizes
from draft_service.speculation import PolicyKind
from outrider.rpc.errors import invalid_field
from outrider.service.sampling import Sampling, check_temperature
from protos.outrider.v1 import draft_service_pb2, sampling_pb2

_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked `GenerateRequest`.

    Attributes:
        prompt: the prompt as tokens, at least one.
        committed: output that was told before.
        held: how many of the last of it have text that was not delivered.
        sampling: what the draft works with; its logit rules hold the stop ids that `min_new_tokens` keeps back.
        params: the same as the client sent it, for the target; `sampling` has the rule where it is left open here.
        seed: of the first sample.
        stop_token_ids: those of the request, without the model's own.
        top_logprobs: None where no log-probabilities were asked for.
        time_limit: in seconds; None is none.
        policy: what chooses the length of each proposal.
        gamma: tokens of a proposal, under `fixed` of each; 0 lets the target write alone.
        first_gamma: those of the first, under the others.
        max_entropy: of a draft's law, in nats; None is no bound.
        drafter: what proposes; `NONE` where gamma is 0.
        draft_temperature: None is the target's.
        outcome_cache: whether the drafter may draft while a verdict is under way.
        seed_is_fresh: the seed was chosen here and now.
        emission: sizes and pace of the responses; None where they do not matter.
        round_sizes: sizes of the messages to and from the verifier.
    """

    request_id: str
    prompt: list[int]
    committed: list[int]
    held: int
    sampling: Sampling
    params: sampling_pb2.SamplingParams
    seed: int
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: list[int]
    stop: tuple[str, ...]
    ignore_eos: bool
    samples: int
    top_logprobs: int | None
    time_limit: float | None
    policy: PolicyKind
    gamma: int
    first_gamma: int
    max_entropy: float | None
    drafter: Kind
    draft_temperature: float | None
    outcome_cache: bool
    seed_is_fresh: bool
    report_rounds: bool
    keep_special_tokens: bool
    weights_fingerprint: str
    cache_salt: str
    emission: Emission | None
    round_sizes: RoundSizes

    def seed_of(self, sample: int) -> int:
        """The seed of a sample."""
        return derive_seed(self.seed, sample)


def derive_seed(seed: int, sample: int) -> int:
    """The seed of a sample: the request's own for the first, and for the others numbers that repeat and never meet.

    Output number `sample` of SplitMix64 (Steele, Lea and Flood, 2014) begun at `seed`: distinct for distinct samples.
    """
    if sample == 0:
        return seed
    z = (seed + sample * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


KIND_TO_WIRE = {
    Kind.MODEL: draft_service_pb2.DRAFTER_MODEL,
    Kind.NGRAM: draft_service_pb2.DRAFTER_NGRAM,
    Kind.LOOKUP: draft_service_pb2.DRAFTER_LOOKUP,
    Kind.RANDOM: draft_service_pb2.DRAFTER_RANDOM,
    Kind.NONE: draft_service_pb2.DRAFTER_NONE,
    Kind.STAGED: draft_service_pb2.DRAFTER_STAGED,
}
_DRAFTERS = {number: kind for kind, number in KIND_TO_WIRE.items()}


def check_drafter(
    field: str, asked: draft_service_pb2.Drafter, sampling: Sampling, *, offered: Collection[Kind], default: Kind
) -> Kind:
    """What drafts for a request; `default` where it does not say.

    Raises:
        RequestError: INVALID_ARGUMENT: this service does not have it, or the rule does not go with it.
    """
    kind = _DRAFTERS.get(asked) if asked else default
    if kind is None or kind not in offered:
        name = kind.value if kind else asked
        names = ", ".join(sorted(offered))
        raise invalid_field(field, f"{field} is {name}; this service offers {names}", given=name, offered=names)
    _check_rule(kind, sampling)
    return kind


def _check_rule(kind: Kind, sampling: Sampling) -> None:
    if sampling.needs_logits and kind not in HAVE_LOGITS:
        raise invalid_field(
            "sampling.rule",
            f"sampling.rule is sigmoid, which needs the logits of a draft model; the drafter {kind.value} has none",
            given=sampling.rule.value,
            drafter=kind.value,
        )


def check_draft_temperature(
    field: str, asked: float | None, sampling: Sampling, *, default: float | None
) -> float | None:
    """The temperature that is drafted by; None is the target's. A default that the rule refuses is left out.

    Raises:
        RequestError: INVALID_ARGUMENT: it is outside its range, or 0 where the rule divides logits by it.
    """
    if asked is None:
        return None if default == 0 and sampling.needs_logits else default
    check_temperature(field, asked)
    if asked == 0 and sampling.needs_logits:
        raise invalid_field(field, f"{field} is 0; under the rule sigmoid it must be above 0", given=asked)
    return asked


def supports_rule_by_logits(offered: Collection[Kind]) -> bool:
    """Whether some drafter that proposes anything goes with the rule `sigmoid`."""
    return bool(HAVE_LOGITS.intersection(offered) - {Kind.NONE})


POLICY_TO_WIRE = {
    PolicyKind.FIXED: draft_service_pb2.SPECULATION_POLICY_FIXED,
    PolicyKind.HEURISTIC: draft_service_pb2.SPECULATION_POLICY_HEURISTIC,
    PolicyKind.ADAPTIVE: draft_service_pb2.SPECULATION_POLICY_ADAPTIVE,
}
_POLICIES = {number: kind for kind, number in POLICY_TO_WIRE.items()}


def check_policy(field: str, asked: draft_service_pb2.SpeculationParams, *, default: PolicyKind) -> PolicyKind:
    """What chooses the lengths: what is named; else `fixed` where γ is given, so that it holds; else the default.

    Raises:
        RequestError: INVALID_ARGUMENT: there is no such policy.
    """
    if not asked.policy:
        return PolicyKind.FIXED if asked.HasField("gamma") else default
    kind = _POLICIES.get(asked.policy)
    if kind is None:
        names = ", ".join(f"{name} ({number})" for number, name in _POLICIES.items())
        raise invalid_field(
            field, f"{field} is {asked.policy}; this service offers {names}", given=asked.policy, offered=names
        )
    return kind


def check_max_entropy(field: str, asked: draft_service_pb2.SpeculationParams, *, default: float | None) -> float | None:
    """The bound on a draft law's entropy in nats; None is no bound.

    Raises:
        RequestError: INVALID_ARGUMENT: it is negative, or no number.
    """
    if not asked.HasField("max_entropy"):
        return default
    if not asked.max_entropy >= 0:  # NaN neither
        raise invalid_field(field, f"{field} is {asked.max_entropy:g}; at least 0 (nats)", given=asked.max_entropy)
    return None if math.isinf(asked.max_entropy) else asked.max_entropy
