"""Log-probabilities of emitted tokens, raw and adjusted, and of the best ones beside them.

Knows nothing of how the tokens came about.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.ruling import TokenLogprobs


def token_logprobs(raw: Tensor, law: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Describe `tokens` `[m]`, each emitted at its row.

    Args:
        raw: the target's untouched logits, `[m, V]`.
        law: p of the same rows, `[m, V]`; its dtype is computed in.
        tokens: the emitted tokens.
        top: how many of the best to add, by raw logit; lower ids first among equals.
    """
    raw_log = torch.log_softmax(raw.to(law.dtype), dim=-1).numpy()
    law_log = law.log().numpy()
    return tuple(
        _describe(raw_row, law_row, token, top)
        for raw_row, law_row, token in zip(raw_log, law_log, tokens, strict=True)
    )


def _describe(raw: np.ndarray, law: np.ndarray, token: int, top: int) -> TokenLogprobs:
    best = _best(raw, top)
    return TokenLogprobs(
        token=token,
        raw=float(raw[token]),
        adjusted=float(law[token]),
        top_ids=tuple(best.tolist()),
        top_raw=tuple(raw[best].tolist()),
        top_adjusted=tuple(law[best].tolist()),
    )


def _best(row: np.ndarray, count: int) -> np.ndarray:
    count = min(count, len(row))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    least = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= least)
    return ids[np.argsort(-row[ids], kind="stable")[:count]]
