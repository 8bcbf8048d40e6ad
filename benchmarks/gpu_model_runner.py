"""Outrider's model for `benchmarks.gpu`, as the services build it: with captured passes or without."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_bench import Unavailable
from outrider.runtime.cuda_graph import capturer_for
from outrider.runtime.loader import LoadedModel
from outrider.runtime.memory import MIB, kv_dtype
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.paged_attention import AUTO, choose_attention

RECORD_SECONDS = 60.0
RECORD_BYTES = 4096 * MIB


def paged_model(loaded: LoadedModel, max_sequences: int, max_length: int) -> ModelRunner:
    """The model with the attention that a service takes on its device; on a CPU, too, over pages."""
    choice = choose_attention(AUTO, loaded.layers, kv_dtype(loaded), loaded.device, paged=loaded.device.type == "cpu")
    return ModelRunner.build(loaded, max_sequences, max_length, attention=choice)


def packed_model(
    loaded: LoadedModel, max_sequences: int, max_length: int, *, graphs: bool, widths: Sequence[int] = (1,)
) -> ModelRunner:
    """Outrider's model, with passes captured (CUDA graphs; on a CPU they are called again) or without.

    As the verifier does, it runs passes of these `widths` once before anything is timed.

    Raises:
        Unavailable: what attends on this device cannot be captured.
    """
    model_runner = paged_model(loaded, max_sequences, max_length)
    if graphs:
        if not model_runner.attention.can_be_captured(loaded.device):
            raise Unavailable(f"{model_runner.attention.name} cannot be captured ({model_runner.attention.reason})")
        model_runner.capture(
            capturer_for(loaded.device),
            max_sequences=max_sequences,
            widest=max(widths),
            seconds=RECORD_SECONDS,
            most_bytes=RECORD_BYTES,
        )
    model_runner.warm_up(widths)
    return model_runner


def as_served(loaded: LoadedModel, max_sequences: int, max_length: int, *, widths: Sequence[int] = (1,)) -> ModelRunner:
    """The same with graphs where there are any."""
    try:
        return packed_model(loaded, max_sequences, max_length, graphs=True, widths=widths)
    except Unavailable:
        return packed_model(loaded, max_sequences, max_length, graphs=False, widths=widths)
