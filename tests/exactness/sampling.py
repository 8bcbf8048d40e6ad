"""Many samples at once through a draft service: whole outputs as an array of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.client import AsyncClient, Completion, Options
from tests.exactness.chisquare import Array
from tests.exactness.distributions import Filters

SAMPLES_PER_REQUEST = 64
CALLS = 2
"""Requests under way at once: while one begins or ends, the other keeps the services busy."""

FLAGS = ("--max-sequences", str(SAMPLES_PER_REQUEST * CALLS))
"""What a service needs to be told to take that many."""
DRAFT_FLAGS = (*FLAGS, "--max-samples", str(SAMPLES_PER_REQUEST))

TIMEOUT_S = 3600.0
"""Of one request: long texts on a busy machine take their time."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of many samples of one length.

    Attributes:
        tokens: `[N, length]`.
        rounds: passes of the target that the samples took part in, all together.
        drafted: drafted tokens in all.
        accepted: those of them that were accepted.
    """

    tokens: Array
    rounds: int
    drafted: int
    accepted: int

    def __str__(self) -> str:
        share = self.accepted / self.drafted if self.drafted else 0.0
        return f"{self.tokens.size:,} tokens in {self.rounds:,} rounds, {share:.1%} of {self.drafted:,} drafts accepted"


def sample(
    address: str, prompt: Sequence[int], *, length: int, samples: int, filters: Filters, seed: int, **asked: Any
) -> Run:
    """Write `samples` texts of `length` tokens after `prompt`, rounded up to whole requests; equal arguments give equal
    texts. `asked` are other `Options`; the rule is `tokenwise` where they name none.
    """
    options = Options(
        max_new_tokens=length,
        ignore_eos=True,
        temperature=filters.temperature,
        top_k=filters.top_k,
        top_p=filters.top_p,
        rule="tokenwise",
        n=SAMPLES_PER_REQUEST,
    )
    options.update(asked)  # type: ignore[typeddict-item]
    requests = -(-samples // SAMPLES_PER_REQUEST)
    return asyncio.run(_sample(address, prompt, options, [seed * 1_000_003 + number for number in range(requests)]))


async def _sample(address: str, prompt: Sequence[int], options: Options, seeds: Sequence[int]) -> Run:
    gate = asyncio.Semaphore(CALLS)
    async with AsyncClient(address, timeout=TIMEOUT_S, retry=False) as client:

        async def one(seed: int) -> Completion:
            async with gate:
                return await client.complete(prompt, **(options | Options(seed=seed)))

        samples = [sample for done in await asyncio.gather(*map(one, seeds)) for sample in done.samples]
    return Run(
        tokens=np.array([sample.token_ids for sample in samples]),
        rounds=sum(sample.statistics.num_rounds for sample in samples),
        drafted=sum(sample.statistics.num_draft_tokens for sample in samples),
        accepted=sum(sample.statistics.num_accepted_tokens for sample in samples),
    )
