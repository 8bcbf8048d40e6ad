"""The speed of a GPU: parts `kernel`, `alone`, `profile`, `pair`, `streams` and `engine` of `benchmarks.gpu`.

`alone` is one stream of a target: Outrider runs it as the verifier does, with captured steps in a row, and by single
steps, with graphs and without; transformers has `generate`. `profile`
lists the kernels of a pass. `pair` is one stream through both services at temperature 0, beside the target alone and
transformers' assisted generation on the same two models, and Theorem 3.8. `streams` is a closed loop as in
`benchmarks.load`. All write the known text of the synthetic models: the draft's mistakes depend on the text, so every
contender meets the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import engine as engine_benchmark
from benchmarks import harness
from benchmarks import kernel as kernel_benchmark
from benchmarks.contenders import (
    OutriderServer,
    Task,
    Unavailable,
    Write,
    WrongText,
    outrider_writer,
    take_turns,
    text_digest,
    text_run,
    transformers_writer,
)
from benchmarks.gpu_checks import paged_model
from benchmarks.harness import Json, Runs, compared, medians, predicted_ratio
from benchmarks.load import figures
from benchmarks.services import await_
from benchmarks.synthetic_models import Shape, target_text
from benchmarks.timing import Timer
from kernels.sampling import Draw, SamplingParams
from kernels.verify import Proposed, implementation_for, verify
from outrider.runtime.cuda_graph import capturer_for
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.loader import LoadedModel
from outrider.runtime.memory import MIB
from outrider.runtime.model_runner import Chunk, ModelRunner

if TYPE_CHECKING:
    from benchmarks.gpu import GpuBench

IN_A_ROW, GRAPHS, EAGER = "Outrider, steps in a row", "Outrider, graphs", "Outrider, eager"
ALONE, PAIR, ASSISTED = "target alone", "the pair", "assisted generation"
ADAPTIVE = "the pair, adaptive γ"

_CAPTURE_SECONDS, _CAPTURE_BYTES = 60.0, 4096 * MIB
_GREEDY = SamplingParams(temperature=0.0)
_WARM_UP = 1_000  # the number of a text that is not measured
_LEAST_TEXTS = 4
_STREAM_ALPHA = 0.8  # one of the plan's
_STREAM_TURNS = 2
_STREAM_TEXTS = 2  # a stream
_PROFILED_PASSES = 5
_SHOWN_KERNELS, _KERNEL_NAME = 16, 80  # those that take longest, and characters of a name


def kernel(bench: GpuBench) -> Json:
    plan, timer, runs = bench.plan.kernel, bench.timer, Runs()
    if not kernel_benchmark.measure(plan, ("gamma", "batch", "rules"), timer, runs, bench.left):
        bench.errors.append("the time was over before all cases were measured")
    document = kernel_benchmark.head(plan, timer)
    document |= {"copy_bytes_per_second": timer.copy_bandwidth(), "rows": runs.runs}
    return document | {"aims": kernel_benchmark.aims(document)}


def known_text(write: Write, vocab: int) -> Write:
    """The same writer, which raises `WrongText` where it writes another text than the synthetic target."""

    def checked(task: Task) -> Json:
        run = write(task)
        if run["digest"] != text_digest(target_text(task.token_ids, task.new_tokens, vocab)):
            raise WrongText(f"prompt {task.prompt}: it wrote another text than the synthetic target does")
        return run

    return checked


def alone(bench: GpuBench) -> Json:
    """All shapes, each with its contenders' shares of the bound: the rate at which the weights can be read."""
    bandwidth = bench.timer.copy_bandwidth()
    shapes = {
        shape.name: bench.attempt(shape.name, partial(_shape, bench, shape, bandwidth)) for shape in bench.plan.shapes
    }
    return {"copy_bytes_per_second": bandwidth, "shapes": shapes}


def _shape(bench: GpuBench, shape: Shape, bandwidth: float) -> Json:
    plan = bench.plan
    bound = bandwidth / (shape.weights_read * torch.bfloat16.itemsize)
    task = bench.task(shape, 0, plan.alone_tokens)
    widths = (1, plan.gamma + 1)
    found: Json = {}
    writers: dict[str, Write] = {}
    streams: list[Stream] = []

    def add(name: str, make: Callable[[], Write], *, ours: bool = True) -> None:
        def warm() -> Write:
            write = known_text(make(), shape.vocab)
            write(task)
            return write

        made = bench.attempt(f"{shape.name}, {name}", warm, ours=ours)
        if isinstance(made, dict):
            found[name] = made
        else:
            writers[name] = made

    def outrider(name: str) -> Write:
        length = len(task.token_ids) + plan.alone_tokens + max(8, plan.gamma + 1)
        sizes = (*widths, plan.prompt_tokens)  # a verifier captures as many rows for its other sequences
        streams.append(Stream(bench.timer, one_stream(loaded, length, graphs=name == GRAPHS, widths=sizes)))
        return streams[-1].write

    def in_a_row() -> Write:
        return partial(write_in_a_row, captured_loop(streams[0].model_runner, plan.alone_tokens))

    # transformers first, and on weights of its own: a fused decoder replaces those that it is made of.
    add("transformers", lambda: transformers_writer(bench.model(shape)), ours=False)
    loaded = bench.loaded(shape)
    for name in (GRAPHS, EAGER):
        add(name, partial(outrider, name))
    if GRAPHS in writers:
        add(IN_A_ROW, in_a_row)
    runs = Runs()
    turns = bench.turns(plan.repeats if writers else 0)
    take_turns(runs, {"shape": shape.name}, (({"repetition": turn}, task) for turn in turns), writers)
    for name, own in harness.grouped(runs.runs, "arm").items():
        rates = list(harness.rates(own).values())
        rate = median(rates)
        found[name] = {"tokens_per_second": rate, "range": [min(rates), max(rates)], "of_bound": rate / bound}
    passes = {str(width): streams[0].pass_seconds(task, width) for width in widths} if streams else {}
    return {"bound_tokens_per_second": bound, "contenders": found, "pass_seconds": passes}


def one_stream(loaded: LoadedModel, max_length: int, *, graphs: bool, widths: Sequence[int]) -> ModelRunner:
    """The model as a verifier runs it: with CUDA graphs (on a CPU, steps called again), or without.

    Raises:
        Unavailable: graphs are asked for, and the attention of this device cannot be captured.
    """
    model_runner = paged_model(loaded, 1, max_length)
    attention = model_runner.attention
    if graphs and not attention.can_be_captured(loaded.device):
        raise Unavailable(f"{attention.name} cannot be captured ({attention.reason})")
    if graphs:
        model_runner.capture(
            capturer_for(loaded.device),
            max_sequences=1,
            widest=max(widths),
            seconds=_CAPTURE_SECONDS,
            most_bytes=_CAPTURE_BYTES,
        )
    model_runner.warm_up(widths)
    return model_runner


def captured_loop(model_runner: ModelRunner, tokens: int) -> DecodeLoop:
    """The decode loop of a target, for so many tokens of one sequence.

    Raises:
        Unavailable: its steps cannot be captured.
    """
    loaded = model_runner.loaded
    loop = DecodeLoop(model_runner, loaded.vocab_size, None)
    summary = loop.capture(
        capturer_for(loaded.device),
        sequences=1,
        tokens=tokens,
        with_kernels=implementation_for(loaded.device) == "triton",
        seconds=_CAPTURE_SECONDS,
        most_bytes=_CAPTURE_BYTES,
    )
    if summary.startswith("none"):
        raise Unavailable(summary)
    return loop


def write_in_a_row(loop: DecodeLoop, task: Task) -> Json:
    """One text: the prompt and all its tokens by one call."""
    pool, prompt = loop.model_runner.pool, task.token_ids
    slot = pool.allocate()
    begin = time.perf_counter()
    try:
        (samples,) = loop.decode([Chunk(slot, prompt, 0, len(prompt) - 1)], [[Draw(_GREEDY)] * task.new_tokens])
    finally:
        pool.free(slot)
    seconds, tokens = time.perf_counter() - begin, [each.token for each in samples]
    return text_run("Outrider", task, tokens, {"forward": seconds}, seconds=seconds, rounds=len(tokens))


class Stream:
    def __init__(self, timer: Timer, model_runner: ModelRunner) -> None:
        self._timer = timer
        self.model_runner = model_runner

    def write(self, task: Task) -> Json:
        """One text by as many steps; the first is that over the prompt."""
        prompt, pool = task.token_ids, self.model_runner.pool
        slot = pool.allocate()
        begin = time.perf_counter()
        try:
            tokens = [self._next(slot, prompt, 0)]
            while len(tokens) < task.new_tokens:
                tokens.append(self._next(slot, tokens[-1:], len(prompt) + len(tokens) - 1))
        finally:
            pool.free(slot)
        seconds = time.perf_counter() - begin
        return text_run("Outrider", task, tokens, {"forward": seconds}, seconds=seconds, rounds=len(tokens))

    def pass_seconds(self, task: Task, width: int) -> float:
        with self.passes(task, width) as work:
            return self._timer.wall(work)["median"] * 1e-6

    @contextmanager
    def passes(self, task: Task, width: int) -> Iterator[Callable[[], None]]:
        """Yields a step of so many tokens behind the prompt, with the logits of all."""
        prompt, pool = task.token_ids, self.model_runner.pool
        slot = pool.allocate()

        def work() -> None:
            pool.rollback(slot, len(prompt))
            self.model_runner.forward([Chunk(slot, [1] * width, len(prompt), 0)])

        try:
            self._next(slot, prompt, 0)
            yield work
        finally:
            pool.free(slot)

    def _next(self, slot: int, tokens: Any, start: int) -> int:
        logits = self.model_runner.forward([Chunk(slot, tokens, start, len(tokens) - 1)])
        (result,) = verify(logits, [Proposed((), (), _GREEDY, 0, start + len(tokens))])
        return result.next_token


def profile(bench: GpuBench) -> Json:
    """The kernels of a pass with graphs, of one row and of a proposal: how many, and how long each takes."""
    rows: list[Json] = []
    for shape in bench.plan.shapes[:2]:
        found = bench.attempt(shape.name, partial(_profiled, bench, shape))
        rows += found if isinstance(found, list) else [{"shape": shape.name} | found]
    return {"rows": rows}


def _profiled(bench: GpuBench, shape: Shape) -> list[Json]:
    task, widths = bench.task(shape, 0, 1), (1, bench.plan.gamma + 1)
    stream = Stream(bench.timer, one_stream(bench.loaded(shape), 256, graphs=True, widths=widths))
    on_gpu = bench.device.type == "cuda"
    rows: list[Json] = []
    for width in widths:
        with stream.passes(task, width) as work:
            work()
            activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
            with torch.profiler.profile(activities=[activity]) as profiled:
                for _ in range(_PROFILED_PASSES):
                    work()
                if on_gpu:
                    torch.cuda.synchronize(bench.device)
        total = {
            each.key: (each.count, each.self_device_time_total if on_gpu else each.self_cpu_time_total)
            for each in profiled.key_averages()
        }
        for name, (count, us) in sorted(total.items(), key=lambda item: -item[1][1])[:_SHOWN_KERNELS]:
            times = {"launches": count / _PROFILED_PASSES, "us_each": us / count, "us": us / _PROFILED_PASSES}
            rows.append({"shape": shape.name, "rows": width, "kernel": name[:_KERNEL_NAME], **times})
    return rows


def pair(bench: GpuBench) -> Json:
    """A row for each α; ratios are to the target alone, and to Theorem 3.8 of the measured α and times."""
    plan, services = bench.plan, bench.services()
    writers = {
        ALONE: outrider_writer(services, gamma=0, timeout=60.0),
        PAIR: outrider_writer(services, gamma=plan.gamma, timeout=60.0),
    }
    writers = {name: known_text(write, plan.target.vocab) for name, write in writers.items()}
    warm_up = bench.task(plan.target, _WARM_UP, plan.pair_tokens)
    for write in writers.values():
        write(warm_up)

    def assisted() -> Write:
        target, draft = bench.model(plan.target), bench.model(plan.draft, drafts=True)
        write = known_text(transformers_writer(target, draft=draft, tokens=plan.gamma), plan.target.vocab)
        write(warm_up)
        return write

    made = bench.attempt(ASSISTED, assisted, ours=False)
    if not isinstance(made, dict):
        writers[ASSISTED] = made

    def texts() -> Iterator[tuple[Json, Task]]:
        for turn in bench.turns(plan.repeats):
            for alpha in plan.alphas:
                keys = {"given_alpha": f"{alpha:g}", "repetition": turn, "prompt": turn}
                yield keys, bench.task(plan.target, turn, plan.pair_tokens, alpha)

    runs = Runs()
    take_turns(runs, {}, texts(), writers)
    summary = harness.tree(runs.runs, ("given_alpha",), partial(compared, reference=ALONE, names=list(writers)))
    return {"gamma": plan.gamma, "rows": [_row(float(alpha), arms) for alpha, arms in summary.items()]}


def _row(alpha: float, arms: Json) -> Json:
    found, reference = arms[PAIR], arms[ALONE]["tokens_per_second"]
    predicted = predicted_ratio(found, found["alpha"], reference)
    row = {
        "alpha": alpha,
        "found_alpha": found["alpha"],
        "alone_tokens_per_second": reference,
        "tokens_per_second": found["tokens_per_second"],
        "ratio": found["ratio"],
        "predicted_ratio": predicted,
        "of_predicted": found["ratio"] / predicted if predicted else None,
        **{name: found[name] for name in ("draft_step_us", "target_pass_us", "round_trip_us")},
    }
    if ASSISTED in arms:
        row["assisted_ratio"] = arms[ASSISTED]["ratio"]
        row["assisted_tokens_per_pass"] = arms[ASSISTED]["tokens_per_round"]
    return row


def streams(bench: GpuBench) -> Json:
    services, plan = bench.services(), bench.plan
    options: dict[str, Json] = {ALONE: {"gamma": 0}, PAIR: {"gamma": plan.gamma}, ADAPTIVE: {"speculation": "adaptive"}}
    servers = {name: OutriderServer(services, **how) for name, how in options.items()}

    def tasks(n: int, turn: int) -> list[Task]:
        count = max(_LEAST_TEXTS, _STREAM_TEXTS * n)
        numbers = range(turn * count, (turn + 1) * count)
        return [bench.task(plan.target, nth, plan.stream_tokens, _STREAM_ALPHA, temperature=1.0) for nth in numbers]

    for server in servers.values():
        server.closed(tasks(1, 0), 1)  # not measured
    runs: dict[tuple[int, str], list[Json]] = {(n, name): [] for n in plan.streams for name in servers}
    for turn in bench.turns(_STREAM_TURNS):
        for n in plan.streams:
            for name, server in harness.shuffled(servers.items(), turn, n):
                runs[n, name].append(figures(server.closed(tasks(n, turn), n)))
            shown = ", ".join(f"{name} {runs[n, name][-1]['tokens_per_second']:.1f}" for name in servers)
            bench.progress(f"{n} streams: {shown} tokens/s")
    rows = [
        {"streams": n, "contender": name} | {key: medians([run[key] for run in own]) for key in own[0]}
        for (n, name), own in runs.items()
    ]
    return {"alpha": _STREAM_ALPHA, "gamma": plan.gamma, "rows": rows}


def engine(bench: GpuBench) -> Json:
    """Of the saturated verifier: forward and verify by the device's clock, and the time between steps."""
    address, plan = bench.services().verifier.address, bench.plan
    rows = []
    for n in plan.streams:
        prompts = [bench.task(plan.target, nth, engine_benchmark.DECODED).token_ids for nth in range(n)]
        for rounds, gamma in (("Decode", 0), ("proposals", plan.gamma)):

            def measure(prompts: Sequence[Any] = prompts, gamma: int = gamma) -> Json:
                found = await_(engine_benchmark.shared(address, prompts, gamma))
                return found | {"verify_share": found["verify_us"] / (found["forward_us"] + found["verify_us"])}

            # Steps of tiny models are over before all sequences are there: no error in a dry run.
            found = bench.attempt(f"{n} streams, {rounds}", measure, ours=not plan.is_dry)
            rows.append({"streams": n, "rounds": rounds} | found)
    return {"rows": rows}
