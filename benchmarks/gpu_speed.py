"""How fast it is: parts `kernel`, `alone`, `pair`, `streams` and `engine` of `benchmarks.gpu`.

`alone` is one stream. Outrider runs passes as its verifier does: `ModelRunner.forward`, then `verify`; transformers has
`generate`. All write the text that the models were planted with; a contender that writes another one is none. `pair`:
both services write one text after the other at temperature 0, beside the target alone and, in this process,
transformers' assisted generation on the same two models, against Theorem 3.8. All meet the same mistakes of the draft,
since those are a matter of the text. `streams` is the closed loop of `benchmarks.load`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks import engine as engine_benchmark
from benchmarks import harness
from benchmarks import kernel as kernel_benchmark
from benchmarks.clocks import Clock
from benchmarks.contenders import Passes, Task, WrongLength, assist, completion_run
from benchmarks.gpu_bench import GpuBench, one_stream
from benchmarks.harness import Json
from benchmarks.kernel import contenders_of
from benchmarks.load import medians
from benchmarks.planted import Shape, written
from benchmarks.servers import OutriderServer, figures
from benchmarks.services import Services, await_
from kernels.sampling import SamplingParams
from kernels.verify import Proposed, implementation_for, verify
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.theory import tokens_per_second

GRAPHS, EAGER = "Outrider, graphs", "Outrider, eager"
ALONE, PAIR = "target alone", "the pair"

_GREEDY = SamplingParams(temperature=0.0)
_SPARE = 8  # positions beyond the text
_WARM_UP = 1_000  # the number of a prompt that is not measured
_LEAST_TEXTS = 4
_STREAM_TURNS = 2
_STREAM_TEXTS = 2  # a stream


def kernel(bench: GpuBench) -> Json:
    """`benchmarks.kernel`'s document, of as much as there is time for."""
    plan, path = bench.plan.kernel, implementation_for(bench.device)
    runs = harness.Runs()
    parts = ("gamma", "batch", "rules")
    if not kernel_benchmark.measure(plan, parts, contenders_of(path), bench.clock, runs, bench.left):
        bench.troubles.append("the time was over before all cases were measured")
    document: Json = {
        "plan": asdict(plan),
        "path": path,
        "device": bench.clock.describe(),
        "copy_bytes_per_second": bench.clock.copy_bandwidth(),
        "rows": runs.runs,
    }
    return document | {"aims": kernel_benchmark.aims(document)}


# -------------------------------------------------------------------------------------------- the target alone


def alone(bench: GpuBench) -> Json:
    """All shapes, each with its contenders' shares of the bound by its weights."""
    bandwidth = bench.clock.copy_bandwidth()
    return {
        "copy_bytes_per_second": bandwidth,
        "shapes": {
            shape.name: bench.tried(shape.name, partial(_shape, bench, shape, bandwidth)) for shape in bench.plan.shapes
        },
    }


def _shape(bench: GpuBench, shape: Shape, bandwidth: float) -> Json:
    plan = bench.plan
    length = plan.prompt_tokens + plan.alone_tokens + max(_SPARE, plan.gamma + 1)
    widths = (1, plan.gamma + 1)
    prompt = bench.prompt(shape, 0, plan.alone_tokens)
    bound = bandwidth / (shape.weights_read * torch.bfloat16.itemsize)
    found: Json = {}
    rates: dict[str, Callable[[], float]] = {}

    def take_in(name: str, make: Callable[[], Callable[[], float]], *, ours: bool = True) -> None:
        made = bench.tried(f"{shape.name}, {name}", make, ours=ours)
        warm = made if isinstance(made, dict) else bench.tried(f"{shape.name}, {name}", made, ours=ours)
        if isinstance(warm, dict):
            found[name] = warm
        else:  # the first text of each is not measured
            rates[name] = made  # type: ignore[assignment]

    # transformers first, and on weights of its own: a fused model has given up those it came with.
    take_in(
        "transformers",
        lambda: partial(generated, bench.clock, bench.model(shape), prompt, plan.alone_tokens),
        ours=False,
    )
    loaded = bench.loaded(shape)
    streams: dict[str, Stream] = {}

    def ours(name: str) -> Callable[[], float]:
        model_runner = one_stream(loaded, length, graphs=name == GRAPHS, widths=widths)
        streams[name] = Stream(bench.clock, model_runner, prompt, plan.alone_tokens)
        return streams[name].rate

    for name in (GRAPHS, EAGER):
        take_in(name, partial(ours, name))
    taken: dict[str, list[float]] = {name: [] for name in rates}
    for turn in bench.turns(plan.repeats if rates else 0):
        for name in harness.rotated(rates, turn):
            taken[name].append(rates[name]())
    for name, own in taken.items():
        rate = median(own)
        found[name] = {"tokens_per_second": rate, "range": [min(own), max(own)], "of_bound": rate / bound}
    fastest = next((streams[name] for name in (GRAPHS, EAGER) if name in rates), None)
    shown = ", ".join(f"{name} {median(own):.1f}" for name, own in taken.items())
    bench.told(f"{shape.name}: {shown} tokens/s of {bound:.1f}")
    return {
        "bound_tokens_per_second": bound,
        "contenders": found,
        "pass_seconds": {} if fastest is None else {str(width): fastest.pass_seconds(width) for width in widths},
    }


def generated(clock: Clock, model: Any, prompt: Sequence[int], count: int, **options: Any) -> float:
    """Tokens a second of one text by `generate`, greedily; the pass over the prompt is included.

    Raises:
        WrongLength: it is not the text that the model was planted with.
    """
    ids = torch.tensor([list(prompt)], device=clock.device)
    clock.wait()
    begin = time.perf_counter()
    with torch.inference_mode():
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=True, **options
        )
    clock.wait()
    seconds = time.perf_counter() - begin
    if text[0, len(prompt) :].tolist() != written(prompt, count, model.config.vocab_size):
        raise WrongLength("transformers wrote another text than was planted")
    return count / seconds


class Stream:
    def __init__(self, clock: Clock, model_runner: ModelRunner, prompt: Sequence[int], count: int) -> None:
        self._clock = clock
        self._model_runner = model_runner
        self._prompt = prompt
        self._count = count

    def rate(self) -> float:
        """Tokens a second of one text, of as many passes: the first is that over the prompt.

        Raises:
            WrongLength: it was another text.
        """
        count, prompt, clock, pool = self._count, self._prompt, self._clock, self._model_runner.pool
        slot = pool.allocate()
        try:
            clock.wait()
            begin = time.perf_counter()
            tokens = [self._next(slot, prompt, 0)]
            while len(tokens) < count:
                tokens.append(self._next(slot, tokens[-1:], len(prompt) + len(tokens) - 1))
            clock.wait()
            seconds = time.perf_counter() - begin
        finally:
            pool.free(slot)
        if tokens != [prompt[-1] + 1 + i for i in range(count)]:
            raise WrongLength("Outrider wrote another text than was planted")
        return count / seconds

    def pass_seconds(self, width: int) -> float:
        """Seconds of a pass over so many tokens behind a prompt, all of whose logits are asked for."""
        prompt, pool = self._prompt, self._model_runner.pool
        slot = pool.allocate()
        try:
            self._next(slot, prompt, 0)

            def work() -> None:
                pool.rollback(slot, len(prompt))
                self._model_runner.forward([Chunk(slot, [1] * width, len(prompt), 0)])

            return self._clock.wall(work).median * 1e-6
        finally:
            pool.free(slot)

    def _next(self, slot: int, tokens: Any, start: int) -> int:
        logits = self._model_runner.forward([Chunk(slot, tokens, start, len(tokens) - 1)])
        (result,) = verify(logits, [Proposed((), (), _GREEDY, 0, start + len(tokens))])
        return result.next_token


# ------------------------------------------------------------------------------------------------- the services


def pair(bench: GpuBench) -> Json:
    plan, services = bench.plan, bench.services()
    made = bench.tried("assisted generation", partial(_assisted, bench), ours=False)
    texts: dict[float, list[Json]] = {alpha: [] for alpha in plan.alphas}
    theirs: dict[float, list[Json]] = {alpha: [] for alpha in plan.alphas}
    target_alone: list[Json] = []
    for gamma in (plan.gamma, 0):
        _one(bench, services, plan.alphas[0], _WARM_UP, gamma)  # not measured
    for turn in bench.turns(plan.repeats):
        for alpha in plan.alphas:
            texts[alpha].append(_one(bench, services, alpha, turn, plan.gamma))
            if callable(made):
                theirs[alpha].append(made(bench.prompt(plan.target, turn, plan.pair_tokens, alpha)))
        target_alone.append(_one(bench, services, plan.alphas[turn % len(plan.alphas)], turn, 0))
        bench.told(f"turn {turn + 1} of {plan.repeats}")
    reference = harness.total(target_alone, "tokens") / harness.total(target_alone, "seconds")
    rows = [_row(alpha, plan.gamma, texts[alpha], theirs[alpha], reference) for alpha in plan.alphas]
    return {"alone_tokens_per_second": reference, "rows": rows}


def _assisted(bench: GpuBench) -> Callable[[Sequence[int]], Json]:
    """transformers, with the draft as its assistant, which drafts γ tokens a round, always."""
    plan = bench.plan
    target, draft = bench.model(plan.target), bench.model(plan.draft, drafts=True)
    passes = Passes(target)
    assist(draft, plan.gamma)

    def write(prompt: Sequence[int]) -> Json:
        passes.reset()
        rate = generated(bench.clock, target, prompt, plan.pair_tokens, assistant_model=draft)
        return {"tokens": plan.pair_tokens, "seconds": plan.pair_tokens / rate, "rounds": passes.count}

    write(bench.prompt(plan.target, _WARM_UP, plan.pair_tokens, plan.alphas[0]))
    return write


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


def _row(alpha: float, gamma: int, texts: Sequence[Json], theirs: Sequence[Json], reference: float) -> Json:
    """One rate of acceptance: what was measured, and what the theorem makes of its times."""
    rounds = harness.total(texts, "rounds")

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
        "alpha": alpha,
        "found_alpha": found,
        "gamma": gamma,
        "tokens_per_second": rate,
        "speed_up": rate / reference,
        "foretold": tokens_per_second(found, gamma, **times),
        "of_foretold": rate / tokens_per_second(found, gamma, **times),
        **{f"{name}_ms": 1e3 * value for name, value in times.items()},
    }
    if theirs:
        row["assisted_tokens_per_second"] = harness.total(theirs, "tokens") / harness.total(theirs, "seconds")
        row["assisted_tokens_per_pass"] = harness.total(theirs, "tokens") / harness.total(theirs, "rounds")
    return row


def streams(bench: GpuBench) -> Json:
    services, plan = bench.services(), bench.plan
    servers = {ALONE: OutriderServer(services, gamma=0), PAIR: OutriderServer(services, gamma=plan.gamma)}
    for server in servers.values():
        server.closed(_tasks(bench, 1, 0), 1)
    runs: dict[tuple[int, str], list[Json]] = {(n, name): [] for n in plan.streams for name in servers}
    for turn in bench.turns(_STREAM_TURNS):
        for n in plan.streams:
            for name, server in harness.rotated(servers.items(), turn):
                runs[n, name].append(figures(server.closed(_tasks(bench, n, turn), n)))
            shown = ", ".join(f"{name} {runs[n, name][-1]['tokens_per_second']:.1f}" for name in servers)
            bench.told(f"{n} streams: {shown} tokens/s")
    rows = [
        {"streams": n, "contender": name} | {key: medians([run[key] for run in own]) for key in own[0]}
        for (n, name), own in runs.items()
    ]
    return {"alpha": plan.stream_alpha, "gamma": plan.gamma, "rows": rows}


def _tasks(bench: GpuBench, n: int, turn: int) -> list[Task]:
    plan = bench.plan
    count = max(_LEAST_TEXTS, _STREAM_TEXTS * n)
    return [
        Task(i, bench.prompt(plan.target, i, plan.stream_tokens, plan.stream_alpha), plan.stream_tokens, 1.0, 1 + i)
        for i in range(turn * count, (turn + 1) * count)
    ]


def engine(bench: GpuBench) -> Json:
    """Of the saturated verifier: forward and verify by the device's clock, and what lies between passes."""
    address, plan = bench.services().verifier.address, bench.plan
    rows = []
    for n in plan.streams:
        prompts = [bench.prompt(plan.target, i, engine_benchmark.DECODED) for i in range(n)]
        for rounds, gamma in (("Decode", 0), ("proposals", plan.gamma)):
            # Passes of tiny models are over before all sequences are there: no trouble in a dry run.
            asked = partial(_engine, address, prompts, gamma)
            found = bench.tried(f"{n} streams, {rounds}", asked, ours=not plan.is_dry)
            rows.append({"streams": n, "rounds": rounds} | found)
    return {"rows": rows}


def _engine(address: str, prompts: Sequence[Sequence[int]], gamma: int) -> Json:
    found: Json = await_(engine_benchmark.shared(address, prompts, gamma))
    passing = found["forward_us"] + found["verify_us"]
    return found | {"verify_share": found["verify_us"] / passing}
