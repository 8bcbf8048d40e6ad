"""Encoder–decoder drafts in the draft's engine: proposals after any verdict, with branches and preemption."""

from __future__ import annotations

import random
from typing import Any

import pytest

from draft_service.drafters.engine import DraftEngine
from outrider.runtime.kv_cache import BLOCK_TOKENS
from tests.draft_service.engines import Driver, engine_of, running, sequence
from tests.encoder_decoders import MODELS, START, V, inputs, loaded, logits_of

GAMMA, ROUNDS = 4, 6


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("is_short", [False, True])
def test_proposals_are_the_models_likeliest_tokens(name: str, is_short: bool) -> None:
    """Four sequences in turns; verdicts accept any number of tokens. With few blocks two of them hold any."""
    coin = random.Random(3)
    own_inputs = inputs(name, 4)
    blocks = 2 * (max(-(-each.shape[-1] // BLOCK_TOKENS) for each in own_inputs) + 1)
    how: dict[str, Any] = {"blocks": blocks} if is_short else {}
    with running(engine_of(loaded(name), vocab_size=V, max_length=64, **how)) as engine:
        assert isinstance(engine, DraftEngine)
        drivers = [
            Driver(engine, sequence(temperature=0.0, prompt=[START], encoder_input=each), vocab_size=V)
            for each in own_inputs
        ]
        texts, committed = [[START] for _ in drivers], [list[int]() for _ in drivers]
        for _ in range(ROUNDS):
            for driver, own in zip(drivers, committed, strict=True):
                driver.request(GAMMA, own)
            for index, driver in enumerate(drivers):
                drafted = driver.result().token_ids
                text = texts[index]
                rows = logits_of(name, own_inputs[index], [*text, *drafted])
                assert drafted == rows[len(text) - 1 : -1].argmax(-1).tolist()
                accepted = coin.randint(0, GAMMA)
                committed[index] = [*drafted[:accepted], coin.randrange(V)]
                texts[index] += committed[index]
        for driver in drivers:
            driver.close()
    engine.cache.reset()
    engine.model_runner.pool.check_integrity()
    assert engine.model_runner.pool.used_blocks == 0
