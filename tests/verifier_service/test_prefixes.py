"""Prompts that begin alike, through both services: the second runs its tail alone, and writes the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.client import AsyncClient, Client, Completion
from outrider.rpc.errors import internal
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.model_runner import Chunk
from outrider.service.metrics import Metrics
from tests.cluster import MODELS
from tests.verifier_service.test_sequence import make
from verifier_service.app import build_engine, find_path
from verifier_service.engine import Close, Open, VerifierEngine
from verifier_service.metrics import SpeculationMetrics
from verifier_service.settings import VerifierSettings

SHARED = [5 + 7 * i % 900 for i in range(3 * BLOCK_TOKENS)]


def _complete(address: str, tail: list[int], **options: Any) -> Completion:
    asked = {"max_new_tokens": 12, "ignore_eos": True, "seed": 3, "gamma": 3, "cache_salt": "a test", **options}
    with Client(address) as client:
        return client.complete(SHARED + tail, **asked)


def test_a_prompt_that_begins_alike_is_not_run_again(draft_address: str) -> None:
    """In float32, by the noise of the seed: the same text, from keys and values that another request has left."""
    first = _complete(draft_address, [9, 8])
    again = _complete(draft_address, [9, 8])
    other = _complete(draft_address, [7])
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, len(SHARED))
    assert other.usage.cached_tokens == len(SHARED)
    assert again.token_ids == first.token_ids
    assert _complete(draft_address, [7], cache_salt="without a past").token_ids == other.token_ids


def test_a_dialogue_goes_on_from_what_was_written(draft_address: str) -> None:
    """The output of one request is the prompt of the next, and is at hand but for its last tokens."""
    first = _complete(draft_address, [], max_new_tokens=2 * BLOCK_TOKENS, cache_salt="a dialogue")
    told = _complete(draft_address, [*first.token_ids, 11], cache_salt="a dialogue")
    assert told.usage.cached_tokens == 4 * BLOCK_TOKENS  # the last block lacks its last token, which was not run


def test_salts_keep_tenants_apart(draft_address: str) -> None:
    _complete(draft_address, [1], cache_salt="one tenant")
    assert _complete(draft_address, [1], cache_salt="another").usage.cached_tokens == 0


def test_while_one_still_writes_another_uses_its_prompt(draft_address: str) -> None:
    async def both() -> int:
        options: dict[str, Any] = {"ignore_eos": True, "seed": 3, "cache_salt": "at once"}
        async with AsyncClient(draft_address) as client:
            long = client.generate(SHARED, max_new_tokens=400, **options)
            async for event in long:
                if hasattr(event, "text"):
                    break
            done = await client.complete([*SHARED, 4], max_new_tokens=2, **options)
            await long.aclose()
            return done.usage.cached_tokens

    assert asyncio.run(both()) == len(SHARED)


@pytest.fixture(scope="module")
def engine() -> VerifierEngine:
    settings = VerifierSettings.from_command_line(
        ["--model", str(MODELS / "target"), "--device", "cpu", "--max-sequences", "2", "--max-sequence-tokens", "128"],
        program="verifier_service",
    )
    return build_engine(settings, find_path(settings), SpeculationMetrics(Metrics(), "torch"))[0]


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_failed_sequence_leaves_is_not_used(engine: VerifierEngine, fails: bool) -> None:
    """Its keys and values may be no numbers, and would spoil all that follow."""
    sequence = make([])
    sequence.tokens = SHARED[: BLOCK_TOKENS + 1]
    engine.receive(Open(sequence))
    assert sequence.slot is not None
    engine.model_runner.forward([Chunk(sequence.slot, sequence.tokens[:-1], 0, 0)])
    if fails:
        sequence.end(internal("BAD_LOGITS", "no numbers"))
    engine.receive(Close(sequence))
    assert engine.prefixes.find(SHARED) == (0 if fails else BLOCK_TOKENS)
    engine.model_runner.pool.check_integrity()
