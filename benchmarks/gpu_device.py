"""One device by itself: parts `device`, `kernel`, `alone` and `share` of `benchmarks.gpu`.

`alone` is one stream. Outrider runs passes as its verifier does: `ModelRunner.forward`, then `verify`; transformers has
`generate`. All write the text that the models were planted with; a contender that writes another one is none. With its
static cache transformers compiles, which nothing can end in the middle, so that this file is a program of its own too:

    python -m benchmarks.gpu_device '{"shape": ..., "device": "cuda:0", ...}'
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks import harness, planted
from benchmarks import kernel as kernel_benchmark
from benchmarks.clocks import Clock, clock_of
from benchmarks.contenders import Unavailable, WrongLength
from benchmarks.gpu_bench import GpuBench, packed_model
from benchmarks.harness import Json
from benchmarks.kernel_contenders import Case, Rows, Transformers, contenders_of
from benchmarks.kernel_contenders import Shape as KernelShape
from benchmarks.planted import Plant, Shape, written
from benchmarks.transformers_contender import Passes
from kernels.sampling import SamplingParams
from kernels.verify import Proposed, implementation_for, verify
from outrider.runtime.model_runner import Chunk, ModelRunner

GRAPHS, EAGER = "Outrider, graphs", "Outrider, eager"

_GREEDY = SamplingParams(temperature=0.0)
_SPARE = 8  # positions beyond the text
_LEAST_S = 5.0  # less is not worth a process
_WARM_UP_TURNS = 3  # a static cache is compiled in the first, and captured in the next


def device_rates(bench: GpuBench) -> Json:
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


def kernel(bench: GpuBench) -> Json:
    """`benchmarks.kernel`'s document, of as much as there is time for, without torch.compile: it is slow to start."""
    plan, path = bench.plan.kernel, implementation_for(bench.device)
    runs = harness.Runs()
    contenders = {name: each for name, each in contenders_of(path).items() if name != "compiled"}
    parts = ("gamma", "batch", "rules")
    if not kernel_benchmark.measure(plan, parts, contenders, bench.clock, runs, bench.deadline.left):
        bench.troubles.append("the time was over before all cases were measured")
    document: Json = {
        "plan": asdict(plan),
        "path": path,
        "device": bench.clock.describe(),
        "copy_bytes_per_second": bench.clock.copy_bandwidth(),
        "rows": runs.runs,
    }
    return document | {"aims": kernel_benchmark.aims(document)}


# ------------------------------------------------------------------------------------------------- transformers


def generated(clock: Clock, model: Any, prompt: Sequence[int], count: int, **options: Any) -> float:
    """Tokens a second of one text by `generate`, greedily; the pass over the prompt is included.

    Raises:
        WrongLength: it is not the text that the model was planted with.
    """
    ids = torch.tensor([list(prompt)], device=clock.device)
    clock.wait()
    begin = time.perf_counter()
    # What is compiled would carry inference tensors from one call to the next.
    with torch.no_grad() if "cache_implementation" in options else torch.inference_mode():
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=True, **options
        )
    clock.wait()
    seconds = time.perf_counter() - begin
    if text[0, len(prompt) :].tolist() != written(prompt, count, model.config.vocab_size):
        raise WrongLength("transformers wrote another text than was planted")
    return count / seconds


class Assisted:
    """The target with the draft as `assistant_model`, which drafts γ tokens a round, always."""

    def __init__(self, bench: GpuBench) -> None:
        plan = bench.plan
        self._clock = bench.clock
        self._target, self._draft = bench.model(plan.target), bench.model(plan.draft, drafts=True)
        self._passes = Passes(self._target)
        self._draft.generation_config.num_assistant_tokens = plan.gamma
        self._draft.generation_config.num_assistant_tokens_schedule = "constant"
        self._draft.generation_config.assistant_confidence_threshold = 0.0

    def write(self, prompt: Sequence[int], count: int) -> tuple[float, int]:
        """Tokens a second of one text, and passes of the target; see `generated`."""
        self._passes.reset()
        rate = generated(self._clock, self._target, prompt, count, assistant_model=self._draft)
        return rate, self._passes.count


# -------------------------------------------------------------------------------------------- the target alone


def alone(bench: GpuBench, bandwidth: float) -> Json:
    """All shapes; `bandwidth` is what the device copies, in bytes a second."""
    shapes: Json = {}
    for shape in bench.plan.shapes:
        shapes[shape.name] = bench.tried(shape.name, partial(_shape, bench, shape, bandwidth))
    for name, seconds in bench.plan.compiled.items():
        found = bench.tried(f"{name}, static cache", partial(_compiled, bench, name, seconds), ours=False)
        shapes[name].setdefault("contenders", {})["transformers, static cache"] = found
    for row in shapes.values():  # each contender's share of the bound by the weights
        for found in row.get("contenders", {}).values():
            if "tokens_per_second" in found and "bound_tokens_per_second" in row:
                found["of_bound"] = found["tokens_per_second"] / row["bound_tokens_per_second"]
    return {"shapes": shapes}


def _shape(bench: GpuBench, shape: Shape, bandwidth: float) -> Json:
    plan = bench.plan
    length = plan.prompt_tokens + plan.alone_tokens + max(_SPARE, plan.gamma + 1)
    widths = (1, plan.gamma + 1)
    prompt = bench.prompt(shape, 0, plan.alone_tokens)

    def theirs() -> Callable[[], float]:
        return partial(generated, bench.clock, bench.model(shape), prompt, plan.alone_tokens)

    # transformers first, and on weights of its own: a fused model has given up those it came with.
    made: dict[str, Any] = {"transformers": bench.tried(f"{shape.name}, transformers", theirs, ours=False)}
    loaded = bench.loaded(shape)
    steps: dict[str, Steps] = {}
    for name, graphs in ((GRAPHS, True), (EAGER, False)):

        def ours(graphs: bool = graphs) -> Steps:
            return Steps(bench, packed_model(loaded, 1, length, graphs=graphs, widths=widths), shape)

        made[name] = bench.tried(f"{shape.name}, {name}", ours)
        if isinstance(made[name], Steps):
            steps[name] = made[name]
            made[name] = made[name].rate
    found = {name: each for name, each in made.items() if isinstance(each, dict)}
    contenders: dict[str, Callable[[], float]] = {name: each for name, each in made.items() if name not in found}
    for name, rate in list(contenders.items()):  # the first text of each is not measured
        warm = bench.tried(f"{shape.name}, {name}", rate, ours=name in steps)
        if isinstance(warm, dict):
            found[name] = warm
            del contenders[name]
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in bench.deadline.turns(plan.repeats if contenders else 0):
        for name in harness.rotated(contenders, turn):
            rates[name].append(contenders[name]())
    bytes_ = shape.weights_read * loaded.dtype.itemsize
    row: Json = {
        "weight_bytes": bytes_,
        "bound_tokens_per_second": bandwidth / bytes_,
        "contenders": found
        | {name: {"tokens_per_second": median(each), "rates": each} for name, each in rates.items()},
    }
    fastest = next((steps[name] for name in (GRAPHS, EAGER) if name in contenders), None)
    if fastest is not None:
        row["pass_seconds"] = {str(width): fastest.pass_seconds(width) for width in widths}
    shown = ", ".join(f"{name} {median(each):.1f}" for name, each in rates.items())
    bench.told(f"{shape.name}: {shown} tokens/s of {row['bound_tokens_per_second']:.1f}")
    return row


class Steps:
    """One stream of a model, step by step."""

    def __init__(self, bench: GpuBench, model_runner: ModelRunner, shape: Shape) -> None:
        self._bench = bench
        self._model_runner = model_runner
        self._shape = shape
        self._prompt = bench.prompt(shape, 0, bench.plan.alone_tokens)

    def rate(self) -> float:
        """Tokens a second of one text, of as many passes: the first is that over the prompt.

        Raises:
            WrongLength: it was another text.
        """
        count, prompt, clock = self._bench.plan.alone_tokens, self._prompt, self._bench.clock
        slot = self._model_runner.pool.allocate()
        try:
            clock.wait()
            begin = time.perf_counter()
            tokens = [self._next(slot, prompt, 0)]
            while len(tokens) < count:
                tokens.append(self._next(slot, tokens[-1:], len(prompt) + len(tokens) - 1))
            clock.wait()
            seconds = time.perf_counter() - begin
        finally:
            self._model_runner.pool.free(slot)
        if tokens != written(prompt, count, self._shape.vocab):
            raise WrongLength(f"Outrider wrote another text than {self._shape.name} was planted with")
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

            return self._bench.clock.wall(work).median * 1e-6
        finally:
            pool.free(slot)

    def _next(self, slot: int, tokens: Any, start: int) -> int:
        logits = self._model_runner.forward([Chunk(slot, tokens, start, len(tokens) - 1)])
        (result,) = verify(logits, [Proposed((), (), _GREEDY, 0, start + len(tokens))])
        return result.next_token


def _compiled(bench: GpuBench, name: str, seconds: float) -> Json:
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
    command = [sys.executable, "-m", "benchmarks.gpu_device", json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"compiling and measuring took more than {seconds:.0f} s") from None
    if done.returncode:
        raise Unavailable(f"it failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    found: Json = json.loads(done.stdout.splitlines()[-1])
    bench.told(f"{name}, static cache: {found['tokens_per_second']:.1f} tokens/s")
    return found


def main() -> int:
    """The process with the static cache; returns the exit code."""
    asked = json.loads(sys.argv[1])
    shape, device = Shape(**asked["shape"]), torch.device(asked["device"])
    plant = Plant(shape.vocab, tuple(asked["alphas"]))
    model = planted.build(shape, plant, drafts=False, device=device, dtype=planted.DTYPES[asked["dtype"]])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    count, clock = asked["tokens"], clock_of(device, 1)
    prompt = plant.prompt(plant.alphas[-1], 0, length=asked["prompt_tokens"], output=count)
    compiles = device.type == "cuda"  # transformers compiles a static cache's passes there, and nowhere else
    rates = [
        generated(clock, model, prompt, count, cache_implementation="static")
        for _ in range((_WARM_UP_TURNS if compiles else 1) + asked["repeats"])
    ][-asked["repeats"] :]
    print(json.dumps({"tokens_per_second": median(rates), "rates": rates, "compiled": compiles}))
    return 0


# ------------------------------------------------------------------------------------------------ share of the pass


def share(bench: GpuBench) -> Json:
    """Forward and verification of passes over many sequences, each timed by itself."""
    plan = bench.plan
    most = max(plan.batches)
    length = plan.context + plan.gamma + 1
    model_runner = packed_model(bench.loaded(plan.target), most, length, widths=(1, plan.gamma + 1))
    rows = Rows.make(plan.target.vocab, torch.bfloat16, bench.device)
    slots = [model_runner.pool.allocate() for _ in range(most)]
    for slot in slots:
        model_runner.forward([Chunk(slot, [1] * plan.context, 0, plan.context)])
    found = {}
    for batch in plan.batches:
        case = Case(KernelShape(plan.target.vocab, batch, plan.gamma), rows)
        found[str(batch)] = _share(bench, model_runner, slots[:batch], case)
        bench.told(f"{batch} sequences: {found[str(batch)]['share']:.1%} of the pass is verification")
    return {"gamma": plan.gamma, "context": plan.context, "batches": found}


def _share(bench: GpuBench, model_runner: ModelRunner, slots: list[int], case: Case) -> Json:
    plan = bench.plan
    chunks = [Chunk(slot, [1] * (plan.gamma + 1), plan.context, 0) for slot in slots]

    def forward() -> None:
        for slot in slots:
            model_runner.pool.rollback(slot, plan.context)
        model_runner.forward(chunks)

    # In the model's dtype, as the engine passes them on, with distributions and drafts like those of a trained pair.
    logits = case.logits.flatten(0, 1)
    passing = bench.clock.wall(forward).median
    verifying = bench.clock.wall(lambda: verify(logits, case.proposals)).median
    row: Json = {"forward_us": passing, "verify_us": verifying, "share": verifying / (passing + verifying)}
    theirs = Transformers()
    refusal = theirs.refusal(case)
    if refusal is not None:
        return row | {"transformers": {"error": refusal}}
    sampling = bench.clock.wall(theirs.start(case).run).median
    return row | {"transformers": {"verify_us": sampling, "share": sampling / (passing + sampling)}}


if __name__ == "__main__":
    sys.exit(main())
