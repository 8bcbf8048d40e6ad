"""A sequence at the draft service: what is committed, the round under way, and how it goes."""

from dataclasses import dataclass, field, replace

from draft_service.drafter_choice import KIND_TO_WIRE
from draft_service.request import Generation
from draft_service.speculation_choice import POLICY_TO_WIRE
from draft_service.statistics import SpeculationCounts, Timings, TokenWatch
from outrider.service.sampling import RULE_TO_WIRE
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2


@dataclass(slots=True)
class Round:
    """A proposal, or a `Decode` of so many tokens.

    Attributes:
        number: counts the sequence's rounds from 1.
        owed: verdicts still to come: one for a proposal, one a token for a `Decode`.
        is_decode: whether the target writes alone.
        draft_tokens: the proposal.
        distributions: what each was drawn from, encoded; empty under `coupled`.
        gamma: the length that was chosen for the proposal; fewer tokens may have come.
        draft_seconds: what drafting took; None for a `Decode`.
        sent: `time.perf_counter()` when it left, or when the last of its verdicts came.
    """

    number: int
    owed: int = 0
    is_decode: bool = False
    draft_tokens: list[int] = field(default_factory=list)
    distributions: list[speculation_pb2.TokenDistribution] = field(default_factory=list)
    gamma: int = 0
    draft_seconds: float | None = None
    sent: float = 0.0


class Sequence:
    """One sample of a request.

    Attributes:
        tokens: prompt and committed output.
        prompt_length: how many of them are the prompt.
        round: the one under way, or the last; number 0 before the first.
        finish_reason: why it ended; unspecified until it has.
        counts: how speculation goes.
        timings: where the time goes.
    """

    def __init__(
        self, request: Generation, index: int = 0, *, arrived: float = 0.0, watch: TokenWatch | None = None
    ) -> None:
        """`arrived` is when the request came, by `time.perf_counter()`; `watch` is told when tokens leave."""
        self.request = request
        self.index = index
        self.id = f"{request.request_id}/{index}"
        self.tokens = [*request.prompt, *request.committed]
        self.prompt_length = len(request.prompt)
        self.round = Round(0)
        self.finish_reason: sampling_pb2.FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED
        self.counts = SpeculationCounts(drafter=KIND_TO_WIRE[request.drafter], policy=POLICY_TO_WIRE[request.policy])
        self.timings = Timings(arrived, watch, failovers=self.counts.failovers)
        self._hash = PrefixHash(self.tokens)

    @property
    def seed(self) -> int:
        return self.request.seed_of(self.index)

    @property
    def left(self) -> int:
        """How many more tokens it may have."""
        return self.request.max_new_tokens - (len(self.tokens) - self.prompt_length)

    @property
    def prefix_hash(self) -> bytes:
        return self._hash.digest()

    def propose(
        self,
        draft_tokens: list[int],
        distributions: list[speculation_pb2.TokenDistribution],
        *,
        gamma: int = 0,
        draft_seconds: float = 0.0,
    ) -> None:
        """Begins a round with a proposal."""
        number = self.round.number + 1
        self.round = Round(number, 1, False, draft_tokens, distributions, gamma, draft_seconds)

    def decode(self, tokens: int) -> None:
        """Begins a round in which the target writes so many tokens alone."""
        self.round = Round(self.round.number + 1, tokens, is_decode=True)

    def commit(self, verdict: speculation_pb2.Verdict) -> None:
        """Takes in the next verdict of the round."""
        self.tokens += verdict.token_ids
        self._hash.extend(verdict.token_ids)
        self.round.owed -= 1
        self.finish_reason = verdict.finish_reason

    def opening(self, *, reopened: bool = False, isolated: bool = False) -> verifier_service_pb2.OpenSequence:
        """The message that opens it at a verifier. Whatever the request left open is said here.

        Args:
            reopened: another verifier has had it before.
            isolated: a step failed with it, so it is to run in steps of its own.
        """
        request, rules = self.request, self.request.sampling.logit_rules
        committed = self.tokens[self.prompt_length :]
        needs = {
            "decode": True,
            "logprobs": request.top_logprobs is not None,
            "penalties": not replace(rules, min_new_tokens=0).is_identity,
            "resume": bool(committed),
            "fixed_rounds": bool(request.round_sizes.response),
        }
        opening = verifier_service_pb2.OpenSequence(
            prompt_token_ids=self.tokens[: self.prompt_length],
            committed_token_ids=committed,
            sampling=request.params,  # with the rule and the seed below, which are ours to choose
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=request.min_new_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            # An older verifier would leave out what it does not know, in silence.
            required_features=[name for name, is_needed in needs.items() if is_needed],
            weights_fingerprint=request.weights_fingerprint,
            cache_salt=request.cache_salt,
            request_id=request.request_id,
            request_bytes=request.round_sizes.request,
            response_bytes=request.round_sizes.response,
            reopened=reopened,
            isolated=isolated,
        )
        opening.sampling.seed = self.seed
        opening.sampling.rule = RULE_TO_WIRE[request.sampling.rule]  # the draft's choice, whatever is the verifier's
        if request.top_logprobs is not None:
            opening.logprobs.top_n = request.top_logprobs
        return opening
