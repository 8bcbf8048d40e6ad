"""Verification on the host in C (`cpu_verify.c`), where the library of the CPU decoder runs.

In `verify_torch` the calls of torch and numpy for a proposal take longer than the arithmetic, unless the vocabulary is
large. The C code draws the target's tokens by the functions of the decode loop in C, so both draw the same ones. What
it does not support goes to `verify_torch`: the rule `sigmoid`, and lenience at temperature 0.
"""

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import verify_torch
from kernels.adjustments import apply
from kernels.cpu_decode_loop import SLACK, ParamsStruct, ProposalStruct
from kernels.cpu_decoder import library
from kernels.sparse import SparseDistribution
from kernels.verify import BAD_LOGITS, Proposed, Rule, Status, VerifyResult, adjustments_of
from kernels.verify_pack import RULE_NUMBERS, STATUSES


def is_available() -> bool:
    """Return whether the C code runs here."""
    return library() is not None


def verify(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """See `kernels.verify.verify`."""
    in_c = [b for b, each in enumerate(proposals) if _runs_in_c(each)]
    if not in_c:
        return verify_torch.verify(logits, proposals)
    starts = [0, *accumulate(len(each.tokens) + 1 for each in proposals)]
    if logits.dtype != torch.float32 and len(proposals) > 1:  # all rows in float32 may need new memory at each call
        parts = zip(pairwise(starts), proposals, strict=True)
        return [result for (begin, end), each in parts for result in verify(logits[begin:end], [each])]
    raw = logits.cpu()
    z = apply(raw, adjustments_of(proposals)).float()
    z = z if z.stride(1) == 1 else z.contiguous()
    results: list[VerifyResult | None] = [None] * len(proposals)
    for b, result in zip(in_c, _verify(z, [starts[b] for b in in_c], [proposals[b] for b in in_c]), strict=True):
        results[b] = result
    others = [b for b, result in enumerate(results) if result is None]
    if others:
        every = [row for b in others for row in range(starts[b], starts[b + 1])]
        for b, result in zip(others, verify_torch.verify(raw[every], [proposals[b] for b in others]), strict=True):
            results[b] = result
    return [result for result in results if result is not None]


def valid_supports(
    ids: bytes, weights: bytes, sizes: Sequence[int], drafted: Sequence[int], vocab_size: int
) -> list[int] | None:
    """Check the supports of several q̂ in one go, as `kernels.sparse.validate` each, and that they hold their tokens.

    Args:
        ids, weights: of all, one after the other: S numbers of 32 and of 16 bits.
        sizes: of each, S in all.
        drafted: the token drawn from each, 0 to `vocab_size` - 1.

    Returns:
        The totals; None if one is invalid, which `validate` explains, or if the C code does not run here.
    """
    if not is_available():
        return None
    numbers = ctypes.c_int32 * len(sizes)
    totals = numbers()
    is_valid = library().valid_supports(
        len(sizes), ids, weights, numbers(*sizes), numbers(*drafted), ctypes.c_uint32(vocab_size), totals
    )
    return list(totals) if is_valid else None


def _runs_in_c(proposal: Proposed) -> bool:
    return proposal.rule is not Rule.SIGMOID and not (proposal.params.is_greedy and proposal.lenience < 1)


def _verify(z: Tensor, starts: Sequence[int], proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """The results of proposals whose first rows of the adjusted logits `z` `[n, V]` are `starts`."""
    V = z.shape[1]
    arrays: list[Any] = []  # what the structures point to
    structs = (ProposalStruct * len(proposals))()
    betas: list[Any] = []
    for struct, start, proposal in zip(structs, starts, proposals, strict=True):
        gamma = len(proposal.tokens)
        struct.rule, struct.gamma = RULE_NUMBERS[proposal.rule], gamma
        struct.params = ParamsStruct.of(proposal.params)
        struct.base_length, struct.seed, struct.lenience = proposal.base_length, proposal.seed, proposal.lenience
        struct.logits, struct.stride = z.data_ptr() + start * z.stride(0) * z.itemsize, z.stride(0)
        integers, floats = ctypes.c_int32 * gamma, ctypes.c_double * gamma
        tokens, beta = integers(*(token if 0 <= token < V else -1 for token in proposal.tokens)), floats()
        struct.tokens, struct.beta = ctypes.addressof(tokens), ctypes.addressof(beta)
        betas.append(beta)
        arrays.append(tokens)
        if proposal.uniforms is not None:
            uniforms = np.array([*proposal.uniforms.accept[:gamma], proposal.uniforms.resample])
            struct.uniforms = uniforms.ctypes.data
            arrays.append(uniforms)
        if proposal.rule is Rule.COUPLED:
            continue
        supports = [q for q in proposal.q if isinstance(q, SparseDistribution)]
        ends = integers(*accumulate(len(q.ids) if isinstance(q, SparseDistribution) else 0 for q in proposal.q))
        struct.ends = ctypes.addressof(ends)
        arrays.append(ends)
        if supports:
            ids = np.concatenate([q.ids for q in supports], dtype=np.uint32, casting="unsafe")
            weights = np.concatenate([q.weights for q in supports], dtype=np.uint16, casting="unsafe")
            struct.ids, struct.weights = ids.ctypes.data, weights.ctypes.data
            arrays += [ids, weights]
    scratch = _scratch(3 * (V + SLACK))
    library().verify_proposals(structs, len(proposals), V, ctypes.c_void_p(scratch.ctypes.data))
    return [_result(*each) for each in zip(structs, proposals, betas, strict=True)]


def _result(struct: ProposalStruct, proposal: Proposed, beta: Sequence[float]) -> VerifyResult:
    status, accepted = STATUSES[struct.status], struct.accepted
    if status is Status.BAD_LOGITS:
        return BAD_LOGITS
    judged = 0 if proposal.rule is Rule.COUPLED else min(accepted + 1, len(beta))
    return VerifyResult(status, accepted, struct.next_token, tuple(beta[:judged]))


_of_thread = threading.local()


def _scratch(size: int) -> np.ndarray:
    """Memory of this thread: new memory for each call would cost more than the arithmetic."""
    found: np.ndarray | None = getattr(_of_thread, "scratch", None)
    if found is None or len(found) < size:
        found = _of_thread.scratch = np.empty(size, np.float32)
    return found
