"""Outrider's packed model for `benchmarks.gpu`: the one place here that knows how CUDA graphs are asked for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_bench import Unavailable
from outrider.lm.checkpoint import LoadedModel
from outrider.lm.packed import PackedModel


def packed_model(
    loaded: LoadedModel, max_sequences: int, max_length: int, *, graphs: bool, widths: Sequence[int] = (1,)
) -> PackedModel:
    """Outrider's packed model, with CUDA graphs or without.

    As the verifier does, it runs passes of these `widths` once before anything is timed.

    Raises:
        Unavailable: this build, or this device, has no graphs.
    """
    options: dict[str, Any] = {}
    if "graphs" in inspect.signature(PackedModel.build).parameters:
        options["graphs"] = graphs
    elif graphs:
        raise Unavailable("this build makes no CUDA graphs")
    if graphs and loaded.device.type != "cuda":
        raise Unavailable(f"a graph needs a CUDA device, not {loaded.device}")
    packed = PackedModel.build(loaded, max_sequences, max_length, **options)
    packed.warm_up(widths)
    return packed


def as_served(loaded: LoadedModel, max_sequences: int, max_length: int, *, widths: Sequence[int] = (1,)) -> PackedModel:
    """The same with graphs where there are any."""
    try:
        return packed_model(loaded, max_sequences, max_length, graphs=True, widths=widths)
    except Unavailable:
        return packed_model(loaded, max_sequences, max_length, graphs=False, widths=widths)
