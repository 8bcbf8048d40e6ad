"""The prefix cache: what is restored is what was there; eviction, salts, and random operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.lm.errors import PoolCorrupted
from outrider.lm.kv_pool import KVPool
from outrider.lm.prefix_cache import Prefix, PrefixCache

BLOCK = 4
PER_TOKEN = 2 * (2 * 3 + 1 * 5) * 4  # keys and values of two layers of unlike shape, float32


def _pool() -> KVPool:
    return KVPool(2, [2, 1], [3, 5], max_sequences=3, max_length=24, dtype=torch.float32, device="cpu")


def _cache(pool: KVPool, blocks: int = 100) -> PrefixCache:
    return PrefixCache(pool, capacity=blocks * BLOCK * PER_TOKEN, block_tokens=BLOCK)


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
    views = pool.views(slot, 0, len(tokens))
    return all(
        bool((each[layer][:, 0, i] == _value(tokens[: i + 1], layer)).all())
        for each in (views.keys, views.values)
        for layer in range(2)
        for i in range(len(tokens))
    )


def test_a_prefix_is_restored_as_it_was() -> None:
    pool = _pool()
    cache = _cache(pool)
    slot = pool.allocate()
    tokens = list(range(10))
    _fill(pool, slot, tokens)
    cache.keep(slot, tokens)
    pool.free(slot)

    found = cache.find([*range(8), 99, 98])
    assert found.length == 8
    other = pool.allocate()
    cache.restore(other, found)
    assert pool.length(other) == 8
    assert _holds(pool, other, tokens[:8])


def test_the_last_token_is_never_found() -> None:
    """It has to be run, for its logits."""
    pool = _pool()
    cache = _cache(pool)
    slot = pool.allocate()
    _fill(pool, slot, list(range(8)))
    cache.keep(slot, list(range(8)))
    assert cache.find(list(range(8))).length == 4
    assert cache.find(list(range(9))).length == 8


def test_what_differs_early_shares_nothing_later() -> None:
    pool = _pool()
    cache = _cache(pool)
    slot = pool.allocate()
    _fill(pool, slot, list(range(12)))
    cache.keep(slot, list(range(12)))
    assert cache.find([7, *range(1, 13)]).length == 0
    assert cache.find([0, 1, 2, 3, 9, 5, 6, 7, 8, 9, 10, 11, 12]).length == 4


def test_salts_keep_prefixes_apart() -> None:
    pool = _pool()
    cache = _cache(pool)
    slot = pool.allocate()
    tokens = list(range(9))
    _fill(pool, slot, tokens)
    cache.keep(slot, tokens, "one tenant")
    assert cache.find(tokens).length == 0
    assert cache.find(tokens, "another").length == 0
    assert cache.find(tokens, "one tenant").length == 8


def test_what_was_not_used_for_longest_goes_first_and_ends_before_beginnings() -> None:
    pool = _pool()
    cache = _cache(pool, blocks=3)
    texts = [[10 * n + i for i in range(9)] for n in range(2)]
    for tokens in texts:  # two blocks each: one has to go, the end of the first text
        slot = pool.allocate()
        _fill(pool, slot, tokens)
        cache.keep(slot, tokens)
        pool.free(slot)
        cache.check_integrity()
    assert [cache.find(tokens).length for tokens in texts] == [4, 8]


def test_a_prefix_that_is_held_outlives_its_eviction() -> None:
    pool = _pool()
    cache = _cache(pool, blocks=2)
    slot = pool.allocate()
    tokens = list(range(9))
    _fill(pool, slot, tokens)
    cache.keep(slot, tokens)
    held = cache.find(tokens)
    pool.rollback(slot, 0)
    _fill(pool, slot, list(range(50, 59)))
    cache.keep(slot, list(range(50, 59)))
    assert cache.find(tokens).length == 0
    pool.rollback(slot, 0)
    cache.restore(slot, held)
    assert _holds(pool, slot, tokens[:8])


def test_without_room_nothing_is_kept() -> None:
    pool = _pool()
    cache = PrefixCache(pool, capacity=0, block_tokens=BLOCK)
    slot = pool.allocate()
    _fill(pool, slot, list(range(8)))
    cache.keep(slot, list(range(8)))
    assert (cache.size, cache.find(list(range(9)))) == (0, Prefix())


def test_only_an_empty_slot_takes_a_prefix() -> None:
    pool = _pool()
    cache = _cache(pool)
    slot = pool.allocate()
    _fill(pool, slot, list(range(8)))
    cache.keep(slot, list(range(8)))
    with pytest.raises(ValueError, match=r"slot \d holds 8 positions; a prefix needs an empty one"):
        cache.restore(slot, cache.find(list(range(9))))


def test_a_lost_beginning_is_noticed() -> None:
    pool = _pool()
    cache = _cache(pool)
    slot = pool.allocate()
    _fill(pool, slot, list(range(8)))
    cache.keep(slot, list(range(8)))
    cache.check_integrity()
    cache._blocks.popitem(last=True)  # the beginning, which was used last
    with pytest.raises(PoolCorrupted):
        cache.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_operations_restore_what_was_there(data: st.DataObject) -> None:
    """Texts over two tokens, so that they share much; a small cache, so that blocks go all the time."""
    pool = _pool()
    cache = _cache(pool, blocks=data.draw(st.integers(0, 6)))
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
        salt = data.draw(st.sampled_from(["", "a"]))
        slot = pool.allocate()
        prefix = cache.find(tokens, salt)
        assert prefix.length % BLOCK == 0
        assert prefix.length < len(tokens)
        cache.restore(slot, prefix)
        assert _holds(pool, slot, tokens[: prefix.length])
        _fill(pool, slot, tokens)
        cache.keep(slot, tokens, salt)
        assert cache.size <= cache._capacity
        pool.free(slot)
        cache.check_integrity()
        pool.check_integrity()
