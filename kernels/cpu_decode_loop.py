"""What the decode loop in C reads and writes (`cpu_decode_loop.c`): how tokens are drawn, and the tokens.

The loop draws a token of each sequence from its logits, runs those tokens, and so on, in one call. It runs them by our
own decoder (`cpu_decoder`) or by llama.cpp.
"""

import ctypes
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from torch import Tensor

from kernels.adjustments import CountedChanges
from kernels.sampling import LEAST_TEMPERATURE, Draw, Sample, SamplingParams
from kernels.sparse import SparseConfig, SparseDistribution

_Pointer = ctypes.c_void_p


class ParamsStruct(ctypes.Structure):
    """`Params` of the C code."""

    _fields_ = [("top_k", ctypes.c_int32), *((name, ctypes.c_float) for name in ("temperature", "top_p", "min_p"))]

    @classmethod
    def of(cls, params: SamplingParams) -> "ParamsStruct":
        temperature = params.temperature if params.is_greedy else max(params.temperature, LEAST_TEMPERATURE)
        return cls(params.top_k, temperature, params.top_p, params.min_p)


class ProposalStruct(ctypes.Structure):
    """`Proposal` of `cpu_verify.c`, which draws the target's tokens by the same functions as the loop."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rule", "gamma")),
        ("params", ParamsStruct),
        ("base_length", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("lenience", ctypes.c_double),
        *((name, _Pointer) for name in ("uniforms", "logits")),
        ("stride", ctypes.c_int64),
        *((name, _Pointer) for name in ("tokens", "ends", "ids", "weights", "beta")),
        *((name, ctypes.c_int32) for name in ("status", "accepted", "next_token")),
    ]


class ChangesStruct(ctypes.Structure):
    """`Changes` of the C code."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("size", "counts_tokens")),
        *((name, _Pointer) for name in ("ids", "counts", "repetition", "bias", "constant_bias")),
        ("repetition_penalty", ctypes.c_float),
        *((name, ctypes.c_double) for name in ("presence_penalty", "frequency_penalty")),
    ]


class DrawStruct(ctypes.Structure):
    """`Draw` of the C code."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("tokens", "stops")),
        ("params", ParamsStruct),
        *((name, _Pointer) for name in ("max_entropy", "uniforms", "noise", "stop")),
        ("changes", ctypes.POINTER(ChangesStruct)),
    ]


class LoopStruct(ctypes.Structure):
    """`Loop` of the C code."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("sequences", "most_tokens", "vocab_size", "mask_token", "max_support")),
        ("keep_mass", ctypes.c_float),
        ("draw", ctypes.POINTER(DrawStruct)),
        *((name, _Pointer) for name in ("sample", "ids", "weights", "scratch", "active", "next", "interrupted")),
    ]


class LlamaBatchStruct(ctypes.Structure):
    """`llama_batch` of the llama.cpp that the C code was written for."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        *((name, _Pointer) for name in ("token", "embedding", "position", "sequence_counts", "sequences", "wanted")),
    ]


class LlamaStruct(ctypes.Structure):
    """`Llama` of the C code: a context of llama.cpp, its functions, and its batch.

    Attributes:
        decode, get_logits: addresses of `llama_decode` and `llama_get_logits`.
        batch: of each sequence the last row, which is wanted. The loop changes it.
        logits: float32 `[B, V]` of these rows; of a draft `[all tokens, V]`, which the loop fills after the first B.
        keeps_logits: 1 for a draft.
        code: of `llama_decode`; not 0 if it failed, which ended the loop.
    """

    _fields_ = [
        *((name, _Pointer) for name in ("context", "decode", "get_logits")),
        ("batch", LlamaBatchStruct),
        ("logits", _Pointer),
        *((name, ctypes.c_int32) for name in ("size", "keeps_logits", "code")),
    ]


SAMPLE_NUMBERS = 4
"""int32 of a sample: token, row of its logits, support, total."""
_NOT_DRAWN = -3
SLACK = 32  # values behind each row of the scratch memory


class LoopArrays:
    """The arrays of one run of the loop.

    Args:
        draws: of each sequence, at least one; with the same parameters, and noise or uniforms for all.
        config: how q is truncated; None, for a target, draws from p itself, as `kernels.verify_c` does.
        vocab_size: tokens that may be drawn.
        stops: of each sequence: nothing is drawn after one of these tokens.
        changes: of each sequence, to its logits; None if there are none.
        interrupted: int32 `[1]`; once it is not 0, the loop ends after the token that it draws.

    Attributes:
        struct: the argument of the C code.
        is_draft: whether there is a q̂.
        rows_kept: rows of logits that the loop keeps: those of all tokens of a draft, since later tokens do not replace
            them; those of one token of each sequence of a target.
    """

    def __init__(
        self,
        draws: Sequence[Sequence[Draw]],
        config: SparseConfig | None,
        *,
        vocab_size: int,
        mask_token: int | None,
        stops: Sequence[Collection[int]],
        changes: Sequence[CountedChanges | None],
        interrupted: np.ndarray,
    ) -> None:
        count, most = len(draws), max(map(len, draws))
        self._draws, self._vocab_size, self.is_draft = draws, vocab_size, config is not None
        self.rows_kept = count if config is None else sum(map(len, draws))
        uniforms = np.zeros((count, most), np.int64)
        max_entropies = np.zeros((count, most), np.float32)
        noise: list[np.ndarray | None] = []
        for i, each in enumerate(draws):
            max_entropies[i, : len(each)] = [draw.max_entropy for draw in each]
            positioned = [draw.noise for draw in each if draw.noise is not None]
            noise.append(np.array(positioned, np.uint64) if positioned else None)
            if not positioned:
                uniforms[i, : len(each)] = [int(draw.uniform * 2.0**53) for draw in each]
        support, keep_mass = (0, 1.0) if config is None else (config.max_support, config.keep_mass)
        stop = [np.array(sorted(each), np.int32) for each in stops]
        self._drawn = np.full((count, most, SAMPLE_NUMBERS), _NOT_DRAWN, np.int32)
        self._ids, self._weights = (np.empty((count, most, support), each) for each in (np.uint32, np.uint16))
        changed = [each and _Changed(each, len(own), vocab_size) for each, own in zip(changes, draws, strict=True)]
        scratch = np.empty(3 * (vocab_size + SLACK), np.float32)
        active, following = np.empty(4 * count, np.int32), np.empty(count, np.int64)
        self.struct = LoopStruct(
            count, most, vocab_size, -1 if mask_token is None else mask_token, support, keep_mass,
            (DrawStruct * count)(*map(_draw_of, draws, max_entropies, uniforms, noise, stop, changed)),
            self._drawn.ctypes.data, self._ids.ctypes.data, self._weights.ctypes.data, scratch.ctypes.data,
            active.ctypes.data, following.ctypes.data, interrupted.ctypes.data,
        )  # fmt: skip
        self._pointed_to = (uniforms, max_entropies, noise, stop, changed, scratch, active, following, interrupted)

    def samples(self, logits: Tensor) -> list[list[Sample]]:
        """The samples of each sequence, after the loop. A sample without a token is the last of its sequence.

        Args:
            logits: those that were kept, `[rows_kept, V]`; a draft's become scores.
        """
        scores = logits[:, : self._vocab_size] if self.is_draft else None
        drawn = zip(self._draws, self._drawn.tolist(), self._ids, self._weights, strict=True)
        return [list(_samples(*each, scores)) for each in drawn]


class _Changed:
    """A `ChangesStruct` with its arrays, which have room for `tokens` more ids."""

    def __init__(self, changes: CountedChanges, tokens: int, vocab_size: int) -> None:
        row, rules = changes.row.within(vocab_size), changes.rules
        size = len(row.ids)

        def with_room(values: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
            return np.concatenate((values[:size], np.zeros(tokens)), dtype=dtype, casting="unsafe")

        arrays = [with_room(row.ids, np.int32), with_room(changes.counts, np.int32)]
        arrays += [with_room(row.repetition, np.float32), with_room(row.bias, np.float32)]
        self._arrays = [*arrays, with_room(changes.bias, np.float64)]
        self.struct = ChangesStruct(
            size, rules.counts_tokens, *(each.ctypes.data for each in self._arrays), rules.repetition_penalty,
            rules.presence_penalty, rules.frequency_penalty,
        )  # fmt: skip


def _draw_of(
    draws: Sequence[Draw],
    max_entropies: np.ndarray,
    uniforms: np.ndarray,
    noise: np.ndarray | None,
    stop: np.ndarray,
    changed: _Changed | None,
) -> DrawStruct:
    return DrawStruct(
        len(draws), len(stop), ParamsStruct.of(draws[0].params), max_entropies.ctypes.data, uniforms.ctypes.data,
        None if noise is None else noise.ctypes.data, stop.ctypes.data,
        None if changed is None else ctypes.pointer(changed.struct),
    )  # fmt: skip


def _samples(
    draws: Sequence[Draw], drawn: Sequence[Sequence[int]], ids: np.ndarray, weights: np.ndarray, scores: Tensor | None
) -> Iterator[Sample]:
    """`scores` is None if tokens are drawn from p itself."""
    by_uniform = draws[0].noise is None and not draws[0].params.is_greedy
    for i, (token, row, support, total) in enumerate(drawn[: len(draws)]):
        if token == _NOT_DRAWN:
            return
        if token < 0:
            yield Sample(token)
            return
        if scores is None:
            yield Sample(token)
            continue
        q = SparseDistribution(ids[i, :support], weights[i, :support], total) if by_uniform else None
        yield Sample(token, q, None if by_uniform else scores[row])
