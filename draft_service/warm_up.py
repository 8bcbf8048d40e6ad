"""A proposal of the draft service's own, through the engine as any other: before it, nobody is told that it serves."""

import asyncio

import structlog

from draft_service.drafters.base import Drafter, DraftError
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.guard import PROBE, PROBE_GAMMA
from outrider.rpc.errors import internal

_log = structlog.get_logger()

# How often it is seen whether the engine still runs.
GLANCE_SECONDS = 0.5


async def warm_up(drafter: Drafter, engine: DraftEngine) -> None:
    """Has a proposal drafted. One that fails leaves a line in the log: the target can write alone, and tries go on.

    Raises:
        RequestError: the engine has ended.
    """
    drafting = drafter.open(PROBE)
    proposal = asyncio.ensure_future(drafting.propose(PROBE_GAMMA))
    try:
        while not (await asyncio.wait((proposal,), timeout=GLANCE_SECONDS))[0]:
            if not engine.alive:
                raise internal("INTERNAL", "the draft's engine has ended before its first pass")
        proposal.result()
    except DraftError as error:
        _log.warning("the first pass of the draft failed; the target writes alone", reason=str(error))
    finally:
        proposal.cancel()
        drafting.close()
