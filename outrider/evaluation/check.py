"""Checks that a deployment is exact: that its text is distributed as its target's.

Two kinds of evidence:

- Equality. At temperature 0, and under the rule `coupled` with one seed, text does not depend on the draft, γ, load, or
  a resume: it is compared with the text of the target alone, and each token with the scores of a local copy.
- Statistics. Sampled tokens under each exact rule are compared with the target's distributions: the next token, and
  three tokens in a row (`token_fit`); alone, under load, and across a resume.

A difference between tokens whose scores differ by no more than rounding is a near-tie, not an error. All statistical
tests together raise a false alarm in one run of 10,000 (Holm).
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from outrider.client import AsyncClient
from outrider.evaluation import EvaluationError
from outrider.evaluation.check_report import (
    ALONE,
    BY_ID,
    BY_PROBABILITY,
    EVERY,
    LOAD,
    LOCAL_TARGET,
    NEXT,
    NO_DRAFT,
    RESUMED,
    TARGET_ALONE,
    Equality,
    Report,
    Sampled,
    judged,
)
from outrider.evaluation.check_requests import GAMMAS, Plan, Requester, Step, Text, requests
from outrider.evaluation.clips import clips_for
from outrider.evaluation.reference import Copy, DecodeReference, LocalTarget, Prefix, scores
from outrider.evaluation.token_fit import next_tokens, three_tokens
from protos.outrider.v1 import draft_service_pb2

ROUNDING = {"float32": 5e-4, "float16": 0.03, "bfloat16": 0.2}
"""Difference of two logits that may be due to rounding, in nats: about six standard deviations between passes of
different widths."""
QUANTISED_ROUNDING = 0.2
"""The same for other number formats, those of GGUF files. llama.cpp quantises activations, too: as q8_0, logits of the
demo target in 21,575 places had differences with a standard deviation of 0.007, and 0.09 at most."""

_MOST_ALLOWED = 0.25
"""Distance of two distributions, Σ (p' - p)²/p, beyond which rounding explains no more: near temperature 0 it could
explain anything."""


async def check(
    client: AsyncClient, plan: Plan, copy: Copy | None, step: Step, speech: Mapping[str, Any] | None = None
) -> Report:
    """Check the deployment behind a client.

    Args:
        plan: what to ask for.
        copy: a local copy of the target; None: the deployment without a draft is the reference.
        step: progress.
        speech: for a target of speech: `audio`, and options of `Clip`; its clips replace the prompts of the plan.

    Raises:
        CheckpointError: the copy cannot be loaded, or has other weights.
        EvaluationError: the plan does not fit the deployment, or a prompt does not fit the copy.
        OutriderError: a request failed.
    """
    began = time.perf_counter()
    pair = await client.get_model()
    clips = clips_for(pair.target, **(speech or {"audio": ()}))
    plan = _fitted(replace(plan, prompts=clips or plan.prompts), pair)
    rounding = plan.rounding if plan.rounding is not None else ROUNDING.get(pair.target.dtype, QUANTISED_ROUNDING)
    requester = await Requester.of(client, plan, pair.target)
    local = None
    if copy is not None:
        longest = max(plan.tokens, plan.equal_tokens)
        sources = requester.prompts if pair.target.HasField("encoder") else None
        local = LocalTarget(copy, pair.target, requester.ids, longest, rounding, sources, plan.tokens)
    asks = requests(plan, pair.target)
    texts = await requester.texts(ALONE, [ask for ask in asks if ask.where == ALONE], 1, step)
    texts += await requester.texts(LOAD, [ask for ask in asks if ask.where != ALONE], plan.at_once, step)
    drafted, accepted = _drafted(texts)
    sampled = [text for text in texts if text.ask.params is not None]
    fixed = plan.tokens if pair.target.HasField("encoder") else None
    reference = local or DecodeReference(client, requester.prompts, plan.at_once, rounding, fixed)
    return Report(
        draft=pair.model.name,
        target=pair.target.name,
        dtype=pair.target.dtype,
        reference=TARGET_ALONE if local is None else LOCAL_TARGET,
        reference_dtype="" if local is None else local.dtype,
        rounding=rounding,
        drafted=drafted,
        accepted=accepted,
        num_resumed=sum(text.is_resumed for text in texts),
        equalities=_equalities([text for text in texts if text.ask.params is None], local, rounding),
        tests=await _statistics(sampled, reference, rounding, plan, step),
        seconds=time.perf_counter() - began,
    )


def _drafted(texts: Sequence[Text]) -> tuple[dict[str, int], dict[str, int]]:
    """The drafted and the accepted tokens by rule."""
    drafted, accepted = Counter[str](), Counter[str]()
    for text in texts:
        if text.ask.name != NO_DRAFT:
            drafted[text.ask.name] += text.drafted
            accepted[text.ask.name] += text.accepted
    for rule, number in drafted.items():
        if not number:
            raise EvaluationError(
                f"nothing was drafted under {rule}: there is no speculation to check; give another --drafter"
            )
    return dict(drafted), dict(accepted)


def _fitted(plan: Plan, pair: draft_service_pb2.DraftServiceGetModelResponse) -> Plan:
    most = pair.model.limits.max_gamma
    largest = max(gamma or 0 for gamma in plan.gammas)
    if largest > most and plan.gammas != GAMMAS:
        raise EvaluationError(f"--gammas has {largest}; the most of these services is {most} (--max-gamma)")
    gammas = tuple(dict.fromkeys(None if gamma is None else min(gamma, most) for gamma in plan.gammas))
    if not any(gammas):
        raise EvaluationError(f"gamma is at most {most}: there is no speculation to check")
    return replace(plan, gammas=gammas)


# ----------------------------------------------------------------------------------------------------------- equality


def _equalities(texts: Sequence[Text], local: LocalTarget | None, rounding: float) -> list[Equality]:
    found = []
    for kind in dict.fromkeys(text.ask.name for text in texts):
        own = [text for text in texts if text.ask.name == kind]
        alone = {text.ask.prompt: text for text in own if text.logprobs}
        for where in (ALONE, LOAD, RESUMED):
            others = [text for text in own if text.ask.where == where and not text.logprobs]
            results = [compared(alone[text.ask.prompt], text, rounding) for text in others]
            found.append(_summed(kind, TARGET_ALONE, where, results))
        if local is not None:
            distinct = {(text.ask.prompt, text.tokens): text for text in own}
            found.append(
                _summed(kind, LOCAL_TARGET, EVERY, [_scored(each, local, rounding) for each in distinct.values()])
            )
    return found


Compared: TypeAlias = tuple[int, int, list[str]]
"""Compared tokens, near-ties, and differences in words."""


def compared(alone: Text, text: Text, rounding: float) -> Compared:
    """Compare a text with that of the target alone, up to their first difference, by the log-probabilities of `alone`.

    A token without a reported one has at most that of the last one that is reported.
    """
    pairs = enumerate(zip(alone.tokens, text.tokens, strict=False))
    at = next((i for i, (own, other) in pairs if own != other), None)
    if at is None and len(text.tokens) != len(alone.tokens):
        return (
            min(len(text.tokens), len(alone.tokens)),
            0,
            [f"{_where(text)}: there are {len(text.tokens)} tokens, the target alone wrote {len(alone.tokens)}"],
        )
    if at is None:
        return len(text.tokens), 0, []
    entry = alone.logprobs[at]
    known = {each.token_id: each.raw for each in (*entry.top, entry.token)}
    own, other = alone.tokens[at], text.tokens[at]
    is_known = other in known
    known.setdefault(other, min(known.values()))
    scored = scores(known, text.ask.options.get("seed"), alone.begin + at)
    gap = scored[own] - scored[other]
    if is_known:
        gap = abs(gap)
    if gap <= rounding:
        return at + 1, 1, []
    return at + 1, 0, [_example(text, at, own, gap)]


def _scored(text: Text, local: LocalTarget, rounding: float) -> Compared:
    gaps = local.gaps(text.ask.prompt, text.tokens, text.ask.options.get("seed"))
    wrong = [_example(text, at, None, gap) for at, gap in enumerate(gaps) if gap > rounding]
    return len(gaps), sum(0 < gap <= rounding for gap in gaps), wrong


def _example(text: Text, at: int, expected: int | None, gap: float) -> str:
    instead = "" if expected is None else f", the target alone wrote {expected}"
    return f"{_where(text)}: token {at + 1} is {text.tokens[at]}{instead}; its score is {gap:.2g} nats off"


def _where(text: Text) -> str:
    return f"prompt {text.ask.prompt + 1}, gamma {text.ask.options.get('gamma', 'default')}, {text.ask.where}"


def _summed(kind: str, reference: str, where: str, results: Sequence[Compared]) -> Equality:
    wrong = [example for _, _, examples in results for example in examples]
    return Equality(
        kind,
        reference,
        where,
        texts=len(results),
        tokens=sum(tokens for tokens, _, _ in results),
        near_ties=sum(ties for _, ties, _ in results),
        differences=len(wrong),
        example=wrong[0] if wrong else "",
    )


# --------------------------------------------------------------------------------------------------------- statistics


async def _statistics(
    texts: Sequence[Text], reference: LocalTarget | DecodeReference, rounding: float, plan: Plan, step: Step
) -> list[Sampled]:
    wanted = {prefix for text in texts for prefix in _prefixes(text)}
    step("reference", 0, len(wanted))
    found = await reference.distributions(wanted, lambda done: step("reference", done, len(wanted)))
    groups: dict[tuple[str, str], list[Text]] = {}
    for text in texts:
        groups.setdefault((text.ask.name, text.ask.where), []).append(text)
        if text.ask.name != NO_DRAFT:
            groups.setdefault((EVERY, EVERY), []).append(text)
    generator = np.random.default_rng(plan.seed)
    # Σ (p' - p)²/p where logits have errors of a sixth of `rounding`. Temperature divides these too.
    coldest = max(1e-6, min(params.temperature for params in plan.settings))
    allowed = min((rounding / 6 / coldest) ** 2, _MOST_ALLOWED)
    tests = []
    for (rule, where), own in sorted(groups.items()):
        counts: dict[Prefix, Counter[int]] = {}
        for text in own:
            for prefix, token in zip(_prefixes(text), text.tokens, strict=True):
                counts.setdefault(prefix, Counter())[token] += 1
        tokens = sum(each.total() for each in counts.values())
        tests.append(Sampled(NEXT, rule, where, tokens, next_tokens(counts, found, allowed)))
        placed = [[(found[p], t) for p, t in zip(_prefixes(text), text.tokens, strict=True)] for text in own]
        for name, by_id in ((BY_PROBABILITY, False), (BY_ID, True)):
            fit = three_tokens(placed, generator, allowed, by_id=by_id)
            tests.append(Sampled(name, rule, where, tokens, fit))
    return judged(tests, allowed)


def _prefixes(text: Text) -> list[Prefix]:
    assert text.ask.params is not None
    return [(text.ask.prompt, text.tokens[:at], text.ask.params) for at in range(len(text.tokens))]
