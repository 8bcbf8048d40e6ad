"""How much `benchmarks.gpu` measures, and what its parts share: device, clock, time left, models, services, errors."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from benchmarks import planted
from benchmarks.clocks import Clock
from benchmarks.contenders import Unavailable
from benchmarks.harness import Json
from benchmarks.kernel import Plan as KernelPlan
from benchmarks.outrider_contender import ANYWHERE, Services
from benchmarks.planted import DTYPES, LLAMA_1B, LLAMA_8B, LLAMA_13B, TINY_DRAFT, TINY_TARGET, Plant, Shape
from outrider.runtime.cuda_graph import capturer_for
from outrider.runtime.loader import LoadedModel
from outrider.runtime.memory import MIB, kv_dtype
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.paged_attention import AUTO, choose_attention

Result = TypeVar("Result")

PARTS = MappingProxyType(
    {
        "choices": "attention, layers and graphs",
        "tests": "the tests marked gpu",
        "memcheck": "memory accesses",
        "device": "the device itself",
        "kernel": "the kernel",
        "alone": "the target alone",
        "share": "verification's share of a pass",
        "profile": "a saturated verifier",
        "pair": "the pair over gRPC",
        "streams": "many streams",
        "cache": "the outcome cache",
    }
)
"""In the order they are measured, with what they are called."""

RUNS = MappingProxyType(
    {
        1: ("choices", "tests", "memcheck"),
        2: ("device", "kernel", "alone", "share", "profile"),
        3: ("pair", "streams", "cache"),
    }
)
"""The parts of each run, which takes nine minutes at most: does it work, one stream, the pair."""

RUN_SECONDS = 500.0
"""After so much of a run no part begins; the rest is for imports and pictures."""

CAPTURE = MappingProxyType({"seconds": 60.0, "most_bytes": 4096 * MIB})
START_TIMEOUT_S = 240.0  # a first start compiles some ten kernels, and captures some twenty passes


BUDGETS = MappingProxyType(
    {
        "choices": 60.0, "tests": 320.0, "memcheck": 120.0,
        "device": 10.0, "kernel": 60.0, "alone": 250.0, "share": 60.0, "profile": 60.0,
        "pair": 250.0, "streams": 120.0, "cache": 130.0,
    }
)  # fmt: skip
"""Seconds of each part."""

KERNEL = KernelPlan((128_256,), gammas=(1, 5, 20), batches=(1, 16, 64, 256), rules_batches=(64,), repeats=30)
"""The subset of `benchmarks.kernel`."""


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What is measured, on a GPU unless told otherwise."""

    is_dry: bool = False  # whether it only shows that everything runs
    dtype: str = "bfloat16"  # of all models
    shapes: tuple[Shape, ...] = (LLAMA_1B, LLAMA_8B, LLAMA_13B)  # of the part `alone`
    compiled: dict[str, float] = field(
        default_factory=lambda: {LLAMA_1B.name: 45.0, LLAMA_8B.name: 60.0}
    )  # those that transformers also runs compiled, and seconds that each may take for it
    draft: Shape = LLAMA_1B  # of the pair
    target: Shape = LLAMA_8B  # of the pair, and of the parts `share` and `profile`
    alphas: tuple[float, ...] = (0.6, 0.7, 0.8, 0.9)  # rates of acceptance that the pair is planted with
    gamma: int = 4  # drafted tokens of a round
    prompt_tokens: int = 32  # of each text on planted models
    alone_tokens: int = 64  # that a rate of the target alone is taken on
    repeats: int = 5  # how often each contender takes its turn, unless the part's time is over before
    pair_tokens: int = 128  # of each text of the part `pair`
    streams: tuple[int, ...] = (1, 4, 16, 64)  # of the part `streams`
    stream_alpha: float = 0.8  # of its texts; one of `alphas`
    stream_tokens: int = 96  # of each of them
    stream_repeats: int = 2  # how often each of its runs is made
    texts_per_stream: int = 2  # of a run
    depth: int = 16  # how many times as deep as the demo target that of the part `cache` is
    draft_depth: int = 4  # the same of its draft
    cache_gammas: tuple[int, ...] = (4, 8)
    cache_ways: tuple[str, ...] = ("greedy", "coupled")  # of `benchmarks.outcome_cache.WAYS`
    cache_prompts: int = 6  # of the demo corpus, once each
    cache_tokens: int = 96  # of each text
    batches: tuple[int, ...] = (1, 16, 64)  # sequences of a pass in the part `share`
    context: int = 256  # tokens that each of them holds
    matrix: int = 8192  # n of the n³ product
    kernel: KernelPlan = KERNEL  # the subset of `benchmarks.kernel`
    profile_streams: int = 64  # sequences of the part `profile`
    profile_seconds: float = 1.0  # how long it is watched
    kv_mb: int = 6144  # keys and values of each service on a planted model, MiB
    clock_repeats: int = 30  # runs of a single measurement at the most
    budgets: dict[str, float] = field(default_factory=lambda: dict(BUDGETS))  # seconds of each part

    def plant(self, shape: Shape) -> Plant:
        """What models of this vocabulary are planted with."""
        return Plant(shape.vocab, self.alphas)

    def document(self) -> Json:
        """As JSON; equal where it was read back."""
        found: Json = json.loads(json.dumps(asdict(self)))
        return found


FULL = GpuPlan()
DRY = GpuPlan(
    is_dry=True, shapes=(TINY_DRAFT, TINY_TARGET), compiled={TINY_DRAFT.name: 60.0}, draft=TINY_DRAFT,
    target=TINY_TARGET, alphas=(0.6, 0.8), gamma=2, prompt_tokens=4, alone_tokens=6, repeats=1, pair_tokens=16,
    streams=(1, 2), stream_alpha=0.8, stream_tokens=6, stream_repeats=1, texts_per_stream=1, depth=2, draft_depth=1,
    cache_gammas=(2,), cache_ways=("greedy",), cache_prompts=1, cache_tokens=12, batches=(1, 2), context=8, matrix=64,
    kernel=KernelPlan((512,), gammas=(2,), batches=(2,), gamma=2, rules_batches=(1,), repeats=5), profile_streams=2,
    profile_seconds=0.05, kv_mb=16, clock_repeats=5, budgets=dict.fromkeys(PARTS, 120.0),
)  # fmt: skip


class Deadline:
    """Seconds that a part may take. What has begun goes on; nothing new begins after them."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; 0 once they are over."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether they are."""
        return not self.left

    def turns(self, most: int) -> Iterator[int]:
        """0 and so on up to `most`, but for the first only as long as there is time."""
        for turn in range(most):
            if turn and self.over:
                return
            yield turn


class GpuBench:
    """Everything a part is given.

    Attributes:
        plan: how much is measured.
        device: where.
        clock: of it.
        scratch: a folder for what need not be kept.
        deadline: of the part under way.
        troubles: what went wrong in it, a line each; the figures that are there still hold.
    """

    def __init__(
        self, plan: GpuPlan, device: torch.device, clock: Clock, scratch: Path, tell: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self.device = device
        self.clock = clock
        self.scratch = scratch
        self.deadline = Deadline(0.0)
        self.troubles: list[str] = []
        self._tell = tell
        self._running = ExitStack()
        self._services: Services | None = None

    def begin(self, seconds: float) -> None:
        """A part begins, of so many seconds."""
        self.deadline = Deadline(seconds)
        self.troubles = []

    def told(self, line: str) -> None:
        """Says what has been measured, with the time that the part has left."""
        self._tell(f"  {line} ({self.deadline.left:.0f} s left)")

    def tried(self, name: str, measure: Callable[[], Result], *, ours: bool = True) -> Result | Json:
        """What `measure` gives, or `{"error": why}`: others go on. What is not ours to mend is no trouble."""
        try:
            return measure()
        except Exception as error:
            line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if ours and not isinstance(error, Unavailable):
                self.troubles.append(f"{name}: {line}")
            self.told(f"{name}: {line}")
            return {"error": str(error) if isinstance(error, Unavailable) else line}
        finally:
            self.clean()

    def clean(self) -> None:
        """Gives back memory that nobody holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------------------------------- models

    def model(self, shape: Shape, *, drafts: bool = False) -> Any:
        """A planted model on the device, as transformers runs it."""
        model = planted.build(
            shape, self.plan.plant(shape), drafts=drafts, device=self.device, dtype=DTYPES[self.plan.dtype]
        )
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def loaded(self, shape: Shape, dtype: str | None = None) -> LoadedModel:
        """A planted target on the device, as Outrider runs it."""
        dtype = dtype or self.plan.dtype
        return planted.loaded(shape, self.plan.plant(shape), drafts=False, device=self.device, dtype=DTYPES[dtype])

    def prompt(self, shape: Shape, number: int, output: int, alpha: float | None = None) -> tuple[int, ...]:
        """A prompt for a text of so many tokens; by default of the last rate."""
        plant = self.plan.plant(shape)
        chosen = plant.alphas[-1] if alpha is None else alpha
        return plant.prompt(chosen, number, length=self.plan.prompt_tokens, output=output)

    # ----------------------------------------------------------------------------------------------------- services

    def services(self) -> Services:
        """Both services on the planted pair, as processes on this device; started where they are not running."""
        if self._services is None:
            plan = self.plan
            target, draft = (
                planted.save(self.scratch / name, shape, plan.plant(shape), drafts=name == "draft")
                for name, shape in (("target", plan.target), ("draft", plan.draft))
            )
            flags = ["--device", str(self.device), "--kv-cache-mb", str(plan.kv_mb)]
            made = Services(
                target,
                draft,
                dtype=plan.dtype,
                place=ANYWHERE,
                max_sequences=max(plan.streams),
                flags={
                    "verifier_service": [*flags, "--no-prefix-cache"],
                    "draft_service": [*flags, "--no-outcome-cache"],
                },
                command=["benchmarks.planted"],
                start_timeout=START_TIMEOUT_S,
            )
            self._services = self._running.enter_context(made)
            self.told("the services of the planted pair are up")
        return self._services

    def close_services(self) -> None:
        """Stops what `services` has started, if anything."""
        self._running.close()
        self._services = None


# --------------------------------------------------------------------------------------------------- model runners


def paged_model(loaded: LoadedModel, max_sequences: int, max_length: int) -> ModelRunner:
    """The model with the attention that a service takes on its device; on a CPU, too, over pages."""
    choice = choose_attention(AUTO, loaded.layers, kv_dtype(loaded), loaded.device, paged=loaded.device.type == "cpu")
    return ModelRunner.build(loaded, max_sequences, max_length, attention=choice)


def packed_model(
    loaded: LoadedModel,
    max_sequences: int,
    max_length: int,
    *,
    graphs: bool | None = None,
    widths: Sequence[int] = (1,),
) -> ModelRunner:
    """The model as a service runs it: with CUDA graphs (on a CPU, passes called again), without, or where it can be.

    As the verifier does, it runs passes of these `widths` once before anything is timed.

    Raises:
        Unavailable: graphs are asked for, and what attends on this device cannot be captured.
    """
    model_runner = paged_model(loaded, max_sequences, max_length)
    can = model_runner.attention.can_be_captured(loaded.device)
    if graphs and not can:
        raise Unavailable(f"{model_runner.attention.name} cannot be captured ({model_runner.attention.reason})")
    if can and graphs is not False:
        capturer = capturer_for(loaded.device)
        model_runner.capture(capturer, max_sequences=max_sequences, widest=max(widths), **CAPTURE)  # type: ignore[arg-type]
    model_runner.warm_up(widths)
    return model_runner
