"""A checked request, and the kinds of drafter and policy as the contract numbers them."""

from dataclasses import dataclass, field
from enum import StrEnum

from draft_service.drafters.base import DrafterKind, DraftSequence
from draft_service.privacy import Emission, RoundSizes
from outrider.service.sampling import Sampling
from protos.outrider.v1 import draft_service_pb2, input_pb2


class PolicyKind(StrEnum):
    """The kinds of policy for γ."""

    FIXED = "fixed"
    HEURISTIC = "heuristic"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request drafts.

    Attributes:
        gamma: the largest γ, and with `fixed` the only one; 0 is `Decode` alone.
        first_gamma: γ of the first proposal, with the other policies.
        drafter: `NONE` if `gamma` is 0.
        chooses_tokens_per_pass: the request names none, and `adaptive` may choose 1 instead, before drafting begins.
    """

    policy: PolicyKind
    gamma: int
    first_gamma: int
    drafter: DrafterKind
    chooses_tokens_per_pass: bool = False

    def without_drafts(self) -> "Speculation":
        return Speculation(self.policy, gamma=0, first_gamma=0, drafter=DrafterKind.NONE)


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
    speculation: Speculation
    report_rounds: bool
    emission: Emission | None
    round_sizes: RoundSizes
    encoder_input: input_pb2.EncoderInput | None = field(default=None, repr=False)
    top_prompt_logprobs: int | None = None
    joined_responses: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, with those of an encoder's input that is text."""
        return len(self.prompt) + (len(self.encoder_input.token_ids.ids) if self.encoder_input is not None else 0)


DRAFTER_TO_WIRE = {
    DrafterKind.MODEL: draft_service_pb2.DRAFTER_MODEL,
    DrafterKind.NGRAM: draft_service_pb2.DRAFTER_NGRAM,
    DrafterKind.LOOKUP: draft_service_pb2.DRAFTER_LOOKUP,
    DrafterKind.RANDOM: draft_service_pb2.DRAFTER_RANDOM,
    DrafterKind.NONE: draft_service_pb2.DRAFTER_NONE,
    DrafterKind.STAGED: draft_service_pb2.DRAFTER_STAGED,
    DrafterKind.PARALLEL: draft_service_pb2.DRAFTER_PARALLEL,
}

POLICY_TO_WIRE = {
    PolicyKind.FIXED: draft_service_pb2.SPECULATION_POLICY_FIXED,
    PolicyKind.HEURISTIC: draft_service_pb2.SPECULATION_POLICY_HEURISTIC,
    PolicyKind.ADAPTIVE: draft_service_pb2.SPECULATION_POLICY_ADAPTIVE,
}
