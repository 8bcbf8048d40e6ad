"""Self-checks at the start of a service: a candidate implementation against a reference.

`check` compares two functions. `check_program` compares a whole model with transformers' own forward on a few tokens: a
feature that packed attention or a fused layer misses (a state outside the attention, a scale) changes the logits, and
is refused before any request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.attention import NAME, AttentionLayer, Batch, Program
from outrider.runtime.batch import Chunk, HostBatch, PagedAttention, build_batch, pack, to_device
from outrider.runtime.block_pool import PagedMemory
from outrider.runtime.encoder_decoder import EncoderDecoder, encoder_length
from outrider.runtime.errors import CheckpointError
from outrider.runtime.kv_cache import BLOCK_TOKENS, KVPool
from outrider.runtime.sdpa import CausalMasks

# Tolerances, relative to the size of the compared values: of one operation, and of a model's logits. A step of bfloat16
# is 2^-8; in a whole model, kernels that round differently differ by about a hundredth.
_FULL = (torch.float32, torch.float64)
_OPERATION, _OPERATION_HALF = 1e-4, 0.02
_LOGITS, _LOGITS_HALF = 1e-3, 0.1


class Refusal(str):
    """Why a candidate is refused, in one line.

    Attributes:
        cause: the exception that it raised, or None.
    """

    cause: Exception | None = None


def check(
    candidate: Callable[[], Mapping[str, Tensor]],
    reference: Callable[[], Mapping[str, Tensor]],
    tolerance: float,
    *,
    typical: bool = False,
) -> Refusal | None:
    """Runs both functions and compares their results by name, in float32.

    Args:
        candidate: the implementation under check. It is refused if it raises.
        reference: the implementation to agree with.
        tolerance: the largest allowed difference, relative to the largest value of the reference.
        typical: compare rows of the last dimension by their norms, and take the median row. For logits: 16-bit rounding
            occasionally sends a token to another expert.

    Returns:
        Why the candidate is refused, or None.

    Raises:
        torch.OutOfMemoryError: the device is out of memory, which is no fault of the candidate.
    """
    try:
        found = {name: each.float().cpu() for name, each in candidate().items()}  # errors of a GPU are raised here
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        refusal = Refusal(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        refusal.cause = error
        return refusal
    for name, wanted in reference().items():
        distance = _distance(found[name], wanted.float().cpu(), typical)
        if not distance <= tolerance:
            return Refusal(f"{name} differ by {distance:.2g} of their size; {tolerance:g} is allowed")
    return None


def _distance(found: Tensor, wanted: Tensor, typical: bool) -> float:
    if typical:
        return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)).median())
    return float((found - wanted).abs().max() / wanted.abs().max())


def operation_tolerance(dtype: torch.dtype) -> float:
    """The tolerance for one operation in a dtype."""
    return _OPERATION if dtype in _FULL else _OPERATION_HALF


def logits_tolerance(dtype: torch.dtype, *, quantised: bool = False) -> float:
    """The tolerance for a model's logits in a dtype. Quantised models round activations to 8 bits in any dtype."""
    return _LOGITS if dtype in _FULL and not quantised else _LOGITS_HALF


def random_batch(
    spans: Sequence[tuple[int, int]],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> tuple[HostBatch, PagedMemory]:
    """A batch over one layer's KV cache of random numbers, the same at each call.

    Args:
        spans: (positions before, rows) of each sequence.
    """
    pool = KVPool(
        1, kv_heads, head_dim,
        blocks=sum(-(-(start + count) // block_tokens) for start, count in spans) + 2,
        max_length=max(start + count for start, count in spans),
        dtype=dtype, device=device, block_tokens=block_tokens, paged=True,
    )  # fmt: skip
    assert pool.paged is not None
    generator = torch.Generator().manual_seed(head_dim)
    for store in (pool.paged.keys[0], pool.paged.values[0]):
        store.copy_(torch.randn(store.shape, generator=generator))
    pool.grow(pool.allocate(), 1)  # so that no sequence begins at block 0
    chunks = []
    for start, count in reversed(spans):
        slot = pool.allocate()
        pool.grow(slot, start + count)
        pool.extend(slot, start)
        chunks.append(Chunk(slot, [0] * count, start, 0))
    return build_batch(chunks, pool), pool.paged


# ----------------------------------------------------------------------------------------------------- whole models

_LENGTH = 9
_SEED = 20221130


@dataclass(frozen=True, slots=True)
class Reference:
    """Two short sequences and their logits by transformers.

    Attributes:
        tokens: `[2, n]`.
        logits: `[2, n, V]`, float32, on the CPU.
        inputs: of the encoder: `[2, S]` tokens, or `[2, mels, frames]`; None without one.
    """

    tokens: Tensor
    logits: Tensor
    inputs: Tensor | None = None


def reference(model: Any, vocab_size: int, context_length: int) -> Reference:
    """Runs the model's own forward with transformers' attention.

    Raises:
        CheckpointError: the forward fails.
    """
    generator = torch.Generator().manual_seed(_SEED)
    shape = (2, min(_LENGTH, context_length))
    tokens = torch.randint(min(vocab_size, 1000), shape, generator=generator)
    weight = next(model.parameters())
    arguments: dict[str, Any] = {"input_ids": tokens.to(weight.device)}
    inputs: Tensor | None = None
    if model.config.is_encoder_decoder:
        if (mels := getattr(model.config, "num_mel_bins", None)) is not None:
            inputs = torch.randn(2, mels, 2 * model.config.max_source_positions, generator=generator)
            arguments = {"input_features": inputs.to(weight.device, weight.dtype)}
        else:
            inputs = tokens.flip(1)[:, 1:]
            arguments = {"input_ids": inputs.to(weight.device)}
        arguments["decoder_input_ids"] = tokens.to(weight.device)
    try:
        # Eager attention always caps soft-capped scores; sdpa has no such argument.
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        try:
            model.set_attn_implementation("eager" if capped else "sdpa")
        except ValueError:
            model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits = model(**arguments, use_cache=False).logits
    except Exception as error:
        raise CheckpointError(
            f"{type(model).__name__} fails in transformers itself: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.set_attn_implementation(NAME)
    if not logits.isfinite().all():
        raise CheckpointError(
            f"the logits of {type(model).__name__} are NaN or infinite in transformers itself: its weights are "
            f"damaged, its configuration is wrong, or {logits.dtype} is too narrow for it (--dtype)"
        )
    return Reference(tokens, logits.float().cpu(), inputs)


def make_pool(layers: Sequence[AttentionLayer], **options: Any) -> KVPool:
    """A pool for the attention layers of a model; `options` are those of `KVPool`."""
    heads, sizes = [layer.kv_heads for layer in layers], [layer.head_dim for layer in layers]
    return KVPool(len(layers), heads, sizes, **options)


@torch.inference_mode()
def check_program(
    program: Program,
    layers: Sequence[AttentionLayer],
    expected: Reference,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
    *,
    attention: PagedAttention | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> Refusal | None:
    """Checks a program's logits against the reference, up to a constant per row, which changes no distribution.

    Two batches each hold a part of both sequences, in different order; only some rows need logits.

    Args:
        dtype: of keys and values.
        tolerance: see `check`.
        attention: paged attention over blocks of `block_tokens`; None uses contiguous keys and values.
        block_tokens: see `attention`.
    """
    length = expected.tokens.shape[1]
    first, second = min(4, length), min(3, length)
    # (sequence, start, count)
    batches = [[(0, 0, first), (1, 0, second)], [(1, second, length - second), (0, first, length - first)]]
    batches = [[span for span in spans if span[2]] for spans in batches if any(count for _, _, count in spans)]

    def rows(of: Tensor, spans: list[tuple[int, int, int]]) -> Tensor:
        return torch.cat([of[i, start : start + count] for i, start, count in spans])

    def wanted(spans: list[tuple[int, int, int]]) -> Tensor:
        count = len(rows(expected.tokens, spans))
        return torch.arange(min(1, count - 1), count)

    def found() -> dict[str, Tensor]:
        blocks = 2 * -(-length // block_tokens)
        longest = length
        if isinstance(program, EncoderDecoder):
            longest = max(length, program.info.max_length)
            blocks += 2 * -(-longest // block_tokens)
        pool = make_pool(
            layers, blocks=blocks, max_length=longest, dtype=dtype, device=device, block_tokens=block_tokens,
            paged=attention is not None,
        )  # fmt: skip
        slots, masks = (pool.allocate(), pool.allocate()), CausalMasks(length, dtype, device)
        if isinstance(program, EncoderDecoder):
            assert expected.inputs is not None
            for slot, inputs in zip(slots, expected.inputs, strict=True):
                program.fill(pool, pool.add_encoder(slot, encoder_length(inputs)), inputs)
        logits = []
        for spans in batches:
            token_ids = rows(expected.tokens, spans)
            batch: Batch
            if attention is None:
                batch = pack(((slots[i], start, count) for i, start, count in spans), pool, masks)
            else:
                assert pool.paged is not None
                host_batch = build_batch([Chunk(slots[i], [0] * count, start, 0) for i, start, count in spans], pool)
                batch = to_device(replace(host_batch, tokens=token_ids.numpy()), pool.paged, attention, device)
            logits.append(program(token_ids.to(device), batch, wanted(spans).to(device)).float().cpu())
            for i, start, count in spans:
                pool.extend(slots[i], start + count)
        return {"logits": _centred(torch.cat(logits))}

    def reference() -> dict[str, Tensor]:
        return {"logits": _centred(torch.cat([rows(expected.logits, spans)[wanted(spans)] for spans in batches]))}

    return check(found, reference, tolerance, typical=True)


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)
