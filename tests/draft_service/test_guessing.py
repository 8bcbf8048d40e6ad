"""Drafters of plain Python: they work on threads of their own, and one that stalls holds up nobody else."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from draft_service.drafters.base import Draft, Drafting, DraftLate, DraftSequence
from draft_service.drafters.guard import GuardedDrafter
from draft_service.drafters.guessing import MAX_WORKERS, STALLED_AFTER_S, Guesser, Guesses, GuessingDrafter
from kernels.adjustments import LogitRules
from kernels.rng import Domain
from kernels.sampling import SamplingParams
from kernels.verify import Rule

TOLD = DraftSequence([1, 2, 3], [4], SamplingParams(), LogitRules(), 5)


class Told(GuessingDrafter):
    """Guesses how many tokens it has read, once `work` has returned; it notes on which thread."""

    def __init__(self, work: Callable[[int], None] = lambda seed: None) -> None:
        super().__init__("told")
        self.threads: list[str] = []
        self._work = work

    def guesser(self, sequence: DraftSequence, domain: Domain = Domain.DRAFT) -> Guesser:
        told, work = self, self._work

        class Counts(Guesser):
            def __init__(self) -> None:
                self.read_tokens = 0

            def read(self, tokens: Sequence[int]) -> None:
                self.read_tokens += len(tokens)

            def guess(self, count: int, ahead: Sequence[int] = ()) -> Guesses:
                told.threads.append(threading.current_thread().name)
                work(sequence.seed)
                return [(self.read_tokens, None)] * count

        return Counts()


def seeded(seed: int, rule: Rule = Rule.TOKENWISE) -> DraftSequence:
    return DraftSequence(TOLD.prompt, TOLD.committed, TOLD.law, TOLD.logit_rules, seed, rule)


def test_what_was_committed_is_read_before_the_next_guess_and_off_the_loop() -> None:
    told = Told()

    async def run() -> list[Draft]:
        drafting = told.open(TOLD)
        drafts = [await drafting.propose(2)]
        drafting.advance([7])
        drafting.advance([8, 9])
        drafts.append(await drafting.propose(1))
        drafts.append(await told.open(seeded(5, Rule.COUPLED)).propose(3))
        return drafts

    drafts = asyncio.run(run())
    assert [draft.token_ids for draft in drafts] == [[4, 4], [7], [4, 4, 4]]
    assert [draft.laws for draft in drafts] == [[None, None], [None], []]
    assert all(draft.seconds > 0 for draft in drafts)
    assert told.threads == ["told"] * 3


def test_what_a_guesser_raises_is_raised_to_whoever_awaits() -> None:
    def breaks(seed: int) -> None:
        raise RuntimeError("out of order")

    async def run() -> None:
        drafting = Told(breaks).open(TOLD)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of order"):
                await drafting.propose(2)

    asyncio.run(run())


def test_one_that_stalls_is_late_and_holds_up_neither_the_loop_nor_the_others() -> None:
    """As many as there are threads but one: each is given up in time, and what waits behind them comes all the same."""
    release = threading.Event()
    done = [0]

    def work(seed: int) -> None:
        if seed >= 100:
            assert release.wait(90), "who waits behind the stalled ones waits for them"
            done[0] += 1

    async def run() -> None:
        told = Told(work)
        hasty, patient = (
            GuardedDrafter(told, timeout=timeout, vocab_size=100, max_support=8) for timeout in (0.5, 60.0)
        )
        stalled = [hasty.open(seeded(100 + number)) for number in range(MAX_WORKERS - 1)]
        waiting = [asyncio.ensure_future(_awaited(drafting.propose(2))) for drafting in stalled]
        others = [patient.open(seeded(number)).propose(2) for number in range(8)]
        for other in others:
            assert (await other).token_ids == [4, 4]
        for proposal in waiting:
            with pytest.raises(DraftLate, match=r"within 0\.5 s"):
                await proposal
        assert done[0] == 0, "the stalled ones still stall"
        release.set()
        hasty.timeout = 60.0
        for drafting in stalled:
            drafting.advance([9])
            assert (await _once_it_has_answered(drafting)).token_ids == [5], "it goes on where it was"

    async def _once_it_has_answered(drafting: Drafting) -> Draft:
        async with asyncio.timeout(60):
            while True:
                try:
                    return await drafting.propose(1)
                except DraftLate:
                    await asyncio.sleep(STALLED_AFTER_S)

    async def _awaited(proposal: object) -> Draft:
        draft: Draft = await proposal  # type: ignore[misc]
        return draft

    try:
        asyncio.run(run())
    finally:
        release.set()


def test_threads_that_took_over_end_once_they_are_not_needed() -> None:
    release = threading.Event()

    async def run() -> None:
        told = Told(lambda seed: None if seed < 100 else (release.wait(90), None)[1])
        proposal = told.open(seeded(100)).propose(1)
        await told.open(seeded(1)).propose(1)
        first, *others = _threads()  # one other, or more where the machine took one for stalled that was not
        assert others
        release.set()
        await proposal
        for thread in (first, *others[:-1]):
            await asyncio.to_thread(thread.join, 60)
        assert _threads() == others[-1:]
        await told.open(seeded(2)).propose(1)

    def _threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "told" and thread not in before]

    before = threading.enumerate()
    asyncio.run(run())
