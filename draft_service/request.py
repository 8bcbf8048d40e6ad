"""A checked request, and the checks of its drafter and its policy for γ, which raise INVALID_ARGUMENT."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from draft_service.drafters.base import RUN_A_MODEL, DraftSequence, Kind
from draft_service.privacy import Emission, RoundSizes
from outrider.rpc.errors import invalid_field, outside
from outrider.service.sampling import Sampling, check_temperature
from protos.outrider.v1 import draft_service_pb2, input_pb2


class PolicyKind(StrEnum):
    """The kinds of policy for γ."""

    FIXED = "fixed"
    HEURISTIC = "heuristic"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A checked `GenerateRequest`.

    Attributes:
        message: the request itself: what is read there is checked, and used unchanged.
        prompt: the prompt as tokens, at least one; for an encoder–decoder model those of the decoder.
        committed: output of an earlier call, which this one resumes.
        sampling: for the draft; its logit rules ban the stop ids until `min_new_tokens`.
        draft_sequence: the first sample, as its drafter opens it; an encoder's input is added before drafting begins.
        top_logprobs: None without log-probabilities.
        top_prompt_logprobs: the same for tokens of the prompt.
        time_limit: in seconds; None without one.
        gamma: the largest γ, and with `fixed` the only one; 0 is `Decode` alone.
        first_gamma: γ of the first proposal, with the other policies.
        drafter: `NONE` if `gamma` is 0.
        chooses_tokens_per_pass: it names none, and `adaptive` may choose 1 instead, before drafting begins.
        emission: sizes and pace of the responses; None without such limits.
        round_sizes: sizes of the messages to and from the verifier.
        encoder_input: the input of the encoder, as the verifier gets it; None for a model without encoder.
    """

    message: draft_service_pb2.GenerateRequest = field(repr=False)
    request_id: str
    prompt: list[int]
    committed: list[int]
    sampling: Sampling
    draft_sequence: DraftSequence
    max_new_tokens: int
    stop: tuple[str, ...]
    samples: int
    top_logprobs: int | None
    time_limit: float | None
    policy: PolicyKind
    gamma: int
    first_gamma: int
    drafter: Kind
    report_rounds: bool
    emission: Emission | None
    round_sizes: RoundSizes
    encoder_input: input_pb2.EncoderInput | None = field(default=None, repr=False)
    top_prompt_logprobs: int | None = None
    chooses_tokens_per_pass: bool = False
    joined_responses: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, with those of an encoder's input that is text."""
        return len(self.prompt) + (len(self.encoder_input.token_ids.ids) if self.encoder_input is not None else 0)


KIND_TO_WIRE = {
    Kind.MODEL: draft_service_pb2.DRAFTER_MODEL,
    Kind.NGRAM: draft_service_pb2.DRAFTER_NGRAM,
    Kind.LOOKUP: draft_service_pb2.DRAFTER_LOOKUP,
    Kind.RANDOM: draft_service_pb2.DRAFTER_RANDOM,
    Kind.NONE: draft_service_pb2.DRAFTER_NONE,
    Kind.STAGED: draft_service_pb2.DRAFTER_STAGED,
    Kind.PARALLEL: draft_service_pb2.DRAFTER_PARALLEL,
}
_DRAFTERS = {number: kind for kind, number in KIND_TO_WIRE.items()}

Drafted: TypeAlias = draft_service_pb2.SpeculationParams | draft_service_pb2.OpenDraft
"""A message that says how to draft."""


def check_drafter(
    field: str, requested: draft_service_pb2.Drafter, sampling: Sampling, *, offered: Collection[Kind], default: Kind
) -> Kind:
    """The drafter of a request; `default` if it names none."""
    kind = _DRAFTERS.get(requested) if requested else default
    if kind is None or kind not in offered:
        name = kind.value if kind else requested
        names = ", ".join(sorted(offered))
        raise invalid_field(field, f"{field} is {name}; this service offers {names}", given=name, offered=names)
    if sampling.needs_logits and kind is not Kind.NONE and kind not in RUN_A_MODEL:
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


def check_tokens_per_pass(field: str, message: Drafted, drafter: Kind, *, default: int) -> int:
    """The tokens that one pass of the draft model drafts; 1 with another drafter than `PARALLEL`."""
    requested = message.tokens_per_pass if message.HasField("tokens_per_pass") else default
    if not 1 <= requested <= MAX_TOKENS_PER_PASS:
        raise outside(field, requested, 1, MAX_TOKENS_PER_PASS)
    return requested if drafter is Kind.PARALLEL else 1


POLICY_TO_WIRE = {
    PolicyKind.FIXED: draft_service_pb2.SPECULATION_POLICY_FIXED,
    PolicyKind.HEURISTIC: draft_service_pb2.SPECULATION_POLICY_HEURISTIC,
    PolicyKind.ADAPTIVE: draft_service_pb2.SPECULATION_POLICY_ADAPTIVE,
}
_POLICIES = {number: kind for kind, number in POLICY_TO_WIRE.items()}


def check_policy(requested: draft_service_pb2.SpeculationParams, *, default: PolicyKind) -> PolicyKind:
    """The policy for γ: the named one; else `fixed` if the request gives γ; else the default."""
    if not requested.policy:
        return PolicyKind.FIXED if requested.HasField("gamma") else default
    kind = _POLICIES.get(requested.policy)
    if kind is None:
        names = ", ".join(f"{name} ({number})" for number, name in _POLICIES.items())
        text = f"speculation.policy is {requested.policy}; this service offers {names}"
        raise invalid_field("speculation.policy", text, given=requested.policy, offered=names)
    return kind


def check_max_entropy(requested: draft_service_pb2.SpeculationParams, *, default: float | None) -> float | None:
    """The bound on the entropy of q, in nats; None is no bound."""
    if not requested.HasField("max_entropy"):
        return default
    if not requested.max_entropy >= 0:  # also refuses NaN
        text = f"speculation.max_entropy is {requested.max_entropy:g} nats; it must be at least 0"
        raise invalid_field("speculation.max_entropy", text, given=requested.max_entropy)
    return None if math.isinf(requested.max_entropy) else requested.max_entropy
