"""The fast path against the reference, draws, log-probabilities, what is refused, and the choice of path."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import verify as verification
from kernels import verify_torch
from kernels.adjustments import Adjuster, LogitRules, RowAdjustment
from kernels.dense import DenseDistribution, DraftLogits, SigmoidScales
from kernels.paths import PathUnavailable, choose, obstacle, rehearse, warm_up
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams
from kernels.verify import SUPPORTED_RULES, Rule, Uniforms, UnsupportedRule, implementation_for, implementations
from tests.kernels import reference
from tests.kernels.cases import GREEDY, gaussian, logits_of, n_differing, propose, random_batch, sparse
from tests.kernels.paths import DEVICE, HOST, IS_INTERPRETED, PATHS, TRITON, verify


@pytest.mark.parametrize(
    ("V", "size", "dtype"),
    [
        *((V, size, torch.float32) for V, size in ((1, 20), (2, 60), (257, 60), (5003, 40), (50257, 12))),
        *((300, 30, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    ],
)
def test_the_fast_path_agrees_with_the_reference(V: int, size: int, dtype: torch.dtype) -> None:
    logits, proposals = random_batch(V, V, size, dtype)
    assert n_differing(verify_torch.verify, reference.verify, logits, proposals) <= 1


@pytest.mark.parametrize(
    ("path", "N", "V"), [("torch", 1024, 33), pytest.param("triton", 48, 2088, marks=TRITON.marks)]
)
def test_evenly_spaced_uniforms_give_each_token_its_share(path: str, N: int, V: int) -> None:
    """Each token's count is its probability times N, give or take one. Of Triton's tiles there are three."""
    z = torch.full((1, V), -30.0)
    z[0, :: 1 + V // 33] = gaussian(2, len(z[0, :: 1 + V // 33]), scale=2)
    results = verify(z.expand(N, V), [propose(resample=(k + 0.5) / N) for k in range(N)], path)
    drawn = [each.next_token for each in results]
    assert np.abs(np.bincount(drawn, minlength=V) - N * torch.softmax(z[0].double(), -1).numpy()).max() < 1.0
    assert drawn == sorted(drawn)


BATCHES = pytest.mark.parametrize(("path", "size"), [("torch", 24), pytest.param("triton", 3, marks=TRITON.marks)])


@BATCHES
def test_rows_are_independent(path: str, size: int) -> None:
    """Neither the batch's order nor its parts, nor what lies past a rejection, change a result."""
    logits, proposals = random_batch(seed=4, V=97, size=size)
    together = verify(logits, proposals, path)
    starts = np.cumsum([0, *(each.gamma + 1 for each in proposals)])
    rows = [logits[a:b] for a, b in pairwise(starts)]
    for part in (range(size - 1, 0, -1), range(1)):
        results = verify(torch.cat([rows[i] for i in part]), [proposals[i] for i in part], path)
        assert results == [together[i] for i in part]
    for own, proposal, result in zip(rows, proposals, together, strict=True):
        if proposal.rule is not Rule.BLOCK:  # which looks past a failure, as long as the block can grow
            own[result.accepted + 1 :] = math.nan
    assert verify(torch.cat(rows), proposals, path) == together


@BATCHES
def test_rows_may_have_any_strides(path: str, size: int) -> None:
    """Padded with NaN, every other row of a larger tensor, one row for all, and columns apart."""
    logits, proposals = random_batch(seed=5, V=64, size=size)
    expected = verify(logits, proposals, path)
    padded = torch.full((2 * len(logits), 80), math.nan)
    padded[::2, :64] = logits
    assert verify(padded[::2, :64], proposals, path) == expected
    assert verify(logits.t().contiguous().t(), proposals, path) == expected
    one = logits[:1].expand(len(logits), 64)
    assert verify(one, proposals, path) == verify(one.contiguous(), proposals, path)


# --------------------------------------------------------------------------------------------------- draws, adjustments


@pytest.mark.parametrize("path", HOST)
def test_the_draws_are_those_of_the_round(path: str) -> None:
    """Acceptance at i draws (base_length, i, ACCEPT); the next token draws (base_length, accepted, RESAMPLE)."""
    z, half = logits_of([[0.25] * 4] * 3), sparse({0: 1, 1: 1})
    outcomes = set()
    for base_length in range(60):
        accept = tuple(uniform(11, base_length, i, Domain.ACCEPT) for i in range(2))
        accepted = next((i for i in range(2) if accept[i] * 0.5 >= 0.25), 2)
        given = Uniforms(accept, uniform(11, base_length, accepted, Domain.RESAMPLE))
        drawn, same = (
            propose((0, 1), (half, half), seed=11, base_length=base_length, uniforms=each) for each in (None, given)
        )
        (result,) = verify(z, [drawn], path)
        assert result == verify(z, [same], path)[0]
        assert result.accepted == accepted
        outcomes.add((result.accepted, result.next_token))
    assert len(outcomes) > 5


def test_no_draw_is_made_past_the_stopping_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, Domain]] = []

    def record(seed: int, base_length: int, index: int, domain: Domain) -> float:
        made.append((index, domain))
        return 0.9

    monkeypatch.setattr(verification, "uniform", record)
    verify(logits_of([[0.95, 0.05]] * 4), [propose((0, 1, 0), uniforms=None)])
    assert made == [(0, Domain.ACCEPT), (1, Domain.ACCEPT), (1, Domain.RESAMPLE)]


@pytest.mark.parametrize("path", PATHS)
def test_each_row_has_its_own_adjustment(path: str) -> None:
    ban = RowAdjustment(np.zeros(1, np.int64), np.ones(1, np.float32), np.array([-math.inf], np.float32))
    z = logits_of([[0.4, 0.3, 0.3]] * 3)
    (result,) = verify(z, [propose((1, 0), law=GREEDY, adjustments=(ban, None, ban))], path)
    assert (result.accepted, result.next_token) == (2, 1)
    assert torch.equal(z, logits_of([[0.4, 0.3, 0.3]] * 3))


# ---------------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_are_raw_and_adjusted(path: str) -> None:
    z = gaussian(1, 3, 50, scale=2)
    params = SamplingParams(temperature=0.5, top_k=5)
    adjuster = Adjuster(LogitRules(banned_tokens=(int(z[1].argmax()),)), [], 50)
    tokens = (int(z[0].argmax()), int(z[1].topk(2).indices[1]))
    adjustments = (None, adjuster.row(), None)
    proposed = propose(tokens, accept=(0.0, 0.0), law=params, top_logprobs=7, adjustments=adjustments)
    (result,) = verify(z, [proposed], path)
    assert result.accepted == 2
    raw = torch.log_softmax(z.double(), -1)
    for i, (token, at) in enumerate(zip((*tokens, result.next_token), result.logprobs, strict=True)):
        assert at.token == token
        assert at.raw == pytest.approx(raw[i, token].item(), abs=1e-5)
        assert at.top_ids == tuple(raw[i].topk(7).indices.tolist())
        assert at.top_raw == pytest.approx(raw[i].topk(7).values.tolist(), abs=1e-5)
        assert sum(math.exp(each) for each in at.top_adjusted) == pytest.approx(1, abs=1e-5)
    assert result.logprobs[1].top_adjusted[0] == -math.inf


@pytest.mark.parametrize("path", PATHS)
def test_greedy_logprobs_are_those_of_a_point_mass(path: str) -> None:
    z = logits_of([[0.3, 0.5, 0.2], [0.2, 0.2, 0.6]])
    (result,) = verify(z, [propose((0,), law=GREEDY, lenience=0.5, top_logprobs=0)], path)
    assert [(at.token, at.adjusted) for at in result.logprobs] == [(0, -math.inf), (2, 0.0)]
    assert [at.raw for at in result.logprobs] == pytest.approx([math.log(0.3), math.log(0.6)], abs=1e-6)
    assert result.logprobs[0].top_ids == ()


@pytest.mark.parametrize(("count", "ids"), [(2, (0, 2)), (20, (0, 2, 3, 1, 4))])
def test_the_best_of_equals_come_in_order_of_id(count: int, ids: tuple[int, ...]) -> None:
    (result,) = verify(torch.tensor([[2.0, 1.0, 2.0, 2.0, 0.0]]), [propose(top_logprobs=count)])
    assert result.logprobs[0].top_ids == ids


# ----------------------------------------------------------------------------------------------------- what is refused

SCALES = SigmoidScales(-10, 10)
LOGITS = DraftLogits(torch.zeros(2).half())


@pytest.mark.parametrize("rule", list(Rule))
def test_an_unsupported_rule_is_refused(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(Rule) == SUPPORTED_RULES
    monkeypatch.setattr(verify_torch, "RULES", SUPPORTED_RULES - {rule})
    with pytest.raises(UnsupportedRule, match=rule.value):
        verify(torch.zeros(1, 3), [propose(rule=rule)])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": ()}, "1 tokens and 0 draft laws"),
        ({"adjustments": (None,)}, "1 adjustments for 2 rows"),
        *(({"lenience": value}, f"lenience of proposal 0 is {value}") for value in (0.0, math.nan, 1.5)),
        ({"lenience": 0.9, "rule": Rule.BLOCK}, "lenience of proposal 0 is 0.9; it must be 1 under block"),
        ({"lenience": 0.9, "rule": Rule.COUPLED, "q": ()}, "it must be 1 under coupled"),
        ({"rule": Rule.COUPLED}, "1 draft laws; the rule coupled takes none"),
        ({"rule": Rule.BLOCK, "q": ()}, "1 tokens and 0 draft laws"),
        ({"top_logprobs": -2}, "top_logprobs of proposal 0 is -2"),
        ({"uniforms": Uniforms((), 0.5)}, "0 uniforms for 1 tokens"),
        (
            {"q": (DenseDistribution(torch.ones(3) / 3),)},
            r"q\[0\] of proposal 0 has shape \(3,\); the vocabulary has 2",
        ),
        ({"q": (LOGITS,)}, r"q\[0\] of proposal 0 is draft logits, which the rule tokenwise does not take"),
        ({"q": (LOGITS,), "rule": Rule.BLOCK}, "which the rule block does not take"),
        ({"sigmoid": SCALES}, "proposal 0 has sigmoid scales; the rule tokenwise takes none"),
        ({"q": (LOGITS,), "rule": Rule.SIGMOID}, "sigmoid of proposal 0 is None; the rule sigmoid needs scales"),
        *(
            ({"rule": Rule.SIGMOID, "sigmoid": SCALES, "q": q}, named)
            for q, named in (
                ((None,), r"q\[0\] of proposal 0 is a point mass"),
                ((sparse({0: 1}),), "is a sparse law; .* draft logits alone"),
                ((DenseDistribution(torch.ones(2) / 2),), "is a dense law"),
                ((DraftLogits(torch.zeros(3)),), r"has shape \(3,\)"),
                ((), "1 tokens and 0 draft laws"),
            )
        ),
    ],
)
def test_a_proposal_that_does_not_fit_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        verify(torch.zeros(2, 2), [replace(propose((0,)), **change)])


def test_rows_that_do_not_fit_and_unknown_implementations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\).*\[2, V\]"):
        verify(torch.zeros(3, 2), [propose((0,))])
    with pytest.raises(ValueError, match=r"'magic'.*torch, triton"):
        verify(torch.zeros(0, 2), [], "magic")


# --------------------------------------------------------------------------------------------------- the choice of path

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")
ALL = ("reference", "torch", "triton")


@pytest.mark.parametrize("device", [CPU, CUDA, torch.device("mps")])
def test_the_device_picks_the_path_unless_one_is_named(device: torch.device) -> None:
    fastest = "triton" if device == CUDA and find_spec("triton") else "torch"
    assert choose("auto", device).name == implementation_for(device) == fastest
    assert device.type in choose("auto", device).reason
    for name in ("torch", "reference"):
        assert (choose(name, device).name, choose(name, device).reason) == (name, "asked for")


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(PathUnavailable, match=r"^triton cannot judge on cpu: it needs a CUDA device, or TRITON_INT"):
        choose("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    assert obstacle("triton", CPU, ALL) is None


def test_a_missing_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstacle("reference", CPU, ("torch",)) == "this build has torch"
    with pytest.raises(PathUnavailable, match=f"^nonsense cannot judge on cpu: this build has {implementations()[0]}"):
        choose("nonsense", CPU)
    with pytest.raises(PathUnavailable, match=r"^nonsense cannot judge on cpu: ValueError: implementation is 'nonsen"):
        rehearse("nonsense", CPU)
    monkeypatch.setattr("kernels.paths.find_spec", lambda name: None)
    assert obstacle("triton", CUDA, ALL) == "triton is not installed"
    assert obstacle("torch", CUDA, ALL) is None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_where_their_operands_lie() -> None:
    rehearse("triton", CUDA)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("path", PATHS)
def test_rehearsal_and_warm_up_pass_where_the_path_runs(path: str) -> None:
    device = torch.device(DEVICE if path == "triton" else "cpu")
    rehearse(path, device)
    warm_up(path, device, torch.bfloat16, 300, 304)


class _Launches:
    """Stands for a kernel, and records what Triton would compile anew for: constants, types, alignment."""

    run = True

    def __init__(self, kernel: Any, seen: set[Any]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            kinds = tuple(
                (each.dtype, each.data_ptr() % 16) if isinstance(each, Tensor) else (each == 1, each % 16)
                for each in arguments
            )
            self._seen.add((self._kernel.__name__, kinds, tuple(sorted(constants.items()))))
            if self.run:
                self._kernel[grid](*arguments, **constants)

        return launch


@pytest.mark.skipif(not IS_INTERPRETED, reason="looks at what the interpreter is given")
def test_after_the_warm_up_no_proposal_needs_another_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waited for a compiler would hold up every stream for seconds."""
    from kernels import verify_triton

    seen: set[Any] = set()
    for name in ("stats_kernel", "filter_kernel", "verify_kernel"):
        monkeypatch.setattr(verify_triton, name, _Launches(getattr(verify_triton, name), seen))
    V, width = 300, 304
    warm_up("triton", CPU, torch.bfloat16, V, width)
    compiled = set(seen)
    assert len({each[0] for each in compiled}) == 3
    monkeypatch.setattr(_Launches, "run", False)
    for seed in range(100):
        logits, proposals = random_batch(seed, V, 1 + seed % 3, torch.bfloat16)
        wide = torch.zeros(len(logits), width, dtype=torch.bfloat16)
        wide[:, :V] = logits
        verify_triton.prepare(wide[:, :V], proposals).run()
        assert seen == compiled, seed
