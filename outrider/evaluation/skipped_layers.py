"""The layers that a target can do without as a draft of itself [W A.7]: a greedy search by α on the target's text."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from outrider.evaluation import EvaluationError
from outrider.evaluation.local_models import build_runner
from outrider.evaluation.target_text import Report
from outrider.runtime.loader import LoadedModel, adopt
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.skip_layers import DecoderLayers, write_layers


@dataclass(frozen=True, slots=True)
class Step:
    """One more layer is left out.

    Attributes:
        layer: its number.
        skip_layers: all that are left out now, as the flag names them.
        alpha: α of the rest as a draft.
    """

    layer: int
    skip_layers: str
    alpha: float


def find_layers(
    loaded: LoadedModel,
    count: int,
    length: int,
    alpha_of: Callable[[ModelRunner], float],
    *,
    report: Report = lambda *_: None,
) -> list[Step]:
    """Leaves out `count` layers, one after another: each time the one without which α is highest.

    A layer without which α is no lower than before is left out at once, and the rest is not tried. Layers are tried
    from the last one found on.

    Args:
        loaded: a copy of the target, not fused; its model is changed.
        length: tokens of the longest text.
        alpha_of: measures α of a draft.
        report: called with the models that have been tried, and the most that may be.

    Raises:
        CheckpointError: layers of this model cannot be left out.
        EvaluationError: it has no more than `count` layers.
    """
    layers = DecoderLayers(loaded.model, loaded.name)
    if count >= layers.count:
        raise EvaluationError(
            f"--find-skip-layers is {count}, and '{loaded.name}' has {layers.count} layers; keep at least one"
        )
    tried, most = 0, 1 + sum(layers.count - done for done in range(count))

    def alpha_without(skipped: Collection[int]) -> float:
        nonlocal tried
        layers.skip(skipped)
        found = alpha_of(build_runner(adopt(loaded.model, loaded.name, ""), 1, length, fuse=False))
        tried += 1
        report("searching", tried, most)
        return found

    steps: list[Step] = []
    skipped: list[int] = []
    before = alpha_without([])
    while len(skipped) < count:
        alphas: dict[int, float] = {}
        first = skipped[-1] if skipped else 0
        for layer in [*range(first, layers.count), *range(first)]:
            if layer not in skipped:
                alphas[layer] = alpha_without([*skipped, layer])
                if alphas[layer] >= before:
                    break
        best = max(alphas, key=lambda layer: alphas[layer])
        before = alphas[best]
        skipped.append(best)
        steps.append(Step(best, write_layers(skipped), before))
    return steps
