"""Triton's kernels against the reference, token for token, over shapes and forms.

For these kernels too, `test_rules` has the edges of each rule, and `test_verify` strides and independent rows.
"""

import ast
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.packed_arrays import Field, PackedArrays
from kernels.sampling import SamplingParams
from kernels.sigmoid import DraftLogits, SigmoidScales
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule, Status, VerifyResult
from tests.kernels.cases import LAST, coupled, gaussian, n_differing, propose, random_batch, sparsify
from tests.kernels.paths import TRITON, verify_by_triton
from tests.kernels.reference import verify as reference
from tests.project.tree import ROOT

pytestmark = TRITON.marks
TILE = 2048  # of vocabularies of up to 2^17


def verified(logits: Tensor, proposals: list[Proposed]) -> list[VerifyResult]:
    """Return results after comparing them with the reference."""
    results = verify_by_triton(logits, proposals)
    assert n_differing(lambda *_: results, reference, logits, proposals) == 0
    return results


@pytest.mark.parametrize(
    ("V", "size", "dtype"),
    [
        *((1, 6, torch.float32), (2, 12, torch.float32), (257, 3, torch.float32), (5003, 4, torch.float32)),
        *((V, 4, torch.float32) for V in (TILE - 1, TILE, TILE + 1)),
        *((70, 4, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    ],
)
def test_triton_agrees_with_the_reference(V: int, size: int, dtype: torch.dtype) -> None:
    """Rules, params, forms of q, lenience and adjustments mixed in one batch."""
    verified(*random_batch(9 if V == 70 else V + 1, V, size, dtype))


@pytest.mark.parametrize("rule", [Rule.BLOCK, Rule.COUPLED])
def test_triton_agrees_with_the_reference_over_a_whole_vocabulary(rule: Rule) -> None:
    """4,096 logits a tile, and a last tile that is not full."""
    z, proposed = _agreeable(rule, 1, 256, 151936, seed=2)
    verified(z.bfloat16(), [proposed])


@pytest.mark.parametrize("tied", [(265, 80), (2047, 80, 2100), (2100, 4000), (80, 265)])
def test_the_lowest_of_equally_likely_tokens_is_taken_at_temperature_0(tied: tuple[int, ...]) -> None:
    """A lane reads tokens 8 to 15, 264 to 271 and so on: token 265 comes before 80 in the order of the lanes."""
    z = torch.zeros(1, 5003)
    z[0, list(tied)] = 5.0
    (result,) = verified(z, [propose((), params=SamplingParams(temperature=0))])
    assert result.next_token == min(tied)


@pytest.mark.gpu
@pytest.mark.parametrize(("V", "size"), [(257, 400), (32000, 200), (50257, 100), (128256, 60), (151936, 60)])
def test_triton_agrees_with_the_reference_at_full_size(V: int, size: int) -> None:
    """At most one result in a hundred may lie so near an edge that float32 takes the neighbour."""
    for dtype in (torch.float32, torch.bfloat16):
        assert n_differing(verify_by_triton, reference, *random_batch(V, V, size, dtype)) <= size // 100 + 1


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK, Rule.COUPLED])
def test_long_proposals_go_on_from_group_to_group(rule: Rule) -> None:
    """γ of 8, 9 and 16, nearly all accepted; K of 1, 17 and 256."""
    made = [_agreeable(rule, gamma, K, V=1100, seed=gamma) for gamma, K in ((8, 1), (9, 17), (16, 256))]
    results = verified(torch.cat([z for z, _ in made]), [proposed for _, proposed in made])
    assert max(each.accepted for each in results) > 8


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK])
def test_all_of_a_large_support_counts(rule: Rule) -> None:
    """256 tokens, of which the kernels read 64 or 32 at a time: tests, β, and tokens drawn from residuals."""
    V, source = 1100, torch.Generator().manual_seed(5)
    z = torch.randn(3, V, generator=source)
    q = tuple(sparsify(torch.softmax(torch.randn(2, V, generator=source), -1), SparseConfig(1.0, 256)))
    grid = [(i + 0.5) / 12 for i in range(12)]
    proposals = [
        propose(tuple(each.token_at(1 - u) for each in q), q, (u, 1 - u), resample=u * 7 % 1, rule=rule) for u in grid
    ]
    assert len({each.accepted for each in verified(z.repeat(12, 1), proposals)}) > 1


def test_residuals_of_the_rule_sigmoid_are_exact_where_its_scores_are_near_1() -> None:
    """All logits far above beta: in float32, q̂ rounds to 1."""
    z = gaussian(3, 2, 64) + 25
    q = DraftLogits((z[0] + gaussian(4, 64)).half())
    z[0, 7] = -20
    proposals = [
        propose((7,), (q,), resample=u, rule=Rule.SIGMOID, sigmoid=SigmoidScales(-0.5, 0.5)) for u in (0.2, 0.5, 0.8)
    ]
    results = verified(z.repeat(3, 1), proposals)
    assert [each.status for each in results] == [Status.OK] * 3


def device_functions() -> Iterator[ast.FunctionDef]:
    """Yield the functions that Triton compiles."""
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in "".join(map(ast.unparse, node.decorator_list)):
                yield node


def test_no_variable_enters_a_loop_as_the_same_value_as_another() -> None:
    """If a loop sets such a variable to the other, Triton does not carry it to the next turn, nor out of the loop. The
    interpreter does, so only this test, or a GPU, shows it.
    """
    found, loops = [], 0
    for function in device_functions():
        nodes = list(ast.walk(function))
        copies = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)]
        for loop in (node for node in nodes if isinstance(node, ast.For | ast.While)):
            names = (node for node in ast.walk(loop) if isinstance(node, ast.Name))
            changed = {node.id for node in names if isinstance(node.ctx, ast.Store)}
            pairs = (ast.unparse(node).split(" = ") for node in copies if node.lineno < loop.lineno)
            found += [(function.name, *pair) for pair in pairs if changed.issuperset(pair)]
            loops += 1
    assert found == []
    assert loops > 10


def _agreeable(rule: Rule, gamma: int, K: int, V: int, seed: int) -> tuple[Tensor, Proposed]:
    """Return rows `[γ+1, V]` and a proposal whose q̂ is near p."""
    source = torch.Generator().manual_seed(seed)
    z = torch.randn(gamma + 1, V, generator=source) * 6
    if rule is Rule.COUPLED:
        alone = [reference(row[None], [coupled((), seed, 50 + i)])[0] for i, row in enumerate(z[:gamma])]
        return z, coupled(tuple(each.next_token for each in alone), seed, 50)
    q = sparsify(torch.softmax(z[:gamma] + torch.randn(gamma, V, generator=source) * 0.1, -1), SparseConfig(1.0, K))
    tokens = tuple(each.token_at(random.Random(seed + i).random()) for i, each in enumerate(q))
    return z, Proposed(tokens, tuple(q), SamplingParams(), seed, 50, rule)


@pytest.mark.gpu
def test_offsets_may_pass_2_to_the_31() -> None:
    V, stride = 1000, 2**29
    z, proposed = _agreeable(Rule.TOKENWISE, 5, 16, V, seed=3)
    far = torch.empty(6 * stride, dtype=torch.bfloat16, device="cuda").view(6, stride)[:, :V]
    far.copy_(z)
    verified(far, [proposed])


def test_filters_keep_or_drop_ties_together() -> None:
    """Five equal logits at the edge of top-k and top-p, in two tiles."""
    V = TILE + 8
    z = torch.full((1, V), -50.0)
    z[0, [3, TILE + 4]] = 2.0
    equal = [0, 5, TILE - 1, TILE, V - 1]
    z[0, equal] = 0.0
    filters = ({"top_k": 3}, {"top_k": 2}, {"top_p": 0.8}, {"top_p": 0.7})
    params = [SamplingParams(**each) for each in filters]
    proposals = [propose(resample=u, params=each) for each in params for u in (0.0, 0.5, LAST)]
    drawn = [each.next_token for each in verify_by_triton(z.expand(12, V), proposals)]
    assert drawn == [each.next_token for each in reference(z.expand(12, V), proposals)]
    assert set(drawn[:3]) & set(equal)
    assert set(drawn[3:6]) == {3, TILE + 4}


def test_searches_find_the_exact_cut() -> None:
    """The mass that top-k leaves; a tile whose best token is the last one kept, by one bit; logits near the lowest."""
    V = TILE + 8
    flat = torch.arange(V) / V
    edge = torch.full((V,), -5.0)
    edge[3], edge[7], edge[TILE + 4] = 1.1, 1.0, 1 + 2**-23
    lowest = torch.full((V,), -3e38)
    rows = ((flat, {"top_k": 10, "top_p": 0.5}), (edge, {"top_k": 2}), (lowest, {"top_p": 0.5}))
    draws = [(z, propose(resample=u, params=SamplingParams(**each))) for z, each in rows for u in (0.0, 0.4, LAST)]
    tokens = [each.next_token for each in verified(torch.stack([z for z, _ in draws]), [each for _, each in draws])]
    assert tokens[:6] == [V - 5, V - 3, V - 1, 3, 3, TILE + 4]


def test_arrays_of_one_buffer_are_aligned_and_do_not_overlap() -> None:
    """On edges of 16 bytes, for which kernels are compiled."""
    fields = {"odd": Field(np.int32, (3,)), "none": Field(np.float32, (0, 5)), "wide": Field(np.float64, (5,))}
    packed = PackedArrays(fields)
    buffer = packed.buffer(torch.device("cpu"))
    for number, array in enumerate(packed.arrays(buffer).values()):
        array[...] = number
    for number, tensor in enumerate(packed.tensors(buffer).values()):
        assert (tensor == number).all()
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0


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
