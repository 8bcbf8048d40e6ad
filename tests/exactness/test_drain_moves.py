"""A verifier drains while the other one is silent: its sequences stay, and go on.

Real verifiers; the silent one is behind a proxy that holds back its messages.
"""

import asyncio
from collections.abc import Callable

from draft_service.failover import FailoverStream, Verifiers
from tests.cluster import Cluster, wait_healthy
from tests.draft_service.records import record
from tests.draft_service.verifiers import Switches, matched
from tests.exactness import sampling
from tests.exactness.services import PairServices
from tests.proxy import Proxy, Way

PROMPT = [15, 12, 14]
MOST_TOKENS = 1500
DRAINS_AFTER, MORE = 4, 12
SECONDS_PER_TOKEN = 0.01
SOON_S = 60.0


async def write(verifiers: Verifiers, goes_on: Callable[[int], bool]) -> list[int]:
    """Write a text token by token, while `goes_on` is true of their number."""
    sequence = record(prompt=PROMPT, max_new_tokens=MOST_TOKENS)
    stream = FailoverStream(verifiers, sequence, timeout=SOON_S)
    try:
        await stream.open()
        while goes_on(len(sequence.tokens) - len(PROMPT)):
            sequence.decode(1)
            await stream.send()
            sequence.commit(await stream.verdict())
            await asyncio.sleep(SECONDS_PER_TOKEN)
    finally:
        stream.cancel()
    return sequence.tokens[len(PROMPT) :]


async def test_a_sequence_stays_while_the_other_verifier_is_silent(cluster: Cluster, attentive: PairServices) -> None:
    """It tries the silent one now and then, and not before each verdict."""
    leaving = cluster.verifier(model=attentive.target, flags=(*sampling.FLAGS, "--grace", str(SOON_S)))
    wait_healthy(leaving)
    switches = Switches()
    with Proxy(attentive.verifier.address) as way:
        async with matched(leaving, way, switches=switches, failover_timeout=SOON_S, silence=SOON_S) as verifiers:
            first, other = sorted(verifiers.replicas.all(), key=lambda each: each.address == way.address)
            first.num_open += 1  # so that a text begins at the other one, which is `ready` after it
            assert await write(verifiers, lambda written: written < 1)
            first.num_open -= 1
            other.num_open += 1  # so that the sequence begins at the first one
            end = MOST_TOKENS

            def goes_on(written: int) -> bool:
                nonlocal end
                if written == DRAINS_AFTER:
                    way.stall(Way.DOWN)
                    leaving.end()
                if switches.pauses and end == MOST_TOKENS:
                    end = written + MORE
                return written < end

            written = await write(verifiers, goes_on)
            tries = switches.pauses
            way.flow(Way.DOWN)
            whole = await write(verifiers, lambda count: count < len(written))
            other.num_open -= 1
    assert written == whole, "the same as at the other one alone"
    assert 1 <= tries <= MORE / 2
