"""Our rules in the place of transformers' `_speculative_sampling` keep the target's distribution."""

import numpy as np
import pytest
import torch

from benchmarks.verification import SAMPLES
from outrider.evaluation import chisquare

V, GAMMA, ROUNDS, LEVEL = 3, 2, 2500, 0.001


@pytest.mark.parametrize("arm", ["tokenwise", "block"])
def test_they_sample_from_the_target(arm: str) -> None:
    """2,500 texts of three tokens; a total variation of 0.09 is seen with a power of 95 %.

    What a round leaves of a text is drawn from the target, as later rounds would.
    """
    generator = torch.Generator().manual_seed(2)
    p, q = torch.randn(1, GAMMA + 1, V, generator=generator), torch.randn(1, GAMMA, V, generator=generator)
    drafted = torch.multinomial(q[0].softmax(-1), ROUNDS, replacement=True, generator=generator).T
    texts = torch.multinomial(p[0].softmax(-1), ROUNDS, replacement=True, generator=generator).T
    for nth, (tokens, text) in enumerate(zip(drafted, texts, strict=True)):
        torch.default_generator.manual_seed(nth)  # torch.manual_seed takes longer than the rest of the round
        ids = torch.cat([torch.zeros(3, dtype=torch.int64), tokens])[None]
        written, accepted = SAMPLES[arm](ids, q, GAMMA, p)
        assert written.shape == (1, int(accepted) + 1)
        assert torch.equal(written[0, :-1], tokens[: int(accepted)])
        text[: len(written[0])] = written[0]
    seen = np.bincount((texts @ torch.tensor([V**2, V, 1])).numpy(), minlength=V**3)
    first, second, third = p[0].double().softmax(-1)  # rows do not depend on drafted tokens
    fit = chisquare.goodness_of_fit(seen, torch.einsum("i,j,k->ijk", first, second, third).flatten().numpy())
    assert chisquare.detectable(fit.df, fit.n, level=LEVEL, power=0.95) <= 0.09
    assert fit.p_value > LEVEL, str(fit)
