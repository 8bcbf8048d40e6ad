"""The rules beside `tokenwise`, through both services over gRPC: the first three tokens against exact enumeration.

As `test_first_tokens`, which has the derivation: 448 texts at γ = 4, over the 27 rank classes, notice a total
variation of 0.16 at a level of 1 % with a power of 95 %, and ten times as many (`-m slow`) one of 0.05. That the rules
are exact is proven by enumeration beside the kernels; here it is that the services carry them.
"""

from __future__ import annotations

import pytest

from outrider.client import AcceptanceRule, Client, Started
from tests.exactness import chisquare, sampling
from tests.exactness.worlds import FILTERS, FirstTokens, World

PROMPT = (15, 12, 14)
SAMPLES = 7 * sampling.SAMPLES_PER_REQUEST
LEVEL = 0.01


@pytest.mark.parametrize(
    ("samples", "distance"), [(SAMPLES, 0.16), pytest.param(10 * SAMPLES, 0.05, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("rule", "seed"), [("block", 300), ("coupled", 500)])
def test_the_law_of_the_first_three_tokens_is_the_targets(
    rule: str, seed: int, samples: int, distance: float, attentive: World
) -> None:
    law = FirstTokens.of(attentive.target, PROMPT)
    run = sampling.sample(
        attentive.services["uniform"].address,
        PROMPT,
        length=5,
        samples=samples,
        filters=FILTERS,
        gamma=4,
        seed=seed,
        rule=rule,
    )
    tokens = run.tokens[:, :3]
    outcomes, classes = law.outcomes(tokens), law.by_class(tokens)
    print(f"{run}\noutcomes: {outcomes}\nclasses:  {classes}")
    assert 0.1 * run.drafted < run.accepted < 0.9 * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


def test_the_rule_is_the_one_asked_for(attentive: World) -> None:
    with Client(attentive.services["uniform"].address) as client:
        for rule in (AcceptanceRule.BLOCK, AcceptanceRule.TOKENWISE):
            events = list(client.generate(PROMPT, max_new_tokens=2, seed=1, rule=rule))
            assert [event.rule for event in events if isinstance(event, Started)] == [rule]
