"""The drafter that never drafts: the target writes every token."""

import asyncio
from collections.abc import Awaitable, Sequence

from draft_service.drafters.base import Draft, Drafter, Drafting, DraftSequence


class NoDrafter(Drafter):
    """Has no capacity, so `Generate` sends `Decode`. `Propose` returns proposals without tokens."""

    def open(self, sequence: DraftSequence) -> Drafting:
        return _NoDrafting()


class _NoDrafting(Drafting):
    def capacity(self) -> int:
        return 0

    def advance(self, tokens: Sequence[int]) -> None:
        """Does nothing."""

    def propose(self, gamma: int) -> Awaitable[Draft]:
        future: asyncio.Future[Draft] = asyncio.get_running_loop().create_future()
        future.set_result(Draft([], [], 0.0))
        return future

    def close(self) -> None:
        """Does nothing."""
