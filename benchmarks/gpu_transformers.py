"""transformers on the device: `generate` alone, with a draft to assist, and with its static cache, which it compiles.

The last runs as a process of its own, since nothing else can be ended in the middle of a compilation:

    python -m benchmarks.gpu_transformers '{"shape": ..., "device": "cuda:0", ...}'

It writes one line of JSON. Nothing here knows of Outrider.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from benchmarks.contenders import WrongLength
from benchmarks.local import Passes
from benchmarks.planted import models
from benchmarks.planted.shapes import Shape
from benchmarks.planted.text import Plant, written

_WARM_UP_TURNS = 3  # a static cache is compiled in the first, and captured in the next


class HasClock(Protocol):
    """What is needed of a bench."""

    @property
    def device(self) -> torch.device:
        """Where models lie."""

    @property
    def clock(self) -> Any:
        """Of that device."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What one text took: tokens a second, the prompt's pass included, and passes of the target where counted."""

    rate: float
    passes: int | None = None


def generated(bench: HasClock, model: Any, prompt: Sequence[int], count: int, **options: Any) -> Generated:
    """One text by `generate`, greedily.

    Raises:
        WrongLength: it is not the text that the model was planted with.
    """
    seconds, tokens = _timed(bench, model, prompt, count, options)
    if tokens != written(prompt, count, model.config.vocab_size):
        raise WrongLength(f"transformers wrote {len(tokens)} tokens of another text than was planted")
    return Generated(count / seconds)


class Assisted:
    """The target with the draft as `assistant_model`, which drafts γ tokens a round, always."""

    def __init__(self, bench: HasClock, target: Any, draft: Any, gamma: int) -> None:
        self._bench = bench
        self._target = target
        self._draft = draft
        self._passes = Passes(target)
        draft.generation_config.num_assistant_tokens = gamma
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0

    def write(self, prompt: Sequence[int], count: int) -> Generated:
        """One text; see `generated`."""
        assisting = {"assistant_model": self._draft}
        self._passes.reset()
        seconds, tokens = _timed(self._bench, self._target, prompt, count, assisting)
        if tokens != written(prompt, count, self._target.config.vocab_size):
            raise WrongLength(f"assisted generation wrote {len(tokens)} tokens of another text than was planted")
        return Generated(count / seconds, self._passes.count)


def _timed(
    bench: HasClock, model: Any, prompt: Sequence[int], count: int, options: dict[str, Any]
) -> tuple[float, list[int]]:
    ids = torch.tensor([list(prompt)], device=bench.device)
    bench.clock.wait()
    begin = time.perf_counter()
    # What is compiled would carry inference tensors from one call to the next.
    with torch.no_grad() if "cache_implementation" in options else torch.inference_mode():
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=True, **options
        )
    bench.clock.wait()
    return time.perf_counter() - begin, text[0, len(prompt) :].tolist()


@dataclass(frozen=True, slots=True)
class _Place:
    device: torch.device
    clock: Any


def main() -> int:
    """The process with the static cache; returns the exit code."""
    from benchmarks.clocks import clock_of

    asked = json.loads(sys.argv[1])
    shape, device = Shape(**asked["shape"]), torch.device(asked["device"])
    plant = Plant(shape.vocab, tuple(asked["alphas"]))
    model = models.build(shape, plant, drafts=False, device=device, dtype=models.DTYPES[asked["dtype"]])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    count, place = asked["tokens"], _Place(device, clock_of(device, 1))
    prompt = plant.prompt(plant.alphas[-1], 0, length=asked["prompt_tokens"], output=count)
    compiles = device.type == "cuda"  # transformers compiles a static cache's passes there, and nowhere else
    rates = [
        generated(place, model, prompt, count, cache_implementation="static").rate
        for _ in range((_WARM_UP_TURNS if compiles else 1) + asked["repeats"])
    ][-asked["repeats"] :]
    print(json.dumps({"tokens_per_second": median(rates), "rates": rates, "compiled": compiles}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
