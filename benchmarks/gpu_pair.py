"""A pair over gRPC on the device, against Theorem 3.8; and the outcome cache: parts `pair` and `cache`.

The planted pair writes one text after the other at temperature 0: with proposals of γ tokens, with the target alone,
and, in this process, by transformers' assisted generation on the same two models. All meet the same mistakes of the
draft, since those are a matter of the text. The outcome cache needs a draft whose runners-up mean something, so it is
measured on the demo pair, whose target is deepened on the device and whose draft runs on the processor.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.arguments import DEMO
from benchmarks.contenders import WrongLength
from benchmarks.deepen import cached
from benchmarks.gpu_bench import Bench, Json
from benchmarks.gpu_figures import alpha_of, foretold, overall
from benchmarks.gpu_services import PairOn, Text, write
from benchmarks.gpu_transformers import Assisted, Generated
from benchmarks.outcome_cache import WAYS, measure
from benchmarks.plan import read_prompts, spread
from benchmarks.planted.text import written
from benchmarks.services import Processes

AIM = 0.9
"""Of what the theorem foretells."""

CACHE_AIM = 1.25
"""With the cache over without, where drafting takes at least half of the target's pass."""

_WARM_UP = 1_000  # the number of a prompt that is not measured


def pair(bench: Bench) -> Json:
    """All rates of acceptance, in turns."""
    plan, services = bench.plan, bench.planted_pair()
    assisted = bench.tried("assisted generation", lambda: _assisted(bench), ours=False)
    refusal = {} if isinstance(assisted, Assisted) else assisted
    texts: dict[float, list[Text]] = {alpha: [] for alpha in plan.alphas}
    theirs: dict[float, list[Generated]] = {alpha: [] for alpha in plan.alphas}
    alone: list[Text] = []
    for gamma in (plan.gamma, 0):
        _one(bench, services, plan.alphas[0], _WARM_UP, gamma)  # not measured
    for turn in bench.deadline.turns(plan.repeats):
        for alpha in plan.alphas:
            texts[alpha].append(_one(bench, services, alpha, turn, plan.gamma))
            if isinstance(assisted, Assisted):
                theirs[alpha].append(_theirs(bench, assisted, alpha, turn))
        alone.append(_one(bench, services, plan.alphas[turn % len(plan.alphas)], turn, 0))
        bench.told(f"turn {turn + 1} of {plan.repeats}")
    reference = overall([text.rate for text in alone])
    return {
        "alone_tokens_per_second": reference,
        "alphas": {
            f"{alpha:g}": _row(plan.gamma, alpha, texts[alpha], theirs[alpha], reference) for alpha in plan.alphas
        },
        "assisted": refusal,
    }


def _one(bench: Bench, services: PairOn, alpha: float, number: int, gamma: int) -> Text:
    """A text of the services, held to what was planted."""
    count, shape = bench.plan.pair_tokens, bench.plan.target
    prompt = bench.prompt(shape, number, count, alpha)
    text = write(services.client, prompt, count, temperature=0.0, gamma=gamma)
    if list(text.tokens) != written(prompt, count, shape.vocab):
        raise WrongLength(f"the pair wrote another text than it was planted with (α = {alpha}, γ = {gamma})")
    return text


def _assisted(bench: Bench) -> Assisted:
    plan = bench.plan
    assisted = Assisted(bench, bench.model(plan.target), bench.model(plan.draft, drafts=True), plan.gamma)
    _theirs(bench, assisted, plan.alphas[0], _WARM_UP)
    return assisted


def _theirs(bench: Bench, assisted: Assisted, alpha: float, number: int) -> Generated:
    count = bench.plan.pair_tokens
    return assisted.write(bench.prompt(bench.plan.target, number, count, alpha), count)


def _row(gamma: int, alpha: float, texts: list[Text], theirs: list[Generated], reference: float) -> Json:
    """One rate of acceptance: what was measured, and what the theorem makes of its times."""
    rounds, drafted = sum(text.rounds for text in texts), sum(text.drafted for text in texts)
    judging = sum(text.judging for text in texts)
    times = {
        "draft_step": sum(text.draft for text in texts) / drafted,
        "verify_pass": judging / rounds,
        "round_trip": max(0.0, sum(text.verdict for text in texts) - judging) / rounds,
    }
    found = sum((text.alpha or 0.0) * text.drafted for text in texts) / drafted
    rate = overall([text.rate for text in texts])
    row: Json = {
        "gamma": gamma,
        "alpha": alpha,
        "found_alpha": found,
        "tokens_per_second": rate,
        "rates": [text.rate for text in texts],
        "speed_up": rate / reference,
        "seconds": times,
        "foretold": foretold(found, gamma, times),
        "foretold_at_planted": foretold(alpha, gamma, times),
        "of_foretold": rate / foretold(found, gamma, times),
    }
    if theirs:
        row["assisted"] = _assisted_row(gamma, theirs, [len(text.tokens) for text in texts][: len(theirs)], reference)
    return row


def _assisted_row(gamma: int, theirs: list[Generated], tokens: list[int], reference: float) -> Json:
    rate = overall([each.rate for each in theirs])
    per_pass = sum(tokens) / sum(each.passes or 1 for each in theirs)
    return {
        "tokens_per_second": rate,
        "rates": [each.rate for each in theirs],
        "speed_up": rate / reference,
        "tokens_per_pass": per_pass,
        "found_alpha": alpha_of(min(max(per_pass, 1.0), gamma + 1.0), gamma),
    }


# ------------------------------------------------------------------------------------------------------ outcome cache


def cache(bench: Bench) -> Json:
    """With the outcome cache and without, on each placement of the draft that this machine has."""
    plan = bench.plan
    target, draft = (
        cached(DEMO / name, depth, bench.scratch)
        for name, depth in (("target", plan.depth), ("draft", plan.draft_depth))
    )
    prompts = spread(read_prompts(DEMO / "prompts.jsonl"), plan.cache_prompts)
    drafts = {"draft on the processor": "cpu"}
    if bench.device.type == "cuda" and torch.cuda.device_count() > 1:
        drafts["draft on a second GPU"] = f"cuda:{((bench.device.index or 0) + 1) % torch.cuda.device_count()}"
    rows: list[Json] = []
    for placement, draft_device in drafts.items():
        devices = {"verifier_service": str(bench.device), "draft_service": draft_device}
        how = Processes(plan.dtype, 1, plan.dtype, 1)
        # One draft service for both ways: a request says whether it wants the cache.
        with PairOn(
            target, draft, how, devices=devices, planted=False, max_sequences=2, flags=_flags(plan.kv_mb)
        ) as services:
            bench.told(f"the services are up, {placement}")
            for way in plan.cache_ways:
                write(services.client, prompts[0], plan.cache_tokens, **WAYS[way])  # not measured
                for gamma in plan.cache_gammas:
                    if rows and bench.deadline.over:
                        break
                    rows.append({"placement": placement, "way": way} | _cache_row(bench, services, prompts, way, gamma))
    return {"depth": plan.depth, "draft_depth": plan.draft_depth, "rows": rows}


def _flags(kv_mb: int) -> dict[str, tuple[str, ...]]:
    room = ("--kv-cache-mb", str(max(kv_mb, 64)), "--max-sequence-tokens", "512")
    return {"verifier_service": room, "draft_service": room}


def _cache_row(bench: Bench, services: PairOn, prompts: list[str], way: str, gamma: int) -> Json:
    given = argparse.Namespace(tokens=bench.plan.cache_tokens, repetitions=1)
    found = measure(services.client, prompts, {**WAYS[way], "gamma": gamma}, given)
    without = found["per_round_ms"]["without"]
    row: Json = {
        "gamma": gamma,
        **{name: found[name] for name in ("ratio", "ratio_quartiles", "tokens_per_second", "hit_rate", "acceptance")},
        "draft_ms": without["draft"],
        "pass_ms": without["forward"] + without["verify"],
        "drafting_counts": without["draft"] >= (without["forward"] + without["verify"]) / 2,
    }
    bench.told(f"{way}, γ = {gamma}: {row['ratio']:.2f} with the cache over without")
    return row
