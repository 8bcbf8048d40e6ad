"""Sequences hold what was written to them, shared or not and wherever blocks lie; refusals; preemption; prefixes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.runtime.block_pool import BlockPool, PoolExhausted
from outrider.runtime.kv_cache import KVPool, PrefixCache, grow_with_preemption

BLOCK = 4


def make(blocks: int = 9, max_length: int = 12, kv_heads: int | list[int] = 2, head_dim: int | list[int] = 4) -> KVPool:
    memory: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "block_tokens": BLOCK}
    return KVPool(2, kv_heads, head_dim, blocks=blocks, max_length=max_length, **memory)


def fill(pool: KVPool, slot: int, start: int, end: int, value: float) -> None:
    for new in pool.views(slot, start, end).new:
        new.fill_(value)
    pool.extend(slot, end)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_impossible_lengths_are_refused_with_both_numbers() -> None:
    pool = make()
    slot, other = pool.allocate(), pool.allocate()
    fill(pool, slot, 0, 5, 1)
    for call, named in (
        (lambda: pool.rollback(slot, 6), r"holds 5 positions; .* rolled back to 6"),
        (lambda: pool.extend(slot, 9), r"holds 5 positions in blocks for 8; .* extended to 9"),
        (lambda: pool.grow(slot, 13), "grow to 13 positions; max_length is 12"),
        (lambda: pool.share(slot, [0], 4), "only an empty one shares blocks"),
        (lambda: pool.share(other, [0], 9), "9 positions need 3 blocks; 1 were given"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    assert pool.length(slot) == 5


def test_a_full_pool_refuses_and_stays_as_it_was() -> None:
    pool = make(blocks=3)
    slot, other = pool.allocate(), pool.allocate()
    fill(pool, slot, 0, 6, 1)
    with pytest.raises(PoolExhausted, match=r"needs 2 more blocks for 8 positions; 1 of 3 are free"):
        pool.grow(other, 8)
    assert pool.used_blocks == 2
    fork = pool.fork(slot)
    assert [pool.blocks_needed(fork, length) for length in (6, 7, 8, 9)] == [0, 1, 1, 2], "its begun block is shared"
    pool.grow(fork, 7)
    with pytest.raises(PoolExhausted):
        pool.grow(fork, 9)
    pool.check_integrity()


def test_as_few_as_need_be_are_preempted_in_order_or_none() -> None:
    pool = make(blocks=4)
    slots = [pool.allocate() for _ in range(4)]
    for slot in slots[:3]:
        fill(pool, slot, 0, 4, slot)
    assert grow_with_preemption(pool, slots[3], 4, slots[:3]) == []
    pool.rollback(slots[3], 0)
    assert grow_with_preemption(pool, slots[3], 8, [slots[2], slots[0]]) == [slots[2]]
    assert [pool.length(slot) for slot in slots] == [4, 4, 0, 0]
    pool.rollback(slots[3], 0)
    assert grow_with_preemption(pool, slots[3], 12, [slots[0]], spare=1) is None, "all would not suffice"
    assert [pool.length(slot) for slot in slots] == [4, 4, 0, 0]
    assert grow_with_preemption(pool, slots[3], 12, [slots[0]]) == [slots[0]]


# ------------------------------------------------------------------------------------------------------------- prefixes


def prefixes(blocks: int = 24) -> tuple[KVPool, PrefixCache]:
    pool = make(blocks, 24, [2, 1], [3, 5])
    return pool, PrefixCache(pool)


def write(pool: KVPool, slot: int, tokens: list[int]) -> None:
    """Write what a model would: at each position something that depends on all tokens up to it."""
    start = pool.length(slot)
    for layer, new in enumerate(pool.views(slot, start, len(tokens)).new):
        for i in range(start, len(tokens)):
            new[:, :, i - start] = value_of(tokens[: i + 1], layer)
    pool.extend(slot, len(tokens))


def value_of(tokens: list[int], layer: int) -> float:
    return float(hash((layer, *tokens)) % 65521)


def holds(pool: KVPool, slot: int, tokens: list[int]) -> bool:
    views = pool.views(slot, len(tokens), len(tokens))
    return all(
        bool((each[layer][:, 0, i] == value_of(tokens[: i + 1], layer)).all())
        for each in (views.keys, views.values)
        for layer in range(2)
        for i in range(len(tokens))
    )


def kept(pool: KVPool, cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """A slot with these tokens, in the cache."""
    slot = pool.allocate()
    cache.adopt(slot, tokens, salt)
    write(pool, slot, tokens)
    cache.keep(slot, tokens, salt)
    return slot


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_prefix_is_found_and_shared_also_after_its_sequence_has_ended(is_freed: bool) -> None:
    pool, cache = prefixes()
    tokens = list(range(10))
    slot = kept(pool, cache, tokens)
    table = pool.block_table(slot)[:2]
    if is_freed:
        pool.free(slot)
    assert pool.used_blocks == (0 if is_freed else 3)
    other = pool.allocate()
    assert cache.adopt(other, [*range(8), 99, 98]) == pool.length(other) == 8
    assert pool.block_table(other) == table
    assert pool.used_blocks == (2 if is_freed else 3)
    assert holds(pool, other, tokens[:8])


def test_whole_blocks_of_equal_tokens_are_found_but_the_last_token() -> None:
    """The last token has to be run, for its logits."""
    pool, cache = prefixes()
    kept(pool, cache, list(range(12)))
    kept(pool, cache, list(range(50, 59)), "one tenant")
    for tokens, found in (
        (list(range(8)), 4),
        (list(range(9)), 8),
        ([7, *range(1, 13)], 0),
        ([0, 1, 2, 3, 9, *range(5, 13)], 4),
        (list(range(50, 59)), 0),
    ):
        assert cache.find(tokens) == found
    assert [cache.find(list(range(50, 59)), salt) for salt in ("another", "one tenant")] == [0, 8]
    disabled = PrefixCache(pool, enabled=False)
    kept(pool, disabled, list(range(8)))
    assert disabled.find(list(range(9))) == 0


def test_eviction_takes_the_least_recently_used_and_ends_before_beginnings() -> None:
    pool, cache = prefixes(blocks=5)
    texts = [[10 * n + i for i in range(9)] for n in range(2)]
    for tokens in texts:  # two full blocks each, and one that is not
        pool.free(kept(pool, cache, tokens))
    for lengths in ([8, 8], [4, 8], [0, 8], [0, 4]):
        pool.blocks.take()
        assert [cache.find(tokens) for tokens in texts] == lengths


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_operations_find_what_was_written(data: st.DataObject) -> None:
    """Texts over two tokens, so that they share much; a small pool, so that blocks are evicted all the time."""
    pool, cache = prefixes(blocks=data.draw(st.integers(6, 14)))
    running: list[tuple[int, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
        salt = data.draw(st.sampled_from(["", "a"]))
        slot = pool.allocate(data.draw(st.integers(0, 24)))
        length = cache.adopt(slot, tokens, salt)
        assert length % BLOCK == 0
        assert length < len(tokens)
        assert holds(pool, slot, tokens[:length])
        while running and pool.blocks_needed(slot, len(tokens)) > pool.blocks.num_free:
            pool.free(running.pop(0)[0])
        write(pool, slot, tokens)
        cache.keep(slot, tokens, salt)
        running.append((slot, tokens))
        if data.draw(st.booleans()):
            pool.free(running.pop()[0])
        assert all(holds(pool, *each) for each in running)
        pool.check_integrity()


# ---------------------------------------------------------------------------------------------------- random operations


def name_of(text: list[float]) -> bytes:
    return repr(text).encode()


def extend(pool: KVPool, slot: int, text: list[float], new: list[float], *, fails: bool) -> None:
    """Write to a slot; where there is no room, or the step fails, it holds what it held."""
    end = len(text) + len(new)
    if pool.blocks_needed(slot, end) > pool.blocks.num_free:
        with pytest.raises(PoolExhausted):
            pool.grow(slot, end)
        return
    for tensor in pool.views(slot, len(text), end).new:
        tensor[:, :, :, 0] = torch.tensor(new)
    if not fails:
        pool.extend(slot, end)
        text += new


def share(pool: KVPool, slot: int, text: list[float]) -> list[float]:
    """Give an empty slot the blocks that are cached of a text; return what it then holds."""
    found: list[int] = []
    for end in range(BLOCK, len(text) + 1, BLOCK):
        block = pool.blocks.find(name_of(text[:end]))
        if block is None:
            break
        found.append(block)
    pool.share(slot, found, len(found) * BLOCK)
    return text[: len(found) * BLOCK]


def assert_held(pool: KVPool, texts: dict[int, list[float]]) -> None:
    pool.check_integrity()
    for slot, text in texts.items():
        assert pool.length(slot) == len(text)
        if text:
            views = pool.views(slot, len(text), len(text))
            assert all(tensor[0, 0, :, 0].tolist() == text for tensor in (*views.keys, *views.values))


def test_sequences_hold_what_was_written_to_them_whatever_is_done() -> None:
    """Begun, forked, shared by name, extended, rolled back, preempted and ended in any order, in a small pool."""
    rng, pool = random.Random(5), make(blocks=8, max_length=24, kv_heads=1, head_dim=1)
    texts: dict[int, list[float]] = {}
    for step in range(3000):
        if not texts or (len(texts) < 5 and rng.random() < 0.1):
            texts[pool.allocate(rng.randint(0, 24))] = []
        slot, other = rng.choice(list(texts)), rng.choice(list(texts))
        text = texts[slot]
        match rng.choice(["extend", "extend", "fork", "free", "roll back", "keep", "share", "preempt"]):
            case "extend":
                new = [10.0 * step + i for i in range(min(rng.randint(1, 9), 24 - len(text)))]
                extend(pool, slot, text, new, fails=rng.random() < 0.2)
            case "fork" if len(texts) < 5:
                texts[pool.fork(slot)] = list(text)
            case "free":
                pool.free(slot)
                del texts[slot]
            case "roll back":
                pool.rollback(slot, rng.randint(0, len(text)))
                del text[pool.length(slot) :]
            case "keep":
                for number, block in enumerate(pool.block_table(slot)[: len(text) // BLOCK], start=1):
                    pool.blocks.cache(block, name_of(text[: number * BLOCK]))
            case "share" if pool.is_empty(slot):
                texts[slot] = share(pool, slot, texts[other])
            case "preempt":
                victims = grow_with_preemption(
                    pool, slot, rng.randint(len(text), 24), [each for each in texts if each != slot]
                )
                assert victims is not None, "all others together hold the rest of the pool"
                texts |= {victim: [] for victim in victims}
        assert_held(pool, texts)
    for slot in texts:
        pool.free(slot)
    assert pool.used_blocks == 0


def test_a_cached_block_is_forgotten_once_its_owner_writes_it_anew() -> None:
    pool = make()
    slot = pool.allocate()
    fill(pool, slot, 0, 4, 1)
    pool.blocks.cache(pool.block_table(slot)[0], b"ones")
    pool.rollback(slot, 2)
    fill(pool, slot, 2, 4, 2)
    assert pool.blocks.find(b"ones") is None


def test_blocks_keep_their_counts_whatever_is_done() -> None:
    rng = random.Random(3)
    blocks = BlockPool(12)
    held: list[int] = []
    runs: list[range] = []
    for step in range(4000):
        match rng.choice(["take", "hold", "release", "release", "cache", "reserve", "unreserve"]):
            case "take" if blocks.num_free:
                block = blocks.take(rng.choice([None, rng.randrange(12)]))
                assert block not in held
                held.append(block)
            case "hold":
                held.append(rng.randrange(12))
                blocks.hold(held[-1])
            case "release" if held:
                blocks.release(held.pop(rng.randrange(len(held))))
            case "cache" if held:
                blocks.cache(rng.choice(held), b"%d" % (step % 7))
            case "reserve":
                count = rng.randint(1, 5)
                start = blocks.reserve(count)
                if start is not None:
                    run = range(start, start + count)
                    assert not any(set(run) & set(other) for other in runs)
                    runs.append(run)
            case "unreserve" if runs:
                blocks.unreserve(runs.pop(rng.randrange(len(runs))))
        blocks.check_integrity([held])
        assert blocks.num_free == 12 - len(set(held))
