"""The guard: whatever a drafter does, its proposals make sense or end in a `DraftError`, and in time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters import guard as guard_module
from draft_service.drafters.base import Draft, Drafter, DraftError, Drafting, DraftLate, DraftSequence
from draft_service.drafters.guard import LATE_IN_A_ROW, GuardedDrafter
from kernels.adjustments import LogitRules
from kernels.dense import EXCLUDED, DraftLogits
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from tests.fake_clock import fake_clock

V = 10
PLAIN = DraftSequence([1, 2, 3], [], SamplingParams(), LogitRules(), 5)


class Awkward(Drafter, Drafting):
    """A drafter, and its only sequence, whose proposals are what `make(number of the proposal)` returns or raises."""

    def __init__(self, make: Callable[[int], Any], *, breaks: str = "") -> None:
        self._make = make
        self._breaks = breaks
        self.asked = 0
        self.closed = 0

    def _step(self, name: str) -> None:
        if self._breaks == name:
            raise RuntimeError(f"{name} broke")

    def open(self, sequence: DraftSequence) -> Drafting:
        self._step("open")
        return self

    def room(self) -> int:
        self._step("room")
        return 100

    def advance(self, tokens: Sequence[int]) -> None:
        self._step("advance")

    def propose(self, gamma: int) -> Awaitable[Draft]:
        self.asked += 1
        self._step("propose")
        made = self._make(self.asked)

        async def later() -> Draft:
            return await made if asyncio.iscoroutine(made) else made

        return later()

    def close(self) -> None:
        self.closed += 1
        self._step("close")


def law(*ids: int, weights: Sequence[int] = ()) -> SparseDistribution:
    found = np.array(weights or [1] * len(ids), dtype=np.uint16)
    return SparseDistribution(np.array(ids), found, max(1, int(found.sum())))


def guarded(awkward: Awkward, timeout: float = 5.0) -> GuardedDrafter:
    return GuardedDrafter(awkward, timeout=timeout, vocab_size=V, max_support=3)


def error_of(awkward: Awkward, told: DraftSequence = PLAIN) -> DraftError:
    """What a proposal ends with; asked again it says the same, and the drafter is not asked."""

    async def run() -> DraftError:
        drafting = guarded(awkward).open(told)
        assert drafting.room() > 0
        drafting.advance([4])
        with pytest.raises(DraftError) as first:
            await drafting.propose(4)
        asked = awkward.asked
        with pytest.raises(DraftError) as second:
            await drafting.propose(4)
        assert (second.value, awkward.asked) == (first.value, asked)
        drafting.close()
        drafting.close()
        return first.value

    return asyncio.run(run())


FINE = Draft([1, 2], [law(1, 5), None], 0.25)
NONSENSE: dict[str, tuple[Any, str]] = {
    "a token outside": (Draft([V], [None], 0.0), "token 10 is outside 0..9"),
    "a negative token": (Draft([-1], [None], 0.0), "token -1"),
    "no token at all": (Draft(["x"], [None], 0.0), "nonsense"),  # type: ignore[list-item]
    "too many tokens": (Draft([1] * 5, [None] * 5, 0.0), "5 tokens came; 4"),
    "too few laws": (Draft([1, 2], [None], 0.0), "1 laws came for 2 tokens"),
    "a law without its token": (Draft([1], [law(2, 3)], 0.0), "token 1 is outside of the law"),
    "a law that is too wide": (Draft([1], [law(1, 2, 3, 4)], 0.0), "4 tokens; at most 3"),
    "a law in disorder": (Draft([1], [law(2, 1)], 0.0), "ascend"),
    "a law past the vocabulary": (Draft([1], [law(1, V)], 0.0), "token id 10"),
    "a weight of nothing": (Draft([1], [law(1, 2, weights=[3, 0])], 0.0), "weight of token 2 is 0"),
    "logits for a law": (Draft([1], [DraftLogits(torch.zeros(V).half())], 0.0), "logits came"),
    "nothing": (None, "nonsense"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_ends_in_an_error_that_says_what(kind: str) -> None:
    made, words = NONSENSE[kind]
    assert words in str(error_of(Awkward(lambda _: made)))


@pytest.mark.parametrize("breaks", ["open", "room", "advance", "propose"])
def test_whatever_raises_ends_in_an_error_of_the_next_proposal(breaks: str) -> None:
    assert f"RuntimeError: {breaks} broke" in str(error_of(Awkward(lambda _: FINE, breaks=breaks)))


def test_a_drafter_that_cannot_close_is_closed_once() -> None:
    awkward = Awkward(lambda _: FINE, breaks="close")

    async def run() -> None:
        drafting = guarded(awkward).open(PLAIN)
        await drafting.propose(2)
        drafting.close()
        drafting.close()

    asyncio.run(run())
    assert awkward.closed == 1


def test_reasons_of_a_drafter_are_kept() -> None:
    async def refuse() -> Draft:
        raise DraftError("no numbers", reason="BAD_LOGITS")

    assert error_of(Awkward(lambda _: refuse())).reason == "BAD_LOGITS"


def test_a_drafter_that_gives_up_is_not_the_requests_cancellation() -> None:
    async def give_up() -> Draft:
        raise asyncio.CancelledError

    assert "gave the proposal up" in str(error_of(Awkward(lambda _: give_up())))


def test_under_coupled_laws_are_nonsense_and_under_sigmoid_they_are_logits() -> None:
    coupled = replace(PLAIN, rule=Rule.COUPLED)
    assert "2 laws came" in str(error_of(Awkward(lambda _: FINE), coupled))
    sigmoid = replace(PLAIN, rule=Rule.SIGMOID)
    assert "no logits came" in str(error_of(Awkward(lambda _: FINE), sigmoid))
    logits = torch.zeros(V).half()
    logits[3] = EXCLUDED
    assert "exclude token 3" in str(error_of(Awkward(lambda _: Draft([3], [DraftLogits(logits)], 0.0)), sigmoid))
    short = DraftLogits(torch.zeros(V - 1).half())
    assert "V is 10" in str(error_of(Awkward(lambda _: Draft([3], [short], 0.0)), sigmoid))

    async def fine() -> None:
        for told, draft in ((coupled, Draft([1], [], 0.0)), (sigmoid, Draft([1], [DraftLogits(logits)], 0.0))):
            answers = {1: draft}
            assert await guarded(Awkward(answers.__getitem__)).open(told).propose(4) is draft

    asyncio.run(fine())


def test_costs_are_counted_over_sequences() -> None:
    guard = guarded(Awkward(lambda number: FINE if number < 3 else Draft([V], [None], 0.0)))

    async def run() -> None:
        drafting = guard.open(PLAIN)
        assert await drafting.propose(4) is FINE
        assert await guard.open(PLAIN).propose(4) is FINE
        with pytest.raises(DraftError):
            await drafting.propose(4)

    asyncio.run(run())
    cost = guard.cost
    assert (cost.proposals, cost.tokens, cost.seconds, cost.failures) == (2, 4, 0.5, 1)
    assert cost.seconds_per_token == 0.125


# -------------------------------------------------------------------------------------------------------------- late


@pytest.fixture
def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard's is the loop's, which leaps."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(guard_module, "time", clock)


@pytest.mark.usefixtures("one_clock")
@fake_clock
async def test_one_that_is_late_is_asked_again_once_it_has_answered() -> None:
    """While it is busy nobody waits for it; what it says too late is dropped."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    async def slowly() -> Draft:
        await done.wait()
        return Draft([9], [None], 0.0)

    awkward = Awkward(lambda number: slowly() if number == 1 else FINE)
    drafting = guarded(awkward, timeout=0.05).open(PLAIN)
    with pytest.raises(DraftLate, match=r"within 0\.05 s"):
        await drafting.propose(4)
    assert loop.time() == pytest.approx(0.05)
    for _ in range(2 * LATE_IN_A_ROW):
        with pytest.raises(DraftLate, match="earlier proposal"):
            await drafting.propose(4)
    assert loop.time() == pytest.approx(0.05)
    assert awkward.asked == 1
    done.set()
    await asyncio.sleep(0.01)
    drafting.advance([4])
    assert await drafting.propose(4) is FINE
    assert awkward.asked == 2


@pytest.mark.usefixtures("one_clock")
@fake_clock
async def test_one_that_is_late_again_and_again_is_asked_no_more() -> None:
    async def slowly() -> Draft:
        await asyncio.sleep(0.03)
        return FINE

    awkward = Awkward(lambda _: slowly())
    drafting = guarded(awkward, timeout=0.01).open(PLAIN)
    for late in range(1, LATE_IN_A_ROW + 1):
        with pytest.raises(DraftError) as caught:
            await drafting.propose(4)
        assert isinstance(caught.value, DraftLate) == (late < LATE_IN_A_ROW)
        await asyncio.sleep(0.04)
    with pytest.raises(DraftError, match="3 times in a row"):
        await drafting.propose(4)
    assert awkward.asked == LATE_IN_A_ROW


@pytest.mark.usefixtures("one_clock")
@fake_clock
async def test_the_clock_begins_when_the_proposal_is_asked_for() -> None:
    async def slowly() -> Draft:
        await asyncio.sleep(30)
        return FINE

    loop = asyncio.get_running_loop()
    drafting = guarded(Awkward(lambda _: slowly()), timeout=0.05).open(PLAIN)
    proposal = drafting.propose(4)
    await asyncio.sleep(0.06)
    with pytest.raises(DraftLate):
        await proposal
    assert loop.time() == pytest.approx(0.06), "its time was up already"
    drafting.close()
