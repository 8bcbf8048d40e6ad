"""What the parts of `benchmarks.gpu` share: the device and its clock, the time left, folders, services, errors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.clocks import Clock
from benchmarks.gpu_plan import GpuPlan
from benchmarks.gpu_services import PairOn
from benchmarks.planted import models
from benchmarks.planted.models import DTYPES
from benchmarks.planted.shapes import Shape
from benchmarks.services import Processes
from outrider.runtime.loader import LoadedModel

Result = TypeVar("Result")
Json = dict[str, Any]


class Unavailable(RuntimeError):
    """Something that is compared cannot run here; the text says why."""


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


class Bench:
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
        self, plan: GpuPlan, device: torch.device, clock: Clock, scratch: Path, told: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self.device = device
        self.clock = clock
        self.scratch = scratch
        self.deadline = Deadline(0.0)
        self.troubles: list[str] = []
        self._told = told
        self._services = ExitStack()
        self._pair: PairOn | None = None

    def begin(self, seconds: float) -> None:
        """A part begins, of so many seconds."""
        self.deadline = Deadline(seconds)
        self.troubles = []

    def told(self, line: str) -> None:
        """Says what has been measured, with the time that the part has left."""
        self._told(f"  {line} ({self.deadline.left:.0f} s left)")

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
        model = models.build(
            shape, self.plan.plant(shape), drafts=drafts, device=self.device, dtype=DTYPES[self.plan.dtype]
        )
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def loaded(self, shape: Shape) -> LoadedModel:
        """A planted target on the device, as Outrider runs it."""
        return models.loaded(
            shape, self.plan.plant(shape), drafts=False, device=self.device, dtype=DTYPES[self.plan.dtype]
        )

    def prompt(self, shape: Shape, number: int, output: int, alpha: float | None = None) -> tuple[int, ...]:
        """A prompt for a text of so many tokens; by default of the last rate."""
        plant = self.plan.plant(shape)
        chosen = plant.alphas[-1] if alpha is None else alpha
        return plant.prompt(chosen, number, length=self.plan.prompt_tokens, output=output)

    # ----------------------------------------------------------------------------------------------------- services

    def planted_pair(self) -> PairOn:
        """Both services on the planted pair, as processes on this device; started where they are not running."""
        if self._pair is None:
            plan = self.plan
            folders = {
                drafts: models.save(
                    self.scratch / ("draft" if drafts else "target"), shape, plan.plant(shape), drafts=drafts
                )
                for drafts, shape in ((True, plan.draft), (False, plan.target))
            }
            room = ("--kv-cache-mb", str(plan.kv_mb))
            self._pair = self._services.enter_context(
                PairOn(
                    folders[False],
                    folders[True],
                    Processes(plan.dtype, 1, plan.dtype, 1),
                    devices=dict.fromkeys(("verifier_service", "draft_service"), str(self.device)),
                    planted=True,
                    max_sequences=max(plan.streams) + 1,  # whoever asks how busy it is takes a place too
                    flags={"verifier_service": room, "draft_service": (*room, "--no-outcome-cache")},
                )
            )
            self.told("the services of the planted pair are up")
        return self._pair

    def close_services(self) -> None:
        """Stops what `planted_pair` has started, if anything."""
        self._services.close()
        self._pair = None
