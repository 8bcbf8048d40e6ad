"""`verify` on the host against the reference; independent rows, draws, log-probabilities, refusals, choice of path."""

import math
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kernels import cpu_decoder
from kernels.adjustments import Adjuster, LogitRules, apply
from kernels.logprobs import SCORED_ROWS, prompt_logprobs
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams, probabilities
from kernels.sigmoid import DraftLogits, SigmoidScales
from kernels.verify import Rule, Status, Uniforms, implementation_for
from kernels.verify_c import is_available
from kernels.verify_path import PathUnavailable, choose, try_out, warm_up
from tests.kernels import reference
from tests.kernels.cases import gaussian, n_differing, propose, random_batch, sparse
from tests.kernels.paths import DEVICE, PATHS, TRITON, C, verify

LIBRARIES = [name for name in cpu_decoder._LIBRARIES if cpu_decoder._loaded(name)]


@pytest.mark.parametrize(
    ("V", "size", "dtype"),
    [
        *((V, size, torch.float32) for V, size in ((1, 20), (257, 60), (5003, 40), (50257, 12))),
        *((300, 30, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    ],
)
@pytest.mark.parametrize("path", ["torch", C])
def test_the_host_agrees_with_the_reference(path: str, V: int, size: int, dtype: torch.dtype) -> None:
    logits, proposals = random_batch(V, V, size, dtype)
    assert n_differing(partial(verify, path=path), reference.verify, logits, proposals) <= 1


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_the_libraries_for_other_processors_agree_with_the_reference(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.verify_c.library", lambda: cpu_decoder._loaded(library))
    for V in (6, 7, 5001):  # the last vector is not full
        logits, proposals = random_batch(V, V, 40, torch.float32)
        assert n_differing(partial(verify, path="c"), reference.verify, logits, proposals) <= 1


@pytest.fixture(params=["torch", *(f"c: {name}" for name in LIBRARIES), TRITON])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a test with a large vocabulary; each library in C is one."""
    path, _, library = request.param.partition(": ")
    if library:
        monkeypatch.setattr("kernels.verify_c.library", lambda: cpu_decoder._loaded(library))
    return str(path)


def confident(mean: float, deviation: float) -> torch.Tensor:
    """Logits [2, V] with nearly all mass on token 7, and the rest on a tail of 150,000 tokens."""
    z = torch.zeros(2, 151_936)
    z[0] = gaussian(0, z.shape[1]) * deviation + mean
    z[0, 7] = 0.0
    return z


@pytest.mark.parametrize(("mean", "deviation"), [(-16.8, 0.0), (-17.5, 0.5), (-18.0, 1.0)])
@pytest.mark.parametrize("top_p", [1.0, 0.9975])
def test_a_flat_tail_of_many_tokens_keeps_its_mass(large: str, mean: float, deviation: float, top_p: float) -> None:
    """Each has less than half of a step of float32 at 1, and together they have up to one percent."""
    z, params = confident(mean, deviation), SamplingParams(top_p=top_p)
    weights = z[0].double().exp().numpy()
    weights[~reference.filtered(z[0].double().numpy(), params)] = 0
    (result,) = verify(z, [propose((7,), params=params)], large)
    assert 1 - result.beta[0] == pytest.approx(1 - weights[7] / weights.sum(), rel=2e-3)


@pytest.mark.parametrize("path", ["torch", C])
@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK])
def test_a_small_residual_is_no_rounding(path: str, rule: Rule) -> None:
    """With a chance of 7.5e-7 the drafted token is rejected, and then another one follows."""
    z = torch.tensor([[0.0, -14.1], [0.0, 0.0]])
    just_above = 1 - 0.5 * math.exp(-14.1)
    for q in (None, sparse({0: 65535})):
        (result,) = verify(z, [propose((0,), (q,), (just_above,), rule=rule)], path)
        assert (result.status, result.accepted, result.next_token) == (Status.OK, 0, 1)


BATCHES = pytest.mark.parametrize(
    ("path", "size"),
    [("torch", 24), pytest.param("c", 24, marks=C.marks), pytest.param("triton", 3, marks=TRITON.marks)],
)


@BATCHES
def test_rows_are_independent(path: str, size: int) -> None:
    """Neither the rest of the batch nor rows past a rejection change a result."""
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


def test_draws_are_keyed_by_round_index_and_purpose() -> None:
    proposed = propose((0, 1), seed=11, base_length=7, uniforms=None)
    for i in range(2):
        assert proposed.accept_uniform(i) == uniform(11, 7, i, Domain.ACCEPT)
    for accepted in range(3):
        assert proposed.resample_uniform(accepted) == uniform(11, 7, accepted, Domain.RESAMPLE)


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_are_raw_and_adjusted(path: str) -> None:
    z = gaussian(1, 3, 50, scale=2)
    params = SamplingParams(temperature=0.5, top_k=5)
    adjuster = Adjuster(LogitRules(banned_tokens=(int(z[1].argmax()),)), [], 50)
    tokens = (int(z[0].argmax()), int(z[1].topk(2).indices[1]))
    adjustments = (None, adjuster.row(), None)
    proposed = propose(tokens, accept=(0.0, 0.0), params=params, top_logprobs=7, adjustments=adjustments)
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


@pytest.mark.parametrize("path", ["torch", C, TRITON])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.1), SamplingParams(temperature=0.1, top_k=4)])
def test_adjusted_logprobs_are_minus_infinity_for_excluded_tokens_alone(params: SamplingParams, path: str) -> None:
    """Float32 has no chance of e^-91 in full precision, and none of e^-150."""
    z = torch.tensor([[0.0, -9.1, -15.0, -40.0, -41.0, -math.inf]])
    (result,) = verify(z, [propose(params=params, top_logprobs=6)], path)
    excluded = -math.inf if params.top_k else -410.0
    assert result.logprobs[0].top_adjusted == pytest.approx((0.0, -91.0, -150.0, -400.0, excluded, -math.inf), abs=1e-3)


@pytest.mark.parametrize("path", ["torch", C])
def test_probabilities_of_drafted_tokens_are_p_of_their_rows(path: str) -> None:
    """Also after a rejection; under `tokenwise` those of point masses are β. The other proposals ask for none. No path
    computes them itself.
    """
    logits, proposals = random_batch(seed=6, V=61, size=40)
    asking = [replace(each, reports_probabilities=i % 2 == 0) for i, each in enumerate(proposals)]
    first = 0
    for plain, each, result in zip(verify(logits, proposals, path), asking, verify(logits, asking, path), strict=True):
        assert replace(result, probabilities=()) == plain
        rows = slice(first, first + each.gamma)
        z = apply(logits[rows].float(), each.adjustments[: each.gamma])
        p = probabilities(z, each.params)
        expected = [p[i, token].item() for i, token in enumerate(each.tokens)]
        assert result.probabilities == (pytest.approx(expected, abs=1e-5) if each.reports_probabilities else ())
        first += each.gamma + 1


@pytest.mark.parametrize("path", ["torch", C, TRITON])
def test_a_point_mass_is_accepted_with_p(path: str) -> None:
    proposed = propose((3, 4, 5), reports_probabilities=True)
    (result,) = verify(gaussian(2, 4, 9), [proposed], path)
    assert result.beta == pytest.approx(result.probabilities[: len(result.beta)], abs=1e-6)


@pytest.mark.parametrize("path", ["torch", C, TRITON])
def test_a_token_outside_the_vocabulary_has_no_probability(path: str) -> None:
    (result,) = verify(torch.zeros(4, 2), [propose((1, 2, -1), reports_probabilities=True)], path)
    assert result.probabilities == pytest.approx((0.5, 0, 0))


def test_scores_of_a_prompt_are_log_softmax_in_slices() -> None:
    """Equal logits: lower ids first. A bad row anywhere leaves no scores."""
    logits = gaussian(3, 2 * SCORED_ROWS + 3, 40).to(torch.bfloat16)
    logits[5, [7, 3, 20]] = logits[5].max() + 1
    tokens = [i % 40 for i in range(len(logits))]
    scores = prompt_logprobs(logits, tokens, 4)
    assert scores is not None
    raw = torch.log_softmax(logits.double(), -1)
    assert [each.token for each in scores] == tokens
    for row, each in zip(raw, scores, strict=True):
        assert each.raw == each.adjusted == pytest.approx(row[each.token].item(), abs=1e-5)
        assert each.top_raw == each.top_adjusted == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)
    assert scores[5].top_ids[:3] == (3, 7, 20)
    for value in (math.nan, math.inf):
        bad = logits.clone()
        bad[SCORED_ROWS + 1, 2] = value
        assert prompt_logprobs(bad, tokens, 4) is None
    assert prompt_logprobs(logits[:0], [], 4) == ()


SCALES = SigmoidScales(-10, 10)
LOGITS = DraftLogits(torch.zeros(2).half())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": ()}, "q of proposal 0 has length 0; it must be that of tokens, 1"),
        ({"adjustments": (None,)}, "adjustments of proposal 0 has length 1; it must be 0 or 2"),
        *(({"lenience": value}, f"lenience of proposal 0 is {value}") for value in (0.0, math.nan)),
        ({"lenience": 0.9, "rule": Rule.BLOCK}, "lenience of proposal 0 is 0.9; it must be 1 under the rule block"),
        ({"rule": Rule.COUPLED}, "q of proposal 0 has length 1; it must be 0 under the rule coupled"),
        ({"top_logprobs": -2}, "top_logprobs of proposal 0 is -2"),
        ({"uniforms": Uniforms((), 0.5)}, "uniforms of proposal 0 has length 0; it must be 1"),
        ({"q": (LOGITS,)}, r"q\[0\] of proposal 0 is draft logits; the rule tokenwise needs a distribution"),
        ({"sigmoid": SCALES}, "sigmoid of proposal 0 is set; it must be None under the rule tokenwise"),
        ({"q": (LOGITS,), "rule": Rule.SIGMOID}, "sigmoid of proposal 0 is None; the rule sigmoid needs scales"),
        *(
            ({"rule": Rule.SIGMOID, "sigmoid": SCALES, "q": q}, named)
            for q, named in (
                ((None,), r"q\[0\] of proposal 0 is a point mass"),
                ((sparse({0: 1}),), "is a sparse distribution; the rule sigmoid needs draft logits"),
                ((DraftLogits(torch.zeros(3)),), r"q\[0\] of proposal 0 has the shape \[3\]; it must be \[2\]"),
            )
        ),
    ],
)
def test_a_proposal_that_does_not_fit_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        verify(torch.zeros(2, 2), [replace(propose((0,)), **change)])
    with pytest.raises(ValueError, match=r"\[3, 2\].*\[2, V\]"):
        verify(torch.zeros(3, 2), [propose((0,))])


CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_the_device_picks_the_path_unless_one_is_named(device: torch.device) -> None:
    has_triton = find_spec("triton") is not None
    fastest = "c" if device == CPU and is_available() else "triton" if device == CUDA and has_triton else "torch"
    assert choose("auto", device).name == implementation_for(device) == fastest
    assert choose("reference", device).name == "reference"


def test_c_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.verify_path.is_available", lambda: False)
    monkeypatch.setattr("kernels.verify_c.is_available", lambda: False)
    with pytest.raises(PathUnavailable, match=r"^c cannot verify on cpu: it needs the library that"):
        choose("c", CPU)
    assert choose("auto", CPU).name == "torch"


@pytest.mark.parametrize("path", PATHS)
def test_rehearsal_and_warm_up_pass_where_the_path_runs(path: str) -> None:
    device = torch.device(DEVICE if path == "triton" else "cpu")
    try_out(path, device)
    warm_up(path, device, torch.bfloat16, 300, 304)
    with pytest.raises(
        PathUnavailable, match=r"^nonsense cannot verify on cpu: ValueError: implementation is 'nonsense'"
    ):
        try_out("nonsense", CPU)
