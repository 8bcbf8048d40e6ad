"""The storm itself: 64 workers, each with one stream after another, every one disturbed as its own dice have it.

It lasts until enough of everything has happened, so that a slow machine has as much of it as a quick one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from outrider.client import AsyncClient
from tests.chaos.clients import PATIENCE_S, DraftClients
from tests.chaos.cluster import SLOW_CLIENT_S, ChaosCluster
from tests.chaos.requests import Behaviour, Door, Expected, Outcome, Request
from tests.chaos.verifier_streams import VerifierStreams

LEAST_S, MOST_S = 5.0, 120.0
"""Seconds of chaos: no stream begins after so many, and none once enough has happened and the lesser number is over."""

ENOUGH = 8
"""Streams disturbed in each way, left alone at each door, cancelled; and half as many that came to their due end."""

WORKERS = {Door.DRAFT: 40, Door.FRAIL: 8, Door.VERIFIER: 16}
SEED = 11
STALL = (0.2, 2 * SLOW_CLIENT_S)
"""Seconds of a slow reader's pause: within what is borne, or beyond it."""

VANISHING = {Door.DRAFT: 4, Door.VERIFIER: 4}
VANISH_WITHIN_S = 5.0
"""Only in the beginning: a server here pings a peer after 6 s, and gives it 6 s to answer."""

CUT_FIRST_S, CUT_EVERY_S, CUT_FOR_S = 3.0, 9.0, 0.5
"""The way of the frail draft service to the verifier: when it is cut, how often from then on, and for how long."""

BEHAVIOURS: dict[Behaviour, float] = {
    Behaviour.PLAIN: 0.37,
    Behaviour.CANCEL: 0.17,
    Behaviour.SLOW: 0.08,
    Behaviour.DEADLINE: 0.15,
    Behaviour.TIME_LIMIT: 0.08,
    Behaviour.CUT: 0.15,
}
"""Shares of each. At the verifier a half-close takes the place of the time limit, which is the draft service's."""

DUE: dict[Behaviour, set[tuple[str, str]]] = {
    Behaviour.SLOW: {("DEADLINE_EXCEEDED", "IDLE")},
    Behaviour.DEADLINE: {("DEADLINE_EXCEEDED", "UNSPECIFIED")},
    Behaviour.CUT: {("UNAVAILABLE", "UNSPECIFIED")},
}
"""How a stream may fail that was disturbed in this way: status and reason."""


@dataclass(frozen=True)
class Aftermath:
    """What came of it. `left_over` names the streams that had not ended long after the last began."""

    outcomes: list[Outcome]
    left_over: list[str]


async def expect(address: str, requests: Sequence[Request]) -> dict[int, Expected]:
    """Return what each request writes alone, by its number."""
    found = {}
    async with AsyncClient(address, timeout=PATIENCE_S) as client:
        for request in requests:
            done = await client.complete(request.prompt, **request.options())
            assert len(done.token_ids) == request.length
            found[request.number] = Expected(done.started.prompt_token_ids, done.token_ids, done.text)
    return found


async def storm(cluster: ChaosCluster, requests: Sequence[Request], expected: dict[int, Expected]) -> Aftermath:
    """Run it."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    async with AsyncExitStack() as gone:
        doors: list[DraftClients | VerifierStreams] = [
            DraftClients(Door.DRAFT, cluster.draft.address, STALL, gone),
            DraftClients(Door.FRAIL, cluster.frail.address, STALL, gone),
            VerifierStreams(cluster.verifier.address, expected, STALL, gone),
        ]
        dice = _Dice(began, outcomes)
        workers = [
            asyncio.create_task(_work(door, requests, random.Random(f"{SEED}/{door.door}/{number}"), dice, outcomes))
            for door in doors
            for number in range(WORKERS[door.door])
        ]
        breaking = asyncio.create_task(_break(cluster, dice))
        _, pending = await asyncio.wait(workers, timeout=MOST_S + PATIENCE_S / 2)
        left_over = [str(worker) for worker in pending]
        for task in (*pending, breaking):
            task.cancel()
        await asyncio.gather(*workers, breaking, return_exceptions=True)
        for worker in workers:
            if worker not in pending:
                worker.result()
        for door in doors:
            await door.close()
        # Those that vanished stay until the services have given them up by themselves.
        await asyncio.sleep(max(0.0, dice.last_vanished + KEEPALIVE_S - time.monotonic()))
    return Aftermath(outcomes, left_over)


KEEPALIVE_S = 15.0
"""After this a server knows that a peer has vanished."""


@dataclass
class _Dice:
    """What the workers have in common."""

    began: float
    outcomes: list[Outcome]
    vanishing: dict[Door, int] = field(default_factory=VANISHING.copy)
    last_vanished: float = 0.0

    def over(self) -> bool:
        lasted = time.monotonic() - self.began
        return lasted > MOST_S or (lasted > LEAST_S and self._enough())

    def _enough(self) -> bool:
        ways = Counter(each.behaviour for each in self.outcomes)
        doors = Counter(each.door for each in self.outcomes if each.whole)
        cancelled = sum(each.behaviour is Behaviour.CANCEL and each.status == "CANCELLED" for each in self.outcomes)
        due = Counter(
            each.behaviour for each in self.outcomes if (each.status, each.reason) in DUE.get(each.behaviour, ())
        )
        counts = [*(ways[each] for each in BEHAVIOURS), *(doors[each] for each in Door), cancelled]
        return min(counts) >= ENOUGH and min(due[each] for each in DUE) >= ENOUGH // 2

    def behaviour(self, door: Door, chance: random.Random) -> Behaviour:
        early = time.monotonic() < self.began + VANISH_WITHIN_S
        if early and self.vanishing.get(door, 0) and chance.random() < 0.3:
            self.vanishing[door] -= 1
            return Behaviour.VANISH
        (behaviour,) = chance.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
        if behaviour is Behaviour.TIME_LIMIT and door is Door.VERIFIER:
            return Behaviour.HALF_CLOSE
        return behaviour

    def note(self, outcome: Outcome) -> None:
        """Take in what came: who was refused has not vanished."""
        if outcome.behaviour is not Behaviour.VANISH:
            return
        if outcome.status == "CANCELLED":
            self.last_vanished = time.monotonic()
        else:
            self.vanishing[outcome.door] += 1


async def _work(
    door: DraftClients | VerifierStreams,
    requests: Sequence[Request],
    chance: random.Random,
    dice: _Dice,
    outcomes: list[Outcome],
) -> None:
    while not dice.over():
        outcome = await door.stream(dice.behaviour(door.door, chance), chance.choice(requests), chance)
        outcomes.append(outcome)
        dice.note(outcome)
        if outcome.retry_after is not None:
            await asyncio.sleep(min(outcome.retry_after, chance.uniform(0.2, 2.0)))
        elif outcome.status == "UNAVAILABLE":
            await asyncio.sleep(chance.uniform(0.0, 2 * CUT_FOR_S))


async def _break(cluster: ChaosCluster, dice: _Dice) -> None:
    """Cut the frail draft service's way to the verifier again and again."""
    await asyncio.sleep(CUT_FIRST_S)
    while not dice.over():
        cluster.link.close()
        await asyncio.sleep(CUT_FOR_S)
        cluster.link.open()
        await asyncio.sleep(CUT_EVERY_S)
