"""The distribution of each next token of a Markov target, through both services over gRPC, against its exact table.

The target's attention outputs are zero: the next token depends on the last one alone, so each token of a text is a
sample of one row. `test_three_tokens` has a target that attends, and bad drafts.

Power (`chisquare` has the derivation), over the three rank classes after each token, some 47 degrees of freedom, at a
level of 1 %: the 1,664 tokens of 64 texts detect a mean total variation of 0.09 with 95 %, 14,592 tokens one of 0.03.
With `-m slow`, 363,520 tokens detect 0.01 token by token, at a level of 0.1 % with 99 %.

Services with one deliberate fault must be refuted. Their draft is a good one that is too sure of itself, since a fault
bends the distribution most where acceptance and rejection are both frequent. Sizes are the smallest that refute at
`REFUTED` by a wide margin. Four faults are in every run, the others are slow.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kernels.cpu_decoder import can_run
from kernels.sampling import SamplingParams
from outrider.evaluation import chisquare
from outrider.evaluation.chisquare import Fit
from tests.cluster import Service
from tests.exactness import sampling
from tests.exactness.distributions import PARAMS, chain_fits, transitions
from tests.exactness.pairs import BAD_DRAFTS, VOCABULARY
from tests.exactness.sampling import SAMPLES, Run
from tests.exactness.services import BY_TORCH, PairServices

LAST = 14
EVERY_LETTER = (*range(VOCABULARY - 1), 15, 12, LAST)  # there is something to copy after each token
TOP_20 = SamplingParams(top_k=20)
TOP_6 = SamplingParams(top_k=6)
NARROW = SamplingParams(top_k=6, top_p=0.8)
UNSURE = 1.2  # nats; about half of the draft's distributions have more entropy
LEVEL = 0.01
UNSEEDED = 1e-4
SOUND = 1e-3
REFUTED = 1e-9


class Drafting(NamedTuple):
    """A way of drafting; `flags` go with those of the drafters that count and copy."""

    kind: str = "sharpened"
    flags: str = ""
    fault: str | None = None
    params: SamplingParams = PARAMS
    prompt: tuple[int, ...] = (LAST,)
    options: dict[str, Any] = {}  # noqa: RUF012
    accepted: tuple[float, float] = (0.1, 0.95)


MODEL = Drafting(options={"gamma": 2})
COUNTING = Drafting("uniform", "--drafter lookup", None, TOP_20, EVERY_LETTER, {"gamma": 2}, (0.01, 0.9))
STAGED = COUNTING._replace(kind="flattened", options={"gamma": 4, "drafter": "staged"}, accepted=(0.2, 0.95))
DRAFTING = {
    "ngram": COUNTING._replace(options={"gamma": 2, "drafter": "ngram"}),
    "lookup": COUNTING._replace(options={"gamma": 2, "drafter": "lookup"}),
    "random": COUNTING._replace(options={"gamma": 2, "drafter": "random"}),
    "staged by lookup": STAGED._replace(flags="--drafter staged --ngram-learn --staged-by lookup"),
    "staged by ngram": STAGED._replace(flags="--drafter staged --ngram-learn --staged-by ngram"),
    "outcome cache": MODEL._replace(fault="eager_outcome_cache", params=TOP_6),
    "restless": MODEL._replace(fault="restless_gamma", options={"gamma": 6, "speculation": "adaptive"}),
    "parallel": MODEL._replace(kind="parallel", options={"gamma": 4, "tokens_per_pass": 3}),
    "model": MODEL,  # by the decoder in C, where it can run
    "bfloat16": MODEL._replace(flags="--dtype bfloat16"),  # the same
    "torch": MODEL._replace(fault=BY_TORCH),
}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def sampled(service: Service, markov: PairServices, drafting: Drafting, **options: Any) -> tuple[Run, Fit, Fit]:
    run = sampling.sample(service, drafting.prompt, params=drafting.params, **(drafting.options | options))
    return run, *chain_fits(transitions(markov.target, drafting.params), LAST, run.tokens)


def flags_of(drafting: Drafting, counting_flags: str) -> str:
    return f"{drafting.flags} {counting_flags}" if drafting.flags else ""


CASES: list[tuple[str, dict[str, Any], int]] = [
    ("ngram", {"rule": "block", "draft_temperature": 0.5}, 791),
    ("lookup", {}, 800),
    ("random", {"rule": "block"}, 811),
    ("staged by lookup", {"rule": "block"}, 821),
    ("staged by ngram", {}, 830),
    ("outcome cache", {"rule": "block"}, 32),
    ("parallel", {"rule": "block"}, 841),
    ("bfloat16", {}, 850),
    ("torch", {"rule": "block"}, 861),
]
# A γ that follows acceptance is tested with the higher power in every run, under each rule.
RESTLESS: list[tuple[str, dict[str, Any], int]] = [
    ("restless", {}, 900),
    ("restless", {"rule": "block", "max_entropy": UNSURE}, 911),
]
# With one rule each: the cache has no other tokens (`test_drafters`), and `tests/kernels` tests both rules of torch.
OTHER_RULES: list[tuple[str, dict[str, Any], int]] = [
    ("outcome cache", {}, 31),
    ("parallel", {}, 840),
    ("bfloat16", {"rule": "block"}, 851),
    ("torch", {}, 860),
    ("restless", {"rule": "block"}, 1902),
]
SHORT = [(*case, 26, 0.09) for case in CASES]
LONG: list[Any] = [(*case, 228, 0.03) for case in RESTLESS]
LONG += [slow(*case, 228, 0.03) for case in (*CASES, *OTHER_RULES)]


@pytest.mark.parametrize(("name", "options", "seed", "length", "distance"), [*SHORT, *LONG], ids=str)
def test_each_next_token_is_distributed_as_the_targets(
    name: str,
    options: dict[str, Any],
    seed: int,
    length: int,
    distance: float,
    markov: PairServices,
    counting_flags: str,
) -> None:
    drafting = DRAFTING[name]
    service = markov.draft(drafting.kind, flags_of(drafting, counting_flags), drafting.fault)
    run, outcomes, classes = sampled(service, markov, drafting, length=length, seed=seed, **options)
    least, most = drafting.accepted
    assert least * run.drafted < run.accepted < most * run.drafted
    if name in ("bfloat16", "torch"):
        can_be = can_run(torch.bfloat16, torch.device("cpu"), hidden=16, head_dim=16)
        assert service.logged("loaded")[0]["cpu_decoder"] is (name == "bfloat16" and can_be)
    if name == "outcome cache":
        assert run.cache_hits > 0.35 * run.drafts
    if name == "restless":
        assert len(run.gammas) >= 4
        assert min(run.gammas) == 0
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


@pytest.mark.parametrize(("name", "rule"), [("restless", "block"), ("staged by ngram", "tokenwise")])
def test_each_next_token_of_a_text_without_a_seed_is_distributed_as_the_targets(
    name: str, rule: str, markov: PairServices, counting_flags: str
) -> None:
    """Most requests give no seed. Under a rule that draws, only they share acceptance and learned n-grams. Each run
    draws other seeds, so the level is lower: 14,592 tokens detect a mean total variation of 0.04.
    """
    drafting = DRAFTING[name]
    service = markov.draft(drafting.kind, flags_of(drafting, counting_flags), drafting.fault)
    run, outcomes, classes = sampled(service, markov, drafting, length=228, seed=None, rule=rule)
    assert len(np.unique(run.tokens, axis=0)) == len(run.tokens), "each text has a seed of its own"
    assert run.drafted > 2000
    assert chisquare.detectable(classes.df, classes.n, level=UNSEEDED, power=0.95) <= 0.04
    assert min(outcomes.p_value, classes.p_value) > UNSEEDED


@pytest.mark.parametrize(
    ("dtype", "params", "seed"),
    [("float32", NARROW, 863), ("float32", PARAMS, 861), ("bfloat16", PARAMS, 862)],
    ids=str,
)
def test_each_token_that_the_target_writes_alone_is_distributed_as_its_own(
    dtype: str, params: SamplingParams, seed: int, markov: PairServices
) -> None:
    """Several tokens in a row, in bfloat16 by the loop in C where it can run. Sixteen texts at a time: a step of more
    sequences may take too long for several tokens.
    """
    drafting = MODEL._replace(params=params, options={"gamma": 0, "n": 8})
    with nullcontext(markov.draft()) if dtype == "float32" else markov.with_verifier("--dtype", dtype) as service:
        run, outcomes, classes = sampled(service, markov, drafting, length=26, samples=8 * SAMPLES, seed=seed)
    assert run.drafts == 0
    assert run.rounds < 0.5 * run.tokens.size
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= 0.09
    assert min(outcomes.p_value, classes.p_value) > LEVEL


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("rule", ["block", "tokenwise"])
@pytest.mark.parametrize("kind", BAD_DRAFTS)
def test_every_token_of_350_000_is_distributed_as_the_targets(kind: str, rule: str, markov: PairServices) -> None:
    # Each draft has its own seed: texts of one seed share the verifier's draws, and are no independent samples.
    seed = 20 + BAD_DRAFTS.index(kind)
    run = sampling.sample(markov.draft(kind), (LAST,), length=1420, samples=256, gamma=3, rule=rule, seed=seed)
    outcomes, classes = chain_fits(transitions(markov.target), LAST, run.tokens)
    assert run.tokens.size >= 350_000
    assert chisquare.detectable(outcomes.df, outcomes.n, level=1e-3, power=0.99) <= 0.01
    assert min(outcomes.p_value, classes.p_value) > 1e-3


@pytest.mark.parametrize(
    ("fault", "name", "params", "length", "options"),
    [
        ("untruncated_q", "model", NARROW, 40, {}),
        ("negative_residual", "model", NARROW, 40, {}),
        ("neighbouring_q", "parallel", TOP_20, 80, {}),
        ("gamma_after_drafting", "restless", PARAMS, 64, {}),
        slow("repeated_noise", "model", NARROW, 32, {}),
        slow("shared_noise", "model", PARAMS, 96, {}),
        slow("shared_resampling", "model", NARROW, 48, {}),
        slow("copies_with_probabilities", "lookup", TOP_20, 40, {}),
        slow("untruncated_ngrams", "ngram", NARROW, 80, {}),
        slow("random_favours_low_ids", "random", TOP_20, 64, {}),
        slow("branches_take_the_likeliest", "model", TOP_6, 52, {}),
        slow("unsure_after_sampling", "model", PARAMS, 96, {"gamma": 6, "max_entropy": UNSURE}),
        slow("unsure_after_sampling", "model", PARAMS, 96, {"gamma": 6, "max_entropy": UNSURE, "rule": "block"}),
    ],
    ids=str,
)
def test_a_fault_is_detected(
    fault: str,
    name: str,
    params: SamplingParams,
    length: int,
    options: dict[str, Any],
    markov: PairServices,
    counting_flags: str,
) -> None:
    drafting = DRAFTING[name]._replace(params=params)
    in_verifier = fault in ("negative_residual", "repeated_noise", "shared_resampling")
    flags = flags_of(drafting, counting_flags)
    with markov.with_fault(fault, drafting.kind, flags, in_verifier=in_verifier) as service:
        _, *fits = sampled(service, markov, drafting, length=length, seed=5, **options)
    assert min(fit.p_value for fit in fits) < REFUTED


@pytest.mark.parametrize(("params", "length"), [(NARROW, 40), slow(PARAMS, 96)])
def test_the_same_pair_without_a_fault_is_not_refuted(
    params: SamplingParams, length: int, markov: PairServices
) -> None:
    _, *fits = sampled(markov.draft(), markov, MODEL._replace(params=params), length=length, seed=5)
    assert min(fit.p_value for fit in fits) > SOUND
