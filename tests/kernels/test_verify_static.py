"""A launch that is filled again and again rules as a fresh one does, bit for bit, and launches the same each time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import coupled
from kernels.adjustments import RowAdjustment
from kernels.dense import DenseLaw
from kernels.distribution import SamplingLaw
from kernels.ruling import Proposed, Rule, Ruling, Status, Uniforms
from kernels.sparse import SparseConfig, sample, sparsify
from kernels.verify_reference import verify as oracle
from tests.kernels.capturable import OnlyCapturable
from tests.kernels.cases import differing, law_of, proposed_of
from tests.kernels.paths import IS_INTERPRETED, TRITON, verify_by_triton

pytestmark = TRITON.marks
pytest.importorskip("triton", reason="triton has no build for this platform")

from kernels import verify_static, verify_triton  # noqa: E402
from kernels.verify_static import StaticLaunch  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
V = 97
KINDS = ("tokenwise", "lenient", "block", "coupled", "greedy", "lenient greedy")


def _proposal(
    source: random.Random, generator: torch.Generator, kind: str, gamma: int, K: int
) -> tuple[Tensor, Proposed]:
    """Return rows `[γ+1, V]` and a plain proposal with q̂ of K tokens at most, now and then with its own uniforms."""
    z = torch.randn(gamma + 1, V, generator=generator) * 2
    laws = sparsify(
        torch.softmax(z[:gamma] + torch.randn(gamma, V, generator=generator) * 0.5, -1), SparseConfig(1.0, K)
    )
    tokens = tuple(sample(law, source.random()) for law in laws)
    if kind in ("coupled", "greedy", "lenient greedy"):  # that the walk goes on
        tokens = tuple(int(row.argmax()) if source.random() < 0.7 else x for row, x in zip(z, tokens, strict=False))
    q = tuple(None if source.random() < 0.2 else law for law in laws)
    uniforms = Uniforms(tuple(source.random() for _ in tokens), source.random()) if source.random() < 0.5 else None
    return z, Proposed(
        tokens,
        () if kind == "coupled" else q,
        SamplingLaw(0.0 if "greedy" in kind else source.choice((0.7, 1.0, 1.5))),
        source.getrandbits(64),
        source.randrange(1000),
        {"block": Rule.BLOCK, "coupled": Rule.COUPLED}.get(kind, Rule.TOKENWISE),
        0.5 if "lenient" in kind else 1.0,
        top_logprobs=source.choice((-1, -1, 2)),
        uniforms=uniforms,
    )


def _batch(seed: int, gammas: Sequence[int], K: int = 16) -> tuple[Tensor, list[Proposed]]:
    """Return logits and a proposal for each of `gammas`, all kinds in turn."""
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    made = [_proposal(source, generator, KINDS[(seed + b) % 6], gamma, K) for b, gamma in enumerate(gammas)]
    return torch.cat([torch.empty(0, V), *(z for z, _ in made)]), [proposal for _, proposal in made]


def _launch(sequences: int, drafts: int, support: int = 16, **options: Any) -> tuple[Tensor, StaticLaunch]:
    """Return storage for logits, NaN throughout and wider than V, and a launch over it."""
    storage = torch.full((sequences + drafts, V + 3), math.nan, device=DEVICE)
    return storage, StaticLaunch(storage[:, :V], sequences=sequences, drafts=drafts, support=support, **options)


def _judge(storage: Tensor, launch: StaticLaunch, logits: Tensor, proposals: Sequence[Proposed]) -> list[Ruling]:
    storage[: len(logits), :V] = logits.to(storage.device)
    launch.fill(proposals)
    launch.run()
    return launch.fetch().rulings()


# Fewer and fewer, then another full one.
FILLINGS = ((0, 3, 1, 4, 2, 3), (4, 0, 2), (1,), (0, 0), (), (2, 1, 4, 0, 3, 3))


@pytest.mark.parametrize(("K", "fillings"), [(16, FILLINGS), (40, FILLINGS[:2])])
def test_each_filling_is_judged_as_by_a_fresh_launch(K: int, fillings: Sequence[tuple[int, ...]]) -> None:
    """All rules in one launch, γ of 0 to 4; rows past the batch hold NaN at first, and what was judged before then."""
    storage, launch = _launch(6, 13, K)
    rulings: list[Ruling] = []
    for turn, gammas in enumerate(fillings):
        logits, proposals = _batch(turn, gammas, K)
        found = _judge(storage, launch, logits, proposals)
        assert found == (verify_by_triton(logits, proposals) if proposals else [])
        assert differing(lambda *_, found=found: found, oracle, logits, proposals) == 0
        rulings += found
    assert max(each.accepted for each in rulings) > 2
    assert any(each.logprobs for each in rulings)


@pytest.fixture(scope="module")
def judged() -> tuple[Tensor, list[Proposed], list[Ruling]]:
    """A batch that looks at every array, and what becomes of it."""
    logits, proposals = _batch(6, (4, 4, 4, 1))
    return logits, proposals, verify_by_triton(logits, proposals)


# A sequence left over writes its β over another's; which of them writes last is certain in the interpreter alone.
_LEFT = ("row_sequence", "draft_ints", "draft_q", "support_ids", "support_q", "uniforms")


@pytest.mark.parametrize("left", [None, *_LEFT, *(["ints"] if IS_INTERPRETED else [])])
def test_what_is_left_of_an_earlier_filling_would_be_noticed(
    left: str | None, judged: tuple[Tensor, list[Proposed], list[Ruling]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation of each array: it stays as it was. Of `ints` only past the proposals, so that others are judged on."""
    whole = verify_static._write

    def forgetful(staged: dict[str, np.ndarray], arrays: dict[str, np.ndarray], nobody: dict[str, np.ndarray]) -> None:
        kept = {name: array.copy() for name, array in staged.items()}
        whole(staged, arrays, nobody)
        if left is not None:
            begin = len(arrays["ints"]) if left == "ints" else 0
            staged[left][begin:] = kept[left][begin:]

    storage, launch = _launch(6, 14)
    for seed in (7, 8):  # so that each of the two buffers on the host holds an earlier one
        launch.fill(_batch(seed, (1, 1, 1, 1, 4, 4))[1])
    monkeypatch.setattr(verify_static, "_write", forgetful)
    logits, proposals, expected = judged
    assert (_judge(storage, launch, logits, proposals) == expected) is (left is None)


def test_results_are_kept_until_the_second_filling_after() -> None:
    storage, launch = _launch(2, 4)
    logits, proposals = _batch(2, (3, 1))
    storage[: len(logits), :V] = logits.to(DEVICE)
    proposals = [replace(each, top_logprobs=-1) for each in proposals]
    launch.fill(proposals)
    launch.run()
    first = launch.fetch()
    assert _judge(storage, launch, *_batch(5, (0, 2))) == verify_by_triton(*_batch(5, (0, 2)))
    assert first.rulings() == verify_by_triton(logits, proposals)
    launch.fill(())
    with pytest.raises(RuntimeError, match="filling 2 is asked for after filling 4"):
        first.rulings()


# ------------------------------------------------------------------------------------------------------ what fits


def _dense(gamma: int) -> Proposed:
    return proposed_of((0,) * gamma, (DenseLaw(torch.full((V,), 1 / V)),) * gamma)


_BAN = RowAdjustment(np.array([3]), np.ones(1, np.float32), np.full(1, -math.inf, np.float32))
_MISFITS: list[tuple[list[Proposed], str]] = [
    ([proposed_of((), ())] * 4, "4 sequences, where there is room for 3"),
    ([proposed_of((1,) * 6, (None,) * 6)], "6 drafts, where there is room for 5"),
    ([proposed_of((1,) * 5, (None,) * 5), *[proposed_of((), ())] * 2], "8 rows, where there is room for 7"),
    ([proposed_of((), (), law=SamplingLaw(top_p=0.9))], "proposal 0 has filters: top_k 0, top_p 0.9, min_p 0.0"),
    ([replace(proposed_of((), ()), adjustments=(_BAN,))], "proposal 0 has adjustments"),
    ([proposed_of((), ()), _dense(1)], r"q\[0\] of proposal 1 goes over the whole vocabulary"),
    (
        [proposed_of((1,), (law_of(dict.fromkeys(range(5), 1)),))],
        r"q\[0\] of proposal 0 has 5 tokens, where there is room for 4",
    ),
    (
        [Proposed((1,), (), SamplingLaw(), 0, 0, Rule.COUPLED)],
        "proposal 0 is coupled, and the launch was made without races",
    ),
    ([proposed_of((1,), ())], "proposal 0 has 1 tokens and 0 draft laws"),
]


@pytest.mark.parametrize(("proposals", "named"), _MISFITS)
def test_what_does_not_fit_is_named(proposals: list[Proposed], named: str) -> None:
    storage = torch.zeros(7, V, device=DEVICE)
    launch = StaticLaunch(storage, sequences=3, drafts=5, support=4, races=False)
    with pytest.raises(ValueError, match=named):
        launch.fill(proposals)
    assert launch.refusal(proposals) is not None or "draft laws" in named


def test_what_changes_nothing_fits() -> None:
    """Filters and noise at temperature 0, adjustments of no row, a rule with nothing to judge."""
    storage = torch.zeros(7, V, device=DEVICE)
    launch = StaticLaunch(storage, sequences=3, drafts=5, support=4, races=False)
    greedy = proposed_of((1,), (None,), law=SamplingLaw(0.0, top_k=3))
    empty = RowAdjustment(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32))
    assert launch.refusal([greedy, replace(greedy, q=(), rule=Rule.COUPLED)]) is None
    assert launch.refusal([replace(greedy, adjustments=(None, empty))]) is None
    assert launch.refusal([proposed_of((1,) * 4, (law_of(dict.fromkeys(range(4), 1)),) * 4), greedy]) is None


@pytest.mark.parametrize(
    ("logits", "rooms", "named"),
    [
        (torch.zeros(4, V).t(), {}, "of columns 1 apart"),
        (torch.zeros(4, V, dtype=torch.float64), {}, "logits are of torch.float64"),
        (torch.zeros(4, V), {"sequences": 0}, "sequences is 0"),
        (torch.zeros(4, V), {"drafts": -1}, "drafts is -1"),
        (torch.zeros(4, V), {"support": 257}, "support is 257"),
    ],
)
def test_rooms_out_of_range_are_named(logits: Tensor, rooms: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        StaticLaunch(logits, **{"sequences": 2, "drafts": 2, **rooms})


# --------------------------------------------------------------------------------------------------- in a CUDA graph


def test_the_launches_are_the_same_at_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same grids, addresses, numbers and constants whatever is filled in; no memory is taken, nothing waits."""
    launches: list[tuple[Any, ...]] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                given = tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
                launches.append((self.name, grid, given, constants))

            return launch

    _, launch = _launch(6, 13)
    for name in ("stats_kernel", "filter_kernel", "ruling_kernel"):
        monkeypatch.setattr(verify_triton, name, Recorded(name))
    for turn, gammas in enumerate(FILLINGS):
        launch.fill(_batch(turn, gammas)[1])
        with OnlyCapturable(in_place=True):
            launch.run()
            launch.advance()
        with OnlyCapturable():
            launch.next_tokens()
    assert [name for name, *_ in launches[:2]] == ["stats_kernel", "ruling_kernel"]
    assert launches == launches[:2] * len(FILLINGS)


def test_a_launch_without_drafts_draws_what_a_coupled_draft_draws() -> None:
    """Three steps with no word to the host in between, at several temperatures; one row is no law."""
    B, steps = 40, 3
    storage = torch.zeros(B + 2, V, device=DEVICE)
    launch = StaticLaunch(storage, sequences=B + 2, drafts=0)
    laws = [SamplingLaw(temperature=each) for each in (0.0, 0.3, 1.0, 2.0)] * 10
    seeds, lengths = [2**64 - 1 - b for b in range(B)], [0, 5, 9, 2**32 - steps, 700] * 8
    z = torch.randn(steps, B, V, generator=torch.Generator().manual_seed(6)) * 3
    z[1, 2, 7] = math.nan
    launch.fill([Proposed((), (), *terms, Rule.COUPLED) for terms in zip(laws, seeds, lengths, strict=True)])
    drawn = []
    for each in z:
        storage[:B] = each.to(DEVICE)
        launch.run()
        drawn.append(launch.next_tokens())
        launch.advance()
    for step in range(steps):
        places = [(seed, length + step) for seed, length in zip(seeds, lengths, strict=True)]
        expected = coupled.draw(z[step], laws, coupled.noise_of(places, V))
        assert drawn[step][:B].tolist() == expected
    assert drawn[1][2] == -1
    assert {verify_triton.STATUSES[each] for each in launch.outcomes[:B, 0].tolist()} == {Status.OK}


@pytest.mark.gpu
def test_a_graph_replayed_for_other_proposals_gives_what_eager_gives() -> None:
    storage, launch = _launch(6, 13)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        launch.run()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
        drawn = launch.next_tokens()
        launch.advance()
    side = torch.cuda.Stream()
    for turn, gammas in enumerate(FILLINGS * 2):
        logits, proposals = _batch(turn, gammas)
        storage[: len(logits), :V] = logits.cuda()
        launch.fill(proposals)
        graph.replay()
        found = launch.fetch(side if turn % 2 else None).rulings()
        assert found == (verify_by_triton(logits, proposals) if proposals else [])
        assert drawn[: len(found)].tolist() == [each.next_token for each in found]


@pytest.mark.gpu
def test_fillings_do_not_overtake_each_other() -> None:
    """Many are queued before any is read: each is judged by its own proposals, and read by its own."""
    storage, launch = _launch(6, 13)
    logits, proposals = _batch(0, FILLINGS[0])
    proposals = [replace(each, top_logprobs=-1) for each in proposals]
    storage[: len(logits), :V] = logits.cuda()
    others = [[replace(each, seed=each.seed ^ turn, uniforms=None) for each in proposals] for turn in range(40)]
    expected = [verify_by_triton(logits, each) for each in others]
    side = torch.cuda.Stream()
    found, before = [], None
    for each in others:
        launch.fill(each)
        launch.run()
        fetched = launch.fetch(side)
        if before is not None:
            found.append(before.rulings())
        before = fetched
    assert before is not None
    assert [*found, before.rulings()] == expected
