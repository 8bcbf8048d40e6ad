"""How much `benchmarks.gpu` measures, and what its parts share: device, clock, time left, models, services, errors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from benchmarks import planted
from benchmarks.clocks import Clock
from benchmarks.contenders import Unavailable
from benchmarks.harness import Json, tell
from benchmarks.kernel import Plan as KernelPlan
from benchmarks.planted import DTYPES, LLAMA_1B, LLAMA_8B, LLAMA_13B, TINY_DRAFT, TINY_TARGET, Plant, Shape
from benchmarks.services import ANYWHERE, NO_PREFIXES, Services
from outrider.runtime.cuda_graph import capturer_for
from outrider.runtime.loader import LoadedModel
from outrider.runtime.memory import MIB, kv_dtype
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.paged_attention import AUTO, choose_attention

Result = TypeVar("Result")

RUNS = MappingProxyType(
    {
        1: {"choices": 60.0, "tests": 320.0, "memcheck": 120.0},
        2: {"kernel": 200.0, "alone": 280.0},
        3: {"pair": 260.0, "streams": 120.0, "engine": 90.0},
    }
)
"""The parts of each run, which takes nine minutes at most, with the seconds of each: does it work, one device, the
services."""
BUDGETS = {name: seconds for parts in RUNS.values() for name, seconds in parts.items()}

CAPTURE = MappingProxyType({"seconds": 60.0, "most_bytes": 4096 * MIB})
START_TIMEOUT_S = 240.0  # a first start compiles some ten kernels, and captures some twenty passes


KERNEL = KernelPlan((128_256,), gammas=(1, 5, 20), batches=(1, 16, 64, 256), rules_batches=(64,), repeats=30)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    is_dry: bool = False  # whether it only shows that everything runs
    dtype: str = "bfloat16"  # of all models
    shapes: tuple[Shape, ...] = (LLAMA_1B, LLAMA_8B, LLAMA_13B)  # of the parts `choices` and `alone`
    draft: Shape = LLAMA_1B
    target: Shape = LLAMA_8B
    alphas: tuple[float, ...] = (0.6, 0.7, 0.8, 0.9)  # rates of acceptance that the pair is planted with
    gamma: int = 4  # drafted tokens of a round
    prompt_tokens: int = 32  # of each text
    alone_tokens: int = 64  # that a rate of the target alone is taken on
    repeats: int = 5  # how often each contender takes its turn, unless the part's time is over before
    pair_tokens: int = 128  # of each text of the part `pair`
    streams: tuple[int, ...] = (1, 4, 16, 64)  # of the parts `streams` and `engine`
    stream_alpha: float = 0.8  # of the texts of the part `streams`; one of `alphas`
    stream_tokens: int = 96  # of each of them
    kernel: KernelPlan = KERNEL
    kv_mb: int = 6144  # keys and values of each service, MiB
    clock_repeats: int = 30  # runs of a single measurement at the most

    def plant(self, shape: Shape) -> Plant:
        return Plant(shape.vocab, self.alphas)


FULL = GpuPlan()
DRY = GpuPlan(
    is_dry=True, shapes=(TINY_DRAFT, TINY_TARGET), draft=TINY_DRAFT, target=TINY_TARGET, alphas=(0.6, 0.8), gamma=2,
    prompt_tokens=4, alone_tokens=6, repeats=1, pair_tokens=16, streams=(1, 2), stream_tokens=6,
    kernel=KernelPlan((512,), gammas=(2,), batches=(2,), gamma=2, rules_batches=(1,), repeats=5), kv_mb=16,
    clock_repeats=5,
)  # fmt: skip


class GpuBench:
    """Everything a part is given.

    Attributes:
        plan: how much is measured.
        device: where.
        clock: of it.
        scratch: a folder for what need not be kept.
        troubles: what went wrong in the part under way, a line each; the figures that are there still hold.
    """

    def __init__(self, plan: GpuPlan, device: torch.device, clock: Clock, scratch: Path) -> None:
        self.plan = plan
        self.device = device
        self.clock = clock
        self.scratch = scratch
        self.troubles: list[str] = []
        self._end = 0.0
        self._running = ExitStack()
        self._services: Services | None = None

    def begin(self, seconds: float) -> None:
        """A part begins, of so many seconds. What has begun goes on; nothing new begins after them."""
        self._end = time.monotonic() + seconds
        self.troubles = []

    @property
    def left(self) -> float:
        """Seconds that the part has left; 0 once they are over."""
        return max(0.0, self._end - time.monotonic())

    def turns(self, most: int) -> Iterator[int]:
        """0 and so on up to `most`, but for the first only as long as there is time."""
        for turn in range(most):
            if turn and not self.left:
                return
            yield turn

    def told(self, line: str) -> None:
        tell(f"  {line} ({self.left:.0f} s left)")

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
                max_sequences=max(plan.streams) + 1,
                verifier_flags=[*flags, *NO_PREFIXES],
                draft_flags=[*flags, "--no-outcome-cache"],
                command=["benchmarks.planted"],
                start_timeout=START_TIMEOUT_S,
            )
            self._services = self._running.enter_context(made)
            self.told("the services of the planted pair are up")
        return self._services

    def close_services(self) -> None:
        self._running.close()
        self._services = None


# --------------------------------------------------------------------------------------------------- model runners


def paged_model(loaded: LoadedModel, max_sequences: int, max_length: int) -> ModelRunner:
    """The model with the attention that a service takes on its device; on a CPU, too, over pages."""
    choice = choose_attention(AUTO, loaded.layers, kv_dtype(loaded), loaded.device, paged=loaded.device.type == "cpu")
    return ModelRunner.build(loaded, max_sequences, max_length, attention=choice)


def one_stream(loaded: LoadedModel, max_length: int, *, graphs: bool, widths: Sequence[int]) -> ModelRunner:
    """The model as a verifier runs it: with CUDA graphs (on a CPU, passes called again), or without.

    As the verifier does, it runs passes of these `widths` once before anything is timed.

    Raises:
        Unavailable: graphs are asked for, and what attends on this device cannot be captured.
    """
    model_runner = paged_model(loaded, 1, max_length)
    attention = model_runner.attention
    if graphs and not attention.can_be_captured(loaded.device):
        raise Unavailable(f"{attention.name} cannot be captured ({attention.reason})")
    if graphs:
        capturer = capturer_for(loaded.device)
        model_runner.capture(capturer, max_sequences=1, widest=max(widths), **CAPTURE)  # type: ignore[arg-type]
    model_runner.warm_up(widths)
    return model_runner
