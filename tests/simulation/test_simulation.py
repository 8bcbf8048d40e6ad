"""Both services under simulated faults, for some of the seeds that `__main__` runs; and faults on purpose."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from draft_service.output import Emitter
from draft_service.sequence import Sequence
from draft_service.verify_stream import VerifyStream
from outrider.runtime.block_pool import BlockPool
from tests.simulation.plan import draw_plan
from tests.simulation.world import simulate
from verifier_service.engine import Close, VerifierEngine
from verifier_service.scheduler import Scheduler

SEEDS = 120
MOST_SEEDS = 150  # to find a fault


def test_texts_are_right_and_nothing_leaks_under_any_faults() -> None:
    for seed in range(SEEDS):
        outcome = simulate(seed)
        assert not outcome.problem, str(outcome)


def test_seed_reproducibility() -> None:
    for seed in (3, 8):
        assert simulate(seed).trace == simulate(seed).trace


Change = Callable[[Any], Any]  # from a method to a faulty one


def _resends_an_empty_proposal(send: Any) -> Any:
    async def changed(self: VerifyStream) -> None:
        round_ = self._sequence.round
        whole = round_.draft
        if whole is not None and round_.number > 1 and not self._seen:
            round_.draft = replace(whole, token_ids=[], distributions=[])
        await send(self)
        round_.draft = whole

    return changed


def _drops_a_committed_token(opening: Any) -> Any:
    def changed(self: Sequence, **named: bool) -> Any:
        message = opening(self, **named)
        del message.committed_token_ids[-1:]
        return message

    return changed


def _emits_unverified_tokens(take: Any) -> Any:
    def changed(self: Emitter, verdict: Any, drafted: Any, report: Any = None) -> None:
        verdict.token_ids[: len(drafted)] = list(drafted)[: len(verdict.token_ids)]
        take(self, verdict, drafted, report)

    return changed


def _does_not_close(receive: Any) -> Any:
    def changed(self: VerifierEngine, message: Any) -> None:
        if not (isinstance(message, Close) and message.sequence.failed):
            receive(self, message)

    return changed


def _does_not_release(close: Any) -> Any:
    async def changed(self: VerifyStream) -> None:
        cancel, self.cancel = self.cancel, lambda: None  # type: ignore[method-assign]
        await close(self)
        cancel()

    return changed


FAULTS: dict[str, tuple[type, str, Change, str, str]] = {
    "no rollback": (Scheduler, "settle", lambda _: lambda self, sequence: None, "calm", "cache"),
    "resends an empty proposal": (VerifyStream, "send", _resends_an_empty_proposal, "wild", "used again"),
    "drops a committed token": (Sequence, "opening", _drops_a_committed_token, "one", ""),
    "emits unverified tokens": (Emitter, "take", _emits_unverified_tokens, "calm", "received"),
    "keeps stale prefixes": (BlockPool, "forget", lambda _: lambda self, block: None, "calm", ""),
    "does not close": (VerifierEngine, "receive", _does_not_close, "steps", "still has"),
    "does not release a replica": (VerifyStream, "close", _does_not_release, "wild", "counted"),
}


@pytest.mark.parametrize(("owner", "name", "change", "kind", "words"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(
    owner: type, name: str, change: Change, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    plans = (plan for seed in range(100, 1_000_000) if (plan := draw_plan(seed)).kind == kind)
    for plan in islice(plans, MOST_SEEDS):
        outcome = simulate(plan.seed, plan)
        if outcome.problem:
            assert words in outcome.problem, str(outcome)
            print(f"found by seed {plan.seed}: {outcome.problem}")
            return
    pytest.fail(f"{MOST_SEEDS} seeds did not find it")
