"""Both services in worlds where everything goes wrong that can: a few hundred of the seeds that `__main__` runs.

And the simulation itself: what is broken on purpose it finds, within a few seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from draft_service.output import Emitter
from draft_service.replicas import Lease
from draft_service.sequence import Sequence
from draft_service.verify_stream import VerifyStream
from outrider.runtime.block_pool import BlockPool
from tests.simulation.plan import draw_plan
from tests.simulation.world import simulate
from verifier_service.engine import Close, VerifierEngine
from verifier_service.scheduler import Scheduler

SEEDS = 120
MOST_SEEDS = 150  # until a fault is found


def test_texts_are_right_and_nothing_stays_held_whatever_fails() -> None:
    for seed in range(SEEDS):
        outcome = simulate(seed)
        assert not outcome.problem, str(outcome)


def test_a_seed_gives_the_same_trace_again() -> None:
    for seed in (3, 8):
        assert simulate(seed).trace == simulate(seed).trace


# ------------------------------------------------------------------------------------------------------------ mutations

Change = Callable[[Any], Any]  # of a method: takes it as it is


def _keeps_rejected_tokens(_: Any) -> Any:
    return lambda self, sequence: None


def _resends_less(send: Any) -> Any:
    async def changed(self: VerifyStream) -> None:
        round_ = self._sequence.round
        whole = round_.draft_tokens, round_.distributions
        if round_.number > 1 and not self._seen:
            round_.draft_tokens, round_.distributions = [], []
        await send(self)
        round_.draft_tokens, round_.distributions = whole

    return changed


def _forgets_a_token_on_the_way(opening: Any) -> Any:
    def changed(self: Sequence, **named: bool) -> Any:
        message = opening(self, **named)
        del message.committed_token_ids[-1:]
        return message

    return changed


def _emits_what_was_drafted(take: Any) -> Any:
    def changed(self: Emitter, verdict: Any, drafted: Any) -> None:
        verdict.token_ids[: len(drafted)] = list(drafted)[: len(verdict.token_ids)]
        take(self, verdict, drafted)

    return changed


def _finds_what_was_overwritten(_: Any) -> Any:
    return lambda self, block: None


def _never_closes(receive: Any) -> Any:
    def changed(self: VerifierEngine, message: Any) -> None:
        if not (isinstance(message, Close) and message.sequence.failed):
            receive(self, message)

    return changed


def _counts_what_is_cancelled(_: Any) -> Any:
    async def changed(self: Lease) -> None:
        await self.stream.close()
        self.cancel()

    return changed


MUTATIONS: list[tuple[type, str, Change, str, str]] = [
    (Scheduler, "settle", _keeps_rejected_tokens, "calm", "cache"),
    (VerifyStream, "send", _resends_less, "wild", "used again"),
    (Sequence, "opening", _forgets_a_token_on_the_way, "one", ""),
    (Emitter, "take", _emits_what_was_drafted, "calm", "received"),
    (BlockPool, "forget", _finds_what_was_overwritten, "calm", ""),
    (VerifierEngine, "receive", _never_closes, "steps", "still has"),
    (Lease, "close", _counts_what_is_cancelled, "wild", "counted"),
]


@pytest.mark.parametrize(
    ("owner", "name", "change", "kind", "sign"), MUTATIONS, ids=[each[2].__name__ for each in MUTATIONS]
)
def test_a_broken_invariant_is_found(
    owner: type, name: str, change: Change, kind: str, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    plans = (plan for seed in range(100, 1_000_000) if (plan := draw_plan(seed)).kind == kind)
    for plan in islice(plans, MOST_SEEDS):
        outcome = simulate(plan.seed, plan)
        if outcome.problem:
            assert sign in outcome.problem, str(outcome)
            print(f"found by seed {plan.seed}: {outcome.problem}")
            return
    pytest.fail(f"{MOST_SEEDS} seeds did not find it")
