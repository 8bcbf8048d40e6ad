"""Parameters at the ends of their ranges give a distribution in float32, those beyond are refused; the default rule."""

import math
import random
from typing import Any

import pytest
import torch

from kernels.adjustments import Adjuster, apply
from kernels.sampling import Draw, bad_rows, probabilities, sample
from kernels.sigmoid import draft_logits
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule, Status
from outrider.rpc.errors import RequestError
from outrider.service.sampling import DEFAULT_RULE, RULE_TO_WIRE, RULES, Sampling, check_sampling
from protos.outrider.v1 import sampling_pb2
from tests.kernels.paths import HOST, verify

V, GAMMA = 24, 2
PROMPT, DRAFTED = [1, 2, 3, 3], (5, 3)

ENDS: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1e-6, 1.0, 100.0),
    "top_p": (1e-38, 1.0),
    "min_p": (0.0, 1e-38, 1.0),
    "repetition_penalty": (0.01, 1.0, 100.0),
    "presence_penalty": (-100.0, 0.0, 100.0),
    "frequency_penalty": (-100.0, 0.0, 100.0),
    "lenience": (1e-6, 1.0),
}
SCALES = ((-1e6, 1e6), (0.0, 1e-3), (-1e-3, 0.0), (1e6 - 1, 1e6), (-1e6, 1 - 1e6))
BEYOND: list[dict[str, Any]] = [
    {"temperature": 9e-7},
    {"temperature": 101},
    {"top_p": 0},
    {"repetition_penalty": 0.0099},
    {"frequency_penalty": -3e38},
    {"lenience": 9e-7},
    {"lenience": 0.5, "rule": sampling_pb2.ACCEPTANCE_RULE_BLOCK},
    {"logit_bias": [sampling_pb2.LogitBias(token_id=1, bias=3e38)]},
    {"rule": sampling_pb2.ACCEPTANCE_RULE_SIGMOID, "sigmoid": sampling_pb2.SigmoidScales(alpha=-3e38, beta=3e38)},
    {"rule": sampling_pb2.ACCEPTANCE_RULE_SIGMOID, "sigmoid": sampling_pb2.SigmoidScales(alpha=0, beta=9e-4)},
]


def checked(**fields: Any) -> Sampling:
    params = sampling_pb2.SamplingParams(**fields)
    return check_sampling(params, vocab_size=V, rules=RULES.values(), default_rule=DEFAULT_RULE)


def at_some_ends(rng: random.Random) -> Sampling:
    """Each number at an end of its range, as the wire rounds it."""
    rule = rng.choice(sorted(RULES.values(), key=lambda rule: rule.value))
    fields: dict[str, Any] = {name: rng.choice(ends) for name, ends in ENDS.items()}
    if rule in (Rule.BLOCK, Rule.COUPLED):
        fields["lenience"] = 1.0
    if rule is Rule.SIGMOID:
        alpha, beta = rng.choice(SCALES)
        fields["sigmoid"] = sampling_pb2.SigmoidScales(alpha=alpha, beta=beta)
    bias = [sampling_pb2.LogitBias(token_id=token, bias=rng.choice((-100, 100))) for token in range(0, V, 3)]
    return checked(**fields, logit_bias=bias, rule=RULE_TO_WIRE[rule])


def extreme_logits(rng: random.Random, rows: int) -> torch.Tensor:
    values = [-1e4, -1.0, 0.0, 1e-6, 1.0, 9999.0, 1e4]
    return torch.tensor([[rng.choice(values) for _ in range(V)] for _ in range(rows)])


def round_of(sampling: Sampling, rng: random.Random) -> tuple[torch.Tensor, Proposed]:
    """A proposal from extreme logits, and the logits of the target."""
    adjuster = Adjuster(sampling.logit_rules, PROMPT, V)
    rows = [adjuster.row()]
    for token in DRAFTED:
        adjuster.push(token)
        rows.append(adjuster.row())
    drafted = apply(extreme_logits(rng, GAMMA), rows[:GAMMA])
    assert not bad_rows(drafted).any()
    assert torch.isfinite(probabilities(drafted, sampling.params)).all()
    samples = sample(drafted, [Draw(sampling.params, rng.random()) for _ in range(GAMMA)], SparseConfig())
    q: Any = [each.q for each in samples]
    if sampling.rule is Rule.COUPLED:
        q = ()
    elif sampling.needs_logits:
        q = draft_logits(drafted, sampling.params)
    proposed = Proposed(
        tokens=tuple(each.token for each in samples),
        q=tuple(q),
        params=sampling.params,
        seed=rng.randrange(1 << 32),
        base_length=len(PROMPT),
        rule=sampling.rule,
        lenience=sampling.lenience,
        adjustments=tuple(rows),
        sigmoid=sampling.sigmoid,
    )
    return extreme_logits(rng, GAMMA + 1), proposed


@pytest.mark.parametrize("path", HOST)
def test_every_number_within_its_range_gives_a_distribution(path: str) -> None:
    rng = random.Random(7)
    logits, proposals = zip(*(round_of(at_some_ends(rng), rng) for _ in range(150)), strict=True)
    for proposed, result in zip(proposals, verify(torch.cat(logits), proposals, path), strict=True):
        assert result.status is not Status.BAD_LOGITS, proposed
        assert all(0 <= beta <= 1 + 1e-5 for beta in result.beta if not math.isnan(beta)), proposed


@pytest.mark.parametrize("fields", BEYOND, ids=str)
def test_a_number_beyond_its_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        checked(**fields)
    assert caught.value.reason == "INVALID_FIELD"
    assert next(iter(fields.keys() - {"rule"})) in caught.value.metadata["field"]


def test_the_default_rule_is_block_or_with_lenience_tokenwise() -> None:
    assert checked().rule is DEFAULT_RULE is Rule.BLOCK
    assert checked(lenience=0.5).rule is Rule.TOKENWISE
