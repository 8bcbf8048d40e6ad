"""The guard of a drafter: invalid, failed and late proposals are errors; then a backoff, and the sequence opens again.

Only a failed probe takes a drafter down.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.base import Draft, Drafter, DraftError, Drafting, DraftSequence
from draft_service.drafters.guard import (
    FAILURES_IN_A_ROW,
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    PROBE,
    SOUND_AFTER,
    GuardedDrafter,
)
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.sigmoid import EXCLUDED, DraftLogits
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from tests.fake_clock import fake_clock

V = 10
PLAIN = DraftSequence([1, 2, 3], [4], SamplingParams(), LogitRules(), 5)
COUPLED, SIGMOID = replace(PLAIN, rule=Rule.COUPLED), replace(PLAIN, rule=Rule.SIGMOID)


def q(*ids: int, weights: Sequence[int] = ()) -> SparseDistribution:
    found = np.array(weights or [1] * len(ids), dtype=np.uint16)
    return SparseDistribution(np.array(ids), found, max(1, int(found.sum())))


def logits(size: int = V) -> DraftLogits:
    values = torch.zeros(size).half()
    values[3] = EXCLUDED
    return DraftLogits(values)


FINE = Draft([1, 2], [q(1, 5), None], 0.25)


class FaultyDrafter(Drafter):
    """Proposal n over all sequences (from 0) is `result(n)`, or raises or awaits it."""

    def __init__(self, result: Callable[[int], Any] = lambda n: FINE, *, broken: str = "") -> None:
        self.result = result
        self.broken = broken
        self.requests = 0
        self.opened: list[FaultyDrafting] = []

    def open(self, sequence: DraftSequence) -> Drafting:
        self.opened.append(FaultyDrafting(self, sequence))
        self.opened[-1].step("open")
        return self.opened[-1]

    def guarded(self, timeout: float = 5.0) -> GuardedDrafter:
        return GuardedDrafter(self, timeout=timeout, vocab_size=V, max_support=3)


class FaultyDrafting(Drafting):
    def __init__(self, drafter: FaultyDrafter, sequence: DraftSequence) -> None:
        self.drafter, self.sequence = drafter, sequence
        self.advanced: list[int] = []
        self.closed = 0

    def step(self, name: str) -> None:
        if self.drafter.broken == name:
            raise RuntimeError(f"{name} broke")

    def capacity(self) -> int:
        self.step("capacity")
        return 100

    def advance(self, tokens: Sequence[int]) -> None:
        self.step("advance")
        self.advanced += tokens

    def propose(self, gamma: int) -> Awaitable[Draft]:
        self.drafter.requests += 1
        self.step("propose")
        result = self.drafter.result(self.drafter.requests - 1)

        async def later() -> Draft:
            if isinstance(result, BaseException):
                raise result
            return await result if asyncio.iscoroutine(result) else result

        return later()

    def close(self) -> None:
        self.closed += 1
        self.step("close")


async def failure(drafting: Drafting, match: str | None = None) -> DraftError:
    with pytest.raises(DraftError, match=match) as caught:
        await drafting.propose(4)
    return caught.value


async def after(seconds: float, draft: Draft = FINE) -> Draft:
    await asyncio.sleep(seconds)
    return draft


@pytest.mark.parametrize(
    ("sequence", "draft", "words"),
    [
        (PLAIN, Draft([V], [None], 0.0), "token 10 is outside 0..9"),
        (PLAIN, Draft([1] * 5, [None] * 5, 0.0), "5 tokens; at most 4"),
        (PLAIN, Draft([1, 2], [None], 0.0), "1 distributions for 2 tokens"),
        (PLAIN, Draft([1], [q(2, 3)], 0.0), "token 1 has probability 0"),
        (PLAIN, Draft([1], [q(1, 2, 3, 4)], 0.0), "4 tokens; at most 3"),
        (PLAIN, Draft([1], [logits()], 0.0), "token 1 has logits; only the rule sigmoid"),
        (PLAIN, None, "invalid proposal"),
        (COUPLED, FINE, "2 distributions; the rule coupled takes none"),
        (SIGMOID, FINE, "token 1 has no logits"),
        (SIGMOID, Draft([3], [logits()], 0.0), "exclude the drafted token 3"),
        (SIGMOID, Draft([3], [logits(V - 1)], 0.0), "it must be \\(10,\\)"),
    ],
)
def test_an_invalid_proposal_is_an_error_with_the_reason(sequence: DraftSequence, draft: Any, words: str) -> None:
    asyncio.run(failure(FaultyDrafter(lambda n: draft).guarded().open(sequence), words))


@fake_clock
async def test_a_proposal_at_every_limit_is_valid() -> None:
    largest = Draft([0, V - 1, 1, 2], [q(0), q(1, 2, V - 1), None, q(1, 2, 3)], 0.25)
    assert await FaultyDrafter(lambda n: largest).guarded().open(PLAIN).propose(4) is largest


@pytest.mark.parametrize("broken", ["open", "capacity", "advance", "propose"])
@fake_clock
async def test_an_exception_fails_one_proposal(broken: str) -> None:
    drafter = FaultyDrafter(broken=broken)
    drafting = drafter.guarded().open(PLAIN)
    assert drafting.capacity() > 0
    drafting.advance([5])
    await failure(drafting, f"RuntimeError: {broken} broke")
    drafter.broken = ""
    await asyncio.sleep(FIRST_BACKOFF_S)
    assert await drafting.propose(4) is FINE
    assert drafting.recoveries == 1
    assert [*drafter.opened[-1].sequence.committed, *drafter.opened[-1].advanced] == [4, 5]


@fake_clock
async def test_after_the_backoff_a_sequence_reopens_with_all_committed_tokens() -> None:
    drafter = FaultyDrafter(lambda n: DraftError("NaN", reason="BAD_LOGITS") if n in (1, 2) else FINE)
    drafting, written = drafter.guarded().open(PLAIN), [6, 7]
    await drafting.propose(4)
    drafting.advance([6, 7])
    for rest in (FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S):
        assert (await failure(drafting, "NaN")).reason == "BAD_LOGITS"
        requests = drafter.requests
        await asyncio.sleep(0.9 * rest)
        await failure(drafting, "backoff")
        assert drafter.requests == requests
        await asyncio.sleep(0.1 * rest)
        assert drafting.is_ready()
        drafting.advance([8])
        written.append(8)
    assert await drafting.propose(4) is FINE
    assert drafting.recoveries == 1
    last = drafter.opened[-1]
    assert [*last.sequence.committed, *last.advanced] == [4, *written]
    drafting.close()
    assert [each.closed for each in drafter.opened] == [1] * 3


@pytest.mark.parametrize(("proposals", "resets"), [(SOUND_AFTER - 1, False), (SOUND_AFTER, True)])
@fake_clock
async def test_proposals_in_a_row_reset_the_backoff(proposals: int, resets: bool) -> None:
    drafter = FaultyDrafter(lambda n: FINE if 1 < n < 2 + proposals else RuntimeError())
    drafting = drafter.guarded().open(PLAIN)
    for rest in (FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S):
        await failure(drafting)
        await asyncio.sleep(rest)
    for _ in range(proposals):
        await drafting.propose(4)
    await failure(drafting)
    await asyncio.sleep(FIRST_BACKOFF_S)
    assert drafting.is_ready() is resets


@fake_clock
async def test_a_proposal_that_ends_with_an_error_is_sent_and_counts_as_a_failure() -> None:
    """Its tokens are sampled (invariant 4); the sequence in the drafter may be spoiled."""
    cut = replace(FINE, error=DraftError("NaN", reason="BAD_LOGITS"))
    drafter = FaultyDrafter(lambda n: FINE if n else cut)
    guard = drafter.guarded()
    drafting = guard.open(PLAIN)
    assert await drafting.propose(4) is cut
    assert (guard.cost.failures, guard.cost.proposals, drafter.opened[0].closed) == (1, 0, 1)
    drafting.advance([1, 2, 6])
    await failure(drafting, "backoff")
    await asyncio.sleep(FIRST_BACKOFF_S)
    assert await drafting.propose(4) is FINE
    assert [*drafter.opened[-1].sequence.committed, *drafter.opened[-1].advanced] == [4, 1, 2, 6]
    assert (len(drafter.opened), drafting.recoveries) == (2, 1)


@fake_clock
async def test_after_a_late_proposal_the_same_sequence_continues() -> None:
    drafter = FaultyDrafter(lambda n: FINE if n else after(20.0, Draft([9], [None], 0.0)))
    drafting, clock = drafter.guarded(timeout=0.5).open(PLAIN), asyncio.get_running_loop()
    proposal = drafting.propose(4)
    await asyncio.sleep(0.25)  # the timeout began with the request
    with pytest.raises(DraftError, match=r"no proposal within 0\.5 s") as late:
        await proposal
    assert late.value.reason == "OVERLOADED"
    assert clock.time() == 0.5
    drafting.advance([5])
    await asyncio.sleep(19.0)
    assert not drafting.is_ready()
    await failure(drafting, "backoff")
    await asyncio.sleep(0.5)
    assert drafting.is_ready()
    assert await drafting.propose(4) is FINE
    assert (len(drafter.opened), drafter.opened[0].advanced, drafting.recoveries) == (1, [5], 1)


@pytest.mark.parametrize("raises", [False, True])
@fake_clock
async def test_after_a_late_proposal_that_fails_the_sequence_reopens(raises: bool) -> None:
    async def fails() -> Draft:
        await asyncio.sleep(1.0)
        if raises:
            raise DraftError("NaN")
        return replace(FINE, error=DraftError("NaN"))

    drafter = FaultyDrafter(lambda n: FINE if n else fails())
    drafting = drafter.guarded(timeout=0.5).open(PLAIN)
    assert (await failure(drafting, "no proposal")).reason == "OVERLOADED"
    drafting.advance([5])
    assert (await failure(drafting, "backoff")).reason == "OVERLOADED", "a client of Propose may try again"
    await asyncio.sleep(FIRST_BACKOFF_S)
    assert await drafting.propose(4) is FINE
    assert [each.closed for each in drafter.opened] == [1, 0]
    assert [*drafter.opened[1].sequence.committed, *drafter.opened[1].advanced] == [4, 5]


@pytest.mark.parametrize("failing", ["it raises", "it hangs", "it ends early"])
@fake_clock
async def test_a_failed_probe_takes_the_drafter_down_until_a_probe_succeeds(failing: str) -> None:
    results: dict[str, Callable[[], Any]] = {
        "it raises": lambda: RuntimeError("out of order"),
        "it hangs": lambda: after(600.0),
        "it ends early": lambda: replace(FINE, error=DraftError("NaN")),
    }
    drafter = FaultyDrafter(lambda n: results[failing]())
    guard = drafter.guarded(timeout=0.05)
    for _ in range(FAILURES_IN_A_ROW):
        drafting = guard.open(PLAIN)
        if failing == "it ends early":
            await drafting.propose(4)
        else:
            await failure(drafting)
        drafting.close()
    await asyncio.sleep(0.1)  # a probe has run
    assert not guard.is_up
    assert (drafter.requests, guard.cost.failures) == (FAILURES_IN_A_ROW + 1, FAILURES_IN_A_ROW), "and one probe"
    waiting, clock, probes = guard.open(PLAIN), asyncio.get_running_loop(), list[float]()
    while len(probes) < 6:
        before = drafter.requests
        assert not waiting.is_ready()
        await failure(waiting, "backoff")
        await asyncio.sleep(0.05)
        probes += [clock.time()] * (drafter.requests > before)
    assert np.diff(probes) == pytest.approx([2, 4, 8, 10, 10], abs=0.2)
    drafter.result = lambda n: FINE
    await asyncio.sleep(LONGEST_BACKOFF_S)
    assert not waiting.is_ready(), "the probe comes first"
    await asyncio.sleep(0.1)
    assert await waiting.propose(4) is FINE
    assert all(each.closed for each in drafter.opened if each.sequence is PROBE)


@fake_clock
async def test_failures_with_a_proposal_between_them_start_no_probe() -> None:
    drafter = FaultyDrafter(lambda n: FINE if n == FAILURES_IN_A_ROW - 1 else RuntimeError())
    guard, requests = drafter.guarded(), 2 * FAILURES_IN_A_ROW - 1
    for _ in range(requests):
        with suppress(DraftError):
            await guard.open(PLAIN).propose(4)
    await asyncio.sleep(0.1)
    assert (drafter.requests, guard.cost.failures) == (requests, requests - 1)


@fake_clock
async def test_failures_of_one_clients_requests_do_not_take_the_drafter_down() -> None:
    """They cause at most one probe a second."""
    drafter = FaultyDrafter()
    poison = replace(PLAIN, logit_rules=LogitRules(repetition_penalty=1e-38))
    drafter.result = lambda n: FINE if drafter.opened[-1].sequence.logit_rules.is_identity else RuntimeError()
    guard = drafter.guarded()
    for _ in range(20):
        for _ in range(3 * FAILURES_IN_A_ROW):
            await failure(guard.open(poison))
            await asyncio.sleep(0.1)
        assert await guard.open(PLAIN).propose(4) is FINE
        assert guard.is_up
    assert guard.cost.proposals == 20
    assert 1 <= sum(each.sequence is PROBE for each in drafter.opened) <= 31
