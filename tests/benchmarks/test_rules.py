"""The expected number of accepted tokens, by formula, is the mean of the reference over its uniforms."""

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.rules import EXPECTED, Drafted, write
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule, Uniforms
from outrider.cli.processes import Pair
from outrider.client import AcceptanceRule, Client
from tests.kernels.cases import sparsify
from tests.kernels.reference import verify

V, GAMMA = 6, 3
ALMOST_1 = 1 - 2**-50


@pytest.mark.parametrize("rule", EXPECTED)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_references_mean_over_all_uniforms(rule: str, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(GAMMA + 1, V, generator=source, dtype=torch.float64)
    distributions = sparsify(
        torch.softmax(1.5 * torch.randn(GAMMA, V, generator=source), dim=-1), SparseConfig(max_support=5)
    )
    tokens = tuple(int(q.ids[torch.randint(len(q.ids), (1,), generator=source)]) for q in distributions)
    p = torch.softmax(logits, dim=-1).numpy()
    path = [
        Drafted(float(p[i, x]), q.probability(x), p[i][q.ids], q.weights / q.total)
        for i, (x, q) in enumerate(zip(tokens, distributions, strict=True))
    ]

    def accepted(*u: float) -> int:
        proposed = Proposed(tokens, tuple(distributions), SamplingParams(), 0, 1, Rule(rule), uniforms=Uniforms(u, 0.5))
        return verify(logits, [proposed])[0].accepted

    assert EXPECTED[rule](path) == pytest.approx(mean_over_the_cube(accepted), abs=1e-9)


def mean_over_the_cube(accepted: Callable[..., int]) -> float:
    """The mean of a function of GAMMA uniforms that has at most one step along each of them."""
    cuts = [sorted({0.0, *steps(accepted, axis), 1.0}) for axis in range(GAMMA)]
    cells = itertools.product(*(itertools.pairwise(along) for along in cuts))
    return sum(
        math.prod(high - low for low, high in cell) * accepted(*((low + high) / 2 for low, high in cell))
        for cell in cells
    )


def steps(accepted: Callable[..., int], axis: int) -> Iterator[float]:
    """Where the function steps along an axis; each shows where the others are all lowest, or all highest."""
    for others in (0.0, ALMOST_1):
        at = [others] * GAMMA

        def along(u: float, at: list[float] = at) -> int:
            return accepted(*at[:axis], u, *at[axis + 1 :])

        low, high = 0.0, ALMOST_1
        if along(low) == along(high):
            continue
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if along(middle) == along(0.0) else (low, middle)
        yield high


def test_a_text_is_cut_after_its_rounds(demo_pair: Pair) -> None:
    with Client(demo_pair.address) as client:
        text = write(client, "def mean(values):", 1.0, 4, AcceptanceRule.BLOCK, seed=3, rounds=4)
    assert len(text.rounds) == 4
    assert all(len(each.drafted_token_ids) == 4 for each in text.rounds)
    for before, after in itertools.pairwise(text.rounds):
        base = before.output_length
        assert after.output_length == base + before.accepted + 1
        assert text.output[base : base + before.accepted] == before.drafted_token_ids[: before.accepted]
