"""Encoder–decoder pairs through both services: texts of `generate` at temperature 0, the distribution at temperature 1,
and one text under `coupled` whatever drafts, fails or runs beside it. Small models with random weights, in float32.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.client import AsyncClient, Chunk, Completion, Finished
from tests.cluster import Cluster, Service, wait_healthy
from tests.encoder_decoders import MODELS, START, V, generated, inputs, logits_of, save
from tests.exactness import chisquare, sampling
from tests.exactness.chisquare import Array
from tests.exactness.distributions import PARAMS, first_token_fits
from tests.kernels.reference import standardise

TOKENS, TEXTS = 50, 24
NOISE = 0.02
LEVEL = 0.01


def request(encoder_input: torch.Tensor) -> dict[str, Any]:
    """The prompt: token ids, or features."""
    if encoder_input.dim() == 1:
        return {"prompt": encoder_input.tolist()}
    return {"prompt": None, "features": encoder_input.numpy()}


@contextmanager
def pair(cluster: Cluster, name: str, folder: Path, *, verifiers: int = 1, **changes: Any) -> Iterator[list[Service]]:
    """A draft service, whose weights are the target's with noise, and its verifiers."""
    fault = changes.pop("fault", None)
    target, draft = save(name, folder / "target", **changes), save(name, folder / "draft", noise=NOISE, **changes)
    running = [cluster.verifier(model=target, flags=sampling.FLAGS, fault=fault) for _ in range(verifiers)]
    service = cluster.draft(*running, model=draft, flags=sampling.DRAFT_FLAGS)
    wait_healthy(*running, service)
    yield [service, *running]
    for each in (service, *running):
        each.end()


async def complete(service: Service, requests: Sequence[dict[str, Any]]) -> list[Completion]:
    async with AsyncClient(service.address, timeout=120.0) as client:
        return await asyncio.gather(*(client.complete(**each) for each in requests))


@pytest.mark.parametrize("name", list(MODELS))
def test_text_at_temperature_0_is_that_of_generate(name: str, cluster: Cluster, tmp_path: Path) -> None:
    """1,000 tokens, with the rules of `generate`: suppressed, forced and repeated tokens, bad words, timestamps."""
    own = inputs(name, TEXTS)
    kinds = (False, True) if name == "whisper" else (False,)
    with pair(cluster, name, tmp_path) as (draft, *_):
        for timestamps in kinds:
            option = {"timestamps": timestamps} if timestamps else {}
            how = {"temperature": 0.0, "max_new_tokens": TOKENS, "keep_special_tokens": True, **option}
            done = asyncio.run(
                complete(draft, [{**request(each), **how, "gamma": 1 + i % 6} for i, each in enumerate(own)])
            )
            expected = [generated(name, each, TOKENS, timestamps=timestamps) for each in own]
            assert [list(each.token_ids) for each in done] == expected
            assert sum(map(len, expected)) >= 1000
            drafted = sum(each.statistics.num_draft_tokens for each in done)
            assert 0.03 * drafted < sum(each.statistics.num_accepted_tokens for each in done) < drafted


@pytest.fixture(scope="module", params=["t5", "whisper"])
def plain(request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    with pair(cluster, request.param, folder, has_rules=False) as (draft, *_):
        yield request.param, draft


def joint_distribution(name: str, encoder_input: torch.Tensor) -> Array:
    """Of the first two tokens, `[V, V]`."""

    def after(tokens: list[int]) -> Array:
        row = logits_of(name, encoder_input, tokens)[-1].double().numpy()
        return standardise(row, PARAMS)

    first = after([START])
    return np.stack([first[token] * after([START, token]) if first[token] else np.zeros(V) for token in range(V)])


@pytest.mark.parametrize("rule", ["tokenwise", "block", "coupled"])
def test_the_first_tokens_are_distributed_as_the_targets(rule: str, plain: tuple[str, Service]) -> None:
    """512 texts: over the 9 rank classes they detect a total variation of 0.13 at a level of 1 %, with 95 % power."""
    name, draft = plain
    own = inputs(name, 2)[1]
    asked = request(own)
    run = sampling.sample(draft, asked.pop("prompt"), length=4, seed=7, samples=512, gamma=3, rule=rule, **asked)
    outcomes, classes = first_token_fits(joint_distribution(name, own), run.tokens)
    assert 0.05 * run.drafted < run.accepted < 0.95 * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= 0.13
    assert min(outcomes.p_value, classes.p_value) > LEVEL


def test_coupled_text_is_the_same_with_every_drafter_gamma_and_company(plain: tuple[str, Service]) -> None:
    name, draft = plain
    own = inputs(name, 4)
    base = {"seed": 5, "rule": "coupled", "max_new_tokens": 40, "ignore_eos": True}
    ways: list[dict[str, Any]] = [
        {"gamma": 0}, {"gamma": 1}, {"gamma": 7}, {"drafter": "lookup"}, {"drafter": "random"},
        {"speculation": "adaptive"}, {"outcome_cache": False},
    ]  # fmt: skip
    (alone,) = asyncio.run(complete(draft, [{**request(own[0]), **base, "gamma": 0}]))
    done = asyncio.run(complete(draft, [{**request(each), **base, **way} for each in own for way in ways]))
    texts = [[each.token_ids for each in done[i : i + len(ways)]] for i in range(0, len(done), len(ways))]
    assert texts[0] == [alone.token_ids] * len(ways)
    assert all(len(set(of_one)) == 1 for of_one in texts)
    assert len({of_one[0] for of_one in texts}) == len(own)


def test_a_transcription_goes_on_when_its_verifier_dies(cluster: Cluster, tmp_path: Path) -> None:
    """The next verifier gets the audio again. The text is the same as without the death."""
    sound = np.random.default_rng(1).normal(0, 0.1, 16_000).astype(np.float32)
    asked: dict[str, Any] = {"audio": sound, "sample_rate": 16_000, "seed": 3, "rule": "coupled", "gamma": 3}
    asked |= {"max_new_tokens": 60, "ignore_eos": True}

    async def write(draft: Service, victims: list[Service]) -> tuple[list[int], int]:
        ids: list[int] = []
        async with AsyncClient(draft.address, timeout=120.0, retry=False) as client:
            async for event in client.generate(None, **asked):
                if isinstance(event, Chunk):
                    ids += event.token_ids
                    if victims and len(ids) > 10:
                        count = draft.count
                        victims.sort(key=lambda each: count("outrider_verifier_sequences", verifier=each.address))
                        victims.pop().send(signal.SIGKILL)
                        victims.clear()
                elif isinstance(event, Finished):
                    return ids, event.statistics.num_failovers
        raise AssertionError("the text has no end")

    with pair(cluster, "whisper", tmp_path, verifiers=2, has_rules=False, fault="unhurried") as (draft, *verifiers):
        whole, without = asyncio.run(write(draft, []))
        cut, failovers = asyncio.run(write(draft, list(verifiers)))
    assert (without, failovers) == (0, 1)
    assert cut == whole
    assert len(whole) == 60
