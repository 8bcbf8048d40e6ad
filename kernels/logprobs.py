"""Log-probabilities of emitted tokens and of a prompt, with those of the best tokens there; and p of drafted tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import apply
from kernels.sampling import bad_rows, log_probabilities, log_softmax
from kernels.verify import Proposed, Status, TokenLogprobs, VerifyResult

SCORED_ROWS = 64
"""Rows of a prompt that `prompt_logprobs` handles at once; it bounds the memory of its temporaries."""


def with_reports(result: VerifyResult, proposal: Proposed, raw: Tensor) -> VerifyResult:
    """Return the result with the log-probabilities and probabilities that its proposal requests.

    `raw` `[γ+1, V]` are the target's untouched logits of the proposal's rows.
    """
    if result.status is Status.BAD_LOGITS:
        return result
    log_p = log_probabilities(apply(raw, proposal.adjustments), proposal.params)
    if proposal.top_logprobs >= 0:
        emitted = (*proposal.tokens[: result.accepted], result.next_token)
        rows = slice(0, len(emitted))
        result = replace(result, logprobs=token_logprobs(raw[rows], log_p[rows], emitted, proposal.top_logprobs))
    if proposal.reports_probabilities:
        drafted = torch.tensor(proposal.tokens, dtype=torch.int64, device=log_p.device).unsqueeze(1)
        known = (drafted >= 0) & (drafted < log_p.size(1))
        chances = (log_p[: len(drafted)].gather(1, drafted * known).exp() * known).squeeze(1)
        result = replace(result, probabilities=tuple(chances.nan_to_num(nan=0.0).tolist()))
    return result


def token_logprobs(raw: Tensor, log_p: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of `tokens` `[m]`, one per row.

    Args:
        raw: the target's untouched logits, `[m, V]`, on any device.
        log_p: of the same rows, `[m, V]`; computations use its dtype.
        top: how many of the best to add, by raw logit; lower ids first among equals.
    """
    return _of_rows(log_softmax(raw.to(log_p.dtype)), log_p, tokens, top)


def prompt_logprobs(raw: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...] | None:
    """Return the log-probabilities of a prompt's `tokens` `[m]`, one per row; None if a row is bad (`bad_rows`).

    No sampling parameter applies to a prompt, so `adjusted` equals `raw`. Arguments are as in `token_logprobs`.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(tokens), SCORED_ROWS):
        rows = slice(first, first + SCORED_ROWS)
        if bad_rows(raw[rows]).any():
            return None
        log_p = log_softmax(raw[rows].float())
        found += _of_rows(log_p, log_p, tokens[rows], top)
    return tuple(found)


def _of_rows(raw_log: Tensor, log_p: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    # raw_log, log_p: [m, V]. [m, 1 + top]: the token, then the best
    ids = torch.cat((torch.tensor(tokens, device=raw_log.device).unsqueeze(1), _best(raw_log, top)), dim=1)
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
