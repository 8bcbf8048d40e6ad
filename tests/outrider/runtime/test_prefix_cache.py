"""Prefixes by hash: what is found is what was there, shared and not copied; eviction, salts, and random operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.runtime.kv_cache import KVPool, PrefixCache

BLOCK = 4


def _pool(blocks: int = 24) -> KVPool:
    return KVPool(
        2, [2, 1], [3, 5], blocks=blocks, max_length=24, dtype=torch.float32, device="cpu", block_tokens=BLOCK
    )


def _fill(pool: KVPool, slot: int, tokens: list[int]) -> None:
    """Write what a model would: at each position something that depends on all tokens up to it."""
    start = pool.length(slot)
    views = pool.views(slot, start, len(tokens))
    for layer, new in enumerate(views.new):
        for i in range(start, len(tokens)):
            new[:, :, i - start] = _value(tokens[: i + 1], layer)
    pool.extend(slot, len(tokens))


def _value(tokens: list[int], layer: int) -> float:
    return float(hash((layer, *tokens)) % 65521)


def _holds(pool: KVPool, slot: int, tokens: list[int]) -> bool:
    views = pool.views(slot, len(tokens), len(tokens))
    return all(
        bool((each[layer][:, 0, i] == _value(tokens[: i + 1], layer)).all())
        for each in (views.keys, views.values)
        for layer in range(2)
        for i in range(len(tokens))
    )


def _kept(pool: KVPool, cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """A slot with these tokens, remembered."""
    slot = pool.allocate()
    cache.adopt(slot, tokens, salt)
    _fill(pool, slot, tokens)
    cache.keep(slot, tokens, salt)
    return slot


def test_a_prefix_is_found_as_it_was_and_shared() -> None:
    pool = _pool()
    cache = PrefixCache(pool)
    tokens = list(range(10))
    slot = _kept(pool, cache, tokens)
    assert cache.find([*range(8), 99, 98]) == 8
    other = pool.allocate()
    assert cache.adopt(other, [*range(8), 99, 98]) == pool.length(other) == 8
    assert pool.block_table(other) == pool.block_table(slot)[:2]
    assert pool.used_blocks == 3
    assert _holds(pool, other, tokens[:8])


def test_it_is_found_after_its_sequence_has_gone() -> None:
    pool = _pool()
    cache = PrefixCache(pool)
    tokens = list(range(10))
    pool.free(_kept(pool, cache, tokens))
    assert pool.used_blocks == 0
    other = pool.allocate()
    assert cache.adopt(other, tokens) == 8
    assert _holds(pool, other, tokens[:8])


def test_the_last_token_is_never_found() -> None:
    """It has to be run, for its logits."""
    pool = _pool()
    cache = PrefixCache(pool)
    _kept(pool, cache, list(range(8)))
    assert cache.find(list(range(8))) == 4
    assert cache.find(list(range(9))) == 8


def test_what_differs_early_shares_nothing_later() -> None:
    pool = _pool()
    cache = PrefixCache(pool)
    _kept(pool, cache, list(range(12)))
    assert cache.find([7, *range(1, 13)]) == 0
    assert cache.find([0, 1, 2, 3, 9, 5, 6, 7, 8, 9, 10, 11, 12]) == 4


def test_salts_keep_prefixes_apart() -> None:
    pool = _pool()
    cache = PrefixCache(pool)
    tokens = list(range(9))
    _kept(pool, cache, tokens, "one tenant")
    assert cache.find(tokens) == 0
    assert cache.find(tokens, "another") == 0
    assert cache.find(tokens, "one tenant") == 8


def test_what_was_not_used_for_longest_goes_first_and_ends_before_beginnings() -> None:
    pool = _pool(blocks=5)
    cache = PrefixCache(pool)
    texts = [[10 * n + i for i in range(9)] for n in range(2)]
    for tokens in texts:  # two full blocks each, and one that is not
        pool.free(_kept(pool, cache, tokens))
    for known in ([8, 8], [4, 8], [0, 8], [0, 4]):
        pool.blocks.take()
        assert [cache.find(tokens) for tokens in texts] == known


def test_what_is_held_outlives_any_need_for_blocks() -> None:
    pool = _pool(blocks=6)
    cache = PrefixCache(pool)
    tokens = list(range(9))
    pool.free(_kept(pool, cache, tokens))
    slot = pool.allocate()
    cache.adopt(slot, tokens)
    other = pool.allocate()
    _fill(pool, other, list(range(50, 66)))
    assert _holds(pool, slot, tokens[:8])
    assert cache.find(tokens) == 8


def test_switched_off_it_knows_nothing() -> None:
    pool = _pool()
    cache = PrefixCache(pool, enabled=False)
    _kept(pool, cache, list(range(8)))
    assert cache.find(list(range(9))) == 0


def test_only_an_empty_slot_takes_a_prefix() -> None:
    pool = _pool()
    cache = PrefixCache(pool)
    slot = _kept(pool, cache, list(range(8)))
    with pytest.raises(ValueError, match=r"slot \d holds 8 positions; only an empty one shares blocks"):
        cache.adopt(slot, list(range(9)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_operations_find_what_was_there(data: st.DataObject) -> None:
    """Texts over two tokens, so that they share much; a small pool, so that blocks go all the time."""
    pool = _pool(blocks=data.draw(st.integers(6, 14)))
    cache = PrefixCache(pool)
    running: list[tuple[int, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
        salt = data.draw(st.sampled_from(["", "a"]))
        slot = pool.allocate(data.draw(st.integers(0, 24)))
        length = cache.adopt(slot, tokens, salt)
        assert length % BLOCK == 0
        assert length < len(tokens)
        assert _holds(pool, slot, tokens[:length])
        while running and pool.blocks_needed(slot, len(tokens)) > pool.blocks.num_free:
            pool.free(running.pop(0)[0])
        _fill(pool, slot, tokens)
        cache.keep(slot, tokens, salt)
        running.append((slot, tokens))
        if data.draw(st.booleans()):
            pool.free(running.pop()[0])
        assert all(_holds(pool, *each) for each in running)
        pool.check_integrity()
