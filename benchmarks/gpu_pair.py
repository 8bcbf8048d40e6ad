"""Both services on the device: parts `pair`, `streams` and `cache` of `benchmarks.gpu`.

`pair`: the planted pair writes one text after the other at temperature 0, with proposals of γ tokens, with the target
alone, and, in this process, by transformers' assisted generation on the same two models, against Theorem 3.8. All meet
the same mistakes of the draft, since those are a matter of the text. `streams`: the closed loop of `benchmarks.load`.
`cache`: the outcome cache needs a draft whose runners-up mean something, so it is measured on the demo pair, whose
target is deepened on the device and whose draft runs on the processor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import harness, load_report
from benchmarks.contenders import Task, WrongLength
from benchmarks.deepen import cached
from benchmarks.gpu_bench import START_TIMEOUT_S, GpuBench
from benchmarks.gpu_device import Assisted
from benchmarks.harness import DEMO, Json
from benchmarks.outcome_cache import WAYS, compare
from benchmarks.outrider_contender import ANYWHERE, OutriderServer, Services, completion_run
from benchmarks.planted import written
from outrider.theory import expected_tokens, tokens_per_second

ALONE, PAIR = "target alone", "the pair"
_WARM_UP = 1_000  # the number of a prompt that is not measured
_LEAST_TEXTS = 4


def pair(bench: GpuBench) -> Json:
    """All rates of acceptance, in turns."""
    plan, services = bench.plan, bench.services()
    made = bench.tried("assisted generation", lambda: _assisted(bench), ours=False)
    assisted = made if isinstance(made, Assisted) else None
    texts: dict[float, list[Json]] = {alpha: [] for alpha in plan.alphas}
    theirs: dict[float, list[tuple[float, int]]] = {alpha: [] for alpha in plan.alphas}
    alone: list[Json] = []
    for gamma in (plan.gamma, 0):
        _one(bench, services, plan.alphas[0], _WARM_UP, gamma)  # not measured
    for turn in bench.deadline.turns(plan.repeats):
        for alpha in plan.alphas:
            texts[alpha].append(_one(bench, services, alpha, turn, plan.gamma))
            if assisted is not None:
                prompt = bench.prompt(plan.target, turn, plan.pair_tokens, alpha)
                theirs[alpha].append(assisted.write(prompt, plan.pair_tokens))
        alone.append(_one(bench, services, plan.alphas[turn % len(plan.alphas)], turn, 0))
        bench.told(f"turn {turn + 1} of {plan.repeats}")
    reference = harness.total(alone, "tokens") / harness.total(alone, "seconds")
    rows = {f"{alpha:g}": _row(bench, alpha, texts[alpha], theirs[alpha], reference) for alpha in plan.alphas}
    return {"alone_tokens_per_second": reference, "alphas": rows, "assisted": made if isinstance(made, dict) else {}}


def _assisted(bench: GpuBench) -> Assisted:
    assisted, plan = Assisted(bench), bench.plan
    assisted.write(bench.prompt(plan.target, _WARM_UP, plan.pair_tokens, plan.alphas[0]), plan.pair_tokens)
    return assisted


def _one(bench: GpuBench, services: Services, alpha: float, number: int, gamma: int) -> Json:
    """A text of the services, held to what was planted."""
    count, shape = bench.plan.pair_tokens, bench.plan.target
    prompt = bench.prompt(shape, number, count, alpha)
    begin = time.perf_counter()
    done = services.client.complete(
        list(prompt), max_new_tokens=count, ignore_eos=True, temperature=0.0, gamma=gamma, timeout=60.0
    )
    run = completion_run(done, time.perf_counter() - begin, Task(number, prompt, count, 0.0, 0))
    if list(done.token_ids) != written(prompt, count, shape.vocab):
        raise WrongLength(f"the pair wrote another text than it was planted with (α = {alpha}, γ = {gamma})")
    return run


def _row(
    bench: GpuBench, alpha: float, texts: Sequence[Json], theirs: Sequence[tuple[float, int]], reference: float
) -> Json:
    """One rate of acceptance: what was measured, and what the theorem makes of its times."""
    gamma, rounds = bench.plan.gamma, harness.total(texts, "rounds")

    def seconds(*phases: str) -> float:
        return max(0.0, sum(text["phases"][phase] for text in texts for phase in phases))

    times = {
        "draft_step": seconds("draft") / harness.total(texts, "drafted"),
        "verify_pass": seconds("forward", "verify") / rounds,
        "round_trip": seconds("wire", "queue") / rounds,
    }
    found = harness.alpha_of(texts) or 0.0
    rate = harness.total(texts, "tokens") / harness.total(texts, "seconds")
    row: Json = {
        "gamma": gamma,
        "alpha": alpha,
        "found_alpha": found,
        "tokens_per_second": rate,
        "rates": [text["tokens"] / text["seconds"] for text in texts],
        "speed_up": rate / reference,
        "seconds": times,
        "foretold": tokens_per_second(found, gamma, **times),
        "of_foretold": rate / tokens_per_second(found, gamma, **times),
    }
    if theirs:
        tokens = bench.plan.pair_tokens
        their_rate = len(theirs) / sum(1 / each for each, _ in theirs)
        per_pass = len(theirs) * tokens / sum(passes for _, passes in theirs)
        row["assisted"] = {
            "tokens_per_second": their_rate,
            "speed_up": their_rate / reference,
            "tokens_per_pass": per_pass,
            "found_alpha": alpha_of(min(max(per_pass, 1.0), gamma + 1.0), gamma),
        }
    return row


def alpha_of(tokens_per_round: float, gamma: int) -> float:
    """The α at which a round of γ drafts gives so many tokens in expectation: `expected_tokens` the other way round.

    Raises:
        ValueError: γ is 0, or no α in [0, 1] gives so many.
    """
    if gamma < 1 or not 1 <= tokens_per_round <= gamma + 1:
        raise ValueError(f"{tokens_per_round} tokens a round of {gamma} drafts; 1 to γ + 1, with γ of 1 at the least")
    low, high = 0.0, 1.0
    for _ in range(60):  # more than a double has digits
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens_per_round else (low, middle)
    return (low + high) / 2


def streams(bench: GpuBench) -> Json:
    """The target alone and the pair at each number of streams, in turns."""
    services, plan = bench.services(), bench.plan
    servers = {ALONE: OutriderServer(services, gamma=0), PAIR: OutriderServer(services, gamma=plan.gamma)}
    for server in servers.values():
        server.closed(_tasks(bench, 1, 0), 1)
    runs: dict[int, dict[str, list[Json]]] = {n: {name: [] for name in servers} for n in plan.streams}
    for turn in bench.deadline.turns(plan.stream_repeats):
        for n in plan.streams:
            for name, server in harness.rotated(servers.items(), turn):
                runs[n][name].append(load_report.figures(server.closed(_tasks(bench, n, turn), n)))
            shown = ", ".join(f"{name} {runs[n][name][-1]['tokens_per_second']:.1f}" for name in servers)
            bench.told(f"{n} streams: {shown} tokens/s")
    levels = {
        str(n): {
            name: {key: load_report.medians([run[key] for run in own]) for key in own[0]}
            for name, own in by_name.items()
        }
        for n, by_name in runs.items()
    }
    return {"alpha": plan.stream_alpha, "gamma": plan.gamma, "levels": levels}


def _tasks(bench: GpuBench, n: int, turn: int) -> list[Task]:
    plan = bench.plan
    count = max(_LEAST_TEXTS, plan.texts_per_stream * n)
    return [
        Task(i, bench.prompt(plan.target, i, plan.stream_tokens, plan.stream_alpha), plan.stream_tokens, 1.0, 1 + i)
        for i in range(turn * count, (turn + 1) * count)
    ]


def cache(bench: GpuBench) -> Json:
    """With the outcome cache and without, on each placement of the draft that this machine has."""
    plan = bench.plan
    target = cached(DEMO / "target", plan.depth, bench.scratch)
    draft = cached(DEMO / "draft", plan.draft_depth, bench.scratch)
    prompts = harness.spread(harness.read_prompts(DEMO / "prompts.jsonl"), plan.cache_prompts)
    drafts = {"draft on the processor": "cpu"}
    if bench.device.type == "cuda" and torch.cuda.device_count() > 1:
        drafts["draft on a second GPU"] = f"cuda:{((bench.device.index or 0) + 1) % torch.cuda.device_count()}"
    rows: list[Json] = []
    for placement, draft_device in drafts.items():
        room = ["--kv-cache-mb", str(max(plan.kv_mb, 64)), "--max-sequence-tokens", "512"]
        # One draft service for both ways: a request says whether it wants the cache.
        flags = {
            "verifier_service": ["--device", str(bench.device), *room],
            "draft_service": ["--device", draft_device, *room],
        }
        made = Services(target, draft, dtype=plan.dtype, place=ANYWHERE, flags=flags, start_timeout=START_TIMEOUT_S)
        with made as services:
            bench.told(f"the services are up, {placement}")
            for way in plan.cache_ways:
                warm_up: Any = {**WAYS[way], "max_new_tokens": plan.cache_tokens, "ignore_eos": True}
                services.client.complete(prompts[0], **warm_up)  # not measured
                for gamma in plan.cache_gammas:
                    if not rows or not bench.deadline.over:
                        rows.append(
                            {"placement": placement, "way": way} | _cached(bench, services, prompts, way, gamma)
                        )
    return {"depth": plan.depth, "draft_depth": plan.draft_depth, "rows": rows}


def _cached(bench: GpuBench, services: Services, prompts: list[str], way: str, gamma: int) -> Json:
    options: Any = {**WAYS[way], "gamma": gamma}
    found = compare(services.client, prompts, options, bench.plan.cache_tokens, 1)
    without = found["per_round_ms"]["without"]
    passing = without["forward"] + without["verify"]
    bench.told(f"{way}, γ = {gamma}: {found['ratio']:.2f} with the cache over without")
    return {
        "gamma": gamma,
        **{name: found[name] for name in ("ratio", "ratio_quartiles", "tokens_per_second", "hit_rate", "acceptance")},
        "draft_ms": without["draft"],
        "pass_ms": passing,
        "drafting_counts": without["draft"] >= passing / 2,
    }
