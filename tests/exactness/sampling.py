"""Draws many samples through a draft service."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kernels.sampling import SamplingParams
from outrider.client import AsyncClient, Completion, Options, Statistics
from outrider.evaluation.chisquare import Array
from tests.cluster import Service
from tests.exactness.distributions import PARAMS

SAMPLES = 64
"""Of one request."""
CALLS = 2
"""Requests in progress: while one begins or ends, the other keeps the services busy."""

FLAGS = ("--max-sequences", str(SAMPLES * CALLS))
DRAFT_FLAGS = (*FLAGS, "--max-samples", str(SAMPLES))

TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Run:
    """Many samples of one length.

    Attributes:
        tokens: `[N, length]`.
        rounds: rounds of all samples.
        drafts: proposals of all samples.
        cache_hits: proposals that came from the outcome cache.
        drafted: drafted tokens of all samples.
        accepted: those of them that were accepted.
        gammas: how many rounds had each γ.
    """

    tokens: Array
    rounds: int
    drafts: int
    cache_hits: int
    drafted: int
    accepted: int
    gammas: Counter[int]


def sample(
    service: Service,
    prompt: Sequence[int],
    *,
    length: int,
    seed: int | None,
    samples: int = SAMPLES,
    params: SamplingParams = PARAMS,
    **options: Any,
) -> Run:
    """Write `samples` texts of `length` tokens, rounded up to whole requests; equal arguments give equal texts, unless
    `seed` is None: then the services draw all seeds.

    `options` are other `Options`; the rule is `tokenwise` if they name none.
    """
    every = Options(
        max_new_tokens=length,
        ignore_eos=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        rule="tokenwise",
        n=SAMPLES,
    )
    every.update(options)  # type: ignore[typeddict-item]
    count = -(-samples // SAMPLES)
    seeds = [None] * count if seed is None else [seed * 1_000_003 + number for number in range(count)]
    texts = [text for done in asyncio.run(_complete(service.address, prompt, every, seeds)) for text in done.samples]
    run = Run(
        tokens=np.array([text.token_ids for text in texts]),
        rounds=sum(text.statistics.num_rounds for text in texts),
        drafts=sum(text.statistics.num_drafts for text in texts),
        cache_hits=sum(text.statistics.num_outcome_cache_hits for text in texts),
        drafted=sum(text.statistics.num_draft_tokens for text in texts),
        accepted=sum(text.statistics.num_accepted_tokens for text in texts),
        gammas=sum((gammas_of(text.statistics) for text in texts), Counter[int]()),
    )
    print(f"{run.tokens.size:,} tokens in {run.rounds:,} rounds; {run.accepted:,} of {run.drafted:,} drafts accepted")
    return run


def gammas_of(statistics: Statistics) -> Counter[int]:
    """Count the rounds of each γ: those with a token at a position less those with one at the next."""
    longer = [statistics.num_rounds, *statistics.num_draft_tokens_per_pos, 0]
    return Counter({gamma: most - more for gamma, (most, more) in enumerate(pairwise(longer))})


async def _complete(
    address: str, prompt: Sequence[int], options: Options, seeds: Sequence[int | None]
) -> list[Completion]:
    gate = asyncio.Semaphore(CALLS)
    async with AsyncClient(address, timeout=TIMEOUT_S, retry=False) as client:

        async def complete(seed: int | None) -> Completion:
            given = Options() if seed is None else Options(seed=seed)
            async with gate:
                return await client.complete(prompt, **(options | given))

        return await asyncio.gather(*map(complete, seeds))
