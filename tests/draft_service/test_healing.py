"""A drafter that fails is tried anew after a while, where the text then stands; one that fails for all is let be."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from draft_service.drafters.base import Draft, Drafter, DrafterOff, DraftError, Drafting, DraftLate, DraftSequence
from draft_service.drafters.guard import FAILURES_IN_A_ROW, FIRST_PROBE_S, LATEST_PROBE_S, PROBE, GuardedDrafter, Health
from draft_service.drafters.healing import FIRST_REST, LONGEST_REST, SOUND_AFTER, HealingDrafting
from draft_service.drafters.lookup import LookupDrafter
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams

TOLD = DraftSequence([1, 2, 3], [4], SamplingParams(), LogitRules(), 5)


class Moody(LookupDrafter):
    """Copies, where `mood` says nothing to the contrary: it is told which proposal this is, counted from 0."""

    def __init__(self, mood: Callable[[int], Exception | None]) -> None:
        super().__init__(min_match=1)
        self.asked = 0
        self.opened: list[DraftSequence] = []
        self.closed = 0
        self._mood = mood

    def open(self, sequence: DraftSequence) -> Drafting:
        self.opened.append(sequence)
        return _Moody(super().open(sequence), self)

    def next_mood(self) -> Exception | None:
        self.asked += 1
        return self._mood(self.asked - 1)


class _Moody(Drafting):
    def __init__(self, inner: Drafting, drafter: Moody) -> None:
        self._inner = inner
        self._drafter = drafter

    def room(self) -> int:
        return self._inner.room()

    def advance(self, tokens: Sequence[int]) -> None:
        self._inner.advance(tokens)

    def propose(self, gamma: int) -> Awaitable[Draft]:
        error = self._drafter.next_mood()
        if error is not None:
            raise error
        return self._inner.propose(gamma)

    def close(self) -> None:
        self._drafter.closed += 1
        self._inner.close()


def guarded(drafter: Drafter) -> GuardedDrafter:
    return GuardedDrafter(drafter, timeout=5.0, vocab_size=100, max_support=8)


def failing(*places: int) -> Callable[[int], Exception | None]:
    return lambda place: RuntimeError("out of order") if place in places else None


def test_it_is_opened_anew_behind_all_that_was_written() -> None:
    moody = Moody(failing(1, 2))

    async def run() -> None:
        drafting = HealingDrafting(guarded(moody), TOLD)
        assert drafting.room() > 0
        assert (await drafting.propose(2)).token_ids == []
        written = [1, 2]
        drafting.advance(written)
        for rest in (FIRST_REST, 2 * FIRST_REST):
            with pytest.raises(DraftError, match="out of order"):
                await drafting.propose(2)
            assert drafting.rest == rest
            assert drafting.recoveries == 0
            for left in range(rest, 0, -1):
                assert drafting.rest == left
                drafting.advance([left % 50])
                written.append(left % 50)
            assert drafting.rest == 0
        assert len(moody.opened) == 2, "not before it is to be asked"
        drafting.advance([1, 2])
        fresh = HealingDrafting(guarded(LookupDrafter(min_match=1)), replace(TOLD, committed=[4, *written, 1, 2]))
        assert (await drafting.propose(3)).token_ids == (await fresh.propose(3)).token_ids != []
        assert drafting.recoveries == 1
        drafting.close()
        drafting.close()
        assert [each.committed for each in moody.opened[::2]] == [[4], [4, *written, 1, 2]]

    asyncio.run(run())
    assert moody.closed == len(moody.opened) == 3


def test_rests_grow_to_a_limit_and_begin_again_once_it_has_been_sound() -> None:
    async def rests(moody: Moody, proposals: int) -> list[int]:
        drafting, found = HealingDrafting(guarded(moody), TOLD), []
        for _ in range(proposals):
            try:
                await drafting.propose(2)
            except DrafterOff:
                pytest.fail("one sequence's failures, each after a proposal, are not everybody's")
            except DraftError:
                found.append(drafting.rest)
            drafting.advance([7] * max(1, drafting.rest))
        return found

    every_other = asyncio.run(rests(Moody(lambda place: RuntimeError() if place % 2 else None), 14))
    assert every_other == [FIRST_REST << step for step in range(5)] + [LONGEST_REST] * 2
    assert max(every_other) == LONGEST_REST
    sound_between = Moody(failing(0, SOUND_AFTER + 1))
    assert asyncio.run(rests(sound_between, SOUND_AFTER + 2)) == [FIRST_REST] * 2
    not_quite = Moody(failing(0, SOUND_AFTER))
    assert asyncio.run(rests(not_quite, SOUND_AFTER + 1)) == [FIRST_REST, 2 * FIRST_REST]


def test_a_late_proposal_is_no_reason_to_begin_anew() -> None:
    moody = Moody(lambda place: DraftLate("late") if place == 0 else None)

    async def run() -> None:
        drafting = HealingDrafting(moody, TOLD)

        async def late() -> None:
            raise DraftLate("late")

        with pytest.raises(DraftLate):
            await drafting.answer(late())  # type: ignore[arg-type]
        assert drafting.rest == 0
        assert len(moody.opened) == 1

    asyncio.run(run())


# --------------------------------------------------------------------------------------------------------- everybody's


def test_failures_in_a_row_ask_for_a_probe_and_only_a_probe_that_fails_turns_the_drafter_off() -> None:
    now = 100.0
    health = Health(lambda: now)
    for _ in range(FAILURES_IN_A_ROW - 1):
        health.failed()
    health.proposed()
    for _ in range(FAILURES_IN_A_ROW):
        assert not health.needs_probe()
        health.failed()
    assert health.needs_probe()
    was_well = [health.is_well]
    health.probed(well=True)
    for _ in range(FAILURES_IN_A_ROW):
        health.failed()
    assert not health.needs_probe(), "it has just been probed"
    was_well.append(health.is_well)
    pauses = [FIRST_PROBE_S, *(min(FIRST_PROBE_S * 2**i, LATEST_PROBE_S) for i in range(5))]
    for pause in pauses:
        now += pause - 0.01
        assert not health.needs_probe()
        now += 0.02
        assert health.needs_probe(), f"after {pause} s"
        health.probed(well=False)
        was_well.append(health.is_well)
    health.probed(well=True)
    assert [*was_well, health.is_well] == [True, True, *[False] * len(pauses), True]
    assert not health.needs_probe()


async def failing_in_a_row(guard: GuardedDrafter) -> None:
    for _ in range(FAILURES_IN_A_ROW):
        drafting = HealingDrafting(guard, TOLD)
        with pytest.raises(DraftError, match="out of order"):
            await drafting.propose(2)
        drafting.close()
    await settled()


async def settled() -> None:
    """Until a probe that has begun is over."""
    for _ in range(200):
        await asyncio.sleep(0.01)
        if len(asyncio.all_tasks()) == 1:
            return


def test_a_drafter_that_fails_for_everybody_is_not_asked_until_a_probe_goes_well() -> None:
    moody = Moody(lambda place: RuntimeError("out of order") if place <= FAILURES_IN_A_ROW else None)

    async def run() -> None:
        guard = guarded(moody)
        now = 0.0
        guard.health = Health(lambda: now)
        await failing_in_a_row(guard)
        refused = HealingDrafting(guard, TOLD)
        with pytest.raises(DrafterOff, match="not asked"):
            await refused.propose(2)
        assert moody.asked == FAILURES_IN_A_ROW + 1, "the probe"
        assert guard.cost.failures == FAILURES_IN_A_ROW
        assert refused.rest == FIRST_REST
        now += FIRST_PROBE_S
        with pytest.raises(DrafterOff):
            await HealingDrafting(guard, TOLD).propose(2)
        await settled()
        refused.advance([9] * FIRST_REST)
        await refused.propose(2)
        assert refused.recoveries == 1
        assert guard.health.is_well
        assert moody.opened.count(PROBE) == 2
        assert moody.closed >= FAILURES_IN_A_ROW + 2, "probes are closed too"

    asyncio.run(run())


def test_one_client_whose_requests_break_the_draft_turns_it_off_for_nobody_else() -> None:
    """It sends many times what others do, for as long as anybody looks."""

    class Poisoned(Moody):
        def open(self, sequence: DraftSequence) -> Drafting:
            self.poisoned = not sequence.logit_rules.is_identity
            return super().open(sequence)

        def next_mood(self) -> Exception | None:
            super().next_mood()
            return DraftError("the logits are no numbers", reason="BAD_LOGITS") if self.poisoned else None

    moody = Poisoned(lambda _: None)
    poison = replace(TOLD, logit_rules=LogitRules(repetition_penalty=1e-38))

    async def run() -> None:
        guard = guarded(moody)
        now = 0.0
        guard.health = Health(lambda: now)
        for _ in range(20):
            for _ in range(3 * FAILURES_IN_A_ROW):
                with pytest.raises(DraftError, match="no numbers"):
                    await HealingDrafting(guard, poison).propose(2)
                now += 0.1
            await settled()
            await HealingDrafting(guard, TOLD).propose(2)
            assert guard.health.is_well
        assert guard.cost.proposals == 20

    asyncio.run(run())


def test_a_probe_that_hangs_turns_the_drafter_off() -> None:
    class Hanging(Moody):
        def open(self, sequence: DraftSequence) -> Drafting:
            return _Hanging() if sequence is PROBE else super().open(sequence)

    class _Hanging(Drafting):
        def room(self) -> int:
            return 9

        def advance(self, tokens: Sequence[int]) -> None: ...

        def propose(self, gamma: int) -> Awaitable[Draft]:
            return asyncio.get_running_loop().create_future()

        def close(self) -> None: ...

    moody = Hanging(lambda _: RuntimeError("out of order"))

    async def run() -> None:
        guard = GuardedDrafter(moody, timeout=0.05, vocab_size=100, max_support=8)
        await failing_in_a_row(guard)
        assert not guard.health.is_well

    asyncio.run(run())
