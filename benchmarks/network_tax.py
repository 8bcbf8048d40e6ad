"""The cost of gRPC in a round: the share of its time outside drafting, queue, pass and verification.

The same pair with each service in a process, over gRPC on loopback, and with both in one process, with queues in place
of gRPC (`benchmarks.one_process`). Both write the same texts, with the same seeds and a fixed γ, in turns. gRPC adds
the difference: in one process too, rounds pass through the event loop, the checks and the engines of both services.
There a round reaches the verifier at once, and waits in its queue for the thread of the engine. So the difference is
given with the queue too.

In the same turns a minimal gRPC program of two processes (`benchmarks.network_floor`) plays as many rounds, with the
same computing on each side and nothing else: what idle cores and cold caches make any such program pay.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import harness, plots
from benchmarks.contenders import Write, take_turns, text_digest, texts, tokenised, warm_up
from benchmarks.harness import PHASES, Bench, Json, number, progress
from benchmarks.network_floor import Rounds, floor
from benchmarks.round_legs import LEGS, median_legs, noted_rounds
from benchmarks.services import RULE, Models, Services, models_of, one_process
from outrider.client import Client
from outrider.evaluation.deployment import round_seconds
from outrider.evaluation.pictures import picture, stacked

GRPC, ONE, MINIMAL = "gRPC", "one process", "minimal program"
NOTED = "noted"
"""The arm whose services note the times of a round. It gives the legs, and no other figure."""
TAX = ("wire", "other")
WITH_QUEUE = (*TAX, "queue")
AIM = 0.015
"""The largest share of a round that gRPC should add."""
MOST_TIMES = 1.25
"""The most that the time outside should be, relative to that of the minimal program."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("network_tax", __doc__, quick="few texts, the demo pair only")
    harness.target_options(parser, factor=12)
    # A difference of a few percent: medians of more texts.
    harness.text_options(parser, prompts=4, new_tokens=96, repetitions=6)
    parser.set_defaults(gamma=8)
    parser.add_argument("--dtype", default="bfloat16")
    few = {"only": "demo", "prompts": 1, "new_tokens": 16, "repetitions": 1}
    given = harness.parse(parser, arguments, few)
    return harness.run("network_tax", given, measure, summarise, table, draw)


def summarise(bench: Bench) -> Json:
    keys, noted = ("pair", "temperature"), bench.select(arm=NOTED)
    return {
        "summary": harness.tree([run for run in bench.runs if run not in noted], keys, figures),
        "legs_us": harness.tree(noted, keys, lambda runs: runs[0]["legs_us"]),
    }


def measure(bench: Bench) -> None:
    given = bench.given
    for models in models_of(bench):
        prompts = tokenised(models.target, bench.some_prompts)
        with ExitStack() as running:
            services = running.enter_context(Services(models.target, models.draft, dtype=given.dtype))
            together = running.enter_context(one_process(models.target, models.draft, dtype=given.dtype))
            play = running.enter_context(floor(models.target, models.draft, given.dtype))
            arms: dict[str, Write] = {
                GRPC: partial(_written, services.client, gamma=given.gamma),
                ONE: partial(_written, together, gamma=given.gamma),
                MINIMAL: partial(_played, play, gamma=given.gamma),
            }
            warm_up(arms, [task for _, task in islice(texts(prompts, given.new_tokens, 1), 2)])
            take_turns(bench, {"pair": models.name}, texts(prompts, given.new_tokens, given.repetitions), arms)
        _note_legs(bench, models, list(texts(prompts, given.new_tokens, 1)))
        progress(f"{models.name}: {len(bench.select(pair=models.name))} texts")


def _note_legs(bench: Bench, models: Models, tasks: Sequence[tuple[Json, Any]]) -> None:
    """Writes each text once more, with services that note when a round passes their functions."""
    temperatures = sorted({keys["temperature"] for keys, _ in tasks})
    if all(bench.has(pair=models.name, temperature=each, arm=NOTED) for each in temperatures):
        return
    spans: dict[Any, list[tuple[float, float]]] = {each: [] for each in temperatures}
    with TemporaryDirectory() as folder:
        command, dtype = ("benchmarks.round_legs", folder), bench.given.dtype
        with Services(models.target, models.draft, dtype=dtype, command=command) as noting:
            for keys, task in [tasks[0], *tasks]:
                began = time.perf_counter()
                _written(noting.client, task, bench.given.gamma)
                spans[keys["temperature"]].append((began, time.perf_counter()))
        del spans[tasks[0][0]["temperature"]][0]
        rounds = noted_rounds(Path(folder))
    for temperature, own in spans.items():
        inside = [each for each in rounds if any(began <= each[0][1] <= ended for began, ended in own)]
        if not inside:
            raise ValueError(f"the services noted no round at T = {temperature}; raise --new-tokens")
        bench.add({"pair": models.name, "temperature": temperature, "arm": NOTED, "legs_us": median_legs(inside)})


def _written(client: Client, task: Any, gamma: int) -> Json:
    began = time.perf_counter()
    done = client.complete(
        list(task.token_ids), max_new_tokens=task.new_tokens, temperature=task.temperature, seed=task.seed,
        rule=RULE, gamma=gamma, outcome_cache=False, ignore_eos=True,
    )  # fmt: skip
    return {
        "seconds": time.perf_counter() - began,
        "tokens": len(done.token_ids),
        "rounds": done.statistics.num_rounds - 1,
        "digest": text_digest(done.token_ids),
        "parts": round_seconds([done]),  # None without a second round
    }


def _played(play: Rounds, task: Any, gamma: int) -> Json:
    began, rounds = time.perf_counter(), max(1, task.new_tokens // 4)
    seconds = play(rounds=rounds, gamma=gamma, temperature=task.temperature)
    parts = dict.fromkeys(PHASES, 0.0) | {
        "draft": seconds["draft"], "forward": seconds["target"], "wire": seconds["other"]
    }  # fmt: skip
    spent = time.perf_counter() - began
    return {"seconds": spent, "tokens": task.new_tokens, "rounds": rounds, "digest": "", "parts": parts}


def figures(runs: Sequence[Json]) -> Json:
    """Each arm: medians over repetitions of the mean round. `share` is that of the tax, `added_share` that of the tax
    beyond the one in one process; `added_with_queue` counts the queue as tax. `times` is the tax relative to that of
    the minimal program.
    """
    by_arm = harness.grouped(runs, "arm")
    texts_of = {arm: {(run["repetition"], run["prompt"]): run["digest"] for run in own} for arm, own in by_arm.items()}
    means = {arm: [_mean_round(own) for own in harness.grouped(by_arm[arm], "repetition").values()] for arm in by_arm}
    found = {}
    for arm in (GRPC, ONE, MINIMAL):
        pairs = list(zip(means[arm], means[ONE], strict=True))
        times = [_tax(own) / _tax(least) for own, least in zip(means[arm], means[MINIMAL], strict=True)]
        shares = [_tax(own) / sum(own.values()) for own in means[arm]]
        added, with_queue = (
            [(_tax(own, parts) - _tax(one, parts)) / sum(own.values()) for own, one in pairs]
            for parts in (TAX, WITH_QUEUE)
        )
        found[arm] = {
            "round_us": {part: median(each[part] for each in means[arm]) for part in PHASES},
            "tax_us": median(map(_tax, means[arm])),
            **harness.with_range("share", shares),
            **harness.with_range("added_share", added),
            **harness.with_range("added_with_queue", with_queue),
            **harness.with_range("times", times),
            "rounds": int(harness.total(by_arm[arm], "rounds")),
            "same_text": None if arm == MINIMAL else texts_of[arm] == texts_of[GRPC],
        }
    return found


def _tax(round_: Json, parts: Sequence[str] = TAX) -> float:
    return float(sum(round_[part] for part in parts))


def _mean_round(runs: Sequence[Json]) -> Json:
    """Microseconds of each part; raises ValueError where no text has a second round."""
    known = [run for run in runs if run["parts"] is not None]
    rounds = harness.total(known, "rounds")
    if not rounds:
        raise ValueError("each text has one round; at least 2 are needed: raise --new-tokens")
    return {part: 1e6 * sum(run["rounds"] * run["parts"][part] for run in known) / rounds for part in PHASES}


def table(document: Json) -> str:
    columns: harness.Columns = {
        **{f"{part}, µs": lambda arm, part=part: number(arm["round_us"][part], 0) for part in PHASES},  # type: ignore[misc]
        "round, ms": lambda arm: number(sum(arm["round_us"].values()) / 1e3, 2),
        "tax, ms": lambda arm: number(arm["tax_us"] / 1e3, 2),
        "share": lambda arm: _percent(arm, "share"),
        "gRPC adds": lambda arm: _percent(arm, "added_share"),
        "with the queue": lambda arm: _percent(arm, "added_with_queue"),
        "× minimal": lambda arm: harness.between(arm, "times"),
        "same text": lambda arm: {None: "–", True: "yes", False: "no"}[arm["same_text"]],
    }
    lines = [
        f"- ABOVE the aim of {AIM:.1%}: {pair} pair, T = {temperature}: gRPC adds {_percent(arms[GRPC], 'added_share')}"
        for (pair, temperature), arms in harness.flat(document["summary"], 2)
        if pair == "deepened" and arms[GRPC]["added_share"] > AIM
    ]
    lines += [
        f"- ABOVE the aim of {MOST_TIMES} × minimal: {pair} pair, T = {temperature}: {arms[GRPC]['times']:.2f}"
        for (pair, temperature), arms in harness.flat(document["summary"], 2)
        if arms[GRPC]["times"] > MOST_TIMES
    ]
    legs: harness.Columns = {
        f"{leg}, µs": lambda found, leg=leg: number(found[leg], 0)  # type: ignore[misc]
        for leg in LEGS
    }
    tables = [
        harness.summary_table(document["summary"], ["pair", "T", ""], columns),
        harness.summary_table(document["legs_us"], ["pair", "T"], legs),
    ]
    return "\n".join([*lines, "", "\n\n".join(tables)])


def _percent(arm: Json, name: str) -> str:
    return harness.between(arm, name, ".1%")


def draw(document: Json, path: Path) -> None:
    rows = list(harness.flat(document["summary"], 2))
    note = f"{plots.caption(document)}. Percent: wire and other."
    temperatures = len({temperature for (_, temperature), _ in rows})
    with picture(path, len(rows) // temperatures, temperatures, size=(4.6, 2.0), note=note) as panels:
        for panel, ((pair, temperature), arms) in zip(panels.flat, rows, strict=True):
            ends = stacked(
                panel, list(arms), [arm["round_us"] for arm in arms.values()], dict(zip(PHASES, PHASES, strict=True))
            )
            for at, (end, arm) in enumerate(zip(ends, arms.values(), strict=True)):
                panel.annotate(f" {arm['share']:.1%}", (end, at), va="center", fontsize=8)
            panel.set_xlim(right=1.15 * max(ends))
            panel.set_title(f"{pair} pair, T = {temperature}", fontsize=9)


if __name__ == "__main__":
    sys.exit(main())
