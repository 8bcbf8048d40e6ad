"""Many streams at once, and what of a pass is verification: parts `streams` and `share` of `benchmarks.gpu`.

It reuses the closed loop of `benchmarks.load`, on the planted pair.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from benchmarks.contenders import Task
from benchmarks.gpu_bench import Bench, Json
from benchmarks.gpu_model_runner import as_served
from benchmarks.kernel_cases import Case, Rows
from benchmarks.kernel_cases import Shape as KernelShape
from benchmarks.kernel_contenders import Transformers
from benchmarks.load_services import OutriderUnderLoad
from benchmarks.load_summary import figures
from kernels.verify import verify
from outrider.runtime.model_runner import Chunk, ModelRunner

ALONE, PAIR = "target alone", "the pair"
_LEAST_TEXTS = 4


def streams(bench: Bench) -> Json:
    """The target alone and the pair at each number of streams, in turns."""
    services = bench.planted_pair()
    contenders = {ALONE: OutriderUnderLoad(services, 0), PAIR: OutriderUnderLoad(services, bench.plan.gamma)}
    for contender in contenders.values():
        contender.closed(_tasks(bench, 1, 0), 1)
    runs: dict[int, dict[str, list[Json]]] = {n: {name: [] for name in contenders} for n in bench.plan.streams}
    for turn in range(bench.plan.stream_repeats):
        for n in bench.plan.streams:
            if turn and bench.deadline.over:
                break
            names = list(contenders) if turn % 2 else list(contenders)[::-1]
            for name in names:
                runs[n][name].append(figures(contenders[name].closed(_tasks(bench, n, turn), n)))
            told = ", ".join(f"{name} {runs[n][name][-1]['tokens_per_second']:.1f}" for name in contenders)
            bench.told(f"{n} streams: {told} tokens/s")
    return {
        "alpha": bench.plan.stream_alpha,
        "gamma": bench.plan.gamma,
        "levels": {str(n): {name: _row(found) for name, found in by_name.items()} for n, by_name in runs.items()},
    }


def _tasks(bench: Bench, n: int, turn: int) -> list[Task]:
    plan = bench.plan
    count = max(_LEAST_TEXTS, plan.texts_per_stream * n)
    return [
        Task(i, bench.prompt(plan.target, i, plan.stream_tokens, plan.stream_alpha), plan.stream_tokens, 1.0, 1 + i)
        for i in range(turn * count, (turn + 1) * count)
    ]


def _row(runs: list[Json]) -> Json:
    """The medians over runs."""
    row: Json = {"runs": len(runs)}
    for name in ("tokens_per_second", "alpha", "gamma", "tokens_per_round", "rounds_per_pass"):
        known = [run[name] for run in runs if run[name] is not None]
        row[name] = median(known) if known else None
    for name in ("ttft_ms", "itl_token_ms", "itl_piece_ms"):
        known = [run[name] for run in runs if run[name] is not None]
        row[name] = {key: median(each[key] for each in known) for key in known[0]} if known else None
    return row


# -------------------------------------------------------------------------------------------------- share of the pass


def share(bench: Bench) -> Json:
    """Forward and verification of passes over many sequences, each timed by itself."""
    plan = bench.plan
    most = max(plan.batches)
    loaded = bench.loaded(plan.target)
    length = plan.context + plan.gamma + 1
    model_runner = as_served(loaded, most, length, widths=(1, plan.gamma + 1))
    rows = Rows.make(plan.target.vocab, torch.bfloat16, bench.device)
    slots = [model_runner.pool.allocate() for _ in range(most)]
    for slot in slots:
        model_runner.forward([Chunk(slot, [1] * plan.context, 0, plan.context)])
    found = {}
    for batch in plan.batches:
        found[str(batch)] = _share(
            bench, model_runner, slots[:batch], Case(KernelShape(plan.target.vocab, batch, plan.gamma), rows)
        )
        bench.told(f"{batch} sequences: {found[str(batch)]['share']:.1%} of the pass is verification")
    return {"gamma": plan.gamma, "context": plan.context, "batches": found}


def _share(bench: Bench, model_runner: ModelRunner, slots: list[int], case: Case) -> Json:
    plan = bench.plan
    chunks = [Chunk(slot, [1] * (plan.gamma + 1), plan.context, 0) for slot in slots]

    def forward() -> None:
        for slot in slots:
            model_runner.pool.rollback(slot, plan.context)
        model_runner.forward(chunks)

    # In the model's dtype, as the engine passes them on. `benchmarks.kernel_cases` makes distributions and drafts like
    # those of a trained pair, most of which are accepted.
    logits = case.logits.flatten(0, 1)
    passing = bench.clock.wall(forward).median
    judging = bench.clock.wall(lambda: verify(logits, case.proposals)).median
    row: Json = {"forward_us": passing, "verify_us": judging, "share": judging / (passing + judging)}
    theirs: Any = Transformers()
    refusal = theirs.refusal(case)
    if refusal is not None:
        return row | {"transformers": {"error": refusal}}
    sampling = bench.clock.wall(theirs.start(case).run).median
    return row | {"transformers": {"verify_us": sampling, "share": sampling / (passing + sampling)}}
