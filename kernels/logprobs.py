"""Log-probabilities of emitted tokens, raw and adjusted, and of the best tokens at the same position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.verify import Proposed, TokenLogprobs, VerifyResult


def with_logprobs(result: VerifyResult, proposal: Proposed, raw: Tensor, p: Tensor) -> VerifyResult:
    """Return the result with the log-probabilities that its proposal requests.

    Args:
        result: of `proposal`, not BAD_LOGITS.
        proposal: with `top_logprobs` of at least 0.
        raw: the target's untouched logits from the proposal's first row on, `[accepted + 1 or more, V]`.
        p: the distributions of the same rows.
    """
    emitted = (*proposal.tokens[: result.accepted], result.next_token)
    rows = slice(0, len(emitted))
    return replace(result, logprobs=token_logprobs(raw[rows], p[rows], emitted, proposal.top_logprobs))


def token_logprobs(raw: Tensor, p: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of `tokens` `[m]`, one per row.

    Args:
        raw: the target's untouched logits, `[m, V]`, on any device.
        p: of the same rows, `[m, V]`; computations use its dtype.
        tokens: the emitted tokens.
        top: how many of the best to add, by raw logit; lower ids first among equals.
    """
    raw_log = torch.log_softmax(raw.to(p.dtype), dim=-1)
    log_p = p.log()
    # [m, 1 + top]: the emitted token, then the best
    ids = torch.cat((torch.tensor(tokens, device=raw.device).unsqueeze(1), _best(raw_log, top)), dim=1)
    columns = zip(ids.tolist(), raw_log.gather(1, ids).tolist(), log_p.gather(1, ids).tolist(), strict=True)
    return tuple(
        TokenLogprobs(
            token=row_ids[0],
            raw=row_raw[0],
            adjusted=row_log_p[0],
            top_ids=tuple(row_ids[1:]),
            top_raw=tuple(row_raw[1:]),
            top_adjusted=tuple(row_log_p[1:]),
        )
        for row_ids, row_raw, row_log_p in columns
    )


def _best(rows: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest of each row `[m, V]`, best first, lower ids first among equals."""
    count = min(count, rows.shape[1])
    if rows.device.type != "cpu":
        return rows.sort(dim=1, descending=True, stable=True)[1][:, :count]
    best = [_best_of_row(row, count) for row in rows.numpy()]
    return torch.from_numpy(np.stack(best))


def _best_of_row(row: np.ndarray, count: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, dtype=np.int64)
    least = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= least)
    return ids[np.argsort(-row[ids], kind="stable")[:count]]
