"""Requests, sequences and judged rounds as the draft service holds them, made without a call."""

from dataclasses import replace
from functools import cache
from typing import Any

from draft_service.cost_model import JudgedRound
from draft_service.drafters.base import DrafterKind, DraftSequence
from draft_service.privacy import RoundSizes
from draft_service.request import CheckedRequest, PolicyKind, Speculation
from draft_service.sequence import Sequence
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.verify import Rule
from outrider.service.fitted_cost import CostLine
from outrider.service.sampling import Sampling
from protos.outrider.v1 import draft_service_pb2

STEP_COST = CostLine(0.008, 0.0003)
_OF_DRAFT = frozenset({"seed_is_fresh", "draft_temperature", "max_entropy", "tokens_per_pass"})
_OF_SPECULATION = frozenset({"policy", "gamma", "first_gamma", "drafter", "chooses_tokens_per_pass"})


def generation(rule: Rule = Rule.COUPLED, *, temperature: float = 1.0, seed: int = 7, **fields: Any) -> CheckedRequest:
    message = draft_service_pb2.GenerateRequest(ignore_eos=True)
    message.sampling.temperature = temperature
    params, rules = SamplingParams(temperature=temperature), LogitRules()
    drawn = DraftSequence([1, 2, 3], [], params, rules, seed, rule, seed_is_fresh=True)
    of_draft = {name: fields.pop(name) for name in list(fields) if name in _OF_DRAFT}
    drafting = Speculation(PolicyKind.ADAPTIVE, gamma=12, first_gamma=5, drafter=DrafterKind.MODEL)
    of_speculation = {name: fields.pop(name) for name in list(fields) if name in _OF_SPECULATION}
    plain = CheckedRequest(
        message=message,
        request_id="r",
        prompt=[1, 2, 3],
        committed=[],
        sampling=Sampling(params, rules, rule, 1.0, seed),
        draft_sequence=replace(drawn, **of_draft),
        max_new_tokens=64,
        stop=(),
        samples=1,
        top_logprobs=None,
        time_limit=None,
        speculation=replace(drafting, **of_speculation),
        report_rounds=False,
        emission=None,
        round_sizes=RoundSizes(),
    )
    return replace(plain, **fields)


def record(rule: Rule = Rule.COUPLED, **fields: Any) -> Sequence:
    return Sequence(generation(rule, **fields))


@cache
def judged(gamma: int, accepted: int, active: int = 1) -> JudgedRound:
    """A round: 1 ms for each drafted token, 1 ms of round trip, and a step of all active sequences."""
    tokens = active * (gamma + 1)
    step = STEP_COST.seconds(tokens)
    overhead = 0.001 * (gamma + 1) if gamma else None
    seconds = step + (overhead or 0.0)
    return JudgedRound(
        gamma, gamma, min(gamma, accepted + 1), accepted, (), overhead, step, STEP_COST, active, tokens, active,
        seconds, 0.001 * gamma,
    )  # fmt: skip
