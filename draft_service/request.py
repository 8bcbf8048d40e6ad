"""A request for text as plain, checked data: what its samples are written by."""

from dataclasses import dataclass

from draft_service.drafters.base import Kind
from draft_service.privacy import Emission, RoundSizes
from draft_service.speculation import PolicyKind
from outrider.service.sampling import Sampling
from protos.outrider.v1 import sampling_pb2

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
