"""Outrider's packed model for `benchmarks.gpu`, as the services build it: with captured passes or without."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_bench import Unavailable
from outrider.runtime.cuda_graph import capturer_for
from outrider.runtime.loader import LoadedModel
from outrider.runtime.memory import MIB, kv_dtype
from outrider.runtime.packed import PackedModel
from outrider.runtime.paged_attention import AUTO, choose_attention

RECORD_SECONDS = 60.0
RECORD_BYTES = 4096 * MIB


def paged_model(loaded: LoadedModel, max_sequences: int, max_length: int) -> PackedModel:
    """The model with the attention that a service takes on its device; on a CPU, too, over pages."""
    choice = choose_attention(AUTO, loaded.layers, kv_dtype(loaded), loaded.device, paged=loaded.device.type == "cpu")
    return PackedModel.build(loaded, max_sequences, max_length, attention=choice)


def packed_model(
    loaded: LoadedModel, max_sequences: int, max_length: int, *, graphs: bool, widths: Sequence[int] = (1,)
) -> PackedModel:
    """Outrider's packed model, with passes captured (CUDA graphs; on a CPU they are called again) or without.

    As the verifier does, it runs passes of these `widths` once before anything is timed.

    Raises:
        Unavailable: what attends on this device cannot be captured.
    """
    packed = paged_model(loaded, max_sequences, max_length)
    if graphs:
        if not packed.attention.can_be_captured(loaded.device):
            raise Unavailable(f"{packed.attention.name} cannot be captured ({packed.attention.reason})")
        packed.capture(
            capturer_for(loaded.device),
            max_sequences=max_sequences,
            widest=max(widths),
            seconds=RECORD_SECONDS,
            most_bytes=RECORD_BYTES,
        )
    packed.warm_up(widths)
    return packed


def as_served(loaded: LoadedModel, max_sequences: int, max_length: int, *, widths: Sequence[int] = (1,)) -> PackedModel:
    """The same with graphs where there are any."""
    try:
        return packed_model(loaded, max_sequences, max_length, graphs=True, widths=widths)
    except Unavailable:
        return packed_model(loaded, max_sequences, max_length, graphs=False, widths=widths)
