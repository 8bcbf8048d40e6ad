"""Triton's kernels against the oracle, token for token, over shapes, strides and forms; and that no row sees another.

The edges of each rule are in `test_rule`, `test_block`, `test_coupled` and `test_sigmoid`, for these kernels too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adjustments import Adjuster, LogitRules
from kernels.sampling import Draw, SamplingParams, sample
from kernels.sparse import SparseConfig, sparsify
from kernels.verify import Proposed, Rule, Status, Uniforms
from tests.kernels.capturable import OnlyCapturable
from tests.kernels.cases import differing, law_of, proposed_of, random_batch
from tests.kernels.paths import IS_INTERPRETED, TRITON, verify_by_triton
from tests.kernels.reference import verify as oracle

pytestmark = TRITON.marks
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
TILE = 1024  # of vocabularies of up to 2^15


@pytest.mark.parametrize(
    ("V", "size"),
    [(1, 6), (2, 12), (257, 3), (TILE - 1, 4), (TILE, 4), (TILE + 1, 4), (5003, 4)],
)
def test_rules_as_the_oracle_does(V: int, size: int) -> None:
    """Rules, laws, forms of q, lenience and adjustments mixed in one batch."""
    logits, proposals = random_batch(seed=V + 1, V=V, size=size)
    assert differing(verify_by_triton, oracle, logits, proposals) == 0


@pytest.mark.parametrize("V", [50257, 151936])
def test_rules_as_the_oracle_does_over_a_whole_vocabulary(V: int) -> None:
    """One draft under two rules: 2,048 and 4,096 logits a tile, and a last tile that is not full."""
    for rule in (Rule.BLOCK, Rule.COUPLED):
        z, proposed = _agreeable(rule, 1, 256, V, seed=2)
        assert differing(verify_by_triton, oracle, z.bfloat16(), [proposed]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_takes_logits_of_any_dtype(dtype: torch.dtype) -> None:
    logits, proposals = random_batch(seed=9, V=70, size=4, dtype=dtype)
    assert differing(verify_by_triton, oracle, logits, proposals) == 0


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK, Rule.COUPLED])
def test_long_proposals_go_on_from_group_to_group(rule: Rule) -> None:
    """γ of 8, 9 and 16, nearly all accepted; K of 1, 17 and 256."""
    proposals, rows = [], []
    for gamma, K in ((8, 1), (9, 17), (16, 256)):
        z, proposed = _agreeable(rule, gamma, K, V=1100, seed=gamma)
        rows.append(z)
        proposals.append(proposed)
    results = verify_by_triton(torch.cat(rows), proposals)
    assert differing(lambda *_: results, oracle, torch.cat(rows), proposals) == 0
    assert max(each.accepted for each in results) > 8


def _agreeable(rule: Rule, gamma: int, K: int, V: int, seed: int) -> tuple[Tensor, Proposed]:
    """Return rows `[γ+1, V]` and a proposal whose q̂ is near p."""
    source = torch.Generator().manual_seed(seed)
    z = torch.randn(gamma + 1, V, generator=source) * 6
    if rule is Rule.COUPLED:
        (alone,) = zip(*(oracle(row[None], [_coupled(seed, 50 + i)]) for i, row in enumerate(z[:gamma])), strict=True)
        return z, replace(_coupled(seed, 50), tokens=tuple(each.next_token for each in alone))
    laws = sparsify(torch.softmax(z[:gamma] + torch.randn(gamma, V, generator=source) * 0.1, -1), SparseConfig(1.0, K))
    tokens = tuple(law.token_at(random.Random(seed + i).random()) for i, law in enumerate(laws))
    return z, Proposed(tokens, tuple(laws), SamplingParams(), seed, 50, rule)


def _coupled(seed: int, base_length: int) -> Proposed:
    return Proposed((), (), SamplingParams(), seed, base_length, Rule.COUPLED)


# ----------------------------------------------------------------------------------------------------------- strides


def test_rows_may_lie_anywhere() -> None:
    """Padded with NaN, every other row of a larger tensor, one row for all, and columns apart."""
    logits, proposals = random_batch(seed=5, V=64, size=3)
    expected = verify_by_triton(logits, proposals)
    padded = torch.full((2 * len(logits), 80), math.nan)
    padded[::2, :64] = logits
    assert verify_by_triton(padded[::2, :64], proposals) == expected
    assert verify_by_triton(logits.t().contiguous().t(), proposals) == expected
    one = logits[:1].expand(len(logits), 64)
    assert verify_by_triton(one, proposals) == verify_by_triton(one.contiguous(), proposals)


@pytest.mark.gpu
def test_offsets_may_pass_2_to_the_31() -> None:
    V, stride = 1000, 2**29
    z, proposed = _agreeable(Rule.TOKENWISE, 5, 16, V, seed=3)
    far = torch.empty(6 * stride, dtype=torch.bfloat16, device="cuda").view(6, stride)[:, :V]
    far.copy_(z)
    assert differing(verify_by_triton, oracle, far, [proposed]) == 0


# -------------------------------------------------------------------------------------------------- supports and edges


def test_a_residual_may_lie_across_tiles() -> None:
    """The support covers the edge of two tiles and of strips; every token of the residual is drawn by its mass."""
    V = 2 * TILE + 3
    z = torch.full((2, V), -math.inf)
    ids = [0, 63, 64, TILE - 1, TILE, TILE + 64, 2 * TILE - 1, 2 * TILE, V - 1]
    z[:, ids] = torch.linspace(-1, 1, len(ids))
    law = law_of({token: 3 + 4 * (i % 3) for i, token in enumerate(ids)})
    N = 24
    proposals = [proposed_of((V,), (law,), resample=(n + 0.5) / N) for n in range(N)]  # outside V: never accepted
    results = verify_by_triton(z.repeat(N, 1), proposals)
    assert differing(lambda *_: results, oracle, z.repeat(N, 1), proposals) == 0
    assert len({each.next_token for each in results}) > 3


def test_a_stratified_sweep_counts_every_outcome_to_within_one() -> None:
    """48 evenly spaced uniforms over a law that lies in three tiles."""
    N, V = 48, 2 * TILE + 40
    z = torch.full((1, V), -30.0)
    z[0, ::97] = torch.randn(len(z[0, ::97]), generator=torch.Generator().manual_seed(2)) * 2
    proposals = [proposed_of((), (), resample=(n + 0.5) / N) for n in range(N)]
    drawn = [each.next_token for each in verify_by_triton(z.expand(N, V), proposals)]
    counts = np.bincount(drawn, minlength=V)
    assert np.abs(counts - N * torch.softmax(z[0].double(), -1).numpy()).max() < 1.0
    assert drawn == sorted(drawn)


def test_ties_at_the_cuts_share_their_fate() -> None:
    """Five equal logits at the edge of top-k and top-p, in two tiles: all stay, or none."""
    V = TILE + 8
    z = torch.full((1, V), -50.0)
    z[0, [3, TILE + 4]] = 2.0
    equal = [0, 5, TILE - 1, TILE, V - 1]
    z[0, equal] = 0.0
    laws = (SamplingParams(top_k=3), SamplingParams(top_k=2), SamplingParams(top_p=0.8), SamplingParams(top_p=0.7))
    grid = [0.0, 0.3, 0.7, 1 - 2**-53]
    proposals = [proposed_of((), (), resample=u, law=law) for law in laws for u in grid]
    drawn = [each.next_token for each in verify_by_triton(z.expand(16, V), proposals)]
    assert drawn == [each.next_token for each in oracle(z.expand(16, V), proposals)]
    assert set(drawn[:4]) & set(equal)
    assert set(drawn[4:8]) == {3, TILE + 4}


@pytest.mark.parametrize("lenience", [1.0, 0.5])
def test_the_largest_logit_may_lie_in_any_tile(lenience: float) -> None:
    """At temperature 0; of equals in several tiles the lowest id."""
    V = 2 * TILE + 9
    z = torch.randn(4, V, generator=torch.Generator().manual_seed(8))
    best = [TILE + 7, 2 * TILE + 8, TILE - 1, TILE]
    for row, token in enumerate(best):
        z[row, token] = 9.0
    z[2, [TILE, 2 * TILE]] = 9.0
    greedy = proposed_of(tuple(best[:3]), (None, None, None), law=SamplingParams(temperature=0), lenience=lenience)
    (result,) = verify_by_triton(z, [greedy])
    assert (result.accepted, result.next_token, result.beta) == (3, best[3], (1.0, 1.0, 1.0))
    (other,) = verify_by_triton(z, [replace(greedy, tokens=(best[0], best[1] - 1, 0))])
    assert (other.accepted, other.next_token) == (1, best[1])


def test_many_changes_of_a_row_lie_in_every_tile() -> None:
    """A repetition penalty on a third of the vocabulary, bans on both sides of an edge, and biases."""
    V = 2 * TILE + 5
    banned = (0, TILE - 1, TILE, V - 1)
    rules = LogitRules(repetition_penalty=1.7, logit_bias=((TILE + 1, 9.0),), banned_tokens=banned)
    adjuster = Adjuster(rules, range(0, V, 3), V)
    z = torch.randn(3, V, generator=torch.Generator().manual_seed(6)) * 3
    laws = sparsify(torch.softmax(z[:2], -1), SparseConfig(1.0, 200))
    proposed = proposed_of((TILE + 1, 5), (laws[0], laws[1]), accept=(0.0, 0.0), top_logprobs=2)
    adjusted = replace(proposed, adjustments=(adjuster.row(), None, adjuster.row()))
    for uniforms in (Uniforms((0.0, 0.0), 0.4), Uniforms((0.0, 1 - 2**-53), 0.9)):
        assert differing(verify_by_triton, oracle, z, [replace(adjusted, uniforms=uniforms)]) == 0


# --------------------------------------------------------------------------------------------------------- invariance


def test_no_row_sees_another() -> None:
    """Neither the batch's order nor its parts, nor what lies past a rejection, change a result."""
    logits, proposals = random_batch(seed=4, V=97, size=3)
    together = verify_by_triton(logits, proposals)
    starts = np.cumsum([0, *(each.gamma + 1 for each in proposals)])
    rows = [logits[a:b] for a, b in pairwise(starts)]
    for part in ([2, 0], [1]):
        told = verify_by_triton(torch.cat([rows[i] for i in part]), [proposals[i] for i in part])
        assert told == [together[i] for i in part]
    for own, proposal, result in zip(rows, proposals, together, strict=True):
        if proposal.rule is not Rule.BLOCK:  # which looks past a failure, as long as the block can grow
            own[result.accepted + 1 :] = math.nan
    assert verify_by_triton(torch.cat(rows), proposals) == together


def test_a_batch_may_have_no_drafts_at_all() -> None:
    z = torch.zeros(2, 5)
    z[1, 3] = math.nan
    good, bad = verify_by_triton(z, [proposed_of((), ())] * 2)
    assert (good.status, good.accepted, good.beta, bad.status) == (Status.OK, 0, (), Status.BAD_LOGITS)


def test_gumbel_max_is_what_a_coupled_draft_draws_on_the_host() -> None:
    """At several temperatures, positions that overflow 32 bits soon, and every seed; a row of NaN gives some token."""
    B, V = 40, 1500
    laws = [SamplingParams(temperature=each) for each in (0.0, 0.3, 1.0, 2.0)] * 10
    seeds, positions = [2**64 - 1 - b for b in range(B)], [0, 5, 9, 2**32 - 3, 700] * 8
    z = torch.randn(B, V, generator=torch.Generator().manual_seed(6)) * 3
    draws = [Draw(law, noise=place) for law, place in zip(laws, zip(seeds, positions, strict=True), strict=True)]
    expected = [each.token for each in sample(z, draws, SparseConfig())]
    z[2, 7] = math.nan
    drawn = _gumbel_max(z, laws, seeds, positions).tolist()
    assert 0 <= drawn[2] < V
    assert drawn[:2] + drawn[3:] == expected[:2] + expected[3:]


def test_gumbel_max_may_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read back, and no shape follows from what tensors hold."""
    from kernels import verify_triton

    class Nothing:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **constants: None

    monkeypatch.setattr(verify_triton, "stats_kernel", Nothing())
    z = torch.zeros(3, 1500, device=DEVICE)
    numbers = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with OnlyCapturable() as operations:
        verify_triton.gumbel_max(z, numbers.double(), numbers, numbers)
    assert {"masked_fill", "argmax", "gather"} <= set(operations.seen)


def _gumbel_max(z: Tensor, laws: list[SamplingParams], seeds: list[int], positions: list[int]) -> Tensor:
    from kernels.verify_triton import gumbel_max

    temperatures = torch.tensor([law.temperature for law in laws], dtype=torch.float64, device=DEVICE)
    words = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds], device=DEVICE)
    return gumbel_max(z.to(DEVICE), temperatures, words, torch.tensor(positions, device=DEVICE))


@pytest.mark.gpu
def test_a_graph_replayed_twice_gives_what_eager_gives() -> None:
    from kernels.verify_triton import prepare

    first, proposals = random_batch(seed=12, V=5003, size=40)
    second, _ = random_batch(seed=13, V=5003, size=40)
    second = second[: len(first)].repeat(2, 1)[: len(first)]
    expected = [verify_by_triton(each, proposals) for each in (first, second)]
    held = first.cuda()
    launch = prepare(held, proposals)
    launch.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for each, wanted in zip((first, second, first), (*expected, expected[0]), strict=True):
        held.copy_(each)
        for _ in range(2):
            graph.replay()
            assert launch.results() == wanted


@pytest.mark.gpu
@pytest.mark.parametrize(("V", "size"), [(257, 400), (32000, 200), (50257, 100), (128256, 60), (151936, 60)])
def test_rules_as_the_oracle_does_at_full_size(V: int, size: int) -> None:
    """At most one result in a hundred may lie so near an edge that float32 takes the neighbour."""
    for dtype in (torch.float32, torch.bfloat16):
        logits, proposals = random_batch(seed=V, V=V, size=size, dtype=dtype)
        assert differing(verify_by_triton, oracle, logits, proposals) <= size // 100 + 1
