"""Proposals as flat arrays for the kernels of `verify_triton`, sent to the device by one copy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import RowAdjustment
from kernels.packed_arrays import Field, PackedArrays
from kernels.sampling import LEAST_TEMPERATURE, Draw, SamplingParams
from kernels.sigmoid import DraftLogits
from kernels.sparse import SparseDistribution
from kernels.verify import Proposed, Rule, Status, adjustments_of

RULE_NUMBERS = {Rule.TOKENWISE: 0, Rule.BLOCK: 1, Rule.COUPLED: 2, Rule.SIGMOID: 3}
"""The rules by number, in the kernels and in `cpu_verify.c`; temperature 0 is `GREEDY_NUMBER` under every rule."""

GREEDY_NUMBER = 4

STATUSES = (Status.OK, Status.ZERO_RESIDUAL, Status.BAD_LOGITS)
"""The statuses by the numbers of the kernels and of `cpu_verify.c`."""

INTS, FLOATS, DRAFT_INTS = 6, 7, 4
"""The columns of `Batch.ints`, `Batch.floats` and `Batch.draft_ints`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B proposals of N drafted tokens in all, over R rows; tensors on the logits' device.

    Attributes:
        ints: int64 `[B, 6]`: first row, γ, rule, seed, base_length, and where given uniforms begin (-1: none).
        floats: float64 `[B, 7]`: log2(e) / temperature, lenience, alpha, 1 / (beta - alpha), top-k (0: off), top-p,
            log2 of min-p.
        row_sequence: int32 `[R]`.
        filtered_rows: int32 `[F]`, the rows with top-k, top-p or min-p.
        draft_ints: int32 `[N, 4]`: token (-1 outside the vocabulary), first of the support, its size, row of
            `draft_logits` (-1: none).
        draft_q: float32 `[N]`, q̂ of the token; 0 under the rule sigmoid.
        support_ids: int32 `[S]`, ascending within a draft.
        support_q: float32 `[S]`.
        draft_logits: float32 `[D, V]`, of the drafts under the rule sigmoid.
        uniforms: float64 `[U]`: γ tests and the next token's draw of each proposal that gives its own.
        adjusted: int32 `[R]`, the index of the row's list of changes; -1 for none.
        tile_starts: int32 `[lists, n_tiles + 1]`, where each tile's changes begin.
        change_ids: int32 `[C]`, with float32 `change_divisors` and `change_biases`.
        change_divisors: see `change_ids`.
        change_biases: see `change_ids`.
        with_top_k: whether any of `filtered_rows` has top-k.
        with_top_p: whether any of them has top-p.
        rules: the numbers of the rules, ascending.
    """

    ints: Tensor
    floats: Tensor
    row_sequence: Tensor
    filtered_rows: Tensor
    draft_ints: Tensor
    draft_q: Tensor
    support_ids: Tensor
    support_q: Tensor
    draft_logits: Tensor
    uniforms: Tensor
    adjusted: Tensor
    tile_starts: Tensor
    change_ids: Tensor
    change_divisors: Tensor
    change_biases: Tensor
    with_top_k: bool
    with_top_p: bool
    rules: tuple[int, ...]


def pack(proposals: Sequence[Proposed], V: int, tile: int, device: torch.device) -> Batch:
    """Return the proposals as arrays on `device`, for rows of `V` logits in tiles of `tile`."""
    arrays = {**_sequences(proposals), **_rows(proposals), **_supports(proposals, V), **_changes(proposals, V, tile)}
    filters = [each.params for each in proposals if is_filtered(each)]
    return Batch(
        **_upload(arrays, device),
        draft_logits=_draft_logits(proposals, V, device),
        with_top_k=any(0 < each.top_k < V for each in filters),
        with_top_p=any(each.top_p < 1 for each in filters),
        rules=tuple(sorted({_rule_number(each) for each in proposals})),
    )


def numbers_of_draw(draw: Draw, row: int, given: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return a row of `Batch.ints` and of `Batch.floats`, for a proposal without drafts.

    Args:
        draw: of its next token.
        given: the index of its uniform, which noise does not need.
    """
    seed, position, rule = 0, 0, RULE_NUMBERS[Rule.TOKENWISE]
    if draw.noise is not None:
        (seed, position), rule = draw.noise, RULE_NUMBERS[Rule.COUPLED]
    ints = (row, 0, GREEDY_NUMBER if draw.params.is_greedy else rule, _signed(seed), position, given)
    return ints, (_scale(draw.params), 1.0, 0.0, 1.0, *_filters(draw.params))


def _filters(params: SamplingParams) -> tuple[float, float, float]:
    """The last three of `Batch.floats`."""
    return params.top_k, params.top_p, math.log2(params.min_p) if params.min_p > 0 else -math.inf


def is_filtered(proposal: Proposed) -> bool:
    """Return whether a proposal has top-k, top-p or min-p; at temperature 0 they have no effect."""
    return not (proposal.params.is_greedy or proposal.params.has_no_filters)


def _rule_number(proposal: Proposed) -> int:
    return GREEDY_NUMBER if proposal.params.is_greedy else RULE_NUMBERS[proposal.rule]


def _sequences(proposals: Sequence[Proposed]) -> dict[str, np.ndarray]:
    first_rows = accumulate((len(each.tokens) + 1 for each in proposals), initial=0)
    ints, floats = [], []
    uniforms: list[float] = []
    for each, first_row in zip(proposals, first_rows, strict=False):
        params = each.params
        given = -1
        if each.uniforms is not None:
            given = len(uniforms)
            uniforms += [*each.uniforms.accept[: len(each.tokens)], each.uniforms.resample]
        ints.append((first_row, len(each.tokens), _rule_number(each), _signed(each.seed), each.base_length, given))
        scales = each.sigmoid
        lowest, span = (scales.alpha, scales.beta - scales.alpha) if scales is not None else (0.0, 1.0)
        floats.append((_scale(params), each.lenience, lowest, 1 / span, *_filters(params)))
    return {
        "ints": np.array(ints, np.int64).reshape(-1, INTS),
        "floats": np.array(floats, np.float64).reshape(-1, FLOATS),
        "uniforms": np.array(uniforms, np.float64),
    }


def _scale(params: SamplingParams) -> float:
    """Return log2(e) / temperature; at temperature 0 as at 1."""
    return math.log2(math.e) / (1.0 if params.is_greedy else max(params.temperature, LEAST_TEMPERATURE))


def _signed(seed: int) -> int:
    """Return the int64 with the bits of a seed below 2^64."""
    return seed - 2**64 if seed >= 2**63 else seed


def _rows(proposals: Sequence[Proposed]) -> dict[str, np.ndarray]:
    lengths = [len(each.tokens) + 1 for each in proposals]
    filtered = np.array([is_filtered(each) for each in proposals], bool).repeat(lengths)
    return {
        "row_sequence": np.arange(len(proposals), dtype=np.int32).repeat(lengths),
        "filtered_rows": np.flatnonzero(filtered).astype(np.int32),
    }


def _supports(proposals: Sequence[Proposed], V: int) -> dict[str, np.ndarray]:
    tokens: list[int] = []
    ids: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    totals: list[int] = []
    logits_rows: list[int] = []
    with_logits = 0
    for each in proposals:
        for i, token in enumerate(each.tokens):
            tokens.append(token if 0 <= token < V else -1)
            distribution = each.q[i] if each.q else None
            logits_rows.append(-1)
            totals.append(1)
            if isinstance(distribution, SparseDistribution):
                ids.append(distribution.ids)
                weights.append(distribution.weights)
                totals[-1] = distribution.total
            elif distribution is None and each.rule is not Rule.COUPLED:
                ids.append(np.array((token if 0 <= token < V else -1,)))
                weights.append(_ONE)
            else:
                ids.append(_NONE)
                weights.append(_NONE)
                if distribution is not None:
                    logits_rows[-1] = with_logits
                    with_logits += 1
    N = len(tokens)
    sizes = np.array([len(each) for each in ids], np.int64)
    draft = np.arange(N).repeat(sizes)
    flat = np.concatenate(ids, dtype=np.int64) if N else np.empty(0, np.int64)
    q = np.concatenate(weights) / np.array(totals, np.float64).repeat(sizes) if N else np.empty(0)
    within = (flat >= 0) & (flat < V)
    if not within.all():
        draft, flat, q = draft[within], flat[within], q[within]
        sizes = np.bincount(draft, minlength=N)
    hit = flat == np.array(tokens, np.int64)[draft]
    ends = sizes.cumsum()
    return {
        "draft_ints": np.stack((tokens, ends - sizes, sizes, logits_rows), axis=1)
        .astype(np.int32)
        .reshape(N, DRAFT_INTS),
        "draft_q": np.bincount(draft[hit], q[hit], minlength=N).astype(np.float32),
        "support_ids": flat.astype(np.int32),
        "support_q": q.astype(np.float32),
    }


_ONE = np.ones(1, np.uint16)
_NONE = np.empty(0, np.uint16)


def _draft_logits(proposals: Sequence[Proposed], V: int, device: torch.device) -> Tensor:
    rows = [q.values for each in proposals for q in each.q if isinstance(q, DraftLogits)]
    if not rows:
        return torch.empty(0, V, device=device)
    return torch.stack([row.to(device, torch.float32, non_blocking=True) for row in rows])


def _changes(proposals: Sequence[Proposed], V: int, tile: int) -> dict[str, np.ndarray]:
    lists: list[RowAdjustment] = []
    adjusted = [-1] * sum(len(each.tokens) + 1 for each in proposals)
    for number, row in enumerate(adjustments_of(proposals)):
        if row is not None and len(row.ids):
            adjusted[number] = len(lists)
            lists.append(row)
    edges = np.arange(-(-V // tile) + 1) * tile
    begins = list(accumulate((len(row.ids) for row in lists), initial=0))
    starts = [begin + np.searchsorted(row.ids, edges) for begin, row in zip(begins, lists, strict=False)]
    return {
        "adjusted": np.array(adjusted, np.int32),
        "tile_starts": np.array(starts, np.int32).reshape(len(lists), len(edges)),
        "change_ids": _flat([row.ids for row in lists], np.int32),
        "change_divisors": _flat([row.repetition for row in lists], np.float32),
        "change_biases": _flat([row.bias for row in lists], np.float32),
    }


def _flat(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)


def _upload(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays on `device`, after one copy of them all."""
    packed = PackedArrays({name: Field(array.dtype.type, array.shape) for name, array in arrays.items()})
    buffer = packed.buffer(torch.device("cpu"), pinned=device.type == "cuda")
    for name, staged in packed.arrays(buffer).items():
        staged[...] = arrays[name]
    return packed.tensors(buffer.to(device, non_blocking=True))
