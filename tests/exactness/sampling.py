"""Many samples at once through a draft service: whole outputs as an array of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.client import AsyncClient, Completion, Options
from outrider.client import Sample as CompletedSample
from tests.exactness.chisquare import Array
from tests.exactness.laws import Filters

SAMPLES_PER_REQUEST = 64
CALLS = 2
"""Requests under way at once: while one begins or ends, the other keeps the services busy."""

SEQUENCES = SAMPLES_PER_REQUEST * CALLS
FLAGS = ("--max-sequences", str(SEQUENCES))
"""What a service needs to be told to take that many."""

VERIFIER_FLAGS = FLAGS
"""And a verifier: a cap on γ follows the clock, and equal seeds are to give equal texts."""

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
    address: str,
    prompt: Sequence[int],
    *,
    length: int,
    samples: int,
    filters: Filters,
    gamma: int,
    seed: int,
    rule: str = "tokenwise",
    drafter: str | None = None,
    draft_temperature: float | None = None,
    speculation: str | None = None,
    max_entropy: float | None = None,
) -> Run:
    """Write `samples` texts of `length` tokens after `prompt`; equal arguments give equal texts.

    The number of samples is rounded up to whole requests.
    """
    options = Options(
        max_new_tokens=length,
        ignore_eos=True,
        temperature=filters.temperature,
        top_k=filters.top_k,
        top_p=filters.top_p,
        gamma=gamma,
        rule=rule,
        n=SAMPLES_PER_REQUEST,
    )
    if drafter is not None:
        options["drafter"] = drafter
    if draft_temperature is not None:
        options["draft_temperature"] = draft_temperature
    if speculation is not None:
        options["speculation"] = speculation
    if max_entropy is not None:
        options["max_entropy"] = max_entropy
    requests = -(-samples // SAMPLES_PER_REQUEST)
    return asyncio.run(_sample(address, prompt, options, [seed * 1_000_003 + number for number in range(requests)]))


async def _sample(address: str, prompt: Sequence[int], options: Options, seeds: Sequence[int]) -> Run:
    gate = asyncio.Semaphore(CALLS)
    async with AsyncClient(address, timeout=TIMEOUT_S, retry=False) as client:

        async def one(seed: int) -> Completion:
            asked = options.copy()
            asked["seed"] = seed
            async with gate:
                return await client.complete(prompt, **asked)

        return gathered([sample for done in await asyncio.gather(*map(one, seeds)) for sample in done.samples])


def gathered(samples: Sequence[CompletedSample]) -> Run:
    """Put samples of one length together."""
    return Run(
        tokens=np.array([sample.token_ids for sample in samples]),
        rounds=sum(sample.statistics.num_rounds for sample in samples),
        drafted=sum(sample.statistics.num_draft_tokens for sample in samples),
        accepted=sum(sample.statistics.num_accepted_tokens for sample in samples),
    )
