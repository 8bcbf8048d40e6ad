"""The device itself, and targets that write alone on it: parts `device` and `alone` of `benchmarks.gpu`.

One stream. Outrider runs passes as its verifier does: `ModelRunner.forward`, then `verify`. transformers runs
`generate`. All write the text that the models were planted with, and a contender that writes another one is none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import WrongLength
from benchmarks.gpu_bench import Bench, Json, Unavailable
from benchmarks.gpu_figures import weight_bound
from benchmarks.gpu_model_runner import packed_model
from benchmarks.gpu_transformers import generated
from benchmarks.planted.shapes import Shape
from benchmarks.planted.text import written
from kernels.sampling import SamplingParams
from kernels.verify import Proposed, verify
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner

AIMS = {"1B": 0.5, "8B": 0.7, "13B": 0.8}
"""Of the bound by the weights, for Outrider as it serves."""

GRAPHS, EAGER = "Outrider, graphs", "Outrider, eager"

_GREEDY = SamplingParams(temperature=0.0)
_SPARE = 8  # positions beyond the text
_LEAST_S = 5.0  # less is not worth a process


def device_rates(bench: Bench) -> Json:
    """What the device copies and multiplies."""
    n = bench.plan.matrix
    source = torch.Generator(device=bench.device).manual_seed(0)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=bench.device, generator=source) for _ in range(2))
    product = bench.clock.times(lambda: a @ b, cold=False, launched=False)
    found = {
        "copy_bytes_per_second": bench.clock.copy_bandwidth(),
        "matrix": n,
        "matrix_flops": 2 * n**3 / (product.median * 1e-6),
    }
    bench.told(f"copies {found['copy_bytes_per_second'] / 1e9:.1f} GB/s, {found['matrix_flops'] / 1e12:.2f} Tflop/s")
    return found


def alone(bench: Bench, bandwidth: float) -> Json:
    """All shapes; `bandwidth` is what the device copies, in bytes a second."""
    shapes: Json = {}
    for shape in bench.plan.shapes:
        shapes[shape.name] = bench.tried(shape.name, partial(_shape, bench, shape, bandwidth))
    for name, seconds in bench.plan.compiled.items():
        found = bench.tried(f"{name}, static cache", partial(_compiled, bench, name, seconds), ours=False)
        shapes[name].setdefault("contenders", {})["transformers, static cache"] = found
    for row in shapes.values():
        _judge(row)
    return {"shapes": shapes}


def _shape(bench: Bench, shape: Shape, bandwidth: float) -> Json:
    count = bench.plan.alone_tokens
    length = bench.plan.prompt_tokens + count + max(_SPARE, bench.plan.gamma + 1)
    widths = (1, bench.plan.gamma + 1)
    found: Json = {}
    contenders: dict[str, Callable[[], float]] = {}
    # transformers first, and on weights of its own: a fused model has given up those it came with.
    theirs = bench.tried(f"{shape.name}, transformers", lambda: _Theirs(bench, shape), ours=False)
    loaded = bench.loaded(shape)
    steps: dict[str, Steps] = {}
    for name, graphs in ((GRAPHS, True), (EAGER, False)):
        made = bench.tried(f"{shape.name}, {name}", partial(_steps, bench, loaded, shape, length, widths, graphs))
        if isinstance(made, Steps):
            steps[name] = made
        else:
            found[name] = made
    if isinstance(theirs, _Theirs):
        contenders["transformers"] = theirs.rate
    else:
        found["transformers"] = theirs
    contenders |= {name: each.rate for name, each in steps.items()}
    for name, rate in list(contenders.items()):  # the first text of each is not measured
        warm = bench.tried(f"{shape.name}, {name}", rate, ours=name in steps)
        if isinstance(warm, dict):
            found[name] = warm
            del contenders[name]
    rates = _in_turns(bench, contenders)
    fastest = next((steps[name] for name in (GRAPHS, EAGER) if name in contenders), None)
    bytes_ = shape.weights_read * loaded.dtype.itemsize
    row: Json = {
        "weight_bytes": bytes_,
        "bound_tokens_per_second": weight_bound(bytes_, bandwidth),
        "contenders": found
        | {name: {"tokens_per_second": median(each), "rates": each} for name, each in rates.items()},
    }
    if fastest is not None:
        row["pass_seconds"] = {str(width): fastest.pass_seconds(width) for width in widths}
    told = ", ".join(f"{name} {median(each):.1f}" for name, each in rates.items())
    bench.told(f"{shape.name}: {told} tokens/s of {row['bound_tokens_per_second']:.1f}")
    return row


def _steps(bench: Bench, loaded: LoadedModel, shape: Shape, length: int, widths: Sequence[int], graphs: bool) -> Steps:
    return Steps(bench, packed_model(loaded, 1, length, graphs=graphs, widths=widths), shape)


def _in_turns(bench: Bench, contenders: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Rates of all, turn by turn, each turn beginning with another one."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in bench.deadline.turns(bench.plan.repeats if names else 0):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            rates[name].append(contenders[name]())
    return rates


class _Theirs:
    """transformers with a cache that grows, on a model of its own."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        self._bench, self._model = bench, bench.model(shape)
        self._prompt = bench.prompt(shape, 0, bench.plan.alone_tokens)

    def rate(self) -> float:
        """Tokens a second of one text."""
        return generated(self._bench, self._model, self._prompt, self._bench.plan.alone_tokens).rate


def _judge(row: Json) -> None:
    """Puts each contender's share of the bound beside its rate."""
    for found in row.get("contenders", {}).values():
        if "tokens_per_second" in found and "bound_tokens_per_second" in row:
            found["of_bound"] = found["tokens_per_second"] / row["bound_tokens_per_second"]


class Steps:
    """One stream of a model, step by step."""

    def __init__(self, bench: Bench, model_runner: ModelRunner, shape: Shape) -> None:
        self._bench = bench
        self._model_runner = model_runner
        self._shape = shape

    def rate(self) -> float:
        """Tokens a second of one text, of as many passes: the first is that over the prompt.

        Raises:
            WrongLength: it was another text.
        """
        count = self._bench.plan.alone_tokens
        prompt = self._bench.prompt(self._shape, 0, count)
        slot = self._model_runner.pool.allocate()
        try:
            self._bench.clock.wait()
            begin = time.perf_counter()
            tokens = [self._next(slot, prompt, 0)]
            while len(tokens) < count:
                tokens.append(self._next(slot, tokens[-1:], len(prompt) + len(tokens) - 1))
            self._bench.clock.wait()
            seconds = time.perf_counter() - begin
        finally:
            self._model_runner.pool.free(slot)
        if tokens != written(prompt, count, self._shape.vocab):
            raise WrongLength(f"Outrider wrote another text than {self._shape.name} was planted with")
        return count / seconds

    def pass_seconds(self, width: int) -> float:
        """Seconds of a pass over so many tokens behind a prompt, all of whose logits are asked for."""
        prompt = self._bench.prompt(self._shape, 0, self._bench.plan.alone_tokens)
        pool = self._model_runner.pool
        slot = pool.allocate()
        try:
            self._next(slot, prompt, 0)

            def work() -> None:
                pool.rollback(slot, len(prompt))
                self._model_runner.forward([Chunk(slot, [1] * width, len(prompt), 0)])

            return self._bench.clock.wall(work).median * 1e-6
        finally:
            pool.free(slot)

    def _next(self, slot: int, tokens: Any, start: int) -> int:
        logits = self._model_runner.forward([Chunk(slot, tokens, start, len(tokens) - 1)])
        (result,) = verify(logits, [Proposed((), (), _GREEDY, 0, start + len(tokens))])
        return result.next_token


def _compiled(bench: Bench, name: str, seconds: float) -> Json:
    """What transformers does with its static cache, in a process of its own that is ended if it takes too long.

    Raises:
        Unavailable: it took too long, or failed.
    """
    seconds = min(seconds, bench.deadline.left)
    if seconds < _LEAST_S:
        raise Unavailable("there was no time left for it")
    asked = {
        "shape": next(shape for shape in bench.plan.shapes if shape.name == name).document(),
        "alphas": bench.plan.alphas,
        "dtype": bench.plan.dtype,
        "device": str(bench.device),
        "prompt_tokens": bench.plan.prompt_tokens,
        "tokens": bench.plan.alone_tokens,
        "repeats": bench.plan.repeats,
    }
    command = [sys.executable, "-m", "benchmarks.gpu_transformers", json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"compiling and measuring took more than {seconds:.0f} s") from None
    if done.returncode:
        raise Unavailable(f"it failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    found: Json = json.loads(done.stdout.splitlines()[-1])
    bench.told(f"{name}, static cache: {found['tokens_per_second']:.1f} tokens/s")
    return found
