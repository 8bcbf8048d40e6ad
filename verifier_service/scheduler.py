"""What goes into a pass: rounds that are ready, then prompts, within a budget of tokens.

It knows nothing of models or verdicts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.lm.kv_pool import KVPool
from outrider.lm.packed import Chunk
from verifier_service.rounds import Round
from verifier_service.sequence import TargetSequence

MAX_BACKLOG = 64  # unread replies at which a sequence pauses


@dataclass(frozen=True, slots=True)
class TargetWork:
    """One sequence's share of a pass; `round` is None where it is prompt alone."""

    sequence: TargetSequence
    round: Round | None
    chunk: Chunk


def plan(ready: Iterable[tuple[TargetSequence, Round | None]], pool: KVPool, *, pass_tokens: int) -> list[TargetWork]:
    """Fills a pass: every round whose prefix fits, then pieces of prompts up to `pass_tokens` of them.

    Sequences are taken in the order given; rounds are never delayed by prompts.
    """
    judged: list[TargetWork] = []
    prefill: list[TargetWork] = []
    budget = pass_tokens
    for sequence, round_ in ready:
        if sequence.slot is None or sequence.finished:
            continue
        start = pool.length(sequence.slot)
        behind = len(sequence.tokens) - start  # at least 1: the last token is always still to run (Law 5)
        if round_ is not None and behind - 1 <= budget and sequence.backlog < MAX_BACKLOG:
            budget -= behind - 1
            tokens = [*sequence.tokens[start:], *sequence.drafted(round_)]
            judged.append(TargetWork(sequence, round_, Chunk(sequence.slot, tokens, start, behind - 1)))
        elif (piece := min(behind - 1, budget)) > 0:
            budget -= piece
            tokens = sequence.tokens[start : start + piece]
            prefill.append(TargetWork(sequence, None, Chunk(sequence.slot, tokens, start, piece)))
    return judged + prefill
